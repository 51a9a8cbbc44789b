"""The replicas of this machine: their names, their shares of cores and GPUs, and engine cores that come and
go."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence

from ramify.engine_messages import ToFrontend
from ramify.errors import EngineError, UnsupportedField, WorkerDied
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet.fleet import ReplicaFleet
from ramify.runtime.fleet.replica import EngineEvents
from ramify.runtime.fleet.supervisor import EngineSupervisor
from ramify.runtime.kv_transfer.files import SnapshotFolder
from ramify.runtime.processes.prestart import PrestartedWorkers
from ramify.runtime.processes.shares import Share, share_of, shares


class LocalFleet(ReplicaFleet):
    """`config.replicas` engine cores on this machine at first, named by numbers.

    `workers`: processes for the first one's engine core, if they were started early. The callbacks are
    those of `ReplicaFleet`.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: PrestartedWorkers | None,
        *,
        receive: Callable[[ToFrontend], None],
        lost: Callable[[WorkerDied | None, Sequence[str]], bool],
        restarted: Callable[[], None],
        gave_up: Callable[[EngineError], None],
    ) -> None:
        super().__init__(receive=receive, lost=lost, restarted=restarted, gave_up=gave_up)
        self._config = config
        self.move_pages(SnapshotFolder)
        self._router.prefill = frozenset(map(str, range(config.prefill_replicas)))
        for index, share in enumerate(shares(config)):
            self._replica_set.hold(
                str(index), functools.partial(self._make, str(index), share, workers if index == 0 else None)
            )

    async def start(self) -> None:
        """Start one engine core and then the others, which find compiled kernels and packed weights on
        disk."""
        first, *others = list(self._replicas.items())
        try:
            await self._replica_set.start(*first)
            if self._config.prefill_replicas and not first[1].engine.page_bytes:
                raise UnsupportedField(
                    "Pages of models with linear attention layers are not moved, so no replica can compute"
                    " prompts for another one.",
                    field="prefill_replicas",
                    remedy="Leave prefill_replicas out.",
                )
            await _all(self._replica_set.start(*one) for one in others)
        except BaseException:
            await self.aclose()
            raise

    async def add_one(self) -> str:
        """Start one more replica. Returns its name, the lowest number that is free.

        Raises `UnsupportedField` where every GPU or core has a replica, and what keeps it from starting.
        """
        name = next(name for name in map(str, itertools.count()) if name not in self._replicas)
        await self._add(name)
        return name

    async def restart(self, name: str, limit_s: float) -> None:
        """Drain a replica and start it anew. Requests wait where it is the only one.

        Raises what `drain` raises, and what keeps it from starting: the replica is gone then.
        """
        await self.drain(name, limit_s, last=True)
        try:
            await self._add(name)
        except Exception as error:
            if not any(replica.usable for replica in self._replicas.values()):
                self._replica_set.give_up(
                    error if isinstance(error, EngineError) else EngineError(str(error))
                )
            raise

    async def _add(self, name: str) -> None:
        await self.add(name, functools.partial(self._make, name, share_of(self._config, int(name)), None))

    def _make(
        self, name: str, share: Share, workers: PrestartedWorkers | None, events: EngineEvents
    ) -> EngineSupervisor:
        busy = functools.partial(self._busy, name)
        return EngineSupervisor(self._config, workers, share=share, name=name, busy=busy, **events._asdict())

    def _busy(self, name: str) -> bool:
        """The replica has something to answer."""
        return bool(self.requests_of(name) or self._control_calls.waiting_for(name))


async def _all(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Run all at once. At the first error the others are cancelled, and it is raised when they have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
