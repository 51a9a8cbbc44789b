"""HTTP for the remote backends: JSON, server-sent events, and errors as Ramify's own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

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
DONE = "[DONE]"

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
        self, base_url: str, api_key: str | None = None, *, verify: Any = True, timeout_s: float | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            verify=verify,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

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
            async with self._client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _error_of(response)
                async for data in _event_data(response.aiter_bytes()):
                    if data == DONE:
                        return
                    event = json.loads(data)
                    if isinstance(event.get("error"), dict):
                        raise _error_from_body(event["error"], 500, None)
                    yield event
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
        raise BackendError(f"{url} broke off its answer.")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        url = self.base_url + path
        try:
            response = await self._client.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
        if response.status_code != 200:
            raise _error_of(response)
        try:
            return response.json()
        except ValueError:
            raise BackendError(f"{url} did not answer in JSON.") from None


async def _event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The ``data:`` of each event. Lines end in LF or CRLF alone, unlike those of `str.splitlines`."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def _unreachable(url: str, error: httpx.HTTPError) -> RamifyError:
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return RequestTimeout(f"{url} did not answer in time.")
    return BackendError(f"{url} cannot be reached: {str(error) or type(error).__name__}.")


def _error_of(response: httpx.Response) -> RamifyError:
    retry_after = response.headers.get("retry-after", "")
    seconds = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else None
    try:
        body = response.json()
    except ValueError:
        body = None
    problem = body.get("error") if isinstance(body, dict) else None
    if not isinstance(problem, dict):
        problem = {"message": response.text[:500] or f"{response.url} answered {response.status_code}."}
    return _error_from_body(problem, response.status_code, seconds)


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
