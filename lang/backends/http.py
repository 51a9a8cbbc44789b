"""HTTP for the remote backends: JSON, server-sent events, and errors as Ramify's own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from functools import cached_property
from typing import Any

import aiohttp
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

CONNECT_S = 10.0
KEEP_ALIVE_S = 4.0
"""How long an idle connection is kept: less than servers keep theirs (uvicorn: 5 s), so that none is used
that its server is about to close."""
LAST_BYTES_S = 0.5
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


class HttpClient:
    """One server. Closing a stream of events closes its connection, which aborts the request there.

    The number of connections is not limited here: a program's concurrency is. All methods run on one
    event loop.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: str | bool = True,
        timeout_s: float | None = None,
    ) -> None:
        """`verify`: TLS verification, or the path of a CA bundle. `timeout_s` bounds each wait for bytes."""
        self.base_url = base_url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._ssl = ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify
        self._timeout_s = timeout_s

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Made by the first request: a session belongs to the event loop that it is made on."""
        return aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=True,
        )

    def _request(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        return self._session.request(method, url, data=data, allow_redirects=False)

    async def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return await self._json("GET", path)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to `body`."""
        return await self._json("POST", path, body)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events that answer `body`, as JSON, until the end is announced.

        Raises the error that an event carries, and `BackendError` when the stream breaks off.
        """
        url = self.base_url + path
        try:
            async with self._request("POST", url, body) as response:
                if response.status != 200:
                    raise _error_of(response, await response.read())
                async for data in _event_data(response.content.iter_any()):
                    if data == DONE:
                        await _read_end(response)
                        return
                    event = msgspec.json.decode(data)
                    if isinstance(event.get("error"), dict):
                        raise _error_from_body(event["error"], 500, None)
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(url, error) from error
        raise BackendError(f"{url} broke off its answer.")

    async def aclose(self) -> None:
        if "_session" in self.__dict__:
            await self._session.close()

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        url = self.base_url + path
        try:
            async with self._request(method, url, body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(url, error) from error
        if response.status != 200:
            raise _error_of(response, answer)
        try:
            return msgspec.json.decode(answer)
        except msgspec.DecodeError:
            raise BackendError(f"{url} did not answer in JSON.") from None


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """The few bytes after the last event: the connection serves again then."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(LAST_BYTES_S):
            await response.read()


async def _event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The ``data:`` of each event. Lines end in LF or CRLF alone, unlike those of `str.splitlines`."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _unreachable(url: str, error: Exception) -> RamifyError:
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return RequestTimeout(f"{url} did not answer in time.")
    return BackendError(f"{url} cannot be reached: {str(error) or type(error).__name__}.")


def _error_of(response: aiohttp.ClientResponse, answer: bytes) -> RamifyError:
    retry_after = response.headers.get("retry-after", "")
    seconds = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else None
    try:
        body = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        body = None
    problem = body.get("error") if isinstance(body, dict) else None
    if not isinstance(problem, dict):
        text = answer.decode(errors="replace")[:500]
        problem = {"message": text or f"{response.url} answered {response.status}."}
    return _error_from_body(problem, response.status, seconds)


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
