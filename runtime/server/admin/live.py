"""The live page: / shows what the server does now, and asks /live for it about once a second."""

from __future__ import annotations

import asyncio
import time
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from ramify import __version__
from ramify.errors import RamifyError
from ramify.messages import SchedulerStats, Snapshot
from ramify.pages.page import fill
from ramify.runtime.server.fields import json_response
from ramify.runtime.server.service import FrontendProtocol, Service

router = APIRouter()

NODES = 240
"""Nodes of the tree that are shown."""
QUEUED = 40
"""Programs of the queue that are shown."""
FRESH_S = 0.5
"""However many look, the scheduler is not asked again before so long."""
WAIT_S = 1.5
"""How long an answer waits for the scheduler, which answers between two steps."""


class Seen(NamedTuple):
    """What the scheduler said, and when by the monotonic clock."""

    at: float
    stats: SchedulerStats
    snapshot: Snapshot


class Watch:
    """Asks the scheduler for everybody who looks, and only while somebody does."""

    def __init__(self, frontend: FrontendProtocol) -> None:
        self._frontend = frontend
        self._asking: asyncio.Task[None] | None = None
        self._seen: Seen | None = None

    async def look(self) -> Seen | None:
        """What the scheduler said last, which is older where it has been silent for `WAIT_S`."""
        if self._asking is None and (self._seen is None or time.monotonic() - self._seen.at >= FRESH_S):
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=WAIT_S)
        return self._seen

    async def _ask(self) -> None:
        try:
            stats, snapshot = await self._frontend.snapshot(NODES, QUEUED)
            self._seen = Seen(time.monotonic(), stats, snapshot)
        except RamifyError:
            pass  # It restarts, or has been closed: the page shows how old its figures are.
        finally:
            self._asking = None


@router.get("/")
async def page(request: Request) -> Response:
    """The page, which holds no figures itself."""
    name = Service.of(request).model_name
    template = files(__package__).joinpath("live_page.html").read_text(encoding="utf-8")
    return HTMLResponse(fill(template, name), headers={"cache-control": "no-store"})


@router.get("/live")
async def live(request: Request) -> Response:
    """All that the page shows; ``program`` names the one whose requests are wanted."""
    service = Service.of(request)
    watch = request.app.state.watch
    assert isinstance(watch, Watch)
    seen = await watch.look()
    recent = service.recent
    now = recent.now()
    chosen = recent.get(request.query_params.get("program", ""))
    answer: dict[str, Any] = {
        "model": service.model_name,
        "version": __version__,
        "up_s": time.time() - service.started_at,
        "healthy": service.frontend.healthy and not service.draining,
        "in_flight": service.frontend.in_flight,
        "age_s": None if seen is None else time.monotonic() - seen.at,
        "stats": None if seen is None else msgspec.to_builtins(seen.stats),
        "tree": [] if seen is None else seen.snapshot.nodes,
        "queue": [] if seen is None else seen.snapshot.queue,
        "queue_hidden": 0 if seen is None else seen.snapshot.queue_hidden,
        "programs": [program.summary(now) for program in recent],
        "chosen": None if chosen is None else chosen.details(now),
    }
    return json_response(answer)
