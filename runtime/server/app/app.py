"""The HTTP application: all routers, error handlers and middleware."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from ramify.runtime.config import ServerConfig
from ramify.runtime.host_names import split_names
from ramify.runtime.server import calls
from ramify.runtime.server.admin import cache, dashboard, health, models, replicas
from ramify.runtime.server.anthropic import endpoint as anthropic
from ramify.runtime.server.app.access import RefuseWebPages
from ramify.runtime.server.app.middleware import (
    CountResponses,
    NameClient,
    OneFormOfPath,
    RequireKey,
    UnexpectedErrors,
)
from ramify.runtime.server.decisions import endpoint as decisions
from ramify.runtime.server.decisions import rerank, systemone
from ramify.runtime.server.errors import add_error_handlers
from ramify.runtime.server.keys.tenants import Keys
from ramify.runtime.server.llamacpp import infill
from ramify.runtime.server.models import Models, ReleaseModel
from ramify.runtime.server.ollama import endpoints as ollama
from ramify.runtime.server.ollama import models as ollama_models
from ramify.runtime.server.openai import embeddings, tokenize
from ramify.runtime.server.openai import endpoints as openai
from ramify.runtime.server.openai.responses import endpoint as responses
from ramify.runtime.server.openai.responses import stored
from ramify.runtime.server.openai.responses.store import ResponseStore
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import IGNORED_HEADER, FrontendProtocol, Service
from ramify.runtime.server.sglang import endpoints as sglang
from ramify.runtime.server.telemetry.middleware import REQUEST_ID_HEADER, FollowTrace, NameRequest


def create_app(
    frontend: FrontendProtocol,
    config: ServerConfig,
    routers: Sequence[Router] = (),
    keys: Keys | None = None,
) -> Starlette:
    """Make the application for `frontend`, to be served on the event loop that started `frontend`.

    With `Models` each request has the frontend of its model. `routers`: further ones, whose paths are not
    suggested for an unknown one. `keys`: those of `config`; None if they have not been read yet.
    """
    # Routes are searched in this order. Programs send most requests, and the shortest. Anthropic's lists of
    # models, for requests that name its API, have the paths of OpenAI's.
    dialects = (anthropic, openai, embeddings, responses, stored, sglang, tokenize, infill)
    deciding = (decisions, systemone, rerank)
    modules = (calls, *dialects, *deciding, ollama, ollama_models, health, models, replicas, cache, dashboard)
    own = [route for module in modules for route in module.router.routes]
    further = [route for router in routers for route in router.routes]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for router in routers:
                if router.lifespan is not None:
                    await stack.enter_async_context(router.lifespan(app))
            yield

    app = Starlette(routes=[*own, *further], lifespan=lifespan)
    several = frontend if isinstance(frontend, Models) else None
    service = Service(frontend, config) if several is None else several.server
    app.state.service = service
    app.state.models = several
    app.state.responses = ResponseStore() if config.store else None
    app.state.snapshots = {}
    add_error_handlers(app, [route.path for route in own])
    if several is not None:
        app.add_middleware(ReleaseModel)
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(NameClient)
    # The last one added is the outermost: refused requests are counted, and a CORS preflight needs no key.
    app.state.keys = keys = Keys(config) if keys is None else keys
    if keys:
        open_paths = ("/metrics",) if config.open_metrics else ()
        app.add_middleware(RequireKey, keys=keys, open_paths=open_paths)
    if config.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=split_names(config.cors),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", IGNORED_HEADER, REQUEST_ID_HEADER],
        )
    app.add_middleware(RefuseWebPages, config=config)
    app.add_middleware(CountResponses, metrics=service.metrics)
    if config.otel:
        app.add_middleware(FollowTrace)
    app.add_middleware(NameRequest)
    app.add_middleware(OneFormOfPath)
    return app
