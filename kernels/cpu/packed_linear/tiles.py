"""The inner loops of products with packed weights as LLVM code: rows of x against panels of 16 outputs.

    for group of inputs:
        for eight inputs, panel:                prefetch the next panel's weights
            for input: w = 16 outputs' weights as float32, or as pairs of bfloat16
                for row: sums[row, panel] += w · broadcast(x[row, input])       in registers
        totals += offsets · sum of x in the group + factors · sums

A panel's weights lie in the order in which they are used (`kernels.weights.packed`), so a kernel reads them
as one stream. A vector holds 16 outputs, and each input of x is broadcast to all of them, so nothing is added
across lanes. With AVX-512 every output is summed by two chains, one for even and one for odd inputs (or pairs
of inputs). Narrower vectors have one chain. Groups are added in ascending order. These orders are the same
for any number of rows and panels that a kernel handles at once, so the number changes no bit of the result.

All kernels take the address of a `BLOCK` of arguments (`code.py`). Products of one row are bound by reading
the weights, of eight rows by multiplying.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ramify.kernels.cpu.codegen.compiler import features
from ramify.kernels.cpu.codegen.dots import dot, pairs
from ramify.kernels.cpu.codegen.functions import llvm_function
from ramify.kernels.cpu.codegen.simd import BF16, LANES, pointer, prefetch_line
from ramify.kernels.cpu.packed_linear.code import (
    WIDTH,
    Scales,
    argument_at,
    called,
    constant,
    loaded,
    multiply_add,
    row_address,
    splatted,
    widened,
)
from ramify.kernels.weights import packed as packed_weights

ROWS = (1, 2, 4, 8) if LANES == 16 else (1, 2, 4)
"""Rows that a kernel may handle at once."""
CHAINS = 2 if LANES == 16 else 1
"""Chains of sums of an output. 16 registers of 8 lanes hold one chain for each of four rows, but not two."""

_HAS = features()
TILES = BF16 and "+amx-bf16" in _HAS and "+amx-tile" in _HAS
"""Whether the processor multiplies tiles of bfloat16 (AMX)."""

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _ints = ir.VectorType(_f32, WIDTH), ir.VectorType(_i32, WIDTH)
_words, _bytes = ir.VectorType(_i16, 2 * WIDTH), ir.VectorType(_i8, WIDTH)
_halves = ir.VectorType(_i16, WIDTH)

FORMS = (
    ("bf16", "int8", "int4", "f32", "fp8") if LANES == 16 else ("bf16", "int8", "int4", "table", "f32", "fp8")
)
"""Formats of weights that have inner loops. With AVX-512 the codes of int4 are always looked up in a table.
Without AVX-512 a look-up costs more than a conversion, so weights with a table have loops of their own."""
FP8_FACTOR = 256.0
"""The loops shift the bits of a float8_e4m3fn into a float16. The exponent biases are 7 and 15, so the value
read is the true value divided by 2**8. This factor restores it."""


def _looked_up(builder: ir.IRBuilder, packed: ir.Value, tables: ir.Value) -> ir.Value:
    """The numbers of a table for the lower four bits of each int32, as float32."""
    codes = builder.and_(packed, constant(_ints, 15))
    table = loaded(builder, builder.add(tables, _i64(packed_weights.TABLE_BYTES_AT)), _bytes)
    codes = builder.trunc(codes, _bytes)
    if LANES == 8 or "+ssse3" in _HAS:  # AVX includes SSSE3
        found = called(builder, "llvm.x86.ssse3.pshuf.b.128", _bytes, table, codes)
    elif "+neon" in _HAS:
        found = called(builder, "llvm.aarch64.neon.tbl1.v16i8", _bytes, table, codes)
    else:
        found = ir.Constant(_bytes, ir.Undefined)
        for lane in range(WIDTH):
            number = builder.extract_element(table, builder.extract_element(codes, _i32(lane)))
            found = builder.insert_element(found, number, _i32(lane))
    raised = builder.zext(found, _ints)
    return builder.sitofp(builder.sub(raised, constant(_ints, 128)), _floats)


def _four_bits(builder: ir.IRBuilder, form: str, packed: ir.Value, place: int, tables: ir.Value) -> ir.Value:
    """The weights whose codes are the four bits at `place` (0 to 7) of each int32, as float32."""
    shifted = builder.lshr(packed, constant(_ints, 4 * place)) if place else packed
    if LANES == 16:  # a table of 16 numbers fits a register, and its look-up ignores the other bits
        table = loaded(builder, tables, _floats)
        return called(builder, "llvm.x86.avx512.permvar.sf.512", _floats, table, shifted)
    if form == "table":
        return _looked_up(builder, shifted, tables)
    return builder.sitofp(builder.and_(shifted, constant(_ints, 15)), _floats)


def _eight_f32(builder: ir.IRBuilder, form: str, at: ir.Value, tables: ir.Value) -> Iterator[ir.Value]:
    """The weights of a panel for eight inputs, unscaled, as float32: one vector an input.

    Each vector is built when the caller takes it, so that registers hold only a few of the eight at once.
    """
    if form in ("int4", "table"):
        packed = loaded(builder, at, _ints)
    for k in range(8):
        if form == "f32":
            yield loaded(builder, builder.add(at, _i64(4 * WIDTH * k)), _floats)
        elif form == "int8":
            row = loaded(builder, builder.add(at, _i64(WIDTH * k)), _bytes)
            yield builder.sitofp(builder.sext(row, _ints), _floats)
        elif form == "fp8":
            byte = builder.sext(loaded(builder, builder.add(at, _i64(WIDTH * k)), _bytes), _halves)
            bits = builder.and_(builder.shl(byte, constant(_halves, 7)), constant(_halves, 0xBF80))
            yield widened(builder, bits)
        elif form == "bf16":
            if k % 2 == 0:
                packed = loaded(builder, builder.add(at, _i64(2 * WIDTH * k)), _ints)
                yield builder.bitcast(builder.shl(packed, constant(_ints, 16)), _floats)
            else:
                yield builder.bitcast(builder.and_(packed, constant(_ints, 0xFFFF0000)), _floats)
        else:
            yield _four_bits(builder, form, packed, k // 2 + 4 * (k % 2), tables)


def _interleaved(builder: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Two vectors of float32 as one of bfloat16 pairs."""
    both = called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", pairs, odd, even)
    mask = [lane // 2 + WIDTH * (lane % 2) for lane in range(2 * WIDTH)]
    words = builder.bitcast(both, _words)
    return builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(_i32, 2 * WIDTH), mask))


