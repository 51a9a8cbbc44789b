"""The models of one process: loaded at their first use, unloaded when unused or when memory is needed.

Two models of 3 GiB, 5 GiB free::

    use("a")             a is loaded: 2 GiB are left
    use("b"), a idle     a is unloaded, the least recently used idle model; b is loaded
    use("a"), b busy     waits until the requests of b have ended; later requests of b wait behind it
    use("c"), 9 GiB      refused, with the numbers: more than all that unloading would free

Everything runs on one event loop. The engine processes of one model share nothing with those of another, so a
crash of one touches no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ramify.errors import EngineClosed, EngineError, NotFound, Overloaded, RamifyError
from ramify.model_info import ModelInfo
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.models.memory import Free, Need, free_memory, gib, need_of, proportional_size
from ramify.runtime.models.names import ANY, LATEST, in_folder, unknown
from ramify.runtime.models.status import ModelDoesNotFit, ModelState, ModelStatus
from ramify.runtime.processes.prestart import PrestartedWorkers

log = logging.getLogger("ramify")

MakeFrontend = Callable[[EngineConfig, PrestartedWorkers | None], Frontend]
KEEP: Literal["keep"] = "keep"
"""Value of `keep_alive_s` that leaves a model's time as it is."""
KeepAlive = float | None | Literal["keep"]


class _Model:
    """One model: its configuration, and while it is loaded its frontend."""

    def __init__(self, name: str, config: EngineConfig, keep_alive_s: float | None) -> None:
        self.name = name
        self.config = config
        self.keep_alive_s = keep_alive_s
        self.stay_s = 0.0
        """Seconds that the model stays loaded when its users have left; inf for ever."""
        self.pinned = False
        self.state: ModelState = "unloaded"
        self.frontend: Frontend | None = None
        """Set as long as the model holds memory, also while it starts or ends."""
        self.users = 0
        self.queue: list[asyncio.Future[Frontend]] = []
        """Requests that wait until the model is ready, or no longer closed to new ones."""
        self.closed = 0
        """Number of unloads that wait until the users have left. New ones are queued meanwhile."""
        self.need: Need | None = None
        self.resident: int | None = None
        self.info: ModelInfo | None = None
        """As of the last start."""
        self.error: RamifyError | None = None
        self.used_at = 0.0
        self.expiry: asyncio.TimerHandle | None = None
        self.work: asyncio.Task[None] | None = None
        """The task that loads or unloads the model."""

    @property
    def idle(self) -> bool:
        return self.state == "ready" and self.users == 0 and self.work is None

    @property
    def adapters(self) -> Collection[str]:
        return self.config.loras if self.frontend is None else self.frontend.loras.loaded

    @property
    def waiting(self) -> int:
        return sum(not one.done() for one in self.queue)

    @property
    def pids(self) -> list[int]:
        return [] if self.frontend is None else list(self.frontend.pids.values())


