"""One work item of a product with packed weights: four panels, a block of rows, then bias, gate and residual.

All functions run inside numba kernels. Addresses are int64 in bytes; `frame` and `layout` are records of
`FRAME` and `packed.LAYOUT`. See `cpu/linear.py` for the ways to multiply and `tiles.py` for the inner loops.
"""

from __future__ import annotations

from typing import Any

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import part
from ramify.kernels.cpu.codegen.dots import DOTS
from ramify.kernels.cpu.codegen.simd import BYTES, LOG2_E
from ramify.kernels.cpu.packed_linear import code as code
from ramify.kernels.cpu.packed_linear import int8
from ramify.kernels.cpu.packed_linear import tiles as tiles
from ramify.kernels.cpu.packed_linear.byte_dots import FORMS, INT16_X
from ramify.kernels.cpu.packed_linear.code import WIDTH
from ramify.kernels.machine.records import record
from ramify.kernels.weights.packed import PANEL_MULTIPLE, RAISED

ITEM_PANELS = PANEL_MULTIPLE
PAIR = 2
"""Panels of an item of tiles."""
TILE_INPUTS = 256
"""About the inputs of a pair of panels that tiles use for all rows before the next: 16 KiB of bfloat16, which
stay in the first-level cache."""
RING_BYTES = 4096
"""Bytes of a panel's decoded weights that are kept where no more than 32 rows use them: the tile that is
multiplied, the tile that is decoded, and two more, whose stores may still be under way."""
BY_F32, BY_DOTS, BY_TILES, BY_INT8, BY_INT16 = 0, 1, 2, 3, 4
"""The ways to multiply; see `cpu/linear.py`."""

FRAME = record(
    # Arguments.
    "layout",  # address of a `packed.LAYOUT`
    "way",
    "from_x", "from_row", "from_bf16",
    "rows",
    "out", "out_row", "out_bf16", "add",
    "norm_at",  # the weight of an RMS norm of x; 0: none
    "chosen", "chosen_count",  # int32, the panels to compute; 0: all
    "rows_at",  # int64, the rows of x and out to compute; 0: the first `rows` rows
    "extra", "extra_from",  # for each row the address of its float32 terms, minus `extra_from`; 0: none
    "times",  # counters of `codegen.timers.TIMES`; 0: none
    "threads", "team", "body", "arena", "arena_bytes",
    # Set by the call.
    "panels",
    "block_rows", "row_blocks", "items",  # rows of an item, and how rows and panels are divided
    "prepared", "prepared_row",  # rows of x as the inner loops read them, from row `first` on, `room` of them
    "first", "room", "x_rows_at",
    "x", "x_row",  # the rows that are multiplied; by tiles those from `tail_from` on lie at `tail`
    "tail", "tail_from",
    "sums", "sums_row",
    "counters", "scratch", "scratch_bytes",
    "prepare_end", "end", "prepare_total", "total", "team_size", "frames",
    floats=("eps",),
)  # fmt: skip
"""The arguments of one product, which the threads share.

Several products of one form and size, by different matrices, run as one call: their frames lie one after the
other. A call has `prepare_total` items that prepare rows of x, and then `total` items that multiply; the
items of a frame end at `prepare_end` and `end`. The first frame holds these totals, the number of
threads (`team_size`), `frames` (its own address), `team`, `body`, `counters`, `scratch` and `scratch_bytes`
for all frames.
"""

MOST_ROWS = max(tiles.ROWS)
C_ROW = 4 * WIDTH * ITEM_PANELS
C_BYTES = MOST_ROWS * C_ROW
CONFIG_BYTES = 64


@part
def panel_at(frame, place):  # type: ignore[no-untyped-def]
    """The panel at `place` in the order of work: `place` itself, or entry `place` of the chosen panels."""
    return vl.read_i32(frame.chosen + 4 * place) if frame.chosen else place


