"""A one-shot event that threads block on and tasks of any event loop await."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, TimeoutError

from ramify.loop import SIGNAL_CHECK_S


class Event(Future[None]):
    """An event that is set once, by `set`, and stays set."""

    def set(self) -> None:
        with contextlib.suppress(InvalidStateError):
            self.set_result(None)

    def is_set(self) -> bool:
        return self.done()

    def on_set(self, call: Callable[[], None]) -> None:
        """Call `call` when the event is set, in the thread that sets it. If the event is set already, call it
        now."""
        self.add_done_callback(lambda _: call())

    def block(self) -> None:
        """Block this thread until the event is set; Ctrl-C interrupts it."""
        while not self.is_set():
            with contextlib.suppress(TimeoutError):
                self.result(SIGNAL_CHECK_S)

    async def wait(self) -> None:
        """Await the event. Cancelling the waiter does not cancel the event."""
        if not self.is_set():
            await asyncio.shield(asyncio.wrap_future(self))
