"""Widening the rows of int8 pages, which lie in any order in memory."""

from __future__ import annotations

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import part
from ramify.kernels.cpu.codegen.simd import LANES


@part
def widen_rows(rows, ahead, offset, count, dim, bf16, to, scales):  # type: ignore[no-untyped-def]
    """Write the codes of `count` rows side by side to `to`, as bfloat16 or float32, and their scales to
    `scales`. Row i is at entry i of the table of int64 `rows`, plus `offset`.

    Prefetches the rows of the table `ahead`. A row may begin in one cache line and end in the next.
    """
    for index in range(count):
        row = vl.read_i64(rows + 8 * index) + offset
        later = vl.read_i64(ahead + 8 * index) + offset
        for byte in range(0, dim, 64):
            vl.prefetch(later + byte)
        vl.prefetch(later + dim)
        d = 0
        if bf16:
            while d + 2 * LANES <= dim:
                vl.widen_int8(row + d, to + 2 * d)
                d += 2 * LANES
        while d + LANES <= dim:
            vl.store_as(to + (2 if bf16 else 4) * d, vl.load_int8(row + d), bf16)
            d += LANES
        while d < dim:
            vl.write_as(to + (2 if bf16 else 4) * d, vl.read_i8(row + d), bf16)
            d += 1
        vl.write_f32(scales + 4 * index, vl.read_f32(row + dim))
        to += (2 if bf16 else 4) * dim
