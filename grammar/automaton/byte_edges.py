"""From states over characters to states over the bytes of their UTF-8 (RFC 3629).

The bytes of a character after its first byte are read like a rule that is called. So the states inside
characters exist once, not once for each state that such a character leads to. With ``[а-я]`` (Cyrillic) from
state 0 to state 1, the first bytes D0 and D1 call an inner state for the second byte, and return to state 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.char_sets import NON_ASCII
from ramify.grammar.automaton.numba_types import array_dtypes, tuple_type
from ramify.grammar.automaton.positions import END
from ramify.grammar.automaton.states import CharEdge, States
from ramify.grammar.rules.expression import Ranges, complement, intersection
from ramify.grammar.rules.utf8 import Spans, disjoint, spans_of

PLAIN: Ranges = complement(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x85, 0x85), (0x2028, 0x2029)))
"""Plain characters: they need no escape in JSON strings, and the dot of a regular expression matches them."""

_PLAIN_ASCII = sum(1 << char for low, high in PLAIN for char in range(low, min(high, 0x7F) + 1))
_PLAIN_HIGH = intersection(PLAIN, NON_ASCII)

Rest = frozenset[tuple[Spans, int]]
"""Alternatives inside a character, each the bytes still to come and the state after them."""


class Edges(NamedTuple):
    """The edges as in `pushdown.Arrays`; dead states and edges are still among them.

    plain           (states,) bool: every plain character leads somewhere
    plain_source    (pairs,) int32: a state that a plain character leads from
    plain_target    (pairs,) int32: the state that it leads to
    after_item      (states,) bool: a unique item has just ended
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


EDGES = tuple_type(Edges, array_dtypes(Edges, uint8=("low", "high"), flags=("final", "plain", "after_item")))

_Edge = tuple[int, int, int, int]
"""Its low and high byte, its target, and the state that it pushes or -1."""


def to_bytes(states: States, alphabet: Collection[int]) -> Edges:
    """`states` as an automaton over the bytes of `alphabet`; characters with other bytes cannot be read."""
    return _Bytes(states, alphabet).edges()