def _four_pairs(builder: ir.IRBuilder, form: str, at: ir.Value, tables: ir.Value) -> list[ir.Value]:
    """The weights of a panel for eight inputs, unscaled, as pairs of bfloat16: one vector a pair."""
    if form == "bf16":
        return [loaded(builder, builder.add(at, _i64(4 * WIDTH * pair)), _words) for pair in range(4)]
    if form in ("int8", "fp8"):  # bfloat16 holds both exactly
        wide = list(_eight_f32(builder, form, at, tables))
        return [_interleaved(builder, *wide[2 * pair : 2 * pair + 2]) for pair in range(4)]
    # The look-up reads five bits, so the table is there twice.
    table = loaded(builder, builder.add(tables, _i64(packed_weights.TABLE_BF16_AT)), _words)
    packed = loaded(builder, at, _words)
    vectors = []
    for place in range(4):
        shifted = builder.lshr(packed, constant(_words, 4 * place)) if place else packed
        found = called(builder, "llvm.x86.avx512.permvar.hi.512", _words, table, shifted)
        vectors.append(found)
    return vectors


_STEP_BYTES = {"f32": 32, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4, "table": 4}
"""Bytes of an output's weights for eight inputs."""


def _factors(builder: ir.IRBuilder, form: str, scales: Scales, at: ir.Value) -> ir.Value:
    factors = scales.factors(at)
    return builder.fmul(factors, constant(_floats, FP8_FACTOR)) if form == "fp8" else factors


