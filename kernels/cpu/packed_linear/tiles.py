"""The inner loops of products with packed weights as LLVM code: rows of x against panels of 16 outputs.

A panel's weights lie in the order in which they are used (`kernels.packed`), so a kernel reads them as one
stream. A vector holds 16 outputs, and each input of x is broadcast to all of them, so nothing is added across
lanes. Every output is summed by two chains, one for even and one for odd inputs (or pairs of inputs), group
by group in ascending order. That order is the same for any number of rows and panels that a kernel handles at
once, so the number changes the speed and no bit of the result.

All kernels take the address of a block of arguments (`code.py`).
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ramify.kernels.cpu.codegen.compiler import features
from ramify.kernels.cpu.codegen.dots import BF16, dot, pairs
from ramify.kernels.cpu.codegen.functions import llvm_function
from ramify.kernels.cpu.codegen.simd import LANES, pointer, prefetch_line
from ramify.kernels.cpu.packed_linear.code import (
    AHEAD,
    B_OTHER,
    C_ROW,
    GROUPS,
    STEPS,
    SUMS,
    SUMS_ROW,
    WIDE,
    WIDTH,
    X_ROW,
    B,
    C,
    Q,
    S,
    X,
    argument_at,
    called,
    constant,
    loaded,
    multiply_add,
    row_address,
    scale_vectors,
    splatted,
)

ROWS = (1, 2, 4, 8) if LANES == 16 else (1, 2, 4)
"""Rows that a kernel may handle at once."""

_HAS = features()
TILES = BF16 and "+amx-bf16" in _HAS and "+amx-tile" in _HAS
"""Whether the processor multiplies tiles of bfloat16 (AMX)."""

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _ints = ir.VectorType(_f32, WIDTH), ir.VectorType(_i32, WIDTH)
_words, _bytes = ir.VectorType(_i16, 2 * WIDTH), ir.VectorType(_i8, WIDTH)


def _nibble(builder: ir.IRBuilder, packed: ir.Value, place: int) -> ir.Value:
    """The four bits at `place` (0 to 7) of each int32, as float32."""
    shifted = builder.lshr(packed, constant(_ints, 4 * place)) if place else packed
    if LANES == 16:  # a table of 16 numbers fits a register, and its look-up ignores the other bits
        table = ir.Constant(_floats, [float(i) for i in range(16)])
        return called(builder, "llvm.x86.avx512.permvar.sf.512", _floats, table, shifted)
    return builder.sitofp(builder.and_(shifted, constant(_ints, 15)), _floats)


def _eight_f32(builder: ir.IRBuilder, form: str, at: ir.Value) -> list[ir.Value]:
    """The weights of a panel for eight inputs, unscaled, as float32: one vector an input."""
    if form == "f32":
        return [loaded(builder, builder.add(at, _i64(4 * WIDTH * k)), _floats) for k in range(8)]
    if form == "int8":
        rows = [loaded(builder, builder.add(at, _i64(WIDTH * k)), _bytes) for k in range(8)]
        return [builder.sitofp(builder.sext(row, _ints), _floats) for row in rows]
    if form == "int4":
        packed = loaded(builder, at, _ints)
        return [_nibble(builder, packed, k // 2 + 4 * (k % 2)) for k in range(8)]
    vectors = []
    for pair in range(4):
        packed = loaded(builder, builder.add(at, _i64(4 * WIDTH * pair)), _ints)
        vectors.append(builder.bitcast(builder.shl(packed, constant(_ints, 16)), _floats))
        vectors.append(builder.bitcast(builder.and_(packed, constant(_ints, 0xFFFF0000)), _floats))
    return vectors


def _interleaved(builder: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Two vectors of float32 as one of bfloat16 pairs."""
    both = called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", pairs, odd, even)
    mask = [lane // 2 + WIDTH * (lane % 2) for lane in range(2 * WIDTH)]
    words = builder.bitcast(both, _words)
    return builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(_i32, 2 * WIDTH), mask))


def _four_pairs(builder: ir.IRBuilder, form: str, at: ir.Value) -> list[ir.Value]:
    """The weights of a panel for eight inputs, unscaled, as pairs of bfloat16: one vector a pair."""
    if form == "bf16":
        return [loaded(builder, builder.add(at, _i64(4 * WIDTH * pair)), _words) for pair in range(4)]
    if form == "int8":  # bfloat16 holds -128 to 127 exactly
        wide = _eight_f32(builder, form, at)
        return [_interleaved(builder, *wide[2 * pair : 2 * pair + 2]) for pair in range(4)]
    # bfloat16 holds 0 to 15 exactly. The look-up reads five bits, so the table is there twice.
    bits = [0] + [(127 + e << 7) | ((i << (7 - e)) & 127) for i in range(1, 16) for e in [i.bit_length() - 1]]
    table = ir.Constant(_words, bits + bits)
    packed = loaded(builder, at, _words)
    vectors = []
    for place in range(4):
        shifted = builder.lshr(packed, constant(_words, 4 * place)) if place else packed
        found = called(builder, "llvm.x86.avx512.permvar.hi.512", _words, table, shifted)
        vectors.append(found)
    return vectors


