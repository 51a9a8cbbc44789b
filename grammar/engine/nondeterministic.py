"""The matcher for nondeterministic automata: the text so far may be in several configurations.

Two recursive rules that begin alike, say a tree and any object, are both called, and each configuration has a
stack of its own. A token is allowed if any configuration allows it; the shortest completion is that of the
configuration with the least cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from ramify.grammar.engine.configurations import ConfigurationMatcher
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.engine.stack import Entry

MOST_CONFIGURATIONS = 256
"""Most configurations that are followed. If there are more, those with the longest completions are dropped.
Schemas have a few: one for each level at which an object may belong to one or another option."""

MOST_FORCED = 512
"""Most bytes that one call of `forced_bytes` returns."""

C = TypeVar("C", bound=tuple[Any, ...])


class BranchingMatcher(ConfigurationMatcher[C]):
    """A matcher that follows every configuration.

    A subclass defines the return of a configuration (`_returned`) and a step along an edge (`_stepped`).
    """

    def _returned(self, configuration: C) -> C | None:
        """The configuration after a return; None if the rule cannot end here."""
        raise NotImplementedError

    def _stepped(self, configuration: C, target: int, push: int, byte: int) -> C | None:
        """The configuration after an edge that reads `byte`, or that calls a rule which will read `byte`;
        None if the edge may not be taken."""
        raise NotImplementedError

    def _after_byte(self, configurations: Iterable[C], byte: int) -> tuple[C, ...]:
        edges_of = self._grammar.lists.edges
        found: dict[C, None] = {}
        branches = [(configuration, False) for configuration in configurations]
        while branches:
            here, entered = branches.pop()
            # A rule called for this byte must read it. If the rule is empty, the caller's edges apply.
            back = None if entered else self._returned(here)
            if back is not None:
                branches.append((back, False))
            for low, high, target, push in zip(*edges_of(here[0]), strict=True):
                if low <= byte <= high:
                    after = self._stepped(here, target, push, byte)
                    if after is not None and target >= 0:
                        found[after] = None
                    elif after is not None:
                        branches.append((after, True))
        return tuple(found)

    def _after(self, configurations: tuple[C, ...], data: bytes) -> tuple[C, ...]:
        for byte in data:
            configurations = self._after_byte(configurations, byte)
            if len(configurations) > MOST_CONFIGURATIONS:
                configurations = tuple(sorted(configurations, key=self._cost)[:MOST_CONFIGURATIONS])
        return configurations

    def accept_bytes(self, data: bytes) -> bool:
        after = self._after(self._step.configurations, data)
        return bool(after) and self._advance(after)

    def forced_bytes(self) -> bytes:
        found = bytearray()
        here = self._step.configurations
        while 0 < len(here) <= MOST_CONFIGURATIONS and len(found) < MOST_FORCED:
            byte = None if any(map(self._may_end, here)) else self._only_byte(here)
            if byte is None:
                break
            found.append(byte)
            here = self._after_byte(here, byte)
        return bytes(found)

    def _only_byte(self, configurations: Iterable[C]) -> int | None:
        """The only byte that any of `configurations` can read; None if there is no such byte, or several."""
        only = None
        for configuration in configurations:
            here: C | None = configuration
            while here is not None:
                low, high, _, _ = self._grammar.lists.edges(here[0])
                for first, last in zip(low, high, strict=True):
                    if (first != only or first != last) and self._after_byte([configuration], first):
                        if only is not None or first != last:
                            return None
                        only = first
                here = self._returned(here)
        return only


class NondeterministicMatcher(BranchingMatcher[tuple[int, Entry | None]]):
    """A matcher for nondeterministic automata whose rules remember nothing: a configuration is a state and a
    stack."""

    @classmethod
    def at_beginning(cls, grammar: PushdownGrammar) -> NondeterministicMatcher:
        return cls.starting(grammar, (0, None))

    def _returned(self, configuration: tuple[int, Entry | None]) -> tuple[int, Entry | None] | None:
        state, stack = configuration
        return None if stack is None or not self._grammar.lists.final[state] else (stack.state, stack.parent)

    def _stepped(
        self, configuration: tuple[int, Entry | None], target: int, push: int, byte: int
    ) -> tuple[int, Entry | None]:
        stack = configuration[1]
        over = stack if push < 0 else self._grammar.stacks.pushed(push, stack)
        return self._grammar.returned(target, over) if target >= 0 else (~target, over)
