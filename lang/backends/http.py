"""The HTTP client of the remote backends and the load test: JSON, server-sent events, and Ramify's errors."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import ctypes
import os
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

import aiohttp
import certifi
import msgspec

from ramify.credentials import without_credentials
from ramify.errors import BackendError, InvalidRequest, RamifyError, RequestTimeout
from ramify.lang.backends.http_errors import (
    error_from_body,
    error_of,
    json_of,
    may_pass,
    plain_text,
    problem_in,
    something_else,
    status_in,
)
from ramify.lang.backends.sse import DONE, EventParser, SentEvent
from ramify.lang.trace.spans import add_headers
from ramify.loop import in_background
from ramify.retry import Retry
from ramify.text import not_unicode
from ramify.unreachable import proxy_for, proxy_remedy, unreachable

CONNECT_S = 10.0
LAST_BYTES_S = 0.5
"""Longest wait, in seconds, for the end of a stream after its last event. A connection can be used again only
if the stream was read to its end."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the structs into which `HttpClient.events` decodes events. An event is an error if it has an
    `error`, or if its `type` or `object` is "error"."""

    error: Any = None
    type: Any = None
    object: Any = None


EventT = TypeVar("EventT", bound=Event)


class HttpClient:
    """An HTTP client for one server.

    Closing a stream closes its connection, which aborts the request at the server.

    On the process's background loop (`ramify.loop`) connections are kept between requests. On any other loop,
    which may end before the next request, each request has a connection of its own. The number of connections
    is not limited, because programs limit their concurrency. When a client that was not closed is
    garbage-collected, its connections are closed silently.

    If a kept connection closes before any byte of an answer, the request is sent once more, immediately,
    because a server may close an idle connection at any moment. All requests of Ramify may safely arrive
    twice.

    These errors are `transient`, as a further attempt may succeed:

    - a status of 408, 425, 429, or 5xx except 501
    - a connection that breaks off, or a failure to connect to a server that has answered before
    - an error with code 429 or 503 as the first event of an answer with status 200; any other error in such
      an answer is final

    If an error has one of Ramify's own codes, that code alone determines whether the error is transient. A
    Ramify server's internal error (500) is not, because the same request would cause it again.

    An error is `begun` if the request was sent and the connection broke before the answer was complete: the
    server may have worked on the request.

    The proxy is read once from the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY).
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: str | bool = True,
        timeout_s: float | None = None,
        retry: Retry | None = None,
        not_found: str | None = None,
    ) -> None:
        """Args:
            base_url: URL with ``http://`` or ``https://``, to which the paths of requests are appended.
            api_key: API key, sent as a bearer token.
            verify: TLS verification: False, or the path of a CA bundle. True uses the bundle that
                ``SSL_CERT_FILE`` or ``SSL_CERT_DIR`` names, else Mozilla's.
            timeout_s: Longest time without data from the server, in seconds; None for no limit.
            retry: The policy by which `get` and `post` send a request again; None for no further attempts. A
                stream is never sent again.
            not_found: The remedy in errors of status 404 that have no remedy of their own.

        Raises `InvalidRequest` for a bad URL, key or URL of a proxy, `BackendError` for a proxy that is not
        HTTP.
        """
        parts = _checked(base_url.rstrip("/"))
        self.base_url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        """The URL without its login, which a message may show."""
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("The API key has characters that no header can hold.", field="api_key")
        self._headers = {"accept-encoding": "identity", "user-agent": "ramify"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        elif parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._proxy = _proxy(parts.scheme, parts.netloc.rpartition("@")[2])
        self._tls = _tls(verify) if parts.scheme == "https" else False
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s)
        self._retry = retry or Retry(0)
        self._not_found = not_found
        self._answered = False
        """Whether the server has answered before. Until then a failure to connect is not transient, because
        the URL may be wrong."""
        self._kept: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession] | None = None
        self._close: weakref.finalize[Any, Any] | None = None

    async def get(self, path: str) -> Any:
        """Get `path` and decode its JSON."""
        return await self._retry.call(lambda: self._json("GET", path))

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, once: bool = False) -> Any:
        """Post `body` and decode the JSON answer; with `once`, without retries."""
        if once:
            return await self._json("POST", path, body)
        return await self._retry.call(lambda: self._json("POST", path, body))

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """Post `body` and yield the parts of the answer as they come. Raises an error for any status other
        than 200."""
        async with self._answer("POST", path, body) as response:
            if response.status != 200:
                raise self._error_of(response, await response.read())
            async for data in response.content.iter_any():
                yield data

    async def events(
        self, path: str, body: Mapping[str, Any], kind: type[EventT], *, whole: bool = False
    ) -> AsyncIterator[EventT]:
        """Post `body` and yield the events of the answer, decoded to `kind`, until the event that announces
        the end.

        With `whole`, an answer that is one JSON object instead of a stream of events counts as a stream of
        one event. Raises the error that an event or the answer carries. Raises `BackendError` if the stream
        breaks off, or contains anything but events of `kind`.
        """
        decode = msgspec.json.Decoder(kind).decode
        came = False
        async with self._answer("POST", path, body) as response:
            if response.status != 200:
                raise self._error_of(response, await response.read())
            parser = EventParser()
            async with aclosing(cast("Any", _sent_events(parser, response.content))) as sent:
                async for name, data in sent:
                    if data == DONE:
                        with suppress(TimeoutError, aiohttp.ClientError):
                            async with asyncio.timeout(LAST_BYTES_S):
                                await response.read()
                        return
                    yield self._decoded(decode, response, name, data, came)
                    came = True
            if parser.stray:
                data = b"\n".join(parser.stray)
                event = self._decoded(decode, response, b"", data, came)
                if not whole or came:
                    raise BackendError(something_else(response, data))
                yield event
                return
        raise BackendError(f"{self.base_url + path} broke off its answer.", transient=True, begun=True)

    def _decoded(
        self,
        decode: Callable[[bytes], EventT],
        response: aiohttp.ClientResponse,
        name: bytes,
        data: bytes,
        came: bool,
    ) -> EventT:
        """Decode an event to a struct; raises the error that the event carries. `came`: whether events came
        before this one."""
        wrong: Exception | None = None
        try:
            event = decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wrong = error
        else:
            if name != b"error" and not event.error and "error" not in (event.type, event.object):
                return event
        problem = problem_in(json_of(data) or plain_text(data), told=name == b"error")
        if problem is None:
            torn = "truncated" in str(wrong)
            raise BackendError(something_else(response, data, wrong), transient=torn, begun=torn)
        status = status_in(problem)
        refused = status in (429, 503) and not came
        found = error_from_body(response, problem, status, transient=refused)
        found.begun = came
        raise found

    async def aclose(self) -> None:
        """Close all connections. May be called on any loop. Requests in flight fail."""
        close, self._kept, self._close = self._close, None, None
        if close is not None and (closing := close()) is not None:
            await asyncio.wrap_future(closing)

    def _error_of(self, response: aiohttp.ClientResponse, answer: bytes) -> RamifyError:
        error = error_of(response, answer)
        if response.status == 404 and error.remedy is None:
            error.remedy = self._not_found
        return error

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._answer(method, path, body) as response:
            answer = await response.read()
        if response.status != 200:
            raise self._error_of(response, answer)
        try:
            return msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BackendError(f"{response.url} did not answer in JSON: {plain_text(answer)!r}.") from None

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; the block gets the answer after its head has been received. The connection is kept
        if the block reads the whole body, else closed."""
        data, headers = None, dict[str, str]()
        add_headers(headers)
        if body is not None:
            try:
                data = msgspec.json.encode(body)
            except UnicodeEncodeError:
                raise not_unicode(body) from None
            headers["content-type"] = "application/json"
        with self._plainly(self.base_url + path):
            async with self._session() as session:
                reused: list[bool] = []

                def request() -> Any:
                    return session.request(
                        method,
                        self.base_url + path,
                        data=data,
                        headers=headers,
                        skip_auto_headers=("content-type",),  # aiohttp would send one without a body
                        proxy=self._proxy,
                        allow_redirects=False,
                        trace_request_ctx=reused,
                    )

                try:
                    response = await request()
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    if method == "GET" or not reused:  # aiohttp sends a GET again itself
                        raise
                    response = await request()
                self._answered = True
                async with response:
                    yield response

    @contextmanager
    def _plainly(self, url: str) -> Iterator[None]:
        """Raise failures of the connection as Ramify's errors, whose messages name `url`."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            message, remedy = unreachable(url, error, self._proxy)
            raise BackendError(message, remedy=remedy, transient=self._answered) from error
        except TimeoutError:
            raise RequestTimeout(
                f"{url} did not answer in time.",
                remedy="Raise the time limit (timeout_s), or see what the server is busy with.",
                transient=self._answered,
                begun=True,
            ) from None
        except aiohttp.ClientHttpProxyError as error:
            host = urlsplit(self._proxy or "").hostname
            raise BackendError(
                f"{url} cannot be reached: the proxy {host} answered {error.status}.",
                remedy=proxy_remedy(url),
                transient=may_pass(error.status),
            ) from error
        except aiohttp.ClientResponseError as error:
            reason = error.message.partition("\n")[0].rstrip(":.")
            raise BackendError(f"{url} answered something that is not HTTP: {reason}.") from error
        except aiohttp.ClientPayloadError as error:
            message = f"{url} closed the connection in the middle of its answer."
            raise BackendError(message, transient=True, begun=True) from error
        except (OSError, aiohttp.ClientError) as error:
            message, remedy = unreachable(url, error, self._proxy)
            lost = self._answered and not isinstance(error, aiohttp.ClientSSLError)
            sent = not isinstance(error, aiohttp.ClientConnectorError)
            raise BackendError(message, remedy=remedy, transient=lost, begun=sent) from error

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The kept session on the background loop. On another loop, a new session that is closed at the
        block's end."""
        if not in_background():
            async with self._new_session() as session:
                yield session
            return
        loop = asyncio.get_running_loop()
        if self._kept is None or self._kept[0] is not loop:  # the first request, or that of a forked child
            self._kept = loop, self._new_session()
            self._close = weakref.finalize(self, _close, self._kept[1], loop, os.getpid())
        yield self._kept[1]

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
            headers=self._headers,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[_noting_reuse()],
        )


