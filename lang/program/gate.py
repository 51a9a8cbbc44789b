"""A one-shot event that threads block on and tasks of any event loop await."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

SIGNAL_S = 1.0
"""Waits are cut into pieces of this length: CPython sees a signal that comes just before a lock is waited
for only when the wait ends."""


class Gate:
    """Opens once and stays open. Each step of a program has one, so that making it costs little."""

    __slots__ = ("_calls", "_lock", "is_open")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self.is_open = False

    def open(self) -> None:
        with self._lock:
            if self.is_open:
                return
            self.is_open = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def on_open(self, call: Callable[[], None]) -> None:
        """Call `call` when it opens, in the thread that opens it; at once if it is open."""
        with self._lock:
            if not self.is_open:
                self._calls.append(call)
                return
        call()

    def block(self) -> None:
        """Block this thread until it is open; Ctrl-C gets through."""
        if self.is_open:
            return
        opened = threading.Event()
        self.on_open(opened.set)
        while not opened.wait(SIGNAL_S):
            pass

    async def wait(self) -> None:
        """Await it. A cancelled waiter leaves the gate as it is."""
        if self.is_open:
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the waiter's loop has closed since
                loop.call_soon_threadsafe(finish)

        self.on_open(wake)
        await waiter
