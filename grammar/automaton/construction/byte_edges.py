"""From states over characters to states over the bytes of their UTF-8 (RFC 3629).

The bytes of a character after its first byte are read like a rule that is called. So the states inside
characters exist once, not once for each state that such a character leads to. With ``[а-я]`` (Cyrillic) from
state 0 to state 1, the first bytes D0 and D1 call an inner state for the second byte, and return to state 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.construction.nodes import PLAIN_SET, Atoms
from ramify.grammar.automaton.construction.positions import END
from ramify.grammar.automaton.construction.subset_construction import States
from ramify.grammar.automaton.numba_types import array_dtypes, tuple_type
from ramify.grammar.rules.expression import Ranges

Spans = tuple[tuple[int, int], ...]
"""The inclusive range of each byte of a character's UTF-8."""

Rest = frozenset[tuple[Spans, int]]
"""Alternatives after a part of a character: each has the byte ranges still to be read, and the state after
them."""


class Edges(NamedTuple):
    """The edges as in `pushdown.Arrays`, before dead states and edges are removed.

    plain           (states,) bool: every plain character can be read
    plain_source    (pairs,) int32: a state of which `plain` is True
    plain_target    (pairs,) int32: a state that plain characters lead to from `plain_source`
    after_item      (states,) bool: a unique item has just ended
    mark            (states,) int32: the mark that was just read (`States.mark`), or -1
    """

    offsets: np.ndarray
    low: np.ndarray
    high: np.ndarray
    target: np.ndarray
    push: np.ndarray
    final: np.ndarray
    plain: np.ndarray
    plain_source: np.ndarray
    plain_target: np.ndarray
    after_item: np.ndarray
    mark: np.ndarray


def edges_of(rows: np.ndarray, final: np.ndarray) -> Edges:
    """Edges from `rows`, (edges, 5) int: state, lowest and highest byte, target, and pushed state or -1.
    `final` is (states,) bool. In the result, `plain` and `after_item` are False and `mark` is -1 for all
    states."""
    states = len(final)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    offsets = np.zeros(states + 1, np.int32)
    np.cumsum(np.bincount(rows[:, 0], minlength=states), out=offsets[1:])
    low, high = (np.ascontiguousarray(rows[:, i], np.uint8) for i in (1, 2))
    target, push = (np.ascontiguousarray(rows[:, i], np.int32) for i in (3, 4))
    no, nowhere = np.zeros(states, np.bool_), np.zeros(0, np.int32)
    no_mark = np.full(states, -1, np.int32)
    return Edges(offsets, low, high, target, push, final, no, nowhere, nowhere, no, no_mark)


EDGES = tuple_type(Edges, array_dtypes(Edges, uint8=("low", "high"), flags=("final", "plain", "after_item")))

_Edge = tuple[int, int, int, int]
"""An edge: its lowest and highest byte, its target, and the state that it pushes, or -1 if it pushes none."""


def to_bytes(states: States, atoms: Atoms, bodies: np.ndarray, alphabet: Collection[int]) -> Edges:
    """Turn `states` into an automaton over bytes. The automaton reads only characters whose bytes are all in
    `alphabet`.

    `bodies` has the node of each rule's body.
    """
    return _Bytes(states, atoms, bodies, alphabet).edges()