def _chooser(kernels: dict[int, Any], panels_at_once: dict[int, int]) -> Any:
    """A function that runs the kernel for `rows` rows (1, 2, 4 or 8) over the panels of an item."""
    one, two, four = kernels[1], kernels[2], kernels[4]
    eight = kernels.get(8, four)
    at_once = tuple(panels_at_once[min(1 << i, MOST_ROWS)] for i in range(4))

    @part
    def choose(frame, layout, block, first, rows):  # type: ignore[no-untyped-def]
        if rows == 1:
            panels = at_once[0]
        elif rows == 2:
            panels = at_once[1]
        elif rows == 4:
            panels = at_once[2]
        else:
            panels = at_once[3]
        for start in range(first, first + ITEM_PANELS, panels):
            for i in range(panels):
                panel = panel_at(frame, start + i)
                later = panel_at(frame, min(start + panels + i, frame.panels - 1))
                at = block + 8 * i
                vl.write_i64(at + code.WEIGHTS_AT, layout.panels_at + panel * layout.panel_bytes)
                vl.write_i64(at + code.SCALES_AT, layout.scales_at + panel * layout.scale_bytes)
                vl.write_i64(at + code.AHEAD_AT, (later - panel) * layout.panel_bytes)
            if rows == 1:
                one(block)
            elif rows == 2:
                two(block)
            elif rows == 4:
                four(block)
            else:
                eight(block)
            code.block_at(block).c += 4 * WIDTH * panels

    return choose


def _plain_chooser(form: str, dots: bool) -> Any:
    return _chooser(tiles.products(form, dots), {rows: tiles.panels_at_once(rows) for rows in tiles.ROWS})


_by_f32 = {form: _plain_chooser(form, False) for form in tiles.FORMS}
_by_dots = {form: _plain_chooser(form, True) for form in ("bf16", "int8", "int4", "fp8")} if DOTS else _by_f32
_by_int8 = _by_f32  # not called
if FORMS:
    _by_int8 = {form: _chooser(int8.products(form), int8.PANELS_AT_ONCE) for form in (*FORMS, "table")}
_bf16_f32, _int8_f32, _int4_f32, _f32_f32, _fp8_f32 = (
    _by_f32[form] for form in ("bf16", "int8", "int4", "f32", "fp8")
)
_table_f32 = _by_f32.get("table", _int4_f32)
_bf16_dots, _int8_dots, _int4_dots, _fp8_dots = (_by_dots[form] for form in ("bf16", "int8", "int4", "fp8"))
_int4_int8 = _by_int8["int4"]
_int8_int8 = _by_int8.get("int8", _int4_int8)
_table_int8 = _by_int8.get("table", _int4_int8)
_int8_int16 = _chooser(int8.products("int8", int16_x=True), int8.PANELS_AT_ONCE) if INT16_X else _int8_f32


@part
def kernel_rows(rows):  # type: ignore[no-untyped-def]
    """The rows of the smallest kernel that takes `rows` rows; if none does, the rows of the largest."""
    kernel = 1
    while kernel < rows and kernel < MOST_ROWS:
        kernel *= 2
    return kernel


@part
def _add_row(at, more, count):  # type: ignore[no-untyped-def]
    """Add `count` float32 numbers at `more` to those at `at`."""
    if count == WIDTH:
        for i in range(0, 4 * WIDTH, BYTES):
            vl.store(at + i, vl.add(vl.load(at + i), vl.load(more + i)))
    else:
        for i in range(0, 4 * count, 4):
            vl.write_f32(at + i, vl.read_f32(at + i) + vl.read_f32(more + i))


