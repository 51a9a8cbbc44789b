"""State that all endpoints share: the frontend, the configuration, metrics and recent requests."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Protocol, cast

import msgspec
from starlette.requests import Request

from ramify.engine_messages import TokenIds
from ramify.errors import EngineClosed, InvalidRequest, Overloaded
from ramify.messages import Generate, ProgramHint, TextChunk
from ramify.model_info import ModelInfo
from ramify.runtime.config import ServerConfig
from ramify.runtime.frontend.control import ControlClient
from ramify.runtime.frontend.loras import Loras
from ramify.runtime.frontend.replicas import Replicas
from ramify.runtime.models.names import ANY, LATEST, unknown
from ramify.runtime.server.keys.tenants import OPEN, Caller, expected_prompt
from ramify.runtime.server.metrics import ChoiceUsages, Metrics
from ramify.runtime.server.recent import Recent
from ramify.runtime.server.telemetry.generations import Telemetry
from ramify.text import plain

logger = logging.getLogger("ramify.server")

IGNORED_HEADER = "x-ramify-ignored"
MAX_NAMED = 50
"""Maximum number of fields that the header names: clients refuse headers of more than 8 KB."""
MAX_TOLD = 1000
"""Maximum number of ignored fields that the log names: clients may choose any names."""

IN_BATCH: ContextVar[str] = ContextVar("in_batch", default="")
"""Id of the batch to which the current request belongs; "" for a request of a client."""
CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Name of the client that sent the current request, by its headers; "" if they have none."""
KEY: ContextVar[Caller] = ContextVar("key", default=Caller(OPEN))  # noqa: B039
"""The API key of the current request; one that may do everything on a server without keys."""


SERVICE = "ramify.service"
"""Key of a request's scope: the service of the model that the request uses, if there are several."""


def ended_by_stop() -> EngineClosed:
    """The error of a request that runs when the server's drain ends."""
    return EngineClosed("The server stopped before this request ended.", remedy="Send it again later.")


