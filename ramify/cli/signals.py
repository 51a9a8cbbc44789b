"""Ctrl-C and SIGTERM: the first stops a command in good order, the second ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import NoReturn, TypeVar

T = TypeVar("T")

_received: int | None = None
"""Number of the first signal since `stopped_by_signals` began; None before it."""
_stop: Callable[[], object]
"""Function that the first signal calls."""


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise ``KeyboardInterrupt(signal)`` in the block at the first Ctrl-C or SIGTERM. The second ends the
    process at once, with the exit status 128 + signal; its workers end with it.

    A signal that the process was started to ignore, as by nohup, stays ignored. In another thread than the
    main one, which gets no signals, nothing changes.
    """
    global _received, _stop
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received, _stop = None, _interrupt
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) != signal.SIG_IGN]
    before = [(number, signal.signal(number, _on_signal)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def told_on_interrupt(note: Callable[[], str]) -> Iterator[None]:
    """Add ``note()`` to a KeyboardInterrupt of the block: what is done, where it is kept, how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(note())
        raise


def run_async(awaitable: Awaitable[T]) -> T:
    """Run `awaitable` in a new event loop.

    The first signal cancels it. It can then end in good order, and KeyboardInterrupt is raised from its
    CancelledError. asyncio does the same, but only for Ctrl-C, and only with Python's own handler.
    """

    async def cancellable() -> T:
        global _stop
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        _stop = lambda: loop.call_soon_threadsafe(task.cancel)  # noqa: E731  # wakes the loop
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            if _received is None:
                raise
            raise KeyboardInterrupt(_received) from error
        finally:
            _stop = _interrupt

    return asyncio.run(cancellable())


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _received
    if _received is not None:
        os._exit(128 + number)
    _received = number
    _stop()


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt(_received)
