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
from ramify.kernels.cpu.fork import call_at, fork_at
from ramify.kernels.cpu.kv_store import copy_bytes
from ramify.kernels.cpu.linear_tiles import WIDTH
from ramify.kernels.cpu.norm import normalise
from ramify.kernels.cpu.simd import (
    BYTES,
    LANES,
    add,
    as_pointer,
    bf16_at,
    div,
    exp2,
    f32_at,
    i64_at,
    load,
    load_bf16,
    minimum,
    mul,
    next_ticket,
    set_bf16,
    set_f32,
    set_i64,
    splat_f32,
    store,
    store_bf16,
    sum_lanes,
)
from ramify.kernels.cpu.team import fork_address
from ramify.kernels.packed import LAYOUT, PANEL_MULTIPLE, PackedWeight

ITEM_PANELS = PANEL_MULTIPLE
TILE_FROM = 5
"""From so many rows on, tiles are faster than dots."""
SERIAL_BYTES = 1 << 15
"""Up to so many bytes of weights a second thread would cost more than it saves."""

_F32, _DOTS, _TILES = 0, 1, 2

FRAME = np.dtype([(name, np.int64) for name in (
    "layout", "way", "x", "x_row", "tail", "tail_from", "sums", "sums_row", "rows",
    "out", "out_row", "out_bf16", "add", "items", "counters", "scratch", "scratch_bytes", "norm_at", "normed",
)] + [("eps", np.float64)])  # fmt: skip

_FRAME_BYTES = FRAME.itemsize
_COUNTER_BYTES = 128
_MOST_ROWS = max(tiles.ROWS)
_C_ROW = 4 * WIDTH * ITEM_PANELS
_C_BYTES = 32 * _C_ROW
_CONFIG_BYTES = 64
_LOG2_E = 1.4426950408889634


