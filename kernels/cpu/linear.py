"""Products with packed weights, y = x Wᵀ: from one row, where memory decides, to a whole prefill.

Three ways to multiply: in float32, on any processor; by dots of bfloat16 pairs (AVX512_BF16), where x is
bfloat16 and the numbers of the weights fit bfloat16 exactly; by tiles (AMX) from TILE_FROM rows on, for
which int8 and int4 weights are first rounded to bfloat16 in a thread's own memory. All add up in float32.

A row of the result depends on its own row of x and on the way that was taken, on nothing else: not on the
other rows, how many there are, or the number of threads. A call takes one way, by its number of rows;
`row_linear` takes one for any number.

A work item is four panels, all rows; threads take items in turn. What follows the product (bias, gating,
addition to a residual) is done while its results are in the cache.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.checks import check_linear
from ramify.kernels.cpu import linear_tiles as tiles
from ramify.kernels.cpu.attention_tile import up
from ramify.kernels.cpu.compiler import callback, carray, compiled, part, sources
from ramify.kernels.cpu.dots import DOTS
from ramify.kernels.cpu.fork import call_at, fork_at
from ramify.kernels.cpu.kv_store import copy_bytes
from ramify.kernels.cpu.linear_items import (
    BY_DOTS,
    BY_F32,
    BY_TILES,
    C_BYTES,
    C_ROW,
    CONFIG_BYTES,
    FRAME,
    ITEM_PANELS,
    MOST_ROWS,
    configure,
    kernel_rows,
    multiply,
    multiply_by_tiles,
    release,
    row_at,
)
from ramify.kernels.cpu.linear_tiles import WIDTH
from ramify.kernels.cpu.norm import normalise
from ramify.kernels.cpu.simd import (
    LANES,
    add,
    as_pointer,
    bf16_at,
    load,
    load_bf16,
    next_ticket,
    set_bf16,
    set_f32,
    set_i64,
    splat_f32,
    store,
    sum_lanes,
)
from ramify.kernels.cpu.team import fork_address
from ramify.kernels.packed import LAYOUT, PackedWeight

TILE_FROM = 5
"""From so many rows on, tiles are faster than dots."""
SERIAL_BYTES = 1 << 15
"""Up to so many bytes of weights a second thread would cost more than it saves."""

_FRAME_BYTES = FRAME.itemsize
_COUNTER_BYTES = 128


def _build_body(sources: str) -> Any:
    @callback(types.void(types.voidptr))
    def body(data):  # type: ignore[no-untyped-def]
        """What each thread does: take items until there are none."""
        sources  # noqa: B018
        frame = carray(data, 1, FRAME)[0]
        layout = carray(as_pointer(frame.layout), 1, LAYOUT)[0]
        scratch = frame.scratch + next_ticket(frame.counters + 64) * frame.scratch_bytes
        block = scratch
        set_i64(block + 8 * tiles.X_ROW, frame.x_row)
        set_i64(block + 8 * tiles.SUMS_ROW, frame.sums_row)
        set_i64(block + 8 * tiles.C_ROW, C_ROW)
        set_i64(block + 8 * tiles.WIDE, layout.wide)
        set_i64(block + 8 * tiles.GROUPS, layout.padded // layout.group if layout.group else 1)
        set_i64(block + 8 * tiles.STEPS, (layout.group if layout.group else layout.padded) // 8)
        index = next_ticket(frame.counters)
        if frame.way == BY_TILES:
            # Palette 1: eight tiles of 16 rows (bytes 48 to 55) of 64 bytes (words from byte 16 on).
            config = scratch + tiles.BLOCK_BYTES + C_BYTES
            for i in range(8):
                set_i64(config + 8 * i, 0)
            set_i64(config, 1)
            set_i64(config + 16, 0x0040004000400040)
            set_i64(config + 24, 0x0040004000400040)
            set_i64(config + 48, 0x1010101010101010)
            set_i64(block + 8 * tiles.B, config)
            configure(block)
            while index < frame.items:
                multiply_by_tiles(frame, layout, index, scratch)
                index = next_ticket(frame.counters)
            release(block)
            return
        while index < frame.items:
            multiply(frame, layout, index, scratch)
            index = next_ticket(frame.counters)

    return body


@part
def _copy_rows(frame, layout, x, x_row, x_bf16, first, to, room):  # type: ignore[no-untyped-def]
    """Rows from `first` on, as the kernels read them, then rows of zeros: `room` in all."""
    wide = frame.way == BY_F32
    size = 4 if wide else 2
    row_bytes = size * layout.padded
    for row in range(room):
        target = to + row * row_bytes
        filled = 0
        if first + row < frame.rows:
            at = x + row_at(frame, first + row) * x_row
            filled = layout.inputs
            if frame.norm_at:
                # A bfloat16 row is rounded as a norm of its own would, then widened where that is wanted.
                to_row = frame.normed if wide and x_bf16 else target
                normalise(at, to_row, frame.norm_at, filled, frame.eps, x_bf16)
                at = to_row
            if at == target:
                pass
            elif wide and x_bf16:
                whole = filled - filled % LANES
                for i in range(0, whole, LANES):
                    store(target + 4 * i, load_bf16(at + 2 * i))
                for i in range(whole, filled):
                    set_f32(target + 4 * i, bf16_at(at + 2 * i))
            else:
                copy_bytes(target, at, size * filled)
        for i in range(filled, layout.padded):
            if wide:
                set_f32(target + 4 * i, np.float32(0.0))
            else:
                set_bf16(target + 2 * i, np.float32(0.0))


@part
def _sum_groups(frame, layout, x, rows):  # type: ignore[no-untyped-def]
    """The sum of each group of inputs of each prepared row, float32."""
    for row in range(rows):
        to = frame.sums + row * frame.sums_row
        for first in range(0, layout.padded, layout.group):
            total = splat_f32(0.0)
            for i in range(first, first + layout.group, LANES):
                if frame.way == BY_DOTS:
                    total = add(total, load_bf16(x + row * frame.x_row + 2 * i))
                else:
                    total = add(total, load(x + row * frame.x_row + 4 * i))
            set_f32(to + 4 * (first // layout.group), sum_lanes(total))


def _build_run(sources: str) -> Any:
    @compiled(types.int64(*[types.int64] * 16, types.float64, *[types.int64] * 3))
    def run(  # type: ignore[no-untyped-def]
        layout_at, x, x_row, x_bf16, rows, out, out_row, out_bf16, adds, way,
        threads, fork, body, arena, arena_bytes, norm, eps, chosen, panels, rows_at,
    ):  # fmt: skip
        """0 when done; else the bytes of arena that are needed.

        chosen : address of `panels` int32, the panels to compute; 0 for all of them
        rows_at : address of `rows` int64, the rows of x and out to compute; 0 for the first
        """
        sources  # noqa: B018
        frame = carray(as_pointer(arena), 1, FRAME)[0]
        layout = carray(as_pointer(layout_at), 1, LAYOUT)[0]
        frame.layout, frame.way, frame.rows = layout_at, way, rows
        frame.out, frame.out_row, frame.out_bf16, frame.add = out, out_row, out_bf16, adds
        frame.chosen, frame.rows_at = chosen, rows_at
        if not chosen:
            panels = layout.panels
        frame.items = panels // ITEM_PANELS
        if threads * SERIAL_BYTES > panels * layout.panel_bytes * rows:
            threads = 1
        threads = min(threads, frame.items)

        size = 4 if way == BY_F32 else 2
        frame.norm_at, frame.eps = norm, eps
        in_place = way == BY_TILES and layout.inputs == layout.padded and not norm and not rows_at
        if way == BY_TILES:
            room = up(rows, 16)
        else:
            room = rows - rows % MOST_ROWS
            if rows % MOST_ROWS:
                room += kernel_rows(rows % MOST_ROWS)
        first = rows - rows % 32 if in_place else 0
        room -= first
        copied = up(room * size * layout.padded, 64)
        sums = layout.form == 2 and way != BY_TILES
        frame.sums_row = 4 * (layout.padded // layout.group) if sums else 0
        sum_bytes = up(room * frame.sums_row, 64)
        frame.scratch_bytes = tiles.BLOCK_BYTES + C_BYTES + CONFIG_BYTES
        if way == BY_TILES and layout.form:
            frame.scratch_bytes += 4 * WIDTH * layout.padded
        frame.scratch_bytes = up(frame.scratch_bytes, 128)

        frame.counters = arena + up(_FRAME_BYTES, 64)
        at = frame.counters + _COUNTER_BYTES
        frame.tail, frame.tail_from = at, first
        frame.sums = at + copied
        frame.normed = up(frame.sums + sum_bytes, 64)
        frame.scratch = up(frame.normed + 2 * layout.padded, 64)
        end = frame.scratch + threads * frame.scratch_bytes
        if end > arena + arena_bytes:
            return end - arena
        frame.x, frame.x_row = (x, x_row) if in_place else (at, size * layout.padded)
        _copy_rows(frame, layout, x, x_row, x_bf16, first, at, room)
        if sums:
            _sum_groups(frame, layout, at, room)
        set_i64(frame.counters, 0)
        set_i64(frame.counters + 64, 0)
        if threads == 1:
            call_at(body, arena)
        else:
            fork_at(fork, body, arena, threads)
        return 0

    return run


_body = _build_body(sources())
run = _build_run(sources())
body_address = _body.address


@functools.cache
def tiles_allowed() -> bool:
    """Whether this process may use AMX: Linux gives the state of its registers only to who asks."""
    if not tiles.TILES or platform.system() != "Linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)) == 0


def way_for(rows: int, form: str, dtype: torch.dtype, *, by_row: bool = False) -> int:
    """Which of the three ways multiplies so many rows of x by weights of a format.

    With `by_row` the number of rows does not matter.
    """
    if dtype != torch.bfloat16 or form == "f32":
        return BY_F32
    if rows >= TILE_FROM and tiles_allowed() and not by_row:
        return BY_TILES
    return BY_DOTS if DOTS else BY_F32


class _Arena(threading.local):
    """Working memory of one calling thread, kept between calls."""

    def __init__(self) -> None:
        self.grow(1 << 20)

    def grow(self, size: int) -> None:
        self.memory = np.empty(size + 64, np.uint8)
        self.address = -(-self.memory.ctypes.data // 64) * 64
        self.size = size


arena = _Arena()


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """As `reference.linear.linear`, whose docstring is the contract."""
    return _multiplied(x, weight, norm, out, add, way_for(len(x), weight.format, x.dtype))


def row_linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """As `linear`, by one way for any number of rows: a row's bits depend on it and the weight alone."""
    return _multiplied(x, weight, norm, out, add, way_for(len(x), weight.format, x.dtype, by_row=True))


def _multiplied(
    x: Tensor,
    weight: PackedWeight,
    norm: tuple[Tensor, float] | None,
    out: Tensor | None,
    add: bool,
    way: int,
) -> Tensor:
    out = check_linear(x, weight, norm, out, add)
    if len(x):
        multiply_rows(x, weight, norm, out, add, way, len(x))
    return out


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
) -> None:
    """Checked arguments; `rows` above 0. `chosen` (address, number) and `rows_at` as `run` takes them."""
    x_bf16, out_bf16 = x.dtype == torch.bfloat16, out.dtype == torch.bfloat16
    x_row, out_row = x.stride(0), out.stride(0)
    norm_at, eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    while True:
        needed = run(
            weight.layout[0], x.data_ptr(), 2 * x_row if x_bf16 else 4 * x_row, x_bf16, rows,
            out.data_ptr(), 2 * out_row if out_bf16 else 4 * out_row, out_bf16, add, way,
            torch.get_num_threads(), fork_address(), body_address, arena.address, arena.size, norm_at, eps,
            *chosen, rows_at,
        )  # fmt: skip
        if not needed:
            return
        arena.grow(2 * needed)
