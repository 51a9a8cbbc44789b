"""The HTTP application: all routers, error handlers and middleware."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from ramify.runtime.config import ServerConfig
from ramify.runtime.host_names import split_names
from ramify.runtime.server import calls
from ramify.runtime.server.admin import dashboard, health, replicas
from ramify.runtime.server.anthropic import endpoint as anthropic
from ramify.runtime.server.app.access import RefuseWebPages
from ramify.runtime.server.app.middleware import (
    CountResponses,
    NameClient,
    OneFormOfPath,
    RequireApiKey,
    UnexpectedErrors,
)
from ramify.runtime.server.decisions import endpoint as decisions
from ramify.runtime.server.decisions import rerank, systemone
from ramify.runtime.server.errors import add_error_handlers
from ramify.runtime.server.llamacpp import infill
from ramify.runtime.server.ollama import endpoints as ollama
from ramify.runtime.server.ollama import models as ollama_models
from ramify.runtime.server.openai import embeddings, tokenize
from ramify.runtime.server.openai import endpoints as openai
from ramify.runtime.server.openai.responses import endpoint as responses
from ramify.runtime.server.openai.responses import stored
from ramify.runtime.server.openai.responses.store import ResponseStore
from ramify.runtime.server.service import IGNORED_HEADER, FrontendProtocol, Service
from ramify.runtime.server.sglang import endpoints as sglang


def create_app(frontend: FrontendProtocol, config: ServerConfig) -> FastAPI:
    """Make the application for `frontend`, to be served on the event loop that started `frontend`."""
    # No generated schema: bodies are parsed field by field, and FastAPI's pages that show a schema need a
    # CDN.
    app = FastAPI(title="Ramify", openapi_url=None, docs_url=None, redoc_url=None)
    service = Service(frontend, config)
    app.state.service = service
    app.state.responses = ResponseStore() if config.store else None
    app.state.snapshots = dashboard.SnapshotCache(frontend)
    # Routes are searched in this order. Programs send most requests, and the shortest. Anthropic's lists of
    # models, for requests that name its API, have the paths of OpenAI's.
    dialects = (anthropic, openai, embeddings, responses, stored, sglang, tokenize, infill)
    deciding = (decisions, systemone, rerank)
    paths: list[str] = []
    for module in (calls, *dialects, *deciding, ollama, ollama_models, health, replicas, dashboard):
        app.include_router(module.router)
        paths += [route.path for route in module.router.routes if isinstance(route, Route)]
    add_error_handlers(app, paths)
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(NameClient)
    # The last one added is the outermost: refused requests are counted, and a CORS preflight needs no key.
    if config.api_key is not None:
        open_paths = ("/metrics",) if config.open_metrics else ()
        app.add_middleware(RequireApiKey, api_key=config.api_key, open_paths=open_paths)
    if config.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=split_names(config.cors),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", IGNORED_HEADER],
        )
    app.add_middleware(RefuseWebPages, config=config)
    app.add_middleware(CountResponses, metrics=service.metrics)
    app.add_middleware(OneFormOfPath)
    return app
