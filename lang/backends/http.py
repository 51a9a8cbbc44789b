"""HTTP for the remote backends: JSON, server-sent events, and errors as Ramify's own."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from ramify.errors import (
    BackendError,
    ErrorInfo,
    InvalidRequest,
    NotFound,
    Overloaded,
    RamifyError,
    RequestTimeout,
    Unauthorized,
    from_info,
)
from ramify.lang.backends.connection import BrokenAnswer, Connection
from ramify.lang.backends.origin import Origin
from ramify.lang.backends.pool import Pool

DONE = b"[DONE]"

_BY_STATUS: dict[int, type[RamifyError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    408: RequestTimeout,
    422: InvalidRequest,
    429: Overloaded,
    504: RequestTimeout,
}


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What a server-sent event can be read as, beside a dictionary: a subclass of this."""

    error: dict[str, Any] | None = None


class HttpClient:
    """One server. Closing a stream of events closes its connection, which aborts the request there.

    The number of connections is not limited here: a program's concurrency is. Nothing is left open, or
    heard of, where nobody calls `aclose`.

    A request whose kept connection turns out to be closed is sent once more: none that Ramify sends does
    harm when it arrives twice.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: str | bool = True,
        timeout_s: float | None = None,
    ) -> None:
        """`verify`: TLS verification, or the path of a CA bundle. `timeout_s` bounds each wait for bytes.

        Raises `InvalidRequest` where the URL is none, or the key cannot be sent.
        """
        self.base_url = base_url.rstrip("/")
        self._origin = Origin(self.base_url, verify)
        self._timeout_s = timeout_s
        self._pool = Pool()
        self._head = self._make_head(api_key)
        weakref.finalize(self, Pool.close_from_anywhere, self._pool)

    def _make_head(self, api_key: str | None) -> bytes:
        """The headers that all requests have."""
        headers = {**self._origin.headers, "accept": "*/*", "accept-encoding": "identity"}
        headers["user-agent"] = "ramify"
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
            if not (api_key.isascii() and api_key.isprintable()):
                raise InvalidRequest("The API key has characters that no header can hold.", field="api_key")
        return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()

    async def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return await self._json("GET", path)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to `body`."""
        return await self._json("POST", path, body)

    async def events(
        self, path: str, body: Mapping[str, Any], kind: Any = dict[str, Any]
    ) -> AsyncIterator[Any]:
        """The events that answer `body`, as JSON that is a `kind`, until the end is announced.

        Raises the error that an event carries, and `BackendError` when the stream breaks off or holds
        something else.
        """
        url = self.base_url + path
        decode = msgspec.json.Decoder(kind).decode
        with self._plainly(url):
            connection = await self._ask("POST", path, body)
            finished = False
            try:
                if connection.status != 200:
                    raise _error_of(url, connection, await connection.body(self._timeout_s))
                async for data in _event_data(connection, self._timeout_s):
                    if data == DONE:
                        finished = True
                        return
                    event = decode(data)
                    problem = event.error if isinstance(event, Event) else event.get("error")
                    if isinstance(problem, dict):
                        raise _error_from_body(problem, 500, None)
                    yield event
            finally:
                self._pool.take_back(connection, finished=finished)
        raise BackendError(f"{url} broke off its answer.")

    async def aclose(self) -> None:
        """Close all connections; what they serve fails."""
        await self._pool.aclose()

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        url = self.base_url + path
        with self._plainly(url):
            connection = await self._ask(method, path, body)
            try:
                answer = await connection.body(self._timeout_s)
            finally:
                self._pool.take_back(connection)
        if connection.status != 200:
            raise _error_of(url, connection, answer)
        try:
            return msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BackendError(f"{url} did not answer in JSON.") from None

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Connection:
        """A connection on which the answer begins."""
        request = self._request(method, path, body)
        while True:
            connection = self._pool.take()
            if connection is None:
                connection = await self._origin.connect()
                self._pool.add(connection)
            try:
                connection.send(request)
                await connection.head(self._timeout_s)
                encoding = connection.headers.get("content-encoding", "identity")
                if encoding != "identity":
                    raise BrokenAnswer(f"it answered with the encoding {encoding}, which was not asked for")
                return connection
            except BaseException:
                self._pool.take_back(connection)
                if not connection.stale:
                    raise

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        line = f"{method} {self._origin.target}{path} HTTP/1.1\r\n".encode()
        if body is None:
            length = b"content-length: 0\r\n\r\n" if method == "POST" else b"\r\n"
            return line + self._head + length
        try:
            data = msgspec.json.encode(body)
        except UnicodeEncodeError:
            raise InvalidRequest("The prompt is not valid Unicode.", field="prompt") from None
        kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
        return line + self._head + kind + data

    @contextmanager
    def _plainly(self, url: str) -> Iterator[None]:
        """Failures of the wire as errors of ours."""
        try:
            yield
        except TimeoutError:
            raise RequestTimeout(f"{url} did not answer in time.") from None
        except (OSError, BrokenAnswer) as error:
            reason = str(error) or type(error).__name__
            raise BackendError(f"{url} cannot be reached: {reason}.") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BackendError(f"{url} told something else than was asked for: {error}.") from error


async def _event_data(connection: Connection, silence_s: float | None) -> AsyncIterator[bytes]:
    """The ``data:`` of each event. Lines end in LF or CRLF alone, unlike those of `str.splitlines`."""
    rest = b""
    while part := await connection.part(silence_s):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _error_of(url: str, connection: Connection, answer: bytes) -> RamifyError:
    retry_after = connection.headers.get("retry-after", "")
    seconds = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else None
    try:
        body = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    problem = body.get("error") if isinstance(body, dict) else None
    if not isinstance(problem, dict):
        text = answer.decode(errors="replace")[:500]
        problem = {"message": text or f"{url} answered {connection.status}."}
    return _error_from_body(problem, connection.status, seconds)


def _error_from_body(problem: Mapping[str, Any], status: int, retry_after: float | None) -> RamifyError:
    """OpenAI's error object, to which a Ramify server adds its own code and pointer, as an exception."""
    message = str(problem.get("message") or f"The endpoint answered {status}.")
    field = problem.get("param") if isinstance(problem.get("param"), str) else None
    code, pointer = problem.get("code"), problem.get("pointer")
    if isinstance(code, str):
        known = from_info(
            ErrorInfo(code=code, message=message, field=field, pointer=pointer, retry_after=retry_after)
        )
        if type(known) is not RamifyError:
            return known
    return _BY_STATUS.get(status, BackendError)(message, field=field, retry_after=retry_after)
