"""/livez, /readyz, /health, /health_generate and /metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import EngineClosed, EngineError, RamifyError
from ramify.messages import Generate, SchedulerStats
from ramify.runtime.server.fields import json_response
from ramify.runtime.server.models import several_models
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import collect
from ramify.sampling_params import SamplingParams

router = Router()

GENERATE_LIMIT_S = 20.0
STATS_LIMIT_S = 2.0


class Unhealthy(EngineError):
    """The error 503: the server cannot serve."""

    code = "unhealthy"
    status = 503


@router.get("/livez", any_key=True)
async def livez(request: Request) -> Response:
    """Liveness: 200 while this process answers, also while the server drains or engine processes restart; 503
    once the engine has closed for good."""
    service = Service.serving(request)
    if service.frontend.gave_up and not service.life.draining:
        raise Unhealthy("The engine has closed.", remedy="Restart the server; its log says why.")
    return json_response({"status": "ok"})


@router.get("/readyz", any_key=True)
@router.get("/health", any_key=True)
async def health(request: Request) -> Response:
    """Readiness: 200 while the scheduler replies and the server accepts requests; else 503. With several
    models one healthy scheduler is enough, and the body has the state of each model that the key may use."""
    service = Service.serving(request)
    _check(service)
    body: dict[str, Any] = {"status": "ok", "heartbeat_age_s": service.frontend.heartbeat_age_s}
    if (models := several_models(request)) is not None:
        body["models"] = {
            one.name: one.state
            if (frontend := models.pool.frontends.get(one.name)) is None or frontend.healthy
            else "unhealthy"
            for one in models.allowed_statuses()
        }
    return json_response(body)


@router.get("/health_generate", uses_model=True, any_key=True)
async def health_generate(request: Request) -> Response:
    """Health check by a generation: 200 if it yields a token within `GENERATE_LIMIT_S` seconds; else 503."""
    service = Service.serving(request)
    _check(service)
    info = service.frontend.info
    start = info.bos_token_id if info.bos_token_id is not None else (*info.eos_token_ids, 0)[0]
    probe = Generate(
        rid=f"health-{service.frontend.new_rid()}",
        prompt=((start,),),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )
    try:
        async with asyncio.timeout(GENERATE_LIMIT_S):
            await collect([service.generate(probe, "/health_generate")])
    except TimeoutError:
        raise Unhealthy(f"No token came within {GENERATE_LIMIT_S:g} s.") from None
    return json_response({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    if (models := several_models(request)) is not None:
        return Response(await models.metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
    service = Service.serving(request)
    stats: SchedulerStats | None = None
    try:
        async with asyncio.timeout(STATS_LIMIT_S):
            stats = await service.frontend.control.stats()
    except (TimeoutError, RamifyError):
        pass  # ramify_scheduler_up becomes 0
    text = service.metrics.render(stats, service.frontend.loras.loaded)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _check(service: Service) -> None:
    if service.life.draining:
        raise EngineClosed("The server is shutting down.")
    if not service.frontend.healthy:
        raise Unhealthy(f"The scheduler has been silent for {service.frontend.heartbeat_age_s:.1f} s.")
