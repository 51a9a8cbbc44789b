"""The parts of a decoding step on the CPU: how long each takes, and how long the threads wait for each other.

    parts = StepParts(engine, threads)
    with engine.decoding(prompts, steps) as step, parts.timing(step) as timed:
        for _ in range(steps):
            timed()
    parts.shares()              of each part, in the time of the steps by the calling thread's clock

Times inside the call of all layers come from the timers in the kernels (`kernels.cpu.codegen.timers`). How
long each thread works is measured from outside: a kernel enters its parallel region through the address in
`team` of its frame, and here that is the address of a function that measures, compiled in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numba
from numba import types

from benchmarks.engine_local import LocalEngine
from ramify.kernels.cpu import attention, linear, rope, sampling
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray
from ramify.kernels.cpu.codegen.functions import call_address, call_team
from ramify.kernels.cpu.codegen.timers import TIMES, fetch_add, ticks
from ramify.kernels.machine.records import new_record, record
from ramify.kernels.machine.threads import team_entry

ARENAS = (linear.arena, attention.arena, rope.arena, sampling.arena)
"""The frames of the kernels of a step."""
PARTS = ("products", "head", "attention", "norms", "rotation", "sampling", "masks", "Python")
"""Parts of the calling thread's time. `products`: those of the layers. `norms`: the norms of rows before
products, and their rounding to the products' type. `rotation`: rotary embedding, and storing keys and values.
`masks`: waiting for token masks. `Python`: all else."""

REGION = record("body", "data", "caller", "others")
"""The parallel regions of one kernel: function, data and calling thread of the region that runs; in ticks the
time that all other threads have worked in regions."""

_this_thread = ctypes.CDLL(None).pthread_self
_this_thread.argtypes, _this_thread.restype = (), ctypes.c_int64


@numba.njit(types.int64())
def ticks_now():  # type: ignore[no-untyped-def]
    return ticks()


def _timed_team(region: Any) -> Any:
    """A function with the signature of `GOMP_parallel` that measures into `region`."""
    at, entry = ctypes.addressof(region), team_entry()

    @numba.cfunc(types.void(types.voidptr))
    def body(data):  # type: ignore[no-untyped-def]
        mine = carray(vl.as_pointer(at), 1, REGION)[0]
        began = ticks()
        call_address(mine.body, mine.data)
        if _this_thread() != mine.caller:
            fetch_add(at + 8 * 3, ticks() - began)

    timed = body.address

    @numba.cfunc(types.void(types.int64, types.int64, types.uint32, types.uint32))
    def team(function, data, threads, flags):  # type: ignore[no-untyped-def]
        mine = carray(vl.as_pointer(at), 1, REGION)[0]
        mine.body, mine.data, mine.caller = function, data, _this_thread()
        call_team(entry, timed, data, threads)

    return body, team


class StepParts:
    """Timers of the decoding steps of `engine`, which runs on the CPU with packed weights.

    Raises ValueError for an engine whose layers are not one compiled call.
    """

    def __init__(self, engine: LocalEngine, threads: int) -> None:
        if not engine.runner.stacked:
            raise ValueError("the layers of this model are no single call, so a step has no timers.")
        self._engine, self._threads = engine, threads
        self._times = new_record(TIMES)
        self._regions = {arena: new_record(REGION) for arena in ARENAS}
        self._teams = {arena: _timed_team(region) for arena, region in self._regions.items()}
        self._steps: list[dict[str, float]] = []
        """The ticks of each part in each step, and `waiting`."""
        self._called = {"head": 0, "sampling": 0, "masks": 0}

    @contextlib.contextmanager
    def timing(self, step: Callable[[], object]) -> Iterator[Callable[[], object]]:
        """Context with the timers on, which gives a function that runs `step`."""

        def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                began = ticks_now()
                linear.arena.call.times = 0  # of the layers alone
                try:
                    return function(*arguments)
                finally:
                    linear.arena.call.times = ctypes.addressof(self._times)
                    self._called[name] += ticks_now() - began

            return call

        def timed_step() -> None:
            before, began = self._totals(), ticks_now()
            step()
            ticks = ticks_now() - began
            found = {name: after - before[name] for name, after in self._totals().items()}
            found["Python"] = ticks - sum(found[name] for name in PARTS[:-1])
            found["waiting"] = max(0, self._threads - 1) * ticks - found.pop("others")
            self._steps.append(found)

        masks = self._engine.masks
        for arena, (_, team) in self._teams.items():
            arena.call.team = team.address
        linear.arena.call.times = ctypes.addressof(self._times)
        # Products of the layers do not go through `finish`.
        linear.arena.finish = timed("head", linear.arena.finish)  # type: ignore[method-assign]
        sampling.arena.finish = timed("sampling", sampling.arena.finish)  # type: ignore[method-assign]
        masks.wait = timed("masks", masks.wait)  # type: ignore[method-assign]
        try:
            yield timed_step
        finally:
            del linear.arena.finish, sampling.arena.finish, masks.wait
            linear.arena.call.times = 0
            for arena in ARENAS:
                arena.call.team = team_entry()

    def _totals(self) -> dict[str, float]:
        """Ticks until now of each part but Python, and of the work of other threads."""
        times = self._times
        norms = (times.prepare + times.wait) / self._threads
        others = sum(region.others for region in self._regions.values())
        return {
            "products": times.project + times.output + times.gate_up + times.down - norms,
            "attention": times.attend,
            "norms": norms,
            "rotation": times.store,
            "others": others - times.wait * (self._threads - 1) / self._threads,
            **self._called,
        }

    def shares(self) -> dict[str, float]:
        """Shares of the time of the faster half of the steps: of each of PARTS, which together make 1, and of
        `waiting`, the time that a thread other than the calling one does not work; 0 with one thread."""
        faster = sorted(self._steps, key=lambda found: sum(found[name] for name in PARTS))
        faster = faster[: -(-len(faster) // 2)]
        total = sum(found[name] for found in faster for name in PARTS)
        shares = {name: sum(found[name] for found in faster) / total for name in (*PARTS, "waiting")}
        shares["waiting"] /= max(1, self._threads - 1)
        return shares
