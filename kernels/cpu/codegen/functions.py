"""Functions for numba code: bodies in LLVM code, copies of bytes, and calls of C functions by address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from ramify.kernels.cpu.codegen.compiler import intrinsic, part

_i64 = ir.IntType(64)


def llvm_function(name: str, arguments: int, fill: Callable[..., None]) -> Any:
    """A function of 1, 5 or 8 int64 arguments for numba code; `fill(builder, *arguments)` emits its body.

    Never inlined: these bodies have hundreds of instructions, and several kernels call each of them.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        module = builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_i64] * arguments), name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            body = ir.IRBuilder(function.append_basic_block())
            fill(body, *function.args)
            body.ret_void()
        builder.call(function, args)
        return _i64(0)

    @intrinsic
    def call1(typing: Any, a: Any) -> Any:
        return types.int64(a), emit

    @intrinsic
    def call5(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return types.int64(a, b, c, d, e), emit

    @intrinsic
    def call8(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        return types.int64(a, b, c, d, e, f, g, h), emit

    return {1: call1, 5: call5, 8: call8}[arguments]


@intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes from address `source` to address `target` (memcpy)."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        byte, integer = ir.IntType(8).as_pointer(), ir.IntType(64)
        function = builder.module.declare_intrinsic(
            "llvm.memcpy.p0.p0.i64", (), ir.FunctionType(ir.VoidType(), [byte, byte, integer, ir.IntType(1)])
        )
        target, source, size = args
        pointers = [builder.inttoptr(target, byte), builder.inttoptr(source, byte)]
        builder.call(function, [*pointers, size, ir.IntType(1)(0)])
        return integer(0)

    return types.int64(target, source, size), emit


@intrinsic
def call_address(typing: Any, body: Any, data: Any) -> Any:
    """Call the C function at address `body` with `data`."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        void = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [void])
        body, data = args
        builder.call(builder.inttoptr(body, kind.as_pointer()), [builder.inttoptr(data, void)])
        return ir.IntType(64)(0)

    return types.int64(body, data), emit


@intrinsic
def call_team(typing: Any, entry: Any, body: Any, data: Any, threads: Any) -> Any:
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
        call_team(frame.team, frame.body, data, threads)
    else:
        call_address(frame.body, data)  # a team of one would cost 0.8 us
