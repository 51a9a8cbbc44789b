"""The connections to one server: those that serve nothing are kept for a while, and closed by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque

from ramify.lang.backends.connection import Connection
from ramify.loop import in_background

KEEP_S = 15.0
"""How long a connection that serves nothing is kept. What forwards packets on the way forgets one after a
minute or more, and says nothing."""
LAST_BYTES_S = 0.5
"""How long the end of an answer may take, once all that matters of it has come."""


class Pool:
    """Connections of the process's background loop. Those of other loops, which may end before the next
    request is made, serve one request.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._open: set[Connection] = set()
        self._free: deque[tuple[float, Connection]] = deque()
        """Those that serve nothing, and since when: oldest first."""
        self._sweep_is_due = False

    def take(self) -> Connection | None:
        """The one that was used last, if there is one."""
        if not in_background():
            return None
        self._see_fork()
        while self._free:
            _, connection = self._free.pop()
            if connection.reusable:
                return connection
            self._drop(connection)
        return None

    def add(self, connection: Connection) -> None:
        """Note a new connection, which its caller uses."""
        if in_background():
            self._see_fork()
            self._loop = asyncio.get_running_loop()
            self._open.add(connection)

    def take_back(self, connection: Connection, *, finished: bool = False) -> None:
        """Its caller is done with it: keep it where its answer is whole, else close it.

        `finished`: all that matters of the answer has come, and its last bytes are waited for here.
        """
        if connection in self._open and connection.reusable:
            self._free.append((self._now(), connection))
            self._sweep_later()
        elif connection in self._open and finished and connection.pending:
            assert self._loop is not None
            late = self._loop.call_later(LAST_BYTES_S, connection.close)

            def ended() -> None:
                late.cancel()
                self.take_back(connection)

            connection.on_end = ended
        else:
            self._drop(connection)

    async def aclose(self) -> None:
        """Close all; what they serve fails."""
        self.close_from_anywhere()
        await asyncio.sleep(0)  # on the loop itself they are closed now

    def close_from_anywhere(self) -> None:
        """`aclose` from any thread, also while the interpreter ends."""
        if self._process != os.getpid():
            _of_parents.append(self)
        elif self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed in this very moment
                self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        for connection in list(self._open):
            self._drop(connection)
        self._free.clear()

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()

    def _sweep_later(self) -> None:
        if not self._sweep_is_due:
            assert self._loop is not None
            self._sweep_is_due = True
            self._loop.call_later(KEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweep_is_due = False
        while self._free and (self._free[0][0] <= self._now() - KEEP_S or not self._free[0][1].reusable):
            self._drop(self._free.popleft()[1])
        if self._free:
            self._sweep_later()

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def _see_fork(self) -> None:
        """In a forked child, begin anew: the connections are its parent's."""
        if self._process != os.getpid():
            _of_parents.append(self._open)
            self.__init__()  # type: ignore[misc]


_of_parents: list[object] = []
"""Holds what a forked child must not so much as free: closing a transport there would also stop its parent
from hearing of it, as both share what they wait on (epoll)."""
