"""Several rings behind one frontend: to the frontend they are one ring.

    a request       its prompt's ids from some tokenizer → `Placement` → its replica; its chunks come back
    an abort        the replica that has the request
    a question      one replica, or all of them, whose answers are merged
    a death         the replica's requests go to others with the output that they have (decision 0050)

A message for which no replica is up waits until one is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ramify.errors import EngineError, InvalidRequest, WorkerDied
from ramify.messages import Generate, ModelInfo
from ramify.radix.observe.digest import Digests
from ramify.ring_messages import (
    Abort,
    AwaitTools,
    Detokenize,
    EndProgram,
    Failed,
    GetTree,
    LoadLora,
    Reply,
    StepText,
    Texts,
    ToFrontend,
    Tokenize,
    ToTokenizer,
    TreeChange,
    UnloadLora,
)
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet.index import TreeEvents
from ramify.runtime.fleet.placement import NoReplica, Placement, Work
from ramify.runtime.fleet.shares import shares
from ramify.runtime.fleet.stats import merged
from ramify.runtime.frontend.supervisor import RingSupervisor
from ramify.runtime.model.lora.names import tree_scope
from ramify.runtime.processes.prestart import PrestartedWorkers

log = logging.getLogger("ramify")

Answer = Reply | Texts | Failed

SILENT_S = 30.0
"""A replica that has been silent for this long is not asked what others can answer too."""
EXPECTED_OUTPUT = 64.0
"""Output tokens that a request is expected to take, at most its max_tokens."""
CHARACTERS = 4
"""Of a choice's text, per token."""
MOST_PINS = 4096
"""Limits of programs whose replica is remembered."""


class _Running(NamedTuple):
    """A request that a replica has. `held`: its chunks are held back for a while."""

    replica: str
    held: bool


@dataclasses.dataclass(slots=True, eq=False)
class _Unplaced:
    """A request that has no replica yet. `ids` are its prompt's, None while they are asked for."""

    request: Generate
    ids: tuple[int, ...] | None = None
    aborts: list[Abort] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _Question:
    """A message to be answered by the replicas in `waiting`; by any that joins where none was up."""

    message: ToTokenizer
    done: Callable[[Answer], None]
    waiting: set[str] = dataclasses.field(default_factory=set)
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)


