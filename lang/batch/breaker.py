"""A circuit breaker for the rows of a batch: a failing backend gets no rows for a while, then one as a probe.

    closed       rows 1 to 64 run; the server dies, and rows 40 to 64 fail transiently
    open         no row starts for 1 s (doubled each time, up to 30 s, less a random part)
    half open    row 65 runs alone: it fails, so the circuit opens for 2 s; then row 66 is answered
    closed       rows 40 to 65, 67, … run

A row that fails transiently runs again. A failure is counted only if another row was answered since the
failed row began or last failed, so an outage of the backend counts against no row. A row with two counted
failures may be what takes the server down, so it runs alone, after all other rows. After a third counted
failure the row does not run again: the failure is the row's result.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ramify.errors import ProgramError, is_transient

T = TypeVar("T")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
ATTEMPTS = 3
"""Number of counted transient failures after which a row is not run again."""
GIVE_UP_AFTER_S = 300.0
"""Default of `give_up_after`, in seconds."""
CHECK_S = 1.0
"""Longest time, in seconds, that a caller waits before it looks at the breaker again while the circuit is
open."""


@dataclass(eq=False, slots=True)
class Attempt(Generic[T]):
    """A row that was handed out, and the number of its counted failures."""

    row: T
    answered: int
    """Number of answered rows at the time when this row began or last failed."""
    failures: int = 0


class Breaker(Generic[T]):
    """A circuit breaker that hands out the rows of `rows`, and takes back rows that failed transiently.

    All methods except `may_run` are called by one thread.

    Args:
        give_up_after: Seconds without any answer since a failure, after which `gave_up` is true; None for no
            limit.
        clock: A function that returns the time in seconds, on the same clock as
            `ramify.lang.program.run.Run.heard_s`.
    """

    def __init__(
        self,
        rows: Iterator[T],
        give_up_after: float | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._rows = rows
        self._give_up_after = give_up_after
        self._clock, self._draw = clock, draw
        self._read_all = False
        self._again: deque[Attempt[T]] = deque()
        self._suspects: deque[Attempt[T]] = deque()
        """Rows that are to run alone, after all others."""
        self._alone: Attempt[T] | None = None
        self._probe: Attempt[T] | None = None
        self._open = False
        self._pauses = 0
        """Number of pauses since the circuit was last closed."""
        self._resume_s = 0.0
        self._probe_s = 0.0
        self._failing_since: float | None = None
        self._answered = 0
        self.error: BaseException | None = None

    @property
    def waiting(self) -> int:
        """Number of rows that were taken back and wait to be handed out again."""
        return len(self._again) + len(self._suspects)

    @property
    def exhausted(self) -> bool:
        """Whether no row is left to hand out. If also no row runs, the batch has ended."""
        return self._read_all and not self.waiting

    @property
    def gave_up(self) -> bool:
        return (
            self._failing_since is not None
            and self._give_up_after is not None
            and self._clock() - self._failing_since >= self._give_up_after
        )

    @property
    def reason(self) -> str:
        """The reason why `gave_up` is true, for error messages."""
        return f"the backend gave no answer for {self._give_up_after:g} s. {self.error}"

    def unrun(self) -> ProgramError:
        """Error of a row that was not run because the breaker gave up."""
        error = ProgramError(f"The row was not run: {self.reason}", transient=True)
        error.__cause__ = self.error
        return error

    def take(self, running: int) -> Attempt[T] | None:
        """Hand out the next row to start; None if no row may start now. `running` is the number of rows that
        run."""
        if self._alone is not None:
            return None
        if self._open and (self._probe is not None or self._clock() < self._resume_s):
            return None
        attempt = self._next(running)
        if self._open and attempt is not None:
            self._probe, self._probe_s = attempt, self._clock()
        return attempt

    def _next(self, running: int) -> Attempt[T] | None:
        if self._again and not self._open:  # prefer a new row as probe: a failed one may be the cause
            return self._again.popleft()
        row = next(self._rows, None)
        self._read_all = row is None
        if row is not None:
            return Attempt(row, self._answered)
        if self._again:
            return self._again.popleft()
        if self._suspects and not running:
            self._alone = self._suspects.popleft()
        return self._alone

    def may_run(self, attempt: Attempt[T]) -> bool:
        """Whether a row that was handed out may start. While the circuit is open, only the probe may."""
        return not self._open or attempt is self._probe

    def wait_s(self) -> float | None:
        """Seconds until `take` or `gave_up` may change; None if only the end of a row changes them."""
        if not self._open:
            return None
        now, ends = self._clock(), [CHECK_S]
        if self._probe is None:
            ends.append(self._resume_s - now)
        if self._failing_since is not None and self._give_up_after is not None:
            ends.append(self._failing_since + self._give_up_after - now)
        return min(end for end in ends if end > 0)

    def return_unstarted(self, attempt: Attempt[T]) -> None:
        """Take back a row for which `may_run` returned False."""
        self._again.appendleft(attempt)

    def heard(self, when: float) -> None:
        """Note that the backend sent part of an answer at time `when`."""
        if self._failing_since is not None and when > self._failing_since:
            self._failing_since = None
        if self._probe is not None and when > self._probe_s:
            self._close()

    def ended(self, attempt: Attempt[T], error: BaseException | None, answered: bool) -> bool:
        """Note the end of a row; returns whether the row's result is final. A row whose result is not final
        will run again.

        `answered`: whether the row has sent requests. The success of a row without requests says nothing
        about the backend.
        """
        self._read_all = False  # `rows` may have more now
        probed = attempt is self._probe
        if probed:
            self._probe = None
        if attempt is self._alone:
            self._alone = None
        if not is_transient(error):
            if answered:
                self._answered += 1
                self._failing_since = None
                if probed:
                    self._close()
            return True
        self.error = error
        self._fail(probed, error)
        if self._answered > attempt.answered:
            attempt.answered = self._answered
            attempt.failures += 1
        if attempt.failures >= ATTEMPTS:
            return True
        (self._suspects if attempt.failures == ATTEMPTS - 1 else self._again).append(attempt)
        return False

    def _close(self) -> None:
        self._open, self._pauses, self._probe, self._failing_since = False, 0, None, None

    def _fail(self, probed: bool, error: BaseException | None) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if self._open and not probed:
            return  # the row was running when the circuit opened
        pause = min(FIRST_PAUSE_S * 2 ** min(self._pauses, 10), LONGEST_PAUSE_S)
        self._open = True
        self._pauses += 1
        self._resume_s = now + max(pause * (0.5 + self._draw() / 2), _retry_after(error))


def _retry_after(error: BaseException | None) -> float:
    """The longest pause that the backend asked for, in seconds."""
    longest = 0.0
    while error is not None:
        longest = max(longest, getattr(error, "retry_after", None) or 0.0)
        error = error.__cause__
    return longest
