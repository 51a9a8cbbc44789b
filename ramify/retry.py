"""Retries of requests after transient failures: exponential backoff with full jitter.

    attempt 1   503, Retry-After: 2     wait 2 s and a random part of 0.5 s
    attempt 2   connection refused      wait a random part of 1 s
    attempt 3   connection refused      wait a random part of 2 s
    …           `retry_for` seconds after the first failure, the last attempt

Full jitter: Marc Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015. The random part
keeps requests that failed together from coming back together.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ramify.errors import InvalidRequest, RamifyError

logger = logging.getLogger("ramify")

T = TypeVar("T")

_clock, _sleep = time.monotonic, asyncio.sleep

RETRY_FOR_S = 60.0
"""Default of `retry_for`."""
IN_BATCH_S = 5.0
"""Longest `retry_for` of requests in a batch. After this time the row fails, and the circuit breaker of the
batch pauses all rows."""
FIRST_PAUSE_S = 0.5
"""Longest random pause after the first failure. Each further failure doubles it."""
LONGEST_PAUSE_S = 8.0


class Retry:
    """The policy by which failed requests to one backend are sent again: how often, and for how long.

    If a backend has an attribute `retry`, programs send a failed request again if the error is
    `RamifyError.transient`.

    Args:
        retries: Most further attempts of one request. None: any number within `retry_for`. 0: none.
        retry_for: Further attempts begin at most this many seconds after the first failure of a request.
        retries_begun: Most further attempts of one request after failures that are `RamifyError.begun`. After
            the last attempt, the error's `transient` is set to False, so that no caller sends the request
            again. None: only the other limits hold.

    Raises `InvalidRequest` for a number below 0.
    """

    def __init__(
        self,
        retries: int | None = None,
        retry_for: float = RETRY_FOR_S,
        retries_begun: int | None = None,
    ) -> None:
        if retries is not None and retries < 0:
            raise InvalidRequest(f"retries is {retries}; it must be 0 or more.", field="retries")
        if not retry_for >= 0:
            raise InvalidRequest(f"retry_for is {retry_for}; it must be 0 or more.", field="retry_for")
        self.retries = retries
        self.retry_for = retry_for
        self.retries_begun = retries_begun
        self.failing = 0
        """Number of requests that have failed and are still being sent again. While it is above 0, the
        backend counts as out of service, and only one line is logged for the outage."""

    @contextmanager
    def attempts(self, longest: float | None = None) -> Iterator[Attempts]:
        """Begin a block in which one request is sent, repeatedly if need be.

        Yields its `Attempts`. If `longest` is less than `retry_for`, it takes the place of `retry_for`.
        """
        attempts = Attempts(self, self.retry_for if longest is None else min(longest, self.retry_for))
        try:
            yield attempts
        finally:
            self.failing -= attempts.failed > 0

    async def call(self, send: Callable[[], Awaitable[T]]) -> T:
        """Call `send` until it succeeds; returns its result.

        Raises the last error if the request may not be sent again.
        """
        with self.attempts() as attempts:
            while True:
                try:
                    return await send()
                except RamifyError as error:
                    if not await attempts.again(error):
                        raise


class Attempts:
    """The count of the attempts of one request."""

    def __init__(self, retry: Retry, retry_for: float) -> None:
        self._retry, self._retry_for = retry, retry_for
        self.failed = 0
        self._sent = 0
        self._begun = 0
        """Number of failures that were `RamifyError.begun`."""
        self._first_failure = 0.0

    async def again(self, error: RamifyError) -> bool:
        """Wait until the request may be sent again after `error`.

        Returns True after the wait. Returns False at once if the request may not be sent again.
        """
        self._sent += 1
        pause = self._pause(error)
        if pause is None:
            error.sent = self._sent
            if error.begun and self._retry.retries_begun is not None:
                error.transient = False
            return False
        await _sleep(pause)
        return True

    def _pause(self, error: RamifyError) -> float | None:
        """Seconds to wait before the request is sent again; None if it may not be sent again."""
        retry, now = self._retry, _clock()
        if not error.transient or retry.retries == 0:
            return None
        if not self.failed:
            self._first_failure = now
        least = error.retry_after or 0.0
        left = self._first_failure + self._retry_for - now
        self.failed += 1
        self._begun += error.begun
        if self.failed == 1:
            retry.failing += 1
        if left <= least or (retry.retries is not None and self.failed > retry.retries):
            return None
        if error.begun and retry.retries_begun is not None and self._begun > retry.retries_begun:
            return None
        if self.failed == retry.failing == 1:
            bounds = [retry.retries, retry.retries_begun if error.begun else None]
            counts = [one for one in bounds if one is not None]
            bound = f", at most {min(counts)} times," if counts else ""
            logger.warning("%s Requests are sent again%s for up to %g s.", error, bound, self._retry_for)
        most = min(FIRST_PAUSE_S * 2.0 ** (self.failed - 1), LONGEST_PAUSE_S)
        return min(least + random.uniform(0.0, most), left)
