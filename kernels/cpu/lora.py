"""LoRA adapters of several requests in one product, for the CPU.

    for row with an adapter: x = norm(x), float32              first stage
    for segment of rows, `SHRINK_ROWS` rows of A:              second stage
        hidden = scale · (x Aᵀ)
    for segment of rows, `EXPAND_COLUMNS` columns of out:      third stage
        out += hidden Bᵀ

Threads take items of a stage in turn, and wait for each other at the end of a stage. Memory: A is (ranks,
inputs), B in blocks of `MULTIPLE` columns (`weights/lora.py`); the arena has x and hidden in float32.
Products are bound by reading A and B: four rows share every load. Each number is summed in ascending order of
the inputs, and of the ranks, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import callback, carray, compiled, part
from ramify.kernels.cpu.codegen.functions import run_body
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.cpu.parts.norm import normalise
from ramify.kernels.machine.records import Arena, record
from ramify.kernels.weights.lora import MULTIPLE, RECORD, LoraRows, LoraTable, LoraWeight

SHRINK_ROWS, EXPAND_COLUMNS = 16, 256
AHEAD = 2048
"""Prefetch distance in A and in B, in bytes."""
SERIAL_NUMBERS = 1 << 16
"""If x has fewer numbers, one thread prepares all its rows."""

FRAME = record(
    # Arguments of a step: `LoraRows.segments` and `order`, and the most ranks of an adapter in a matrix.
    "segments", "segment_count", "order", "rows", "most_ranks",
    # Arguments of a product.
    "table",  # `LoraTable.addresses`
    "x", "x_row", "bf16", "inputs", "out", "out_row", "out_bf16", "outputs",
    "zero",  # whether the products replace the numbers of out, which is float32, instead of being added
    "norm",
    "threads", "team", "body", "arena", "arena_bytes",
    # Set by the call.
    "padded", "stage", "items", "blocks", "wide", "spare", "hidden",
    floats=("eps",),
)  # fmt: skip
"""The arguments of one call, which its threads share. The number of the next item is at `arena`."""
_COUNTER_BYTES = 64
PART_AT, PART_BYTES = 40, 32
"""The offset of the first part's fields in a `RECORD`, and the bytes of the fields of a part."""


@part
def _prepare(frame, place):  # type: ignore[no-untyped-def]
    at = frame.x + vl.read_i64(frame.order + 8 * place) * frame.x_row
    to = frame.wide + 4 * place * frame.padded
    if frame.norm:
        normed = frame.spare + 2 * place * frame.padded if frame.bf16 else to
        normalise(at, normed, frame.norm, frame.inputs, frame.eps, frame.bf16, frame.bf16)
        at = normed
    whole = frame.inputs - frame.inputs % LANES
    for i in range(0, whole, LANES):
        vl.store(to + 4 * i, vl.load_as(at + (2 if frame.bf16 else 4) * i, frame.bf16))
    for i in range(whole, frame.inputs):
        vl.write_f32(to + 4 * i, vl.read_as(at + (2 if frame.bf16 else 4) * i, frame.bf16))
    for i in range(frame.inputs, frame.padded):
        vl.write_f32(to + 4 * i, np.float32(0.0))


@part
def _shrink(frame, weight, first, stop, block):  # type: ignore[no-untyped-def]
    bf16, row_bytes = weight.bf16, frame.padded * (2 if weight.bf16 else 4)
    size, x_row, hidden_row = (2 if bf16 else 4), 4 * frame.padded, 4 * frame.most_ranks
    last = weight.ranks - 1
    for j in range(block * SHRINK_ROWS, min((block + 1) * SHRINK_ROWS, weight.ranks), 2):
        other = min(j + 1, last)
        a, b = weight.a + j * row_bytes, weight.a + other * row_bytes
        scale, other_scale = vl.read_f32(weight.scales + 4 * j), vl.read_f32(weight.scales + 4 * other)
        for row in range(first, stop, 4):
            r1, r2, r3 = min(row + 1, stop - 1), min(row + 2, stop - 1), min(row + 3, stop - 1)
            x0, x1 = frame.wide + row * x_row, frame.wide + r1 * x_row
            x2, x3 = frame.wide + r2 * x_row, frame.wide + r3 * x_row
            zero = vl.splat_f32(0.0)
            p0, p1, p2, p3, q0, q1, q2, q3 = zero, zero, zero, zero, zero, zero, zero, zero
            for i in range(0, frame.padded, LANES):
                vl.prefetch(a + size * i + AHEAD)
                vl.prefetch(b + size * i + AHEAD)
                u, v = vl.load_as(a + size * i, bf16), vl.load_as(b + size * i, bf16)
                y = vl.load(x0 + 4 * i)
                p0, q0 = vl.fma(y, u, p0), vl.fma(y, v, q0)
                y = vl.load(x1 + 4 * i)
                p1, q1 = vl.fma(y, u, p1), vl.fma(y, v, q1)
                y = vl.load(x2 + 4 * i)
                p2, q2 = vl.fma(y, u, p2), vl.fma(y, v, q2)
                y = vl.load(x3 + 4 * i)
                p3, q3 = vl.fma(y, u, p3), vl.fma(y, v, q3)
            to, to_other = frame.hidden + 4 * j, frame.hidden + 4 * other
            vl.write_f32(to + row * hidden_row, vl.sum_lanes(p0) * scale)
            vl.write_f32(to + r1 * hidden_row, vl.sum_lanes(p1) * scale)
            vl.write_f32(to + r2 * hidden_row, vl.sum_lanes(p2) * scale)
            vl.write_f32(to + r3 * hidden_row, vl.sum_lanes(p3) * scale)
            vl.write_f32(to_other + row * hidden_row, vl.sum_lanes(q0) * other_scale)
            vl.write_f32(to_other + r1 * hidden_row, vl.sum_lanes(q1) * other_scale)
            vl.write_f32(to_other + r2 * hidden_row, vl.sum_lanes(q2) * other_scale)
            vl.write_f32(to_other + r3 * hidden_row, vl.sum_lanes(q3) * other_scale)


