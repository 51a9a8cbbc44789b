"""A frontend with `byte_model` in place of engine cores, and a server for it on a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import msgspec

from ramify.decisions.checks import check_decide
from ramify.engine_messages import (
    AwaitTools,
    Detokenize,
    FlushCache,
    GetSnapshot,
    LoadLora,
    QueueShare,
    Reply,
    Snapshot,
    Texts,
    TokenIds,
    Tokenize,
    TreeNode,
)
from ramify.errors import InvalidRequest, NotFound, RamifyError
from ramify.loop import cancel_at_end, new_loop
from ramify.messages import (
    Finish,
    Generate,
    SchedulerStats,
    TextChunk,
    Usage,
)
from ramify.model_info import ChatFormat
from ramify.runtime.config import ServerConfig
from ramify.runtime.fleet.replica import ReplicaStatus, State
from ramify.runtime.frontend.control import ControlClient
from ramify.runtime.frontend.loras import Loras
from ramify.runtime.frontend.replicas import Replicas
from ramify.runtime.frontend.tasks import Tasks
from ramify.runtime.frontend.validation import to_be_validated, validated
from ramify.runtime.server.app.serve import bind, run_server
from ramify.runtime.server.keys.tenants import Keys
from ramify.runtime.server.router import Router
from tests.fleet.fakes import model_info
from tests.server.byte_model import EOS, chunks_of, common, prompt_bytes

MODEL = "byte-model"
VOCAB_SIZE = 257


class FakeReplicas:
    """Two replicas that exist only in name: a fake fleet, which is also its operator."""

    def __init__(self) -> None:
        self.states: dict[str, State] = {"0": "up", "1": "up"}
        self.limits: list[float] = []
        """The time limits of drains, in seconds."""
        self.operator = self

    def statuses(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(name=name, state=state, requests=0, heartbeat_age_s=0.0, pids={})
            for name, state in self.states.items()
        ]

    async def add_one(self) -> str:
        name = str(len(self.states))
        self.states[name] = "up"
        return name

    async def drain(self, name: str, limit_s: float) -> None:
        if self.states.pop(name, None) is None:
            raise NotFound(f"There is no replica {name!r}.", field="name")
        self.limits.append(limit_s)

    async def restart(self, name: str, limit_s: float) -> None:
        self.limits.append(limit_s)


class FakeFrontend:
    """A `Frontend` with the byte model. Its code for adapters, replicas and control calls is the real one."""

    def __init__(self) -> None:
        self.info = model_info(
            name=MODEL,
            path="/models/byte-model",
            vocab_size=VOCAB_SIZE,
            context_length=4096,
            eos_token_ids=(EOS,),
            max_running=128,
            chunk_tokens=512,
            chat_format=ChatFormat(prefix={}, suffix={"system": "", "user": "", "assistant": ""}, exact=True),
        )
        self.max_prompt_tokens = 4000
        self.control = ControlClient(self._ask, self._tell, self.new_rid, lambda: self.max_prompt_tokens)
        self._rids = 0
        self.reset()

    def reset(self) -> None:
        self.healthy = True
        self.gave_up = False
        self.heartbeat_age_s = 0.25
        self.blocked_s = 0.0
        self.running: dict[str, asyncio.Event] = {}
        """Request id → event that is set when the request is aborted."""
        self.requests: list[Generate] = []
        self.calls: list[Any] = []
        """The control calls received."""
        self.loras = Loras(self._load, self.new_rid)
        self.fleet: Any = FakeReplicas()
        self.replicas = Replicas(self.fleet, Tasks(), lambda: None)
        self.awaited: list[tuple[str, str, tuple[str, ...]]] = []
        self.ended_programs: list[str] = []
        self.looks = 0
        """Number of snapshots taken."""
        self.nodes: tuple[TreeNode, ...] = ()
        self.stats_error: RamifyError | None = None
        self.script: list[str] = []
        """Outputs of the next generations; the byte model writes further ones."""
        self.fail_first: Exception | None = None
        self.fail_after: tuple[int, Exception] | None = None
        self.hold_after: int | None = None
        """The number of chunks after which a generation waits for `release`."""
        self.release = asyncio.Event()
        self.held = threading.Event()
        """Set when a generation begins to wait for `release`."""
        self.closed = threading.Event()
        """Set when a generation was closed or aborted before its end."""
        self.idle = threading.Event()
        """Set while nothing is running."""
        self.draining = threading.Event()
        self._seen: dict[str, list[bytes]] = {}

    @property
    def in_flight(self) -> int:
        return len(self.running)

    def new_rid(self) -> str:
        self._rids += 1
        return f"r{self._rids}"

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        chunks = self._chunks(request)
        return validated(request, chunks) if to_be_validated(request) else chunks

    async def _chunks(self, request: Generate) -> AsyncGenerator[TextChunk, None]:
        assert request.sampling.n == 1
        assert request.rid not in self.running
        if self.fail_first is not None:
            raise self.fail_first
        check_decide(request)
        prompt = prompt_bytes(request)
        if len(prompt) > self.max_prompt_tokens:
            raise InvalidRequest("The prompt is too long.", field="prompt")
        self.requests.append(request)
        abort = self.running[request.rid] = asyncio.Event()
        self.idle.clear()
        ended = False
        try:
            cached = self._cached(prompt, request.scope)
            chunks = chunks_of(request, cached, self.script.pop(0) if self.script else None)
            for i, chunk in enumerate(chunks[:-1]):
                if self.fail_after is not None and self.fail_after[0] == i:
                    raise self.fail_after[1]
                if self.hold_after == i:
                    await self.hold(abort)
                if abort.is_set():
                    chunks[-1] = aborted(chunks[-1], i)
                    self.closed.set()
                    break
                yield chunk
                await asyncio.sleep(0)
            ended = True
            yield chunks[-1]
        except RamifyError:
            ended = True
            raise
        finally:
            self.running.pop(request.rid, None)
            if not ended:
                self.closed.set()
            if not self.running:
                self.idle.set()

    async def hold(self, abort: asyncio.Event) -> None:
        """Wait for `release` or `abort`."""
        self.held.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (self.release, abort)]
        async with cancel_at_end(waits):
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _cached(self, prompt: bytes, scope: str) -> int:
        """Length of the longest prefix that an earlier prompt of the scope shares, in bytes."""
        seen = self._seen.setdefault(scope, [])
        best = max((common(prompt, other) for other in seen), default=0)
        seen.append(prompt)
        return min(best, max(len(prompt) - 1, 0))

    def abort(self, rid_prefix: str | None = None) -> int:
        found = [
            event
            for rid, event in self.running.items()
            if rid_prefix is None or rid == rid_prefix or rid.startswith(rid_prefix + "-")
        ]
        for event in found:
            event.set()
        return len(found)

    async def _ask(self, message: Any) -> Reply | Texts:
        """Answer a control call as the engine core would."""
        self.calls.append(message)
        if isinstance(message, FlushCache):
            self.flush_cache()
            return Reply(rid=message.rid)
        if isinstance(message, Tokenize):  # of a special prompt the end is marked
            self.requests.extend(message.prompts)
            end = (EOS,) if message.special else ()
            found = [(*prompt_bytes(prompt), *end) for prompt in message.prompts]
            return Texts(
                rid=message.rid,
                prompts=tuple(TokenIds(ids=ids, tokens=tuple(map(chr, ids))) for ids in found),
            )
        if isinstance(message, Detokenize):
            whole, text = (
                tuple("".join(chr(i) if i < EOS else end for i in one) for one in message.ids)
                for end in ("<end>", "" if message.skip_special_tokens else "<end>")
            )
            return Texts(rid=message.rid, whole=whole, text=text)
        if self.stats_error is not None:
            raise self.stats_error
        snapshot = self._snapshot(message) if isinstance(message, GetSnapshot) else None
        return Reply(rid=message.rid, stats=self._stats(), snapshot=snapshot)

    def _stats(self) -> SchedulerStats:
        values = {field.name: 0 for field in msgspec.structs.fields(SchedulerStats)}
        values |= {"running": len(self.running), "page_size": 16}
        return SchedulerStats(**values | {"pages_total": 64, "pages_free": 48, "pages_in_use": 16})

    def _snapshot(self, message: GetSnapshot) -> Snapshot:
        self.looks += 1
        share = QueueShare(program="", running=len(self.running), waiting=0, retracted=0, compiling=0)
        root = TreeNode(parent=-1, start=0, tokens=0, pages=0, state="evictable")
        nodes, queue = (root, *self.nodes)[: message.nodes], (share,)[: message.programs]
        return Snapshot(nodes=nodes, queue=queue, queue_hidden=0)

    def _load(self, message: Any) -> asyncio.Future[Reply | Texts]:
        answer: asyncio.Future[Reply | Texts] = asyncio.get_running_loop().create_future()
        reply = Reply(rid=message.rid, lora="1" if isinstance(message, LoadLora) else "")
        asyncio.get_running_loop().call_soon(answer.set_result, reply)
        return answer

    def _tell(self, message: Any) -> None:
        if isinstance(message, AwaitTools):
            self.awaited.append((message.program, message.branch, message.tools))
        else:
            self.ended_programs.append(message.program)

    def flush_cache(self) -> None:
        self._seen.clear()

    async def drain(self, seconds: float) -> None:
        self.draining.set()
        while self.running:
            await asyncio.sleep(0)

    async def aclose(self) -> None: ...


def aborted(last: TextChunk, tokens: int) -> TextChunk:
    """The last chunk of a generation that was aborted after `tokens` tokens."""
    usage = msgspec.structs.replace(last.usage or Usage(), completion_tokens=tokens)
    return msgspec.structs.replace(last, usage=usage, kept_ids=tokens, finish=Finish(reason="abort"))


class LiveServer:
    """A server in a thread of its own, with batch files only if `config` has a `batch_dir`."""

    def __init__(self, frontend: FakeFrontend, *routers: Router, **config: Any) -> None:
        self.frontend = frontend
        self.routers = routers
        self.config = ServerConfig(**config if "batch_dir" in config else config | {"batch_gb": 0})
        self.keys = Keys(self.config)
        self._ready = threading.Event()
        self._listener = bind("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        await run_server(
            self.frontend,
            self.config,
            self._listener,
            self._stopping,
            self._ready.set,
            self.routers,
            self.keys,
        )

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stopping.set)
        self.call(self.frontend.release.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """Stop as SIGTERM does; returns when the server is draining."""
        self.call(self._stopping.set)
        assert self.frontend.draining.wait(60)

    def call(self, function: Any) -> None:
        self._loop.call_soon_threadsafe(function)


def raw_post(path: str, body: bytes, length: int | None = None) -> bytes:
    """A request in bytes. `length`: its content-length; None: the length of `body`."""
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {size}\r\n\r\n".encode() + body


def events(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; "[DONE]" as it is."""
    return [
        "[DONE]" if data == "[DONE]" else json.loads(data)
        for line in response.iter_lines()
        if line.startswith("data: ")
        for data in [line.removeprefix("data: ")]
    ]
