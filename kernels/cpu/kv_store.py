"""Copying bytes in compiled code, and copying pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from torch import Tensor

from ramify.kernels.checks import check_copy
from ramify.kernels.cpu.codegen.compiler import intrinsic


@intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, size: Any) -> Any:
    """memcpy."""

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


def copy_pages(k_pages: Tensor, v_pages: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """As `reference.kv_store.copy_pages`, one page at a time, without temporary memory for all of them."""
    check_copy(k_pages, v_pages, src, dst)
    for pages in (k_pages, v_pages):
        by_page = pages if pages.dim() == 4 else pages.transpose(0, 1)
        for source, destination in zip(src, dst, strict=True):
            by_page[destination].copy_(by_page[source])