class _Bytes:
    def __init__(self, states: States, alphabet: Collection[int]) -> None:
        self._states = states
        self._alphabet = sum(1 << byte for byte in set(alphabet))
        self._rows: list[list[_Edge]] = []
        self._exit: int | None = None
        self._inner: dict[Rest, int] = {}
        self._called: dict[Ranges, list[tuple[int, int, int]]] = {}
        self._pending: list[Rest] = []
        self._plain: list[tuple[int, int]] = []
        self._all_plain: list[bool] = []

    def edges(self) -> Edges:
        states = self._states
        count = len(states.final)
        self._number_of_next = count
        for state in range(count):
            row: list[_Edge] = []
            edges = states.edges[state]
            for edge in edges:
                target = edge.target
                if edge.ascii:
                    row += [(low, high, target, -1) for low, high in runs_of(edge.ascii & self._alphabet)]
            high_edges = [edge for edge in edges if edge.high]
            if high_edges:
                self._multibyte(high_edges, row)
            for call in states.calls[state]:
                push = -1 if self._returns_nothing(call.after) else call.after
                row += [(low, high, ~call.start, push) for low, high in runs_of(call.first & self._alphabet)]
            self._rows.append(row)
            self._note_plain(state, edges)
        for rest in self._pending:  # grows while it is read
            self._rows.append(self._inside(rest))
        return self._packed()

    def _returns_nothing(self, state: int) -> bool:
        """A call that returns to `state` is a tail call: the end of the rule is the end of its caller."""
        states = self._states
        goes_on = states.edges[state] or states.calls[state] or states.after_item[state]
        return states.final[state] and not goes_on

    def _multibyte(self, edges: list[CharEdge], row: list[_Edge]) -> None:
        if len(edges) == 1:
            _, ranges, target = edges[0]
            row += [(low, high, inside, target) for low, high, inside in self._called_characters(ranges)]
            return
        pairs = ((spans, edge.target) for edge in edges for spans in spans_of(edge.high))
        for (low, high), rests in _by_first_byte(pairs):
            targets = {target for _, target in rests}
            if len(targets) == 1:
                called = frozenset((spans, END) for spans, _ in rests)
                self._add(row, low, high, self._inner_state(called), targets.pop())
            else:
                self._add(row, low, high, self._inner_state(frozenset((s, ~t) for s, t in rests)), -1)

    def _called_characters(self, ranges: Ranges) -> list[tuple[int, int, int]]:
        """Ranges of first bytes of the characters in `ranges`, each with the state to call for the other
        bytes."""
        known = self._called.get(ranges)
        if known is None:
            known = self._called[ranges] = []
            for (low, high), rest in _by_first_byte((spans, END) for spans in spans_of(ranges)):
                inside = self._inner_state(frozenset(rest))
                allowed = ((1 << (high + 1)) - (1 << low)) & self._alphabet
                known += [(first, last, inside) for first, last in runs_of(allowed)]
        return known

    def _add(self, row: list[_Edge], low: int, high: int, target: int, push: int) -> None:
        for first, last in runs_of(((1 << (high + 1)) - (1 << low)) & self._alphabet):
            row.append((first, last, target, push))

    def _inner_state(self, rest: Rest) -> int:
        """The state inside a character of which `rest` is left. There ~t stands for state t, which is entered
        without a return."""
        number = self._inner.get(rest)
        if number is None:
            number = self._inner[rest] = self._number_of_next
            self._number_of_next += 1
            self._pending.append(rest)
        return number

    def _inside(self, rest: Rest) -> list[_Edge]:
        row: list[_Edge] = []
        for (low, high), after in _by_first_byte(pair for pair in rest if pair[0]):
            ended = {target for spans, target in after if not spans}
            if ended:
                (target,) = ended
                self._add(row, low, high, ~target if target < 0 else self._inner_state(_ENDED), -1)
            else:
                self._add(row, low, high, self._inner_state(frozenset(after)), -1)
        return row

    def _note_plain(self, state: int, edges: list[CharEdge]) -> None:
        ascii_mask = 0
        for edge in edges:
            ascii_mask |= edge.ascii
        covered = ascii_mask & _PLAIN_ASCII == _PLAIN_ASCII and covers_plain(
            tuple(sorted(span for edge in edges for span in edge.high))
        )
        self._all_plain.append(covered)
        if covered:
            self._plain += [(state, edge.target) for edge in edges if edge.high or edge.ascii & _PLAIN_ASCII]

    def _packed(self) -> Edges:
        rows = self._rows
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        flat = np.array([edge for row in rows for edge in sorted(row)], np.int32).reshape(-1, 4)
        states = self._states
        final = _padded(states.final, len(rows))
        if _ENDED in self._inner:
            final[self._inner[_ENDED]] = True
        pairs = np.array(self._plain, np.int32).reshape(-1, 2)
        return Edges(
            offsets,
            flat[:, 0].astype(np.uint8),
            flat[:, 1].astype(np.uint8),
            np.ascontiguousarray(flat[:, 2]),
            np.ascontiguousarray(flat[:, 3]),
            final,
            _padded(self._all_plain, len(rows)),
            np.ascontiguousarray(pairs[:, 0]),
            np.ascontiguousarray(pairs[:, 1]),
            _padded(states.after_item, len(rows)),
        )


_ENDED: Rest = frozenset([((), END)])


def _by_first_byte(
    pairs: Iterable[tuple[Spans, int]],
) -> Iterable[tuple[tuple[int, int], list[tuple[Spans, int]]]]:
    """Disjoint ranges of the first byte, each with what `pairs`, bytes and a state, have after that byte."""
    following: dict[tuple[int, int], list[tuple[Spans, int]]] = {}
    for spans, target in pairs:
        following.setdefault(spans[0], []).append((spans[1:], target))
    return disjoint(following).items()


def _padded(flags: list[bool], count: int) -> np.ndarray:
    """(count,) bool: `flags`, and False for the states inside characters, which come after all others."""
    padded = np.zeros(count, np.bool_)
    padded[: len(flags)] = flags
    return padded


@lru_cache(maxsize=65536)
def runs_of(mask: int) -> tuple[tuple[int, int], ...]:
    """The ranges of set bits."""
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


@lru_cache(maxsize=1024)
def covers_plain(ranges: Ranges) -> bool:
    """`ranges`, from U+0080 on, contain every plain character that is not ASCII."""
    return intersection(ranges, _PLAIN_HIGH) == _PLAIN_HIGH
