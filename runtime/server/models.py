"""Several models behind one server: each request is answered by the service of the model that it names.

`Models.acquire` is the one place where a request gets its model. `Router` calls it before an endpoint that
uses a model: it reads the body, looks up `model`, waits until that model is loaded, and keeps it loaded until
the response has been sent. From then on `Service.serving` is the service of this model.

`Models.allowed` is the one way from a name that a client sent to a model: it asks the client's key.

What belongs to no model (health, /metrics, aborts, the ends of programs) goes to `Models` itself, which is a
frontend over all that are loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ramify.errors import EngineClosed, InvalidRequest, NotFound, RamifyError, UnsupportedField
from ramify.messages import Generate, SchedulerStats, TextChunk
from ramify.model_info import ModelInfo
from ramify.runtime.config import ServerConfig
from ramify.runtime.executor.memory import ON_CPU
from ramify.runtime.frontend.control import ControlClient
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.frontend.loras import Loras
from ramify.runtime.frontend.replicas import Replicas
from ramify.runtime.inspect.resolve import check_name
from ramify.runtime.models.names import by_name, keep_alive_s, name_of, unknown
from ramify.runtime.models.pool import KEEP, KeepAlive, ModelPool
from ramify.runtime.models.status import ModelStatus
from ramify.runtime.processes.prestart import PrestartedWorkers
from ramify.runtime.server.body import peek_body
from ramify.runtime.server.errors import SYSTEM_ONE, SYSTEM_ONE_MODELS
from ramify.runtime.server.fields import decode
from ramify.runtime.server.metrics import Metrics
from ramify.runtime.server.parsing import refuse_unknown
from ramify.runtime.server.service import KEY, SERVICE, FrontendProtocol, Service
from ramify.runtime.server.sse import while_connected

ACQUIRED = "ramify.acquired"
"""Key of a request's scope: the exit stack that releases its model."""
LOAD_NS = "ramify.load_ns"
"""Key of a request's scope: the time for which it waited until its model was loaded, in nanoseconds."""
OLLAMA = "/api/"
STATS_LIMIT_S = 2.0
"""Longest time, in seconds, that /metrics waits for a scheduler."""


class _Names(msgspec.Struct):
    """Fields of a body that name a model, and Ollama's time for which it stays loaded."""

    model: Any = None
    name: Any = None
    lora_name: Any = None
    keep_alive: Any = None


class ServedModel(NamedTuple):
    """A model for the lists of models. `status` is None on a server of one model that is always loaded, and
    `service` is None unless the model is ready."""

    status: ModelStatus | None
    service: Service | None

    @property
    def names(self) -> dict[str, str]:
        """As `Service.all_names`."""
        if self.service is not None:
            return self.service.all_names
        assert self.status is not None
        return {self.status.name: ""} if KEY.get().may_use(self.status.name) else {}

    @property
    def identity(self) -> str:
        """The model's id, which a key that may use an adapter of it alone does not find in `names`."""
        if self.service is not None:
            return self.service.model_name
        assert self.status is not None
        return self.status.name

    @property
    def context_length(self) -> int | None:
        if self.service is not None:
            return self.service.frontend.info.context_length
        return None if self.status is None else self.status.context_length

    @property
    def path(self) -> str:
        """Path of the model's files, or its name on the hub while it is not loaded."""
        if self.service is not None:
            return self.service.frontend.info.path
        assert self.status is not None
        return self.status.model


def several_models(request: Request) -> Models | None:
    """The models of the server that handles `request`; None if it has one that is always loaded."""
    models = request.app.state.models
    assert models is None or isinstance(models, Models)
    return models


async def served_models(request: Request) -> list[ServedModel]:
    """All models of the server that handles `request`, the first one's first."""
    models = several_models(request)
    return [ServedModel(None, Service.serving(request))] if models is None else await models.listed()


async def served_model(request: Request, name: str) -> ServedModel:
    """The model that `name` means. Raises `NotFound`."""
    models = several_models(request)
    return ServedModel(None, Service.serving(request)) if models is None else await models.find(name)


