"""/cache: the prefixes that are held, by whom and for how long, and their release."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import NotFound
from ramify.runtime.server.fields import json_response
from ramify.runtime.server.models import served_models
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.text import quoted

router = Router()


@router.get("/cache")
async def cache_contents(request: Request) -> Response:
    """List the holds of each loaded model, with the ends of their texts only if the server shows texts
    (`live_texts`)."""
    models = []
    for service in await _services(request):
        found = await service.frontend.control.cache(texts=service.config.live_texts)
        models.append({"model": service.model_name, **msgspec.to_builtins(found)})
    return json_response({"models": models})


@router.delete("/cache/{owner:path}")
async def release_hold(request: Request, owner: str) -> Response:
    """Release what a program, a session or a pin holds, of any model."""
    services = await _services(request)
    released = sum([await service.frontend.control.release(owner) for service in services])
    if not released:
        raise NotFound(f"{quoted(owner)} holds nothing.", remedy="GET /cache names the owners.")
    return json_response({"owner": owner, "released": released})


async def _services(request: Request) -> list[Service]:
    """The services of the models that are loaded."""
    return [served.service for served in await served_models(request) if served.service is not None]
