"""Errors as HTTP responses, with the body of the API that was called. Each error is logged in one line."""

from __future__ import annotations

import difflib
import logging
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from ramify.errors import Cancelled, PromptTooLong, RamifyError
from ramify.logs import fields
from ramify.spelling import CLOSE

logger = logging.getLogger("ramify.server")

_LOGGED_CHARACTERS = 500

SYSTEM_ONE = "/v1/systemone"
"""The path of TypeSafe's API."""
SYSTEM_ONE_MODELS = "jev-"
"""Beginning of the names of TypeSafe's models, such as jev-latest, the default of its SDK. They stand for the
served model, and for the first of several."""
SYSTEM_ONE_ID = "x-typesafe-request-id"
"""The header of TypeSafe's API with the request's id."""
SYSTEM_ONE_SDK = "x-typesafe-sdk"
"""A header of TypeSafe's client."""
TOO_LARGE, UNPROCESSABLE = 413, 422


class ClientGone(Cancelled):
    """Raised when the client disconnects before the response."""


class Problem(NamedTuple):
    """An error as a response tells it."""

    status: int
    code: str
    message: str
    """The message with the remedy."""
    field: str | None = None
    pointer: str | None = None
    """JSON pointer (RFC 6901) to the place of the error in a JSON Schema."""
    remedy: str | None = None
    errors: tuple[Problem, ...] = ()
    """All errors in fields of the request, if there are several."""
    lengths: tuple[int, int, int] | None = None
    """See `PromptTooLong`."""
    request_id: str = ""
    """The request's id, in Anthropic's API."""

    @classmethod
    def of(cls, error: RamifyError) -> Problem:
        every = tuple(cls._of_one(one, one.text) for one in (error, *error.others) if error.others)
        return cls._of_one(error, str(error))._replace(errors=every)

    @classmethod
    def _of_one(cls, error: RamifyError, message: str) -> Problem:
        return cls(
            error.status,
            error.code,
            message,
            error.field,
            error.pointer,
            error.remedy,
            lengths=error.lengths,
        )


def openai_body(problem: Problem) -> bytes:
    """The JSON body of OpenAI's API, ``{"error": {message, type, param, code}}``. The object also has the
    pointer and the remedy, if there are any, and ``errors``, a list of such objects, if there are several."""
    return msgspec.json.encode({"error": _openai_error(problem)})


def _openai_error(problem: Problem) -> dict[str, Any]:
    kind = type_of(problem.status)
    error: dict[str, Any] = {"message": problem.message, "type": kind}
    error |= {"param": problem.field, "code": problem.code}
    error |= {"pointer": problem.pointer} if problem.pointer else {}
    error |= {"remedy": problem.remedy} if problem.remedy else {}
    return error | ({"errors": [_openai_error(one) for one in problem.errors]} if problem.errors else {})


def anthropic_body(problem: Problem) -> bytes:
    """The JSON body of Anthropic's API, ``{"type": "error", "error": {type, message}, "request_id"}``."""
    default = "invalid_request_error" if problem.status < 500 else "api_error"
    message = problem.message
    if problem.code == PromptTooLong.code:  # by these words clients know that they must shorten it
        prompt, _, most = problem.lengths or (0, 0, 0)
        why = f"{prompt} tokens > {most - 1} maximum" if problem.lengths else message
        message = f"prompt is too long: {why}"
    else:
        message = _with_field(problem)
    error = {"type": _ANTHROPIC_TYPES.get(problem.status, default), "message": message}
    request_id = {"request_id": problem.request_id} if problem.request_id else {}
    return msgspec.json.encode({"type": "error", "error": error, **request_id})


def _with_field(problem: Problem) -> str:
    """The message, which names the field."""
    named = not problem.field or problem.field in problem.message
    return problem.message if named else f"{problem.field}: {problem.message}"


def ollama_body(problem: Problem) -> bytes:
    """The JSON body of Ollama's API, ``{"error": message}``."""
    return msgspec.json.encode({"error": problem.message})


def systemone_body(problem: Problem) -> bytes:
    """The JSON body of TypeSafe's API. ``detail`` is the message; of a wrong body (422) it is a list with
    {loc, msg, type} of each wrong field."""
    if problem.status != UNPROCESSABLE:
        return msgspec.json.encode({"detail": _with_field(problem)})
    errors = problem.errors or (problem,)
    return msgspec.json.encode(
        {"detail": [{"loc": _loc(one.field), "msg": one.message, "type": one.code} for one in errors]}
    )