def status_body(status: ModelStatus) -> dict[str, Any]:
    """A model's state for lists of models. Sizes are in bytes, times in seconds."""
    body = msgspec.structs.asdict(status)
    for name in ("name", "model", "context_length", "error"):
        del body[name]
    return body if status.error is None else body | {"error": status.error}


class Models:
    """The models of a pool, each with a service; and the frontend over all of them.

    Its `info` is that of the first model that is ready.
    """

    def __init__(self, pool: ModelPool, config: ServerConfig) -> None:
        self.pool = pool
        self.config = dataclasses.replace(
            config,
            served_model_name=(pool.first, *config.served_model_name[1:]),
            max_running=config.max_running or ON_CPU.max_running,
        )
        """Options of the server as a whole. `max_running` bounds the lines of batches that run at a time."""
        self.server = Service(self, self.config)
        self._services: dict[str, Service] = {}
        self.control = cast(ControlClient, _AllControls(pool))

    async def start(self) -> None:
        """Load the pinned models. Raises the errors of `ModelPool.use`."""
        await self.pool.start()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models, the first one's first."""
        return self.pool.names

    def allowed_statuses(self) -> list[ModelStatus]:
        """The states of the models that the current key may use, the first one's first."""
        return [status for status in self.pool.statuses() if KEY.get().may_use(status.name)]

    def allowed(self, name: str | None) -> str:
        """The model that `name` means, as `ModelPool.resolve`. Raises `NotFound`, which names models that the
        current key may use, and `NotAllowed` unless it may use this one, or its adapter that `name` means."""
        try:
            model = self.pool.resolve(name)
        except NotFound:
            raise unknown(str(name), filter(KEY.get().may_use, self.names)) from None
        KEY.get().check_model(self.pool.names_for(name))
        return model

    def allowed_model(self, name: str) -> str:
        """As `allowed`, for a model's own name: an adapter's is unknown."""
        model = self.allowed(name)
        if not self.pool.is_model(name):
            raise unknown(name, filter(KEY.get().may_use, self.names))
        return model

    async def find_allowed(self, name: str | None) -> str:
        """As `allowed`. Looks through the folder for a name that is unknown."""
        with contextlib.suppress(NotFound):
            await self.pool.find(name)
        return self.allowed(name)

    # --- one request ------------------------------------------------------------------------------

    async def acquire(self, request: Request) -> None:
        """Load the model that the request names, and keep it loaded until the response has been sent.

        The name is the body's `model`; on Ollama's API also `name`, and for adapters the part of `lora_name`
        before ":"; without a body the query parameter `model`. Without a name it is the first model. A body
        that is no JSON object gets no model: the endpoint refuses it. Raises the errors of `allowed`, of
        `ModelPool.use`, of `peek_body`, and before a load of `refuse_unknown`.
        """
        body = await peek_body(request) if request.method != "GET" else b""
        names = _Names(model=request.query_params.get("model"))
        if body:
            try:
                names = decode(body, _Names, "")
            except InvalidRequest:
                return
        kept: KeepAlive = KEEP
        if request.url.path.startswith(OLLAMA) and names.keep_alive is not None:
            kept = keep_alive_s(names.keep_alive)
        model = await while_connected(request.receive, self._named(request.url.path, names))
        if kept != KEEP and not KEY.get().key.admin:  # not shorter than it is for others
            own = self.pool.status(model).keep_alive_s
            kept = None if kept is None or own is None else max(kept, own)
        if body and model not in self.pool.frontends:
            refuse_unknown(request.url.path, body)  # before the load, which may push another model out
        acquired: contextlib.AsyncExitStack = request.scope[ACQUIRED]
        began = time.perf_counter_ns()
        request.scope[SERVICE] = await while_connected(
            request.receive, acquired.enter_async_context(self.using(model, kept))
        )
        request.scope[LOAD_NS] = time.perf_counter_ns() - began

    async def release_model(self, request: Request) -> None:
        """Release the model that the request has acquired, before the response has been sent."""
        acquired: contextlib.AsyncExitStack = request.scope[ACQUIRED]
        await acquired.aclose()

    @contextlib.asynccontextmanager
    async def using(self, model: str, kept: KeepAlive = KEEP) -> AsyncIterator[Service]:
        """The service of `model`, which is not unloaded within the block. Raises what `ModelPool.use`
        raises."""
        async with self.pool.use(model, kept) as frontend:
            yield self._service(model, frontend)

    async def _named(self, path: str, names: _Names) -> str:
        name = names.model or (names.name if path.startswith(OLLAMA) else None)
        if name is None and isinstance(names.lora_name, str):
            base = names.lora_name.rpartition(":")[0]
            name = base or (names.lora_name if self.pool.knows(names.lora_name) else None)
        if not isinstance(name, str):
            name = None
        try:
            return await self.find_allowed(name)
        except NotFound:
            if path == SYSTEM_ONE and name is not None and name.startswith(SYSTEM_ONE_MODELS):
                return await self.find_allowed(None)
            raise

    def _service(self, model: str, frontend: FrontendProtocol) -> Service:
        """The service of a model. Its metrics outlive its unloading."""
        service = self._services.get(model)
        if service is None:
            config = cast(ServerConfig, self.pool.config_of(model))
            service = self._services[model] = Service(frontend, config, self.server)
        service.frontend = frontend
        return service

    # --- all models -------------------------------------------------------------------------------

    async def listed(self) -> list[ServedModel]:
        """All models with their states and sizes, the first one's first."""
        await self.pool.measure()
        return [self._listed(status) for status in self.pool.statuses()]

    async def shown(self, name: str | None) -> Service | None:
        """The service of the model `name` for the dashboard; None: of the first that is ready. None if it is
        not loaded. Raises the errors of `allowed`."""
        for ready in (await self.find_allowed(name),) if name else self.pool.frontends:
            if (frontend := self.pool.frontends.get(ready)) is not None:
                return self._service(ready, frontend)
        return None

    async def find(self, name: str) -> ServedModel:
        """The model that `name` means. Raises the errors of `allowed`."""
        model = await self.find_allowed(name)
        await self.pool.measure()
        return self._listed(self.pool.status(model))

    def _listed(self, status: ModelStatus) -> ServedModel:
        frontend = self.pool.frontends.get(status.name)
        return ServedModel(status, None if frontend is None else self._service(status.name, frontend))

    async def metrics(self) -> bytes:
        """The metrics of all models as text, with a label `model`."""
        await self.pool.measure()
        by_model: dict[str, Metrics] = {name: service.metrics for name, service in self._services.items()}
        stats = await asyncio.gather(*(_stats(self.pool.frontends.get(name)) for name in by_model))
        for (name, metrics), found in zip(by_model.items(), stats, strict=True):
            frontend = self.pool.frontends.get(name)
            metrics.update(found, () if frontend is None else frontend.loras.loaded)
        registry = CollectorRegistry()
        registry.register(_Labelled(self.server.metrics, by_model, self.pool.statuses()))
        return generate_latest(registry)

    # --- the frontend over all --------------------------------------------------------------------

    @property
    def _ready(self) -> list[Frontend]:
        return list(self.pool.frontends.values())

    @property
    def info(self) -> ModelInfo:
        if not self._ready:
            raise EngineClosed("No model is loaded.", remedy="Name one in the request.")
        return self._ready[0].info

    @property
    def max_prompt_tokens(self) -> int:
        return max((one.max_prompt_tokens for one in self._ready), default=0)

    @property
    def healthy(self) -> bool:
        """Whether requests are taken: always while no model is loaded, else if one of them is healthy."""
        return not self.gave_up and (not self._ready or any(one.healthy for one in self._ready))

    @property
    def gave_up(self) -> bool:
        """False before the server's end: a model whose engine core gave up is started anew when used."""
        return self.pool.closed

    @property
    def in_flight(self) -> int:
        return sum(one.in_flight for one in self._ready)

    @property
    def heartbeat_age_s(self) -> float:
        return min((one.heartbeat_age_s for one in self._ready), default=0.0)

    @property
    def blocked_s(self) -> float:
        """Seconds for which the event loop, which all models share, was blocked."""
        return max((one.blocked_s for one in self._ready), default=0.0)

    @property
    def loras(self) -> Loras:
        """The adapters of all models that are ready, as `Loras.loaded` of one."""
        loaded = {name: lora for one in self._ready for name, lora in one.loras.loaded.items()}
        return cast(Loras, _Loaded(loaded))

    @property
    def replicas(self) -> Replicas:
        raise UnsupportedField("A server that loads and unloads models has no replicas.", field="replicas")

    def new_rid(self) -> str:
        return self._ready[0].new_rid() if self._ready else secrets.token_hex(8)

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        raise NotImplementedError("A generation has the frontend of its model.")

    def abort(self, rid_prefix: str | None = None) -> int:
        return sum(one.abort(rid_prefix) for one in self._ready)

    async def drain(self, seconds: float) -> None:
        await self.pool.drain(seconds)

    async def aclose(self) -> None:
        await self.pool.aclose()


