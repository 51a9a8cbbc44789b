"""A fleet: the engine cores of one or several replicas behind one frontend, used as if they were one.

    a request        the only replica, or the one that `Placement` chooses (`Router`)
    an abort         the replica that has the request
    a control call   one replica, or all of them, whose answers are merged (`ControlCalls`)
    a death          the replica is restarted; its requests are sent again, each with the output it has so far
    a drain          the replica gets no new requests; its requests end, or continue elsewhere

A replica that joins must have the model and the page size of the others. It has an empty tree and no
adapters, and gets the control calls and requests that wait.

A message waits while no replica is up for it. Replicas join and leave by name; `local` makes the replicas of
this machine.
"""

from __future__ import annotations

import asyncio
import logging
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
from ramify.errors import EngineError, InvalidRequest, NotFound, WorkerDied
from ramify.messages import Generate
from ramify.model_info import ModelInfo
from ramify.runtime.faults import errors_logged
from ramify.runtime.fleet.control_calls import ControlCalls
from ramify.runtime.fleet.kv_connector import KVConnector
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.fleet.replica import (
    EngineEvents,
    FleetEvents,
    Later,
    MakeEngine,
    Replica,
    ReplicaStatus,
)
from ramify.runtime.fleet.routing import Router
from ramify.runtime.kv_transfer.files import SnapshotStore

log = logging.getLogger("ramify")