def _loc(field: str | None) -> list[str | int]:
    """The steps of a path: ``["body", "questions", "is it?", "criteria", 2]`` for
    ``questions["is it?"].criteria[2]``. A path ends at a step that is not told, ``[...]``."""
    loc: list[str | int] = ["body"]
    told = (field or "").partition("[...]")[0]  # the key of an object
    for index, name, plain in re.findall(r'\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]|([^.\[]+)', told):
        loc.append(int(index) if index else msgspec.json.decode(name, type=str) if name else plain)
    return loc


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status → error type of Anthropic's API."""


def of_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API. Its list of models has the path of OpenAI's."""
    path: str = scope["path"]
    return path.startswith("/v1/messages") or (
        path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"])
    )


def error_response(error: RamifyError, scope: Scope) -> Response:
    """The response to the request of `scope`, which failed with `error`."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 408:
        headers["connection"] = "close"  # the rest of the body may still arrive
    response = _response(Problem.of(error), scope, headers)
    log_error(scope, response.status_code, str(error), error.field)
    return response


def _response(problem: Problem, scope: Scope, headers: Mapping[str, str]) -> Response:
    """The response with `problem` in the form of the API that was called.

    Anthropic's and TypeSafe's name the request: an endpoint sets the id in `scope`, under ``request_id``.
    """
    if of_anthropic(scope):
        problem = problem._replace(request_id=_request_id(scope))
        headers = {**headers, "request-id": problem.request_id}
        body = anthropic_body(problem)
    elif scope["path"] == SYSTEM_ONE:
        too_long = problem.code == PromptTooLong.code
        status = TOO_LARGE if too_long else {400: UNPROCESSABLE}.get(problem.status, problem.status)
        problem = problem._replace(status=status)
        headers = {**headers, SYSTEM_ONE_ID: _request_id(scope)}
        body = systemone_body(problem)
    else:
        body = ollama_body(problem) if scope["path"].startswith("/api/") else openai_body(problem)
    return Response(body, problem.status, headers, "application/json")


def _request_id(scope: Scope) -> str:
    return scope.get("request_id") or f"req_{secrets.token_hex(12)}"


def log_error(scope: Scope, status: int, message: str, field: str | None = None) -> None:
    """Log one line about an error response: at level INFO if the request was aborted or its client is gone
    (499), else at WARNING."""
    client = scope.get("client")
    # Many messages begin with the field: "top_p is 2.0; …", "At /items: regex: …".
    if field and not re.match(rf"(At /.*?: )?{re.escape(field)}[ :]", message):
        message = f"{field}: {message}"
    line = f"{scope['method']} {scope['path']}: {message}"[:_LOGGED_CHARACTERS]
    logger.log(
        logging.INFO if status == Cancelled.status else logging.WARNING,
        "status=%d client=%s %s",
        status,
        client[0] if client else "-",
        line if line.isprintable() else ascii(line),
        extra=fields(
            message=message[:_LOGGED_CHARACTERS],
            method=scope["method"],
            path=scope["path"],
            status=status,
            address=client[0] if client else None,
        ),
    )


def methods_of(app: Starlette, path: str) -> list[str]:
    """The methods that `path` takes."""
    scope = {"type": "http", "path": path, "root_path": "", "headers": []}
    return [
        method
        for method in ("GET", "POST", "PUT", "DELETE")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.routes)
    ]


def add_error_handlers(app: Starlette, paths: Sequence[str]) -> None:
    """Install handlers that give Ramify's errors and the router's errors the same body. `paths`: the paths
    that are suggested for an unknown one."""

    async def ramify_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RamifyError)
        return error_response(error, request.scope)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, message, headers = request.url.path, str(error.detail), error.headers or {}
        if error.status_code == 404:
            near = difflib.get_close_matches(path[:100], paths, 1, CLOSE)  # the path without /v1 too
            message = f"There is no {path} on this server.{f' Did you mean {near[0]}?' if near else ''}"
        elif error.status_code == 405:
            methods = methods_of(app, request.scope["path"])
            message = f"{path} does not take {request.method}, but {' and '.join(methods)}."
            headers = {"allow": ", ".join(methods)}  # the router names those of one of its routes alone
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        log_error(request.scope, error.status_code, message)
        return _response(Problem(error.status_code, code, message), request.scope, headers)

    app.add_exception_handler(RamifyError, ramify_error)
    app.add_exception_handler(HTTPException, no_route)


def type_of(status: int) -> str:
    """The error type of OpenAI's API for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
