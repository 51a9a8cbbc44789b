"""HTTP/1.x of one connection: uvicorn's protocol, with additions that clients expect.

- An offer to switch protocols (``Upgrade: h2c`` of Java's and of curl's clients, ``Upgrade: websocket``) is
  ignored, and the request is answered (RFC 9110, section 7.8). The parser drops the body of such a request,
  so its head is parsed again without the offer.
- CONNECT is refused with 400, whatever its target: this server is no proxy.
- A body of unknown length is sent to an HTTP/1.0 client without chunks, and ended by closing the connection,
  since HTTP/1.0 has no chunked encoding (RFC 9112, section 6.1).
- A connection without a pending response is closed after `timeout_keep_alive` seconds without a byte. So is a
  connection that has sent no request yet, or only a part of a head.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class Connection(HttpToolsProtocol):
    """The protocol of uvicorn, with the additions that this module's docstring lists."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_if_idle()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
                self._renew_parser()
            except httptools.HttpParserError:
                message = "Invalid HTTP request received."
                if self._is_connect():
                    message = "CONNECT is refused: this server is no proxy. Send the request to its own URL."
                self.logger.warning(message)
                self.send_400_response(message)
                return
        if self.cycle is None or self.cycle.response_complete:
            self._end_if_idle()

    def on_headers_complete(self) -> None:
        if self._is_connect():
            raise httptools.HttpParserError("CONNECT")
        if self._offers_upgrade():
            return  # the head is parsed again without the offer
        super().on_headers_complete()
        if self.scope.get("http_version") == "1.0":
            _send_until_close(self.cycle)

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def _is_connect(self) -> bool:
        return self.parser.get_method() == b"CONNECT"

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and not self._is_connect()

    def _renew_parser(self) -> None:
        """Replace the parser. After a head with ``Connection: close`` a parser reads nothing more."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own

    def _head_without_offer(self) -> bytes:
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _end_if_idle(self) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )


def _send_until_close(cycle: RequestResponseCycle) -> None:
    """Let `cycle` send a body of unknown length without chunks: the body ends when the connection closes."""
    send = cycle.send
    sized = True

    async def unchunked(message: Any) -> None:
        nonlocal sized
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not sized:
                cycle.chunked_encoding = False
        elif not sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unchunked  # type: ignore[method-assign]
