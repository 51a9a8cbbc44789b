"""Several rings behind one frontend: to the frontend they are one ring.

    a request       its prompt's ids from some tokenizer → `Placement` → its replica (`Router`)
    an abort        the replica that has the request
    a question      one replica, or all of them, whose answers are merged (`Questions`)
    a death         the replica's requests go to others with the output that they have (`Members`)
    a drain         nothing new goes there; what it has ends, or goes on elsewhere (`Members`)

A message for which no replica is up waits until one is. Rings join and leave by name; `local` makes those of
this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from ramify.errors import EngineError, WorkerDied
from ramify.messages import Generate, ModelInfo
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
    ToTokenizer,
    TreeChange,
)
from ramify.runtime.fleet.index import TreeEvents
from ramify.runtime.fleet.members import Members
from ramify.runtime.fleet.mover import Mover
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.fleet.questions import Questions
from ramify.runtime.fleet.ring import FleetRing, MakeRing, Replica
from ramify.runtime.fleet.routing import Router
from ramify.runtime.kv_transfer.store import ImageStore


class RingFleet:
    """Rings by name, with the methods of `RingSupervisor`.

    Parameters
    ----------
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
        *,
        receive: Callable[[ToFrontend], None],
        lost: Callable[[WorkerDied | None, Sequence[str]], bool],
        restarted: Callable[[], None],
        gave_up: Callable[[EngineError], None],
    ) -> None:
        self._receive = receive
        self._replicas: dict[str, Replica] = {}
        self._placement = Placement()
        self._questions = Questions(self._replicas)
        self._router = Router(
            self._replicas,
            self._placement,
            self._questions,
            receive=receive,
            less=lambda name: self._members.check_idle(name),
        )
        self._members = Members(
            self._replicas,
            self._placement,
            self._questions,
            self._router,
            received=self._received,
            lost=lost,
            restarted=restarted,
            gave_up=gave_up,
        )

    def move_pages(self, make_store: Callable[[], ImageStore]) -> None:
        """Move cached pages between the rings from now on, and off those that drain."""
        self._router.mover = mover = Mover(
            self._placement,
            send=lambda name, message: self._replicas[name].ring.send(message),
            page_bytes=lambda: min((self._replicas[name].ring.page_bytes for name in self._up), default=0),
            make_store=make_store,
        )
        self._members.before_leaving = mover.evacuate

    def watch_trees(self, changed: Callable[[str, TreeChange | None], None]) -> None:
        """From now on `changed` is called with a replica's name and what has changed in its tree; with None
        where the tree is gone."""
        self._members.tree_changed = changed

    # --- replicas come and go ---------------------------------------------------------------------

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """By name. They change with what this class is told, and with deaths."""
        return self._replicas

    def requests_of(self, name: str) -> int:
        """See `Router.count`."""
        return self._router.count(name)

    async def add(self, name: str, make: MakeRing) -> None:
        """Start the ring that `make` gives, as the replica `name`. Raises what keeps it from starting."""
        await self._members.start(name, self._members.hold(name, make))

    async def drain(self, name: str, limit_s: float, *, last: bool = False) -> None:
        """See `Members.drain`."""
        await self._members.drain(name, limit_s, last=last)

    async def remove(self, name: str) -> None:
        """See `Members.remove`."""
        await self._members.remove(name)

    # --- life -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        if self.mover is not None:
            self.mover.close()
        rings = [ring.aclose() for ring in self._rings.values()]
        await asyncio.gather(*rings, *self._members.closing)

    def close_now(self) -> None:
        """The part of `aclose` that needs no running event loop."""
        for ring in self._rings.values():
            ring.close_now()
        if self.mover is not None:
            self.mover.close()

    @property
    def info(self) -> ModelInfo | None:
        """See `Members.info`."""
        return self._members.info

    @property
    def mover(self) -> Mover | None:
        """Moves pages between the rings: see `move_pages`."""
        return self._router.mover

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

    @property
    def _up(self) -> list[str]:
        """The replicas that take messages."""
        return [name for name, replica in self._replicas.items() if replica.up]

    @property
    def _rings(self) -> dict[str, FleetRing]:
        return {name: replica.ring for name, replica in self._replicas.items()}

    # --- to the rings -----------------------------------------------------------------------------

    def send(self, message: ToTokenizer) -> None:
        """Send a message to the replicas that it is for."""
        if isinstance(message, Generate):
            self._router.send(message)
        elif isinstance(message, Abort):
            self._router.abort(message)
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
        """See `Router.send_alone`."""
        self._router.send_alone(request)

    def end_alone(self) -> None:
        """See `Router.end_alone`."""
        self._router.end_alone()

    # --- from the rings ---------------------------------------------------------------------------

    def _received(self, name: str, replica: Replica, message: ToFrontend) -> None:
        if replica.left:
            return  # its requests go on elsewhere, behind what it has said before
        if isinstance(message, StepText):
            self._router.heard(message)
            self._members.check_all_idle()
            self._receive(message)
        elif isinstance(message, TreeChange):
            self._tree_changed(name, replica, message)
        elif isinstance(message, Failed) and self._router.placed(message.rid):
            self._router.ended(message.rid)
            self._receive(message)
        elif isinstance(message, Reply | Texts | Failed):
            if self.mover is not None and self.mover.answered(name, message):
                self._members.check_all_idle()
                return
            self._questions.answered(name, message)

    def _tree_changed(self, name: str, replica: Replica, change: TreeChange) -> None:
        if not replica.up:
            return
        events = TreeEvents(change.epoch, change.number, change.added, change.removed, change.whole)
        if not self._placement.apply(name, events):
            replica.ring.send(GetTree())
        elif self._placement.complete(name):  # else the whole that was asked for has it
            self._members.tree_changed(name, change)