class ReplicaOperator(Protocol):
    """Interface for an operator's orders: to add, drain and restart replicas while the fleet serves."""

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
        self._prefill = prefill
        self.info: ModelInfo | None = None
        """Description of the model, which all replicas share; None before the first replica has started."""
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
        self._closing: set[asyncio.Future[None]] = set()
        """Futures of engine cores that are being closed because they came back with another model."""

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
            ReplicaStatus(
                name=name,
                state=one.state,
                requests=self._router.count(name),
                heartbeat_age_s=one.engine.heartbeat_age_s if one.engine.info is not None else 0.0,
                pids=dict(one.engine.pids),
            )
            for name, one in self._replicas.items()
        ]

    async def start(self) -> None:
        """Start the first replicas. Raises the error if one of them cannot start."""
        raise NotImplementedError

    async def add(self, name: str, make: MakeEngine) -> None:
        """Start the engine core that `make` returns, as the replica `name`. Raises the error if it cannot
        start, and `InvalidRequest` if the name is in use."""
        await self._start(name, self._register(name, make))

    def _register(self, name: str, make: MakeEngine) -> Replica:
        if name in self._replicas:
            raise InvalidRequest(f"There is a replica {name!r}.", field="name")
        events = EngineEvents(
            receive=lambda message: self._received(name, replica, message),
            died=lambda error: self._died(name, replica, error),
            restarted=lambda: self._came_back(name, replica),
            gave_up=lambda error: self._gave_up(name, replica, error),
        )
        replica = self._replicas[name] = Replica(make(events))
        return replica

    async def _start(self, name: str, replica: Replica) -> None:
        """Start the engine core of a registered replica. If the start fails, the replica is removed and the
        error is raised."""
        try:
            await replica.engine.start()
            if replica.left:
                raise EngineError(f"Replica {name} was stopped while it started.")
            self._check_model(name, replica)
        except BaseException:
            self._forget(name, replica)
            await replica.engine.aclose()
            raise
        if not replica.engine.restarting:  # else it has died again, and its supervisor restarts it
            self._came_back(name, replica)

    def _check_model(self, name: str, replica: Replica) -> None:
        """Raise `EngineError` unless the model and page size are those of the first replica that started.

        Requests can continue on another replica only if the model is the same. Digests of page ends can be
        compared only if pages have the same size.
        """
        info = replica.engine.info
        assert info is not None, "the engine core has started"
        if self.info is None:
            self.info = info
            self._placement.page_size = info.page_size
        elif info.page_size != self.info.page_size:
            raise EngineError(
                f"Replica {name} has pages of {info.page_size} tokens, and the others of"
                f" {self.info.page_size}.",
                remedy="Give all of them one page_size (--page-size).",
            )
        elif info.fingerprint != self.info.fingerprint:
            raise EngineError(
                f"Replica {name} has another model than the fleet: {info.name}, {self.info.name}.",
                remedy="Were the model's files changed? Restart the engine.",
            )

    # --- drain and leave --------------------------------------------------------------------------

    async def drain(self, name: str, limit_s: float, *, last: bool = False) -> None:
        """Place nothing more on a replica, wait for its requests, and stop it.

        Requests that have not ended after `limit_s` seconds continue on other replicas, after the output so
        far. Raises `NotFound`, and `InvalidRequest` if the replica is already draining, or if it is the last
        usable one and `last` is not set.
        """
        replica = self._replica(name)
        if replica.draining:
            raise InvalidRequest(f"Replica {name} drains already.", field="name")
        if not (replica.gone or last):
            self._check_others(name)
        replica.draining = True
        self._router.unpin(name)
        try:
            if replica.up:
                self._placement.drain(name)
                await self._router.wait_idle(name, limit_s)
                await self._evacuate(name, replica)
            if not (replica.gone or last):
                self._check_others(name)
        except BaseException:
            replica.draining = False
            if replica.up:
                self._placement.undrain(name)
                self._router.place_all()
            raise
        await self.remove(name)

    async def _evacuate(self, name: str, replica: Replica) -> None:
        if self._connector is not None and replica.up:
            try:
                await self._connector.evacuate(name)
            except Exception:  # the pages are computed again
                log.exception("replica %s leaves without preparation", name)

    def _check_others(self, name: str) -> None:
        if not any(other.usable for key, other in self._replicas.items() if key != name):
            raise InvalidRequest(
                f"Replica {name} is the last one that takes requests.",
                field="name",
                remedy="Shut the engine down, or add another one first where replicas can be added.",
            )

    async def remove(self, name: str) -> None:
        """Stop a replica now. Its requests continue elsewhere after the output so far. Raises `NotFound`."""
        replica = self._replica(name)
        rids = self._forget(name, replica)
        self._events.lost(None, rids)
        self._router.place_all()
        await replica.engine.aclose()

    def _replica(self, name: str) -> Replica:
        if name not in self._replicas:
            names = ", ".join(self._replicas) or "none"
            raise NotFound(f"There is no replica {name!r}; there are {names}.", field="name")
        return self._replicas[name]

    def _forget(self, name: str, replica: Replica) -> list[str]:
        """Remove a replica from the fleet. Returns the ids of its requests."""
        if self._replicas.get(name) is not replica:
            return []
        replica.left = True
        rids = self._down(name, replica, died=False)
        del self._replicas[name]
        return rids

    # --- die and come back ------------------------------------------------------------------------

    def _died(self, name: str, replica: Replica, error: WorkerDied) -> bool:
        if replica.left:
            return False
        explained = self._events.lost(error, self._down(name, replica, died=True))
        self._router.place_all()  # suspects that waited for this replica to have no other requests
        return explained

    def _down(self, name: str, replica: Replica, *, died: bool) -> list[str]:
        """Mark a replica as down, and drop its state. Returns the ids of its requests."""
        rids = self._router.lose(name, died=died)
        if replica.up:
            replica.up = False
            replica.loras.clear()
            self._placement.leave(name)
            with errors_logged("telling of a tree that is gone"):
                self._events.tree_changed(name, None)
        if self._connector is not None:
            with errors_logged("ending moves"):
                self._connector.left(name)
        self._router.check_idle()
        self._control_calls.left(name, died=died)
        return rids

    def _came_back(self, name: str, replica: Replica) -> None:
        if replica.left:
            return
        try:
            self._check_model(name, replica)
        except EngineError as error:
            closing = asyncio.ensure_future(replica.engine.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._gave_up(name, replica, error)
            return
        self._placement.join(name, prefill=name in self._prefill)
        if replica.draining:
            self._placement.drain(name)
        replica.up, replica.gone = True, False
        self._control_calls.joined(name)
        self._events.restarted()
        self._router.place_all()

    def _gave_up(self, name: str, replica: Replica, error: EngineError) -> None:
        if replica.left:
            return
        replica.gone = True
        left = sum(not other.gone for other in self._replicas.values())
        if left:
            log.error("replica %s is gone, %d of %d are left: %s", name, left, len(self._replicas), error)
        else:
            self._end(error)

    def _end(self, error: EngineError) -> None:
        """End all requests and control calls that wait for a replica, since no replica is left."""
        self._control_calls.clear()
        self._router.clear()
        self._events.gave_up(error)

    # --- life -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        if self._connector is not None:
            self._connector.close()
        engines = [replica.engine.aclose() for replica in self._replicas.values()]
        await asyncio.gather(*engines, *self._closing)

    def close_now(self) -> None:
        """Do the part of `aclose` that needs no running event loop."""
        for replica in self._replicas.values():
            replica.engine.close_now()
        if self._connector is not None:
            self._connector.close()

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
        return {name: replica for name, replica in self._replicas.items() if replica.up}

    # --- to the replicas --------------------------------------------------------------------------

    def send(self, message: ToTokenizer) -> None:
        """Send a message to its replicas. Raises the encoding error if a request cannot be encoded."""
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
        if not self._placement.apply(name, change):
            replica.engine.send(GetTree())
        elif self._placement.complete(name):  # else the whole tree that was asked for contains it
            self._events.tree_changed(name, change)