def _close(
    session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop, process: int
) -> concurrent.futures.Future[None] | None:
    """Close `session` on its loop `loop`. May be called in any thread, and while the interpreter ends."""
    if process != os.getpid() or loop.is_closed():
        # The session can be neither used nor freed. If its loop is closed, aiohttp would print a warning when
        # the session is freed, also at the interpreter's end. If a forked child closed the sessions that it
        # inherited, the parent would get no more events of their connections: both share one epoll instance.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
        return None
    return asyncio.run_coroutine_threadsafe(session.close(), loop)


def _checked(url: str) -> Any:
    """Parse the URL of a server. Raises `InvalidRequest` if `url` cannot be the URL of a server."""
    with suppress(ValueError):
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment)  # paths are appended to it
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and plain:
            return parts
    raise InvalidRequest(
        f"{without_credentials(url)!r} is not a URL of a server.",
        field="base_url",
        remedy="It begins with http:// or https://, and has no query.",
    )


def _proxy(scheme: str, host: str) -> str | None:
    """`proxy_for`, if it is reached by HTTP. Raises `BackendError` for a proxy of another kind.

    This function replaces aiohttp's `trust_env`, which looks up the proxy at each request, in a thread, and
    ignores ALL_PROXY.
    """
    found = proxy_for(scheme, host)
    if found is None:
        return None
    parts = urlsplit(found)
    if parts.scheme != "http":
        raise BackendError(
            f"The proxy {parts.hostname} is to be reached by {parts.scheme}.",
            remedy="Name one with http://, or name the server in NO_PROXY.",
        )
    return found


def _tls(verify: str | bool) -> ssl.SSLContext | bool:
    if not verify:
        return False
    if isinstance(verify, str):
        return ssl.create_default_context(cafile=verify)
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return ssl.create_default_context()  # OpenSSL reads both
    return ssl.create_default_context(cafile=certifi.where())


def _noting_reuse() -> aiohttp.TraceConfig:
    """Trace hook that appends to the list in `trace_request_ctx` if the request uses a kept connection."""

    async def note(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.append(True)

    noting = aiohttp.TraceConfig()
    noting.on_connection_reuseconn.append(note)
    return noting


async def _sent_events(parser: EventParser, content: aiohttp.StreamReader) -> AsyncIterator[SentEvent]:
    async for part in content.iter_any():
        for event in parser.push(part):
            yield event
    for event in parser.end():
        yield event
