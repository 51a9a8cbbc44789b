"""The replica's side of sessions: one engine core, shared by the frontends that use it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec

from ramify.engine_messages import (
    Abort,
    ExportPrefix,
    Failed,
    ImportPrefix,
    LoadLora,
    Reply,
    StepText,
    Texts,
    ToFrontend,
    ToTokenizer,
    TreeChange,
    UnloadLora,
)
from ramify.errors import EngineError, InvalidRequest, WorkerDied
from ramify.messages import Generate
from ramify.ray.snapshots import ReplicaSnapshots
from ramify.ray.wire import (
    Goodbye,
    Hello,
    ToSession,
    decode_message,
    encode,
    session_parts,
)
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet.replica import HEARTBEAT, SILENT_S, EngineEvents
from ramify.runtime.fleet.supervisor import EngineSupervisor

log = logging.getLogger("ramify")

SUPERSEDED = "The frontend has a newer session."


class _Asked(NamedTuple):
    """The session that sent a request or call, and the id that the session gave it."""

    session: Session
    rid: str


@dataclasses.dataclass(slots=True)
class _Adapter:
    """A LoRA adapter of the engine core. `users`: the sessions that have loaded it."""

    path: str
    revision: str
    users: set[str]


class Session:
    """A session: the messages to one frontend, and its running requests."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.heard_at = now
        self.running: dict[str, asyncio.Future[None]] = {}
        """Request id → future that is resolved when the request has ended."""
        self.next_number = 1
        self.early: dict[int, ToTokenizer | Failed] = {}
        """Message number → message that arrived before its predecessors."""
        self._queue: deque[ToSession] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def put(self, *messages: ToSession) -> None:
        self._queue.extend(messages)
        self._wake.set()

    def end(self, reason: str) -> None:
        """End the session. The last message to the frontend is `Goodbye` with the `reason`."""
        for future in self.running.values():
            if not future.done():
                future.set_result(None)
        self._ended = True
        self.put(Goodbye(reason=reason))

    async def items(self) -> AsyncIterator[bytes]:
        """Yield items until the session ends. An item has all messages since the previous item."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages = list(self._queue)
            self._queue.clear()
            if messages:
                yield encode(messages)
            if self._ended and not self._queue:
                return

    def engine_id(self, rid: str) -> str:
        """Id in the engine core for a request or control call with the id `rid` in this session.

        It is unique, while two sessions may give equal ids.
        """
        return f"{self.name}/{rid}"

    def forget(self, rid: str) -> None:
        future = self.running.pop(rid, None)
        if future is not None and not future.done():
            future.set_result(None)


class EngineHost:
    """An owner of an engine core, which is shared by all frontends that open sessions.

    `options` are passed to `make_engine`, which is `EngineSupervisor` except in tests. `clock` returns
    seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_engine: Callable[..., Any] = EngineSupervisor,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self._clock = clock
        self._engine = make_engine(
            config,
            None,
            **options,
            events=EngineEvents(self._received, self._died, self._restarted, self._gave_up),
        )
        self._sessions: dict[str, Session] = {}
        self._asked: dict[str, _Asked] = {}
        """Id in the engine core → request or control call in a session."""
        self._loading: dict[str, tuple[str, LoadLora]] = {}
        """Id in the engine core → (session, its order to load an adapter)."""
        self._adapters: dict[str, _Adapter] = {}
        """Name → loaded adapter. A restarted frontend registers the same adapters again."""
        self._snapshots = ReplicaSnapshots(self._engine.send)
        self._up = asyncio.Event()
        self._gone: EngineError | None = None

    async def start(self) -> None:
        """Start the engine core. Raises the error that keeps it from starting."""
        await self._engine.start()
        if not self._engine.restarting:
            self._up.set()

    async def aclose(self) -> None:
        self._end_all("The replica has been stopped.")
        await self._snapshots.aclose()
        await self._engine.aclose()

    def check(self) -> None:
        """Raise `EngineError` if the engine core is gone, or has been silent for `SILENT_S`."""
        if self._gone is not None:
            raise self._gone
        if self._up.is_set() and self._engine.heartbeat_age_s > SILENT_S:
            raise EngineError(f"The scheduler has been silent for {self._engine.heartbeat_age_s:.1f} s.")

    # --- sessions ---------------------------------------------------------------------------------

    async def session(self, name: str) -> AsyncIterator[bytes]:
        """Begin a session when the engine core is up, and yield its items.

        Closing the iterator ends the session.

        A frontend has at most one live session, its newest. This host may not notice that a stream broke on
        the frontend's side, and calls may overtake one another. So a new session ends older sessions of the
        frontend, and ends itself if there is a newer one.
        """
        frontend, number = session_parts(name)
        await self._up.wait()
        if self._gone is not None:
            raise self._gone
        assert self._engine.info is not None
        self._end_silent()
        for other in list(self._sessions):
            its_frontend, its_number = session_parts(other)
            if its_frontend != frontend:
                continue
            if its_number > number:
                yield encode([Goodbye(reason=SUPERSEDED)])
                return
            self._end(other, SUPERSEDED)
        session = self._sessions[name] = Session(name, self._clock())
        session.put(
            Hello(
                info=self._engine.info,
                max_prompt_tokens=self._engine.max_prompt_tokens,
                page_bytes=self._engine.page_bytes,
            )
        )
        try:
            async for item in session.items():
                yield item
        finally:
            self._close(name)

    async def send(self, name: str, number: int, message: bytes) -> bool:
        """Take message `number` of a session.

        Returns at once, except for a `Generate`: then it returns when the request has ended.

        As calls may overtake one another, a message that arrives early is kept until those before it have
        come. Returns False if there is no such session.
        """
        session = self._sessions.get(name)
        if session is None:
            return False
        session.heard_at = self._clock()
        decoded = _decoded(message)
        ended: asyncio.Future[None] | None = None
        if isinstance(decoded, Generate):
            ended = session.running[decoded.rid] = asyncio.get_running_loop().create_future()
        session.early[number] = decoded
        while session.next_number in session.early:
            self._take(name, session, session.early.pop(session.next_number))
            session.next_number += 1
        if ended is not None:
            await ended
        return True

    async def export(self, name: str, message: bytes) -> tuple[bytes, bytes | None] | None:
        """Handle an `ExportPrefix` of a session.

        Returns (answer, KV snapshot or None), or None if there is no such session. Raises
        `msgspec.ValidationError` for a malformed message.
        """
        if name not in self._sessions:
            return None
        decoded = msgspec.msgpack.decode(message, type=ExportPrefix)
        info = self._engine.info  # set before there are sessions
        answer, snapshot = await self._snapshots.export(decoded, self._engine.page_bytes, info.page_size)
        return encode(answer), snapshot

    async def import_(self, name: str, message: bytes, snapshot: object) -> bytes | None:
        """Handle an `ImportPrefix` of a session.

        Returns the answer; None if there is no such session. Raises `msgspec.ValidationError` for a malformed
        message.
        """
        if name not in self._sessions:
            return None
        decoded = msgspec.msgpack.decode(message, type=ImportPrefix)
        return encode(await self._snapshots.import_(decoded, snapshot))

    def _take(self, name: str, session: Session, message: ToTokenizer | Failed) -> None:
        rid = getattr(message, "rid", "")
        if isinstance(message, Failed):
            session.put(message)
        elif isinstance(message, LoadLora) and self._has(message):
            adapter = self._adapters[message.name]
            adapter.users.add(name)
            session.put(Reply(rid=rid, lora=adapter.revision))
        elif isinstance(message, UnloadLora) and self._leave_adapter(name, message.name):
            session.put(Reply(rid=rid))
        elif rid != HEARTBEAT:  # answers to the engine core's own heartbeats go to all sessions
            if rid:
                engine_id = session.engine_id(rid)
                message = msgspec.structs.replace(message, rid=engine_id)
                if not isinstance(message, Abort):
                    self._asked[engine_id] = _Asked(session, rid)
                if isinstance(message, LoadLora):
                    self._loading[engine_id] = (name, message)
            self._engine.send(message)

    def _has(self, message: LoadLora) -> bool:
        adapter = self._adapters.get(message.name)
        return adapter is not None and adapter.path == message.path

    def _leave_adapter(self, session: str, name: str) -> bool:
        """Remove `session` from the users of an adapter; returns whether other sessions still use the
        adapter."""
        adapter = self._adapters.get(name)
        if adapter is None:
            return False
        adapter.users.discard(session)
        if not adapter.users:
            del self._adapters[name]
        return bool(adapter.users)

    def _close(self, name: str) -> None:
        """Remove a session: abort its requests, and unload the adapters that no other session uses."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for rid in list(session.running):
            session.forget(rid)
            self._asked.pop(session.engine_id(rid), None)
            self._engine.send(Abort(rid=session.engine_id(rid)))
        for adapter in [key for key, one in self._adapters.items() if name in one.users]:
            if not self._leave_adapter(name, adapter):
                self._engine.send(UnloadLora(rid="", name=adapter))

    def _end_silent(self) -> None:
        """End the sessions of silent frontends.

        A frontend that died with its machine does not close its session.
        """
        now = self._clock()
        for name, session in list(self._sessions.items()):
            if now - session.heard_at > SILENT_S:
                self._end(name, "The frontend has been silent.")

    def _end(self, name: str, reason: str) -> None:
        session = self._sessions[name]
        self._close(name)
        session.end(reason)

    def _end_all(self, reason: str) -> None:
        self._up.clear()
        sessions, self._sessions = self._sessions, {}
        for ours in (self._asked, self._loading, self._adapters):
            ours.clear()
        self._snapshots.engine_lost(reason)
        for session in sessions.values():
            session.end(reason)

    # --- the engine core ---------------------------------------------------------------------------------

    def _received(self, message: ToFrontend) -> None:
        if isinstance(message, StepText):
            self._share_out(message)
        elif isinstance(message, TreeChange):
            for session in self._sessions.values():
                session.put(message)
        elif isinstance(message, Reply | Texts | Failed):
            if self._snapshots.answered(message):
                return
            loading = self._loading.pop(message.rid, None)
            if loading is not None and isinstance(message, Reply):
                user, order = loading
                if user in self._sessions:
                    self._adapters[order.name] = _Adapter(order.path, message.lora, {user})
                else:  # its session has ended meanwhile
                    self._engine.send(UnloadLora(rid="", name=order.name))
            if message.rid == HEARTBEAT:
                self._end_silent()
                for session in self._sessions.values():
                    session.put(message)
            elif (asked := self._asked.pop(message.rid, None)) is not None:
                asked.session.put(msgspec.structs.replace(message, rid=asked.rid))
                asked.session.forget(asked.rid)

    def _share_out(self, message: StepText) -> None:
        by_session: dict[Session, list[Any]] = {}
        for chunk in message.chunks:
            asked = self._asked.get(chunk.rid)
            if asked is None:
                continue
            session, rid = asked
            by_session.setdefault(session, []).append(msgspec.structs.replace(chunk, rid=rid))
            if chunk.finish is not None:
                del self._asked[chunk.rid]
                session.forget(rid)
        for session, chunks in by_session.items():
            session.put(StepText(chunks=tuple(chunks)))

    def _died(self, error: WorkerDied) -> bool:
        self._end_all(error.message)
        return False  # the frontends do not say which request is the cause

    def _restarted(self) -> None:
        self._up.set()

    def _gave_up(self, error: EngineError) -> None:
        self._gone = error
        self._end_all(error.message)
        self._up.set()  # wakes the sessions that wait, which then raise


def _decoded(message: bytes) -> ToTokenizer | Failed:
    """Decode a message. For a malformed message, returns the `Failed` that answers it."""
    try:
        return decode_message(message)
    except msgspec.ValidationError as error:
        rid = msgspec.msgpack.decode(message).get("rid", "")
        return Failed(rid=rid, error=InvalidRequest(f"The request is malformed: {error}").to_info())
