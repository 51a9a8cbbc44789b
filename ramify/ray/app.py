"""The application of Ray Serve: ``serve run ramify.ray.app:build model=… replicas=2..8``.

    HTTP ─▶ Ray's proxy ─▶ Frontend: the HTTP surface, `Placement`     one actor
                              │  sessions (`ramify.ray.wire`)
                              ▼
                           Model, Model, …: an engine core of processes each   an actor for each replica

Ray chooses the machines of the actors; it starts, checks, scales and replaces them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from ramify.errors import UnsupportedField
from ramify.ray import listed
from ramify.ray.fleet import ListedFleet
from ramify.ray.host import EngineHost
from ramify.ray.options import Deployment, read_options
from ramify.ray.wire import NoSession
from ramify.runtime.config import ServerConfig
from ramify.runtime.fleet.kv_connector import EVACUATE_S
from ramify.runtime.processes.shares import whole

CLOSE_S = EVACUATE_S + 10.0
"""Seconds, in addition to drain_s, in which prefixes and requests move to other replicas and the engine
core's processes end."""
SESSIONS = 1.1
"""Number of running calls that Serve counts on an idle replica: the frontend's session, and for moments a
heartbeat. If this number and the target were 1, Serve would compute that two idle replicas have work for 1.01
replicas, and would keep both."""
POLL_S = 0.5
"""Seconds between two checks whether a stopping actor still has running requests."""


class Model:
    """A replica: one engine core, made of processes on the actor's machine."""

    async def __init__(self, deployment: Deployment) -> None:  # type: ignore[misc]
        self._version = deployment.version
        self._name = serve.get_replica_context().replica_id.unique_id
        config = deployment.server
        logging.getLogger("ramify").setLevel(config.log_level.upper())
        if config.threads is None:
            cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
            config = dataclasses.replace(config, threads=max(1, int(cores)))
        # Ray has set CUDA_VISIBLE_DEVICES, but does not assign particular cores to an actor.
        self._host = EngineHost(config, share=whole())
        await self._host.start()

    async def session(self, replica: str, session: str, version: str) -> AsyncIterator[bytes]:
        """See `EngineHost.session`. Yields nothing if the call is for another replica or version."""
        if (replica, version) == (self._name, self._version):
            async for item in self._host.session(session):
                yield item

    async def send(self, replica: str, session: str, number: int, message: bytes) -> bool:
        """See `EngineHost.send`."""
        return replica == self._name and await self._host.send(session, number, message)

    async def export(
        self, replica: str, session: str, message: bytes
    ) -> tuple[bytes, list[ray.ObjectRef]] | None:
        """See `EngineHost.export`.

        The KV snapshot is an object in this machine's store. It is returned as a list of at most one
        reference, as Ray would replace a bare reference by the object.
        """
        found = await self._host.export(session, message) if replica == self._name else None
        if found is None:
            return None
        answer, snapshot = found
        return answer, [] if snapshot is None else [await asyncio.to_thread(ray.put, snapshot)]

    async def import_(
        self, replica: str, session: str, message: bytes, snapshots: list[ray.ObjectRef]
    ) -> bytes | None:
        """See `EngineHost.import_`."""
        if replica != self._name:
            return None
        (snapshot,) = snapshots
        return await self._host.import_(session, message, await snapshot)

    async def check_health(self) -> None:
        self._host.check()

    async def __del__(self) -> None:
        if hasattr(self, "_host"):
            await self._host.aclose()


@serve.ingress()
class Frontend:
    """The HTTP routes of `ramify serve`, served by the replicas that Ray Serve lists."""

    async def __init__(  # type: ignore[misc]
        self, deployment: Deployment, model: DeploymentHandle
    ) -> None:
        from ramify.runtime.frontend.frontend import Frontend as RequestFrontend

        refuse_several(serve.get_replica_context().world_size)
        self._config = listening(deployment.server, (await asyncio.to_thread(http_options))[0])
        logging.getLogger("ramify").setLevel(self._config.log_level.upper())
        make_fleet = functools.partial(
            ListedFleet,
            transport=HandleTransport(model, deployment.version),
            listed=listed.here,
            drain_s=self._config.drain_s,
        )
        self._frontend = RequestFrontend(self._config, make_fleet=make_fleet)
        await self._frontend.start()

    def __serve_build_asgi_app__(self) -> Starlette:
        from ramify.programs.route import router
        from ramify.runtime.server.app.app import create_app

        return create_app(self._frontend, self._config, [router])

    async def __del__(self) -> None:
        if hasattr(self, "_frontend"):
            await self._frontend.aclose()


