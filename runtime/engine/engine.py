"""The engine in a user's script: the processes of the server, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from ramify.answers import AnswerStore
from ramify.cache_contents import CacheContents
from ramify.constraint import Constraint, checked
from ramify.decisions.calibration import read_calibration
from ramify.errors import InvalidRequest, NotFound, UnsupportedField
from ramify.loop import background_loop, submit, wait
from ramify.messages import (
    HELD_S,
    ChatMessage,
    Generate,
    Pooling,
    Preamble,
    SchedulerStats,
    Segment,
    TextChunk,
)
from ramify.model_info import ModelInfo
from ramify.priority import checked_priority
from ramify.retry import RETRY_FOR_S, Retry
from ramify.runtime.config import ELSEWHERE, EngineConfig, check_several
from ramify.runtime.default_model import tell_of_default_model
from ramify.runtime.engine.completion import Completion, completion_of
from ramify.runtime.engine.display import engine_html, engine_line
from ramify.runtime.engine.life import Life
from ramify.runtime.fleet.replica import ReplicaStatus
from ramify.runtime.frontend.embeddings import pooling_for, vector_of
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.frontend.prompts import Prompt, check_chat, prompts_of, segments_of
from ramify.runtime.inspect.resolve import check_name
from ramify.runtime.models.names import keep_alive_s, unknown
from ramify.runtime.models.pool import ModelPool
from ramify.runtime.models.status import ModelStatus
from ramify.sampling_options import read_options, resolve_options
from ramify.sampling_params import SamplingParams
from ramify.spans import engine_span
from ramify.spelling import nearest, parameters_of

T = TypeVar("T")

DRAIN_S = 30.0
"""Default number of seconds that requests of a drained replica have to finish there."""


def _check_names(config: EngineConfig) -> None:
    """Raise `NotFound` if a model, an adapter or the calibration does not exist, as far as this machine can
    tell, and `InvalidRequest` if the calibration is no such file."""
    check_name(config.model)
    if config.draft_model is not None:
        check_name(config.draft_model, "draft_model")
    if config.calibration is not None:
        read_calibration(config.calibration)
    for name, path in config.loras.items():
        if not Path(path).expanduser().is_dir():
            raise NotFound(
                f"There is no folder {path}, which loras names {name!r}.",
                field="loras",
                remedy="Give the folder that PEFT has saved the adapter in.",
            )


class Engine:
    """Runs a model in its own processes; a backend for programs (`ramify.lang.backends.base`).

    Parameters
    ----------
    model : str
        A name, a hub id, a local folder, or a `.gguf` file.
    models : mapping, optional
        Several models in place of one: name → model. `model` gives each by its name, and ``gen(model=…)``
        names it in a program. The first one answers what names none. A model is loaded at its first use, in
        processes of its own, and unloaded when another one needs its memory: the least recently used that
        has no requests (`ramify.runtime.models.pool.ModelPool`).
    keep_alive, pin
        Of several models: how long each stays loaded after its last request, as 300, "5m" or None for ever;
        and the names of those that are loaded at the start and stay.
    retries, retry_for
        How often, and for how many seconds, a program sends a failed request again if a process has died or
        the queue was full (`ramify.retry.Retry`).
    priority : int, optional
        Priority of requests for which the program sets none, between -100 and 100: higher goes first.
    lora : str
        LoRA adapter of requests for which the program names none. `loras` and `load_lora` load adapters.
    cache
        A file in which answers are stored and looked up (`ramify.answers.AnswerStore`). It is created if it
        does not exist. Only programs use it. (SGLang's prefix cache is `prefix_cache`.)
    **options
        The other fields of `ramify.runtime.config.EngineConfig`.

    Raises `NotFound` if the model or an adapter does not exist, as far as is known without asking the hub.

    The processes start on first use or with `start`. They end with `close`, at the end of a ``with`` block,
    at the interpreter's exit, or when this process is killed. A child process that is forked after the start
    cannot use the engine, and the child's exit does not end the engine.

    Examples
    --------
    >>> with Engine() as engine:  # doctest: +SKIP
    ...     engine.complete("The capital of France is", max_tokens=4).text
    ' Paris.'
    """

    name = "engine"

    pins = True

    def __init__(
        self,
        model: str | None = None,
        *,
        models: Mapping[str, str] | None = None,
        keep_alive: float | str | None = None,
        pin: str | Sequence[str] = (),
        retries: int | None = None,
        retry_for: float = RETRY_FOR_S,
        priority: int | None = None,
        lora: str = "",
        cache: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = model
        own = parameters_of(Engine) if options else []
        for name in options:
            if name not in EngineConfig.__dataclass_fields__:
                raise UnsupportedField(
                    f"Engine has no option {name!r}.",
                    field=name,
                    remedy=nearest(name, [*EngineConfig.__dataclass_fields__, *own], ELSEWHERE),
                )
        self.config = EngineConfig(**options)
        self._model_is_default = "model" not in options
        self.retry = Retry(retries, retry_for)
        self.priority = None if priority is None else checked_priority(priority)
        self.lora = lora
        self.answers = None if cache is None else AnswerStore(cache)
        self._pool: ModelPool | None = None
        self._name = ""
        """Name of the model in the pool; "" for an engine of one model."""
        if models is None:
            if keep_alive is not None or pin:
                field = "pin" if keep_alive is None else "keep_alive"
                raise UnsupportedField(
                    f"{field} is for several models.", field=field, remedy="Give models={…}."
                )
            _check_names(self.config)
            told = tell_of_default_model if self._model_is_default else None
            self._life = Life(Frontend(self.config), told)
            return
        if not models or not self._model_is_default:
            raise InvalidRequest(
                "models is empty." if not models else "model and models are both given.",
                field="models",
                remedy="Give model, or models as name → model.",
            )
        check_several(self.config)
        for one in models.values():
            _check_names(dataclasses.replace(self.config, model=one))
        keep = None if keep_alive is None else keep_alive_s(keep_alive)
        pinned = (pin,) if isinstance(pin, str) else pin
        self._pool = ModelPool(self.config, models, keep_alive_s=keep, pinned=pinned)
        self._name = self._pool.first
        self._life = Life(self._pool)
        self._models = {self._name: self}
        """Name → engine of this model; shared by all of them."""

    def model(self, name: str) -> Engine:
        """The model `name` of an engine with several: a backend, and an engine with all methods. Its `start`
        loads the model, and its `close` closes all. Raises `NotFound` for an unknown name, and
        `UnsupportedField` for an engine of one model."""
        pool = self._several()
        asked, name = name, pool.resolve(name)
        if not pool.is_model(asked):
            raise unknown(asked, pool.names)
        if name not in self._models:
            other = self._models[name] = copy.copy(self)
            other._name, other.config, other.lora = name, pool.config_of(name), ""
        return self._models[name]

    @property
    def models(self) -> list[ModelStatus]:
        """The models of an engine with several, the first one's first: name, state, sizes, users. Raises
        `UnsupportedField` for an engine of one model."""
        pool = self._several()

        async def statuses() -> list[ModelStatus]:
            await pool.measure()
            return pool.statuses()

        return wait(statuses())

    def unload(self) -> None:
        """Unload this model of an engine with several, when its requests have ended. Its next use loads it
        again. Raises `UnsupportedField` for an engine of one model."""
        wait(self._several().unload(self._name))

    def _several(self) -> ModelPool:
        if self._pool is None:
            raise UnsupportedField(
                "This engine has one model.", field="model", remedy="Several models: rm.Engine(models={…})."
            )
        return self._pool

    @property
    def _frontend(self) -> Frontend | None:
        """The frontend of the model; None while a model of several is not loaded."""
        if self._pool is not None:
            return self._pool.frontends.get(self._name)
        assert isinstance(self._life.processes, Frontend)
        return self._life.processes

    def _new_rid(self) -> str:
        return secrets.token_hex(8) if self._frontend is None else self._frontend.new_rid()

    @contextlib.asynccontextmanager
    async def _using(self) -> AsyncIterator[Frontend]:
        """The frontend of the model, started or loaded, which is not unloaded within the block."""
        await self._life.ensure_started()
        if self._pool is not None:
            async with self._pool.use(self._name) as frontend:
                yield frontend
        else:
            assert self._frontend is not None
            yield self._frontend

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Start the processes and wait until they are ready."""
        wait(self.info())
        return self

    def close(self) -> None:
        """End the processes. Running requests fail with `EngineClosed`. May be called twice."""
        self._life.close()

    shutdown = close

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- a backend for programs, on the background loop ---------------------------------------------

    async def info(self) -> ModelInfo:
        async with self._using() as frontend:
            return msgspec.structs.replace(frontend.info, name=self._name) if self._name else frontend.info

    def generate(self, request: Generate, *sampling: object) -> AsyncIterator[TextChunk]:
        """The chunks of one generation; see `Frontend.generate`."""
        if sampling or not isinstance(request, Generate):
            raise UnsupportedField(
                "Engine.generate is what programs call, with a Generate message.",
                field="generate",
                remedy="For prompts there are engine.complete(prompt, max_tokens=…) and "
                "engine.complete_many(prompts, max_tokens=…).",
            )
        return self._generate(request)

    async def _generate(self, request: Generate) -> AsyncGenerator[TextChunk, None]:
        async with self._using() as frontend:
            chunks = cast("AsyncGenerator[TextChunk, None]", frontend.generate(request))
            with engine_span(request, self._name or frontend.info.name) as take:
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        take(chunk)
                        yield chunk

    async def abort(self, rid: str) -> bool:
        """Abort the request `rid`. Its stream ends with finish reason "abort" and its usage. Returns False if
        there is no such request in flight, for example while the engine starts."""
        return self._running is not None and self._running.abort(rid) > 0

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        """Announce that a branch of a program continues when these tools have returned."""
        if self._running is not None:
            await self._running.control.await_tools(program, branch, tools)

    async def end_program(self, program: str) -> None:
        if self._running is not None:
            await self._running.control.end_program(program)

    async def aclose(self) -> None:
        await self._life.aclose()

    @property
    def _running(self) -> Frontend | None:
        """The frontend, if it has started in this process."""
        return self._frontend if self._life.started else None

    # --- without a program --------------------------------------------------------------------------

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        chat: Sequence[ChatMessage] | None = None,
        constraint: Constraint | None = None,
        preambles: Sequence[Preamble] = (),
        scope: str = "",
        priority: int | None = None,
        lora: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """Generate once and wait. `sampling` takes the options of `gen`: fields of `SamplingParams`, or
        SGLang's spellings of them.

        `prompt` is text, token ids, or a list of texts and lists of token ids, which are concatenated. `lora`
        names a LoRA adapter. "" means the model without an adapter, and None the engine's default. Raises
        `UnsupportedField` for an unknown option, and `InvalidRequest` for a wrong value or prompt.
        """
        return wait(
            self.acomplete(
                prompt,
                chat=chat,
                constraint=constraint,
                preambles=preambles,
                scope=scope,
                priority=priority,
                lora=lora,
                **sampling,
            )
        )

    def complete_many(
        self,
        prompts: Sequence[Prompt],
        *,
        constraint: Constraint | None = None,
        priority: int | None = None,
        lora: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Generate for all `prompts` at the same time. The results are in the order of the prompts."""
        if isinstance(prompts, list | tuple) and not prompts:
            return []
        found, several = prompts_of(prompts)
        if not several:
            raise InvalidRequest(
                "prompts is one prompt; it must be a list of prompts.",
                field="prompts",
                remedy="Give a list, or call complete.",
            )

        flow = self._new_rid()

        async def gather() -> list[Completion]:
            calls = (
                self.acomplete(
                    prompt, constraint=constraint, priority=priority, lora=lora, flow=flow, **sampling
                )
                for prompt in found
            )
            return await asyncio.gather(*calls)

        return wait(gather())

    async def acomplete(
        self,
        prompt: Prompt | None = None,
        *,
        chat: Sequence[ChatMessage] | None = None,
        constraint: Constraint | None = None,
        preambles: Sequence[Preamble] = (),
        scope: str = "",
        priority: int | None = None,
        lora: str | None = None,
        flow: str = "",
        **sampling: Any,
    ) -> Completion:
        """Do as `complete`, from a coroutine on any event loop. Calls of the same `flow` share a place in the
        queue, as the prompts of `complete_many` do."""
        segments = () if prompt is None else segments_of(prompt)
        check_chat(chat)
        if constraint is not None:
            checked(constraint)
        request = Generate(
            rid=self._new_rid(),
            prompt=segments,
            chat=None if chat is None else tuple(chat),
            sampling=resolve_options(read_options(sampling, of="complete")),
            constraint=constraint,
            preambles=tuple(preambles),
            scope=scope,
            every_s=HELD_S,
            priority=(self.priority or 0) if priority is None else priority,
            lora=self.lora if lora is None else lora,
            flow=flow,
        )
        if asyncio.get_running_loop() is background_loop():
            return await self._collect(request)
        return await asyncio.wrap_future(submit(self._collect(request)))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        scope: str = "",
        priority: int | None = None,
        lora: str | None = None,
    ) -> np.ndarray:
        """Embed texts: (texts, dimensions) float32, or (dimensions,) for one text or one list of token ids.

        An embedding is the hidden state of the last token after the final norm, or with ``pooling="mean"``
        the mean over all tokens. If `pooling` is None, the mode is the one that the model's folder names
        (``1_Pooling`` of sentence-transformers), or "last" if the folder names none. The embedding is
        truncated to its first `dimensions` entries, and with `normalize` scaled to length 1. The model's
        tokenizer adds its special tokens to texts. Raises `InvalidRequest` for too many dimensions and for a
        wrong prompt, and `UnsupportedField` if `pooling` is None and the model's own mode is not supported.
        """
        given, several = prompts_of(prompts)
        request = Generate(
            rid="",
            sampling=SamplingParams(max_tokens=0),
            scope=scope,
            priority=(self.priority or 0) if priority is None else priority,
            lora=self.lora if lora is None else lora,
            flow=self._new_rid(),
        )

        async def embedded() -> list[bytes]:
            info = await self.info()
            way, room = pooling_for(info, pooling), asyncio.Semaphore(info.max_running)

            async def pooled(prompt: tuple[Segment, ...]) -> bytes:
                rid = self._new_rid()
                one = msgspec.structs.replace(request, rid=rid, prompt=prompt, pooling=way)
                async with room:
                    last = [chunk async for chunk in self._generate(one)][-1]
                return last.embedding

            return list(await asyncio.gather(*map(pooled, given)))

        found = [vector_of(pooled, dimensions, normalize=normalize) for pooled in wait(embedded())]
        return np.stack(found) if several else found[0]

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the LoRA adapter in the PEFT folder `path`, so that requests can use it under `name`.

        Raises `InvalidRequest` for a name in use and for a folder that does not fit the model, and
        `UnsupportedField` for an adapter of an unsupported kind.
        """
        wait(self._with(lambda frontend: frontend.loras.load(name, os.fspath(path))))

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter. Running and waiting requests that use it keep it until they finish. Later
        requests that name it are refused.

        Raises `NotFound` for an unknown name.
        """
        wait(self._with(lambda frontend: frontend.loras.unload(name)))

    async def lora_revisions(self) -> dict[str, str]:
        """The loaded LoRA adapters: name → revision, which identifies the content of the adapter's files."""
        async with self._using() as frontend:
            return {name: lora.revision for name, lora in frontend.loras.loaded.items()}

    def replicas(self) -> list[ReplicaStatus]:
        """The replicas, each with its name, state, number of requests and processes."""

        async def found(frontend: Frontend) -> list[ReplicaStatus]:
            return frontend.replicas.statuses()

        return wait(self._with(found))

    def add_replica(self) -> str:
        """Start one more replica, wait until it is up, and return its name: the lowest free number.

        The new replica gets the next GPU; on the CPU it shares cores with others. Raises `UnsupportedField`
        if the engine was started with one replica, or if every GPU or core has a replica.
        """
        return wait(self._with(lambda frontend: frontend.replicas.add_replica()))

    def drain_replica(self, name: str, limit_s: float = DRAIN_S) -> None:
        """Send nothing more to a replica, wait for its requests, and stop it.

        Requests that are still running after `limit_s` seconds continue on other replicas, after the output
        so far. Raises `NotFound` for an unknown name, and `InvalidRequest` for the last replica.
        """
        wait(self._with(lambda frontend: frontend.replicas.drain(name, limit_s)))

    def restart_replica(self, name: str, limit_s: float = DRAIN_S) -> None:
        """Drain a replica, start it anew, and wait until it is up. Called for one replica after the other,
        this is a rolling restart."""
        wait(self._with(lambda frontend: frontend.replicas.restart(name, limit_s)))

    def stats(self) -> SchedulerStats:
        """Counters of the scheduler, and the numbers of pages in each state."""

        return wait(self._with(lambda frontend: frontend.control.stats()))

    def cache(self, *, texts: bool = False) -> CacheContents:
        """The contents of the prefix cache: the owners with their tokens, pages and remaining seconds, and
        the longest prefixes that nobody holds; with `texts`, the ends of the prefixes as text."""

        return wait(self._with(lambda frontend: frontend.control.cache(texts=texts)))

    def release(self, owner: str) -> int:
        """Release what a program, a session or a pin holds (`Hold.owner`). Returns the number of prefixes,
        0 if `owner` holds nothing."""

        return wait(self._with(lambda frontend: frontend.control.release(owner)))

    def flush_cache(self) -> bool:
        """Drop every cached page that no running request uses. Returns True."""

        wait(self._with(lambda frontend: frontend.control.flush_cache()))
        return True

    def get_server_info(self) -> dict[str, Any]:
        """The configuration, the model and the counters, in plain types."""

        info, stats = wait(self.info()), self.stats()
        found = {
            **dataclasses.asdict(self.config),
            "max_running": info.max_running,
            "chunk_tokens": info.chunk_tokens,
            "model_info": msgspec.to_builtins(info),
            "stats": msgspec.to_builtins(stats),
        }
        return found if self._pool is None else {**found, "models": msgspec.to_builtins(self.models)}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers by role; with several replicas by replica and role, with several models
        by model and role, of those that are loaded."""
        if self._pool is None or self._name != self._pool.first:
            return {} if self._frontend is None else self._frontend.pids
        loaded = self._pool.frontends.items()
        return {f"{name}/{role}": pid for name, one in loaded for role, pid in one.pids.items()}

    def __repr__(self) -> str:
        return engine_line(self)

    def _repr_html_(self) -> str:
        return engine_html(self)

    @property
    def _state(self) -> str:
        if (state := self._life.state) is not None:
            return state
        if self._frontend is None:
            return self._several().state(self._name)
        return "ready" if self._frontend.healthy else "failed" if self._frontend.gave_up else "restarting"

    async def _with(self, call: Callable[[Frontend], Awaitable[T]]) -> T:
        async with self._using() as frontend:
            return await call(frontend)

    async def _collect(self, request: Generate) -> Completion:
        async with contextlib.aclosing(self._generate(request)) as chunks:
            return await completion_of(request, chunks)
