"""/cache: what the prefix cache holds, by whom and for how long, and its release."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify.runtime.server.fields import json_response
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service

router = Router()


@router.get("/cache")
async def cache_contents(request: Request) -> Response:
    """List the holds of each model, with the ends of their texts only if the server shows texts
    (`live_texts`)."""
    return json_response({"models": [await _contents(Service.serving(request))]})


@router.delete("/cache/{owner:path}")
async def release_hold(request: Request, owner: str) -> Response:
    """Release what a program, a session or a pin holds."""
    released = await Service.serving(request).frontend.control.release(owner)
    return json_response({"owner": owner, "released": released})


async def _contents(service: Service) -> dict[str, Any]:
    found = await service.frontend.control.cache(texts=service.config.live_texts)
    return {"model": service.model_name, **msgspec.to_builtins(found)}