class RingFleet:
    """Owns `config.replicas` rings, and has the methods of `RingSupervisor`.

    Parameters
    ----------
    workers
        Processes for the first replica's ring, if they were started early.
    receive
        Called with every message for the frontend.
    lost
        Called when a ring has died, with the error for requests that cannot go on, and the ids of those that
        it had. They are to be sent again.
    restarted
        Called when a replica has a new ring, before any request goes there.
    gave_up
        Called with the reason when the last replica is gone.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: PrestartedWorkers | None,
        *,
        receive: Callable[[ToFrontend], None],
        lost: Callable[[WorkerDied, Sequence[str]], None],
        restarted: Callable[[], None],
        gave_up: Callable[[EngineError], None],
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._restarted = restarted
        self._fleet_gave_up = gave_up
        self._page_size = config.page_size
        self._rings = {
            str(index): RingSupervisor(
                config,
                workers if index == 0 else None,
                share=share,
                receive=functools.partial(self._received, str(index)),
                died=functools.partial(self._died, str(index)),
                restarted=functools.partial(self._came_back, str(index)),
                gave_up=functools.partial(self._gave_up, str(index)),
            )
            for index, share in enumerate(shares(config))
        }
        self._up: list[str] = []
        """The replicas that take messages."""
        self._gone: set[str] = set()
        """Replicas that will not come back."""
        self._placement = Placement(config.page_size)
        self._digests = Digests()
        self._unplaced: dict[str, _Unplaced] = {}
        self._running: dict[str, _Running] = {}
        self._pins: dict[str, str] = {}
        """The replica of each limit of tokens: one scheduler has to count all that its requests cost."""
        self._questions: dict[str, _Question] = {}
        self._loras: dict[str, dict[str, str]] = {}
        """By replica: its LoRA adapters, name → revision."""
        self._turns = itertools.count()

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start one ring and then the others, which find compiled kernels and packed weights on disk."""
        first, *others = self._rings
        try:
            await self._start(first)
            await asyncio.gather(*map(self._start, others))
        except BaseException:
            await self.aclose()
            raise

    async def _start(self, name: str) -> None:
        await self._rings[name].start()
        if not self._rings[name].restarting:
            self._join(name)

    async def aclose(self) -> None:
        self.close_now()
        await asyncio.gather(*(ring.aclose() for ring in self._rings.values()))

    def close_now(self) -> None:
        """The part of `aclose` that needs no running event loop."""
        for ring in self._rings.values():
            ring.close_now()

    @property
    def info(self) -> ModelInfo | None:
        return next(iter(self._rings.values())).info

    @property
    def max_prompt_tokens(self) -> int:
        """What every replica takes."""
        return min(ring.max_prompt_tokens for ring in self._rings.values())

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by replica and role, such as "1/scheduler"."""
        return {
            f"{name}/{role}": pid for name, ring in self._rings.items() for role, pid in ring.pids.items()
        }

    @property
    def restarting(self) -> bool:
        """No replica is up."""
        return not self._up

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message from any ring that is up."""
        return min(self._rings[name].heartbeat_age_s for name in self._up or self._rings)

    # --- to the rings -----------------------------------------------------------------------------

    def send(self, message: ToTokenizer) -> None:
        """Send a message to the replicas that it is for."""
        if isinstance(message, Generate):
            self._begin(message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, AwaitTools | EndProgram):
            if isinstance(message, EndProgram):
                self._placement.program_ended(message.program)
            for name in self._up:  # those that do not know the program ignore it
                self._rings[name].send(message)
        elif isinstance(message, GetTree):
            raise TypeError("GetTree is for one replica.")
        else:
            self._ask(_Question(message, self._receive))

    def _begin(self, request: Generate) -> None:
        """Place a request, after its prompt has been tokenised."""
        if not self._up:
            msgspec.msgpack.encode(request)  # raises at once what sending it would raise later
        self._unplaced[request.rid] = unplaced = _Unplaced(request)
        try:
            ids = [part for part in request.prompt if not isinstance(part, str)]
            if request.chat is None and not request.preambles and len(ids) == len(request.prompt):
                unplaced.ids = tuple(itertools.chain(*ids))
                self._place(unplaced)
            else:
                message = Tokenize(
                    rid=f"place-{request.rid}",
                    prompts=(request,),
                    special=request.chat is None,
                    entries=False,
                )
                self._ask(_Question(message, functools.partial(self._tokenised, unplaced)))
        except BaseException:
            self._unplaced.pop(request.rid, None)
            self._questions.pop(f"place-{request.rid}", None)
            raise

    def _tokenised(self, unplaced: _Unplaced, answer: Answer) -> None:
        # A prompt that no tokenizer takes is refused by the replica's, in words that are about the request.
        unplaced.ids = answer.prompts[0].ids if isinstance(answer, Texts) else ()
        self._place(unplaced)

    def _place(self, unplaced: _Unplaced) -> None:
        """Send a request to its replica; it stays unplaced where none is up."""
        request = unplaced.request
        hints = () if request.hint is None else request.hint.limits
        limits = [limit.id for limit in hints if limit.max_total_tokens is not None]
        pinned = next((self._pins[limit] for limit in limits if limit in self._pins), None)
        try:
            name = self._placement.place(self._work(unplaced), time.monotonic(), pinned)
        except NoReplica:
            return
        for limit in limits:
            self._pins.pop(limit, None)
            self._pins[limit] = name
        while len(self._pins) > MOST_PINS:
            del self._pins[next(iter(self._pins))]
        del self._unplaced[request.rid]
        self._running[request.rid] = _Running(name, request.every_s > 0)
        try:
            self._rings[name].send(request)
        except BaseException:
            self._ended(request.rid)
            raise
        for abort in unplaced.aborts:
            self._rings[name].send(abort)

    def _work(self, unplaced: _Unplaced) -> Work:
        request, ids = unplaced.request, unplaced.ids or ()
        adapter = next((own[request.lora] for own in self._loras.values() if request.lora in own), None)
        try:
            tokens = np.array(ids, np.int32)
        except OverflowError:
            digests: list[int] = []  # the replica refuses it
        else:
            scope = tree_scope(str(request.scope), adapter if request.lora else None)
            digests = self._digests.page_ends(tokens, scope, self._page_size)
        most = request.sampling.max_tokens
        scored = 0 if request.choices is None else sum(map(len, request.choices.texts)) // CHARACTERS
        known = 0 if request.continues is None else len(request.continues.ids)
        return Work(
            rid=request.rid,
            digests=digests,
            tokens=len(ids) + scored + known,
            output=EXPECTED_OUTPUT if most is None else min(most, EXPECTED_OUTPUT),
            program="" if request.hint is None else request.hint.program,
        )

    def _abort(self, abort: Abort) -> None:
        if abort.rid in self._unplaced:
            self._unplaced[abort.rid].aborts.append(abort)
        elif abort.rid in self._running:
            self._rings[self._running[abort.rid].replica].send(abort)

    # --- questions --------------------------------------------------------------------------------

    def _ask(self, question: _Question) -> None:
        self._questions[_rid(question.message)] = question
        question.waiting = set(self._asked(question.message))
        for name in list(question.waiting):
            self._rings[name].send(question.message)

    def _asked(self, message: ToTokenizer) -> Sequence[str]:
        """The replicas that have to answer."""
        if not self._up:
            return ()
        if isinstance(message, Tokenize | Detokenize):
            return (self._up[next(self._turns) % len(self._up)],)
        if isinstance(message, LoadLora):
            return [name for name in self._up if message.name not in self._loras[name]] or self._up
        if isinstance(message, UnloadLora):
            return self._up
        return [name for name in self._up if self._rings[name].heartbeat_age_s < SILENT_S] or self._up

    def _answered(self, name: str, answer: Answer) -> None:
        question = self._questions.get(answer.rid)
        if question is not None and name in question.waiting:
            question.waiting.discard(name)
            question.answers[name] = answer
            self._finish(question)

    def _finish(self, question: _Question) -> None:
        """Give the answer if all have answered; ask again where all who were asked have died."""
        if question.waiting:
            return
        if not question.answers:
            self._ask(question)
            return
        del self._questions[_rid(question.message)]
        if isinstance(question.message, LoadLora):
            question.done(self._loaded(question.message, question.answers))
            return
        if isinstance(question.message, UnloadLora):
            for own in self._loras.values():
                own.pop(question.message.name, None)
        question.done(_merged(question.answers, list(self._rings)))

    def _loaded(self, message: LoadLora, answers: dict[str, Answer]) -> Answer:
        """The answer to a `LoadLora`. Where not all replicas have the same adapter then, none keeps it."""
        if all(message.name in self._loras.get(name, ()) for name in answers):
            return _merged(answers, list(self._rings))  # it was there before: each has refused it
        for name, answer in answers.items():
            if isinstance(answer, Reply) and name in self._loras:
                self._loras[name][message.name] = answer.lora
        answer = _merged(answers, list(self._rings))
        revisions = {own[message.name] for own in self._loras.values() if message.name in own}
        if len(revisions) > 1:
            changed = InvalidRequest(f"The files of {message.name} have changed.", remedy="Load it again.")
            answer = Failed(rid=message.rid, error=changed.to_info())
        if isinstance(answer, Failed):
            for name, own in self._loras.items():
                if own.pop(message.name, None) is not None:
                    self._rings[name].send(UnloadLora(rid="", name=message.name))
        return answer

    # --- from the rings ---------------------------------------------------------------------------

    def _received(self, name: str, message: ToFrontend) -> None:
        if isinstance(message, StepText):
            self._count(message)
            self._receive(message)
        elif isinstance(message, TreeChange):
            events = TreeEvents(message.epoch, message.number, message.added, message.removed, message.whole)
            if name in self._up and not self._placement.apply(name, events):
                self._rings[name].send(GetTree())
        elif isinstance(message, Failed) and message.rid in self._running:
            self._ended(message.rid)
            self._receive(message)
        elif isinstance(message, Reply | Texts | Failed):
            self._answered(name, message)

    def _count(self, message: StepText) -> None:
        now = time.monotonic()
        for chunk in message.chunks:
            if chunk.ids and (running := self._running.get(chunk.rid)) is not None:
                held_s = chunk.usage.writing_s if running.held and chunk.usage is not None else 0.0
                self._placement.progress(chunk.rid, len(chunk.ids), now - held_s)
            if chunk.finish is not None:
                self._ended(chunk.rid)

    def _ended(self, rid: str) -> None:
        self._placement.ended(rid)
        self._running.pop(rid, None)

    # --- replicas come and go ---------------------------------------------------------------------

    def _join(self, name: str) -> None:
        """A replica with an empty tree and no adapters is up: it gets what waits."""
        self._placement.join(name)
        self._loras[name] = {}
        self._up.append(name)
        for question in list(self._questions.values()):
            if not question.waiting:
                self._ask(question)
            elif isinstance(question.message, LoadLora):
                question.waiting.add(name)
                self._rings[name].send(question.message)

    def _came_back(self, name: str) -> None:
        self._join(name)
        self._restarted()
        for unplaced in list(self._unplaced.values()):
            if unplaced.ids is not None:
                self._place(unplaced)

    def _died(self, name: str, error: WorkerDied) -> None:
        rids = [rid for rid, running in self._running.items() if running.replica == name]
        if name in self._up:
            self._up.remove(name)
            del self._loras[name]
            self._placement.leave(name)
        self._pins = {limit: home for limit, home in self._pins.items() if home != name}
        for rid in rids:
            del self._running[rid]
        for question in list(self._questions.values()):
            if name in question.waiting:
                question.waiting.discard(name)
                self._finish(question)
        self._lost(error, rids)

    def _gave_up(self, name: str, error: EngineError) -> None:
        self._gone.add(name)
        if len(self._gone) == len(self._rings):
            self._questions.clear()
            self._unplaced.clear()
            self._fleet_gave_up(error)
        else:
            left = len(self._rings) - len(self._gone)
            log.error("replica %s is gone, %d of %d are left: %s", name, left, len(self._rings), error)


def _rid(message: ToTokenizer) -> str:
    return str(getattr(message, "rid", ""))


def _merged(answers: dict[str, Answer], replicas: list[str]) -> Answer:
    """One answer of those of all that were asked: the first failure if there is one."""
    for answer in answers.values():
        if not isinstance(answer, Reply):
            return answer
    return merged({name: answer for name, answer in answers.items() if isinstance(answer, Reply)}, replicas)
