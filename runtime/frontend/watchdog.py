"""A watchdog of the event loop: it logs the code that blocks the loop.

    asked      the watchdog schedules a call on the loop, every EVERY_S
    1 s later  not answered: "The event loop has been blocked for 1.0 s", with the stack of the loop's thread
    2 s, 4 s   the same again
    answered   "The event loop did not run for 5.2 s."

If the loop is waiting for events although it has a call to run, no code blocks the loop: the loop's thread
was not scheduled, and the log line says so.

Code that holds the interpreter's lock, such as one long multiplication, stops the watchdog too. Then only the
last line is logged.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import CodeType, FrameType

log = logging.getLogger("ramify")

EVERY_S = 0.5
BLOCKED_S = 1.0
"""Shortest blocking that is reported, in seconds. Garbage collection and large bodies take up to 0.3 s."""
_RUN_ONCE = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]
MOST_FRAMES = 12
"""Number of innermost stack frames that are logged."""


class LoopWatchdog:
    """A daemon thread that watches the event loop of the calling thread, from `start` to `stop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        blocked_s: float = BLOCKED_S,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_s = 0.0
        """Total seconds for which the loop did not run, counting only times of at least `blocked_s`."""
        self._loop = loop
        self._thread = threading.get_ident()
        self._blocked_s = blocked_s
        self._every_s = every_s
        self._clock = clock
        self._asked: float | None = None
        self._answered: float | None = None
        self._runner: CodeType | None = None
        """The code from which the loop calls its callbacks. While uvloop waits for events, this code is the
        innermost frame."""
        self._next_s = blocked_s
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="ramify-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self.look()
            except RuntimeError:  # the loop is closed
                return

    def look(self) -> None:
        """Schedule a call on the loop, or check whether the last call has run. Raises RuntimeError if the
        loop is closed."""
        if self._asked is not None and self._answered is None:
            self._report(self._clock() - self._asked)
            return
        if self._asked is not None and self._answered is not None:
            blocked_s = self._answered - self._asked
            if blocked_s >= self._blocked_s:
                self.total_s += blocked_s
                log.warning("The event loop did not run for %.1f s.", blocked_s)
        self._answered, self._next_s = None, self._blocked_s
        self._asked = self._clock()
        self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._answered = self._clock()
        self._runner = sys._getframe(1).f_code

    def _waits(self, frame: FrameType) -> bool:
        """Whether the loop is waiting for events; `frame` is the innermost frame of its thread."""
        if frame.f_back is not None and frame.f_back.f_code is _RUN_ONCE:
            return frame.f_code.co_name == "select"
        return frame.f_code is self._runner

    def _report(self, waited_s: float) -> None:
        frame = sys._current_frames().get(self._thread)
        if waited_s < self._next_s or frame is None:
            return
        self._next_s = 2 * waited_s
        if self._waits(frame):
            log.warning(
                "The event loop has not run for %.1f s, and no code blocks it: its thread was not scheduled. "
                "The machine is busy, the process was stopped, or a thread holds the interpreter's lock.",
                waited_s,
            )
            return
        stack = "".join(traceback.format_stack(frame)[-MOST_FRAMES:])
        log.warning(
            "The event loop has been blocked for %.1f s by %s (%s, line %d); no request goes on:\n%s",
            waited_s,
            frame.f_code.co_qualname,
            frame.f_code.co_filename,
            frame.f_lineno,
            stack,
        )
