"""The pushdown engine where a text may be read in several ways at once: several configurations, side by side.

Two recursive rules that begin alike, a tree and any object say, are both called: each configuration has a
stack of its own. A token is allowed if one of them allows it; a completion is the shortest that one of
them has.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.engine.stack import Entry
from ramify.grammar.matcher import taken_back

MOST_CONFIGURATIONS = 256
"""Ways in which a text is read at once; of more than these, those are given up that take longest to complete.
Schemas have a few, one for each level at which an object could have turned from a named kind to any."""

MOST_FORCED = 512
"""Bytes of forced text that are looked for at once."""

Configuration = tuple[int, Entry | None]


class _Step(NamedTuple):
    """The configurations after a token; none after a stop token."""

    configurations: tuple[Configuration, ...]
    before: _Step | None
    accepted: int


class Stacks:
    """Stacks of one grammar: equal ones are the same object, so that configurations can be compared."""

    def __init__(self, grammar: PushdownGrammar) -> None:
        self._lists = grammar.lists
        # An entry keeps the one below alive, so that its id is not given to another one.
        self._known: weakref.WeakValueDictionary[tuple[int, int], Entry] = weakref.WeakValueDictionary()

    def pushed(self, state: int, parent: Entry | None) -> Entry:
        key = (state, id(parent))
        entry = self._known.get(key)
        if entry is None:
            entry = self._known[key] = Entry(state, parent, self._lists)
        return entry


class NondeterministicMatcher:
    """A matcher where a text may be read in several ways."""

    free = False

    def __init__(self, grammar: PushdownGrammar, stacks: Stacks, step: _Step) -> None:
        self._grammar = grammar
        self._stacks = stacks
        self._step = step

    @staticmethod
    def begin(grammar: PushdownGrammar) -> NondeterministicMatcher:
        return NondeterministicMatcher(grammar, Stacks(grammar), _Step(((0, None),), None, 0))

    # --- moving -----------------------------------------------------------------------------------------

    def accept(self, token: int) -> bool:
        vocabulary = self._grammar.vocabulary
        if self.finished or not 0 <= token < vocabulary.size:
            return False
        if vocabulary.tokens[token]:
            return self.accept_bytes(vocabulary.tokens[token])
        if not self.complete or token not in vocabulary.stop_ids:
            return False
        self._advance(())
        return True

    def accept_bytes(self, data: bytes) -> bool:
        here = self._step.configurations
        for byte in data:
            here = self._read(here, byte)
        if not here:
            return False
        self._advance(here)
        return True

    def _advance(self, configurations: tuple[Configuration, ...]) -> None:
        self._step = _Step(configurations, self._step, self._step.accepted + 1)

    def _read(self, configurations: tuple[Configuration, ...], byte: int) -> tuple[Configuration, ...]:
        """The configurations after `byte`, without rules on top that have ended and cannot go on."""
        lists = self._grammar.lists
        found: dict[Configuration, None] = {}
        branches = [(state, stack, False) for state, stack in configurations]
        while branches:
            state, stack, entered = branches.pop()
            # What is called for a byte reads it: what may be empty has been left out before.
            if lists.final[state] and stack is not None and not entered:
                branches.append((stack.state, stack.parent, False))
            for low, high, target, push in zip(*lists.edges(state), strict=True):
                if low <= byte <= high:
                    over = stack if push < 0 else self._stacks.pushed(push, stack)
                    if target >= 0:
                        found[self._grammar.normal(target, over)] = None
                    else:
                        branches.append((~target, over, True))
        if len(found) > MOST_CONFIGURATIONS:
            return tuple(sorted(found, key=self._cost)[:MOST_CONFIGURATIONS])
        return tuple(found)

    # --- what may come ----------------------------------------------------------------------------------

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        row[:] = 0
        grammar = self._grammar
        own = np.empty_like(row)
        for state, stack in self._step.configurations:
            mask = grammar.mask(state, stack)
            if budget is None or self._cost((state, stack)) + mask.rise < budget:
                row |= mask.row
            else:
                grammar.walk(state, stack, own, limit=budget - 1 - (stack.cost if stack else 0))
                row |= own
        if not self.finished and self.complete:
            row |= grammar.stop_bits
        return True

    def _cost(self, configuration: Configuration) -> int:
        state, stack = configuration
        return self._grammar.lists.cost[state] + (stack.cost if stack else 0)

    def forced_bytes(self) -> bytes:
        here = self._step.configurations
        found = bytearray()
        while len(found) < MOST_FORCED and here and not any(map(self._may_end, here)):
            byte = self._only_byte(here)
            if byte is None:
                break
            found.append(byte)
            here = self._read(here, byte)
        return bytes(found)

    def _only_byte(self, configurations: tuple[Configuration, ...]) -> int | None:
        lists = self._grammar.lists
        found: set[int] = set()
        for state, stack in configurations:
            while True:
                for low, high, _, _ in zip(*lists.edges(state), strict=True):
                    if low != high:
                        return None
                    found.add(low)
                if len(found) > 1:
                    return None
                if not lists.final[state] or stack is None:
                    break
                state, stack = stack.state, stack.parent
        return found.pop() if found else None

    @property
    def completion_tokens(self) -> int | None:
        return min(map(self._cost, self._step.configurations), default=0)

    def completion(self) -> list[int] | None:
        twin = self.fork()
        tokens: list[int] = []
        lists = self._grammar.lists
        while twin.completion_tokens:
            state, stack = min(twin._step.configurations, key=self._cost)
            while not lists.cost[state]:
                assert stack is not None
                state, stack = stack.state, stack.parent
            tokens.append(int(self._grammar.automaton.token[state]))
            assert twin.accept(tokens[-1])
        return tokens

    # --- steps ------------------------------------------------------------------------------------------

    def rollback(self, count: int) -> None:
        self._step = taken_back(self._step, count)

    def fork(self) -> NondeterministicMatcher:
        return NondeterministicMatcher(self._grammar, self._stacks, self._step)

    @property
    def finished(self) -> bool:
        return not self._step.configurations

    @property
    def complete(self) -> bool:
        return self.finished or any(map(self._may_end, self._step.configurations))

    def _may_end(self, configuration: Configuration) -> bool:
        state, stack = configuration
        return self._grammar.lists.final[state] and (stack is None or stack.complete)
