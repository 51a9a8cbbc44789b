"""Products with packed weights, y = x Wᵀ: from one row, bound by memory, to a whole prefill.

    for row of x:                                   threads take eight rows at a time
        prepare it: norm, order of inputs, padding; widen, or round to int8 or int16
    for block of rows, four panels of W:            a work item; each thread begins with a part of the items
        for up to eight rows, one to four panels:   an inner loop (`tiles.py`, `int8.py`), sums in registers
            for group of inputs, eight inputs: sums += x · weights;  c += factors · sums
        y = gate(c + extra + bias) (+ residual)     while c is in the processor's cache

Memory: a panel has 16 outputs, its weights in the order of use (`weights/packed.py`). The arena has the
prepared rows, then each thread's scratch memory (`BLOCK`, c). Few rows are bound by reading W, many by
arithmetic.

There are five ways to multiply; all accumulate in float32:

    BY_F32     float32, on any processor
    BY_DOTS    dots of bfloat16 pairs (AVX512_BF16), for bfloat16 x and weights that fit bfloat16 exactly
    BY_TILES   AMX tiles, from TILE_FROM or TILE_FROM_ROUNDED rows; an item has two panels, and for 256 inputs
               at a time quantised weights are rounded to bfloat16 and multiplied by all rows of the block.
               For the first 32 rows a tile is rounded while the tile before is multiplied
    BY_INT8    dots of bytes (AVX512_VNNI, AVX2, Arm's sdot), with x rounded to int8
               (`packed_linear/int8.py`); only on request
    BY_INT16   dots of pairs (AVX2 without AVX-512), for int8 weights, with x rounded to int16; only on
               request. A product whose groups are longer than MOST_INT16_GROUP is BY_F32 instead

A row of the result depends on its row of x and on the way, but not on other rows, the number of rows or the
number of threads. A call chooses its way by its number of rows; with `by_row` the way is the same for any
number of rows.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import torch
from numba import types
from torch import Tensor

from ramify.kernels.arguments.checks import check_linear
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import callback, carray, compiled, part
from ramify.kernels.cpu.codegen.dots import DOTS
from ramify.kernels.cpu.codegen.functions import run_body
from ramify.kernels.cpu.codegen.timers import PREPARE_TIME, WAIT_TIME, begin, lap
from ramify.kernels.cpu.packed_linear import code as code
from ramify.kernels.cpu.packed_linear import tiles as tiles
from ramify.kernels.cpu.packed_linear.byte_dots import FORMS, INT16_X
from ramify.kernels.cpu.packed_linear.code import WIDTH
from ramify.kernels.cpu.packed_linear.int8 import GROUP_BYTES, MOST_INT16_GROUP
from ramify.kernels.cpu.packed_linear.items import (
    BY_DOTS,
    BY_F32,
    BY_INT8,
    BY_INT16,
    BY_TILES,
    C_BYTES,
    C_ROW,
    CONFIG_BYTES,
    FRAME,
    ITEM_PANELS,
    MOST_ROWS,
    PAIR,
    configure,
    kernel_rows,
    multiply,
    multiply_by_tiles,
    release,
    tile_inputs,
)
from ramify.kernels.cpu.packed_linear.rows import prepare
from ramify.kernels.machine.records import Arena
from ramify.kernels.weights.lora import Extra
from ramify.kernels.weights.packed import LAYOUT, PackedWeight

TILE_FROM, TILE_FROM_ROUNDED = 5, 13
"""The numbers of rows from which tiles are faster than dots, and than BY_INT8: 16 rows by tiles, most of it
the decode to bfloat16, take as long as 13 rows of BY_INT8."""
SERIAL_BYTES = 1 << 15
"""The least bytes of weights times rows for each thread: for less, one more thread costs more than it
saves."""
ITEMS_A_THREAD = 8
"""Rows are divided into blocks until each thread has this many items, so that threads end together."""
LEAST_BLOCK_ROWS, MOST_BLOCK_ROWS = 16, 128
"""The least and the most rows of a block. With more than 128, x would leave the second-level cache between
two items."""
MOST_TILE_ROWS = 1024
"""The most rows of a block for tiles. Each block decodes its weights again."""
ROWS_AT_ONCE = MOST_ROWS
"""Rows of x that a thread prepares at a time: as many as a kernel takes at once, because the rows of a kernel
may be interleaved."""

FRAME_BYTES = FRAME.itemsize
TEAM, PREPARE, PREPARED, MULTIPLY = 0, 64, 128, 192
"""Byte offsets of a call's counters, each in a cache line of its own: threads started, preparing items taken,
preparing items done, and from MULTIPLY on for each thread the items taken of its part."""


@callback(types.void(types.voidptr))
def _body(data):  # type: ignore[no-untyped-def]
    head = carray(data, 1, FRAME)[0]
    since = begin(head.times)
    frame, place, start = head, 0, 0
    layout = carray(vl.as_pointer(frame.layout), 1, LAYOUT)[0]
    thread = vl.fetch_increment(head.counters + TEAM)
    scratch = head.scratch + thread * head.scratch_bytes
    block = code.block_at(scratch)
    block.x_row, block.sums_row, block.c_row = frame.x_row, frame.sums_row, C_ROW
    block.scale_kind, block.offsets = layout.scale_kind, layout.offsets
    block.tables, block.raised = layout.tables_at, layout.raised
    block.groups = layout.padded // layout.group if layout.group else 1
    block.steps = (layout.group if layout.group else layout.padded) // 8
    index = vl.fetch_increment(head.counters + PREPARE)
    while index < head.prepare_total:
        while index >= frame.prepare_end:
            place, start = place + 1, frame.prepare_end
            frame = carray(vl.as_pointer(head.frames + place * FRAME_BYTES), 1, FRAME)[0]
            layout = carray(vl.as_pointer(frame.layout), 1, LAYOUT)[0]
        first = (index - start) * ROWS_AT_ONCE
        for row in range(first, min(first + ROWS_AT_ONCE, frame.room)):
            prepare(frame, layout, row, scratch)
        vl.fetch_increment(head.counters + PREPARED)
        index = vl.fetch_increment(head.counters + PREPARE)
    since = lap(head.times, PREPARE_TIME, since)
    vl.spin_until(head.counters + PREPARED, head.prepare_total)
    lap(head.times, WAIT_TIME, since)
    by_tiles = head.way == BY_TILES
    if by_tiles:
        # Palette 1: eight tiles of 16 rows (bytes 48 to 55) of 64 bytes (words from byte 16 on).
        config = scratch + code.BLOCK_BYTES
        for i in range(8):
            vl.write_i64(config + 8 * i, 0)
        vl.write_i64(config, 1)
        vl.write_i64(config + 16, 0x0040004000400040)
        vl.write_i64(config + 24, 0x0040004000400040)
        vl.write_i64(config + 48, 0x1010101010101010)
        block.b0 = config
        configure(scratch)
    for turn in range(head.team_size):
        # Neighbouring items, so that a thread's weights are one stream; then what the others have left.
        part = (thread + turn) % head.team_size
        counter, first = head.counters + MULTIPLY + 64 * part, head.total * part // head.team_size
        last = head.total * (part + 1) // head.team_size
        frame, place, start = head, 0, 0
        layout = carray(vl.as_pointer(frame.layout), 1, LAYOUT)[0]
        index = first + vl.fetch_increment(counter)
        while index < last:
            while index >= frame.end:
                place, start = place + 1, frame.end
                frame = carray(vl.as_pointer(head.frames + place * FRAME_BYTES), 1, FRAME)[0]
                layout = carray(vl.as_pointer(frame.layout), 1, LAYOUT)[0]
            if by_tiles:
                multiply_by_tiles(frame, layout, index - start, scratch)
            else:
                multiply(frame, layout, index - start, scratch)
            index = first + vl.fetch_increment(counter)
    if by_tiles:
        release(scratch)


@part
def counter_bytes(threads):  # type: ignore[no-untyped-def]
    """Bytes of the counters of a call on `threads` threads."""
    return MULTIPLY + 64 * threads


@part
def divide(frame, layout, threads):  # type: ignore[no-untyped-def]
    """Cut a product into items. `frame` must have `way`, `rows` and `panels`."""
    if frame.way == BY_INT16 and layout.group > MOST_INT16_GROUP:
        frame.way = BY_F32
    rows, way = frame.rows, frame.way
    if way == BY_TILES:
        frame.items = frame.panels // PAIR
        frame.block_rows = min(rows, MOST_TILE_ROWS)
    else:
        frame.items = frame.panels // ITEM_PANELS
        for_threads = min(ITEMS_A_THREAD * threads // frame.items + 1, rows // LEAST_BLOCK_ROWS)
        blocks = max(1, for_threads, rows // MOST_BLOCK_ROWS)
        frame.block_rows = vl.round_up(rows // blocks, MOST_ROWS)
    frame.row_blocks = (rows + frame.block_rows - 1) // frame.block_rows
    frame.items *= frame.row_blocks
    frame.sums_row = 0
    if way in (BY_INT8, BY_INT16):
        frame.sums_row = GROUP_BYTES * (layout.padded // layout.group)
    elif layout.offsets and way != BY_TILES:
        frame.sums_row = 4 * (layout.padded // layout.group)
    frame.scratch_bytes = code.BLOCK_BYTES + C_BYTES
    if way == BY_TILES:
        frame.scratch_bytes = code.BLOCK_BYTES + CONFIG_BYTES + vl.round_up(frame.block_rows, 16) * C_ROW
        frame.scratch_bytes += PAIR * 2 * WIDTH * tile_inputs(layout)
    spare_bytes = (8 if layout.order_at else 4) * layout.padded
    frame.scratch_bytes = vl.round_up(max(frame.scratch_bytes, code.BLOCK_BYTES + spare_bytes), 128)


@part
def locate(frame, layout, at):  # type: ignore[no-untyped-def]
    """Give the prepared rows of a divided product memory from `at` on; return the end of this memory."""
    rows, way = frame.rows, frame.way
    size = 4 if way == BY_F32 else 1 if way == BY_INT8 else 2
    whole = layout.inputs == layout.padded and not frame.norm_at and not frame.x_rows_at
    in_place = way == BY_TILES and whole and not layout.order_at
    if way == BY_TILES:
        room = vl.round_up(rows, 16)
    else:
        room = rows - rows % MOST_ROWS
        if rows % MOST_ROWS:
            room += kernel_rows(rows % MOST_ROWS)
    first = rows - rows % 32 if in_place else 0
    frame.first, frame.room = first, room - first
    frame.tail, frame.tail_from = at, first
    frame.prepared, frame.prepared_row = at, size * layout.padded
    frame.x, frame.x_row = (frame.from_x, frame.from_row) if in_place else (at, size * layout.padded)
    frame.sums = at + vl.round_up(frame.room * size * layout.padded, 64)
    return frame.sums + vl.round_up(frame.room * frame.sums_row, 64)


@part
def launch(frames, products, threads):  # type: ignore[no-untyped-def]
    """Run `products` divided and located products, with frames from `frames` on: prepare x, then multiply."""
    head = carray(vl.as_pointer(frames), 1, FRAME)[0]
    head.frames = frames
    preparing, items = 0, 0
    for place in range(products):
        frame = carray(vl.as_pointer(frames + place * FRAME_BYTES), 1, FRAME)[0]
        preparing += (frame.room + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
        items += frame.items
        frame.prepare_end, frame.end = preparing, items
    head.prepare_total, head.total = preparing, items
    head.team_size = min(threads, items)
    for counter in range(0, counter_bytes(head.team_size), 64):
        vl.write_i64(head.counters + counter, 0)
    run_body(head, frames, head.team_size)


@compiled(types.int64(types.int64))
def run_product(call_at):  # type: ignore[no-untyped-def]
    """Compute the product that the FRAME at address `call_at` describes.

    Returns 0 when done, else the bytes that the arena must have.
    """
    frame = carray(vl.as_pointer(call_at), 1, FRAME)[0]
    layout = carray(vl.as_pointer(frame.layout), 1, LAYOUT)[0]
    threads = frame.threads
    frame.x_rows_at = frame.rows_at
    frame.panels = frame.chosen_count if frame.chosen else layout.panels
    if threads * SERIAL_BYTES > frame.panels * layout.panel_bytes * frame.rows:
        threads = 1
    divide(frame, layout, threads)
    threads = min(threads, frame.items)
    frame.counters = frame.arena
    frame.scratch = locate(frame, layout, frame.counters + counter_bytes(threads))
    end = frame.scratch + threads * frame.scratch_bytes
    if end > frame.arena + frame.arena_bytes:
        return end - frame.arena
    launch(call_at, 1, threads)
    return 0


@functools.cache
def tiles_allowed() -> bool:
    """Whether this process may use AMX: Linux saves the tile registers only for processes that ask for it."""
    if not tiles.TILES or platform.system() != "Linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)) == 0


def way_for(
    rows: int, form: str, dtype: torch.dtype, *, by_row: bool = False, int8: bool = False, int16: bool = False
) -> int:
    """The way that multiplies `rows` rows of x of `dtype` by weights of format `form`.

    by_row : choose the same way for any number of rows
    int8 : x may be rounded to int8 or int16 if the processor is faster with these
    int16 : x may be rounded to int16 if the processor is faster with int16
    """
    narrow = dtype == torch.bfloat16 and form != "f32"
    by_bytes = int8 and form in FORMS
    tile_from = TILE_FROM_ROUNDED if by_bytes else TILE_FROM
    if narrow and rows >= tile_from and tiles_allowed() and not by_row:
        return BY_TILES
    if by_bytes:
        return BY_INT8
    if (int8 or int16) and form == "int8" and INT16_X:
        return BY_INT16
    return BY_DOTS if narrow and DOTS else BY_F32


body_address = _body.address
arena = Arena(FRAME, body_address)


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
    add: bool = False,
    extra: Extra | None = None,
    by_row: bool = False,
    int8: bool = False,
    int16: bool = False,
) -> Tensor:
    """As `reference.linear.linear`; `by_row`, `int8` and `int16` as in `way_for`."""
    out = check_linear(x, weight, norm, out, add)
    if len(x):
        way = way_for(len(x), weight.format, x.dtype, by_row=by_row, int8=int8, int16=int16)
        multiply_rows(x, weight, norm, out, add, way, len(x), extra=extra)
    return out


def fill_call(x: Tensor, out: Tensor, rows: int) -> Any:
    """This thread's FRAME, for `run_product`: a product of the first `rows` rows of x, without extra terms.

    The caller sets `layout`, `way`, `norm_at`, `eps` and `add`.
    """
    call, size, out_size = arena.call, x.element_size(), out.element_size()
    call.rows, call.chosen, call.rows_at, call.extra, call.extra_from = rows, 0, 0, 0, 0
    call.from_x, call.from_row, call.from_bf16 = x.data_ptr(), size * x.stride(0), size == 2
    call.out, call.out_row, call.out_bf16 = out.data_ptr(), out_size * out.stride(0), out_size == 2
    call.threads = torch.get_num_threads()
    return call


def multiply_rows(
    x: Tensor,
    weight: PackedWeight,
    norm: tuple[Tensor, float] | None,
    out: Tensor,
    add: bool,
    way: int,
    rows: int,
    chosen: tuple[int, int] = (0, 0),
    rows_at: int = 0,
    extra: Extra | None = None,
) -> None:
    """`linear` without checks, for `rows` > 0 rows. `chosen` is (address, number) of the panels to compute;
    `rows_at` is as in `FRAME`."""
    call = fill_call(x, out, rows)
    call.layout, call.way, call.add = weight.layout[0], way, add
    call.norm_at, call.eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    (call.chosen, call.chosen_count), call.rows_at = chosen, rows_at
    if extra is not None:
        extras = extra.addresses()
        call.extra = extras.ctypes.data
    arena.finish(run_product)
