"""An engine core on another machine, under the interface of `EngineSupervisor`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import secrets
import time

from ramify.engine_messages import ExportPrefix, Failed, GetStats, GetTree, ImportPrefix, Reply, ToTokenizer
from ramify.errors import EngineClosed, EngineError, WorkerDied
from ramify.model_info import ModelInfo
from ramify.ray.snapshots import RemoteSnapshots
from ramify.ray.wire import (
    Goodbye,
    Hello,
    Transport,
    decode_answer,
    decode_item,
    encode,
    session_id,
)
from ramify.runtime.faults import errors_logged
from ramify.runtime.fleet.replica import HEARTBEAT, HEARTBEAT_S, EngineEvents

log = logging.getLogger("ramify")

RETRY_S = 0.5
"""Seconds between two attempts to open a session with a replica."""


class RemoteEngine:
    """An `EngineCore`: the engine core of one replica. The callbacks run on the event loop of `start`.

    Until `aclose`, the end of a session is reported as the death of the engine core, and the beginning of the
    next session as its restart. `snapshots` has the KV snapshots that are on their way between any two engine
    cores of the fleet.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        snapshots: RemoteSnapshots,
        events: EngineEvents,
        retry_s: float = RETRY_S,
    ) -> None:
        self._retry_s = retry_s
        self._name = name
        self._transport = transport
        self._snapshots = snapshots
        self._events = events
        self._up = False
        self._frontend = secrets.token_hex(8)
        self._sessions = itertools.count()
        self._session = ""
        self._number = 0
        self._last_message = time.monotonic()
        self._context = contextvars.copy_context()
        """The context, outside any HTTP request, in which messages are sent. When the client of a request
        disconnects, Ray Serve cancels the calls that were made in the request's context. But messages about
        the request must still arrive."""
        self._started: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: asyncio.Task[str] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self.info: ModelInfo | None = None
        self.max_prompt_tokens = 0
        self.page_bytes = 0

    async def start(self) -> None:
        """Wait for the first session. Raises `EngineClosed` if `aclose` is called before."""
        self._started = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        await self._started

    async def aclose(self) -> None:
        self.close_now()
        await asyncio.gather(*self._tasks, *self._sending, return_exceptions=True)

    def close_now(self) -> None:
        """Close without waiting. Needs no running event loop."""
        self._up = False
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            for task in (*self._tasks, *self._sending):
                task.cancel()
            if self._started is not None and not self._started.done():
                self._started.set_exception(EngineClosed(f"Replica {self._name} is gone."))

    @property
    def pids(self) -> dict[str, int]:
        """Always empty, as the processes are on another machine."""
        return {}

    @property
    def restarting(self) -> bool:
        return not self._up

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message from the replica."""
        return time.monotonic() - self._last_message

    # --- messages ---------------------------------------------------------------------------------

    def send(self, message: ToTokenizer) -> None:
        """Send a message. While there is no session, it is dropped."""
        encoded = encode(message)
        if not self._up:
            return
        if isinstance(message, ExportPrefix | ImportPrefix):
            sending = self._transfer(self._session, message, encoded)
        else:
            self._number += 1
            sending = self._send(self._session, self._number, encoded)
        task = asyncio.create_task(sending, context=self._context.copy())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, session: str, number: int, message: bytes) -> None:
        try:
            await self._transport.send(self._name, session, number, message)
        except Exception as error:
            # A lost message would hold up those behind it, so the session ends.
            if session == self._session and self._listening is not None:
                log.debug("replica %s: %s", self._name, error)
                self._listening.cancel()

    async def _transfer(self, session: str, message: ExportPrefix | ImportPrefix, encoded: bytes) -> None:
        """Export or import a KV snapshot.

        The message has no number, as its order does not matter: requests that need the snapshot are sent only
        after it has arrived.
        """
        name = message.path
        answer: Reply | Failed
        try:
            if isinstance(message, ExportPrefix):
                found, snapshot = await self._transport.export(self._name, session, encoded)
                self._snapshots.put(name, snapshot)
            else:
                snapshot = self._snapshots.get(name)
                found = await self._transport.import_(self._name, session, encoded, snapshot)
            answer = decode_answer(found)
        except (
            Exception
        ) as error:  # the KV snapshot is lost; the loss of a replica is reported by the session
            answer = Failed(rid=message.rid, error=EngineError(_reason(error)).to_info())
        if session == self._session and self._up:
            self._last_message = time.monotonic()
            self._events.receive(answer)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.send(GetStats(rid=HEARTBEAT))

    # --- sessions ---------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            self._session, self._number = session_id(self._frontend, next(self._sessions)), 0
            self._listening = asyncio.create_task(self._listen(self._session))
            try:
                (result,) = await asyncio.gather(self._listening, return_exceptions=True)
            except asyncio.CancelledError:
                self._listening.cancel()
                await asyncio.gather(self._listening, return_exceptions=True)
                raise
            self._ended(result if isinstance(result, str) else _reason(result))
            await asyncio.sleep(self._retry_s)

    def _ended(self, reason: str) -> None:
        was_up, self._up = self._up, False
        for task in list(self._sending):
            task.cancel()
        if was_up:
            log.error("replica %s is lost: %s", self._name, reason)
            message = f"Replica {self._name} was lost while this request was running."
            self._events.died(WorkerDied(message, remedy="Send it again."))
        else:
            log.debug("replica %s has no session: %s", self._name, reason)

    async def _listen(self, session: str) -> str:
        """Receive messages until the session ends. Returns the reason that the replica gives."""
        async with contextlib.aclosing(self._transport.open(self._name, session)) as items:
            async for item in items:
                self._last_message = time.monotonic()
                for message in decode_item(item):
                    if isinstance(message, Hello):
                        self._begin(message)
                    elif isinstance(message, Goodbye):
                        return message.reason
                    else:
                        with errors_logged(f"handling a {type(message).__name__}"):
                            self._events.receive(message)
        return "The session ended."

    def _begin(self, hello: Hello) -> None:
        self.info, self.max_prompt_tokens = hello.info, hello.max_prompt_tokens
        self.page_bytes = hello.page_bytes
        self._up = True
        assert self._started is not None
        if self._started.done():
            self._events.restarted()
        else:
            self._started.set_result(None)
        self.send(GetTree())  # the tree is not empty if other frontends have used the engine core


def _reason(result: BaseException) -> str:
    lines = str(result).splitlines()
    return f"{type(result).__name__}: {lines[0] if lines else ''}"