class _Bytes:
    def __init__(self, states: States, atoms: Atoms, bodies: np.ndarray, alphabet: Collection[int]) -> None:
        self._states = states
        self._atoms = atoms
        self._bodies = bodies
        self._alphabet = np.zeros(256, np.bool_)
        self._alphabet[list(alphabet)] = True
        self._allowed = sum(1 << byte for byte in set(alphabet))
        self._inner: dict[Rest, int] = {}
        self._pending: list[Rest] = []

    def edges(self) -> Edges:
        states = self._states
        count = len(states.final)
        source, edge = _spans(states.edge_begin, states.edge_end)
        class_, target = states.edge_class[edge], states.edge_target[edge]
        members, inside = self._classes()
        rows = (
            self._ascii(source, class_, target, inside),
            self._calls(),
            self._high(source, class_, target, inside),
        )
        extra = [(count + i, *row) for i, rest in enumerate(self._pending) for row in self._inside(rest)]
        flat = np.concatenate([*rows, np.array(extra, np.int32).reshape(-1, 5)])
        number = count + len(self._pending)
        final = _padded(states.final, number)
        if _ENDED in self._inner:
            final[self._inner[_ENDED]] = True
        # The edges of a state are disjoint, so a state reads all plain atoms if it reads as many atoms.
        plain_atoms = self._atoms.members[: self._atoms.begin[PLAIN_SET + 1]]
        plain = members[:, plain_atoms].sum(axis=1)[class_]
        covered = np.bincount(source, plain, minlength=number) == len(plain_atoms)
        pairs = (plain > 0) & covered[source]
        order = np.argsort((flat[:, 0].astype(np.int64) << 8) + flat[:, 1], kind="stable")
        return edges_of(flat[order], final)._replace(
            plain=covered,
            plain_source=source[pairs],
            plain_target=target[pairs],
            after_item=_padded(states.after_item, number),
            mark=np.concatenate([states.mark, np.full(number - count, -1, np.int32)]),
        )

    def _classes(self) -> tuple[np.ndarray, np.ndarray]:
        """The atoms of each class of characters, (classes, atoms) bool, and the ranges of characters of each
        class, (classes, ranges) bool."""
        of_range = self._atoms.of_range
        members = np.unpackbits(self._states.class_bits.view(np.uint8), axis=1, bitorder="little").astype(
            np.bool_
        )
        return members, members[:, of_range]

    def _ascii(
        self, source: np.ndarray, class_: np.ndarray, target: np.ndarray, inside: np.ndarray
    ) -> np.ndarray:
        range_of = np.searchsorted(self._atoms.cuts, np.arange(0x80), side="right") - 1
        edge, low, high = _byte_runs(inside[:, range_of] & self._alphabet[:0x80], class_)
        return _rows(source[edge], low, high, target[edge], -1)

    def _calls(self) -> np.ndarray:
        states = self._states
        source, call = _spans(states.call_begin, states.call_end)
        if not len(call):
            return np.empty((0, 5), np.int32)
        first = states.first[self._bodies].view(np.uint8)
        first = np.unpackbits(first, axis=1, bitorder="little").astype(np.bool_)
        edge, low, high = _byte_runs(first & self._alphabet, states.call_rule[call])
        # A call that returns to a final state without edges is a tail call: the called rule ends where its
        # caller ends.
        goes_on = (
            (states.edge_end > states.edge_begin)
            | (states.call_end > states.call_begin)
            | states.after_item
            | (states.mark >= 0)
        )
        after = states.call_after[call]
        push = np.where(states.final[after] & ~np.asarray(goes_on)[after], -1, after)
        return _rows(source[edge], low, high, ~states.call_start[call][edge], push[edge])

    def _high(
        self, source: np.ndarray, class_: np.ndarray, target: np.ndarray, inside: np.ndarray
    ) -> np.ndarray:
        """The edges for the first bytes of characters that have several bytes in UTF-8."""
        cuts = self._atoms.cuts
        begin = int(np.searchsorted(cuts, 0x80))
        inside = inside[:, begin:]
        has_high = np.asarray(inside.any(axis=1))
        edges = np.flatnonzero(has_high[class_])
        ranges: dict[int, Ranges] = {}
        for number in np.unique(class_[edges]).tolist():
            within = np.concatenate(([False], inside[number], [False]))
            chosen = np.flatnonzero(within[1:] != within[:-1]) + begin
            ranges[number] = tuple(
                zip(cuts[chosen[::2]].tolist(), (cuts[chosen[1::2]] - 1).tolist(), strict=True)
            )
        several = np.bincount(source[edges], minlength=1)[source[edges]] > 1
        one = edges[~several]
        called = {n: self._called_characters(ranges[n]) for n in dict.fromkeys(class_[one].tolist())}
        table = np.array([(n, *row) for n in sorted(called) for row in called[n]], np.int32).reshape(-1, 4)
        start = np.searchsorted(table[:, 0], np.arange(len(inside) + 1))
        edge, row = _spans(start[class_[one]], start[class_[one] + 1])
        single = _rows(source[one][edge], *table[row, 1:].T, target[one][edge])
        beside: dict[int, list[tuple[Spans, int]]] = {}
        for state, number, into in zip(
            *(a[edges[several]].tolist() for a in (source, class_, target)), strict=True
        ):
            beside.setdefault(state, []).extend((spans, into) for spans in spans_of(ranges[number]))
        rows = [(state, *edge) for state, pairs in beside.items() for edge in self._multibyte(pairs)]
        return np.concatenate([single, np.array(rows, np.int32).reshape(-1, 5)])

    def _multibyte(self, pairs: list[tuple[Spans, int]]) -> list[_Edge]:
        row: list[_Edge] = []
        for (low, high), rests in _by_first_byte(pairs):
            targets = {target for _, target in rests}
            if len(targets) == 1:
                called = frozenset((spans, END) for spans, _ in rests)
                self._add_edges(row, low, high, self._inner_state(called), targets.pop())
            else:
                self._add_edges(row, low, high, self._inner_state(frozenset((s, ~t) for s, t in rests)), -1)
        return row

    def _called_characters(self, ranges: Ranges) -> list[tuple[int, int, int]]:
        """Ranges of first bytes of the characters in `ranges`, each with the state to call for the further
        bytes."""
        row: list[_Edge] = []
        for low, high, rest in _characters(ranges):
            self._add_edges(row, low, high, self._inner_state(rest), -1)
        return [edge[:3] for edge in row]

    def _add_edges(self, row: list[_Edge], low: int, high: int, target: int, push: int) -> None:
        for first, last in _runs_of(((1 << (high + 1)) - (1 << low)) & self._allowed):
            row.append((first, last, target, push))

    def _inner_state(self, rest: Rest) -> int:
        """The state inside a character whose remaining bytes are `rest`. A state ~t in `rest` stands for
        state t, to be entered without a return."""
        number = self._inner.get(rest)
        if number is None:
            number = self._inner[rest] = len(self._states.final) + len(self._pending)
            self._pending.append(rest)
        return number

    def _inside(self, rest: Rest) -> list[_Edge]:
        row: list[_Edge] = []
        for (low, high), after in _by_first_byte(pair for pair in rest if pair[0]):
            ended = {target for spans, target in after if not spans}
            if ended:
                (target,) = ended
                self._add_edges(row, low, high, ~target if target < 0 else self._inner_state(_ENDED), -1)
            else:
                self._add_edges(row, low, high, self._inner_state(frozenset(after)), -1)
        return row


