"""The life of an engine's processes: their start at the first use, their end, and forks of this process."""

from __future__ import annotations

import asyncio
import atexit
import os
import weakref
from collections.abc import Callable

from ramify.errors import EngineClosed, EngineError
from ramify.loop import background_loop, wait
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.models.pool import ModelPool


class Life:
    """The processes of one model, or of a pool of models, from the first use to the end.

    processes : what is started and closed
    on_start : called after the start
    """

    def __init__(self, processes: Frontend | ModelPool, on_start: Callable[[], None] | None = None) -> None:
        self.processes = processes
        self._on_start = on_start
        self._lock: asyncio.Lock | None = None
        self._owner: int | None = None
        """Id of the process that has started the engine; None before the start."""
        self.closed = False
        _open.add(self)

    @property
    def started(self) -> bool:
        return self._owner == os.getpid()

    @property
    def forked(self) -> bool:
        """Whether the engine was started by another process, from which this one was forked."""
        return self._owner not in (None, os.getpid())

    @property
    def state(self) -> str | None:
        """The state in words; None if the engine has started, and its frontends know the state."""
        if self.closed:
            return "closed"
        if self.forked:
            return f"of process {self._owner}"
        if not self.started:
            return "starting" if self._lock is not None and self._lock.locked() else "not started"
        return None

    async def ensure_started(self) -> None:
        """Start the processes unless they have been started. Raises `EngineClosed`, and `EngineError` in a
        forked child."""
        if self.started:
            return
        if self.forked:
            raise EngineError(
                f"This engine belongs to process {self._owner}; process {os.getpid()} was forked from it.",
                remedy="Make an Engine in each process, or let them share a server: rm.RuntimeEndpoint.",
            )
        if self.closed:
            raise EngineClosed("The engine has been closed.")
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if not self.started:
                await self.processes.start()
                self._owner = os.getpid()
                _open.add(self)
                if self._on_start is not None:
                    self._on_start()

    def close(self) -> None:
        """End the processes. May be called twice."""
        if self.closed or self.forked:
            return
        self.closed = True
        if self.started and background_loop().is_running():
            wait(self.processes.aclose())
        else:
            self.processes.close_now()
        _open.discard(self)

    async def aclose(self) -> None:
        """Do what `close` does, on the background loop."""
        if self.forked:
            return
        self.closed = True
        await self.processes.aclose()
        _open.discard(self)


_open: weakref.WeakSet[Life] = weakref.WeakSet()
_of_parent: list[Life] = []
"""Engines of the parent, in a forked child. They are never freed, as that would close sockets that the child
shares with its parent."""


def _leave_to_parent() -> None:
    """Leave the parent's engines open at the exit of a forked child."""
    _of_parent.extend(_open)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _close_all() -> None:
    for life in list(_open):
        life.processes.close_now()
