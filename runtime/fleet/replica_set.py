"""The replicas of a fleet by name: they start, join, drain, leave, die and come back.

starts       must have the model and the page size of the others
joins        has an empty tree and no adapters; gets the control calls and requests that wait
drains       gets no new requests; its requests end, or continue on other replicas
dies         is restarted; its requests continue on others, after the output so far (decision 0050)
is gone      has died too often, and is not restarted
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ramify.engine_messages import ToFrontend
from ramify.errors import EngineError, InvalidRequest, NotFound, WorkerDied
from ramify.messages import ModelInfo
from ramify.runtime.faults import errors_logged
from ramify.runtime.fleet.control_calls import ControlCalls
from ramify.runtime.fleet.kv_connector import KVConnector
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.fleet.replica import EngineEvents, FleetEvents, MakeEngine, Replica
from ramify.runtime.fleet.routing import Router

log = logging.getLogger("ramify")


class ReplicaSet:
    """The replicas of a fleet, `by_name`. Only this class adds and removes them.

    connector : moves cached pages between replicas; None if pages are not moved
    prefill : names of the prefill replicas, which compute prompts for the others
    received : called with every message of an engine core, and with the name and replica that it came from
    events : the fleet's callbacks
    """

    def __init__(
        self,
        by_name: dict[str, Replica],
        placement: Placement,
        control_calls: ControlCalls,
        connector: KVConnector | None,
        router: Router,
        *,
        prefill: frozenset[str],
        received: Callable[[str, Replica, ToFrontend], None],
        events: FleetEvents,
    ) -> None:
        self.by_name = by_name
        self._placement = placement
        self._control_calls = control_calls
        self._connector = connector
        self._router = router
        self._prefill = prefill
        self._received = received
        self._events = events
        self.info: ModelInfo | None = None
        """Description of the model, which all replicas share; None before the first replica has started."""
        self.closing: set[asyncio.Future[None]] = set()
        """Futures of engine cores that are being closed because they came back with another model."""

    # --- start ------------------------------------------------------------------------------------

    def hold(self, name: str, make: MakeEngine) -> Replica:
        """Add the replica `name` with the engine core from `make`, without starting it. Raises
        `InvalidRequest` if the name is in use."""
        if name in self.by_name:
            raise InvalidRequest(f"There is a replica {name!r}.", field="name")
        events = EngineEvents(
            receive=lambda message: self._received(name, replica, message),
            died=lambda error: self._died(name, replica, error),
            restarted=lambda: self._came_back(name, replica),
            gave_up=lambda error: self._gave_up(name, replica, error),
        )
        replica = self.by_name[name] = Replica(make(events))
        return replica

    async def start(self, name: str, replica: Replica) -> None:
        """Start the engine core of a replica that `hold` has added. If the start fails, the replica is
        removed and the error is raised."""
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
        """Move cached pages of a drained replica to the others, while it is still up."""
        if self._connector is not None and replica.up:
            try:
                await self._connector.evacuate(name)
            except Exception:  # the pages are computed again
                log.exception("replica %s leaves without preparation", name)

    def _check_others(self, name: str) -> None:
        if not any(other.usable for key, other in self.by_name.items() if key != name):
            raise InvalidRequest(
                f"Replica {name} is the last one that takes requests.",
                field="name",
                remedy="Shut the engine down, or add another one first where replicas can be added.",
            )

    async def remove(self, name: str) -> None:
        """Stop a replica now. Its requests continue on other replicas, after the output so far. Raises
        `NotFound`."""
        replica = self._replica(name)
        rids = self._forget(name, replica)
        self._events.lost(None, rids)
        self._router.place_all()
        await replica.engine.aclose()

    def _replica(self, name: str) -> Replica:
        if name not in self.by_name:
            names = ", ".join(self.by_name) or "none"
            raise NotFound(f"There is no replica {name!r}; there are {names}.", field="name")
        return self.by_name[name]

    def _forget(self, name: str, replica: Replica) -> list[str]:
        """Remove a replica from the fleet. Returns the ids of its requests."""
        if self.by_name.get(name) is not replica:
            return []
        replica.left = True
        rids = self._down(name, replica, died=False)
        del self.by_name[name]
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
            self.closing.add(closing)
            closing.add_done_callback(self.closing.discard)
            self._gave_up(name, replica, error)
            return
        self._join(name, replica)
        self._events.restarted()
        self._router.place_all()

    def _join(self, name: str, replica: Replica) -> None:
        """Mark a replica as up, with an empty tree and no adapters, and send it the control calls that
        wait."""
        self._placement.join(name, prefill=name in self._prefill)
        if replica.draining:
            self._placement.drain(name)
        replica.up, replica.gone = True, False
        self._control_calls.joined(name)

    def _gave_up(self, name: str, replica: Replica, error: EngineError) -> None:
        if replica.left:
            return
        replica.gone = True
        left = sum(not other.gone for other in self.by_name.values())
        if left:
            log.error("replica %s is gone, %d of %d are left: %s", name, left, len(self.by_name), error)
        else:
            self.give_up(error)

    def give_up(self, error: EngineError) -> None:
        """End all requests and control calls that wait for a replica, since no replica is left."""
        self._control_calls.clear()
        self._router.clear()
        self._events.gave_up(error)
