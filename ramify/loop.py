"""One background event loop for the whole process. Blocking functions run their coroutines on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

SIGNAL_CHECK_S = 1.0
"""Longest single wait of a thread, in seconds. If a signal arrives just before a wait, CPython handles it
only when the wait ends."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """The background loop of this process. The first call starts it in a daemon thread."""
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            loop = new_loop()
            started = threading.Event()
            loop.call_soon(started.set)
            threading.Thread(target=loop.run_forever, name="ramify-loop", daemon=True).start()
            started.wait()
            _loop = loop
        return _loop


def in_background() -> bool:
    """Whether the running event loop is the background loop."""
    return asyncio.get_running_loop() is _loop


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start `coroutine` on the background loop; returns a future for its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` on the background loop, block until it ends, and return its result.

    Ctrl-C cancels it.
    """
    if threading.current_thread().name == "ramify-loop":
        coroutine.close()
        raise RuntimeError("A blocking call was made on Ramify's own event loop; use the async form there.")
    future = submit(coroutine)
    try:
        while True:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return future.result(SIGNAL_CHECK_S)
            if future.done():
                return future.result()  # the coroutine itself raised the TimeoutError
    except BaseException:
        future.cancel()
        raise


@contextlib.asynccontextmanager
async def cancel_at_end(tasks: Iterable[asyncio.Future[Any]]) -> AsyncIterator[None]:
    """At the end of the block, cancel those of `tasks` that still run, and wait until they have ended."""
    try:
        yield
    finally:
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def new_loop() -> asyncio.AbstractEventLoop:
    """A new event loop: of uvloop if it is installed, else of asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_parents_loops: list[asyncio.AbstractEventLoop] = []
"""In a child process made by `os.fork`: the loops of the parent. They are never freed, as freeing them would
close files of the parent."""


def _reset_after_fork() -> None:
    """Forget the loop in a child process made by `os.fork`, where no thread runs the loop."""
    global _loop, _lock
    _lock = threading.Lock()
    if _loop is not None:
        _parents_loops.append(_loop)
        _loop = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
