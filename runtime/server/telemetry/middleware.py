"""Middleware: the id of each request, and the trace that it belongs to."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramify.logs import REQUEST_ID
from ramify.runtime.server.telemetry.generations import INCOMING, Incoming
from ramify.spans import tracer_of

REQUEST_ID_HEADER = "x-request-id"
_HEADER = REQUEST_ID_HEADER.encode()
_SANE = re.compile(rb"[\w.:/+=@-]{1,128}")
"""Pattern of the ids that are kept: they stand in log lines and in headers of responses."""


class NameRequest:
    """Sets `REQUEST_ID`, ``request_id`` of the scope, and the response's header x-request-id: the id that the
    request gives in this header, or if it gives none, or one that is not `_SANE`, a new one. An endpoint may
    set another id in the scope; the response's header then has it, unless the request gave one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        kept = b""
        for name, value in scope["headers"]:
            if name == _HEADER and _SANE.fullmatch(value):
                kept = value
        scope["request_id"] = kept.decode() or f"req_{secrets.token_hex(12)}"
        REQUEST_ID.set(scope["request_id"])

        async def naming_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (_HEADER, kept or scope["request_id"].encode())
                message["headers"] = [*message.get("headers", ()), named]
            await send(message)

        await self.app(scope, receive, naming_send)


class FollowTrace:
    """Handles each request in the trace that its headers traceparent and tracestate name (W3C Trace Context).

    A POST that is refused before a generation begins gets a span here: "POST /v1/chat/completions" with the
    response's status. Other requests get the spans of their generations.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._tracer = tracer_of()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from opentelemetry import context, propagate

        incoming, status = Incoming(), 0
        INCOMING.set(incoming)

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = context.attach(propagate.extract(dict(Headers(scope=scope))))
        try:
            await self.app(scope, receive, noting_send)
        finally:
            if status >= 400 and not incoming.spans and scope["method"] == "POST":
                self._tell_refused(scope, status)
            context.detach(token)

    def _tell_refused(self, scope: Scope, status: int) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        path = getattr(scope.get("route"), "path", "other")
        attributes = {
            "http.request.method": scope["method"],
            "http.route": path,
            "http.response.status_code": status,
            "error.type": str(status),
            "ramify.request_id": REQUEST_ID.get(),
        }
        span = self._tracer.start_span(f"POST {path}", kind=SpanKind.SERVER, attributes=attributes)
        # By the conventions for HTTP, only 5xx are errors of a server.
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()
