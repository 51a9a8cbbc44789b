"""The replicas of a fleet by name: they start, join, drain, leave, die and come back.

starts       its model and its page size are those of the others
joins        with an empty tree and without adapters: it gets the calls and requests that wait
drains       nothing new goes there; what it has ends, or goes on elsewhere
dies         its requests go to others with the output that they have (decision 0050), and it comes back
is gone      it has died too often, and does not come back by itself
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
    """The replicas `by_name`, which this class alone adds and removes.

    connector : moves cached pages between replicas; None where they are not moved
    prefill : names of the replicas that compute prompts for the others
    received : called with the name, the replica and each message of its engine core
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
        """Description of the model that all replicas have; None before the first has started."""
        self.closing: set[asyncio.Future[None]] = set()
        """Closings of engine cores that have come back with another model."""

    # --- start ------------------------------------------------------------------------------------

    def hold(self, name: str, make: MakeEngine) -> Replica:
        """Add the replica `name`, with an engine core that is not started."""
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
        """Start the engine core of `hold`. The replica is not in the fleet any more where this raises."""
        try:
            await replica.engine.start()
            if replica.left:
                raise EngineError(f"Replica {name} was stopped while it started.")
            self._check_model(name, replica)
        except BaseException:
            self._forget(name, replica)
            await replica.engine.aclose()
            raise
        if not replica.engine.restarting:  # else it has died again, and comes back by itself
            self._came_back(name, replica)

    def _check_model(self, name: str, replica: Replica) -> None:
        """Compare model and page size with those of the first replica that started.

        Requests go on elsewhere with the same tokens only where the model is the same, and digests of page
        ends are equal only where pages have the same size.
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
        """Stop a replica now. Its requests go on elsewhere. Raises `NotFound`."""
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
        """Take a replica out of the fleet. Returns the ids of the requests that it had."""
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
        """Count a replica out that takes nothing any more. Returns the ids of the requests that it had."""
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
        """Send control calls that wait to a replica that is up, with an empty tree and no adapters."""
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
        """End everything that waits for a replica: none is left."""
        self._control_calls.clear()
        self._router.clear()
        self._events.gave_up(error)
