"""A limit on the processor time of a block of Python, in the main thread of a process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class ProcessorTimeOver(BaseException):
    """Raised within the block. No `except Exception` of the code in it stops it."""


@contextlib.contextmanager
def processor_time_limit(seconds: float) -> Iterator[None]:
    """Raise `ProcessorTimeOver` after that much processor time of the process (setitimer(2),
    ITIMER_VIRTUAL), between two operations of the interpreter. For the main thread alone."""

    def over(number: int, frame: FrameType | None) -> None:
        raise ProcessorTimeOver

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
