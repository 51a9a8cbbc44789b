"""The matcher for nondeterministic automata: the text so far may be in several configurations.

Two recursive rules that begin alike, say a tree and any object, are both called, and each configuration has a
stack of its own. A token is allowed if any configuration allows it; the shortest completion is that of the
cheapest one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ramify.grammar.engine.configurations import ConfigurationMatcher
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.engine.stack import Entry

MOST_CONFIGURATIONS = 256
"""Most configurations that are followed; of more, those with the longest completions are given up. Schemas
have a few: one for each level at which an object may belong to one or another option."""

MOST_FORCED = 512
"""Most bytes of forced text that are looked for at once."""

Configuration = tuple[int, Entry | None]


class NondeterministicMatcher(ConfigurationMatcher[Configuration]):
    """A matcher that follows every configuration."""

    @classmethod
    def begin(cls, grammar: PushdownGrammar) -> NondeterministicMatcher:
        return cls.at(grammar, (0, None))

    def accept_bytes(self, data: bytes) -> bool:
        here = self._step.configurations
        for byte in data:
            here = after_byte(self._grammar, here, byte)
            if len(here) > MOST_CONFIGURATIONS:
                here = tuple(sorted(here, key=self._cost)[:MOST_CONFIGURATIONS])
        return bool(here) and self._advance(here)

    def forced_bytes(self) -> bytes:
        return forced_in_all(self._grammar, self._step.configurations)


def after_byte(
    grammar: PushdownGrammar, configurations: Sequence[Configuration], byte: int
) -> tuple[Configuration, ...]:
    """The configurations after `byte`, after the returns that are certain."""
    lists = grammar.lists
    found: dict[Configuration, None] = {}
    branches = [(state, stack, False) for state, stack in configurations]
    while branches:
        state, stack, entered = branches.pop()
        # A rule that was called for this byte reads it: the caller has edges of its own for an empty rule.
        if lists.final[state] and stack is not None and not entered:
            branches.append((stack.state, stack.parent, False))
        for low, high, target, push in zip(*lists.edges(state), strict=True):
            if low <= byte <= high:
                over = stack if push < 0 else grammar.stacks.pushed(push, stack)
                if target >= 0:
                    found[grammar.returned(target, over)] = None
                else:
                    branches.append((~target, over, True))
    return tuple(found)


def forced_in_all(grammar: PushdownGrammar, configurations: Sequence[Configuration]) -> bytes:
    """Bytes that must come next in every one of `configurations`."""
    final = grammar.lists.final
    found = bytearray()
    here = tuple(configurations)
    while 0 < len(here) <= MOST_CONFIGURATIONS and len(found) < MOST_FORCED:
        if any(final[state] and (stack is None or stack.complete) for state, stack in here):
            break
        byte = _only_byte(grammar, here)
        if byte is None:
            break
        found.append(byte)
        here = after_byte(grammar, here, byte)
    return bytes(found)


def _only_byte(grammar: PushdownGrammar, configurations: Sequence[Configuration]) -> int | None:
    """The one byte that all edges of `configurations` read, returns included, or None."""
    lists = grammar.lists
    found: set[int] = set()
    for configuration in configurations:
        state, stack = configuration
        while True:
            low, high, _, _ = lists.edges(state)
            if low != high:
                return None
            found.update(low)
            if len(found) > 1:
                return None
            if not lists.final[state] or stack is None:
                break
            state, stack = stack.state, stack.parent
    return found.pop() if found else None
