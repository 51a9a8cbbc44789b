"""The inner loops of products with packed weights as LLVM code: rows of x against panels of 16 outputs.

A panel's weights lie in the order in which they are used (`kernels.packed`), so a kernel reads them as one
stream. A vector holds 16 outputs; each input of x is broadcast to all of them, so nothing is added across
lanes. Every output is summed by two chains, one for even and one for odd inputs (or pairs of inputs),
group by group in ascending order, whatever the number of rows and panels that a kernel handles at once:
that number changes speed and not a bit of the result.

All kernels take the address of a block of int64 (`Q` ... `WIDE` below say what is where).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ramify.kernels.cpu.compiler import features, intrinsic
from ramify.kernels.cpu.dots import BF16, dot, pairs
from ramify.kernels.cpu.simd import LANES, pointer, prefetch_line

WIDTH = 16
"""Outputs of a panel."""

# Places in the block of arguments.
Q, S = 0, 4  # the weights and the scales of up to four panels
AHEAD = 8  # for each of them, bytes from a weight to what is to be prefetched meanwhile
X, X_ROW = 12, 13  # the first row, prepared; bytes from row to row
SUMS, SUMS_ROW = 14, 15  # the sum of x over each group, float32
C, C_ROW = 16, 17  # float32 results: (rows, panels * 16)
GROUPS, STEPS = 18, 19  # groups of inputs, and eights of inputs in a group
WIDE = 20  # scales are float32, not float16
B, B_OTHER = 21, 22  # two panels of bfloat16 weights, for tiles
BLOCK_BYTES = 8 * 24

ROWS = (1, 2, 4, 8) if LANES == 16 else (1, 2, 4)
"""Rows that a kernel may handle at once."""

_HAS = features()
TILES = BF16 and "+amx-bf16" in _HAS and "+amx-tile" in _HAS
"""Whether the processor multiplies tiles of bfloat16 (AMX)."""
_F16C = "+f16c" in _HAS or "+sse2" not in _HAS

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _ints = ir.VectorType(_f32, WIDTH), ir.VectorType(_i32, WIDTH)
_halves, _words, _bytes = (
    ir.VectorType(_i16, WIDTH),
    ir.VectorType(_i16, 2 * WIDTH),
    ir.VectorType(_i8, WIDTH),
)


def _function(name: str, fill: Callable[[ir.IRBuilder, ir.Value], None]) -> Any:
    """A numba function of one int64 whose body `fill` emits, once a module and never inlined."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        module = builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_i64]), name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            body = ir.IRBuilder(function.append_basic_block())
            fill(body, function.args[0])
            body.ret_void()
        builder.call(function, args)
        return _i64(0)

    @intrinsic
    def call(typing: Any, block: Any) -> Any:
        return types.int64(block), emit

    return call


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    kind = ir.VectorType(value.type, WIDTH)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _i32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _constant(_ints, 0))


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    align = 1 if kind is _bytes else 2
    return builder.load(pointer(builder, address, kind), align=align)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fmuladd.v16f32", _floats, a, b, c)


def _widened(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """float16 as float32, exactly."""
    if _F16C:
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), WIDTH)), _floats)
    # Without the instruction: the bits moved into place, and 2**112 for the difference of the exponents.
    bits = builder.zext(halves, _ints)
    magnitude = builder.shl(builder.and_(bits, _constant(_ints, 0x7FFF)), _constant(_ints, 13))
    value = builder.fmul(builder.bitcast(magnitude, _floats), _constant(_floats, 2.0**112))
    sign = builder.shl(builder.and_(bits, _constant(_ints, 0x8000)), _constant(_ints, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, _ints), sign), _floats)


def _scales(builder: ir.IRBuilder, at: ir.Value, wide: ir.Value, count: int) -> list[ir.Value]:
    """`count` vectors of scales from an address, float16 or float32."""
    cell: Any = cgutils.alloca_once
    cells = [cell(builder, _floats) for _ in range(count)]
    with builder.if_else(builder.icmp_unsigned("!=", wide, _i64(0))) as (then, otherwise):
        with then:
            for i, target in enumerate(cells):
                builder.store(_load(builder, builder.add(at, _i64(4 * WIDTH * i)), _floats), target)
        with otherwise:
            for i, target in enumerate(cells):
                halves = _load(builder, builder.add(at, _i64(2 * WIDTH * i)), _halves)
                builder.store(_widened(builder, halves), target)
    return [builder.load(target) for target in cells]


