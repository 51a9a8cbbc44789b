"""The dashboard: the page / shows what the server is doing. It fetches /live once a second."""

from __future__ import annotations

import asyncio
import time
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ramify import __version__
from ramify.engine_messages import Snapshot
from ramify.errors import RamifyError
from ramify.html.template import fill
from ramify.messages import SchedulerStats
from ramify.runtime.server.fields import json_response
from ramify.runtime.server.models import several_models
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service

router = Router()

NODES = 240
"""Maximum number of nodes of the radix tree that are shown."""
QUEUED = 40
"""Maximum number of queued programs that are shown."""
RUNNING = 200
"""Maximum number of running requests that are listed."""
MAX_AGE_S = 0.5
"""Seconds for which a snapshot is reused, by all open dashboards."""
WAIT_S = 1.5
"""Longest time, in seconds, that a response waits for the scheduler, which replies between two steps."""


class CachedSnapshot(NamedTuple):
    """A snapshot with its time of arrival, by the monotonic clock."""

    at: float
    stats: SchedulerStats
    snapshot: Snapshot


class SnapshotCache:
    """The latest snapshot of a model, shared by all dashboards. A new one is fetched only when a dashboard
    asks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._request: asyncio.Task[None] | None = None
        self._cached: CachedSnapshot | None = None

    async def latest(self) -> CachedSnapshot | None:
        """The latest snapshot, at most `MAX_AGE_S` old. If the scheduler does not reply within `WAIT_S`, an
        older snapshot, or None if there is none."""
        if self._request is None and (
            self._cached is None or time.monotonic() - self._cached.at >= MAX_AGE_S
        ):
            self._request = asyncio.create_task(self._fetch())
        if self._request is not None:
            await asyncio.wait({self._request}, timeout=WAIT_S)
        return self._cached

    async def _fetch(self) -> None:
        try:
            stats, snapshot = await self._service.frontend.control.snapshot(NODES, QUEUED)
            self._cached = CachedSnapshot(time.monotonic(), stats, snapshot)
        except RamifyError:
            pass  # The engine core restarts or is closed. The dashboard shows the age of its figures.
        finally:
            self._request = None


@router.get("/")
async def dashboard_page(request: Request) -> Response:
    """The dashboard's HTML, without data."""
    name = Service.serving(request).model_name
    template = files(__package__).joinpath("dashboard.html").read_text(encoding="utf-8")
    return HTMLResponse(fill(template, name), headers={"cache-control": "no-store"})


@router.get("/live")
async def live_figures(request: Request) -> Response:
    """The dashboard's data. The query parameter ``program`` names the program whose requests are listed."""
    service = Service.serving(request)
    models = several_models(request)
    if models is not None:
        service = await models.shown(request.query_params.get("model")) or service
    snapshots: dict[str, SnapshotCache] = request.app.state.snapshots
    if service.model_name not in snapshots:
        snapshots[service.model_name] = SnapshotCache(service)
    latest = await snapshots[service.model_name].latest()
    recent = service.recent
    now = recent.now()
    chosen = recent.get(request.query_params.get("program", ""))
    body: dict[str, Any] = {
        "model": service.model_name,
        "version": __version__,
        "up_s": time.time() - service.started_at,
        "api_key": service.config.needs_key,
        "healthy": service.frontend.healthy and not service.life.draining,
        "in_flight": service.frontend.in_flight,
        "age_s": None if latest is None else time.monotonic() - latest.at,
        "stats": None if latest is None else msgspec.to_builtins(latest.stats),
        "tokens": service.metrics.tokens(),
        "tree": [] if latest is None else latest.snapshot.nodes,
        "queue": [] if latest is None else latest.snapshot.queue,
        "queue_hidden": 0 if latest is None else latest.snapshot.queue_hidden,
        "throughput": recent.throughput.to_dict(),
        "running": recent.running(RUNNING),
        "programs": [program.summary(now) for program in recent],
        "chosen": None if chosen is None else chosen.details(now),
    }
    if models is not None:
        body["models"] = {one.name: one.state for one in models.allowed_statuses()}
    return json_response(body)
