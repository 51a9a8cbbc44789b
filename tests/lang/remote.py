"""Servers for the HTTP backends: Ramify's own before a script, and a raw one that may misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import ramify as rm
from ramify.lang.backends.scripted import ScriptedBackend
from ramify.loop import wait
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo
from tests.server.fake_frontend import FakeFrontend, LiveServer, aborted


class ScriptedFrontend(FakeFrontend):
    """A frontend for Ramify's server that answers from a script; chats are rendered as ChatML."""

    def __init__(self, answers: Any) -> None:
        super().__init__()
        self.backend = ScriptedBackend(answers)
        self.info: ModelInfo = wait(self.backend.info())
        self.max_prompt_tokens = 1 << 20

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        self.requests.append(request)
        abort = self.running[request.rid] = asyncio.Event()
        self.idle.clear()
        if request.chat is not None:
            turns = [f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in request.chat]
            prompt = "".join(turns) + "<|im_start|>assistant\n"
            request = Generate(
                rid=request.rid, prompt=(prompt,), sampling=request.sampling, constraint=request.constraint
            )
        ended = False
        try:
            async for chunk in self.backend.generate(request):
                ended = chunk.finish is not None
                if self.hold_after == len(self.requests):
                    await self.hold(abort)
                if abort.is_set():
                    chunk = aborted(chunk, 0)
                yield chunk
        finally:
            self.running.pop(request.rid, None)
            if not ended:
                self.closed.set()
            self.idle.set()

    def flush_cache(self) -> None:
        self.backend.flush_cache()


class RawServer:
    """Answers each request with the bytes that `answer` makes of its target, then closes the connection.

    With `keeps` a connection is kept until `answer` gives None, or the client closes it. `bodies` holds the
    JSON that was posted.
    """

    def __init__(
        self,
        answer: Callable[[str], bytes | None],
        *,
        keeps: bool = False,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
    ) -> None:
        self._answer, self._keeps, self._tls, self.port = answer, keeps, tls, port
        self.bodies: list[Any] = []
        self.heads: list[str] = []
        """Heads of the requests, in their order."""
        self.connections = 0
        self.closed = threading.Semaphore(0)
        """Released for each connection that ends."""
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Future[None]] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self._tls)
        scheme = "http" if self._tls is None else "https"
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._ready.set()
        async with server:
            await self._stop.wait()
            # asyncio leaks a connection that is accepted as the server closes.
            while accepting := asyncio.all_tasks() - {asyncio.current_task(), *self._tasks}:
                await asyncio.wait(accepting)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._tasks.append(asyncio.ensure_future(self._one(reader, writer)))

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while (answered := self._answer(await self._request(reader))) is not None:
                writer.write(answered)
                await writer.drain()
                if not self._keeps:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.closed.release()

    async def _request(self, reader: asyncio.StreamReader) -> str:
        """The target of the next request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        lines = head.lower().split("\r\n")
        length = next((line for line in lines if line.startswith("content-length:")), ":0")
        body = await reader.readexactly(int(length.partition(":")[2]))
        if body:
            self.bodies.append(json.loads(body))
        return head.split()[1]

    def __enter__(self) -> RawServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


def answer(body: bytes, status: str = "200 OK", kind: str = "application/json", headers: str = "") -> bytes:
    """A whole HTTP answer whose body ends with the connection."""
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{headers}connection: close\r\n\r\n".encode() + body


@contextlib.contextmanager
def raw_endpoint(
    reply: Callable[[str], bytes | None], **options: Any
) -> Iterator[tuple[rm.RuntimeEndpoint, RawServer]]:
    """A `RawServer`, and its client with `options`."""
    with RawServer(reply) as server, contextlib.closing(rm.RuntimeEndpoint(server.url, **options)) as backend:
        yield backend, server


@contextlib.contextmanager
def raw_openai(
    reply: Callable[[str], bytes | None], keeps: bool = False, **options: Any
) -> Iterator[tuple[rm.OpenAI, RawServer]]:
    """A `RawServer`, and a client of its model "m" under /v1 with `options`."""
    with (
        RawServer(reply, keeps=keeps) as server,
        contextlib.closing(rm.OpenAI("m", base_url=server.url + "/v1", api_key="k", **options)) as backend,
    ):
        yield backend, server


@contextlib.contextmanager
def live_endpoint(
    frontend: FakeFrontend, *routers: Any, **options: Any
) -> Iterator[tuple[rm.RuntimeEndpoint, LiveServer]]:
    """A server before `frontend`, and its client with `options`."""
    with (
        LiveServer(frontend, *routers) as server,
        contextlib.closing(rm.RuntimeEndpoint(server.url, **options)) as backend,
    ):
        yield backend, server


@contextlib.contextmanager
def live_openai(script: Any, *, is_chat_model: bool = True) -> Iterator[tuple[rm.OpenAI, ScriptedFrontend]]:
    """Ramify's own server, which answers from `script`, and OpenAI's client of it."""
    frontend = ScriptedFrontend(script)
    with (
        LiveServer(frontend) as server,
        contextlib.closing(
            rm.OpenAI(frontend.info.name, is_chat_model, base_url=server.url + "/v1", api_key="k")
        ) as backend,
    ):
        yield backend, frontend