_STEP_BYTES = {"f32": 32 * WIDTH, "bf16": 16 * WIDTH, "int8": 8 * WIDTH, "int4": 4 * WIDTH}
"""Bytes of a panel's weights for eight inputs."""


def _product(form: str, dots: bool, rows: int, panels: int) -> Any:
    """C = x Wᵀ for `rows` rows and `panels` panels, in float32 or by dots of bfloat16 pairs."""
    x_bytes = 16 if dots else 32  # of eight inputs
    step_bytes = _STEP_BYTES[form]
    scale_count = {"f32": 0, "bf16": 0, "int8": 1, "int4": 2}[form]
    grid = [(row, panel) for row in range(rows) for panel in range(panels)]

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(argument_at, builder, block)
        place = functools.partial(row_address, builder, block)
        zero = constant(_floats, 0.0)
        weights = [argument(Q + panel) for panel in range(panels)]
        scales = [argument(S + panel) for panel in range(panels)]
        ahead = [argument(AHEAD + panel) for panel in range(panels)]
        inputs = [place(X, X_ROW, row) for row in range(rows)]
        sums = [place(SUMS, SUMS_ROW, row) for row in range(rows)]
        outputs = [place(C, C_ROW, row) for row in range(rows)]
        steps, wide = argument(STEPS), argument(WIDE)
        scale_bytes = builder.mul(_i64(2 * WIDTH * scale_count), builder.add(wide, _i64(1)))
        cell: Any = cgutils.alloca_once_value
        chains = {spot: [cell(builder, zero), cell(builder, zero)] for spot in grid}
        totals = {spot: cell(builder, zero) for spot in grid}
        with cgutils.for_range(builder, argument(GROUPS)) as groups:
            if scale_count:
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
                    vectors = (_four_pairs if dots else _eight_f32)(builder, form, at)
                    for index, vector in enumerate(vectors):
                        for row in range(rows):
                            where = builder.add(builder.add(inputs[row], x_offset), _i64(4 * index))
                            chain = chains[row, panel][index % 2]
                            sum_ = builder.load(chain)
                            if dots:
                                pair = splatted(builder, loaded(builder, where, _i32))
                                sum_ = dot(builder, sum_, vector, pair)
                            else:
                                x = splatted(builder, loaded(builder, where, _f32))
                                sum_ = multiply_add(builder, vector, x, sum_)
                            builder.store(sum_, chain)
            if scale_count:
                scale_offset = builder.mul(groups.index, scale_bytes)
                sum_offset = builder.shl(groups.index, _i64(2))
                for panel in range(panels):
                    at = builder.add(scales[panel], scale_offset)
                    scale = scale_vectors(builder, at, wide, scale_count)
                    for row in range(rows):
                        even, odd = (builder.load(chain) for chain in chains[row, panel])
                        total = builder.load(totals[row, panel])
                        if scale_count == 2:
                            group_sum = loaded(builder, builder.add(sums[row], sum_offset), _f32)
                            total = multiply_add(builder, scale[1], splatted(builder, group_sum), total)
                        total = multiply_add(builder, scale[0], builder.fadd(even, odd), total)
                        builder.store(total, totals[row, panel])
        for row, panel in grid:
            result = builder.load(totals[row, panel])
            if not scale_count:
                even, odd = (builder.load(chain) for chain in chains[row, panel])
                result = builder.fadd(even, odd)
            to = builder.add(outputs[row], _i64(4 * WIDTH * panel))
            builder.store(result, pointer(builder, to, _floats), align=4)

    return llvm_function(f"ramify_linear_{form}_{'dots' if dots else 'f32'}_{rows}x{panels}", 1, fill)


def panels_at_once(rows: int) -> int:
    """Panels of a kernel for `rows` rows, so that sums, chains, weights and scales stay in registers."""
    if LANES == 16:
        return {1: 4, 2: 4, 4: 2, 8: 1}[rows]
    return 2 if rows == 1 and LANES == 8 else 1