def models_of(config: ServerConfig, workers: PrestartedWorkers | None) -> Models:
    """The models that `config` names. Raises `NotFound` for a model that cannot be found."""
    try:
        named = _by_name(config)
    except ValueError as error:
        raise InvalidRequest(str(error), field="models") from None
    for model in named.values():
        check_name(model)
    pool = ModelPool(
        config,
        named,
        folder=None if config.models_dir is None else Path(config.models_dir),
        keep_alive_s=None if config.keep_alive is None else keep_alive_s(config.keep_alive),
        pinned=config.pin,
        memory=None if config.models_memory_gb is None else int(config.models_memory_gb * 2**30),
        spare=workers,
    )
    return Models(pool, config)


def _by_name(config: ServerConfig) -> dict[str, str]:
    """Name → model of those that `config` names, the first one first. Raises ValueError for equal names."""
    named = {(config.served_model_name or (name_of(config.model),))[0]: config.model}
    for name, model in by_name(config.models).items():
        if name in named:
            raise ValueError(
                f"models has {model}, whose name {name!r} is that of {named[name]}: name one NAME=MODEL."
            )
        named[name] = model
    return named


class _Loaded(NamedTuple):
    loaded: Mapping[str, Any]


class _AllControls:
    """The control calls that belong to no model, sent to all that are ready."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    async def flush_cache(self) -> None:
        await asyncio.gather(*(one.control.flush_cache() for one in self._pool.frontends.values()))

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        for one in self._pool.frontends.values():
            await one.control.await_tools(program, branch, tools)

    async def end_program(self, program: str) -> None:
        for one in self._pool.frontends.values():
            await one.control.end_program(program)


class ReleaseModel:
    """Middleware that releases the model that a request has acquired, when the response has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.AsyncExitStack() as acquired:
            scope[ACQUIRED] = acquired
            await self.app(scope, receive, send)


