"""A fleet: the engine cores of one or several replicas behind one frontend, used as if they were one.

    a request        the only replica, or the one that `Placement` chooses (`Router`)
    an abort         the replica that has the request
    a control call   one replica, or all of them, whose answers are merged (`ControlCalls`)
    a death          the replica's requests are sent again, each with the output it has so far (`ReplicaSet`)
    a drain          the replica gets no new requests; its requests end, or continue elsewhere (`ReplicaSet`)

A message waits while no replica is up for it. Replicas join and leave by name; `local` makes the replicas of
this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

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
from ramify.messages import Generate, ModelInfo
from ramify.runtime.fleet.control_calls import ControlCalls
from ramify.runtime.fleet.index import TreeEvents
from ramify.runtime.fleet.kv_connector import KVConnector
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.fleet.replica import (
    FleetEvents,
    Later,
    MakeEngine,
    Replica,
    ReplicaStatus,
    status_of,
)
from ramify.runtime.fleet.replica_set import ReplicaSet
from ramify.runtime.fleet.routing import Router
from ramify.runtime.kv_transfer.store import SnapshotStore


class ReplicaOperator(Protocol):
    """Interface for an operator's orders: replicas are added, drained and restarted while the fleet
    serves."""

    async def add_one(self) -> str: ...
    async def drain(self, name: str, limit_s: float) -> None: ...
    async def restart(self, name: str, limit_s: float) -> None: ...


class ReplicaFleet:
    """Replicas by name. Everything runs on one event loop.

    Parameters
    ----------
    events
        Callbacks to the frontend.
    make_store
        Makes the store for KV snapshots, through which cached pages are moved between replicas. None: pages
        are not moved.
    prefill
        Names of the prefill replicas, which compute prompts for the others.
    single
        The fleet has one replica and gets no other: counters carry no replica names, and requests are sent
        without placement.
    placement
        Chooses replicas; None for a new `Placement`.
    later
        Schedules a function to run after a number of seconds; None for the running loop's `call_later`.
    """

    def __init__(
        self,
        events: FleetEvents,
        *,
        make_store: Callable[[], SnapshotStore] | None = None,
        prefill: frozenset[str] = frozenset(),
        single: bool = False,
        placement: Placement | None = None,
        later: Later | None = None,
    ) -> None:
        self._events = events
        self._max_prompt_tokens = 0
        self._replicas: dict[str, Replica] = {}
        self._placement = placement or Placement()
        self._control_calls = ControlCalls(self._replicas, labelled=not single, later=later)
        self._connector: KVConnector | None = None
        if make_store is not None:
            self._connector = KVConnector(
                self._placement,
                send=lambda name, message: self._replicas[name].engine.send(message),
                page_bytes=lambda: min((one.engine.page_bytes for one in self._up.values()), default=0),
                make_store=make_store,
                later=later,
            )
        self._router = Router(
            self._replicas,
            self._placement,
            self._control_calls,
            self._connector,
            prefill=prefill,
            receive=events.receive,
            single=single,
        )
        self._replica_set = ReplicaSet(
            self._replicas,
            self._placement,
            self._control_calls,
            self._connector,
            self._router,
            prefill=prefill,
            received=self._received,
            events=events,
        )

    # --- replicas come and go ---------------------------------------------------------------------

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """Replicas by name. Entries are added and removed by orders to this class; a replica that has died
        keeps its entry."""
        return self._replicas

    @property
    def operator(self) -> ReplicaOperator:
        """Interface for an operator's orders. Raises `UnsupportedField` if the replicas are started by
        something else."""
        raise NotImplementedError

    def statuses(self) -> list[ReplicaStatus]:
        """The current status of every replica."""
        return [
            status_of(name, one.engine, one.state, self._router.count(name))
            for name, one in self._replicas.items()
        ]

    async def start(self) -> None:
        """Start the first replicas. Raises the error if one of them cannot start."""
        raise NotImplementedError

    async def add(self, name: str, make: MakeEngine) -> None:
        """Start the engine core that `make` returns, as the replica `name`. Raises the error if it cannot
        start."""
        await self._replica_set.start(name, self._replica_set.hold(name, make))

    async def drain(self, name: str, limit_s: float, *, last: bool = False) -> None:
        """See `ReplicaSet.drain`."""
        await self._replica_set.drain(name, limit_s, last=last)

    async def remove(self, name: str) -> None:
        """See `ReplicaSet.remove`."""
        await self._replica_set.remove(name)

    # --- life -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        if self._connector is not None:
            self._connector.close()
        engines = [replica.engine.aclose() for replica in self._replicas.values()]
        await asyncio.gather(*engines, *self._replica_set.closing)

    def close_now(self) -> None:
        """Do the part of `aclose` that needs no running event loop."""
        for replica in self._replicas.values():
            replica.engine.close_now()
        if self._connector is not None:
            self._connector.close()

    @property
    def info(self) -> ModelInfo | None:
        """See `ReplicaSet.info`."""
        return self._replica_set.info

    @property
    def max_prompt_tokens(self) -> int:
        """Length in tokens of the longest prompt that all replicas accept; the last known value while no
        replica has started."""
        engines = [replica.engine for replica in self._replicas.values()]
        limits = [engine.max_prompt_tokens for engine in engines if engine.info]
        if limits:
            self._max_prompt_tokens = min(limits)
        return self._max_prompt_tokens

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by replica and role, such as "1/scheduler"."""
        return {
            f"{name}/{role}": pid
            for name, replica in self._replicas.items()
            for role, pid in replica.engine.pids.items()
        }

    @property
    def restarting(self) -> bool:
        """Whether no replica is up."""
        return not self._up

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message from any replica that is up, or from any replica if none is up. 0
        for a fleet without replicas."""
        some = self._up or self._replicas
        return min((replica.engine.heartbeat_age_s for replica in some.values()), default=0.0)

    @property
    def _up(self) -> dict[str, Replica]:
        """The replicas that take messages."""
        return {name: replica for name, replica in self._replicas.items() if replica.up}

    # --- to the replicas --------------------------------------------------------------------------

    def send(self, message: ToTokenizer) -> None:
        """Send a message to the replicas that it is for. Raises the encoding error if a request cannot be
        encoded."""
        if isinstance(message, Generate):
            self._router.send(message)
        elif isinstance(message, Abort):
            self._router.abort(message)
        elif isinstance(message, AwaitTools | EndProgram):
            if isinstance(message, EndProgram):
                self._placement.program_ended(message.program)
            for replica in self._up.values():  # those that do not know the program ignore it
                replica.engine.send(message)
        elif isinstance(message, GetTree):
            raise TypeError("GetTree is for one replica.")
        else:
            self._control_calls.ask(message, self._events.receive)

    def send_alone(self, request: Generate) -> None:
        """See `Router.send_alone`."""
        self._router.send_alone(request)

    def end_alone(self) -> None:
        """See `Router.end_alone`."""
        self._router.end_alone()

    # --- from the replicas ------------------------------------------------------------------------

    def _received(self, name: str, replica: Replica, message: ToFrontend) -> None:
        if replica.left:
            return  # its requests continue on other replicas, after the output that has arrived
        if isinstance(message, StepText):
            self._router.output_arrived(message)
            self._events.receive(message)
        elif isinstance(message, TreeChange):
            self._tree_changed(name, replica, message)
        elif isinstance(message, Failed) and self._router.placed(message.rid):
            self._router.ended(message.rid)
            self._events.receive(message)
        elif isinstance(message, Reply | Texts | Failed):
            if self._connector is not None and self._connector.answered(name, message):
                self._router.check_idle()
                return
            self._control_calls.answered(name, message)

    def _tree_changed(self, name: str, replica: Replica, change: TreeChange) -> None:
        if not replica.up:
            return
        events = TreeEvents(change.epoch, change.number, change.added, change.removed, change.whole)
        if not self._placement.apply(name, events):
            replica.engine.send(GetTree())
        elif self._placement.complete(name):  # else the whole tree that was asked for contains it
            self._events.tree_changed(name, change)
