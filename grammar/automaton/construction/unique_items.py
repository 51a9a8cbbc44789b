"""Unique items (`expression.UniqueItem`) at compile time: their number, how many are needed, their costs.

An *array rule* is a rule with unique items. While the rule is read, the matcher keeps the items used so far.
The number of possible items tells whether enough unused items remain. The lengths of the shortest items bound
the cost of a completion.

The items ``"a" | "b" | "aa"`` have 3 words, and the lengths (1 byte, 2 items) and (2 bytes, 3 items). If one
item is used, two more items cost at most one token more than two of the shortest items: in the worst case the
used item has 1 byte, so that the second new item has 2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.construction.byte_edges import Edges
from ramify.grammar.automaton.construction.costs import UNREACHABLE
from ramify.grammar.automaton.construction.nodes import TooLarge
from ramify.grammar.automaton.pushdown import COUNTED_LENGTHS, ENDLESS_WORDS, UniqueItems, surcharge

FEW_WORDS = 10
"""Least number of different items that an array inside a unique item must be able to choose from."""

COUNTED_WORDS = 4096
"""Number of items at which counting the items by length stops. It also stops after `COUNTED_LENGTHS`
lengths."""


class UniqueItemTables(NamedTuple):
    """Tables of unique items. `before`, (states,) bool: a unique item may still be read before the rule ends.
    `extra`, (states,) int32: tokens of a completion beyond its cost by `costs`, if no item is used yet.
    `words_missing`: some array rule needs more unique items than there are."""

    before: np.ndarray
    extra: np.ndarray
    words_missing: bool
    items: UniqueItems


def unique_item_tables(edges: Edges, length: np.ndarray, best: np.ndarray) -> UniqueItemTables:
    """The tables for `edges`; `length` and `best` are those of `costs.shortest`.

    Raises `TooLarge` if the number of unique items that will be needed, or their kind, is unknown at compile
    time.
    """
    return _Analysis(edges, length, best).tables()


class _Edge(NamedTuple):
    """An edge. `width`: the number of bytes that it applies to. `into`: the next state if `reads` is True,
    else the start state of the called rule."""

    width: int
    into: int
    push: int
    reads: bool


class _Analysis:
    """Analysis of the states of array rules up to their last item, and of the states inside items. There are
    few of both."""

    def __init__(self, edges: Edges, length: np.ndarray, best: np.ndarray) -> None:
        self._edges = edges
        self._final = edges.final.tolist()
        self._after_item = edges.after_item.tolist()
        self._length = length.tolist()
        self._best = best.tolist()
        self._before = self._states_before_items()
        self._shortest_first = np.argsort(length, kind="stable")
        self._order = self._shortest_first[self._before[self._shortest_first]].tolist()
        self._rows: dict[int, list[_Edge]] = {}
        self._counted: dict[tuple[int, int], int] = {}

    def tables(self) -> UniqueItemTables:
        items = self._items()
        need = self._need()
        inside = {start: self._inside(start) for start in set(items.values())}
        words = self._words(set().union(*inside.values()))
        self._check_nested(inside, items, need, words)
        lengths = {start: self._lengths(start, words[start]) for start in set(items.values())}
        return UniqueItemTables(
            self._before,
            self._extra(need, items, lengths),
            any(need[state] > words[items[state]] for state in self._starts()),
            UniqueItems(need, [items.get(state, -1) for state in range(len(need))], words, lengths),
        )

    def _starts(self) -> list[int]:
        """The start states of the array rules."""
        called = ~self._edges.target[self._edges.target < 0]
        return [state for state in {0, *called.tolist()} if self._before[state]]

    def _edge(self, number: int) -> _Edge:
        edges = self._edges
        target = int(edges.target[number])
        width = int(edges.high[number]) - int(edges.low[number]) + 1
        return _Edge(width, target if target >= 0 else ~target, int(edges.push[number]), target >= 0)

    def _row(self, state: int) -> list[_Edge]:
        """The edges of `state`. A call on several ranges of bytes is one edge."""
        row = self._rows.get(state)
        if row is None:
            begin, end = self._edges.offsets[state : state + 2].tolist()
            row = self._rows[state] = _calls_once([self._edge(number) for number in range(begin, end)])
        return row

    def _following(self, edge: _Edge) -> int | None:
        """The next state in the same rule after `edge`, or None at a tail call."""
        return edge.push if edge.push >= 0 else edge.into if edge.reads else None

    def _states_before_items(self) -> np.ndarray:
        """(states,) bool: a unique item may still be read before the rule ends."""
        edges = self._edges
        state = np.repeat(np.arange(len(edges.final)), np.diff(edges.offsets))
        following = np.where(edges.push >= 0, edges.push, edges.target)  # below 0 at a tail call
        order = np.argsort(following, kind="stable")
        sources = state[order]
        begin = np.searchsorted(following[order], np.arange(len(edges.final) + 1))
        found = np.zeros(len(edges.final), np.bool_)
        found[state[(edges.push >= 0) & edges.after_item[edges.push]]] = True
        queue = np.flatnonzero(found).tolist()
        while queue:
            after = queue.pop()
            for source in sources[begin[after] : begin[after + 1]].tolist():
                if not found[source]:
                    found[source] = True
                    queue.append(source)
        return found

    def _items(self) -> dict[int, int]:
        """The start state of the unique items that may follow in the same rule, by state. Raises `TooLarge`
        if a state has two."""
        items: dict[int, set[int]] = {}
        changed = True
        while changed:
            changed = False
            for state in self._order:
                known = items.setdefault(state, set())
                size = len(known)
                for edge in self._row(state):
                    if edge.push >= 0 and self._after_item[edge.push]:
                        known.add(edge.into)
                    after = self._following(edge)
                    if after is not None:
                        known |= items.get(after, set())
                changed |= len(known) > size
        if any(len(starts) > 1 for starts in items.values()):
            raise TooLarge
        return {state: start for state, starts in items.items() for start in starts}

    def _need(self) -> list[int]:
        """The least number of unique items that must still be read, by state. Raises `TooLarge` if the
        shortest completion reads more unique items."""
        need = [0] * len(self._final)  # 0 in states from which no item may come
        on_shortest = list(need)
        for state in self._order:
            need[state] = UNREACHABLE
            number = self._best[state]
            if number >= 0 and self._length[state]:
                edge = self._edge(number)
                after = self._following(edge)
                step = int(edge.push >= 0 and self._after_item[edge.push])
                on_shortest[state] = 0 if after is None else step + on_shortest[after]
        changed = True
        while changed:
            changed = False
            for state in self._order:
                least = 0 if self._final[state] else UNREACHABLE
                for edge in self._row(state):
                    after = self._following(edge)
                    step = int(edge.push >= 0 and self._after_item[edge.push])
                    least = min(least, 0 if after is None else step + need[after])
                if least < need[state]:
                    need[state] = least
                    changed = True
        if any(need[state] != on_shortest[state] for state in self._order):
            raise TooLarge
        return need

    def _inside(self, start: int) -> set[int]:
        """The states of the items that begin at `start`."""
        reached = {start}
        queue = [start]
        while queue:
            for edge in self._row(queue.pop()):
                for other in (edge.into, edge.push):
                    if other >= 0 and other not in reached:
                        reached.add(other)
                        queue.append(other)
        return reached

    def _check_nested(
        self, inside: dict[int, set[int]], items: dict[int, int], need: list[int], words: list[int]
    ) -> None:
        """Raise `TooLarge` if an item contains an array rule and may have few texts: its texts then depend on
        the items used in the inner array. An inner array without a limit that chooses from at least
        `FEW_WORDS` items has millions of texts, so that more unused texts remain than any outer array
        needs."""
        for start, states in inside.items():
            nested = [state for state in states if self._before[state]]
            if any(words[items[state]] < FEW_WORDS or need[state] > 1 for state in nested):
                raise TooLarge
            if nested and words[start] < ENDLESS_WORDS:
                raise TooLarge

    def _words(self, inside: set[int]) -> list[int]:
        """The number of texts from a state to the end of its rule, by state. The number is counted for the
        states in `inside`, those inside items. All other states, and those from which a loop can be reached,
        have ENDLESS_WORDS."""
        users: dict[int, list[int]] = {state: [] for state in inside}
        missing = dict.fromkeys(inside, 0)
        for state in inside:
            for edge in self._row(state):
                for other in {edge.into, edge.push} - {-1}:
                    users[other].append(state)
                    missing[state] += 1
        words = [ENDLESS_WORDS] * len(self._final)
        queue = [state for state, count in missing.items() if not count]
        for state in queue:
            total = int(self._final[state])
            for edge in self._row(state):
                total += edge.width * words[edge.into] * (words[edge.push] if edge.push >= 0 else 1)
            words[state] = min(ENDLESS_WORDS, total)
            for user in users[state]:
                missing[user] -= 1
                if not missing[user]:
                    queue.append(user)
        return words

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
            for edge in self._row(state):
                known += edge.width * self._count_edge(state, edge, length - edge.reads)
            known = self._counted[key] = min(ENDLESS_WORDS, known)
        return known

    def _count_edge(self, state: int, edge: _Edge, length: int) -> int:
        after = self._following(edge)
        if length < 0 or (self._after_item[state] and after is not None and self._before[after]):
            return 0  # arrays within items: only those with one item count, because others may repeat an item
        if edge.push < 0:
            return self._count(edge.into, length)
        first = max(self._length[edge.into], 0 if edge.reads else 1)
        return sum(
            self._count(edge.into, inside) * self._count(edge.push, length - inside)
            for inside in range(first, length - self._length[edge.push] + 1)
        )

    def _extra(
        self, need: list[int], items: dict[int, int], lengths: dict[int, list[tuple[int, int]]]
    ) -> np.ndarray:
        """(states,) int32: the sum of the surcharges (`pushdown.surcharge`) of the array rules that the
        shortest completion calls."""
        extra = [0] * len(self._final)
        surcharges = {start: surcharge(lengths[items[start]], 0, need[start]) for start in self._starts()}
        if not any(surcharges.values()):
            return np.array(extra, np.int32)
        steps = [
            (state, self._edge(self._best[state]))
            for state in self._shortest_first.tolist()
            if self._best[state] >= 0 and self._length[state]
        ]
        changed = True
        while changed:  # the caller and the rule of a tail call have equal lengths: either may come first
            changed = False
            for state, edge in steps:
                found = extra[edge.into] + (extra[edge.push] if edge.push >= 0 else 0)
                found += 0 if edge.reads else surcharges.get(edge.into, 0)
                changed |= found != extra[state]
                extra[state] = found
        return np.array(extra, np.int32)


def _calls_once(row: list[_Edge]) -> list[_Edge]:
    calls = dict.fromkeys(edge._replace(width=1) for edge in row if not edge.reads)
    return [edge for edge in row if edge.reads] + list(calls)
