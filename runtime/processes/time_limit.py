"""A limit on the processor time of a block of Python, in the main thread of a process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class ProcessorTimeOver(BaseException):
    """Raised within the block when its time is over. An `except Exception` in the block does not catch it."""


@contextlib.contextmanager
def processor_time_limit(seconds: float) -> Iterator[None]:
    """Raise `ProcessorTimeOver` in the block after `seconds` of the process's processor time (setitimer(2),
    ITIMER_VIRTUAL), between two operations of the interpreter. Only for the main thread."""

    def over(number: int, frame: FrameType | None) -> None:
        raise ProcessorTimeOver

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
