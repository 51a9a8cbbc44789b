"""Rows of x as the inner loops read them: normed, padded, widened to float32 or rounded to int8 or int16.

All functions run inside numba kernels; `frame` and `layout` are records of `items.FRAME` and `packed.LAYOUT`.
"""

from __future__ import annotations

import numpy as np

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import part
from ramify.kernels.cpu.codegen.functions import copy_bytes
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.cpu.packed_linear import code as code
from ramify.kernels.cpu.packed_linear.int8 import (
    round_int4,
    round_int8,
    round_int16,
    round_wide_int4,
    round_wide_int8,
    round_wide_int16,
)
from ramify.kernels.cpu.packed_linear.items import BY_DOTS, BY_F32, BY_INT8, BY_INT16, MOST_ROWS, kernel_rows
from ramify.kernels.cpu.parts.norm import normalise


@part
def _copy_row(frame, layout, at, to, spare):  # type: ignore[no-untyped-def]
    """Copy the row at `at` to `to`, in the weight's order of inputs and padded with zeros. The row is normed
    first if the call has a norm. The copy is float32 for BY_F32, otherwise of the row's dtype. If `at` is 0,
    the copy is zeros. `spare` has room for a row."""
    wide = frame.way == BY_F32 or not frame.from_bf16
    size = 4 if wide else 2
    filled = 0
    if at:
        filled = layout.inputs
        if frame.norm_at:
            # A normed bfloat16 row is rounded to bfloat16 first, as `rms_norm` does, and widened afterwards.
            to_row = spare if layout.order_at or (wide and frame.from_bf16) else to
            normalise(at, to_row, frame.norm_at, filled, frame.eps, frame.from_bf16, frame.from_bf16)
            at = to_row
        if layout.order_at:
            from_size = 2 if frame.from_bf16 else 4
            for i in range(filled):
                number = vl.read_as(at + from_size * vl.read_i32(layout.order_at + 4 * i), frame.from_bf16)
                vl.write_as(to + size * i, number, not wide)
        elif at == to:
            pass
        elif wide and frame.from_bf16:
            whole = filled - filled % LANES
            for i in range(0, whole, LANES):
                vl.store(to + 4 * i, vl.load_bf16(at + 2 * i))
            for i in range(whole, filled):
                vl.write_f32(to + 4 * i, vl.read_bf16(at + 2 * i))
        else:
            copy_bytes(to, at, size * filled)
    for i in range(filled, layout.padded):
        if wide:
            vl.write_f32(to + 4 * i, np.float32(0.0))
        else:
            vl.write_bf16(to + 2 * i, np.float32(0.0))


@part
def _sum_groups(frame, layout, at, to):  # type: ignore[no-untyped-def]
    """Write the float32 sum of each group of inputs of a prepared row to `to`."""
    for first in range(0, layout.padded, layout.group):
        total = vl.splat_f32(0.0)
        for i in range(first, first + layout.group, LANES):
            if frame.way == BY_DOTS:
                total = vl.add(total, vl.load_bf16(at + 2 * i))
            else:
                total = vl.add(total, vl.load(at + 4 * i))
        vl.write_f32(to + 4 * (first // layout.group), vl.sum_lanes(total))


@part
def prepare(frame, layout, place, scratch):  # type: ignore[no-untyped-def]
    """Prepare the row of x at `place` among the prepared rows."""
    to = frame.prepared + place * frame.prepared_row
    sums = frame.sums + place * frame.sums_row
    at = 0
    if frame.first + place < frame.rows:
        row = frame.first + place
        if frame.x_rows_at:
            row = vl.read_i64(frame.x_rows_at + 8 * row)
        at = frame.from_x + row * frame.from_row
    block, spare = scratch, scratch + code.BLOCK_BYTES
    if frame.way != BY_INT8 and frame.way != BY_INT16:
        _copy_row(frame, layout, at, to, spare)
        if frame.sums_row:
            _sum_groups(frame, layout, to, sums)
        return
    if not at or frame.norm_at or layout.order_at or layout.inputs != layout.padded:
        _copy_row(frame, layout, at, spare, spare + 4 * layout.padded)
        at = spare
    # The rows of a kernel's call are interleaved: four inputs of each row side by side.
    first = place - place % MOST_ROWS
    rows = kernel_rows(frame.rows - first)
    inside = place - first
    arguments = code.block_at(block)
    arguments.x = at
    arguments.c = frame.prepared + first * frame.prepared_row + 4 * inside
    arguments.sums = frame.sums + first * frame.sums_row + 4 * inside
    arguments.four_bytes = 4 * rows
    if frame.way == BY_INT16:
        if frame.from_bf16:
            round_int16(block)
        else:
            round_wide_int16(block)
    elif layout.form == 1:
        if frame.from_bf16:
            round_int8(block)
        else:
            round_wide_int8(block)
    elif frame.from_bf16:
        round_int4(block)
    else:
        round_wide_int4(block)