class ModelPool:
    """Models by name, each behind a frontend with engine processes of its own while it is loaded.

    models : name → model (path or name on the hub); the first one answers requests that name none
    folder : folder of further models, which is looked through again for an unknown name
    keep_alive_s : seconds that a model stays loaded after its last request; None: for ever
    pinned : names of models that stay loaded; `start` loads them
    memory : bytes for all models together; None: those that are free
    spare : processes that were started early, for the first load
    make, free, need : replacements for tests
    """

    def __init__(
        self,
        config: EngineConfig,
        models: Mapping[str, str],
        *,
        folder: Path | None = None,
        keep_alive_s: float | None = None,
        pinned: Collection[str] = (),
        memory: int | None = None,
        spare: PrestartedWorkers | None = None,
        make: MakeFrontend = Frontend,
        free: Free | None = None,
        need: Callable[[EngineConfig, bool], Need] = need_of,
    ) -> None:
        self._config = config
        self._folder = folder
        self._keep_alive_s = keep_alive_s
        self._memory = memory
        self._spare = spare
        self._make = make
        self._need_of = need
        self._free = free
        self._room = asyncio.Lock()
        """Held while a model waits for memory: models get memory in the order in which they asked."""
        self._looking = asyncio.Lock()
        """Held while the folder is looked through, which takes as long as its file system does."""
        self._changed = asyncio.Event()
        """Set, and replaced by another, when a user leaves or a state changes."""
        self._closed: EngineClosed | None = None
        self._models: dict[str, _Model] = {}
        for name, model in models.items():
            self._add(name, model)
        self._add_all({} if folder is None else in_folder(folder))
        if not self._models:
            raise NotFound(
                f"models_dir is {str(folder)!r}, which holds no model.",
                field="models_dir",
                remedy="Put .gguf files or model folders there, or name a model.",
            )
        bases = {full.rpartition(":")[0] for full in config.loras} - {""}
        for name, field in [*((name, "pin") for name in pinned), *((name, "loras") for name in bases)]:
            if name not in self._models:
                raise unknown(name, self._models, field)
        for name in pinned:
            self._models[name].pinned = True

    # --- names ------------------------------------------------------------------------------------

    def _add(self, name: str, model: str) -> None:
        config = dataclasses.replace(
            self._config, model=model, loras=self._loras_of(name, first=not self._models)
        )
        if isinstance(config, ServerConfig):
            aliases = () if self._models else config.served_model_name[1:]
            config = dataclasses.replace(
                config, served_model_name=(name, *aliases), models=(), models_dir=None, pin=()
            )
        self._models[name] = _Model(name, config, self._keep_alive_s)

    def _loras_of(self, name: str, *, first: bool) -> dict[str, str]:
        """Adapters that the configuration names as MODEL:ADAPTER; those without MODEL are the first one's."""
        found = {}
        for full, path in self._config.loras.items():
            base, _, adapter = full.rpartition(":")
            if base == name or (first and not base):
                found[adapter] = path
        return found

    def _add_all(self, found: Mapping[str, str]) -> None:
        """Add models of the folder. A model that was named before keeps its name."""
        for name, path in found.items():
            if name not in self._models:
                self._add(name, path)

    async def look(self) -> None:
        """Add models that are new in the folder."""
        if self._folder is not None:
            async with self._looking:
                with contextlib.suppress(NotFound):  # the folder is gone: the models that are known stay
                    self._add_all(await asyncio.to_thread(in_folder, self._folder))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models, the first one's first."""
        return tuple(self._models)

    @property
    def first(self) -> str:
        """Name of the model for requests that name none."""
        return next(iter(self._models))

    def resolve(self, name: str | None) -> str:
        """The model that a request means by `name`: a model's name, an alias of the first one, MODEL:ADAPTER,
        or an adapter's name. None and "default": the first model. Raises `NotFound` for any other name."""
        if name is None or name in ("", ANY):
            return self.first
        for text in (name, name.removesuffix(LATEST)):
            if (found := self._find(text)) is not None:
                return found
        raise unknown(name, self._models)

    async def find(self, name: str | None) -> str:
        """As `resolve`. Looks through the folder for a name that is unknown."""
        with contextlib.suppress(NotFound):
            return self.resolve(name)
        await self.look()
        return self.resolve(name)

    def names_for(self, name: str | None) -> tuple[str, ...]:
        """Names of what a request means by `name`: all of a model, or those of an adapter, with and without
        its model's. Raises `NotFound`."""
        model = self._models[self.resolve(name)]
        config = model.config
        own = tuple(config.served_model_name) if isinstance(config, ServerConfig) else (model.name,)
        text = (name or ANY).removesuffix(LATEST)
        adapter = text.rpartition(":")[2]
        if text in (*own, ANY) or adapter not in model.adapters:
            return tuple(own)
        return (adapter, *(f"{base}:{adapter}" for base in own))

    def is_model(self, name: str) -> bool:
        """Whether `name`, which `resolve` knows, is a model's own name and no adapter's."""
        return name.removesuffix(LATEST) in (*self.names_for(self.resolve(name)), ANY)

    def knows(self, name: str) -> bool:
        """Whether a model or an adapter has the name `name`."""
        return self._find(name) is not None

    def _find(self, name: str) -> str | None:
        base = name.rpartition(":")[0]
        return self._named(name) or (self.first if base == ANY else self._named(base))

    def _named(self, name: str) -> str | None:
        if name in self._models:
            return name
        for model in self._models.values():
            config = model.config
            if isinstance(config, ServerConfig) and name in config.served_model_name:
                return model.name
            if name in model.adapters:
                return model.name
        return None

    # --- use --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, name: str | None = None, keep_alive_s: KeepAlive = KEEP) -> AsyncIterator[Frontend]:
        """The frontend of a model, which is not unloaded within the block. Loads the model if it is not.

        name : as in `resolve`
        keep_alive_s : seconds that the model stays loaded after this request; None: for ever. Of requests
            that overlap the longest counts

        Raises `NotFound` for an unknown name, `ModelDoesNotFit`, `Overloaded` if `max_waiting` requests wait
        for the model already, `EngineClosed`, and the error of a failed start.
        """
        model = self._models[await self.find(name)]
        frontend = await self._enter(model)
        model.stay_s = max(
            model.stay_s, _seconds(model.keep_alive_s if keep_alive_s == KEEP else keep_alive_s)
        )
        try:
            yield frontend
        finally:
            self._leave(model)

    async def load(self, name: str, keep_alive_s: KeepAlive = KEEP) -> ModelStatus:
        """Load a model as `use` does. Raises what `use` raises.

        keep_alive_s : seconds that the model stays loaded from now on after its last request; None: for ever
        """
        async with self.use(name, keep_alive_s):
            if keep_alive_s != KEEP:
                self._models[self.resolve(name)].keep_alive_s = keep_alive_s
        return self.status(name)

    async def unload(self, name: str) -> ModelStatus:
        """Unload a model when its running and queued requests have ended; later ones load it again. Pinned
        models, too. Raises `NotFound` for an unknown name."""
        model = self._models[await self.find(name)]
        frontend = model.frontend
        with self._closing(model):
            while model.frontend is frontend is not None and not model.idle:
                await self._change()
            if model.frontend is frontend is not None:
                await asyncio.shield(self._start(model, self._unload(model)))
        return self.status(name)

    async def start(self) -> None:
        """Load the pinned models. Raises what `use` raises."""
        await asyncio.gather(*(self.load(model.name) for model in self._models.values() if model.pinned))

    async def _enter(self, model: _Model) -> Frontend:
        """Count one more user of `model` as soon as it is ready."""
        if self._closed is not None:
            raise copy.copy(self._closed)
        frontend = model.frontend
        if model.state == "ready" and not model.closed and frontend is not None and not frontend.gave_up:
            self._admit(model)
            return frontend
        if model.waiting >= self._config.max_waiting:
            raise Overloaded(
                f"{model.waiting} requests wait until {model.name} is loaded; the limit is"
                f" {self._config.max_waiting}.",
                remedy="Send it again later.",
                retry_after=1.0,
            )
        waiter: asyncio.Future[Frontend] = asyncio.get_running_loop().create_future()
        model.queue.append(waiter)
        self._proceed(model)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave(model)  # it was admitted in the moment in which it was cancelled
            self._notify()
            raise

    def _admit(self, model: _Model) -> None:
        if model.users == 0:
            model.stay_s = 0.0
        model.users += 1
        model.used_at = time.monotonic()
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None

    def _leave(self, model: _Model) -> None:
        model.users -= 1
        model.used_at = time.monotonic()
        self._proceed(model)

    def _proceed(self, model: _Model) -> None:
        """Do what is next for `model`: admit its queue, load it, start its time; and tell those who wait."""
        if model.state == "ready" and model.frontend is not None:
            if model.frontend.gave_up and model.idle:  # its engine core has died too often
                self._start(model, self._unload(model))
            elif not model.closed and not model.frontend.gave_up:
                queue, model.queue = model.queue, []
                for waiter in queue:
                    if not waiter.done():
                        self._admit(model)
                        waiter.set_result(model.frontend)
                if model.users == 0 and model.expiry is None:
                    self._set_expiry(model)
        elif model.waiting and model.work is None:
            self._start(model, self._load(model))
        self._notify()

    def _set_expiry(self, model: _Model) -> None:
        if math.isinf(model.stay_s) or model.pinned or self._closed is not None:
            return

        def expire() -> None:
            model.expiry = None
            if model.idle:
                self._start(model, self._unload(model))

        model.expiry = asyncio.get_running_loop().call_later(model.stay_s, expire)

    # --- loading and unloading --------------------------------------------------------------------

    def _start(self, model: _Model, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as the task of `model`, also if whoever asked for it goes away."""
        assert model.work is None

        def ended(task: asyncio.Task[None]) -> None:
            model.work = None
            if not task.cancelled() and (error := task.exception()) is not None:
                queue, model.queue = model.queue, []
                for waiter in queue:
                    if not waiter.done():
                        waiter.set_exception(copy.copy(error))
            if self._closed is None:
                self._proceed(model)

        model.work = asyncio.create_task(work)
        model.work.add_done_callback(ended)
        return model.work

    async def _load(self, model: _Model) -> None:
        model.state, model.error = "loading", None
        try:
            model.need = await asyncio.to_thread(self._need_of, model.config, True)
            if self._free is None:
                self._free = await asyncio.to_thread(free_memory, self._config)
            async with self._room:
                await self._make_room(model, model.need)
                spare, self._spare = self._spare, None
                spare = spare if spare is not None and spare.alive else None
                model.frontend = self._make(model.config, spare)
            await model.frontend.start()
            model.info = model.frontend.info
        except BaseException as error:
            model.frontend, model.state = None, "unloaded"
            if isinstance(error, Exception) and not isinstance(error, ModelDoesNotFit | EngineClosed):
                model.state = "failed"
                model.error = error if isinstance(error, RamifyError) else EngineError(str(error))
                log.warning("The model %s could not be started: %s", model.name, error)
            raise
        model.state, model.used_at = "ready", time.monotonic()
        model.stay_s = _seconds(model.keep_alive_s)
        room = "" if model.info.kv_room is None else f": {model.info.kv_room.text}"
        log.info("loaded the model %s, which needs %s%s", model.name, model.need, room)

    async def _unload(self, model: _Model) -> None:
        """Stop the engine processes of `model`, which has no users."""
        assert model.frontend is not None
        model.state, model.resident = "unloading", None
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None
        try:
            await model.frontend.aclose()
        finally:
            model.frontend, model.state = None, "unloaded"
        log.info("unloaded the model %s", model.name)

    async def _make_room(self, model: _Model, need: Need) -> None:
        """Unload other models until `need` is free: idle ones, the least recently used first. While there is
        none, the least recently used of the busy ones is closed to new users."""
        with contextlib.ExitStack() as closing:
            while not self._fits(need):
                if not model.waiting:
                    raise EngineClosed("No request waits for this model any longer.")
                others = [one for one in self._models.values() if one.frontend is not None]
                self._check_fits(model, need, others)
                if idle := [one for one in others if one.idle and not one.pinned]:
                    oldest = min(idle, key=_used_at)
                    await asyncio.shield(self._start(oldest, self._unload(oldest)))
                    continue
                busy = [one for one in others if one.state == "ready" and not one.pinned and not one.closed]
                if busy and not any(one.closed for one in others):
                    closing.enter_context(self._closing(min(busy, key=_used_at)))
                await self._change()

    def _fits(self, need: Need) -> bool:
        return need.total <= self._free_bytes()

    def _free_bytes(self) -> int:
        """Bytes that a further model may need."""
        assert self._free is not None
        loaded = [one for one in self._models.values() if one.frontend is not None]
        needed = sum(one.need.total for one in loaded if one.need is not None)
        free = self._free(needed, [pid for one in loaded for pid in one.pids])
        return free if self._memory is None else min(free, self._memory - needed)

    def _check_fits(self, model: _Model, need: Need, others: Collection[_Model]) -> None:
        """Raise `ModelDoesNotFit` if `need` is more than what is free and what unloading would free."""
        free = self._free_bytes()
        yields = sum(one.need.total for one in others if one.need is not None and not one.pinned)
        if need.total <= free + yields:
            return
        held = ", ".join(
            f"{one.name} {gib(one.need.total)}{' (pinned)' if one.pinned else ''}"
            for one in others
            if one.need is not None
        )
        log.warning("The model %s does not fit. Held by: %s.", model.name, held or "no other model")
        raise ModelDoesNotFit(
            f"The model {model.name} needs {need}. {gib(max(free, 0))} are free, and unloading would free"
            f" {gib(yields)}.",
            field="model",
            remedy="Use a smaller model or context_length, give less kv_memory_gb, or pin fewer models.",
        )

    @contextlib.contextmanager
    def _closing(self, model: _Model) -> Iterator[None]:
        """Context in which new users of `model` are queued."""
        model.closed += 1
        try:
            yield
        finally:
            model.closed -= 1
            if self._closed is None and model.work is None:
                self._proceed(model)

    async def _change(self) -> None:
        await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- all models -------------------------------------------------------------------------------

    @property
    def frontends(self) -> dict[str, Frontend]:
        """Name → frontend of the models that are ready."""
        return {
            one.name: one.frontend
            for one in self._models.values()
            if one.state == "ready" and one.frontend is not None
        }

    @property
    def closed(self) -> bool:
        """Whether new requests are refused: the pool drains, or has been closed."""
        return self._closed is not None

    async def measure(self) -> None:
        """Look through the folder, and read the headers of models that were never loaded and the resident
        memory of those that are ready, for `statuses`. Takes some milliseconds for each model."""
        await self.look()
        await asyncio.to_thread(self._measure, list(self._models.values()))

    def _measure(self, models: list[_Model]) -> None:
        for model in models:
            if model.need is None:
                with contextlib.suppress(RamifyError, OSError):  # its files are not here; its load will tell
                    model.need = self._need_of(model.config, False)
            if model.state == "ready":
                model.resident = proportional_size(model.pids)

    def config_of(self, name: str) -> EngineConfig:
        """The configuration that a model is loaded with."""
        return self._models[self.resolve(name)].config

    def state(self, name: str) -> ModelState:
        """The state of a model, from any thread. Raises `NotFound` for an unknown name."""
        return self._models[self.resolve(name)].state

    def status(self, name: str) -> ModelStatus:
        """The state of a model. Raises `NotFound` for an unknown name."""
        model = self._models[self.resolve(name)]
        info = model.info
        known = model.need if info is None else info
        left = None if model.expiry is None else model.expiry.when() - asyncio.get_running_loop().time()
        return ModelStatus(
            name=model.name,
            model=model.config.model,
            state=model.state,
            pinned=model.pinned,
            users=model.users,
            waiting=model.waiting,
            size=None if model.need is None else model.need.weights,
            need=None if model.need is None else model.need.total,
            resident=model.resident,
            context_length=None if known is None else known.context_length,
            kv_tokens=info.kv_room.tokens if info and info.kv_room else None,
            keep_alive_s=None if model.pinned else model.keep_alive_s,
            expires_in_s=left,
            error=None if model.error is None else str(model.error),
        )

    def statuses(self) -> list[ModelStatus]:
        """The states of all models, the first one's first."""
        return [self.status(name) for name in self.names]

    def abort(self, rid_prefix: str | None = None) -> int:
        """Abort requests in all models, as `Frontend.abort` does. Returns their number."""
        return sum(frontend.abort(rid_prefix) for frontend in self.frontends.values())

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait at most `seconds` for the running ones."""
        self._close(EngineClosed("The server is shutting down."))
        await asyncio.gather(*(frontend.drain(seconds) for frontend in self.frontends.values()))

    async def aclose(self) -> None:
        """Stop all models. Requests that run or wait fail with `EngineClosed`."""
        self._close(EngineClosed("The engine has been closed."))
        work = [one.work for one in self._models.values() if one.work is not None]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        left = [one.frontend for one in self._models.values() if one.frontend is not None]
        await asyncio.gather(*(frontend.aclose() for frontend in left))

    def close_now(self) -> None:
        """Do what `aclose` does, without a running event loop."""
        self._closed = EngineClosed("The engine has been closed.")
        for model in self._models.values():
            if model.frontend is not None:
                model.frontend.close_now()

    def _close(self, error: EngineClosed) -> None:
        self._closed = error
        for model in self._models.values():
            if model.expiry is not None:
                model.expiry.cancel()
                model.expiry = None
            queue, model.queue = model.queue, []
            for waiter in queue:
                if not waiter.done():
                    waiter.set_exception(copy.copy(error))
        self._notify()


def _seconds(keep_alive_s: float | None) -> float:
    return math.inf if keep_alive_s is None else keep_alive_s


def _used_at(model: _Model) -> float:
    return model.used_at
