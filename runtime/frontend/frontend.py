"""The frontend's end of the ring: request ids, answers, cancellation, back-pressure, supervision.

`Engine` in a user's script and the HTTP server share it. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from ramify.errors import (
    EngineClosed,
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RamifyError,
    WorkerDied,
    from_info,
)
from ramify.messages import Generate, ModelInfo, SchedulerStats, TextChunk
from ramify.ring_messages import (
    Abort,
    AwaitTools,
    EndProgram,
    Failed,
    FlushCache,
    GetSnapshot,
    GetStats,
    Reply,
    Snapshot,
    StepText,
    ToFrontend,
)
from ramify.runtime.config import EngineConfig
from ramify.runtime.frontend.validation import to_be_validated, validated
from ramify.runtime.model.hub.resolve import resolve
from ramify.runtime.processes.launch import Ring
from ramify.runtime.processes.worker_process import log
from ramify.runtime.processes.workers import Workers

HEARTBEAT_S = 2.0
"""How often the ring is asked for a sign of life."""

STALE_S = 30.0
"""Without a sign of life for so long the engine counts as unhealthy; a step takes seconds at most."""

MAX_TOKEN_CHARACTERS = 128
"""More than vocabularies have in a token, or just about (runs of spaces)."""

RESTART_LIMIT = 3
"""Restarts within RESTART_WINDOW_S after which the engine gives up."""
RESTART_WINDOW_S = 60.0


class Frontend:
    """Takes requests, hands out their chunks, and keeps the ring alive.

    `workers` are those of the first ring, where they have been started already.
    """

    def __init__(self, config: EngineConfig, workers: Workers | None = None) -> None:
        self._config = config
        self._workers = workers
        self._ring: Ring | None = None
        self._info: ModelInfo | None = None
        self._outputs: dict[str, _Output] = {}
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        self._prefix = secrets.token_hex(4)
        self._count = 0
        self._last_sign = 0.0
        self._heartbeat: asyncio.Task[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._restarts: collections.deque[float] = collections.deque()
        self._closed: EngineError | None = EngineClosed("The engine has not been started.")
        self._draining = False
        self._empty = asyncio.Event()
        self.max_prompt_tokens = 0
        self.load_s = 0.0

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Resolve the model and start the ring; raises when either fails."""
        self._files = await asyncio.to_thread(
            resolve, self._config.model, weights=self._config.load_format != "dummy"
        )
        await self._start_ring()
        self._heartbeat = asyncio.create_task(self._beat())

    async def drain(self, seconds: float) -> None:
        """Take no new requests and wait for the running ones, at most so long."""
        self._draining = True
        if self._outputs:
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), seconds)
            except TimeoutError:
                log.warning("%d requests were still running after %g s", len(self._outputs), seconds)

    async def aclose(self) -> None:
        """Stop the ring; what still runs fails with `EngineClosed`."""
        self.close_now()
        for task in (self._heartbeat, self._restart):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._heartbeat = self._restart = None

    def close_now(self) -> None:
        """The part of `aclose` that needs no running event loop."""
        self._closed = EngineClosed("The engine has been closed.")
        self._fail_all(self._closed)
        # Taken away first: at the interpreter's exit the heartbeat still runs, in the loop's thread.
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.stop()

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise self._closed or EngineClosed("The engine has not been started.")
        return self._info

    @property
    def in_flight(self) -> int:
        return len(self._outputs)

    @property
    def pids(self) -> dict[str, int]:
        """The worker processes by role."""
        return {} if self._ring is None else self._ring.pids

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the scheduler last gave a sign of life, through the whole ring."""
        return time.monotonic() - self._last_sign

    @property
    def healthy(self) -> bool:
        return (
            self._closed is None
            and not self._draining
            and self._restart is None
            and self.heartbeat_age_s < STALE_S
        )

    # --- requests ---------------------------------------------------------------------------------

    def new_rid(self) -> str:
        """A request id that no other request of this machine has."""
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        """The chunks of one generation; the last has `finish` set. Closing the iterator aborts it.

        Raises `Overloaded` when the queue is full, `InvalidRequest` for what is wrong with the
        request, `WorkerDied` when a process of the ring died after output had been handed out.
        """
        chunks = self._chunks(request)
        return validated(request, chunks) if to_be_validated(request) else chunks

    async def _chunks(self, request: Generate) -> AsyncGenerator[TextChunk, None]:
        output = self._open(request)
        try:
            while True:
                chunk = await output.next()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._close(request.rid)

    def abort(self, rid_prefix: str) -> int:
        """End the requests whose id is `rid_prefix`, or begins with it and a separator."""
        found = [
            rid
            for rid in self._outputs
            if rid == rid_prefix or rid.startswith((rid_prefix + "-", rid_prefix + "#"))
        ]
        for rid in found:
            self._send(Abort(rid=rid))
        return len(found)

    def abort_all(self) -> int:
        rids = list(self._outputs)
        for rid in rids:
            self._send(Abort(rid=rid))
        return len(rids)

    async def stats(self) -> SchedulerStats:
        reply = await self._ask(GetStats(rid=self.new_rid()))
        assert reply.stats is not None
        return reply.stats

    async def snapshot(self, nodes: int, programs: int) -> tuple[SchedulerStats, Snapshot]:
        """What the scheduler holds: at most so many nodes of its tree, and programs of its queue."""
        reply = await self._ask(GetSnapshot(rid=self.new_rid(), nodes=nodes, programs=programs))
        assert reply.stats is not None
        assert reply.snapshot is not None
        return reply.stats, reply.snapshot

    async def flush_cache(self) -> bool:
        """Drop all pages that no running request uses."""
        return bool((await self._ask(FlushCache(rid=self.new_rid()))).flushed)

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        """See `AwaitTools`."""
        self._send(AwaitTools(program=program, branch=branch, tools=tools))

    async def end_program(self, program: str) -> None:
        self._send(EndProgram(program=program))

    def _open(self, request: Generate) -> _Output:
        if self._closed is not None:
            raise self._closed
        if self._draining:
            raise EngineClosed("The engine is shutting down and takes no new requests.")
        limit = self._config.max_running + self._config.max_waiting
        if len(self._outputs) >= limit:
            raise Overloaded(
                f"{len(self._outputs)} requests are running or queued; the limit is {limit}.",
                remedy="Send it again later.",
                retry_after=1.0,
            )
        if request.sampling.n != 1:
            raise InvalidRequest("n must be 1 here: send one request per choice.", field="n")
        if request.rid in self._outputs:
            raise InvalidRequest(f"A request with the id {request.rid!r} is running.", field="rid")
        self._check_length(request)
        request.sampling.check()
        if request.constraint is not None:
            request.constraint.check()
        output = self._outputs[request.rid] = _Output(request)
        try:
            self._send(request)
        except UnicodeEncodeError:
            del self._outputs[request.rid]
            raise InvalidRequest("The prompt is not valid Unicode.", field="prompt") from None
        except OverflowError:
            del self._outputs[request.rid]
            raise InvalidRequest("A number in the request does not fit into 64 bits.") from None
        return output

    def _check_length(self, request: Generate) -> None:
        """Refuse a prompt before it is tokenised, which others wait for, where it cannot fit."""
        texts = [part for part in request.prompt if isinstance(part, str)]
        texts += [message.content for message in request.chat or ()]
        most = self.max_prompt_tokens * MAX_TOKEN_CHARACTERS
        if (size := sum(map(len, texts))) > most:
            raise PromptTooLong(
                f"The prompt has {size} characters; this engine takes at most {self.max_prompt_tokens}"
                f" tokens, and at most {most} characters.",
                field="prompt",
                remedy="Shorten it, or give the engine a larger context_length or kv_memory_gb.",
            )

    def _close(self, rid: str) -> None:
        output = self._outputs.pop(rid, None)
        if output is not None and not output.ended:
            self._send(Abort(rid=rid))
        if not self._outputs:
            self._empty.set()

    async def _ask(self, message: GetStats | GetSnapshot | FlushCache) -> Reply:
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[message.rid] = future
        self._send(message)
        try:
            return await future
        finally:
            self._replies.pop(message.rid, None)

    # --- the ring ---------------------------------------------------------------------------------

    def _send(self, message: msgspec.Struct) -> None:
        if self._ring is not None:
            self._ring.send(message)  # type: ignore[arg-type]

    def _receive(self, message: ToFrontend) -> None:
        self._last_sign = time.monotonic()
        if isinstance(message, StepText):
            for chunk in message.chunks:
                output = self._outputs.get(chunk.rid)
                if output is not None:
                    output.put(chunk)
        elif isinstance(message, Failed):
            output = self._outputs.get(message.rid)
            if output is not None:
                output.fail(from_info(message.error))
        elif isinstance(message, Reply):
            future = self._replies.get(message.rid)
            if future is not None and not future.done():
                future.set_result(message)

    async def _start_ring(self) -> None:
        workers, self._workers = self._workers or Workers(self._config), None
        ring = Ring(self._config, self._files, workers, receive=self._receive, died=self._worker_died)
        ready = await ring.start()
        info = ready["scheduler"].model_info
        assert info is not None
        self._info = msgspec.structs.replace(info, chat_format=ready["tokenizer"].chat_format)
        self.max_prompt_tokens = ready["scheduler"].max_prompt_tokens
        self.load_s = ready["scheduler"].load_s
        self._ring = ring
        self._closed = None
        self._last_sign = time.monotonic()

    def _worker_died(self, role: str) -> None:
        """Restart the whole ring: what the others still hold is worthless without the dead one."""
        if self._closed is not None or self._restart is not None:
            return
        log.error("the %s process died; restarting the ring", role)
        self._restart = asyncio.create_task(self._restart_ring(role))

    async def _restart_ring(self, role: str) -> None:
        error = WorkerDied(
            f"The {role} process died while this request was running.", remedy="Send it again."
        )
        ring, self._ring = self._ring, None
        if ring is not None:
            # A late chunk of a request that is about to be sent again would be its text twice.
            ring.disconnect()
        for output in list(self._outputs.values()):
            if output.started:
                output.fail(error)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
        if ring is not None:
            await asyncio.to_thread(ring.stop)
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        try:
            if len(self._restarts) > RESTART_LIMIT:
                raise WorkerDied(f"Workers died {len(self._restarts)} times within {RESTART_WINDOW_S:g} s.")
            await self._start_ring()
        except RamifyError as failure:
            log.error("the ring could not be restarted: %s", failure)
            self._closed = failure if isinstance(failure, EngineError) else EngineError(str(failure))
            self._fail_all(self._closed)
        else:
            # Nothing of these was handed out, so that running them again changes nothing for anybody.
            for output in self._outputs.values():
                if not output.ended:
                    self._send(output.request)
        finally:
            self._restart = None

    def _fail_all(self, error: RamifyError) -> None:
        for output in list(self._outputs.values()):
            output.fail(error)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            ring = self._ring
            if ring is not None:
                with contextlib.suppress(EngineError):  # it was stopped in this very moment
                    ring.send(GetStats(rid="heartbeat"))


class _Output:
    """The chunks of one request, from the ring to whoever iterates."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.started = False
        """A chunk was handed out or is waiting to be."""
        self.ended = False
        self._chunks: collections.deque[TextChunk] = collections.deque()
        self._error: RamifyError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: TextChunk) -> None:
        if self.ended:
            return
        self.started = True
        self.ended = chunk.finish is not None
        self._chunks.append(chunk)
        self._wake()

    def fail(self, error: RamifyError) -> None:
        if not self.ended:
            self.ended = True
            self._error = error
            self._wake()

    async def next(self) -> TextChunk:
        """The next chunk; several that came since the last one are handed out one by one."""
        while not self._chunks:
            if self._error is not None:
                raise from_info(self._error.to_info())  # an instance of its own for every reader
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._chunks.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
