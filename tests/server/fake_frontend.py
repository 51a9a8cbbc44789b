"""A server on a real socket in front of a frontend whose model is a few lines of Python."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
from fastapi import APIRouter

from ramify.constraint import Constraint
from ramify.engine_messages import QueueShare, Snapshot, TokenIds, TreeNode
from ramify.errors import InvalidRequest, NotFound, RamifyError
from ramify.loop import new_loop
from ramify.messages import (
    ChatFormat,
    Choices,
    ChoiceScore,
    Finish,
    Generate,
    ModelInfo,
    SchedulerStats,
    TextChunk,
    TokenLogprobs,
    Usage,
)
from ramify.runtime.config import ServerConfig
from ramify.runtime.fleet.replica import ReplicaStatus, State
from ramify.runtime.frontend.loras import LoadedLora
from ramify.runtime.frontend.validation import to_be_validated, validated
from ramify.runtime.lora_names import unknown
from ramify.runtime.server.app.serve import bind, run_server
from ramify.text import token_text
from tests.model.harmony import marks_in

MODEL = "byte-model"
EOS = 256
VOCAB_SIZE = 257


class FakeFrontend:
    """A `Frontend` over bytes: token id i < 256 is the byte i.

    The model answers a prompt with the prompt's last eight characters in capitals, then its seed, then
    " …" and so on for ever; a constraint is answered with a fixed text that satisfies it.
    """

    def __init__(self) -> None:
        self.info = ModelInfo(
            name=MODEL,
            path="/models/byte-model",
            vocab_size=VOCAB_SIZE,
            context_length=4096,
            eos_token_ids=(EOS,),
            bos_token_id=None,
            dtype="float32",
            device="cpu",
            max_running=128,
            chunk_tokens=512,
            page_size=16,
            chat_format=ChatFormat(prefix={}, suffix={"system": "", "user": "", "assistant": ""}, exact=True),
        )
        self.max_prompt_tokens = 4000
        self._rids = 0
        self.reset()

    def reset(self) -> None:
        self.healthy = True
        self.gave_up = False
        self.heartbeat_age_s = 0.25
        self.blocked_s = 0.0
        self.running: set[str] = set()
        self.requests: list[Generate] = []
        self.loras: dict[str, LoadedLora] = {}
        self.awaited: list[tuple[str, str, tuple[str, ...]]] = []
        self.ended_programs: list[str] = []
        self.looks = 0
        self.states: dict[str, State] = {"0": "up", "1": "up"}
        self.limits: list[float] = []
        """Seconds that drains were given."""
        """The number of snapshots taken."""
        self.nodes: tuple[TreeNode, ...] = ()
        self.stats_error: RamifyError | None = None
        self.script: list[str] = []
        """The outputs of the next generations, in place of the model's."""
        self.fail_first: Exception | None = None
        self.fail_after: tuple[int, Exception] | None = None
        self.hold_after: int | None = None
        """The number of chunks after which a generation waits for `release`."""
        self.release = asyncio.Event()
        self.held = threading.Event()
        """A generation waits for `release`."""
        self.closed = threading.Event()
        """A generation was closed or aborted before its end."""
        self.idle = threading.Event()
        """Nothing is running any more."""
        self.draining = threading.Event()
        self._aborts: dict[str, asyncio.Event] = {}
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
        sampling = request.sampling
        prompt = _prompt_bytes(request)
        if len(prompt) > self.max_prompt_tokens:
            raise InvalidRequest("The prompt is too long.", field="prompt")
        self.requests.append(request)
        self.running.add(request.rid)
        abort = self._aborts[request.rid] = asyncio.Event()
        self.idle.clear()
        usage = Usage(prompt_tokens=len(prompt), cached_tokens=self._cached(prompt, request.scope))
        ended = False
        try:
            text, finish = _scripted(self.script.pop(0), request) if self.script else _reply(prompt, request)
            choices = _scores(prompt, request.choices)
            embedding = b""
            if request.pooling is not None:
                embedding = np.array([len(prompt), *prompt[:3]], "<f4").tobytes()
            ids, controls = tuple(text.encode()), marks_in(text)
            prompt_logprobs = None
            if sampling.prompt_logprobs_start is not None:
                prompt_logprobs = _logprobs(prompt, sampling.logprobs or 0, sampling.prompt_logprobs_start)
            for i, token in enumerate(ids):
                if self.fail_after is not None and self.fail_after[0] == i:
                    raise self.fail_after[1]
                if self.hold_after == i:
                    self.held.set()
                    await _first_of(self.release, abort)
                    if abort.is_set():
                        break
                # A character's text comes with its last byte.
                before, after = (bytes(ids[:k]).decode(errors="ignore") for k in (i, i + 1))
                usage = msgspec.structs.replace(usage, completion_tokens=i + 1)
                yield TextChunk(
                    rid=request.rid,
                    text=after[len(before) :],
                    ids=(token,),
                    controls=(0,) if len(before) in controls and len(after) > len(before) else (),
                    logprobs=None
                    if sampling.logprobs is None
                    else _logprobs(bytes([token]), sampling.logprobs, 0, first=False, before=bytes(ids[:i])),
                    prompt_logprobs=prompt_logprobs,
                )
                prompt_logprobs = None
                await asyncio.sleep(0)
            if abort.is_set():
                finish = Finish(reason="abort")
                self.closed.set()
            ended = True
            yield TextChunk(
                rid=request.rid,
                usage=usage,
                finish=finish,
                kept_ids=usage.completion_tokens,
                prompt_logprobs=prompt_logprobs,
                choices=choices,
                embedding=embedding,
            )
        except RamifyError:
            ended = True
            raise
        finally:
            self.running.discard(request.rid)
            if not ended:
                self.closed.set()
            if not self.running:
                self.idle.set()

    def _cached(self, prompt: bytes, scope: str) -> int:
        """As many bytes as the longest prefix that an earlier prompt of the scope shares."""
        seen = self._seen.setdefault(scope, [])
        best = max((_common(prompt, other) for other in seen), default=0)
        seen.append(prompt)
        return min(best, max(len(prompt) - 1, 0))

    def abort(self, rid_prefix: str) -> int:
        found = [rid for rid in self.running if rid == rid_prefix or rid.startswith(rid_prefix + "-")]
        return self._abort(found)

    def abort_all(self) -> int:
        return self._abort(list(self.running))

    def _abort(self, rids: list[str]) -> int:
        for rid in rids:
            if rid in self._aborts:
                self._aborts[rid].set()
        return len(rids)

    async def stats(self) -> SchedulerStats:
        if self.stats_error is not None:
            raise self.stats_error
        values = {field.name: 0 for field in msgspec.structs.fields(SchedulerStats)}
        return SchedulerStats(
            **values
            | {"running": self.in_flight, "page_size": 16}
            | {"pages_total": 64, "pages_free": 48, "pages_in_use": 16}
        )

    async def snapshot(self, nodes: int, programs: int) -> tuple[SchedulerStats, Snapshot]:
        self.looks += 1
        share = QueueShare(program="", running=self.in_flight, waiting=0, retracted=0, compiling=0)
        root = TreeNode(parent=-1, start=0, tokens=0, pages=0, state="evictable")
        held = Snapshot(nodes=(root, *self.nodes)[:nodes], queue=(share,)[:programs], queue_hidden=0)
        return await self.stats(), held

    async def load_lora(self, name: str, path: str) -> None:
        self.loras[name] = LoadedLora(path=path, revision="1")

    async def unload_lora(self, name: str) -> None:
        if self.loras.pop(name, None) is None:
            raise unknown(name, self.loras, "name")

    def replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(name=name, state=state, requests=0, heartbeat_age_s=0.0, pids={})
            for name, state in self.states.items()
        ]

    def replica(self, name: str) -> ReplicaStatus | None:
        return next((one for one in self.replicas() if one.name == name), None)

    async def add_replica(self) -> str:
        name = str(len(self.states))
        self.states[name] = "up"
        return name

    async def drain_replica(self, name: str, limit_s: float) -> None:
        if self.states.pop(name, None) is None:
            raise NotFound(f"There is no replica {name!r}.", field="name")
        self.limits.append(limit_s)

    async def restart_replica(self, name: str, limit_s: float) -> None:
        self.limits.append(limit_s)

    async def flush_cache(self) -> None:
        self._seen.clear()

    async def tokenize(self, prompts: Sequence[Generate], *, special: bool) -> tuple[TokenIds, ...]:
        """Of a special prompt the end is marked."""
        self.requests.extend(prompts)
        found = [(*_prompt_bytes(prompt), *([EOS] if special else [])) for prompt in prompts]
        return tuple(TokenIds(ids=ids, tokens=tuple(map(chr, ids))) for ids in found)

    async def detokenize(
        self, ids: Sequence[tuple[int, ...]], *, skip_special_tokens: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        def texts(skip: bool) -> tuple[str, ...]:
            return tuple("".join(chr(i) if i < EOS else "" if skip else "<end>" for i in one) for one in ids)

        return texts(False), texts(skip_special_tokens)

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        self.awaited.append((program, branch, tools))

    async def end_program(self, program: str) -> None:
        self.ended_programs.append(program)

    async def drain(self, seconds: float) -> None:
        self.draining.set()
        while self.running:
            await asyncio.sleep(0)

    async def aclose(self) -> None: ...


class LiveServer:
    """A server in a thread of its own."""

    def __init__(self, frontend: FakeFrontend, *routers: APIRouter, **config: Any) -> None:
        self.frontend = frontend
        self.routers = routers
        self.config = ServerConfig(**config)
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
            self.frontend, self.config, self._listener, self._stopping, self._ready.set, self.routers
        )

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stopping.set)
        self.call(self.frontend.release.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """What SIGTERM does; returns when the server is draining."""
        self.call(self._stopping.set)
        assert self.frontend.draining.wait(10)

    def call(self, function: Any) -> None:
        """Run `function` on the server's loop."""
        self._loop.call_soon_threadsafe(function)


def raw_post(path: str, body: bytes, length: int | None = None) -> bytes:
    """A request as it goes over the wire. `length`: the length that it announces, where that is not the
    body's."""
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


def _prompt_bytes(request: Generate) -> bytes:
    if request.chat is not None:
        return "".join(f"<{turn.role}>{turn.content}" for turn in request.chat).encode()
    return b"".join(
        part.encode() if isinstance(part, str) else bytes(token % EOS for token in part)
        for part in request.prompt
    )


def _reply(prompt: bytes, request: Generate) -> tuple[str, Finish]:
    sampling = request.sampling
    limit = 512 if sampling.max_tokens is None else sampling.max_tokens
    if request.constraint is not None:
        text = _satisfying(request.constraint)
        return text[:limit], Finish(reason="stop" if len(text) <= limit else "length")
    seed = "" if sampling.seed is None else f"({sampling.seed})"
    text = prompt.decode(errors="ignore")[-8:].upper() + seed + " …" * limit
    text = text.encode()[:limit].decode(errors="ignore")
    found = [(text.index(stop), stop) for stop in sampling.stop if stop in text]
    if found:
        at, stop = min(found)
        return text[:at], Finish(reason="stop", matched=stop)
    return text, Finish(reason="length")


def _scripted(text: str, request: Generate) -> tuple[str, Finish]:
    limit = request.sampling.max_tokens
    return text[:limit], Finish(reason="stop" if limit is None or len(text) <= limit else "length")


def _satisfying(constraint: Constraint) -> str:
    match constraint.kind:
        case "choices":
            return str(json.loads(constraint.source)[0])
        case "json_schema":
            return json.dumps(_instance(json.loads(constraint.source)))
        case "json_object":
            return "{}"
        case other:
            return f"<{other}>"


def _instance(schema: Any) -> Any:
    if schema.get("type") == "object":
        return {name: _instance(inner) for name, inner in schema["properties"].items()}
    return {"integer": 7, "string": "s", "boolean": True}[schema["type"]]


def _logprobs(tokens: bytes, top: int, start: int, first: bool = True, before: bytes = b"") -> TokenLogprobs:
    """Byte b has log-probability -(b % 8) - 0.5; the likeliest bytes are a, b, c, …"""
    places = range(start, len(tokens))
    best = tuple((ord("a") + k, -0.25 * (k + 1)) for k in range(top))
    tops = () if not top else tuple(() if first and i == 0 else best for i in places)
    return TokenLogprobs(
        ids=tuple(tokens[i] for i in places),
        logprobs=tuple(None if first and i == 0 else -(tokens[i] % 8) - 0.5 for i in places),
        top=tops,
        texts=tuple(token_text(bytes([tokens[i]])) for i in places),
        top_texts=tuple(tuple(chr(token) for token, _ in pairs) for pairs in tops),
        offsets=() if first else (len(before.decode(errors="ignore")),),
    )


def _scores(prompt: bytes, choices: Choices | None) -> tuple[ChoiceScore, ...]:
    """Of choices behind `prompt`, byte by byte."""
    return tuple(
        ChoiceScore(
            tokens=_logprobs(prompt + text.encode(), 0, len(prompt)),
            unconditional=_logprobs(text.encode(), 0, 0) if choices.unconditional else None,
        )
        for text in (() if choices is None else choices.texts)
    )


def _common(one: bytes, other: bytes) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
