"""The fleet of the replicas that Ray Serve lists: they join, drain and leave with its list."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ramify.engine_messages import ToFrontend
from ramify.errors import EngineError, RamifyError, UnsupportedField, WorkerDied
from ramify.ray.listed import ListedReplicas
from ramify.ray.remote_engine import RemoteEngine
from ramify.ray.snapshots import RemoteSnapshots
from ramify.ray.wire import Transport
from ramify.runtime.fleet.fleet import ReplicaFleet

log = logging.getLogger("ramify")


class ListedFleet(ReplicaFleet):
    """An engine core for each replica of the list. The callbacks are those of `ReplicaFleet`.

    `drain_s`: seconds that requests may take on a replica that has left the list; then they go on elsewhere.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        listed: ListedReplicas,
        drain_s: float,
        receive: Callable[[ToFrontend], None],
        lost: Callable[[WorkerDied | None, Sequence[str]], bool],
        restarted: Callable[[], None],
        gave_up: Callable[[EngineError], None],
    ) -> None:
        super().__init__(receive=receive, lost=lost, restarted=restarted, gave_up=gave_up)
        self._transport = transport
        self._snapshots = RemoteSnapshots()
        self.move_pages(lambda: self._snapshots)
        self._listed = listed
        self._drain_s = drain_s
        self._names: frozenset[str] = frozenset()
        self._first = asyncio.Event()
        self._max_prompt_tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Wait for the first replica."""
        loop = asyncio.get_running_loop()
        self._listed.listen(lambda names: loop.call_soon_threadsafe(self._update, names))
        await self._first.wait()

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that all replicas accept, in tokens; the last known value while none is up."""
        self._max_prompt_tokens = super().max_prompt_tokens or self._max_prompt_tokens
        return self._max_prompt_tokens

    async def add_one(self) -> str:
        raise _of_ray()

    async def restart(self, name: str, limit_s: float) -> None:
        raise _of_ray()

    async def drain(self, name: str, limit_s: float, *, last: bool = False) -> None:
        if not last:  # that is for a replica which Ray Serve has stopped
            raise _of_ray()
        await super().drain(name, limit_s, last=True)

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
        """Ray Serve stops a replica: when it is scaled down, replaced, unhealthy or dead."""
        try:
            await self.drain(name, self._drain_s, last=True)
        except RamifyError as error:
            log.debug("replica %s: %s", name, error)
        if name in self._names and name not in self.replicas:
            self._run(self._enter(name))  # it was listed again
        self._tell_needed()

    def _tell_needed(self) -> None:
        self._listed.need(self.replicas)


def _of_ray() -> UnsupportedField:
    return UnsupportedField(
        "Ray Serve adds, stops and replaces the replicas of this server.",
        field="replicas",
        remedy="Deploy it again with other bounds: ramify deploy --replicas LOW..HIGH.",
    )
