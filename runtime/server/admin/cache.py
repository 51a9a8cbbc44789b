"""/cache: the prefixes that are held, by whom and for how long, and their release.

A key of operators sees the holds of all keys, by the owners' ids in the engine. Any other key sees and
releases its own alone, by the ids that it has given.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import NotFound
from ramify.runtime.server.fields import json_response
from ramify.runtime.server.keys.tenants import Keys
from ramify.runtime.server.models import served_models
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import KEY, Service
from ramify.text import quoted

router = Router()

SHARED = ("pages_", "unheld")
"""Beginnings of the fields that are about the requests of all keys."""


@router.get("/cache", any_key=True)
async def cache_contents(request: Request) -> Response:
    """List the holds of each loaded model, with the ends of their texts only if the server shows texts
    (`live_texts`)."""
    keys: Keys = request.app.state.keys
    own = _own()
    models = []
    for service in await _services(request):
        found = await service.frontend.control.cache(texts=service.config.live_texts, owners=own)
        body = msgspec.to_builtins(found)
        for hold in body["holds"]:
            if key := keys.of_id(hold["owner"]):
                hold["key"] = key
            hold["owner"] = hold["owner"].removeprefix(own)
        if own:
            body = {name: value for name, value in body.items() if not name.startswith(SHARED)}
        models.append({"model": service.model_name, **body})
    return json_response({"models": models})


@router.delete("/cache/{owner:path}", any_key=True)
async def release_hold(request: Request, owner: str) -> Response:
    """Release what a program, a session or a pin holds, of any model."""
    services, identity = await _services(request), _own() + owner
    released = sum([await service.frontend.control.release(identity) for service in services])
    if not released:
        raise NotFound(f"{quoted(owner)} holds nothing.", remedy="GET /cache names the owners.")
    return json_response({"owner": owner, "released": released})


async def _services(request: Request) -> list[Service]:
    """The services of the models that are loaded and that the current key may use."""
    served = await served_models(request)
    return [one.service for one in served if one.service is not None and one.names]


def _own() -> str:
    """Beginning of the owners that the current key sees; "" for all."""
    caller = KEY.get()
    return "" if caller.key.admin else caller.account.prefix
