"""Errors as HTTP responses, with the body that OpenAI's API has."""

from __future__ import annotations

import math

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import Cancelled, RamifyError


class ClientGone(Cancelled):
    """The client disconnected before the response."""


class Problem(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str
    pointer: str | msgspec.UnsetType | None = msgspec.UNSET
    """Place in a JSON Schema (RFC 6901)."""
    remedy: str | msgspec.UnsetType = msgspec.UNSET
    """What to do instead; the message has it too."""


class ErrorReply(msgspec.Struct, kw_only=True):
    error: Problem


def error_body(error: RamifyError) -> bytes:
    """``{"error": {message, type, param, code}}`` in JSON."""
    return msgspec.json.encode(
        ErrorReply(
            error=Problem(
                message=str(error),
                type=type_of(error.status),
                param=error.field,
                code=error.code,
                pointer=error.pointer or msgspec.UNSET,
                remedy=error.remedy or msgspec.UNSET,
            )
        )
    )


def error_response(error: RamifyError) -> Response:
    """The response to a request that failed with `error`."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Give Ramify's errors and the router's the same body."""

    @app.exception_handler(RamifyError)
    async def ramify_error(request: Request, error: RamifyError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = {
            404: f"There is no {request.url.path} on this server.",
            405: f"{request.url.path} does not take {request.method}.",
        }.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        problem = Problem(message=message, type=type_of(error.status_code), param=None, code=code)
        body = msgspec.json.encode(ErrorReply(error=problem))
        return Response(body, error.status_code, error.headers, "application/json")


def type_of(status: int) -> str:
    """The error type of OpenAI's API for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
