"""Ramify's errors for error answers and for unexpected answers of a server."""

from __future__ import annotations

import email.utils
import html
import re
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from ramify.errors import (
    BackendError,
    EngineClosed,
    ErrorInfo,
    InvalidRequest,
    NotFound,
    Overloaded,
    RamifyError,
    RequestTimeout,
    Unauthorized,
    from_info,
)
from ramify.text import sentence, shortened

SHOWN_CHARS, READ_BYTES = 500, 8192
"""Most characters of an answer that an error message shows, and most bytes of the answer that are read for
the message."""
KEY_REMEDY = (
    "Give the server's key as the variable RAMIFY_ENDPOINT_KEY, as api_key=KEY, or as --endpoint-key KEY on"
    " the command line."
)
TAGS = re.compile(r"(?is)<(script|style)\b.*?</\1>|<[^>]*>")

_BY_STATUS: dict[int, type[RamifyError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    405: NotFound,
    408: RequestTimeout,
    422: InvalidRequest,
    429: Overloaded,
    501: NotFound,
    504: RequestTimeout,
}


def error_of(response: aiohttp.ClientResponse, answer: bytes) -> RamifyError:
    problem = problem_in(json_of(answer), told=True)
    if problem is None:
        problem = {"message": plain_text(answer)}
    status = response.status
    error = error_from_body(response, problem, status, transient=may_pass(status))
    if status == 401:  # a Ramify server tells HTTP clients to send a bearer token
        error.message = error.message.removesuffix(str(problem.get("remedy", ""))).rstrip()
        error.remedy = KEY_REMEDY
    return error


def json_of(data: bytes) -> Any:
    """Decoded JSON; None if `data` is not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def problem_in(body: Any, *, told: bool) -> Mapping[str, Any] | None:
    """The error object in the body of an answer or in an event; None if there is none. `told`: whether the
    HTTP status or the event's name already says that there was an error."""
    if isinstance(body, list) and len(body) == 1:  # as Google's endpoints send it
        (body,) = body
    if isinstance(body, str):
        return {"message": body} if told and body else None
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        return error
    if not error and not told and "error" not in (body.get("type"), body.get("object")):
        return None
    said = [error, *(body.get(name) for name in ("message", "detail", "msg"))]
    return {**body, "message": next((one for one in said if one), None) or body}


def status_in(problem: Mapping[str, Any]) -> int | None:
    """The HTTP status in an error object; None if there is none."""
    for name in ("code", "status"):
        value = problem.get(name)
        if isinstance(value, int | str) and str(value).isdecimal() and 400 <= int(value) < 600:
            return int(value)
    return None


def something_else(response: aiohttp.ClientResponse, data: bytes, wrong: Exception | None = None) -> str:
    why = "" if wrong is None else f" ({wrong})"
    return f"{response.url} answered something else than was asked for{why}: {plain_text(data)!r}."


def plain_text(data: bytes) -> str:
    """The beginning of an answer as plain text for an error message, without HTML tags."""
    text = data[:READ_BYTES].decode(errors="replace")
    if text.lstrip().startswith("<"):
        text = html.unescape(TAGS.sub(" ", text))
    return shortened(" ".join(text.split()), SHOWN_CHARS)


def retry_after_of(response: aiohttp.ClientResponse) -> float | None:
    return retry_after_s(response.headers.get("retry-after", ""))


def retry_after_s(header: str) -> float | None:
    """Seconds to wait by a ``Retry-After`` header, which is a number of seconds or a date (RFC 9110, 10.2.3).
    None for any other text."""
    if header.replace(".", "", 1).isdecimal():
        return float(header)
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None


def error_from_body(
    response: aiohttp.ClientResponse, problem: Mapping[str, Any], status: int | None, *, transient: bool
) -> RamifyError:
    """The exception for `problem`, an error object of OpenAI's form. In the error objects of a Ramify server,
    ``code`` is one of Ramify's error codes, and ``pointer`` is a JSON pointer.

    An error with one of Ramify's codes keeps its message, and its code decides whether it is transient. For
    any other error the message begins with the URL and `status`, and `transient` is the exception's own.

    `status` is None for an event of a stream without a status.
    """
    said = problem.get("message")
    if said and not isinstance(said, str):
        said = msgspec.json.encode(said).decode()
    retry_after = retry_after_of(response)
    answered = f"{response.url} answered {status or 'with an error'}"
    field = problem.get("param") if isinstance(problem.get("param"), str) else None
    code, pointer = problem.get("code"), problem.get("pointer")
    if isinstance(code, str):
        known = from_info(
            ErrorInfo(
                code=code,
                message=said or f"{answered}.",
                field=field,
                pointer=pointer,
                retry_after=retry_after,
            )
        )
        if type(known) is not RamifyError:
            return remote(known)
    kind = _BY_STATUS.get(status or 500, BackendError)
    message = sentence(f"{answered}: {said}" if said else answered)
    return kind(message, field=field, retry_after=retry_after, transient=transient)


def remote(error: RamifyError) -> RamifyError:
    """Return `error`, which a Ramify server sent. An `EngineClosed` is made transient, because the server may
    come back."""
    if isinstance(error, EngineClosed):
        error.transient = True
    return error


def may_pass(status: int) -> bool:
    return status in (408, 425, 429) or (status >= 500 and status != 501)