def _product(form: str, dots: bool, rows: int, panels: int) -> Any:
    """C = x Wᵀ for `rows` rows and `panels` panels, in float32 or by dots of bfloat16 pairs."""
    x_bytes = 16 if dots else 32  # of eight inputs
    step_bytes = _STEP_BYTES[form] * WIDTH
    scaled = form not in ("f32", "bf16")
    grid = [(row, panel) for row in range(rows) for panel in range(panels)]

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(argument_at, builder, block)
        place = functools.partial(row_address, builder, block)
        zero = constant(_floats, 0.0)
        weights = [argument(f"weights{panel}") for panel in range(panels)]
        scales = [argument(f"scales{panel}") for panel in range(panels)]
        ahead = [argument(f"ahead{panel}") for panel in range(panels)]
        inputs = [place("x", row) for row in range(rows)]
        sums = [place("sums", row) for row in range(rows)]
        outputs = [place("c", row) for row in range(rows)]
        steps, tables = argument("steps"), argument("tables")
        group_scales = Scales(builder, argument("scale_kind"), argument("offsets"))
        cell: Any = cgutils.alloca_once_value
        chains = {spot: [cell(builder, zero) for _ in range(CHAINS)] for spot in grid}
        totals = {spot: cell(builder, zero) for spot in grid}

        def summed(cells: list[Any]) -> ir.Value:
            return functools.reduce(builder.fadd, [builder.load(chain) for chain in cells])

        with cgutils.for_range(builder, argument("groups")) as groups:
            if scaled:
                for spot in grid:
                    for chain in chains[spot]:
                        builder.store(zero, chain)
            before = builder.mul(groups.index, steps)
            with cgutils.for_range(builder, steps) as loop:
                step = builder.add(before, loop.index)
                offset = builder.mul(step, _i64(step_bytes))
                x_offset = builder.mul(step, _i64(x_bytes))
                for panel in range(panels):
                    at = builder.add(weights[panel], offset)
                    for byte in range(0, step_bytes, 64):
                        later = builder.add(at, ahead[panel])
                        prefetch_line(builder, builder.add(later, _i64(byte)))
                    vectors = (_four_pairs if dots else _eight_f32)(builder, form, at, tables)
                    for index, vector in enumerate(vectors):
                        for row in range(rows):
                            where = builder.add(builder.add(inputs[row], x_offset), _i64(4 * index))
                            chain = chains[row, panel][index % CHAINS]
                            sum_ = builder.load(chain)
                            if dots:
                                pair = splatted(builder, loaded(builder, where, _i32))
                                sum_ = dot(builder, sum_, vector, pair)
                            else:
                                x = splatted(builder, loaded(builder, where, _f32))
                                sum_ = multiply_add(builder, vector, x, sum_)
                            builder.store(sum_, chain)
            if scaled:
                sum_offset = builder.shl(groups.index, _i64(2))
                for panel in range(panels):
                    at = group_scales.address(scales[panel], groups.index)
                    with builder.if_then(group_scales.has_offsets):
                        offsets = group_scales.offsets(at)
                        for row in range(rows):
                            group_sum = loaded(builder, builder.add(sums[row], sum_offset), _f32)
                            total = builder.load(totals[row, panel])
                            total = multiply_add(builder, offsets, splatted(builder, group_sum), total)
                            builder.store(total, totals[row, panel])
                    factors = _factors(builder, form, group_scales, at)
                    for row in range(rows):
                        total = builder.load(totals[row, panel])
                        total = multiply_add(builder, factors, summed(chains[row, panel]), total)
                        builder.store(total, totals[row, panel])
        for row, panel in grid:
            result = builder.load(totals[row, panel])
            if not scaled:
                result = summed(chains[row, panel])
            to = builder.add(outputs[row], _i64(4 * WIDTH * panel))
            builder.store(result, pointer(builder, to, _floats), align=4)

    return llvm_function(f"ramify_linear_{form}_{'dots' if dots else 'f32'}_{rows}x{panels}", 1, fill)


def panels_at_once(rows: int) -> int:
    """Panels of a kernel for `rows` rows, so that sums, chains, weights and scales stay in registers."""
    if LANES == 16:
        return {1: 4, 2: 4, 4: 2, 8: 1}[rows]
    return {1: 4, 2: 2, 4: 1}[rows] if LANES == 8 else 1


def products(form: str, dots: bool) -> dict[int, Any]:
    """The kernels of a weight format by their number of rows."""
    return {rows: _product(form, dots, rows, panels_at_once(rows)) for rows in ROWS}