@lru_cache(maxsize=4096)
def _runs_of(mask: int) -> tuple[tuple[int, int], ...]:
    """Ranges of set bits in `mask`."""
    runs = []
    low = 0
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        low += skipped
        length = (mask ^ (mask + 1)).bit_length() - 1
        runs.append((low, low + length - 1))
        mask >>= length
        low += length
    return tuple(runs)


def _rows(*columns: np.ndarray | int) -> np.ndarray:
    """Stack `columns` into (rows, columns) int32. At least the first column is an array; numbers are
    repeated."""
    rows = np.empty((len(columns[0]), len(columns)), np.int32)  # type: ignore[arg-type]
    for i, column in enumerate(columns):
        rows[:, i] = column
    return rows


def _spans(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices from ``begin[i]`` up to ``end[i]``, concatenated for all i. Returns two arrays: the i of
    each index, and the indices."""
    sizes = end - begin
    owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return owner, np.arange(len(owner)) + np.repeat(begin - (np.cumsum(sizes) - sizes), sizes)


def _byte_runs(members: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ranges of bytes of each of the `wanted` rows of `members`, (rows, bytes) bool: three arrays with
    the index in `wanted`, the first and the last byte of each range."""
    padded = np.zeros((len(members), members.shape[1] + 2), np.bool_)
    padded[:, 1:-1] = members
    row, low = np.nonzero(padded[:, 1:-1] & ~padded[:, :-2])
    _, high = np.nonzero(padded[:, 1:-1] & ~padded[:, 2:])
    begin = np.searchsorted(row, np.arange(len(members) + 1))
    owner, run = _spans(begin[wanted], begin[wanted + 1])
    return owner, low[run], high[run]


_ENDED: Rest = frozenset([((), END)])


@lru_cache(maxsize=1024)
def _characters(ranges: Ranges) -> list[tuple[int, int, Rest]]:
    """Ranges of first bytes of the characters in `ranges`, each with the alternatives for the further
    bytes."""
    following = _by_first_byte((spans, END) for spans in spans_of(ranges))
    return [(low, high, frozenset(rest)) for (low, high), rest in following]


def _by_first_byte(
    pairs: Iterable[tuple[Spans, int]],
) -> Iterable[tuple[tuple[int, int], list[tuple[Spans, int]]]]:
    """The `pairs` (byte ranges, state) grouped by disjoint ranges of the first byte; each group has the
    remaining byte ranges and the states. If any ranges overlap, all are divided into single bytes."""
    following: dict[tuple[int, int], list[tuple[Spans, int]]] = {}
    for spans, target in pairs:
        following.setdefault(spans[0], []).append((spans[1:], target))
    ranges = sorted(following)
    if all(before[1] < after[0] for before, after in itertools.pairwise(ranges)):
        return following.items()
    by_byte: dict[tuple[int, int], list[tuple[Spans, int]]] = {}
    for (low, high), rest in following.items():
        for byte in range(low, high + 1):
            by_byte.setdefault((byte, byte), []).extend(rest)
    return by_byte.items()


def _padded(flags: np.ndarray, count: int) -> np.ndarray:
    """(count,) bool: `flags`, and False for the states inside characters, which come after all others."""
    padded = np.zeros(count, np.bool_)
    padded[: len(flags)] = flags
    return padded


_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


@lru_cache(maxsize=4096)
def spans_of(ranges: Ranges) -> tuple[Spans, ...]:
    """The UTF-8 of a set of characters, as sequences of byte ranges."""
    return tuple(spans for low, high in ranges for spans in utf8_spans(low, high))


def utf8_spans(low: int, high: int) -> Iterator[Spans]:
    """The UTF-8 of the code points `low` to `high`, as sequences of byte ranges."""
    for last in _LAST_OF_LENGTH:
        if low <= last < high:
            yield from utf8_spans(low, last)
            low = last + 1
    first, final = chr(low).encode(), chr(high).encode()
    for i in range(1, len(first)):
        # Split if the last i bytes do not take all values of their range.
        block = 1 << (6 * i)
        if low // block != high // block:
            if low % block:
                yield from utf8_spans(low, low | (block - 1))
                yield from utf8_spans((low | (block - 1)) + 1, high)
                return
            if high % block != block - 1:
                yield from utf8_spans(low, (high & ~(block - 1)) - 1)
                yield from utf8_spans(high & ~(block - 1), high)
                return
    yield tuple(zip(first, final, strict=True))
