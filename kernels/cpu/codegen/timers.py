"""Timers inside the compiled call of all layers. They are off unless Python puts an address into a frame.

Counters are in ticks of a clock that all cores share (`ticks`). A timer that is off is one test of a field
that is in a register or in the first-level cache.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ramify.kernels.cpu.codegen.compiler import intrinsic, part
from ramify.kernels.cpu.codegen.simd import pointer
from ramify.kernels.machine.records import record

_i64 = ir.IntType(64)


@intrinsic
def ticks(typing: Any) -> Any:
    """The processor's clock, which runs at a constant rate and is the same on all cores: the time stamp
    counter on x86, CNTVCT_EL0 on Arm."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = ir.FunctionType(_i64, [])
        return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", (), kind), [])

    return types.int64(), emit


@intrinsic
def fetch_add(typing: Any, address: Any, more: Any) -> Any:
    """Atomic fetch-and-add to the int64 at an address."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", pointer(builder, args[0], _i64), args[1], "monotonic")

    return types.int64(address, more), emit


TIMES = record("prepare", "wait", "project", "store", "attend", "output", "gate_up", "down")
"""Counters of a step. `prepare` and `wait` are sums over the threads of products: the time to norm and round
rows of x, and to wait for rows that another thread prepares. The others are the calling thread's time in each
operation of the layers."""
PREPARE_TIME, WAIT_TIME, OPERATION_TIMES = 0, 1, 2
"""The places of the fields `prepare`, `wait` and `project` of TIMES."""


@part
def begin(times):  # type: ignore[no-untyped-def]
    """The ticks now; 0 if the timers are off (`times` is 0)."""
    return ticks() if times else 0


@part
def lap(times, field, since):  # type: ignore[no-untyped-def]
    """Add the ticks since `since` to a field of the TIMES at `times`. Returns the ticks now; 0 if the timers
    are off."""
    if not times:
        return 0
    now = ticks()
    fetch_add(times + 8 * field, now - since)
    return now