class FrontendProtocol(Protocol):
    """The members of `Frontend` that the HTTP layer uses. Tests have an implementation without an engine."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def max_prompt_tokens(self) -> int: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def gave_up(self) -> bool: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def heartbeat_age_s(self) -> float: ...
    @property
    def blocked_s(self) -> float: ...
    @property
    def control(self) -> ControlClient: ...
    @property
    def loras(self) -> Loras: ...
    @property
    def replicas(self) -> Replicas: ...
    def new_rid(self) -> str: ...
    def generate(self, request: Generate) -> AsyncIterator[TextChunk]: ...
    def abort(self, rid_prefix: str | None = None) -> int: ...
    async def drain(self, seconds: float) -> None: ...
    async def aclose(self) -> None: ...


@dataclasses.dataclass
class Life:
    """Where a server is in its life.

    draining : whether it shuts down: running generations continue, new ones are refused
    stopped : whether the drain has ended: what still runs is aborted by the server, not by a client
    """

    draining: bool = False
    stopped: bool = False


class Service:
    """The state that all endpoints of a server share.

    With several models each has a service of its own, and `server` is that of the whole server: the services
    share its state but for frontend, names and metrics.
    """

    def __init__(
        self, frontend: FrontendProtocol, config: ServerConfig, server: Service | None = None
    ) -> None:
        self.frontend = frontend
        self.config = config
        self.metrics = Metrics(lambda: self.frontend.blocked_s)
        self.model_names = tuple(config.served_model_name) or (frontend.info.name,)
        """The names of the model for clients; the first is its id."""
        self.telemetry = Telemetry(config, self.model_names[0])
        self.keeps_alive = server is not None
        """Whether the model is loaded and unloaded as `keep_alive` says; else it is always loaded."""
        self.life: Life = Life() if server is None else server.life
        self.recent: Recent = Recent(texts=config.live_texts) if server is None else server.recent
        self.started_at: int = int(time.time()) if server is None else server.started_at
        self.programs: dict[str, Any] = {} if server is None else server.programs
        """Client's id of a streamed program → the tool results that the program is waiting for."""
        self._told_ignored: set[str] = set() if server is None else server._told_ignored

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling options for requests that leave them out (`ServerConfig.sampling_defaults`)."""
        return self.frontend.info.sampling_defaults if self.config.sampling_defaults == "model" else {}

    @property
    def model_name(self) -> str:
        """The model's id for clients."""
        return self.model_names[0]

    @property
    def all_names(self) -> dict[str, str]:
        """Name of a model for clients → the LoRA adapter that it names; "" for the names of the served model
        alone. Names that the current key may not use are left out."""
        names = dict.fromkeys(self.model_names, "") | {name: name for name in self.frontend.loras.loaded}
        may_use = KEY.get().may_use
        return {
            name: lora
            for name, lora in names.items()
            if any(map(may_use, self._adapter_names(lora) if lora else (name,)))
        }

    def _adapter_names(self, lora: str) -> tuple[str, ...]:
        return (lora, *(f"{model}:{lora}" for model in self.model_names))

    def check_model(self, name: str) -> None:
        """Raise `NotAllowed` unless the current key may use the model that a request names: the served model
        by any of its names, or an adapter."""
        lora = name in self.frontend.loras.loaded
        KEY.get().check_model(self._adapter_names(name) if lora else self.model_names)

    def check_name(self, name: str) -> None:
        """Raise `NotFound` unless `name` names the served model, and no adapter; "" names any."""
        if name and name.removesuffix(LATEST) not in (*self.model_names, ANY):
            raise unknown(name, self.model_names)

    @property
    def max_running(self) -> int:
        """Maximum number of requests in one batch of a replica."""
        return self.config.max_running or self.frontend.info.max_running

    @classmethod
    def serving(cls, request: Request) -> Service:
        """The service of the application that handles `request`, or of the model that the request uses."""
        service = request.scope.get(SERVICE) or request.app.state.service
        assert isinstance(service, cls)
        return service

    def check_count(self, generations: int) -> None:
        """Raise `InvalidRequest` if a request asks for more generations than one flow may have in flight."""
        limit = self.config.most_of_a_flow(self.max_running)
        if generations > limit:
            raise InvalidRequest(
                f"The request asks for {generations} generations; this server takes at most {limit}.",
                remedy="Split it over several requests.",
            )

    def tell_ignored(self, fields: Sequence[str]) -> dict[str, str]:
        """The response header that names `fields`, which were given and have no effect; empty if there are
        none. The log names each field once."""
        if not fields:
            return {}
        named = [plain(field) for field in fields[:MAX_NAMED]]
        for field in named:
            if field not in self._told_ignored and len(self._told_ignored) < MAX_TOLD:
                self._told_ignored.add(field)
                logger.warning("%s is taken and has no effect.", field)
        if len(fields) > MAX_NAMED:
            named.append(f"and {len(fields) - MAX_NAMED} more")
        return {IGNORED_HEADER: ", ".join(named)}

    def _named(self, hint: ProgramHint) -> ProgramHint:
        """`hint` with the client's name, the key's share for pins, and a lease of at most `max_lease_s`.
        Raises `InvalidRequest` for a longer pin."""
        most = self.config.max_lease_s
        if hint.pinned and hint.lease_s > most:
            raise InvalidRequest(
                f"The pin is for {hint.lease_s:g} s; this server keeps one for at most {most:g} s.",
                field="hint.lease_s",
                remedy="Pin for a shorter time, or start the server with a larger max_lease_s.",
            )
        return msgspec.structs.replace(
            hint,
            lease_s=min(hint.lease_s, most),
            client=CLIENT.get(),
            max_pinned_share=KEY.get().pinned_share(self.config.max_pinned_share),
        )

    async def end_program(self, program: str) -> None:
        """End a program of the current key, which sends no further requests: its leases are released."""
        await self.end_in_engine(KEY.get().own_id(program))

    async def end_in_engine(self, program: str) -> None:
        """End the program that has the id `program` in the engine."""
        self.recent.end_program(program)
        await self.frontend.control.end_program(program)

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        """Tell the engine that a branch of a program of the current key waits for `tools`."""
        await self.frontend.control.await_tools(KEY.get().own_id(program), branch, tools)

    async def tokenize(self, prompts: Sequence[Generate], *, special: bool) -> tuple[TokenIds, ...]:
        """`ControlClient.tokenize`, in the cache scope of the current key."""
        scope = KEY.get().own_scope("")
        own = [msgspec.structs.replace(prompt, scope=scope) for prompt in prompts]
        return await self.frontend.control.tokenize(own, special=special)

    def abort(self, rid: str | None) -> int:
        """Abort the requests of the current key with this id (`Frontend.abort`); None: all of them, and with
        a key of operators those of all keys. Returns their number."""
        caller = KEY.get()
        if rid is None and not caller.key.admin:
            return sum([self.frontend.abort(one) for one in [*caller.account.rids]])
        return self.frontend.abort(None if rid is None else caller.own_id(rid))

    async def generate(
        self,
        request: Generate,
        endpoint: str,
        user: str | None = None,
        choices: ChoiceUsages | None = None,
    ) -> AsyncGenerator[TextChunk, None]:
        """The chunks of a generation, whose pages are leased for at most `max_lease_s`. Records metrics, and
        logs a line and ends a span when the generation ends in any way. Raises `NotAllowed` and `Overloaded`
        by the key.

        `choices` collects the usages of all choices of the prompt; None if there is only this one.
        """
        if self.life.draining:
            raise EngineClosed("The server is shutting down.", remedy="Send the request to another one.")
        if request.hint is not None:
            request = msgspec.structs.replace(request, hint=self._named(request.hint))
        caller, batch, rid = KEY.get(), IN_BATCH.get(), request.rid
        self.check_model(request.lora or self.model_name)
        request = caller.owned(request, batch)
        expected = self.begin(caller, request)
        choices = choices or ChoiceUsages(1)
        started = previous = time.perf_counter()
        first_token_s: float | None = None
        status, finish = 499, "abort"
        failure: Exception | None = None
        inter_token = self.metrics.inter_token_s.labels(endpoint)
        # An async generator by the contract of `Frontend.generate`: closing it aborts the request.
        chunks = cast("AsyncGenerator[TextChunk, None]", self.frontend.generate(request))
        client = "batch" if batch else CLIENT.get()
        recording = self.recent.record_request(request, endpoint, client, choices)
        generation = self.telemetry.begin(request, endpoint, client, user, caller.name)
        caller.account.rids.add(request.rid)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    recording.add_chunk(chunk)
                    generation.add_chunk(chunk)
                    if self.life.stopped and chunk.finish is not None and chunk.finish.reason == "abort":
                        raise ended_by_stop()
                    if chunk.ids:
                        now, tokens = time.perf_counter(), len(chunk.ids)
                        if first_token_s is None:
                            # The chunk was held back: its first token came `decode_s` ago.
                            previous = now - (recording.usage.decode_s if request.every_s else 0.0)
                            first_token_s = previous - started
                            self.metrics.first_token_s.labels(endpoint).observe(first_token_s)
                            tokens = tokens - 1 if request.every_s else 0
                        if tokens:
                            inter_token.observe((now - previous) / tokens)
                        previous = now
                    if chunk.finish is not None:
                        finish = chunk.finish.reason
                        status = 499 if finish == "abort" else 200
                    yield caller.shown(chunk, rid)
        except Exception as error:
            status, finish, failure = getattr(error, "status", 500), "error", error
            raise
        finally:
            usage = recording.end_request(finish, failure)
            total_s = time.perf_counter() - started
            self.metrics.generations.labels(endpoint, str(status), finish).inc()
            self.metrics.total_s.labels(endpoint).observe(total_s)
            totals = choices.end_choice(usage)
            if totals is not None:
                self.metrics.count_tokens(totals, caller.name)
            caller.account.rids.discard(request.rid)
            spent = 0 if totals is None else totals.prompt + totals.completion
            if totals is not None and not totals.prompt and finish == "abort":
                spent += expected_prompt(request)  # the client hung up before it was told the usage
            caller.settle(expected, spent)
            questions = () if request.decide is None else request.decide.questions
            if finish not in ("abort", "error"):
                self.metrics.count_questions(endpoint, questions)
            generation.end(status, finish, usage, first_token_s, total_s, failure)

    def begin(self, caller: Caller, request: Generate | None) -> int:
        """`Caller.begin`, with its metrics."""
        first = not caller.begun
        try:
            expected = caller.begin(request)
        except Overloaded as error:
            self.metrics.key_refusals.labels(caller.name, error.field).inc()
            raise
        if first and caller.name:
            self.metrics.key_requests.labels(caller.name).inc()
        return expected