def _nibble(builder: ir.IRBuilder, packed: ir.Value, place: int) -> ir.Value:
    """The four bits at `place` (0 to 7) of each int32, as float32."""
    shifted = builder.lshr(packed, _constant(_ints, 4 * place)) if place else packed
    if LANES == 16:  # a table of 16 numbers fits a register, and its look-up ignores the other bits
        table = ir.Constant(_floats, [float(i) for i in range(16)])
        return _call(builder, "llvm.x86.avx512.permvar.sf.512", _floats, table, shifted)
    return builder.sitofp(builder.and_(shifted, _constant(_ints, 15)), _floats)


def _eight_f32(builder: ir.IRBuilder, form: str, at: ir.Value) -> list[ir.Value]:
    """The weights of a panel for eight inputs, unscaled, as float32: one vector an input."""
    if form == "f32":
        return [_load(builder, builder.add(at, _i64(4 * WIDTH * k)), _floats) for k in range(8)]
    if form == "int8":
        rows = [_load(builder, builder.add(at, _i64(WIDTH * k)), _bytes) for k in range(8)]
        return [builder.sitofp(builder.sext(row, _ints), _floats) for row in rows]
    if form == "int4":
        packed = _load(builder, at, _ints)
        return [_nibble(builder, packed, k // 2 + 4 * (k % 2)) for k in range(8)]
    vectors = []
    for pair in range(4):
        packed = _load(builder, builder.add(at, _i64(4 * WIDTH * pair)), _ints)
        vectors.append(builder.bitcast(builder.shl(packed, _constant(_ints, 16)), _floats))
        vectors.append(builder.bitcast(builder.and_(packed, _constant(_ints, 0xFFFF0000)), _floats))
    return vectors


def _interleaved(builder: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Two vectors of float32 as one of bfloat16 pairs."""
    both = _call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", pairs, odd, even)
    mask = [lane // 2 + WIDTH * (lane % 2) for lane in range(2 * WIDTH)]
    words = builder.bitcast(both, _words)
    return builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(_i32, 2 * WIDTH), mask))


def _four_pairs(builder: ir.IRBuilder, form: str, at: ir.Value) -> list[ir.Value]:
    """The weights of a panel for eight inputs, unscaled, as pairs of bfloat16: one vector a pair."""
    if form == "bf16":
        return [_load(builder, builder.add(at, _i64(4 * WIDTH * pair)), _words) for pair in range(4)]
    if form == "int8":  # bfloat16 holds -128 to 127 exactly
        wide = _eight_f32(builder, form, at)
        return [_interleaved(builder, *wide[2 * pair : 2 * pair + 2]) for pair in range(4)]
    # bfloat16 holds 0 to 15 exactly. The look-up reads five bits, so the table is there twice.
    bits = [0] + [(127 + e << 7) | ((i << (7 - e)) & 127) for i in range(1, 16) for e in [i.bit_length() - 1]]
    table = ir.Constant(_words, bits + bits)
    packed = _load(builder, at, _words)
    vectors = []
    for place in range(4):
        shifted = builder.lshr(packed, _constant(_words, 4 * place)) if place else packed
        found = _call(builder, "llvm.x86.avx512.permvar.hi.512", _words, table, shifted)
        vectors.append(found)
    return vectors


_STEP_BYTES = {"f32": 32 * WIDTH, "bf16": 16 * WIDTH, "int8": 8 * WIDTH, "int4": 4 * WIDTH}
"""Bytes of a panel's weights for eight inputs."""


def _product(form: str, dots: bool, rows: int, panels: int) -> Any:
    """C = x Wᵀ for so many rows and panels, in float32 or by dots of bfloat16 pairs."""
    x_bytes = 16 if dots else 32  # of eight inputs
    step_bytes = _STEP_BYTES[form]
    scale_count = {"f32": 0, "bf16": 0, "int8": 1, "int4": 2}[form]
    grid = [(row, panel) for row in range(rows) for panel in range(panels)]

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        def argument(place: int) -> ir.Value:
            return builder.load(pointer(builder, builder.add(block, _i64(8 * place)), _i64))

        def place(first: int, stride: int, index: int) -> ir.Value:
            return builder.add(argument(first), builder.mul(argument(stride), _i64(index)))

        zero = _constant(_floats, 0.0)
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
                                pair = _splat(builder, _load(builder, where, _i32))
                                sum_ = dot(builder, sum_, vector, pair)
                            else:
                                x = _splat(builder, _load(builder, where, _f32))
                                sum_ = _fma(builder, vector, x, sum_)
                            builder.store(sum_, chain)
            if scale_count:
                scale_offset = builder.mul(groups.index, scale_bytes)
                sum_offset = builder.shl(groups.index, _i64(2))
                for panel in range(panels):
                    at = builder.add(scales[panel], scale_offset)
                    scale = _scales(builder, at, wide, scale_count)
                    for row in range(rows):
                        even, odd = (builder.load(chain) for chain in chains[row, panel])
                        total = builder.load(totals[row, panel])
                        if scale_count == 2:
                            group_sum = _load(builder, builder.add(sums[row], sum_offset), _f32)
                            total = _fma(builder, scale[1], _splat(builder, group_sum), total)
                        total = _fma(builder, scale[0], builder.fadd(even, odd), total)
                        builder.store(total, totals[row, panel])
        for row, panel in grid:
            result = builder.load(totals[row, panel])
            if not scale_count:
                even, odd = (builder.load(chain) for chain in chains[row, panel])
                result = builder.fadd(even, odd)
            to = builder.add(outputs[row], _i64(4 * WIDTH * panel))
            builder.store(result, pointer(builder, to, _floats), align=4)

    return _function(f"ramify_linear_{form}_{'dots' if dots else 'f32'}_{rows}x{panels}", fill)


def panels_at_once(rows: int) -> int:
    """Panels of a kernel for so many rows: sums, chains, weights and scales stay in registers."""
    if LANES == 16:
        return {1: 4, 2: 4, 4: 2, 8: 1}[rows]
    return 2 if rows == 1 and LANES == 8 else 1


def products(form: str, dots: bool) -> dict[int, Any]:
    """The kernels of a weight format by their number of rows."""
    return {rows: _product(form, dots, rows, panels_at_once(rows)) for rows in ROWS}


def decoder(form: str) -> Any:
    """Writes a panel's weights at B as pairs of bfloat16, each the nearest to its exact value."""
    count = {"int8": 1, "int4": 2}[form]

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        def argument(place: int) -> ir.Value:
            return builder.load(pointer(builder, builder.add(block, _i64(8 * place)), _i64))

        weights, scales, to, wide = argument(Q), argument(S), argument(B), argument(WIDE)
        steps, ahead = argument(STEPS), argument(AHEAD)
        scale_bytes = builder.mul(_i64(2 * WIDTH * count), builder.add(wide, _i64(1)))
        with cgutils.for_range(builder, argument(GROUPS)) as groups:
            at = builder.add(scales, builder.mul(groups.index, scale_bytes))
            scale = _scales(builder, at, wide, count)
            before = builder.mul(groups.index, steps)
            with cgutils.for_range(builder, steps) as loop:
                step = builder.add(before, loop.index)
                at = builder.add(weights, builder.mul(step, _i64(_STEP_BYTES[form])))
                for byte in range(0, _STEP_BYTES[form], 64):
                    prefetch_line(builder, builder.add(builder.add(at, ahead), _i64(byte)))
                values = []
                for value in _eight_f32(builder, form, at):
                    if count == 2:
                        values.append(_fma(builder, value, scale[0], scale[1]))
                    else:
                        values.append(builder.fmul(value, scale[0]))
                for pair in range(4):
                    vector = _interleaved(builder, values[2 * pair], values[2 * pair + 1])
                    offset = builder.add(builder.mul(step, _i64(16 * WIDTH)), _i64(4 * WIDTH * pair))
                    builder.store(vector, pointer(builder, builder.add(to, offset), _words), align=4)

    return _function(f"ramify_linear_decode_{form}", fill)


def _tile(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    _call(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


def _tile_product(row_tiles: int) -> Any:
    """C = x Wᵀ for 16 or 32 rows and two panels, by AMX: STEPS counts tiles of 32 inputs here."""

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        def argument(place: int) -> ir.Value:
            return builder.load(pointer(builder, builder.add(block, _i64(8 * place)), _i64))

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

    return _function(f"ramify_linear_tiles_{row_tiles}", fill)


def _configure(builder: ir.IRBuilder, block: ir.Value) -> None:
    """Eight tiles of 16 rows of 64 bytes, from the 64 bytes of configuration that the block's B names."""
    address = builder.load(pointer(builder, builder.add(block, _i64(8 * B)), _i64))
    _tile(builder, "ldtilecfg", pointer(builder, address, _i8))


tile_products = {16: _tile_product(1), 32: _tile_product(2)}
"""By their number of rows."""
configure_tiles = _function("ramify_linear_tiles_configure", _configure)
release_tiles = _function("ramify_linear_tiles_release", lambda builder, block: _tile(builder, "tilerelease"))
