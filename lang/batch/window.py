"""The order in which a batch runs its rows: those that share a prefix together, as far as it looks ahead.

The window holds a bounded number of rows that were read but not begun. It gives the next one in the order of
their values, going upwards through the window and then from its start again (replacement selection, Knuth,
The Art of Computer Programming 3, 5.4.1), so rows of one document, or of one few-shot prompt, meet although
they lie thousands apart in the input. Values are compared in the order in which the program's prompts hold
them, which is learnt from the first rows that have ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LESSONS = 8
"""So many ended rows tell in which order the prompts hold the columns."""

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a batch."""

    index: int
    """From 0, in the input."""
    values: Any
    """The program's arguments; anything but a mapping, a list or a tuple becomes an error."""
    digest: int = 0
    key: Any = None


class Window:
    """The rows of `source` in the order in which they are best run.

    Args:
        source: In the order of the input; no more than `size` of them are held.
        columns: The program's parameters, in the order of its signature.
    """

    def __init__(self, source: Iterator[Row], size: int, columns: Sequence[str]) -> None:
        self._source = source
        self._size = size
        self._columns = list(columns)
        self._order = list(columns)
        self._heap: list[tuple[int, Key, int, Row]] = []
        """(how often the window was gone through, key, index, row)"""
        self._round = 0
        self._last: Key = ()
        self._lessons = 0
        self._places = dict.fromkeys(columns, 0.0)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        while len(self._heap) < self._size:
            row = next(self._source, None)
            if row is None:
                break
            key = self._key(row.values)
            heapq.heappush(self._heap, (self._round + (key < self._last), key, row.index, row))
        if not self._heap:
            raise StopIteration
        self._round, self._last, _, row = heapq.heappop(self._heap)
        return row

    def learn(self, row: Row, text: str) -> None:
        """`text` is what came of `row`, prompts included."""
        if self._lessons == LESSONS or len(self._columns) < 2:
            return
        self._lessons += 1
        for column in self._columns:
            found = text.find(self._value(row.values, column))
            self._places[column] += len(text) if found < 0 else found
        if self._lessons == LESSONS:
            self._order = sorted(self._columns, key=lambda column: self._places[column])
            self._heap = [(0, self._key(row.values), row.index, row) for *_, row in self._heap]
            heapq.heapify(self._heap)
            self._round, self._last = 0, ()

    @property
    def order(self) -> list[str]:
        """The columns in the order in which rows are compared."""
        return list(self._order)

    def _key(self, values: Any) -> Key:
        return tuple([self._value(values, column) for column in self._order])

    def _value(self, values: Any, column: str) -> str:
        """A row's value as text; empty where the row has none."""
        if isinstance(values, Mapping):
            value = values.get(column, "")
        elif isinstance(values, list | tuple):
            position = self._columns.index(column)
            value = values[position] if position < len(values) else ""
        else:
            return ""
        return value if isinstance(value, str) else str(value)
