"""`engine.fresh` and `engine.forking` together: items must differ, and a text may be read in several ways.

Each configuration remembers the items that were read in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.pushdown import UniqueItems
from ramify.grammar.engine.nondeterministic import MOST_CONFIGURATIONS
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.engine.unique_items import NOTHING_USED, UniqueItemsMatcher, Used, _Entry, _Item, _Step
from ramify.grammar.matcher import first_token, taken_back


class _Way(UniqueItemsMatcher):
    """What one configuration allows; it goes on in several."""

    def _afters(self, step: _Step, data: bytes) -> list[_Step]:
        here = [step]
        for i in range(len(data)):
            here = [after for before in here for after in self._reads(before, data[i : i + 1])]
        exits = self._grammar.lists.exit
        found: dict[object, _Step] = {}
        for one in here:
            ended: _Step | None = one
            while ended is not None and ended.stack is not None and exits[ended.state]:
                ended = self._returned(ended)
            if ended is not None and self._can_end(ended):
                found.setdefault(_identity(ended), ended)
        return list(found.values())

    def _reads(self, step: _Step, byte: bytes) -> list[_Step]:
        grammar = self._grammar
        lists = grammar.lists
        found: dict[object, _Step] = {}
        branches = [(step, False)]
        while branches:
            here, entered = branches.pop()
            # What is called for a byte reads it: what may be empty has been left out before.
            back = None if entered else self._returned(here)
            if back is not None:
                branches.append((back, False))
            for low, high, target, push in zip(*lists.edges(here.state), strict=True):
                if not low <= byte[0] <= high:
                    continue
                stack, item = here.stack, here.item
                if push >= 0:
                    stack = _Entry(push, stack, grammar, here.used)
                    if self._after_item[push]:
                        item = _Item(b"", tuple(here.used))
                if target < 0:
                    branches.append((_Step(~target, stack, NOTHING_USED, item, None, 0), True))
                else:
                    after = _Step(target, stack, here.used, item and item.after(byte), None, 0)
                    found.setdefault(_identity(after), after)
        return list(found.values())


def _identity(step: _Step) -> object:
    """Equal for configurations that go on alike."""
    entries: list[tuple[int, Used]] = []
    entry = step.stack
    while entry is not None:
        entries.append((entry.state, entry.used))
        entry = entry.parent  # type: ignore[assignment]
    return step.state, step.used, step.item and step.item.said, tuple(entries)


class _Steps(NamedTuple):
    """`ways`: none after a stop token."""

    ways: tuple[_Step, ...]
    before: _Steps | None
    accepted: int


class NondeterministicUniqueMatcher:
    free = False

    def __init__(self, grammar: PushdownGrammar, way: _Way, steps: _Steps) -> None:
        self._grammar = grammar
        self._way = way
        self._steps = steps

    @staticmethod
    def begin(grammar: PushdownGrammar, items: UniqueItems) -> NondeterministicUniqueMatcher:
        start = _Step(0, None, NOTHING_USED, None, None, 0)
        return NondeterministicUniqueMatcher(grammar, _Way(grammar, items, start), _Steps((start,), None, 0))

    def accept(self, token: int) -> bool:
        vocabulary = self._grammar.vocabulary
        if self.finished or not 0 <= token < vocabulary.size:
            return False
        if vocabulary.tokens[token]:
            return self.accept_bytes(vocabulary.tokens[token])
        if not self.complete or token not in vocabulary.stop_ids:
            return False
        self._steps = _Steps((), self._steps, self._steps.accepted + 1)
        return True

    def accept_bytes(self, data: bytes) -> bool:
        found = {
            _identity(after): after for step in self._steps.ways for after in self._way._afters(step, data)
        }
        if not found:
            return False
        ways = sorted(found.values(), key=self._way._cost)[:MOST_CONFIGURATIONS]
        self._steps = _Steps(tuple(ways), self._steps, self._steps.accepted + 1)
        return True

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        row[:] = 0
        own = np.empty_like(row)
        for step in self._steps.ways:
            self._way._fill(step, own, budget)
            row |= own
        if self.complete and not self.finished:
            row |= self._grammar.stop_bits
        return True

    def forced_bytes(self) -> bytes:
        if len(self._steps.ways) != 1:
            return b""
        (step,) = self._steps.ways
        return self._grammar.forced(step.state, step.stack)

    @property
    def completion_tokens(self) -> int | None:
        return 0 if self.complete else min(map(self._way._cost, self._steps.ways))

    def completion(self) -> list[int] | None:
        twin = self.fork()
        tokens: list[int] = []
        row = np.empty_like(self._grammar.stop_bits)
        while not twin.complete:
            twin.fill_mask(row, twin.completion_tokens)
            tokens.append(first_token(row))
            assert twin.accept(tokens[-1])
        return tokens

    def rollback(self, count: int) -> None:
        self._steps = taken_back(self._steps, count)

    def fork(self) -> NondeterministicUniqueMatcher:
        return NondeterministicUniqueMatcher(self._grammar, self._way, self._steps)

    @property
    def finished(self) -> bool:
        return not self._steps.ways

    @property
    def complete(self) -> bool:
        return self.finished or any(map(self._way._may_end, self._steps.ways))
