"""Sending a request again after a failure that may pass: exponential backoff with full jitter.

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
"""Longest `retry_for` of a program's requests in a batch, whose circuit breaker then pauses all rows."""
FIRST_PAUSE_S = 0.5
"""Longest random pause after the first failure. Each further failure doubles it."""
LONGEST_PAUSE_S = 8.0


class Retry:
    """Attempts of the requests of one backend: how often and for how long each is sent again.

    A backend with an attribute `retry` has programs send a failed request again where the error is
    `RamifyError.transient`.

    Args:
        retries: Most further attempts of one request. None: as many as begin in time. 0: none.
        retry_for: Seconds after the first failure of a request in which further attempts begin.
        retries_begun: Most further attempts of one request after failures that are `RamifyError.begun`. The
            failure after the last of them is not `transient` any more, so that nothing else sends the request
            again. None: no limit of their own.

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
        """Requests that have failed and are still being sent again. The backend's outage lasts while there
        are any, and the log has one line for it."""

    @contextmanager
    def attempts(self, longest: float | None = None) -> Iterator[Attempts]:
        """The attempts of one request, which ends with the block; for at most `longest` seconds."""
        attempts = Attempts(self, self.retry_for if longest is None else min(longest, self.retry_for))
        try:
            yield attempts
        finally:
            self.failing -= attempts.failed > 0

    async def call(self, send: Callable[[], Awaitable[T]]) -> T:
        """The result of `send`, called until it succeeds; raises its last error."""
        with self.attempts() as attempts:
            while True:
                try:
                    return await send()
                except RamifyError as error:
                    if not await attempts.again(error):
                        raise


class Attempts:
    """The attempts of one request so far."""

    def __init__(self, retry: Retry, retry_for: float) -> None:
        self._retry, self._retry_for = retry, retry_for
        self.failed = 0
        self._sent = 0
        self._begun = 0
        """Failures that are `RamifyError.begun`."""
        self._first_failure = 0.0

    async def again(self, error: RamifyError) -> bool:
        """Wait until the request may be sent again after `error`; False where it may not."""
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
        """Seconds to wait before the request is sent again; None where it is not."""
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
