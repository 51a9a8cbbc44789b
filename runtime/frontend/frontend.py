"""The frontend: request ids, answers, cancellation and back-pressure, in front of a fleet of replicas.

`Engine` in a user's script and the HTTP server both use it. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import logging
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec

from ramify.constraint import Constraint, checked, with_definitions
from ramify.engine_messages import (
    INTERNAL,
    Failed,
    Reply,
    StepText,
    Texts,
    ToFrontend,
    TreeChange,
)
from ramify.errors import (
    EngineClosed,
    EngineError,
    InvalidRequest,
    Overloaded,
    from_info,
)
from ramify.messages import Generate, TextChunk
from ramify.model_info import MORE_ROOM, ModelInfo
from ramify.priority import checked_priority
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.runtime.fleet.fleet import ReplicaFleet
from ramify.runtime.fleet.local import LocalFleet
from ramify.runtime.fleet.replica import SILENT_S, FleetEvents
from ramify.runtime.frontend.control import ControlCall, ControlClient, Replies
from ramify.runtime.frontend.kv_events import KVEvents
from ramify.runtime.frontend.loras import Loras
from ramify.runtime.frontend.output_queue import OutputQueue
from ramify.runtime.frontend.prompts import check_prompt
from ramify.runtime.frontend.replicas import Replicas
from ramify.runtime.frontend.requests import Requests
from ramify.runtime.frontend.tasks import Tasks
from ramify.runtime.frontend.validation import to_be_validated, validated
from ramify.runtime.frontend.watchdog import LoopWatchdog
from ramify.runtime.processes.prestart import PrestartedWorkers
from ramify.schema_bundle import finder, has_references

log = logging.getLogger("ramify")


class Frontend:
    """Sends requests to the replicas and returns their chunks.

    workers : processes for the engine core of the first replica, if they were started early
    make_fleet : makes the fleet, given its callbacks; None: `config.replicas` replicas on this machine
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: PrestartedWorkers | None = None,
        make_fleet: Callable[[FleetEvents], ReplicaFleet] | None = None,
    ) -> None:
        self._config = config
        events = FleetEvents(
            receive=self._receive,
            lost=lambda error, rids: self._requests.move(error, rids),
            restarted=lambda: self.loras.restore(),
            gave_up=self._fail_all,
            tree_changed=self._tree_changed,
        )
        self._fleet = LocalFleet(config, workers, events) if make_fleet is None else make_fleet(events)
        self._requests = Requests(self._fleet)
        self._replies = Replies(self._fleet.send)
        self._rid_prefix = secrets.token_hex(4)
        self._rid_numbers = itertools.count(1)
        self._seeds = random.Random(config.seed)
        self._closed: EngineError | None = EngineClosed("The engine has not been started.")
        self._draining = False
        self._tasks = Tasks()
        self.loras = Loras(self._post, self._call_id, self._model_names)
        self.replicas = Replicas(self._fleet, self._tasks, self._check_open)
        self.control = ControlClient(
            self._ask, self._fleet.send, self._call_id, lambda: self.max_prompt_tokens
        )
        self._schemas = finder(config.schemas) if config.schemas is not None else None
        self._with_schemas = functools.lru_cache(maxsize=64)(self._bundled)
        self._kv_events: KVEvents | None = None
        self._watchdog: LoopWatchdog | None = None

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the model's files, start the replicas, and load the config's LoRA adapters. If one of these
        fails, stops the replicas and raises the error."""
        if self._config.kv_events is not None:
            self._kv_events = KVEvents(self._config, lambda: self.loras.loaded)
        self._watchdog = LoopWatchdog(asyncio.get_running_loop())
        self._watchdog.start()
        try:
            await self._fleet.start()
            self._closed = None
            if self._kv_events is not None:
                self._kv_events.start_publishing(self._model_names()[0])
            await self.loras.load_all(self._config.loras)
        except BaseException:
            await self.aclose()
            raise

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait at most `seconds` for the running ones."""
        self._draining = True
        await self._requests.wait_empty(seconds)

    async def aclose(self) -> None:
        """Stop the replicas; requests that are running fail with `EngineClosed`."""
        self._close()
        await self._tasks.cancel()
        await self._fleet.aclose()  # `close_now` would block the event loop for seconds

    def close_now(self) -> None:
        """Do what `aclose` does, without a running event loop."""
        self._close()
        self._fleet.close_now()

    def _close(self) -> None:
        self._fail_all(EngineClosed("The engine has been closed."))
        events, self._kv_events = self._kv_events, None
        if events is not None:
            events.close()
        if self._watchdog is not None:
            self._watchdog.stop()

    @property
    def info(self) -> ModelInfo:
        if self._fleet.info is None:
            self._check_open()
            raise EngineClosed("The engine has not been started.")
        return self._fleet.info

    @property
    def known_info(self) -> ModelInfo | None:
        """The served model; None before the first start."""
        return self._fleet.info

    @property
    def max_prompt_tokens(self) -> int:
        """Length in tokens of the longest prompt that fits the model and the KV pages."""
        return self._fleet.max_prompt_tokens

    @property
    def in_flight(self) -> int:
        """Number of running and waiting requests."""
        return len(self._requests.outputs)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers by role; with several replicas by replica and role."""
        return self._fleet.pids

    @property
    def healthy(self) -> bool:
        """Whether the frontend takes requests, and has heard from a replica within `SILENT_S`."""
        serves = self._closed is None and not self._draining and not self._fleet.restarting
        return serves and self.heartbeat_age_s < SILENT_S

    @property
    def gave_up(self) -> bool:
        """Whether the frontend is not started, is closed, or has lost its last replica for good."""
        return self._closed is not None

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message from any replica."""
        return self._fleet.heartbeat_age_s

    @property
    def blocked_s(self) -> float:
        """Seconds for which the event loop was blocked (`LoopWatchdog.total_s`)."""
        return self._watchdog.total_s if self._watchdog is not None else 0.0

    # --- requests ---------------------------------------------------------------------------------

    def new_rid(self) -> str:
        """A new request id, different from those of other frontends on this machine. May be called in any
        thread."""
        return f"{self._rid_prefix}-{next(self._rid_numbers)}"

    def _call_id(self) -> str:
        return INTERNAL + self.new_rid()

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        """The chunks of one generation; the last has `finish` set. Closing the iterator aborts it.

        If the engine core dies, a restarted engine core or another replica continues the request after the
        output that has arrived. Raises `Overloaded` if the queue is full, `InvalidRequest` for an invalid
        request, and `WorkerDied` for a request that kills engine cores (`Quarantine`).
        """
        if self._schemas is not None and request.constraint is not None:
            checked(request.constraint)  # checks the size before the source is parsed
            if has_references(request.constraint.source):
                return self._generate_bundled(request)
        return self._generate(request)

    def _generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        chunks = self._chunks(request)
        return validated(request, chunks) if to_be_validated(request) else chunks

    async def _generate_bundled(self, request: Generate) -> AsyncIterator[TextChunk]:
        """Do as `_generate`, after a thread has added the schemas of the folder `config.schemas` to which the
        constraint refers."""
        assert request.constraint is not None
        constraint = await asyncio.to_thread(self._with_schemas, request.constraint)
        chunks = self._generate(msgspec.structs.replace(request, constraint=constraint))
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    def _bundled(self, constraint: Constraint) -> Constraint:
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

    def abort(self, rid_prefix: str | None = None) -> int:
        """Abort the requests whose id is `rid_prefix`, or begins with `rid_prefix` followed by "-" or "#".
        None aborts all.

        Returns the number of aborted requests.
        """
        requests = self._requests
        rids = list(requests.outputs) if rid_prefix is None else requests.named(rid_prefix)
        return requests.abort(rids)

    def _model_names(self) -> tuple[str, ...]:
        own = self._config.served_model_name if isinstance(self._config, ServerConfig) else ()
        return (*(own or (self.info.name,)), "default")

    def _check_open(self) -> None:
        if self._closed is not None:
            raise copy.copy(self._closed)  # a copy, since a raised instance keeps its traceback

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
        room = self.info.kv_room
        check_prompt(request, self.max_prompt_tokens, MORE_ROOM if room is None else room.remedy)
        revision = self.loras.revision(request.lora)
        checked_priority(request.priority)
        request.sampling.check()
        if request.constraint is not None:
            checked(request.constraint)
        if revision != request.lora_revision:
            request = msgspec.structs.replace(request, lora_revision=revision)
        if request.sampling.seed is None and request.sampling.temperature > 0.0:
            sampling = msgspec.structs.replace(request.sampling, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        return self._requests.send_request(request)

    def _check_room(self, request: Generate) -> None:
        running = self._config.max_running or self.info.max_running
        most, own = self._config.most_requests(running), self._requests.in_flow(request)
        told = ""
        if self.in_flight < most:
            most = self._config.most_of_a_flow(running)
            if own < most:
                return
            told = " of one body, program or key"
        raise Overloaded(
            f"{own if told else self.in_flight} requests{told} are running or queued; the limit is {most}.",
            remedy="Send it again later.",
            retry_after=1.0,
        )

    def _post(self, message: ControlCall) -> asyncio.Future[Reply | Texts]:
        """Send a control call at once. Raises the error that ended the engine, if it has ended."""
        self._check_open()
        return self._replies.post(message)

    async def _ask(self, message: ControlCall) -> Reply | Texts:
        return await self._post(message)

    # --- the replicas ---------------------------------------------------------------------------------

    def _receive(self, message: ToFrontend) -> None:
        if isinstance(message, StepText):
            self._requests.take(message.chunks)
        elif isinstance(message, Failed):
            self._requests.fail(message.rid, from_info(message.error))
            self._replies.fail(message.rid, from_info(message.error))
        elif isinstance(message, Reply | Texts):
            self._replies.take(message)

    def _tree_changed(self, replica: str, change: TreeChange | None) -> None:
        if self._kv_events is not None:
            self._kv_events.publish_change(replica, change)

    def _fail_all(self, error: EngineError) -> None:
        """Close the frontend: `error` ends every request and control call, and is raised for new ones."""
        self._closed = error
        self._requests.fail_all(error)
        self._replies.fail_all(error)