async def _stats(frontend: Frontend | None) -> SchedulerStats | None:
    """The scheduler's counters; None if the model is not loaded or does not answer within `STATS_LIMIT_S`."""
    if frontend is None:
        return None
    try:
        async with asyncio.timeout(STATS_LIMIT_S):
            return await frontend.control.stats()
    except (TimeoutError, RamifyError):
        return None


class _Labelled:
    """Collector of the server's own metrics, and of each model's with the label `model`."""

    def __init__(self, server: Metrics, models: Mapping[str, Metrics], states: list[ModelStatus]) -> None:
        self._server = server
        self._models = models
        self._states = states

    def collect(self) -> list[Metric]:
        state = GaugeMetricFamily(
            "ramify_model_state", "1 for the state of a model.", labels=["model", "state"]
        )
        size = GaugeMetricFamily(
            "ramify_model_resident_bytes", "Resident memory of a loaded model's processes.", labels=["model"]
        )
        for one in self._states:
            state.add_metric([one.name, one.state], 1)
            if one.resident is not None:
                size.add_metric([one.name], one.resident)
        own = self._server.of_server()
        found: dict[str, Metric] = {one.name: one for one in [state, size, *own]}
        names = {one.name for one in own}
        ready = {one.name for one in self._states if one.state == "ready"}
        for model, metrics in self._models.items():
            for family in metrics.registry.collect():
                if family.name in names or (family.name == "ramify_scheduler_up" and model not in ready):
                    continue  # a model that was unloaded is not down
                merged = Metric(family.name, family.documentation, family.type)
                found.setdefault(family.name, merged).samples += [
                    sample._replace(labels={"model": model, **sample.labels}) for sample in family.samples
                ]
        return list(found.values())