def _tile(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    called(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


class _Tiles:
    """The registers of a product of 16 or 32 rows and two panels.

    Sums are in 0 to 3, rows in 4 and 5, panels in 6 and 7.
    """

    def __init__(self, builder: ir.IRBuilder, block: ir.Value, row_tiles: int) -> None:
        """Load the sums from `c` if `more` is 1, else set them to 0."""
        self._builder = builder
        x, self._x_row, c, c_row, more, *self._panels = (
            argument_at(builder, block, name) for name in ("x", "x_row", "c", "c_row", "more", "b0", "b1")
        )
        self._rows = [builder.add(x, builder.mul(self._x_row, _i64(16 * tile))) for tile in range(row_tiles)]
        self._sums = []
        for tile in range(row_tiles):
            for panel in range(2):
                to = builder.add(c, builder.mul(c_row, _i64(16 * tile)))
                at = pointer(builder, builder.add(to, _i64(4 * WIDTH * panel)), _i8)
                self._sums.append((_i8(2 * tile + panel), at, c_row))
        with builder.if_else(builder.icmp_unsigned("!=", more, _i64(0))) as (further, first):
            with further:
                for sum_ in self._sums:
                    _tile(builder, "tileloadd64", *sum_)
            with first:
                for register, *_ in self._sums:
                    _tile(builder, "tilezero", register)

    def add(self, inputs: ir.Value, offset: ir.Value, ahead: ir.Value | None = None) -> None:
        """Add the products of the 32 inputs from 32 * `inputs` on, whose weights are `offset` bytes after the
        first. Weights `ahead` bytes further are prefetched; None: none."""
        builder = self._builder
        x_offset = builder.shl(inputs, _i64(6))
        for tile, start in enumerate(self._rows):
            at = pointer(builder, builder.add(start, x_offset), _i8)
            _tile(builder, "tileloadd64", _i8(4 + tile), at, self._x_row)
        for panel, first in enumerate(self._panels):
            where = builder.add(first, offset)
            if ahead is not None:
                for byte in range(0, 1024, 64):
                    prefetch_line(builder, builder.add(builder.add(where, ahead), _i64(byte)))
            _tile(builder, "tileloadd64", _i8(6 + panel), pointer(builder, where, _i8), _i64(64))
        for tile in range(len(self._rows)):
            for panel in range(2):
                _tile(builder, "tdpbf16ps", _i8(2 * tile + panel), _i8(4 + tile), _i8(6 + panel))

    def store(self) -> None:
        for sum_ in self._sums:
            _tile(self._builder, "tilestored64", *sum_)


def _tile_product(row_tiles: int) -> Any:
    """C = x Wᵀ, or C += x Wᵀ with `more`, by AMX for 16 or 32 rows and two panels of bfloat16. Here `steps`
    counts tiles of 32 inputs."""

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        steps, ahead = argument_at(builder, block, "steps"), argument_at(builder, block, "ahead0")
        tiles = _Tiles(builder, block, row_tiles)
        with cgutils.for_range(builder, steps) as loop:
            tiles.add(loop.index, builder.shl(loop.index, _i64(10)), ahead)
        tiles.store()

    return llvm_function(f"ramify_linear_tiles_{row_tiles}", 1, fill)


def _doubled(builder: ir.IRBuilder, numbers: ir.Value, half: int) -> ir.Value:
    """Eight of 16 numbers, each twice: the lower eight if `half` is 0, else the upper."""
    return builder.shuffle_vector(
        numbers, numbers, ir.Constant(_ints, [8 * half + i // 2 for i in range(16)])
    )


def _four_scaled_pairs(
    builder: ir.IRBuilder, form: str, at: ir.Value, tables: ir.Value, scales: list[tuple[ir.Value, ir.Value]]
) -> Iterator[ir.Value]:
    """The weights of a panel for eight inputs as pairs of bfloat16, rounded to nearest: one vector a pair.

    `scales` are factors and offsets; for int4 those of the lower eight outputs doubled, then the upper.
    """
    if form != "int4":
        wide = [multiply_add(builder, each, *scales[0]) for each in _eight_f32(builder, form, at, tables)]
        for pair in range(4):
            yield _interleaved(builder, *wide[2 * pair : 2 * pair + 2])
        return
    # Each half of an int32 in a lane of its own: the two inputs of a pair then lie side by side.
    halves = [
        builder.zext(loaded(builder, builder.add(at, _i64(32 * half)), _halves), _ints) for half in (0, 1)
    ]
    for place in range(4):
        low, high = (
            multiply_add(builder, _four_bits(builder, form, half, place, tables), *scale)
            for half, scale in zip(halves, scales, strict=True)
        )
        both = called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", pairs, high, low)
        yield builder.bitcast(both, _words)


def _decoded_product(form: str, row_tiles: int) -> Any:
    """As `_tile_product`, with quantised panels that are decoded to bfloat16 at `b0` and `b1` on the way.

    A tile's weights are decoded while the tile before is multiplied: the two use different units. Weights of
    offset o bytes from the first are written at o & `kept`.
    """
    step_bytes = _STEP_BYTES[form] * WIDTH

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(argument_at, builder, block)
        steps, tables, ahead, kept = map(argument, ("steps", "tables", "ahead0", "kept"))
        weights, scales, to = (
            [argument(f"{name}{panel}") for panel in (0, 1)] for name in ("weights", "scales", "b")
        )
        group_scales = Scales(builder, argument("scale_kind"), argument("offsets"))
        offset_cell: Any = cgutils.alloca_once(builder, _floats)
        tiles = _Tiles(builder, block, row_tiles)

        def panel_scales(at: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
            factors = _factors(builder, form, group_scales, at)
            builder.store(constant(_floats, 0.0), offset_cell)
            with builder.if_then(group_scales.has_offsets):
                builder.store(group_scales.offsets(at), offset_cell)
            both = factors, builder.load(offset_cell)
            if form != "int4":
                return [both]
            return [tuple(_doubled(builder, each, half) for each in both) for half in (0, 1)]

        def add(tile: ir.Value) -> None:
            tiles.add(tile, builder.and_(builder.shl(tile, _i64(10)), kept))

        groups = argument("groups")
        with cgutils.for_range(builder, groups) as group:
            scaled = [panel_scales(group_scales.address(each, group.index)) for each in scales]
            before = builder.mul(group.index, steps)
            with cgutils.for_range(builder, steps) as loop:
                step = builder.add(before, loop.index)
                offset = builder.and_(builder.shl(step, _i64(8)), kept)
                for panel in (0, 1):
                    at = builder.add(weights[panel], builder.mul(step, _i64(step_bytes)))
                    for byte in range(0, step_bytes, 64):
                        prefetch_line(builder, builder.add(builder.add(at, ahead), _i64(byte)))
                    vectors = _four_scaled_pairs(builder, form, at, tables, scaled[panel])
                    for pair, vector in enumerate(vectors):
                        where = builder.add(builder.add(to[panel], offset), _i64(4 * WIDTH * pair))
                        builder.store(vector, pointer(builder, where, _words), align=4)
                whole = builder.icmp_unsigned("==", builder.and_(step, _i64(3)), _i64(3))
                later = builder.icmp_unsigned(">", step, _i64(3))
                with builder.if_then(builder.and_(whole, later)):
                    add(builder.sub(builder.lshr(step, _i64(2)), _i64(1)))
        add(builder.sub(builder.lshr(builder.mul(groups, steps), _i64(2)), _i64(1)))
        tiles.store()

    return llvm_function(f"ramify_linear_decoded_tiles_{form}_{row_tiles}", 1, fill)


def decoded_products(form: str) -> dict[int, Any]:
    """The AMX kernels of a quantised weight format by their number of rows."""
    return {16: _decoded_product(form, 1), 32: _decoded_product(form, 2)}


def _configure(builder: ir.IRBuilder, block: ir.Value) -> None:
    """Configure eight tiles of 16 rows of 64 bytes, from the 64 bytes of configuration at `b0`."""
    address = argument_at(builder, block, "b0")
    _tile(builder, "ldtilecfg", pointer(builder, address, _i8))


tile_products = {16: _tile_product(1), 32: _tile_product(2)}
"""The AMX kernels by their number of rows."""
configure_tiles = llvm_function("ramify_linear_tiles_configure", 1, _configure)
release_tiles = llvm_function(
    "ramify_linear_tiles_release", 1, lambda builder, block: _tile(builder, "tilerelease")
)
