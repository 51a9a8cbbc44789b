"""Calls of C functions from inside kernels, by address: on the calling thread, or on a team of threads."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ramify.kernels.cpu.codegen.compiler import intrinsic, part


@intrinsic
def _call_address(typing: Any, body: Any, data: Any) -> Any:
    """Call the C function at `body`: body(data)."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        void = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [void])
        body, data = args
        builder.call(builder.inttoptr(body, kind.as_pointer()), [builder.inttoptr(data, void)])
        return ir.IntType(64)(0)

    return types.int64(body, data), emit


@intrinsic
def _call_team(typing: Any, entry: Any, body: Any, data: Any, threads: Any) -> Any:
    """Run body(data) on `threads` threads: call the C function at `entry` (`threads.team_entry`)."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        void, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [void, void, integer, integer])
        entry, body, data, threads = args
        function = builder.inttoptr(entry, kind.as_pointer())
        pointers = [builder.inttoptr(body, void), builder.inttoptr(data, void)]
        builder.call(function, [*pointers, builder.trunc(threads, integer), integer(0)])
        return ir.IntType(64)(0)

    return types.int64(entry, body, data, threads), emit


@part
def run_body(frame, data, threads):  # type: ignore[no-untyped-def]
    """Run the C function at `frame.body` on `threads` threads of the team at `frame.team`, with `data`."""
    if threads > 1:
        _call_team(frame.team, frame.body, data, threads)
    else:
        _call_address(frame.body, data)  # a team of one would cost 0.8 us
