"""The replicas of this machine: their names, and their shares of its cores and GPUs."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable

from ramify.errors import EngineError, UnsupportedField
from ramify.loop import cancel_at_end
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet.fleet import ReplicaFleet, ReplicaOperator
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.fleet.replica import EngineCore, EngineEvents, FleetEvents, Later
from ramify.runtime.fleet.supervisor import EngineSupervisor
from ramify.runtime.kv_transfer.files import SnapshotFolder, SnapshotStore
from ramify.runtime.processes.prestart import PrestartedWorkers
from ramify.runtime.processes.shares import Share, share_of, shares


class LocalFleet(ReplicaFleet):
    """A fleet on this machine. It starts with `config.replicas` replicas, which are named "0", "1" and so on.

    One replica has the whole machine; several divide its cores and GPUs.

    workers : processes for the engine core of the first replica, if they were started early
    make_engine : makes an engine core; called with the arguments of `EngineSupervisor`
    make_store, placement, later : see `ReplicaFleet`
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: PrestartedWorkers | None,
        events: FleetEvents,
        *,
        make_engine: Callable[..., EngineCore] = EngineSupervisor,
        make_store: Callable[[], SnapshotStore] = SnapshotFolder,
        placement: Placement | None = None,
        later: Later | None = None,
    ) -> None:
        self._config = config
        self._make_engine = make_engine
        self._single = config.replicas == 1
        super().__init__(
            events,
            make_store=None if self._single else make_store,
            prefill=frozenset(map(str, range(config.prefill_replicas))),
            single=self._single,
            placement=placement,
            later=later,
        )
        for index, share in enumerate([None] if self._single else shares(config)):
            make = functools.partial(self._make, str(index), share, None if index else workers)
            self._register(str(index), make)

    async def start(self) -> None:
        """Start one engine core, and then the others concurrently. The others find compiled kernels and
        packed weights on disk."""
        first, *others = list(self._replicas.items())
        try:
            await self._start(*first)
            if self._config.prefill_replicas and not first[1].engine.page_bytes:
                raise UnsupportedField(
                    "Pages of models with linear attention layers are not moved, so no replica can compute"
                    " prompts for another one.",
                    field="prefill_replicas",
                    remedy="Leave prefill_replicas out.",
                )
            starts = [asyncio.ensure_future(self._start(*one)) for one in others]
            async with cancel_at_end(starts):
                await asyncio.gather(*starts)
        except BaseException:
            await self.aclose()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role. With several replicas the keys are replica and role, such as "1/scheduler"."""
        found = super().pids
        return {role.partition("/")[2]: pid for role, pid in found.items()} if self._single else found

    @property
    def operator(self) -> ReplicaOperator:
        return self

    async def add_one(self) -> str:
        """Start one more replica. Returns its name, the lowest free number.

        Raises `UnsupportedField` if the engine was started with one replica, or if every GPU or core has a
        replica, and the error of a failed start.
        """
        if self._single:
            raise UnsupportedField(
                "This engine was started with one replica, which has the whole machine.",
                field="replicas",
                remedy="Start it with two or more: --replicas 2, or rm.Engine(replicas=2).",
            )
        name = next(name for name in map(str, itertools.count()) if name not in self._replicas)
        await self._add(name)
        return name

    async def restart(self, name: str, limit_s: float) -> None:
        """Drain a replica, and start it anew. Requests wait meanwhile if there is no other replica.

        Raises the errors of `drain`, and the error of a failed start, after which the replica is removed.
        """
        await self.drain(name, limit_s, last=True)
        try:
            await self._add(name)
        except Exception as error:
            if not any(replica.usable for replica in self._replicas.values()):
                self._end(error if isinstance(error, EngineError) else EngineError(str(error)))
            raise

    async def _add(self, name: str) -> None:
        share = None if self._single else share_of(self._config, int(name))
        await self.add(name, functools.partial(self._make, name, share, None))

    def _make(
        self, name: str, share: Share | None, workers: PrestartedWorkers | None, events: EngineEvents
    ) -> EngineCore:
        return self._make_engine(
            self._config,
            workers,
            share=share,
            name="" if self._single else name,
            busy=functools.partial(self._busy, name),
            events=events,
        )

    def _busy(self, name: str) -> bool:
        return bool(self._router.count(name) or self._control_calls.waiting_for(name))