class HandleTransport:
    """A `Transport` over a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle, version: str) -> None:
        self._version = version
        self._open = handle.options(method_name="session", stream=True)
        self._send = handle.options(method_name="send")
        self._export = handle.options(method_name="export")
        self._import = handle.options(method_name="import_")

    async def open(self, replica: str, session: str) -> AsyncGenerator[bytes, None]:
        items = self._open.remote(replica, session, self._version)
        try:
            async for item in items:
                yield item
        finally:
            items.cancel()

    async def send(self, replica: str, session: str, number: int, message: bytes) -> None:
        if not await self._send.remote(replica, session, number, message):
            raise NoSession(replica)

    async def export(
        self, replica: str, session: str, message: bytes
    ) -> tuple[bytes, list[ray.ObjectRef] | None]:
        found = await self._export.remote(replica, session, message)
        if found is None:
            raise NoSession(replica)
        answer, snapshots = found
        return answer, snapshots or None

    async def import_(
        self, replica: str, session: str, message: bytes, snapshot: list[ray.ObjectRef]
    ) -> bytes:
        answer: bytes | None = await self._import.remote(replica, session, message, snapshot)
        if answer is None:
            raise NoSession(replica)
        return answer


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application from `args`: options of `ramify serve` and of `ClusterConfig`.

    Raises the errors of `read_options`.
    """
    return application(read_options(args))


def application(deployment: Deployment) -> serve.Application:
    """The application of the frontend and the replicas."""
    frontend = serve.deployment(Frontend, name="Frontend").options(
        num_replicas=1,
        **_stopping(deployment),
        max_ongoing_requests=2 * deployment.most_requests,
        ray_actor_options={"num_cpus": 0},
    )
    return frontend.bind(deployment, replicas(deployment))


def replicas(deployment: Deployment) -> serve.Application:
    """The application of the replicas, without the frontend."""
    server, cluster = deployment.server, deployment.cluster
    low, high = cluster.bounds
    scaling: dict[str, Any] = {"num_replicas": low}
    if low != high:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=low,
                max_replicas=high,
                target_ongoing_requests=cluster.target(server) + SESSIONS,
            )
        }
    model = serve.deployment(Model, name="Model").options(
        **scaling,
        **_stopping(deployment),
        logging_config={"enable_access_log": False},  # it would have a line for each message
        # The frontend limits requests (429). A limit here would delay messages about running requests, too.
        max_ongoing_requests=2 * deployment.most_requests,
        ray_actor_options={"num_cpus": cluster.cpus_per_replica, "num_gpus": cluster.gpus(server)},
        request_router_config=RequestRouterConfig(
            request_router_class="ramify.ray.router.PlacedRequestRouter"
        ),
    )
    return model.bind(deployment.replica())


def _stopping(deployment: Deployment) -> dict[str, float]:
    return {
        "graceful_shutdown_timeout_s": deployment.server.drain_s + CLOSE_S,
        "graceful_shutdown_wait_loop_s": POLL_S,
    }


def refuse_several(frontends: int) -> None:
    """Raise `UnsupportedField` for more than one frontend, as each would know only its own reservations,
    token counts and adapters.
    """
    if frontends > 1:
        raise UnsupportedField(
            f"Frontend has num_replicas {frontends}; there is one frontend, which places all requests.",
            field="num_replicas",
            remedy="Leave num_replicas of Frontend out, and give replicas for those of the model.",
        )


def listening(config: ServerConfig, host: str | None) -> ServerConfig:
    """`config` with the host on which Ray Serve listens; `config` itself if `host` is None.

    Raises ValueError if other machines can reach that host and no API key is set.
    """
    return config if host is None else dataclasses.replace(config, host=host)


def http_options() -> tuple[str | None, int]:
    """Host and port of Ray Serve's proxies; the host is None if no proxy runs."""
    found = _get_global_client().http_config
    return found.host, found.port
