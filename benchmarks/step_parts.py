"""The parts of a decoding step on the CPU: how long each takes, and how long the threads wait for each other.

    parts = StepParts(engine)
    with engine.decoding(prompts, steps) as step, parts.timing(step) as timed:
        for _ in range(steps):
            timed()
    parts.shares(threads)       of each part, in the time of the steps by the calling thread's clock

Times inside the call of all layers come from the timers in the kernels (`kernels.cpu.codegen.timers`). How
long each thread works is measured from outside: a kernel enters its parallel region through the address in
`team` of its frame, and here that is the address of a function that measures, compiled in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
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
from ramify.kernels.machine.records import Arena, new_record, record
from ramify.kernels.machine.threads import team_entry

PARTS = ("products", "head", "attention", "norms", "rotation", "sampling", "masks", "Python")
"""Parts of the calling thread's time. `products`: those of the layers. `norms`: the norms of rows before
products, and their rounding to the products' type. `rotation`: rotary embedding, and storing keys and values.
`masks`: waiting for token masks. `Python`: all else."""

REGION = record("body", "data", "caller", "wall", "others")
"""The parallel regions of one kernel: function, data and calling thread of the region that runs; in ticks the
time that the calling thread has spent in regions, and the time that all other threads have worked in them."""

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
            fetch_add(at + 8 * 4, ticks() - began)

    timed = body.address

    @numba.cfunc(types.void(types.int64, types.int64, types.uint32, types.uint32))
    def team(function, data, threads, flags):  # type: ignore[no-untyped-def]
        mine = carray(vl.as_pointer(at), 1, REGION)[0]
        mine.body, mine.data, mine.caller = function, data, _this_thread()
        began = ticks()
        call_team(entry, timed, data, threads)
        mine.wall += ticks() - began

    return body, team


class _Regions:
    """The measured regions of one kernel."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.times = new_record(REGION)
        self._functions = _timed_team(self.times)

    def on(self) -> None:
        self._arena.call.team = self._functions[1].address

    def off(self) -> None:
        self._arena.call.team = team_entry()


class StepParts:
    """Timers of the decoding steps of `engine`, which runs on the CPU with packed weights.

    Raises ValueError for an engine whose layers are not one compiled call.
    """

    def __init__(self, engine: LocalEngine) -> None:
        if not engine.runner.stacked:
            raise ValueError("the layers of this model are no single call, so a step has no timers.")
        self._engine = engine
        self._layers = new_record(TIMES)
        self._head = new_record(TIMES)
        self._regions = {
            "linear": _Regions(linear.arena),
            "attention": _Regions(attention.arena),
            "rope": _Regions(rope.arena),
            "sampling": _Regions(sampling.arena),
        }
        self._head_ticks = self._masks = 0
        self._wall = self._ticks = 0.0

    @contextlib.contextmanager
    def timing(self, step: Callable[[], object]) -> Iterator[Callable[[], object]]:
        """Context with the timers on, which gives a function that runs `step`."""
        runner, masks = self._engine.runner, self._engine.masks
        logits, wait = runner.logits, masks.wait

        def timed_logits(*args: Any) -> Any:
            before = self._regions["linear"].times.wall
            linear.arena.call.times = ctypes.addressof(self._head)
            found = logits(*args)
            linear.arena.call.times = ctypes.addressof(self._layers)
            self._head_ticks += self._regions["linear"].times.wall - before
            return found

        def timed_wait() -> None:
            began = time.perf_counter()
            wait()
            self._masks += time.perf_counter() - began

        def timed_step() -> None:
            began, first = time.perf_counter(), ticks_now()
            step()
            self._ticks += ticks_now() - first
            self._wall += time.perf_counter() - began

        for regions in self._regions.values():
            regions.on()
        linear.arena.call.times = ctypes.addressof(self._layers)
        runner.logits, masks.wait = timed_logits, timed_wait  # type: ignore[method-assign]
        try:
            yield timed_step
        finally:
            del runner.logits, masks.wait
            linear.arena.call.times = 0
            for regions in self._regions.values():
                regions.off()

    @property
    def seconds(self) -> float:
        """Seconds of all timed steps."""
        return self._wall

    def shares(self, threads: int) -> dict[str, float]:
        """Shares of the time of all steps: of each of PARTS, which together make 1, and of `waiting`, the
        time that a thread other than the calling one does not work, on average; 0 with one thread."""
        tick = self._wall / self._ticks  # seconds
        layers, regions = self._layers, self._regions
        norms = (layers.prepare + layers.wait) / threads
        found = {
            "products": layers.project + layers.output + layers.gate_up + layers.down - norms,
            "head": self._head_ticks,
            "attention": layers.attend,
            "norms": norms,
            "rotation": layers.store,
            "sampling": regions["sampling"].times.wall,
            "masks": self._masks / tick,
        }
        found["Python"] = self._ticks - sum(found.values())
        shares = {name: found[name] / self._ticks for name in PARTS}
        working = sum(each.times.others for each in regions.values())
        working -= (layers.wait + self._head.wait) * (threads - 1) / threads
        shares["waiting"] = 1 - working / self._ticks / (threads - 1) if threads > 1 else 0.0
        return shares
