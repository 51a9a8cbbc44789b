"""A limit on the processor time of validating a value."""

from __future__ import annotations

import time
from collections.abc import Callable

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.document.check import place

MAX_SECONDS = 2.0
"""Limit of one validation. References that overlap, or patterns with lookarounds, can take exponential
time."""


class TakesTooLong(InvalidConstraint):
    """Error: a validation, or the match of a pattern, took too long and was given up."""


class TimeLimit:
    """A limit of `seconds` of processor time of the calling thread. Since waiting for a processor does not
    count, a busy machine changes no result."""

    def __init__(self, seconds: float = MAX_SECONDS, clock: Callable[[], float] = time.thread_time) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def left(self, pointer: str) -> float:
        """The seconds that are left. If none are, raises `TakesTooLong` with `pointer`, that of a keyword."""
        left = self._end - self._clock()
        if left <= 0.0:
            raise TakesTooLong(
                f"Validating takes more than {self._seconds:g} s.",
                pointer=place(pointer) or None,
                remedy="Make the schema simpler: fewer options that overlap, no lookarounds in patterns.",
            )
        return left
