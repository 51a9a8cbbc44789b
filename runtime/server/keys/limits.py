"""Limits a minute, as token buckets: what is left of a limit, filled again at its rate."""

from __future__ import annotations

import math
from collections.abc import Callable

MINUTE_S = 60.0


class Bucket:
    """The rest of a limit a minute.

    Example, of 600 tokens a minute:

        at 0 s     600 left    a request of about 500 is let in: 100 left
        at 1 s     110 left    it took 650 instead: -40 left
        at 5 s     0 left      a request of about 90 waits for 9 s more

    A single request may be larger than the limit: it is let in where the bucket is full, and what it takes is
    missing afterwards.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._left = float(limit)
        self._at = clock()

    @property
    def left(self) -> float:
        """The rest now, at most `limit`; negative after a request that took more than was left."""
        now = self._clock()
        self._left = min(self.limit, self._left + (now - self._at) * self.limit / MINUTE_S)
        self._at = now
        return self._left

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount`, or `limit` if that is less, is left; 0 if it is left now."""
        missing = min(amount, self.limit) - self.left
        return max(0.0, missing * MINUTE_S / self.limit)

    def take(self, amount: float) -> None:
        """Take `amount`, whether or not it is left; a negative amount is given back."""
        self._left = self.left - amount

    @property
    def full_s(self) -> float:
        """Seconds until the bucket is full."""
        return self.wait_s(math.inf)

    def renewed(self, limit: int | None) -> Bucket | None:
        """The bucket after a change of the limit: this one if there is none, a full one otherwise."""
        if limit == self.limit:
            return self
        return None if limit is None else Bucket(limit, self._clock)
