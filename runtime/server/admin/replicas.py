"""/replicas: lists, adds, drains and restarts replicas of the model."""

from __future__ import annotations

import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import InvalidRequest
from ramify.runtime.server.body import read_body
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service

router = Router()


@router.get("/replicas")
async def list_replicas(request: Request) -> Response:
    """List every replica with its name, state, requests and processes."""
    found = Service.serving(request).frontend.replicas.statuses()
    return json_response({"replicas": [msgspec.to_builtins(one) for one in found]})


@router.post("/replicas", uses_model=False)
async def add_replica(request: Request) -> Response:
    """Start one more replica. The response is sent when it is up."""
    frontend = Service.serving(request).frontend
    return _answer(request, await frontend.replicas.add_replica())


@router.post("/replicas/{name}/drain", uses_model=False)
async def drain_replica(request: Request, name: str) -> Response:
    """Drain a replica, and stop it. Requests still running after `limit_s` seconds continue on other
    replicas."""
    await Service.serving(request).frontend.replicas.drain(name, await _limit_s(request))
    return _answer(request, name)


@router.post("/replicas/{name}/restart", uses_model=False)
async def restart_replica(request: Request, name: str) -> Response:
    """Drain a replica and start it anew. The response is sent when it is up."""
    await Service.serving(request).frontend.replicas.restart(name, await _limit_s(request))
    return _answer(request, name)


async def _limit_s(request: Request) -> float:
    """The `limit_s` of the body; if it has none, the server's ``drain_s``."""
    body = await read_body(request)
    if not body:
        return Service.serving(request).config.drain_s
    fields = Fields.parse(body)
    limit_s: float = fields.take("limit_s", float, Service.serving(request).config.drain_s)
    fields.refuse_rest()
    if not 0.0 <= limit_s < math.inf:
        raise InvalidRequest(f"limit_s is {limit_s}; it must be at least 0.", field="limit_s")
    return limit_s


def _answer(request: Request, name: str) -> Response:
    found = Service.serving(request).frontend.replicas.status(name)
    return json_response({"name": name, "state": "gone"} if found is None else msgspec.to_builtins(found))
