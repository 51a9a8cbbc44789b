"""One HTTP/1.1 connection: a request at a time, and its answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

MAX_HEAD_BYTES = 64 << 10
MAX_UNREAD_BYTES = 1 << 20
"""Where nobody reads so much, the other end is made to wait."""


class BrokenAnswer(Exception):
    """There will be no whole answer; says why."""


class Disconnected(BrokenAnswer):
    """The connection has gone."""


class Connection(asyncio.Protocol):
    """The protocol of a transport (asyncio); everything happens on one event loop."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.answers = 0
        """Whole ones so far."""
        self.status = 0
        self.headers: dict[str, str] = {}
        """Of the answer that is being read, with their names in lower case."""
        self.ended = False
        """The answer is whole."""
        self.on_end: Callable[[], None] | None = None
        """Called once, when the answer is whole or will never be."""
        self._parser: httptools.HttpResponseParser | None = None
        self._headed = self._heard = self._keeps = False
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._unread = 0
        self._error: BrokenAnswer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False

    # --- for who asks ---

    @property
    def reusable(self) -> bool:
        """Another request can be sent."""
        return self.ended and self._keeps and self._error is None and not self.transport.is_closing()

    @property
    def pending(self) -> bool:
        """More of the answer is to come."""
        return not self.ended and self._error is None

    @property
    def stale(self) -> bool:
        """It was closed from the other end after an answer, before anything came of the next one: that
        request can safely be sent again.
        """
        return self.answers > 0 and not self._heard and isinstance(self._error, Disconnected)

    def send(self, request: bytes) -> None:
        """Send a whole request. The answer to the one before must be whole."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, {}
        self.ended = self._headed = self._heard = self._keeps = False
        self._head_bytes = self._unread = 0
        self._parts.clear()
        if self.transport.is_closing():
            self._fail(Disconnected("it closed the connection"))
        else:
            self.transport.write(request)

    async def head(self, silence_s: float | None) -> None:
        """Wait for `status` and `headers`. Raises `BrokenAnswer`, or TimeoutError after so much silence."""
        while not self._headed:
            await self._more(silence_s)

    async def part(self, silence_s: float | None) -> bytes:
        """What has come of the body since the last call; empty at its end. Raises as `head` does."""
        while not self._parts:
            if self.ended:
                return b""
            await self._more(silence_s)
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        if self._paused:
            self._paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()
        return data

    async def body(self, silence_s: float | None) -> bytes:
        """All that is left of the body."""
        parts = []
        while part := await self.part(silence_s):
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close at once, whatever is on its way."""
        self.transport.abort()

    async def _more(self, silence_s: float | None) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if silence_s is None:
                await self._waiter
            else:
                async with asyncio.timeout(silence_s):
                    await self._waiter
        finally:
            self._waiter = None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._parser is None or self.ended:
            self._keeps = False  # nobody has asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(BrokenAnswer("it answered something that is not HTTP"))
            self.close()
        if not self._headed and self._error is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(
                    BrokenAnswer(f"its answer begins with more than {MAX_HEAD_BYTES} bytes of headers")
                )
                self.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._parser is None or self.ended:
            return
        if self._headed and exc is None and self._ends_with_connection():
            self._end()
        else:
            when = "in the middle of its answer" if self._heard else "without an answer"
            self._fail(Disconnected(f"it closed the connection {when}"))
        self._wake()

    def _ends_with_connection(self) -> bool:
        """RFC 9112, section 6.3, rule 8."""
        return not ("content-length" in self.headers or "transfer-encoding" in self.headers)

    # --- httptools' callbacks ---

    def on_message_begin(self) -> None:
        if self.ended:
            self._keeps = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self.ended:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:  # an interim answer: the real one follows
            self.headers = {}
            return
        self._headed = True

    def on_body(self, body: bytes) -> None:
        if self.ended:
            return
        self._parts.append(body)
        self._unread += len(body)
        if self._unread > MAX_UNREAD_BYTES and not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._headed and not self.ended:
            self._keeps = self._parser.should_keep_alive()
            self._end()

    # --- ends ---

    def _end(self) -> None:
        self.ended = True
        self.answers += 1
        self._call_back()

    def _fail(self, error: BrokenAnswer) -> None:
        if self._error is None:
            self._error = error
        self._call_back()

    def _call_back(self) -> None:
        if self.on_end is not None:
            called, self.on_end = self.on_end, None
            called()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
