"""A limit on the processor time that validating a value takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.document.check import place

MAX_SECONDS = 2.0
"""Limit of one validation. References that overlap, or a pattern with lookarounds, can take exponential
time."""


class TakesTooLong(InvalidConstraint):
    """A validation that was given up."""


class TimeLimit:
    """`seconds` of processor time of the calling thread, so that a busy machine changes no answer."""

    def __init__(self, seconds: float = MAX_SECONDS, clock: Callable[[], float] = time.thread_time) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def left(self, pointer: str) -> float:
        """Seconds that are left. Raises `TakesTooLong`, with the `pointer` of the keyword, for none."""
        left = self._end - self._clock()
        if left <= 0.0:
            raise TakesTooLong(
                f"Validating takes more than {self._seconds:g} s.",
                pointer=place(pointer) or None,
                remedy="Make the schema simpler: fewer options that overlap, no lookarounds in patterns.",
            )
        return left
