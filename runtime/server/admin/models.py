"""/models/{name}/load and /models/{name}/unload, of a server that loads and unloads models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import UnsupportedField
from ramify.runtime.models.names import keep_alive_s
from ramify.runtime.models.pool import KEEP, KeepAlive
from ramify.runtime.models.status import ModelStatus
from ramify.runtime.server.body import read_body
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.models import Models, several_models, status_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import while_connected

router = Router()


@router.post("/models/{name:path}/load", uses_model=False)
async def load_model(request: Request, name: str) -> Response:
    """Load a model. The response is sent when it is ready. The body may have `keep_alive`, as in Ollama's
    API."""
    body = await read_body(request)
    fields = Fields.parse(body) if body else Fields({})
    given = fields.take("keep_alive", str | float | int)
    fields.refuse_rest()
    kept: KeepAlive = KEEP if given is None else keep_alive_s(given)
    models = _models(request)
    model = await while_connected(request.receive, models.find_allowed(name))
    await while_connected(request.receive, models.pool.load(model, kept))
    await models.pool.measure()
    return _answer(models.pool.status(model))


@router.post("/models/{name:path}/unload", uses_model=False)
async def unload_model(request: Request, name: str) -> Response:
    """Unload a model. The response is sent when its requests have ended and its processes are gone."""
    await read_body(request)
    models = _models(request)
    model = await while_connected(request.receive, models.find_allowed(name))
    return _answer(await while_connected(request.receive, models.pool.unload(model)))


def _models(request: Request) -> Models:
    if (models := several_models(request)) is None:
        raise UnsupportedField(
            f"This server has one model, {Service.serving(request).model_name!r}, which is always loaded.",
            field="model",
            remedy="Serve several, or start the server with --keep-alive.",
        )
    return models


def _answer(status: ModelStatus) -> Response:
    return json_response({"name": status.name, **status_body(status)})