@part
def _finish(frame, layout, c, first, panels, row, rows):  # type: ignore[no-untyped-def]
    """Apply extra terms, bias and gate to the products at `c`, and write the results to `out`. The products
    are of `rows` rows from place `row` on and `panels` panels from place `first` on, in the order of work."""
    # Copies: the compiler must expect that a store changes a field, so it would load them all for every row.
    gated, results, limit, alpha = layout.gated, layout.results, layout.limit, layout.alpha
    out, out_row, bf16, add = frame.out, frame.out_row, frame.out_bf16, frame.add
    rows_at, extras, extra_from = frame.rows_at, frame.extra, frame.extra_from
    step = 2 if gated else 1
    size = 2 if bf16 else 4
    slope = -LOG2_E * alpha if gated == 2 else -LOG2_E
    for p in range(0, panels, step):
        panel = panel_at(frame, first + p)
        column = panel // step * WIDTH
        count = min(WIDTH, results - column)
        if count <= 0:
            continue
        bias = layout.bias_at + 4 * WIDTH * panel if layout.bias_at else 0
        for r in range(rows):
            place = vl.read_i64(rows_at + 8 * (row + r)) if rows_at else row + r
            at = c + r * C_ROW + 4 * WIDTH * p
            if extras:
                extra = vl.read_i64(extras + 8 * place)
                if extra:
                    extra += extra_from
                    _add_row(at, extra + 4 * column, count)
                    if gated:
                        _add_row(at + 4 * WIDTH, extra + 4 * (results + column), count)
            to = out + place * out_row + column * size
            for i in range(0, 4 * WIDTH, BYTES):
                y = vl.load(at + i)
                if bias:
                    y = vl.add(y, vl.load(bias + i))
                if gated:
                    through = vl.load(at + 4 * WIDTH + i)
                    if bias:
                        through = vl.add(through, vl.load(bias + 4 * WIDTH + i))
                    if gated == 2:  # packed.PackedWeight.clamp
                        most = vl.splat_f32(limit)
                        y = vl.minimum(y, most)
                        through = vl.maximum(vl.minimum(through, most), vl.splat_f32(-limit))
                        through = vl.add(through, vl.splat_f32(1.0))
                    # silu(y) = y / (1 + exp(-y)); from 2**127 on the quotient is 0 either way.
                    power = vl.minimum(vl.mul(y, vl.splat_f32(slope)), vl.splat_f32(127.0))
                    y = vl.mul(vl.div(y, vl.add(vl.splat_f32(1.0), vl.exp2(power))), through)
                if count == WIDTH:
                    target = to + i // 4 * size
                    if add:
                        y = vl.add(y, vl.load_as(target, bf16))
                    vl.store_as(target, y, bf16)
                else:
                    vl.store(at + i, y)
            if count < WIDTH:
                for i in range(count):
                    number = vl.read_f32(at + 4 * i)
                    if add:
                        number += vl.read_as(to + size * i, bf16)
                    vl.write_as(to + size * i, number, bf16)


@part
def multiply(frame, layout, item, scratch):  # type: ignore[no-untyped-def]
    """Compute one item by the float32, dot, int8 or int16 kernels, up to eight rows at a time."""
    block, c = scratch, scratch + code.BLOCK_BYTES
    arguments = code.block_at(block)
    first = item // frame.row_blocks * ITEM_PANELS
    dots = frame.way == BY_DOTS
    row = item % frame.row_blocks * frame.block_rows
    stop = min(row + frame.block_rows, frame.rows)
    while row < stop:
        rows = kernel_rows(stop - row)
        arguments.x = frame.x + row * frame.x_row
        arguments.sums = frame.sums + row * frame.sums_row
        arguments.c = c
        if layout.form == 0:
            if dots:
                _bf16_dots(frame, layout, block, first, rows)
            else:
                _bf16_f32(frame, layout, block, first, rows)
        elif frame.way == BY_INT8:
            if layout.form == 1:
                _int8_int8(frame, layout, block, first, rows)
            elif layout.raised == RAISED:
                _table_int8(frame, layout, block, first, rows)
            else:
                _int4_int8(frame, layout, block, first, rows)
        elif frame.way == BY_INT16:
            _int8_int16(frame, layout, block, first, rows)
        elif layout.form == 1:
            if dots:
                _int8_dots(frame, layout, block, first, rows)
            else:
                _int8_f32(frame, layout, block, first, rows)
        elif layout.form == 3:
            _f32_f32(frame, layout, block, first, rows)
        elif layout.form == 4:
            if dots:
                _fp8_dots(frame, layout, block, first, rows)
            else:
                _fp8_f32(frame, layout, block, first, rows)
        elif dots:
            _int4_dots(frame, layout, block, first, rows)
        elif layout.looked_up:
            _table_f32(frame, layout, block, first, rows)
        else:
            _int4_f32(frame, layout, block, first, rows)
        _finish(frame, layout, c, first, ITEM_PANELS, row, min(rows, stop - row))
        row += rows


