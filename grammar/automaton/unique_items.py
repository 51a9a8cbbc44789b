"""What is known at compile time of unique items (`expression.UniqueItem`).

An *array rule* is a rule with unique items. While it is read, the matcher keeps the items used so far. The
number of possible items says whether enough unused ones remain; the lengths of the shortest items bound what
a completion costs.

The items ``"a" | "b" | "aa"`` have 3 words, and the lengths (1 byte, 2 items) and (2 bytes, 3 items). If one
item is used, two more cost at most one token beyond two of the shortest: at worst the used item is one of
length 1, and the second new item has 2 bytes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.byte_edges import Edges
from ramify.grammar.automaton.costs import UNREACHABLE
from ramify.grammar.automaton.nodes import TooLarge
from ramify.grammar.automaton.pushdown import UniqueItems

ENDLESS_WORDS = 1 << 30
"""Stands for this number of texts and all above it."""

COUNTED_WORDS = 4096
COUNTED_LENGTHS = 256
"""The items of an array are counted by length up to this number of items, or of lengths."""


class UniqueItemTables(NamedTuple):
    """before          (states,) bool: a unique item may still be read before the rule ends
    extra           (states,) int32: tokens of a completion beyond `costs`, while no items are used
    words_missing   some array rule needs more unique items than there are
    """

    before: np.ndarray
    extra: np.ndarray
    words_missing: bool
    items: UniqueItems


def unique_item_tables(edges: Edges, length: np.ndarray, best: np.ndarray) -> UniqueItemTables:
    """The tables for `edges`; `length` and `best` are those of `costs.shortest`.

    Raises `TooLarge` where it cannot be known at compile time how many unique items will be needed, or of
    which kind.
    """
    return _Analysis(edges, length, best).tables()


class _Edge(NamedTuple):
    """`width`: number of bytes. `into`: the next state, or the start of the called rule if it `reads`
    nothing."""

    width: int
    into: int
    push: int
    reads: bool


class _Analysis:
    def __init__(self, edges: Edges, length: np.ndarray, best: np.ndarray) -> None:
        self._final = edges.final.tolist()
        self._after_item = edges.after_item.tolist()
        self._length = length.tolist()
        self._order = np.argsort(length, kind="stable").tolist()
        offsets = edges.offsets.tolist()
        low, high = edges.low.tolist(), edges.high.tolist()
        target, push = edges.target.tolist(), edges.push.tolist()
        flat = [
            _Edge(high[e] - low[e] + 1, t if t >= 0 else ~t, push[e], t >= 0) for e, t in enumerate(target)
        ]
        self._best = [flat[e] if e >= 0 else None for e in best.tolist()]
        # A call on several ranges of bytes counts once.
        self._rows = [_calls_once(flat[begin:end]) for begin, end in itertools.pairwise(offsets)]
        self._counted: dict[tuple[int, int], int] = {}

    def tables(self) -> UniqueItemTables:
        before = self._before()
        words = self._words()
        items = self._items(before)
        need = self._need(before)
        lengths = {start: self._lengths(start, words[start]) for start in set(items.values())}
        self._check(before, items)
        extra = [0] * len(self._final)
        for state in self._order:
            extra[state] = self._extra(state, before, need, extra, items, lengths)
        return UniqueItemTables(
            np.array(before, np.bool_),
            np.array(extra, np.int32),
            any(need[state] > words[items[state]] for state in self._starts(before)),
            UniqueItems(need, [items.get(state, -1) for state in range(len(before))], words, lengths),
        )

    def _starts(self, before: list[bool]) -> set[int]:
        """The start states of the array rules."""
        called = {edge.into for row in self._rows for edge in row if not edge.reads and before[edge.into]}
        return called | ({0} if before[0] else set())

    def _following(self, edge: _Edge) -> int | None:
        """The next state in the same rule, or None at a tail call."""
        return edge.push if edge.push >= 0 else edge.into if edge.reads else None

    def _before(self) -> list[bool]:
        sources: list[list[int]] = [[] for _ in self._final]
        found = [False] * len(self._final)
        queue = []
        for state, row in enumerate(self._rows):
            for edge in row:
                after = self._following(edge)
                if after is not None:
                    sources[after].append(state)
                if edge.push >= 0 and self._after_item[edge.push] and not found[state]:
                    found[state] = True
                    queue.append(state)
        while queue:
            for source in sources[queue.pop()]:
                if not found[source]:
                    found[source] = True
                    queue.append(source)
        return found

    def _items(self, before: list[bool]) -> dict[int, int]:
        """By state, the start state of the unique items that may follow. Raises `TooLarge` where there are
        two."""
        items: dict[int, set[int]] = {}
        changed = True
        while changed:
            changed = False
            for state in self._order:
                if before[state]:
                    known = items.setdefault(state, set())
                    size = len(known)
                    for edge in self._rows[state]:
                        if edge.push >= 0 and self._after_item[edge.push]:
                            known.add(edge.into)
                        after = self._following(edge)
                        if after is not None:
                            known |= items.get(after, set())
                    changed |= len(known) > size
        if any(len(starts) > 1 for starts in items.values()):
            raise TooLarge
        return {state: start for state, starts in items.items() for start in starts}

    def _need(self, before: list[bool]) -> list[int]:
        """By state, the unique items that must still be read. Raises `TooLarge` where the shortest completion
        reads more than that."""
        need = [UNREACHABLE] * len(self._final)
        on_shortest = [0] * len(self._final)
        for state in self._order:
            edge = self._best[state]
            if edge is not None and self._length[state]:
                after = self._following(edge)
                step = int(edge.push >= 0 and self._after_item[edge.push])
                on_shortest[state] = 0 if after is None else step + on_shortest[after]
        changed = True
        while changed:
            changed = False
            for state in self._order:
                least = 0 if self._final[state] else UNREACHABLE
                for edge in self._rows[state]:
                    after = self._following(edge)
                    step = int(edge.push >= 0 and self._after_item[edge.push])
                    least = min(least, 0 if after is None else step + need[after])
                if least < need[state]:
                    need[state] = least
                    changed = True
        if any(need[state] != on_shortest[state] for state, may in enumerate(before) if may):
            raise TooLarge
        return need

    def _words(self) -> list[int]:
        """By state, the number of texts to the end of its rule; ENDLESS_WORDS where something repeats."""
        users: list[list[int]] = [[] for _ in self._final]
        missing = [0] * len(self._final)
        for state, row in enumerate(self._rows):
            for edge in row:
                for other in {edge.into, edge.push} - {-1}:
                    users[other].append(state)
                    missing[state] += 1
        words = [ENDLESS_WORDS] * len(self._final)
        queue = [state for state, count in enumerate(missing) if not count]
        for state in queue:
            total = int(self._final[state])
            for edge in self._rows[state]:
                total += edge.width * words[edge.into] * (words[edge.push] if edge.push >= 0 else 1)
            words[state] = min(ENDLESS_WORDS, total)
            for user in users[state]:
                missing[user] -= 1
                if not missing[user]:
                    queue.append(user)
        return words

    def _check(self, before: list[bool], items: dict[int, int]) -> None:
        """Raises `TooLarge` where an item contains an array rule: its number of texts would depend on what
        was used."""
        for start in set(items.values()):
            reached = {start}
            queue = [start]
            while queue:
                for edge in self._rows[queue.pop()]:
                    for other in (edge.into, edge.push):
                        if other >= 0 and other not in reached:
                            reached.add(other)
                            queue.append(other)
            if any(before[state] or self._after_item[state] for state in reached):
                raise TooLarge

    def _lengths(self, start: int, words: int) -> list[tuple[int, int]]:
        shortest = self._length[start]
        found = []
        total = 0
        for length in range(shortest, shortest + COUNTED_LENGTHS):
            more = self._count(start, length)
            if more:
                total = min(ENDLESS_WORDS, total + more)
                found.append((length, total))
            if total >= min(words, COUNTED_WORDS):
                break
        return found

    def _count(self, state: int, length: int) -> int:
        """Number of texts of `length` bytes from `state` to the end of its rule."""
        if length < self._length[state]:
            return 0
        key = (state, length)
        known = self._counted.get(key)
        if known is None:
            known = int(length == 0 and self._final[state])
            for edge in self._rows[state]:
                known += edge.width * self._count_edge(edge, length - edge.reads)
            known = self._counted[key] = min(ENDLESS_WORDS, known)
        return known

    def _count_edge(self, edge: _Edge, length: int) -> int:
        if length < 0:
            return 0
        if edge.push < 0:
            return self._count(edge.into, length)
        first = max(self._length[edge.into], 0 if edge.reads else 1)
        return sum(
            self._count(edge.into, inside) * self._count(edge.push, length - inside)
            for inside in range(first, length - self._length[edge.push] + 1)
        )

    def _extra(
        self,
        state: int,
        before: list[bool],
        need: list[int],
        extra: list[int],
        items: dict[int, int],
        lengths: dict[int, list[tuple[int, int]]],
    ) -> int:
        """The surcharges of the array rules that the shortest completion of `state` calls."""
        edge = self._best[state]
        if edge is None or not self._length[state]:
            return 0
        found = extra[edge.into] + (extra[edge.push] if edge.push >= 0 else 0)
        if not edge.reads and before[edge.into]:
            found += surcharge(lengths[items[edge.into]], 0, need[edge.into])
        return found


def _calls_once(row: list[_Edge]) -> list[_Edge]:
    calls = dict.fromkeys(edge._replace(width=1) for edge in row if not edge.reads)
    return [edge for edge in row if edge.reads] + list(calls)


def surcharge(lengths: list[tuple[int, int]], used: int, need: int) -> int:
    """Tokens of `need` unique items beyond `need` times the shortest item, if `used` items are used: at worst
    the shortest ones. Counted in bytes, since a byte takes at most one token."""
    return sum(_length_of(lengths, used + i) - 1 for i in range(need) if used + i)


def _length_of(lengths: list[tuple[int, int]], rank: int) -> int:
    """Bytes of the item at index `rank` in the order of length."""
    for length, texts in lengths:
        if texts > rank:
            return length
    length, texts = lengths[-1]
    return length + (rank - texts + 1) * COUNTED_LENGTHS  # not counted, but there is one at least
