"""Errors as HTTP responses, with the body of OpenAI's API. Each error is logged in one line."""

from __future__ import annotations

import logging
import math
import re

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ramify.errors import Cancelled, RamifyError

logger = logging.getLogger("ramify.server")

_LOGGED_CHARACTERS = 500


class ClientGone(Cancelled):
    """Raised when the client disconnects before the response."""


def error_body(error: RamifyError) -> bytes:
    """The JSON body ``{"error": {message, type, param, code}}``. The object also has a pointer (JSON pointer,
    RFC 6901, to the place of the error in a JSON Schema) and a remedy if the error has them; the remedy is
    also the end of the message."""
    problem = _problem(str(error), error.status, error.field, error.code)
    problem |= {"pointer": error.pointer} if error.pointer else {}
    problem |= {"remedy": error.remedy} if error.remedy else {}
    return msgspec.json.encode({"error": problem})


def _problem(message: str, status: int, field: str | None, code: str) -> dict[str, str | None]:
    return {"message": message, "type": type_of(status), "param": field, "code": code}


def error_response(error: RamifyError, scope: Scope) -> Response:
    """The response to the request of `scope`, which failed with `error`."""
    log_error(scope, error.status, str(error), error.field)
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 408:
        headers["connection"] = "close"  # the rest of the body may still arrive
    return Response(error_body(error), error.status, headers, "application/json")


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
    )


def add_error_handlers(app: FastAPI) -> None:
    """Install handlers that give Ramify's errors and the router's errors the same body."""

    @app.exception_handler(RamifyError)
    async def ramify_error(request: Request, error: RamifyError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = {
            404: f"There is no {request.url.path} on this server.",
            405: f"{request.url.path} does not take {request.method}.",
        }.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        log_error(request.scope, error.status_code, message)
        body = msgspec.json.encode({"error": _problem(message, error.status_code, None, code)})
        return Response(body, error.status_code, error.headers, "application/json")


def type_of(status: int) -> str:
    """The error type of OpenAI's API for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