def _chooser(form: str, dots: bool) -> Any:
    """A function that runs the kernel of `form` for `rows` rows over the panels of an item."""
    kernels = tiles.products(form, dots)
    one, two, four = kernels[1], kernels[2], kernels[4]
    eight = kernels.get(8, four)
    at_once = tuple(tiles.panels_at_once(min(1 << i, _MOST_ROWS)) for i in range(4))

    @part
    def choose(block, rows):  # type: ignore[no-untyped-def]
        if rows == 1:
            panels = at_once[0]
        elif rows == 2:
            panels = at_once[1]
        elif rows == 4:
            panels = at_once[2]
        else:
            panels = at_once[3]
        q_step = panels * i64_at(block + 8 * tiles.Q_PANEL)
        s_step = panels * i64_at(block + 8 * tiles.S_PANEL)
        set_i64(block + 8 * tiles.AHEAD, q_step)
        for _ in range(ITEM_PANELS // panels):
            if rows == 1:
                one(block)
            elif rows == 2:
                two(block)
            elif rows == 4:
                four(block)
            else:
                eight(block)
            set_i64(block + 8 * tiles.Q, i64_at(block + 8 * tiles.Q) + q_step)
            set_i64(block + 8 * tiles.S, i64_at(block + 8 * tiles.S) + s_step)
            set_i64(block + 8 * tiles.C, i64_at(block + 8 * tiles.C) + 4 * WIDTH * panels)

    return choose


_bf16_f32, _int8_f32, _int4_f32, _f32_f32 = (
    _chooser(form, False) for form in ("bf16", "int8", "int4", "f32")
)
_bf16_dots, _int4_dots = _bf16_f32, _int4_f32  # not called
if tiles.DOTS:
    _bf16_dots, _int4_dots = (_chooser(form, True) for form in ("bf16", "int4"))


@part
def _kernel_rows(rows):  # type: ignore[no-untyped-def]
    """The rows of the smallest kernel that takes `rows`, or of the largest."""
    kernel = 1
    while kernel < rows and kernel < _MOST_ROWS:
        kernel *= 2
    return kernel


@part
def _finish(frame, layout, c, panel, panels, row, rows):  # type: ignore[no-untyped-def]
    """Bias, gate and write `rows` rows of `panels` panels from c on; the first are `row` and `panel`."""
    step = 2 if layout.gated else 1
    size = 2 if frame.out_bf16 else 4
    for r in range(rows):
        for p in range(0, panels, step):
            column = (panel + p) // step * WIDTH
            count = min(WIDTH, layout.results - column)
            if count <= 0:
                continue
            at = c + r * _C_ROW + 4 * WIDTH * p
            bias = layout.bias_at + 4 * WIDTH * (panel + p)
            to = frame.out + (row + r) * frame.out_row + column * size
            for i in range(0, 4 * WIDTH, BYTES):
                y = load(at + i)
                if layout.bias_at:
                    y = add(y, load(bias + i))
                if layout.gated:
                    through = load(at + 4 * WIDTH + i)
                    if layout.bias_at:
                        through = add(through, load(bias + 4 * WIDTH + i))
                    # silu(y) = y / (1 + exp(-y)); from 2**127 on the quotient is 0 either way.
                    power = minimum(mul(y, splat_f32(-_LOG2_E)), splat_f32(127.0))
                    y = mul(div(y, add(splat_f32(1.0), exp2(power))), through)
                store(at + i, y)
            if count == WIDTH and frame.out_bf16:
                for i in range(0, WIDTH, LANES):
                    y = load(at + 4 * i)
                    if frame.add:
                        y = add(y, load_bf16(to + 2 * i))
                    store_bf16(to + 2 * i, y)
            elif count == WIDTH:
                for i in range(0, WIDTH, LANES):
                    y = load(at + 4 * i)
                    if frame.add:
                        y = add(y, load(to + 4 * i))
                    store(to + 4 * i, y)
            else:
                for i in range(count):
                    number = f32_at(at + 4 * i)
                    if frame.out_bf16:
                        if frame.add:
                            number += bf16_at(to + 2 * i)
                        set_bf16(to + 2 * i, number)
                    else:
                        if frame.add:
                            number += f32_at(to + 4 * i)
                        set_f32(to + 4 * i, number)


@part
def _multiply(frame, layout, item, scratch):  # type: ignore[no-untyped-def]
    """One item by the float32 or the dot kernels, up to eight rows at a time."""
    block, c = scratch, scratch + tiles.BLOCK_BYTES
    first = item * ITEM_PANELS
    q = layout.panels_at + first * layout.panel_bytes
    s = layout.scales_at + first * layout.scale_bytes
    dots = frame.way == _DOTS
    row = 0
    while row < frame.rows:
        rows = _kernel_rows(frame.rows - row)
        set_i64(block + 8 * tiles.Q, q)
        set_i64(block + 8 * tiles.S, s)
        set_i64(block + 8 * tiles.X, frame.x + row * frame.x_row)
        set_i64(block + 8 * tiles.SUMS, frame.sums + row * frame.sums_row)
        set_i64(block + 8 * tiles.C, c)
        if layout.form == 0:
            if dots:
                _bf16_dots(block, rows)
            else:
                _bf16_f32(block, rows)
        elif layout.form == 1:
            _int8_f32(block, rows)
        elif layout.form == 3:
            _f32_f32(block, rows)
        elif dots:
            _int4_dots(block, rows)
        else:
            _int4_f32(block, rows)
        _finish(frame, layout, c, first, ITEM_PANELS, row, min(rows, frame.rows - row))
        row += rows


def _tile_item() -> Any:
    if not tiles.TILES:

        @part
        def refuse(frame, layout, item, scratch):  # type: ignore[no-untyped-def]
            return 0

        return refuse
    decode_int8, decode_int4 = tiles.decoder("int8"), tiles.decoder("int4")
    sixteen, thirty_two = tiles.tile_products[16], tiles.tile_products[32]

    @part
    def multiply(frame, layout, item, scratch):  # type: ignore[no-untyped-def]
        """One item by tiles: two panels at a time, each pair against all rows."""
        block, c = scratch, scratch + tiles.BLOCK_BYTES
        decoded = c + _C_BYTES + _CONFIG_BYTES
        decoded_bytes = 2 * WIDTH * layout.padded
        for panel in range(item * ITEM_PANELS, (item + 1) * ITEM_PANELS, 2):
            for other in range(2):
                at = layout.panels_at + (panel + other) * layout.panel_bytes
                if layout.form:
                    set_i64(block + 8 * tiles.Q, at)
                    set_i64(block + 8 * tiles.S, layout.scales_at + (panel + other) * layout.scale_bytes)
                    set_i64(block + 8 * tiles.STEPS, layout.group // 8)
                    set_i64(block + 8 * tiles.AHEAD, 2 * layout.panel_bytes)
                    at = decoded + other * decoded_bytes
                    set_i64(block + 8 * tiles.B, at)
                    if layout.form == 1:
                        decode_int8(block)
                    else:
                        decode_int4(block)
                set_i64(block + 8 * (tiles.B + other), at)
            if layout.form:
                set_i64(block + 8 * tiles.B, decoded)
            set_i64(block + 8 * tiles.STEPS, layout.padded // 32)
            set_i64(block + 8 * tiles.C, c)
            set_i64(block + 8 * tiles.AHEAD, 0 if layout.form else 2 * layout.panel_bytes)
            row = 0
            while row < frame.rows:
                at, x_row = frame.x + row * frame.x_row, frame.x_row
                if row >= frame.tail_from:
                    at, x_row = frame.tail + (row - frame.tail_from) * 2 * layout.padded, 2 * layout.padded
                set_i64(block + 8 * tiles.X, at)
                set_i64(block + 8 * tiles.X_ROW, x_row)
                rows = 32
                if frame.rows - row > 16:
                    thirty_two(block)
                else:
                    sixteen(block)
                    rows = 16
                _finish(frame, layout, c, panel, 2, row, min(rows, frame.rows - row))
                row += rows
        return 0

    return multiply


_tile = _tile_item()


def _tile_switch(function: Any) -> Any:
    """`function` where there are tiles, else nothing."""
    if tiles.TILES:
        return function

    @part
    def nothing(block):  # type: ignore[no-untyped-def]
        return 0

    return nothing


_configure, _release = _tile_switch(tiles.configure_tiles), _tile_switch(tiles.release_tiles)


def _build_body(sources: str) -> Any:
    @callback(types.void(types.voidptr))
    def body(data):  # type: ignore[no-untyped-def]
        """What each thread does: take items until there are none."""
        sources  # noqa: B018
        frame = carray(data, 1, FRAME)[0]
        layout = carray(as_pointer(frame.layout), 1, LAYOUT)[0]
        scratch = frame.scratch + next_ticket(frame.counters + 64) * frame.scratch_bytes
        block = scratch
        set_i64(block + 8 * tiles.Q_PANEL, layout.panel_bytes)
        set_i64(block + 8 * tiles.S_PANEL, layout.scale_bytes)
        set_i64(block + 8 * tiles.X_ROW, frame.x_row)
        set_i64(block + 8 * tiles.SUMS_ROW, frame.sums_row)
        set_i64(block + 8 * tiles.C_ROW, _C_ROW)
        set_i64(block + 8 * tiles.WIDE, layout.wide)
        set_i64(block + 8 * tiles.GROUPS, layout.padded // layout.group if layout.group else 1)
        set_i64(block + 8 * tiles.STEPS, (layout.group if layout.group else layout.padded) // 8)
        index = next_ticket(frame.counters)
        if frame.way == _TILES:
            # Palette 1: eight tiles of 16 rows (bytes 48 to 55) of 64 bytes (words from byte 16 on).
            config = scratch + tiles.BLOCK_BYTES + _C_BYTES
            for i in range(8):
                set_i64(config + 8 * i, 0)
            set_i64(config, 1)
            set_i64(config + 16, 0x0040004000400040)
            set_i64(config + 24, 0x0040004000400040)
            set_i64(config + 48, 0x1010101010101010)
            set_i64(block + 8 * tiles.B, config)
            _configure(block)
            while index < frame.items:
                _tile(frame, layout, index, scratch)
                index = next_ticket(frame.counters)
            _release(block)
            return
        while index < frame.items:
            _multiply(frame, layout, index, scratch)
            index = next_ticket(frame.counters)

    return body


@part
def _copy_rows(frame, layout, x, x_row, x_bf16, first, to, room):  # type: ignore[no-untyped-def]
    """Rows from `first` on, as the kernels read them, then rows of zeros: `room` in all."""
    wide = frame.way == _F32
    size = 4 if wide else 2
    row_bytes = size * layout.padded
    for row in range(room):
        target = to + row * row_bytes
        filled = 0
        if first + row < frame.rows:
            at = x + (first + row) * x_row
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
                if frame.way == _DOTS:
                    total = add(total, load_bf16(x + row * frame.x_row + 2 * i))
                else:
                    total = add(total, load(x + row * frame.x_row + 4 * i))
            set_f32(to + 4 * (first // layout.group), sum_lanes(total))


def _build_run(sources: str) -> Any:
    @compiled(types.int64(*[types.int64] * 16, types.float64))
    def run(  # type: ignore[no-untyped-def]
        layout_at, x, x_row, x_bf16, rows, out, out_row, out_bf16, adds, way,
        threads, fork, body, arena, arena_bytes, norm, eps,
    ):  # fmt: skip
        """0 when done; else the bytes of arena that are needed."""
        sources  # noqa: B018
        frame = carray(as_pointer(arena), 1, FRAME)[0]
        layout = carray(as_pointer(layout_at), 1, LAYOUT)[0]
        frame.layout, frame.way, frame.rows = layout_at, way, rows
        frame.out, frame.out_row, frame.out_bf16, frame.add = out, out_row, out_bf16, adds
        frame.items = layout.panels // ITEM_PANELS
        if threads * SERIAL_BYTES > layout.panels * layout.panel_bytes * rows:
            threads = 1
        threads = min(threads, frame.items)

        size = 4 if way == _F32 else 2
        frame.norm_at, frame.eps = norm, eps
        in_place = way == _TILES and layout.inputs == layout.padded and not norm
        if way == _TILES:
            room = up(rows, 16)
        else:
            room = rows - rows % _MOST_ROWS
            if rows % _MOST_ROWS:
                room += _kernel_rows(rows % _MOST_ROWS)
        first = rows - rows % 32 if in_place else 0
        room -= first
        copied = up(room * size * layout.padded, 64)
        sums = layout.form == 2 and way != _TILES
        frame.sums_row = 4 * (layout.padded // layout.group) if sums else 0
        sum_bytes = up(room * frame.sums_row, 64)
        frame.scratch_bytes = tiles.BLOCK_BYTES + _C_BYTES + _CONFIG_BYTES
        if way == _TILES and layout.form:
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
_run = _build_run(sources())
_body_address = _body.address


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
        return _F32
    if rows >= TILE_FROM and tiles_allowed() and not by_row:
        return _TILES
    return _DOTS if tiles.DOTS and form != "int8" else _F32


class _Arena(threading.local):
    """Working memory of one calling thread, kept between calls."""

    def __init__(self) -> None:
        self.grow(1 << 20)

    def grow(self, size: int) -> None:
        self.memory = np.empty(size + 64, np.uint8)
        self.address = -(-self.memory.ctypes.data // 64) * 64
        self.size = size


_arena = _Arena()


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
    rows = x.shape[0]
    if not rows:
        return out
    x_bf16, out_bf16 = x.dtype == torch.bfloat16, out.dtype == torch.bfloat16
    x_row, out_row = x.stride(0), out.stride(0)
    norm_at, eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    arena = _arena
    while True:
        needed = _run(
            weight.layout[0], x.data_ptr(), 2 * x_row if x_bf16 else 4 * x_row, x_bf16, rows,
            out.data_ptr(), 2 * out_row if out_bf16 else 4 * out_row, out_bf16, add, way,
            torch.get_num_threads(), fork_address(), _body_address, arena.address, arena.size, norm_at, eps,
        )  # fmt: skip
        if not needed:
            return out
        arena.grow(2 * needed)
