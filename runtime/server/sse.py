"""Streams of chunks: merged, sent as server-sent events, and cancelled when their client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ramify.errors import EngineError, RamifyError
from ramify.loop import cancel_at_end
from ramify.messages import TextChunk
from ramify.runtime.generation import GenerationResult
from ramify.runtime.server.errors import ClientGone, Problem, log_error, openai_body

logger = logging.getLogger("ramify.server")

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""
SILENCE_S = 10.0
"""Seconds without an event after which a keep-alive is sent. Agents and proxies that hear nothing for a
minute or more close the connection and send the request again."""

_encode = msgspec.json.Encoder().encode


def event(body: Any, name: str = "") -> bytes:
    """One event (WHATWG HTML, section 9.2) whose data is `body` as JSON."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + _encode(body) + b"\n\n"


def error_event(error: RamifyError) -> bytes:
    """An event ``{"error": …}``, in the form of OpenAI's API."""
    return event(msgspec.Raw(openai_body(Problem.of(error))))


class EventStream(Response):
    """Sends events as they come, and closes `events` when the client disconnects.

    An item of `events` that ends in `DONE` is the last, and is sent together with the end of the response.
    `keep_alive` makes the bytes that are sent after each `SILENCE_S` without an event. It sends nothing if
    they are empty.
    The headers are sent with the first event or keep-alive, so that an error before that is answered with its
    own status. A later error becomes the last event, made by `failed`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[RamifyError], bytes] = error_event,
        headers: Mapping[str, str] | None = None,
        keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE,
    ) -> None:
        self.events = events
        self.failed = failed
        self.keep_alive = keep_alive
        self.status_code = 200
        self.background = None
        # Tells proxies not to hold back or alter events.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self._started = False
        self._sent_at = 0.0
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_connected(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        async with aclosing(self.events) as events, cancel_at_end((keeping_alive,)):
            try:
                async for data in events:
                    last = data.endswith(DONE)
                    await self._write(send, data, more=not last)
                    if last:
                        return
            except Exception as error:
                if not self._started:
                    raise
                if not isinstance(error, RamifyError):
                    logger.exception("A stream failed.")
                    error = EngineError("An internal error ended the stream.")
                log_error(scope, error.status, str(error), error.field)
                await self._write(send, self.failed(error))
            await self._write(send, b"", more=False)

    async def _keep_alive(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()
        while True:
            await asyncio.sleep(self._sent_at + SILENCE_S - clock())
            if clock() - self._sent_at >= SILENCE_S:
                if data := self.keep_alive():
                    await self._write(send, data)
                self._sent_at = clock()

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        # In the order of the calls: events are numbered before they are written.
        async with self._sending:
            if not self._started:
                self._started = True
                headers = self.raw_headers
                await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._sent_at = asyncio.get_running_loop().time()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and return its result. If the client disconnects first, `work` is cancelled and
    `ClientGone` is raised, also where `work` turns the cancellation into a result or another error. An error
    of `receive` ends `work` in the same way, and is raised.

    The body of the request must have been read before.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled_before = task.cancelling()
    reasons: list[Exception] = []

    async def watch() -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
            reasons.append(ClientGone("The client went away."))
        except Exception as error:
            reasons.append(error)
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    finally:
        watching.cancel()
        # A larger count: the caller was cancelled too, by the end of the server.
        if reasons and task.uncancel() <= cancelled_before:
            raise reasons[0]


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as (index of the stream, item), in order of arrival. After the first error all
    streams are closed and the error is raised."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return

    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        error = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item, None))
        except Exception as caught:
            error = caught
        queue.put_nowait((index, None, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    async with cancel_at_end(tasks):
        running = len(tasks)
        while running:
            index, new, error = await queue.get()
            if error is not None:
                raise error
            if new is None:
                running -= 1
            else:
                yield index, new


async def read_all(events: AsyncGenerator[bytes, None]) -> None:
    """Read `events` to their end. Afterwards their writer has the whole answer."""
    async with aclosing(events):
        async for _ in events:
            pass


async def collect(streams: Sequence[AsyncGenerator[TextChunk, None]]) -> list[GenerationResult]:
    """Read each stream to its end. Returns the result of each."""
    results = [GenerationResult() for _ in streams]
    async with aclosing(merge(streams)) as chunks:
        async for index, chunk in chunks:
            results[index].add_chunk(chunk)
    return results
