"""The order in which a batch runs its rows: rows with a common prefix run together.

The window holds a bounded number of rows that were read and have not started. Replacement selection (Knuth,
The Art of Computer Programming 3, 5.4.1) yields them in passes of ascending order: a row that is less than
the row last yielded waits for the next pass. Example with a window of 3 rows:

    rows in      b1 a1 c1 b2 a2 c2
    rows out     a1 b1 b2 c1 c2 a2

So rows about one document, or with one few-shot prompt, run together although they are far apart in the
input. Rows are compared column by column, in the order in which the columns appear in the program's prompts.
That order is learned from the first `SAMPLE_ROWS` finished rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SAMPLE_ROWS = 8
"""Number of finished rows from which the order of columns in prompts is learned."""

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a batch."""

    index: int
    """The row's number in the input, from 0."""
    values: Any
    """The program's arguments as a mapping, list or tuple; any other type fails the row."""
    identity: Any = None
    """The row's identity in the results file."""


class Window:
    """An iterator that yields the rows of `source` in the order in which they are to run.

    Args:
        source: The rows in the order of the input. The window holds at most `size` rows.
        columns: The program's parameters, in the order of its signature.
    """

    def __init__(self, source: Iterator[Row], size: int, columns: Sequence[str]) -> None:
        self._source = source
        self._size = size
        self._columns = list(columns)
        self._order = list(columns)
        self._heap: list[tuple[int, Key, int, Row]] = []
        """A heap of (number of the pass, key, index, row)."""
        self._round = 0
        self._last: Key = ()
        self._sampled = 0
        self._positions = dict.fromkeys(columns, 0.0)

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
        """Learn the order of the columns from a finished row. `text` is the text of the row's prompts and
        outputs."""
        if self._sampled == SAMPLE_ROWS or len(self._columns) < 2:
            return
        self._sampled += 1
        for column in self._columns:
            found = text.find(self._value(row.values, column))
            self._positions[column] += len(text) if found < 0 else found
        if self._sampled == SAMPLE_ROWS:
            self._order = sorted(self._columns, key=lambda column: self._positions[column])
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
        """The value of `column` in a row, as text; empty if the row has no such value."""
        if isinstance(values, Mapping):
            value = values.get(column, "")
        elif isinstance(values, list | tuple):
            position = self._columns.index(column)
            value = values[position] if position < len(values) else ""
        else:
            return ""
        return text_of(value)


def text_of(value: Any) -> str:
    """`value` as text; empty if it cannot be written as text, such as a list that is nested too deeply."""
    try:
        return value if isinstance(value, str) else str(value)
    except Exception:  # the str() of a user's type may raise anything
        return ""
