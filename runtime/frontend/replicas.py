"""Replicas from an operator's view: their states, and orders to add, drain and restart them."""

from __future__ import annotations

from collections.abc import Callable

from ramify.runtime.fleet.fleet import ReplicaFleet
from ramify.runtime.fleet.replica import ReplicaStatus
from ramify.runtime.frontend.tasks import Tasks


class Replicas:
    """The replicas of `fleet`. An order is carried out to its end, even if its caller is cancelled.

    check_open : raises the error that ended the engine, if it has ended
    """

    def __init__(self, fleet: ReplicaFleet, tasks: Tasks, check_open: Callable[[], None]) -> None:
        self._fleet = fleet
        self._tasks = tasks
        self._check_open = check_open

    def statuses(self) -> list[ReplicaStatus]:
        """The current status of every replica."""
        return self._fleet.statuses()

    def status(self, name: str) -> ReplicaStatus | None:
        return next((one for one in self.statuses() if one.name == name), None)

    async def add_replica(self) -> str:
        """See `LocalFleet.add_one`."""
        self._check_open()
        return await self._tasks.finish(self._fleet.operator.add_one())

    async def drain(self, name: str, limit_s: float) -> None:
        """See `ReplicaFleet.drain`."""
        self._check_open()
        await self._tasks.finish(self._fleet.operator.drain(name, limit_s))

    async def restart(self, name: str, limit_s: float) -> None:
        """See `LocalFleet.restart`."""
        self._check_open()
        await self._tasks.finish(self._fleet.operator.restart(name, limit_s))
