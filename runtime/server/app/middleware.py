"""Middleware: normalised paths, the API key, the client's name, the count of responses, unexpected errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramify.errors import EngineError, Unauthorized
from ramify.runtime.server.errors import error_response, of_anthropic
from ramify.runtime.server.keys.file import Key
from ramify.runtime.server.keys.tenants import ACCOUNT, Account, Caller, Keys
from ramify.runtime.server.metrics import Metrics
from ramify.runtime.server.service import CLIENT, KEY, ended_by_stop

logger = logging.getLogger("ramify.server")

_OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
_BROWSER_PATHS = frozenset({"/", "/live"})
"""Read-only paths that also take the key as the password that browsers prompt for: basic authentication."""
_ASK = 'Basic realm="Ramify API key", charset="UTF-8"'
"""Value of www-authenticate that makes browsers prompt."""


class OneFormOfPath:
    """Routes ``/v1/models/``, ``//v1/models`` and ``/v1//models`` as ``/v1/models``, and HEAD as GET.

    The server omits the body of the response to HEAD (RFC 9110, section 9.3.2).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path.endswith("/") or "//" in path:
                path = "/" + "/".join(filter(None, path.split("/")))
            if path != scope["path"] or scope["method"] == "HEAD":
                # The server keeps its own scope, with HEAD.
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                scope = {**scope, "path": path, "method": method}
        await self.app(scope, receive, send)


class RequireKey:
    """Middleware that sets `KEY`. It answers 401 to requests without ``Authorization: Bearer <key>`` (RFC
    6750) and without ``x-api-key: <key>``, as Anthropic's clients send it. The paths of probes and
    `open_paths` need no key; what they tell of models is about those that a given key may use.

    The dashboard also accepts basic authentication (RFC 7617) with any user name and the key as the password.
    There a key that may not see the dashboard gets 401, so that the browser asks for another one.
    A request that the server makes itself has its account in the ASGI scope, under `ACCOUNT`.
    """

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Iterable[str] = ()) -> None:
        self.app = app
        self._open = _OPEN_PATHS.union(open_paths)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        browser = scope["path"] in _BROWSER_PATHS
        account: Account | None = scope.get(ACCOUNT) or self._keys.find(_given_keys(scope, browser))
        if scope["path"] in self._open:
            models = () if account is None else account.key.models
            nobody = Key(name="", hash="", models=models, endpoints=tuple(self._open))
            KEY.set(Caller(Account(nobody, "", "", time.monotonic)))
            await self.app(scope, receive, send)
            return
        if account is None:
            error = Unauthorized("The API key is missing or wrong.", remedy="Send it as a bearer token.")
            response = error_response(error, scope)
            if browser:
                response.headers["www-authenticate"] = _ASK
            await response(scope, receive, send)
            return
        caller = Caller(account)
        scheme = Headers(scope=scope).get("authorization", "")

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = account.headers(anthropic=of_anthropic(scope))
                if browser and message["status"] == 403 and scheme.lower().startswith("basic "):
                    told.append((b"www-authenticate", _ASK.encode()))
                    message = {**message, "status": 401}
                message = {**message, "headers": [*message.get("headers", ()), *told]}
            await send(message)

        try:
            KEY.set(caller)
            await self.app(scope, receive, send_with_limits)
        finally:
            caller.end()


def _given_keys(scope: Scope, browser: bool) -> Iterator[bytes]:
    """The keys that a request names; with `browser` also the password of basic authentication."""
    headers = Headers(scope=scope)
    scheme, _, value = headers.get("authorization", "").encode("latin-1").partition(b" ")
    if scheme.lower() == b"bearer":
        yield value
    elif browser and scheme.lower() == b"basic":
        with contextlib.suppress(ValueError):
            yield base64.b64decode(value, validate=True).partition(b":")[2]
    if (key := headers.get("x-api-key")) is not None:
        yield key.encode("latin-1")


_COMMENT = re.compile(r"\([^()]*(?:\)|$)")


def _shown(header: str) -> str:
    """The text of a header, of which Starlette makes a character of each byte: clients send UTF-8. A
    character that nobody can see is a space."""
    text = header.encode("latin-1").decode("utf-8", "replace")
    return " ".join("".join([char if char.isprintable() else " " for char in text]).split())


class NameClient:
    """Sets `CLIENT`: the header ``x-title``, in which applications name themselves to OpenRouter, else the
    products of ``user-agent`` without their comments (RFC 9110, section 10.1.5)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            CLIENT.set(_shown(headers.get("x-title") or _COMMENT.sub("", headers.get("user-agent", ""))))
        await self.app(scope, receive, send)


class CountResponses:
    """Counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._responses = metrics.responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499  # the client disconnected before a response

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counting_send)
        finally:
            # Unknown paths share one label: otherwise a scanner could fill the registry.
            endpoint = getattr(scope.get("route"), "path", "other")
            self._responses.labels(endpoint, str(status)).inc()


class UnexpectedErrors:
    """Middleware that answers 500 to an unexpected exception; its traceback goes to the log, not to the
    client.

    Starlette's own handler would raise the exception again after the response, and uvicorn would close the
    connection. A request that is still open when the server's drain ends is cancelled. If its response has
    not begun, the client gets 503; otherwise the connection ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except asyncio.CancelledError:
            if not started:
                await error_response(ended_by_stop(), scope)(scope, receive, send)
        except Exception:
            logger.exception("%s failed", scope.get("path"))
            if started:
                raise
            error = EngineError("An internal error occurred; the server's log has the details.")
            await error_response(error, scope)(scope, receive, send)
