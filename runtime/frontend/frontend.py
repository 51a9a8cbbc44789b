"""The frontend's end of the engine core: request ids, answers, cancellation and back-pressure.

`Engine` in a user's script and the HTTP server share it. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.constraint import Constraint, checked, with_definitions
from ramify.engine_messages import (
    INTERNAL,
    AwaitTools,
    Detokenize,
    EndProgram,
    Failed,
    FlushCache,
    GetSnapshot,
    GetStats,
    GetTree,
    Reply,
    Snapshot,
    StepText,
    Texts,
    ToFrontend,
    TokenIds,
    Tokenize,
    TreeChange,
)
from ramify.errors import (
    EngineClosed,
    EngineError,
    InvalidRequest,
    Overloaded,
    RamifyError,
    UnsupportedField,
    WorkerDied,
    from_info,
)
from ramify.messages import Generate, ModelInfo, SchedulerStats, TextChunk
from ramify.priority import checked_priority
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.runtime.faults import errors_logged
from ramify.runtime.fleet.index import EventNumbers
from ramify.runtime.fleet.replica import SILENT_S, ReplicaStatus, State, status_of
from ramify.runtime.fleet.supervisor import EngineSupervisor
from ramify.runtime.frontend.kv_events import KVEvents
from ramify.runtime.frontend.kv_snapshots import KVSnapshots
from ramify.runtime.frontend.loras import LoadedLora, Loras
from ramify.runtime.frontend.output_queue import OutputQueue
from ramify.runtime.frontend.prompts import check_prompt
from ramify.runtime.frontend.replies import ControlCall, Replies
from ramify.runtime.frontend.requests import Requests
from ramify.runtime.frontend.tasks import Tasks
from ramify.runtime.frontend.validation import to_be_validated, validated
from ramify.runtime.frontend.watchdog import LoopWatchdog
from ramify.runtime.lora_names import tree_scope
from ramify.runtime.processes.prestart import PrestartedWorkers
from ramify.schema_bundle import finder, has_references

if TYPE_CHECKING:
    from ramify.runtime.fleet.local import LocalFleet

log = logging.getLogger("ramify")


class Frontend:
    """Sends requests into the engine core and returns their chunks.

    `workers`: processes for the first engine core, if they were started early. `make_fleet`: gives a
    `ReplicaFleet` of engine cores on other machines, from its callbacks.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: PrestartedWorkers | None = None,
        make_fleet: Callable[..., Any] | None = None,
    ) -> None:
        self._config = config
        self._engine: EngineSupervisor | LocalFleet = self._make_engine(workers, make_fleet)
        self._requests = Requests(self._engine)
        self._replies = Replies(lambda message: self._engine.send(message))
        self._rid_prefix = secrets.token_hex(4)
        self._rid_count = 0
        self._seeds = random.Random(config.seed)
        self._closed: EngineError | None = EngineClosed("The engine has not been started.")
        self._draining = False
        self._tasks = Tasks()
        self._snapshots = KVSnapshots(self._ask, self._question_id)
        self._loras = Loras(self._replies.post, self._question_id, self._model_names)
        self._schemas = finder(config.schemas) if config.schemas is not None else None
        self._with_schemas = functools.lru_cache(maxsize=64)(self._bundled)
        self._kv_events: KVEvents | None = None
        self._watchdog: LoopWatchdog | None = None
        self._tree = EventNumbers()
        """Of the tree's events where there is one engine core."""

    def _make_engine(self, workers: PrestartedWorkers | None, make_fleet: Callable[..., Any] | None) -> Any:
        if self._config.replicas == 1 and make_fleet is None:
            return EngineSupervisor(
                self._config,
                workers,
                receive=self._receive,
                died=self._count_death,
                busy=lambda: bool(self._requests.outputs or self._replies.waiting),
                restarted=self._send_again,
                gave_up=self._fail_all,
            )
        if make_fleet is None:
            from ramify.runtime.fleet.local import (
                LocalFleet,  # numpy, which one engine core does not need here
            )

            make_fleet = functools.partial(LocalFleet, self._config, workers)
        fleet = make_fleet(
            receive=self._receive,
            lost=lambda error, rids: self._requests.move(error, rids),
            restarted=lambda: self._loras.restore(),
            gave_up=self._fail_all,
        )
        fleet.watch_trees(self._tree_changed)
        return fleet

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the model's files, start the engine core, and load the config's LoRA adapters. Raises when
        any of it fails."""
        if self._config.kv_events is not None:
            self._kv_events = KVEvents(self._config, lambda: self._loras.loaded)
        self._watchdog = LoopWatchdog(asyncio.get_running_loop())
        self._watchdog.start()
        try:
            await self._engine.start()
            self._closed = None
            if self._kv_events is not None:
                self._kv_events.begin(self._model_names()[0])
            await self._loras.load_all(self._config.loras)
        except BaseException:
            await self.aclose()
            raise

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait at most `seconds` for the running ones."""
        self._draining = True
        await self._requests.wait_empty(seconds)

    async def aclose(self) -> None:
        """Stop the engine core; requests that are running fail with `EngineClosed`."""
        self._close()
        await self._tasks.cancel()
        await self._engine.aclose()  # not by `close_now`, for whose seconds the event loop would stand still

    def close_now(self) -> None:
        """`aclose` without a running event loop."""
        self._close()
        self._engine.close_now()

    def _close(self) -> None:
        self._fail_all(EngineClosed("The engine has been closed."))
        events, self._kv_events = self._kv_events, None
        if events is not None:
            events.close()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._snapshots.close()

    @property
    def info(self) -> ModelInfo:
        if self._engine.info is None:
            self._check_open()
            raise EngineClosed("The engine has not been started.")
        return self._engine.info

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that the model and the KV pages allow."""
        return self._engine.max_prompt_tokens

    @property
    def in_flight(self) -> int:
        return len(self._requests.outputs)

    @property
    def pids(self) -> dict[str, int]:
        """The worker processes by role."""
        return self._engine.pids

    @property
    def blocked_s(self) -> float:
        """Seconds for which the event loop was blocked (`LoopWatchdog.total_s`)."""
        return self._watchdog.total_s if self._watchdog is not None else 0.0

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message from the engine core."""
        return self._engine.heartbeat_age_s

    @property
    def healthy(self) -> bool:
        return (
            self._closed is None
            and not self._draining
            and not self._engine.restarting
            and self.heartbeat_age_s < SILENT_S
        )

    @property
    def gave_up(self) -> bool:
        """It takes no requests, and never will again."""
        return self._closed is not None

    # --- replicas ---------------------------------------------------------------------------------

    def replicas(self) -> list[ReplicaStatus]:
        """The replicas now; one where the engine was started with one."""
        if isinstance(self._engine, EngineSupervisor):
            state: State = "starting" if self._engine.restarting or self._engine.info is None else "up"
            return [status_of("0", self._engine, state, self.in_flight)]
        fleet = self._engine
        return [
            status_of(name, replica.engine, replica.state, fleet.requests_of(name))
            for name, replica in fleet.replicas.items()
        ]

    def replica(self, name: str) -> ReplicaStatus | None:
        return next((one for one in self.replicas() if one.name == name), None)

    async def add_replica(self) -> str:
        """See `LocalFleet.add_one`."""
        return await self._tasks.finish(self._fleet().add_one())

    async def drain_replica(self, name: str, limit_s: float) -> None:
        """See `ReplicaFleet.drain`."""
        await self._tasks.finish(self._fleet().drain(name, limit_s))

    async def restart_replica(self, name: str, limit_s: float) -> None:
        """See `LocalFleet.restart`."""
        await self._tasks.finish(self._fleet().restart(name, limit_s))

    def _fleet(self) -> LocalFleet:
        self._check_open()
        if isinstance(self._engine, EngineSupervisor):
            raise UnsupportedField(
                "This engine was started with one replica, and can neither add nor drain any.",
                field="replicas",
                remedy="Start it with two or more: --replicas 2, or rm.Engine(replicas=2).",
            )
        return self._engine

    # --- requests ---------------------------------------------------------------------------------

    def new_rid(self) -> str:
        """A request id that no other frontend on this machine gives."""
        self._rid_count += 1
        return f"{self._rid_prefix}-{self._rid_count}"

    def _question_id(self) -> str:
        return INTERNAL + self.new_rid()

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        """The chunks of one generation; the last has `finish` set. Closing the iterator aborts it.

        When a process of the engine core dies, the next engine core goes on behind the output that has
        arrived. Raises `Overloaded` when the queue is full, `InvalidRequest` for an invalid request, and
        `WorkerDied` for a request that kills engine cores (`quarantine`).
        """
        if self._schemas is not None and request.constraint is not None:
            checked(request.constraint)  # its size, before it is parsed
            if has_references(request.constraint.source):
                return self._generate_bundled(request)
        return self._generate(request)

    def _generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        chunks = self._chunks(request)
        return validated(request, chunks) if to_be_validated(request) else chunks

    async def _generate_bundled(self, request: Generate) -> AsyncIterator[TextChunk]:
        """`_generate` with the schemas of the config's folder, which a thread puts beside the request's."""
        assert request.constraint is not None
        constraint = await asyncio.to_thread(self._with_schemas, request.constraint)
        chunks = self._generate(msgspec.structs.replace(request, constraint=constraint))
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    def _bundled(self, constraint: Constraint) -> Constraint:
        """`constraint` with the schemas of the config's folder that it refers to."""
        assert self._schemas is not None
        return with_definitions(constraint, self._schemas)

    async def _chunks(self, request: Generate) -> AsyncGenerator[TextChunk, None]:
        output = self._open(request)
        try:
            while True:
                chunk = await output.next()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._requests.close(request.rid)

    def abort(self, rid_prefix: str) -> int:
        """End the requests whose id is `rid_prefix` or begins with it and "-" or "#". Returns how many."""
        return self._requests.abort(self._requests.named(rid_prefix))

    def abort_all(self) -> int:
        """End all requests. Returns how many."""
        return self._requests.abort(list(self._requests.outputs))

    async def stats(self) -> SchedulerStats:
        reply = await self._ask(GetStats(rid=self._question_id()))
        assert isinstance(reply, Reply)
        assert reply.stats is not None
        return reply.stats

    async def snapshot(self, nodes: int, programs: int) -> tuple[SchedulerStats, Snapshot]:
        """The scheduler's state, with at most `nodes` nodes of its tree and `programs` queued programs."""
        reply = await self._ask(GetSnapshot(rid=self._question_id(), nodes=nodes, programs=programs))
        assert isinstance(reply, Reply)
        assert reply.stats is not None
        assert reply.snapshot is not None
        return reply.stats, reply.snapshot

    @property
    def loras(self) -> Mapping[str, LoadedLora]:
        """The LoRA adapters that requests can name."""
        return self._loras.loaded

    def _model_names(self) -> tuple[str, ...]:
        own = self._config.served_model_name if isinstance(self._config, ServerConfig) else None
        return (own or self.info.name, "default")

    async def load_lora(self, name: str, path: str) -> None:
        """See `Loras.load`."""
        self._check_open()
        await self._loras.load(name, path)

    async def unload_lora(self, name: str) -> None:
        """See `Loras.unload`."""
        self._check_open()
        await self._loras.unload(name)

    async def flush_cache(self) -> None:
        """Drop every cached page that no running request uses."""
        await self._ask(FlushCache(rid=self._question_id()))

    async def export_prefix(
        self, ids: Sequence[int], *, scope: str = "", lora: str = "", skip: int = 0
    ) -> bytes | None:
        """The cached pages of a prompt's beginning as a KV snapshot, for the `import_prefix` of another
        engine.

        ids : of the prompt; scope, lora : as a request has them
        skip : tokens whose pages the other engine has, which are left out

        None where no whole page is cached, or the pages of this engine are not transferred. Raises
        `EngineClosed` and `WorkerDied`.
        """
        self._check_one_replica()
        revision = self._loras.revision(lora) if lora else None
        try:
            work = self._snapshots.export(ids, tree_scope(scope, revision), skip)
            return (await self._tasks.finish(work))[1]
        except (EngineClosed, WorkerDied):
            raise
        except RamifyError:
            return None

    async def import_prefix(self, snapshot: bytes) -> int:
        """Take a KV snapshot into the prefix cache. Returns the tokens of its prefix that are cached then.

        Raises what `KVSnapshots.import_` raises.
        """
        self._check_one_replica()
        return (await self._tasks.finish(self._snapshots.import_(snapshot))).tokens

    def _check_one_replica(self) -> None:
        if self._config.replicas != 1:
            raise UnsupportedField(
                f"replicas is {self._config.replicas}: its replicas move cached pages by themselves.",
                field="replicas",
            )

    async def tokenize(self, prompts: Sequence[Generate], *, special: bool) -> tuple[TokenIds, ...]:
        """The ids of each prompt, with special tokens or without. Raises `InvalidRequest`."""
        for prompt in prompts:
            check_prompt(prompt, self.max_prompt_tokens)
        reply = await self._ask(Tokenize(rid=self._question_id(), prompts=tuple(prompts), special=special))
        assert isinstance(reply, Texts)
        return reply.prompts

    async def detokenize(
        self, ids: Sequence[tuple[int, ...]], *, skip_special_tokens: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The texts of ids: of all, and with `skip_special_tokens` of all but special tokens."""
        reply = await self._ask(
            Detokenize(rid=self._question_id(), ids=tuple(ids), skip_special_tokens=skip_special_tokens)
        )
        assert isinstance(reply, Texts)
        return reply.whole, reply.text

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        """See `AwaitTools`."""
        self._engine.send(AwaitTools(program=program, branch=branch, tools=tools))

    async def end_program(self, program: str) -> None:
        self._engine.send(EndProgram(program=program))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise copy.copy(self._closed)  # without the traceback that a raised instance keeps

    def _open(self, request: Generate) -> OutputQueue:
        self._check_open()
        if self._draining:
            raise EngineClosed("The engine is shutting down and takes no new requests.")
        self._check_room(request)
        if request.sampling.n != 1:
            raise InvalidRequest("n must be 1 here: send one request per choice.", field="n")
        if request.rid.startswith(INTERNAL):
            raise InvalidRequest(
                f"The request id {request.rid!r} begins with {INTERNAL!r}: those ids are the engine's own.",
                field="rid",
                remedy="Give another id, or none.",
            )
        if request.rid in self._requests.outputs:
            raise InvalidRequest(f"A request with the id {request.rid!r} is running.", field="rid")
        check_prompt(request, self.max_prompt_tokens)
        revision = self._loras.revision(request.lora)
        checked_priority(request.priority)
        request.sampling.check()
        if request.constraint is not None:
            checked(request.constraint)
        if revision != request.lora_revision:
            request = msgspec.structs.replace(request, lora_revision=revision)
        if request.sampling.seed is None and request.sampling.temperature > 0.0:
            sampling = msgspec.structs.replace(request.sampling, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        return self._requests.begin(request)

    def _check_room(self, request: Generate) -> None:
        """Raises `Overloaded` where no more requests may be in flight, or no more of its flow."""
        running = self._config.max_running or self.info.max_running
        most, own = self._config.most_requests(running), self._requests.in_flow(request)
        told = ""
        if self.in_flight < most:
            most = self._config.most_of_a_flow(running)
            if own < most:
                return
            told = " of one body or program"
        raise Overloaded(
            f"{own if told else self.in_flight} requests{told} are running or queued; the limit is {most}.",
            remedy="Send it again later.",
            retry_after=1.0,
        )

    async def _ask(self, message: ControlCall) -> Reply | Texts:
        self._check_open()
        return await self._replies.post(message)

    # --- the engine core ---------------------------------------------------------------------------------

    def _receive(self, message: ToFrontend) -> None:
        if isinstance(message, StepText):
            self._requests.take(message.chunks)
        elif isinstance(message, Failed):
            self._requests.fail(message.rid, from_info(message.error))
            self._replies.fail(message.rid, from_info(message.error))
        elif isinstance(message, Reply | Texts):
            self._replies.take(message)
        elif isinstance(message, TreeChange):
            if not self._tree.follows(message.epoch, message.number, whole=message.whole):
                self._engine.send(GetTree())
            if self._tree.complete:
                self._tree_changed("", message)

    def _tree_changed(self, replica: str, change: TreeChange | None) -> None:
        """The tree of a replica has changed; None: it is gone with its engine core."""
        if self._kv_events is not None:
            self._kv_events.told(replica, change)

    def _count_death(self, error: WorkerDied) -> bool:
        """The engine core has died. Returns whether a request that ran alone is to blame."""
        self._tree = EventNumbers()
        with errors_logged("telling of a tree that is gone"):
            self._tree_changed("", None)
        to_blame = self._requests.count_death(error)
        self._replies.fail_all(error)
        return to_blame

    def _send_again(self) -> None:
        """There is a new engine core: it gets the adapters and the requests."""
        self._loras.restore()
        self._requests.send_again()

    def _fail_all(self, error: EngineError) -> None:
        """End every request and question with `error`, which new ones get as well."""
        self._closed = error
        self._requests.fail_all(error)
        self._replies.fail_all(error)
