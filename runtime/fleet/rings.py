"""Several rings behind one frontend: to the frontend they are one ring.

    a request       its prompt's ids from some tokenizer → `Placement` → its replica; its chunks come back
    an abort        the replica that has the request
    a question      one replica, or all of them, whose answers are merged (`Questions`)
    a death         the replica's requests go to others with the output that they have (decision 0050)
    a drain         nothing new goes there; what it has ends, or goes on elsewhere (decision 0053)

A message for which no replica is up waits until one is. Rings join and leave by name; `local` makes those of
this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ramify.errors import EngineError, InvalidRequest, NotFound, WorkerDied
from ramify.messages import Generate, ModelInfo
from ramify.radix.observe.digest import Digests
from ramify.ring_messages import (
    Abort,
    AwaitTools,
    EndProgram,
    Failed,
    GetTree,
    Reply,
    StepText,
    Texts,
    ToFrontend,
    Tokenize,
    ToTokenizer,
    TreeChange,
)
from ramify.runtime.faults import errors_logged, unsendable
from ramify.runtime.fleet.index import TreeEvents
from ramify.runtime.fleet.mover import Mover
from ramify.runtime.fleet.placement import NoReplica, Placement
from ramify.runtime.fleet.questions import Answer, Questions
from ramify.runtime.fleet.ring import FleetRing, MakeRing, Replica, RingEvents
from ramify.runtime.fleet.unplaced import Unplaced
from ramify.runtime.kv_transfer.store import ImageStore
from ramify.runtime.model.lora.names import tree_scope

log = logging.getLogger("ramify")

MOST_PINS = 4096
"""Limits of programs whose replica is remembered."""
PLACE = "place-"
"""Begins the ids of questions for the tokens of a prompt that is to be placed."""


class _Running(NamedTuple):
    """A request that a replica has. `held`: its chunks are held back for a while."""

    replica: str
    held: bool


class RingFleet:
    """Rings by name, with the methods of `RingSupervisor`.

    Parameters
    ----------
    page_size
        Tokens of a page, of all rings.
    receive
        Called with every message for the frontend.
    lost
        Called with the ids of requests whose replica has died or has left, to be sent again, and with the
        error for those that cannot go on: None where nothing has died. It returns whether one of them is
        known to be the cause.
    restarted
        Called when a replica without adapters is up, before any request goes there.
    gave_up
        Called with the reason when the last replica is gone.
    """

    def __init__(
        self,
        page_size: int,
        *,
        receive: Callable[[ToFrontend], None],
        lost: Callable[[WorkerDied | None, Sequence[str]], bool],
        restarted: Callable[[], None],
        gave_up: Callable[[EngineError], None],
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._restarted = restarted
        self._fleet_gave_up = gave_up
        self._page_size = page_size
        self._replicas: dict[str, Replica] = {}
        self._questions = Questions(self._replicas)
        self._placement = Placement(page_size)
        self._digests = Digests()
        self._unplaced: dict[str, Unplaced] = {}
        self._running: dict[str, _Running] = {}
        self._held: dict[str, Unplaced] = {}
        """Requests of `_running` that wait for pages before they are sent."""
        self.prefill: frozenset[str] = frozenset()
        """The replicas that compute prompts for the others."""
        self.mover: Mover | None = None
        """Moves pages between the rings: see `move_pages`."""
        self._pins: dict[str, str] = {}
        """The replica of each limit of tokens: one scheduler has to count all that its requests cost."""
        self._alone: set[str] = set()
        """Requests that were sent to run alone."""
        self._ward: str | None = None
        """The replica that they run on."""
        self._idle: dict[str, asyncio.Event] = {}
        """Set when a draining replica has no request left."""
        self.before_leaving: Callable[[str], Awaitable[None]] | None = None
        """Awaited with the name of a replica that has drained, while it is still up: what its tree holds can
        be moved to others."""
        self.tree_changed: Callable[[str, TreeChange | None], None] = lambda name, change: None
        """Called with a replica's name and what has changed in its tree; with None where the tree is gone."""
        self.info: ModelInfo | None = None
        self._closing: set[asyncio.Future[None]] = set()
        """Of rings that have come back with another model."""

    # --- replicas come and go ---------------------------------------------------------------------

    def move_pages(self, make_store: Callable[[], ImageStore]) -> None:
        """Move cached pages between the rings from now on, and off those that drain."""
        self.mover = Mover(
            self._placement,
            self._page_size,
            send=lambda name, message: self._replicas[name].ring.send(message),
            page_bytes=lambda: min((self._replicas[name].ring.page_bytes for name in self._up), default=0),
            make_store=make_store,
        )
        self.before_leaving = self.mover.evacuate

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """By name. They change with what this class is told, and with deaths."""
        return self._replicas

    def requests_of(self, name: str) -> int:
        """How many requests the replica has, prompts that it computes for others among them."""
        prompts = 0 if self.mover is None else self.mover.prompts(name)
        return prompts + sum(running.replica == name for running in self._running.values())

    async def add(self, name: str, make: MakeRing) -> None:
        """Start the ring that `make` gives, as the replica `name`. Raises what keeps it from starting."""
        await self.start_ring(name, self.hold(name, make))

    def hold(self, name: str, make: MakeRing) -> Replica:
        """The replica `name`, with a ring that is not started."""
        if name in self._replicas:
            raise InvalidRequest(f"There is a replica {name!r}.", field="name")
        events = RingEvents(
            receive=lambda message: self._received(name, replica, message),
            died=lambda error: self._died(name, replica, error),
            restarted=lambda: self._came_back(name, replica),
            gave_up=lambda error: self._gave_up(name, replica, error),
        )
        replica = self._replicas[name] = Replica(make(events))
        return replica

    async def start_ring(self, name: str, replica: Replica) -> None:
        """Start the ring of `hold`. The replica is not in the fleet any more where this raises."""
        try:
            await replica.ring.start()
            if replica.left:
                raise EngineError(f"Replica {name} was stopped while it started.")
            self._check_model(name, replica)
        except BaseException:
            self._forget(name, replica)
            await replica.ring.aclose()
            raise
        if not replica.ring.restarting:  # else it has died again, and comes back by itself
            self._came_back(name, replica)

    def _check_model(self, name: str, replica: Replica) -> None:
        """Requests go on with the same tokens where the model is the same alone."""
        info = replica.ring.info
        if self.info is None:
            self.info = info
        elif info is not None and info.fingerprint != self.info.fingerprint:
            raise EngineError(
                f"Replica {name} has another model than the others: {info.name}, {self.info.name}.",
                remedy="Were the model's files changed? Restart the engine.",
            )

    async def drain(self, name: str, limit_s: float, *, last: bool = False) -> None:
        """Place nothing more on a replica, wait for its requests, and stop it.

        Requests that have not ended after `limit_s` seconds go on elsewhere, behind their output. Raises
        `NotFound`, and `InvalidRequest` for a replica that drains already and, without `last`, for the last
        one.
        """
        replica = self._replica(name)
        if replica.draining:
            raise InvalidRequest(f"Replica {name} drains already.", field="name")
        if not (replica.gone or last):
            self._check_others(name)
        replica.draining = True
        self._drop_pins(name)
        idle = self._idle[name] = asyncio.Event()
        try:
            if replica.up:
                self._placement.drain(name)
                self._check_idle(name)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(idle.wait(), limit_s)
                await self._prepare(name, replica)
            if not (replica.gone or last):
                self._check_others(name)
        except BaseException:
            replica.draining = False
            if replica.up:
                self._placement.undrain(name)
                self._place_all()
            raise
        finally:
            del self._idle[name]
        await self.remove(name)

    async def _prepare(self, name: str, replica: Replica) -> None:
        if self.before_leaving is not None and replica.up:
            try:
                await self.before_leaving(name)
            except Exception:  # what it would have saved is computed again
                log.exception("replica %s leaves without preparation", name)

    def _check_others(self, name: str) -> None:
        if not any(other.usable for key, other in self._replicas.items() if key != name):
            raise InvalidRequest(
                f"Replica {name} is the last one that takes requests.",
                field="name",
                remedy="Add another one first, or shut the engine down.",
            )

    async def remove(self, name: str) -> None:
        """Stop a replica now. Its requests go on elsewhere. Raises `NotFound`."""
        replica = self._replica(name)
        rids = self._forget(name, replica)
        self._lost(None, rids)
        await replica.ring.aclose()

    def _replica(self, name: str) -> Replica:
        if name not in self._replicas:
            names = ", ".join(self._replicas) or "none"
            raise NotFound(f"There is no replica {name!r}; there are {names}.", field="name")
        return self._replicas[name]

    def _forget(self, name: str, replica: Replica) -> list[str]:
        """A replica is not in the fleet any more. Returns the requests that it had."""
        if self._replicas.get(name) is not replica:
            return []
        replica.left = True
        rids = self._down(name, replica, died=False)
        del self._replicas[name]
        return rids

    def _down(self, name: str, replica: Replica, *, died: bool) -> list[str]:
        """A replica takes nothing any more. Returns the requests that it had."""
        rids = [rid for rid, running in self._running.items() if running.replica == name]
        for asked in self._questions.waiting_for(name):
            if (rid := asked.removeprefix(PLACE)) in self._unplaced:
                self._questions.forget(asked)
                del self._unplaced[rid]
                rids.append(rid)
        if replica.up:
            replica.up = False
            replica.loras.clear()
            self._placement.leave(name)
            with errors_logged("telling of a tree that is gone"):
                self.tree_changed(name, None)
        if name == self._ward:
            self._ward = None
        self._drop_pins(name)
        for rid in rids:
            self._running.pop(rid, None)
            self._held.pop(rid, None)
        if self.mover is not None:
            with errors_logged("ending moves"):
                self.mover.left(name)
        self._check_idle(name)
        self._questions.left(name, died=died)
        return rids

    def _drop_pins(self, name: str) -> None:
        self._pins = {limit: home for limit, home in self._pins.items() if home != name}

    def _check_idle(self, name: str) -> None:
        if name in self._idle and not self.requests_of(name):
            self._idle[name].set()

    def _join(self, name: str, replica: Replica) -> None:
        """A replica with an empty tree and no adapters is up: it gets the questions that wait."""
        self._placement.join(name, prefill=name in self.prefill)
        if replica.draining:
            self._placement.drain(name)
        replica.up, replica.gone = True, False
        self._questions.joined(name)

    def _came_back(self, name: str, replica: Replica) -> None:
        if replica.left:
            return
        try:
            self._check_model(name, replica)
        except EngineError as error:
            closing = asyncio.ensure_future(replica.ring.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._gave_up(name, replica, error)
            return
        self._join(name, replica)
        self._restarted()
        self._place_all()

    def _died(self, name: str, replica: Replica, error: WorkerDied) -> bool:
        return not replica.left and self._lost(error, self._down(name, replica, died=True))

    def _gave_up(self, name: str, replica: Replica, error: EngineError) -> None:
        if replica.left:
            return
        replica.gone = True
        left = sum(not other.gone for other in self._replicas.values())
        if left:
            log.error("replica %s is gone, %d of %d are left: %s", name, left, len(self._replicas), error)
        else:
            self._give_up(error)

    def _give_up(self, error: EngineError) -> None:
        self._questions.clear()
        self._unplaced.clear()
        self._fleet_gave_up(error)

    # --- life -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        self.close_now()
        await asyncio.gather(*(replica.ring.aclose() for replica in self._replicas.values()), *self._closing)

    def close_now(self) -> None:
        """The part of `aclose` that needs no running event loop."""
        for replica in self._replicas.values():
            replica.ring.close_now()
        if self.mover is not None:
            self.mover.close()

    @property
    def _up(self) -> list[str]:
        """The replicas that take messages."""
        return [name for name, replica in self._replicas.items() if replica.up]

    @property
    def _rings(self) -> dict[str, FleetRing]:
        return {name: replica.ring for name, replica in self._replicas.items()}

    @property
    def max_prompt_tokens(self) -> int:
        """What every replica takes."""
        return min((ring.max_prompt_tokens for ring in self._rings.values() if ring.info), default=0)

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
        """Seconds since the last message from any ring that is up; 0 where there is none."""
        rings = self._rings
        return min((rings[name].heartbeat_age_s for name in self._up or rings), default=0.0)

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
                self._replicas[name].ring.send(message)
        elif isinstance(message, GetTree):
            raise TypeError("GetTree is for one replica.")
        else:
            self._questions.ask(message, self._receive)

    def send_alone(self, request: Generate) -> None:
        """Send a request to a replica that has none but such ones, and gets no others until `end_alone`."""
        self._alone.add(request.rid)
        self._begin(request)

    def end_alone(self) -> None:
        """Send other requests to that replica again."""
        self._alone.clear()
        ward, self._ward = self._ward, None
        if ward is not None and not self._replicas[ward].draining:
            self._placement.undrain(ward)
        self._place_all()

    def _ward_for(self) -> str | None:
        """The replica for a request that is to run alone; None while there is none, or it has others."""
        if self._ward is None:
            usable = [name for name, replica in self._replicas.items() if replica.up and replica.usable]
            free = [name for name in usable if name not in self.prefill] or usable
            if not free:
                return None
            self._ward = min(free, key=self.requests_of)
            self._placement.drain(self._ward)
        others = (key for key, running in self._running.items() if running.replica == self._ward)
        return self._ward if self._alone.issuperset(others) else None

    def _begin(self, request: Generate) -> None:
        """Place a request, after its prompt has been tokenised."""
        msgspec.msgpack.encode(request)  # raises at once what sending it would raise later
        self._unplaced[request.rid] = unplaced = Unplaced(request)
        ids = [part for part in request.prompt if not isinstance(part, str)]
        if request.chat is None and not request.preambles and len(ids) == len(request.prompt):
            unplaced.ids = tuple(itertools.chain(*ids))
            self._place(unplaced)
        else:
            message = Tokenize(
                rid=PLACE + request.rid,
                prompts=(request,),
                special=request.chat is None,
                entries=False,
            )
            self._questions.ask(message, functools.partial(self._tokenised, unplaced))

    def _tokenised(self, unplaced: Unplaced, answer: Answer) -> None:
        # A prompt that no tokenizer takes is refused by the replica's, in words that are about the request.
        unplaced.ids = answer.prompts[0].ids if isinstance(answer, Texts) else ()
        self._place(unplaced)

    def _place_all(self) -> None:
        """Send the requests that have waited for a replica."""
        for unplaced in list(self._unplaced.values()):
            if unplaced.ids is not None:
                self._place(unplaced)

    def _place(self, unplaced: Unplaced) -> None:
        """Send a request to its replica; it stays unplaced where none is up, and fails where that raises."""
        try:
            self._find_place(unplaced)
        except Exception as error:
            self._fail(unplaced.request.rid, error)

    def _fail(self, rid: str, error: Exception) -> None:
        """A request cannot be sent: it ends, and others go on."""
        log.error("a request could not be placed: %s", rid, exc_info=error)
        self._unplaced.pop(rid, None)
        self._held.pop(rid, None)
        self._ended(rid)
        self._receive(Failed(rid=rid, error=unsendable(error).to_info()))

    def _find_place(self, unplaced: Unplaced) -> None:
        request = unplaced.request
        hints = () if request.hint is None else request.hint.limits
        limits = [limit.id for limit in hints if limit.max_total_tokens is not None]
        pinned = next((self._pins[limit] for limit in limits if limit in self._pins), None)
        alone = request.rid in self._alone
        ward = self._ward_for() if alone else None
        if alone and ward is None:
            return
        scope = self._scope(request)
        work = unplaced.work(self._digests, scope, self._page_size)
        try:
            name = self._placement.place(work, time.monotonic(), ward or pinned, force=alone)
        except NoReplica:
            return
        for limit in limits:
            self._pins.pop(limit, None)
            self._pins[limit] = name
        while len(self._pins) > MOST_PINS:
            del self._pins[next(iter(self._pins))]
        del self._unplaced[request.rid]
        self._running[request.rid] = _Running(name, request.every_s > 0)
        if self.mover is None or alone or unplaced.aborts:
            self._send(name, unplaced)
            return
        self._held[request.rid] = unplaced
        send = functools.partial(self._send_held, name, unplaced)
        if not self.mover.fetch(name, work, request, unplaced.ids or (), scope, send):
            send()

    def _send_held(self, name: str, unplaced: Unplaced) -> None:
        """Send a request that has waited for pages; nothing where its replica has gone meanwhile."""
        if self._held.get(unplaced.request.rid) is unplaced:
            del self._held[unplaced.request.rid]
            try:
                self._send(name, unplaced)
            except Exception as error:
                self._fail(unplaced.request.rid, error)

    def _send(self, name: str, unplaced: Unplaced) -> None:
        ring = self._replicas[name].ring
        ring.send(unplaced.request)
        for abort in unplaced.aborts:
            ring.send(abort)

    def _scope(self, request: Generate) -> str:
        """The prefix tree's scope for the request."""
        adapters = (replica.loras for replica in self._replicas.values())
        adapter = next((own[request.lora] for own in adapters if request.lora in own), None)
        return tree_scope(str(request.scope), adapter if request.lora else None)

    def _abort(self, abort: Abort) -> None:
        if abort.rid in self._unplaced:
            self._unplaced[abort.rid].aborts.append(abort)
        elif abort.rid in self._held:
            self._held[abort.rid].aborts.append(abort)
            if self.mover is not None:
                self.mover.forget(abort.rid)
        elif abort.rid in self._running:
            self._replicas[self._running[abort.rid].replica].ring.send(abort)

    # --- from the rings ---------------------------------------------------------------------------

    def _received(self, name: str, replica: Replica, message: ToFrontend) -> None:
        if replica.left:
            return  # its requests go on elsewhere, behind what it has said before
        if isinstance(message, StepText):
            self._count(message)
            self._receive(message)
        elif isinstance(message, TreeChange):
            events = TreeEvents(message.epoch, message.number, message.added, message.removed, message.whole)
            if not replica.up:
                return
            if not self._placement.apply(name, events):
                replica.ring.send(GetTree())
            elif self._placement.complete(name):  # else the whole that was asked for has it
                self.tree_changed(name, message)
        elif isinstance(message, Failed) and message.rid in self._running:
            self._ended(message.rid)
            self._receive(message)
        elif isinstance(message, Reply | Texts | Failed):
            if self.mover is not None and self.mover.answered(name, message):
                self._check_all_idle()
                return
            self._questions.answered(name, message)

    def _check_all_idle(self) -> None:
        for name in self._idle:
            self._check_idle(name)

    def _count(self, message: StepText) -> None:
        now = time.monotonic()
        for chunk in message.chunks:
            if chunk.ids and (running := self._running.get(chunk.rid)) is not None:
                held_s = chunk.usage.writing_s if running.held and chunk.usage is not None else 0.0
                with errors_logged("counting output"):
                    self._placement.progress(chunk.rid, len(chunk.ids), now - held_s)
            if chunk.finish is not None:
                if self.mover is not None:
                    with errors_logged("exporting a prompt"):
                        self.mover.prefilled(chunk.rid)
                self._ended(chunk.rid)
                self._check_all_idle()

    def _ended(self, rid: str) -> None:
        running = self._running.pop(rid, None)
        with errors_logged("ending a request"):
            self._placement.ended(rid)
        if running is not None and self._idle:
            self._check_idle(running.replica)
        if running is not None and running.replica == self._ward and rid not in self._alone:
            self._place_all()
