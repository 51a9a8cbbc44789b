"""One program with its arguments and scripts, for tests and benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ramify.lang.functions.function import Function


@dataclass(frozen=True)
class Case:
    """A program with its arguments and scripts."""

    name: str
    program: Function[...]
    arguments: Sequence[dict[str, Any]]
    """Example rows, of which `rows` makes any number of different ones."""
    script: Any
    """Answers for `ScriptedBackend` that fit every row."""
    varied: str
    """The argument that differs between the rows of `rows`: a text, or a list of texts."""
    streams: tuple[str, ...] = field(default=())
    """Variables that readers stream."""

    def rows(self, count: int) -> list[dict[str, Any]]:
        """`count` rows, no two alike."""
        return list(itertools.islice(self._endless(), count))

    def _endless(self) -> Iterator[dict[str, Any]]:
        yield from self.arguments
        for number in itertools.count(2):
            for row in self.arguments:
                value = row[self.varied]
                marked = (
                    f"{value} (No. {number})"
                    if isinstance(value, str)
                    else [f"{value[0]} (No. {number})", *value[1:]]
                )
                yield {**row, self.varied: marked}
