"""The replicas of a fleet by name: they start, join, drain, leave, die and come back.

starts       its model and its page size are those of the others
joins        with an empty tree and without adapters: it gets the questions and requests that wait
drains       nothing new goes there; what it has ends, or goes on elsewhere
dies         its requests go to others with the output that they have (decision 0050), and it comes back
is gone      it has died too often, and does not come back by itself
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from ramify.engine_messages import ToFrontend, TreeChange
from ramify.errors import EngineError, InvalidRequest, NotFound, WorkerDied
from ramify.messages import ModelInfo
from ramify.runtime.faults import errors_logged
from ramify.runtime.fleet.control_calls import ControlCalls
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.fleet.replica import EngineEvents, MakeEngine, Replica
from ramify.runtime.fleet.routing import Router

log = logging.getLogger("ramify")


class ReplicaSet:
    """The replicas, which `by_name` has.

    received : called with the name, the replica and each message of its engine core
    lost, restarted, gave_up : those of `ReplicaFleet`
    """

    def __init__(
        self,
        by_name: dict[str, Replica],
        placement: Placement,
        control_calls: ControlCalls,
        router: Router,
        *,
        received: Callable[[str, Replica, ToFrontend], None],
        lost: Callable[[WorkerDied | None, Sequence[str]], bool],
        restarted: Callable[[], None],
        gave_up: Callable[[EngineError], None],
    ) -> None:
        self.by_name = by_name
        self._placement = placement
        self._control_calls = control_calls
        self._router = router
        self._received = received
        self._lost = lost
        self._restarted = restarted
        self._fleet_gave_up = gave_up
        self.info: ModelInfo | None = None
        """Of the model that all have; None before the first has started."""
        self.before_leaving: Callable[[str], Awaitable[None]] | None = None
        """Awaited with the name of a replica that has drained, while it is still up: what its tree holds can
        be moved to others."""
        self.tree_changed: Callable[[str, TreeChange | None], None] = lambda name, change: None
        """Called with a replica's name and what has changed in its tree; with None where the tree is gone."""
        self._idle: dict[str, asyncio.Event] = {}
        """Set when a draining replica has no request left."""
        self.closing: set[asyncio.Future[None]] = set()
        """Of engine cores that have come back with another model."""

    # --- start ------------------------------------------------------------------------------------

    def hold(self, name: str, make: MakeEngine) -> Replica:
        """The replica `name`, with an engine core that is not started."""
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
        """Requests go on with the same tokens where the model is the same alone, and digests of page ends
        are equal where pages have the same size. The first replica to start says what these are."""
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
                f"Replica {name} has another model than the others: {info.name}, {self.info.name}.",
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
        idle = self._idle[name] = asyncio.Event()
        try:
            if replica.up:
                self._placement.drain(name)
                self.check_idle(name)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(idle.wait(), limit_s)
                await self._prepare(name, replica)
            if not (replica.gone or last):
                self._check_others(name)
        except BaseException:
            replica.draining = False
            if replica.up:
                self._placement.undrain(name)
                self._router.place_all()
            raise
        finally:
            del self._idle[name]
        await self.remove(name)

    def check_idle(self, name: str) -> None:
        """A draining replica may have a request less."""
        if name in self._idle and not self._router.count(name):
            self._idle[name].set()

    def check_all_idle(self) -> None:
        for name in self._idle:
            self.check_idle(name)

    async def _prepare(self, name: str, replica: Replica) -> None:
        if self.before_leaving is not None and replica.up:
            try:
                await self.before_leaving(name)
            except Exception:  # what it would have saved is computed again
                log.exception("replica %s leaves without preparation", name)

    def _check_others(self, name: str) -> None:
        if not any(other.usable for key, other in self.by_name.items() if key != name):
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
        self._router.place_all()
        await replica.engine.aclose()

    def _replica(self, name: str) -> Replica:
        if name not in self.by_name:
            names = ", ".join(self.by_name) or "none"
            raise NotFound(f"There is no replica {name!r}; there are {names}.", field="name")
        return self.by_name[name]

    def _forget(self, name: str, replica: Replica) -> list[str]:
        """A replica is not in the fleet any more. Returns the requests that it had."""
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
        explained = self._lost(error, self._down(name, replica, died=True))
        self._router.place_all()  # what was to run alone there, once that had none but such requests
        return explained

    def _down(self, name: str, replica: Replica, *, died: bool) -> list[str]:
        """A replica takes nothing any more. Returns the requests that it had."""
        rids = self._router.lose(name, died=died)
        if replica.up:
            replica.up = False
            replica.loras.clear()
            self._placement.leave(name)
            with errors_logged("telling of a tree that is gone"):
                self.tree_changed(name, None)
        if self._router.connector is not None:
            with errors_logged("ending moves"):
                self._router.connector.left(name)
        self.check_idle(name)
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
        self._restarted()
        self._router.place_all()

    def _join(self, name: str, replica: Replica) -> None:
        """A replica with an empty tree and no adapters is up: it gets the questions that wait."""
        self._placement.join(name, prefill=name in self._router.prefill)
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
        """No replica is left."""
        self._control_calls.clear()
        self._router.clear()
        self._fleet_gave_up(error)
