"""Several engine cores behind one frontend: to the frontend they are one engine core.

    a request       its prompt's ids from some tokenizer → `Placement` → its replica (`Router`)
    an abort        the replica that has the request
    a question      one replica, or all of them, whose answers are merged (`ControlCalls`)
    a death         the replica's requests go to others with the output that they have (`ReplicaSet`)
    a drain         nothing new goes there; what it has ends, or goes on elsewhere (`ReplicaSet`)

A message for which no replica is up waits until one is. Engine cores join and leave by name; `local` makes
those of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from ramify.engine_messages import (
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
from ramify.errors import EngineError, WorkerDied
from ramify.messages import Generate, ModelInfo
from ramify.runtime.fleet.control_calls import ControlCalls
from ramify.runtime.fleet.index import TreeEvents
from ramify.runtime.fleet.kv_connector import KVConnector
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.fleet.replica import EngineCore, MakeEngine, Replica
from ramify.runtime.fleet.replica_set import ReplicaSet
from ramify.runtime.fleet.routing import Router
from ramify.runtime.kv_transfer.store import SnapshotStore


class ReplicaFleet:
    """Engine cores by name, with the methods of `EngineSupervisor`.

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
        self._control_calls = ControlCalls(self._replicas)
        self._router = Router(
            self._replicas,
            self._placement,
            self._control_calls,
            receive=receive,
            less=lambda name: self._replica_set.check_idle(name),
        )
        self._replica_set = ReplicaSet(
            self._replicas,
            self._placement,
            self._control_calls,
            self._router,
            received=self._received,
            lost=lost,
            restarted=restarted,
            gave_up=gave_up,
        )

    def move_pages(self, make_store: Callable[[], SnapshotStore]) -> None:
        """Move cached pages between the engine cores from now on, and off those that drain."""
        self._router.connector = connector = KVConnector(
            self._placement,
            send=lambda name, message: self._replicas[name].engine.send(message),
            page_bytes=lambda: min((self._replicas[name].engine.page_bytes for name in self._up), default=0),
            make_store=make_store,
        )
        self._replica_set.before_leaving = connector.evacuate

    def watch_trees(self, changed: Callable[[str, TreeChange | None], None]) -> None:
        """From now on `changed` is called with a replica's name and what has changed in its tree; with None
        where the tree is gone."""
        self._replica_set.tree_changed = changed

    # --- replicas come and go ---------------------------------------------------------------------

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """By name. They change with what this class is told, and with deaths."""
        return self._replicas

    def requests_of(self, name: str) -> int:
        """See `Router.count`."""
        return self._router.count(name)

    async def add(self, name: str, make: MakeEngine) -> None:
        """Start the engine core that `make` gives, as the replica `name`. Raises what keeps it from
        starting."""
        await self._replica_set.start(name, self._replica_set.hold(name, make))

    async def drain(self, name: str, limit_s: float, *, last: bool = False) -> None:
        """See `ReplicaSet.drain`."""
        await self._replica_set.drain(name, limit_s, last=last)

    async def remove(self, name: str) -> None:
        """See `ReplicaSet.remove`."""
        await self._replica_set.remove(name)

    # --- life -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        if self.connector is not None:
            self.connector.close()
        engines = [engine.aclose() for engine in self._engines.values()]
        await asyncio.gather(*engines, *self._replica_set.closing)

    def close_now(self) -> None:
        """The part of `aclose` that needs no running event loop."""
        for engine in self._engines.values():
            engine.close_now()
        if self.connector is not None:
            self.connector.close()

    @property
    def info(self) -> ModelInfo | None:
        """See `ReplicaSet.info`."""
        return self._replica_set.info

    @property
    def connector(self) -> KVConnector | None:
        """Moves pages between the engine cores: see `move_pages`."""
        return self._router.connector

    @property
    def max_prompt_tokens(self) -> int:
        """What every replica takes."""
        return min((engine.max_prompt_tokens for engine in self._engines.values() if engine.info), default=0)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by replica and role, such as "1/scheduler"."""
        return {
            f"{name}/{role}": pid
            for name, engine in self._engines.items()
            for role, pid in engine.pids.items()
        }

    @property
    def restarting(self) -> bool:
        """No replica is up."""
        return not self._up

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message from any engine core that is up; 0 where there is none."""
        engines = self._engines
        return min((engines[name].heartbeat_age_s for name in self._up or engines), default=0.0)

    @property
    def _up(self) -> list[str]:
        """The replicas that take messages."""
        return [name for name, replica in self._replicas.items() if replica.up]

    @property
    def _engines(self) -> dict[str, EngineCore]:
        return {name: replica.engine for name, replica in self._replicas.items()}

    # --- to the engine cores -----------------------------------------------------------------------------

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
                self._replicas[name].engine.send(message)
        elif isinstance(message, GetTree):
            raise TypeError("GetTree is for one replica.")
        else:
            self._control_calls.ask(message, self._receive)

    def send_alone(self, request: Generate) -> None:
        """See `Router.send_alone`."""
        self._router.send_alone(request)

    def end_alone(self) -> None:
        """See `Router.end_alone`."""
        self._router.end_alone()

    # --- from the engine cores ---------------------------------------------------------------------------

    def _received(self, name: str, replica: Replica, message: ToFrontend) -> None:
        if replica.left:
            return  # its requests go on elsewhere, behind what it has said before
        if isinstance(message, StepText):
            self._router.heard(message)
            self._replica_set.check_all_idle()
            self._receive(message)
        elif isinstance(message, TreeChange):
            self._tree_changed(name, replica, message)
        elif isinstance(message, Failed) and self._router.placed(message.rid):
            self._router.ended(message.rid)
            self._receive(message)
        elif isinstance(message, Reply | Texts | Failed):
            if self.connector is not None and self.connector.answered(name, message):
                self._replica_set.check_all_idle()
                return
            self._control_calls.answered(name, message)

    def _tree_changed(self, name: str, replica: Replica, change: TreeChange) -> None:
        if not replica.up:
            return
        events = TreeEvents(change.epoch, change.number, change.added, change.removed, change.whole)
        if not self._placement.apply(name, events):
            replica.engine.send(GetTree())
        elif self._placement.complete(name):  # else the whole that was asked for has it
            self._replica_set.tree_changed(name, change)