@part
def _out_at(frame, place):  # type: ignore[no-untyped-def]
    return frame.out + vl.read_i64(frame.order + 8 * place) * frame.out_row


@part
def _expand_part(frame, hidden, b, rank, start, columns, first, stop, low, high, bf16):  # type: ignore[no-untyped-def]
    """Add hidden Bᵀ of one part to out, or write it there if `frame.zero`, for the blocks of columns that
    begin in columns ``[low, high)`` of the result."""
    size, out_size, row_bytes = (2 if bf16 else 4), (2 if frame.out_bf16 else 4), 4 * frame.most_ranks
    bf, writes = frame.out_bf16, frame.zero
    block_bytes = MULTIPLE * rank * size
    begin = max(0, (low - start + MULTIPLE - 1) // MULTIPLE)
    end = (min(columns, high - start) + MULTIPLE - 1) // MULTIPLE
    for block in range(begin, end):
        column, at = block * MULTIPLE, b + block * block_bytes
        to = (start + column) * out_size
        count = min(MULTIPLE, columns - column)
        for row in range(first, stop, 4):
            r1, r2, r3 = min(row + 1, stop - 1), min(row + 2, stop - 1), min(row + 3, stop - 1)
            h0, h1 = hidden + row * row_bytes, hidden + r1 * row_bytes
            h2, h3 = hidden + r2 * row_bytes, hidden + r3 * row_bytes
            o0, o1, o2, o3 = _out_at(frame, row), _out_at(frame, r1), _out_at(frame, r2), _out_at(frame, r3)
            if count == MULTIPLE:
                for lane in range(0, MULTIPLE, LANES):
                    zero = vl.splat_f32(0.0)
                    s0, s1, s2, s3 = zero, zero, zero, zero
                    for j in range(rank):
                        vl.prefetch(at + (MULTIPLE * j + lane) * size + AHEAD)
                        y = vl.load_as(at + (MULTIPLE * j + lane) * size, bf16)
                        s0 = vl.fma(vl.splat_f32(vl.read_f32(h0 + 4 * j)), y, s0)
                        s1 = vl.fma(vl.splat_f32(vl.read_f32(h1 + 4 * j)), y, s1)
                        s2 = vl.fma(vl.splat_f32(vl.read_f32(h2 + 4 * j)), y, s2)
                        s3 = vl.fma(vl.splat_f32(vl.read_f32(h3 + 4 * j)), y, s3)
                    place = to + lane * out_size
                    if not writes:
                        # Read all four rows before writing one: past the segment's end they are its last row.
                        s0 = vl.add(vl.load_as(o0 + place, bf), s0)
                        s1 = vl.add(vl.load_as(o1 + place, bf), s1)
                        s2 = vl.add(vl.load_as(o2 + place, bf), s2)
                        s3 = vl.add(vl.load_as(o3 + place, bf), s3)
                    vl.store_as(o0 + place, s0, bf)
                    vl.store_as(o1 + place, s1, bf)
                    vl.store_as(o2 + place, s2, bf)
                    vl.store_as(o3 + place, s3, bf)
            else:
                for r in range(row, min(row + 4, stop)):
                    out, h = _out_at(frame, r) + to, hidden + r * row_bytes
                    for c in range(count):
                        total = np.float32(0.0)
                        for j in range(rank):
                            total += vl.read_f32(h + 4 * j) * vl.read_as(at + (MULTIPLE * j + c) * size, bf16)
                        if not writes:
                            total += vl.read_as(out + c * out_size, bf)
                        vl.write_as(out + c * out_size, total, bf)


@part
def _zero(frame, first, stop, begin, end):  # type: ignore[no-untyped-def]
    for row in range(first, stop):
        to = _out_at(frame, row)
        for column in range(begin, end):
            vl.write_f32(to + 4 * column, np.float32(0.0))


@part
def _expand(frame, weight_at, first, stop, block):  # type: ignore[no-untyped-def]
    low = block * EXPAND_COLUMNS
    high = min(low + EXPAND_COLUMNS, frame.outputs)
    if not weight_at:
        if frame.zero:
            _zero(frame, first, stop, low, high)
        return
    weight = carray(vl.as_pointer(weight_at), 1, RECORD)[0]
    hidden, done = frame.hidden, 0
    for place in range(weight.parts):
        at = weight_at + PART_AT + PART_BYTES * place
        b, rank = vl.read_i64(at), vl.read_i64(at + 8)
        start, columns = vl.read_i64(at + 16), vl.read_i64(at + 24)
        if frame.zero:
            _zero(frame, first, stop, max(low, done), min(high, start))
        _expand_part(frame, hidden, b, rank, start, columns, first, stop, low, high, weight.bf16)
        hidden += 4 * rank
        done = start + columns
    if frame.zero:
        _zero(frame, first, stop, max(low, done), high)


@part
def _item(frame, index):  # type: ignore[no-untyped-def]
    if frame.stage == 0:
        _prepare(frame, index)
        return
    at = frame.segments + 24 * (index // frame.blocks)
    block = index % frame.blocks
    weight_at = vl.read_i64(frame.table + 8 * vl.read_i64(at))
    first, stop = vl.read_i64(at + 8), vl.read_i64(at + 16)
    if frame.stage == 2:
        _expand(frame, weight_at, first, stop, block)
    elif weight_at:
        _shrink(frame, carray(vl.as_pointer(weight_at), 1, RECORD)[0], first, stop, block)


@callback(types.void(types.voidptr))
def _body(data):  # type: ignore[no-untyped-def]
    frame = carray(data, 1, FRAME)[0]
    index = vl.fetch_increment(frame.arena)
    while index < frame.items:
        _item(frame, index)
        index = vl.fetch_increment(frame.arena)


@compiled(types.int64(types.int64))
def add_adapters(call_at):  # type: ignore[no-untyped-def]
    """Compute the product that the FRAME at address `call_at` describes. Returns 0 when done, else the bytes
    that the arena must have. The arena that `fill_call` leaves is large enough.
    """
    frame = carray(vl.as_pointer(call_at), 1, FRAME)[0]
    frame.padded = vl.round_up(frame.inputs, MULTIPLE)
    wide_bytes = vl.round_up(4 * frame.rows * frame.padded, 64)
    spare_bytes = vl.round_up(2 * frame.rows * frame.padded, 64) if frame.norm and frame.bf16 else 0
    needed = _COUNTER_BYTES + wide_bytes + spare_bytes + 4 * frame.rows * frame.most_ranks
    if needed > frame.arena_bytes:
        return needed
    frame.wide = frame.arena + _COUNTER_BYTES
    frame.spare = frame.wide + wide_bytes
    frame.hidden = frame.spare + spare_bytes
    for stage in range(3):
        frame.stage = stage
        frame.items = frame.rows
        if stage:
            size, unit = (frame.most_ranks, SHRINK_ROWS) if stage == 1 else (frame.outputs, EXPAND_COLUMNS)
            frame.blocks = (size + unit - 1) // unit
            frame.items = frame.segment_count * frame.blocks
        vl.write_i64(frame.arena, 0)
        serial = stage == 0 and frame.rows * frame.inputs < SERIAL_NUMBERS
        run_body(frame, call_at, 1 if serial else min(frame.threads, frame.items))
    return 0


arena = Arena(FRAME, _body.address, 1 << 16)


def fill_call(rows: LoraRows, weights: Sequence[LoraWeight]) -> Any:
    """This thread's FRAME with the arguments that all products of a step share. The arena gets room for the
    largest product by one of `weights`."""
    call = arena.call
    call.segments, call.segment_count = rows.segments.ctypes.data, len(rows.segments)
    call.order, call.rows = rows.order.ctypes.data, len(rows.order)
    call.most_ranks = max(len(weight.a) for weight in weights)
    call.threads = torch.get_num_threads()
    inputs = max(weight.a.shape[1] for weight in weights)
    needed = 512 + len(rows.order) * (6 * inputs + 4 * call.most_ranks)
    if needed > arena.size:
        arena.grow(2 * needed)
    return call


def lora(
    x: Tensor,
    table: LoraTable,
    rows: LoraRows,
    *,
    out: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """As `reference.lora.lora`."""
    found = [table.weights[slot] for slot in rows.present if slot in table.weights]
    if not found:
        return out
    call, size, out_size = fill_call(rows, found), x.element_size(), out.element_size()
    call.table, call.zero = table.addresses.ctypes.data, False
    call.x, call.x_row, call.bf16, call.inputs = x.data_ptr(), size * x.stride(0), size == 2, x.shape[1]
    call.out, call.out_row, call.out_bf16 = out.data_ptr(), out_size * out.stride(0), out_size == 2
    call.outputs = out.shape[1]
    call.norm, call.eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    arena.finish(add_adapters)
    return out