@part
def tile_inputs(layout):  # type: ignore[no-untyped-def]
    """The inputs of a pair of panels that tiles use for all rows before the next: whole groups and tiles."""
    least = layout.group if layout.group else 32
    while least % 32:
        least += layout.group
    return min(layout.padded, least * max(1, TILE_INPUTS // least))


def _tile_item() -> Any:
    sixteen, thirty_two = tiles.tile_products[16], tiles.tile_products[32]
    int8_sixteen, int8_thirty_two = tiles.decoded_products("int8").values()
    int4_sixteen, int4_thirty_two = tiles.decoded_products("int4").values()
    fp8_sixteen, fp8_thirty_two = tiles.decoded_products("fp8").values()

    @part
    def multiply(frame, layout, item, scratch):  # type: ignore[no-untyped-def]
        """Compute one item by tiles: a pair of panels, a part of its inputs at a time, against all rows. The
        first rows' kernel decodes the part."""
        block, c = scratch, scratch + code.BLOCK_BYTES + CONFIG_BYTES
        arguments = code.block_at(block)
        first = item // frame.row_blocks * PAIR
        first_row = item % frame.row_blocks * frame.block_rows
        stop = min(first_row + frame.block_rows, frame.rows)
        decoded = c + vl.round_up(frame.block_rows, 16) * C_ROW
        ahead = 0 if frame.chosen else PAIR * layout.panel_bytes
        most = tile_inputs(layout)
        arguments.kept = -1
        if layout.form and stop - first_row <= 32:
            most, arguments.kept = layout.padded, RING_BYTES - 1
        for start in range(0, layout.padded, most):
            inputs = min(most, layout.padded - start)
            for other in range(PAIR):
                panel = panel_at(frame, first + other)
                at = layout.panels_at + panel * layout.panel_bytes
                at += start * (layout.panel_bytes // layout.padded)
                if layout.form:
                    scales = layout.scales_at + panel * layout.scale_bytes
                    scales += start // layout.group * (layout.scale_bytes // (layout.padded // layout.group))
                    vl.write_i64(block + code.WEIGHTS_AT + 8 * other, at)
                    vl.write_i64(block + code.SCALES_AT + 8 * other, scales)
                    at = decoded + other * 2 * WIDTH * tile_inputs(layout)
                if other:
                    arguments.b1 = at
                else:
                    arguments.b0 = at
            arguments.more = start > 0
            row, last = first_row, start + inputs == layout.padded
            while row < stop:
                at, x_row = frame.x + row * frame.x_row, frame.x_row
                if row >= frame.tail_from:
                    at, x_row = frame.tail + (row - frame.tail_from) * 2 * layout.padded, 2 * layout.padded
                arguments.x, arguments.x_row = at + 2 * start, x_row
                arguments.c = c + (row - first_row) * C_ROW
                rows = 32 if stop - row > 16 else 16
                if layout.form and row == first_row:
                    arguments.groups, arguments.steps = inputs // layout.group, layout.group // 8
                    arguments.ahead0 = ahead
                    if layout.form == 1:
                        if rows == 32:
                            int8_thirty_two(block)
                        else:
                            int8_sixteen(block)
                    elif layout.form == 4:
                        if rows == 32:
                            fp8_thirty_two(block)
                        else:
                            fp8_sixteen(block)
                    elif rows == 32:
                        int4_thirty_two(block)
                    else:
                        int4_sixteen(block)
                else:
                    arguments.steps, arguments.ahead0 = inputs // 32, 0 if layout.form else ahead
                    if rows == 32:
                        thirty_two(block)
                    else:
                        sixteen(block)
                if last:
                    _finish(frame, layout, arguments.c, first, PAIR, row, min(rows, stop - row))
                row += rows
        return 0

    return multiply


@part
def _nothing(*arguments):  # type: ignore[no-untyped-def]
    return 0


multiply_by_tiles = configure = release = _nothing
"""Stand-ins for processors without AMX tiles, where they are never called."""
if tiles.TILES:
    multiply_by_tiles, configure, release = _tile_item(), tiles.configure_tiles, tiles.release_tiles
