"""The fleet of the replicas that Ray Serve lists. Replicas join, drain and leave as the list changes."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from ramify.errors import RamifyError, UnsupportedField
from ramify.ray.listed import ListedReplicas
from ramify.ray.remote_engine import RemoteEngine
from ramify.ray.snapshots import RemoteSnapshots
from ramify.ray.wire import Transport
from ramify.runtime.fleet.fleet import ReplicaFleet, ReplicaOperator
from ramify.runtime.fleet.replica import FleetEvents

log = logging.getLogger("ramify")


class ListedFleet(ReplicaFleet):
    """A fleet with a replica for each entry of Ray Serve's list.

    drain_s : seconds that requests may continue on a replica that has left the list; then they are moved to
    other replicas
    """

    def __init__(
        self, events: FleetEvents, *, transport: Transport, listed: ListedReplicas, drain_s: float
    ) -> None:
        self._snapshots = RemoteSnapshots()
        super().__init__(events, make_store=lambda: self._snapshots)
        self._transport = transport
        self._listed = listed
        self._drain_s = drain_s
        self._names: frozenset[str] = frozenset()
        self._first = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Wait for the first replica."""
        loop = asyncio.get_running_loop()
        self._listed.listen(lambda names: loop.call_soon_threadsafe(self._update, names))
        await self._first.wait()

    @property
    def operator(self) -> ReplicaOperator:
        raise UnsupportedField(
            "Ray Serve adds, stops and replaces the replicas of this server.",
            field="replicas",
            remedy="Deploy it again with other bounds: ramify deploy --replicas LOW..HIGH.",
        )

    async def aclose(self) -> None:
        self._listed.listen(lambda names: None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().aclose()

    def _update(self, names: Sequence[str]) -> None:
        before, self._names = self._names, frozenset(names)
        for name in names:
            if name not in self.replicas:
                self._run(self._enter(name))
        for name in before - self._names:
            self._run(self._leave(name))
        self._tell_needed()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _enter(self, name: str) -> None:
        try:
            await self.add(name, functools.partial(RemoteEngine, name, self._transport, self._snapshots))
        except RamifyError as error:
            if name in self._names:
                log.error("replica %s cannot be used: %s", name, error)
        else:
            self._first.set()
        self._tell_needed()

    async def _leave(self, name: str) -> None:
        """Remove a replica that Ray Serve stops, because it is scaled down, replaced, unhealthy or dead."""
        try:
            await self.drain(name, self._drain_s, last=True)
        except RamifyError as error:
            log.debug("replica %s: %s", name, error)
        if name in self._names and name not in self.replicas:
            self._run(self._enter(name))  # it was listed again
        self._tell_needed()

    def _tell_needed(self) -> None:
        self._listed.need(self.replicas)