def products(form: str, dots: bool) -> dict[int, Any]:
    """The kernels of a weight format by their number of rows."""
    return {rows: _product(form, dots, rows, panels_at_once(rows)) for rows in ROWS}


def decoder(form: str) -> Any:
    """A function that writes a panel's weights to B as pairs of bfloat16, each rounded to nearest."""
    count = {"int8": 1, "int4": 2}[form]

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(argument_at, builder, block)
        weights, scales, to, wide = argument(Q), argument(S), argument(B), argument(WIDE)
        steps, ahead = argument(STEPS), argument(AHEAD)
        scale_bytes = builder.mul(_i64(2 * WIDTH * count), builder.add(wide, _i64(1)))
        with cgutils.for_range(builder, argument(GROUPS)) as groups:
            at = builder.add(scales, builder.mul(groups.index, scale_bytes))
            scale = scale_vectors(builder, at, wide, count)
            before = builder.mul(groups.index, steps)
            with cgutils.for_range(builder, steps) as loop:
                step = builder.add(before, loop.index)
                at = builder.add(weights, builder.mul(step, _i64(_STEP_BYTES[form])))
                for byte in range(0, _STEP_BYTES[form], 64):
                    prefetch_line(builder, builder.add(builder.add(at, ahead), _i64(byte)))
                values = []
                for value in _eight_f32(builder, form, at):
                    if count == 2:
                        values.append(multiply_add(builder, value, scale[0], scale[1]))
                    else:
                        values.append(builder.fmul(value, scale[0]))
                for pair in range(4):
                    vector = _interleaved(builder, values[2 * pair], values[2 * pair + 1])
                    offset = builder.add(builder.mul(step, _i64(16 * WIDTH)), _i64(4 * WIDTH * pair))
                    builder.store(vector, pointer(builder, builder.add(to, offset), _words), align=4)

    return llvm_function(f"ramify_linear_decode_{form}", 1, fill)


def _tile(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    called(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


def _tile_product(row_tiles: int) -> Any:
    """C = x Wᵀ by AMX for 16 or 32 rows and two panels. Here STEPS counts tiles of 32 inputs."""

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(argument_at, builder, block)

        def at(address: ir.Value) -> ir.Value:
            return pointer(builder, address, _i8)

        x, x_row, c, c_row = (argument(place) for place in (X, X_ROW, C, C_ROW))
        panels, ahead = [argument(B), argument(B_OTHER)], argument(AHEAD)
        starts = [builder.add(x, builder.mul(x_row, _i64(16 * tile))) for tile in range(row_tiles)]
        # Registers: sums in 0 to 3, rows in 4 and 5, panels in 6 and 7.
        for sum_ in range(2 * row_tiles):
            _tile(builder, "tilezero", _i8(sum_))
        with cgutils.for_range(builder, argument(STEPS)) as loop:
            x_offset, w_offset = builder.shl(loop.index, _i64(6)), builder.shl(loop.index, _i64(10))
            for tile in range(row_tiles):
                _tile(builder, "tileloadd64", _i8(4 + tile), at(builder.add(starts[tile], x_offset)), x_row)
            for panel in range(2):
                where = builder.add(panels[panel], w_offset)
                for byte in range(0, 1024, 64):
                    prefetch_line(builder, builder.add(builder.add(where, ahead), _i64(byte)))
                _tile(builder, "tileloadd64", _i8(6 + panel), at(where), _i64(64))
            for tile in range(row_tiles):
                for panel in range(2):
                    _tile(builder, "tdpbf16ps", _i8(2 * tile + panel), _i8(4 + tile), _i8(6 + panel))
        for tile in range(row_tiles):
            for panel in range(2):
                to = builder.add(c, builder.mul(c_row, _i64(16 * tile)))
                to = builder.add(to, _i64(4 * WIDTH * panel))
                _tile(builder, "tilestored64", _i8(2 * tile + panel), at(to), c_row)

    return llvm_function(f"ramify_linear_tiles_{row_tiles}", 1, fill)


def _configure(builder: ir.IRBuilder, block: ir.Value) -> None:
    """Configure eight tiles of 16 rows of 64 bytes, from the 64 bytes of configuration at address B."""
    address = builder.load(pointer(builder, builder.add(block, _i64(8 * B)), _i64))
    _tile(builder, "ldtilecfg", pointer(builder, address, _i8))


tile_products = {16: _tile_product(1), 32: _tile_product(2)}
"""The AMX kernels by their number of rows."""
configure_tiles = llvm_function("ramify_linear_tiles_configure", 1, _configure)
release_tiles = llvm_function(
    "ramify_linear_tiles_release", 1, lambda builder, block: _tile(builder, "tilerelease")
)
