"""Products of x in int8 with int8 and int4 weights (VNNI): the rounding of x, and the inner loop.

A row of x has the same groups of inputs as the weights. Each group becomes int8 numbers and a float32 step,
with the largest magnitude equal to 127 steps (ggml's Q8_1). An instruction multiplies 64 bytes by 64 bytes
and adds the products in fours to int32, which is exact. Sums of groups are scaled and added in float32, in
ascending order, for any number of rows and panels that a kernel handles at once.

The instruction needs unsigned weights: int4 codes are, and int8 numbers and those of a table are raised by
128. SUMS has two numbers for each group of a row: the step, and -128 times the int32 sum of the int8 numbers.
The second is where the accumulation of raised weights begins. Times -step / 128 it multiplies the offsets.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ramify.kernels.cpu.codegen.compiler import features
from ramify.kernels.cpu.codegen.functions import llvm_function
from ramify.kernels.cpu.codegen.simd import LANES, pointer, prefetch_line
from ramify.kernels.cpu.packed_linear import code as code
from ramify.kernels.cpu.packed_linear.code import (
    WIDTH,
    Scales,
    called,
    constant,
    loaded,
    multiply_add,
    splatted,
)
from ramify.kernels.packed import TABLE_BYTES_AT

VNNI = LANES == WIDTH and {"+avx512vnni", "+avx512bw"} <= features()
"""Whether the processor multiplies vectors of bytes (AVX512_VNNI)."""
PANELS_AT_ONCE = {1: 4, 2: 4, 4: 2, 8: 2}
"""Panels of a kernel by its number of rows, so that the sums of a group stay in registers."""

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _ints = ir.VectorType(_f32, WIDTH), ir.VectorType(_i32, WIDTH)
_words, _bytes, _all_bytes = (
    ir.VectorType(_i16, WIDTH),
    ir.VectorType(_i8, WIDTH),
    ir.VectorType(_i8, 4 * WIDTH),
)
_STEP_BYTES = {"int8": 8 * WIDTH, "int4": 4 * WIDTH, "table": 4 * WIDTH}
"""Bytes of a panel's weights for eight inputs."""
_ORDER = {"int8": (0, 1, 2, 3, 4, 5, 6, 7), "int4": (0, 4, 1, 5, 2, 6, 3, 7)}
"""The inputs in the order of the bytes of `_two_fours`. Rounded x is written in the same order."""
_MAGIC = 1.5 * 2**23
"""Adding 1.5 * 2**23 to a float32 rounds it to an integer and leaves the integer in the lower bits."""
_MAGIC_BITS = 0x4B400000


def _two_fours(builder: ir.IRBuilder, form: str, at: ir.Value, tables: ir.Value) -> list[ir.Value]:
    """The weights of a panel for eight inputs as two vectors of unsigned bytes, four inputs an output."""
    if form != "int8":
        packed = loaded(builder, at, _ints)
        halves = [packed, builder.lshr(packed, constant(_ints, 4))]
        codes = [builder.and_(half, constant(_ints, 0x0F0F0F0F)) for half in halves]
        if form == "int4":
            return codes
        table = loaded(builder, builder.add(tables, _i64(TABLE_BYTES_AT)), _all_bytes)
        name = "llvm.x86.avx512.pshuf.b.512"
        bytes_ = [builder.bitcast(code, _all_bytes) for code in codes]
        found = [called(builder, name, _all_bytes, table, code) for code in bytes_]
        return [builder.bitcast(number, _ints) for number in found]
    mask = [lane // 4 + WIDTH * (lane % 4) for lane in range(4 * WIDTH)]
    vectors = []
    for half in range(2):
        inputs = loaded(builder, builder.add(at, _i64(4 * WIDTH * half)), _all_bytes)
        turned = builder.shuffle_vector(inputs, inputs, ir.Constant(ir.VectorType(_i32, 4 * WIDTH), mask))
        vectors.append(builder.xor(builder.bitcast(turned, _ints), constant(_ints, 0x80808080)))
    return vectors


def _product(form: str, rows: int, panels: int) -> Any:
    """C = x Wᵀ for `rows` rows and `panels` panels."""
    step_bytes = _STEP_BYTES[form]
    grid = [(row, panel) for row in range(rows) for panel in range(panels)]

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(code.argument_at, builder, block)
        place = functools.partial(code.row_address, builder, block)
        weights = [argument(code.Q + panel) for panel in range(panels)]
        scales = [argument(code.S + panel) for panel in range(panels)]
        ahead = [argument(code.AHEAD + panel) for panel in range(panels)]
        inputs = [place(code.X, code.X_ROW, row) for row in range(rows)]
        sums_of_x = [place(code.SUMS, code.SUMS_ROW, row) for row in range(rows)]
        outputs = [place(code.C, code.C_ROW, row) for row in range(rows)]
        steps, tables = argument(code.STEPS), argument(code.TABLES)
        group_scales = Scales(builder, block)
        cell: Any = cgutils.alloca_once_value
        sums = {spot: cell(builder, constant(_ints, 0)) for spot in grid}
        totals = {spot: cell(builder, constant(_floats, 0.0)) for spot in grid}
        with cgutils.for_range(builder, argument(code.GROUPS)) as groups:
            group_offset = builder.shl(groups.index, _i64(3))
            steps_at = [builder.add(at, group_offset) for at in sums_of_x]
            sums_at = [builder.add(at, _i64(4)) for at in steps_at]
            for row, panel in grid:
                begin: ir.Value = constant(_ints, 0)
                if form != "int4":
                    begin = splatted(builder, loaded(builder, sums_at[row], _i32))
                builder.store(begin, sums[row, panel])
            before = builder.mul(groups.index, steps)
            with cgutils.for_range(builder, steps) as loop:
                step = builder.add(before, loop.index)
                offset = builder.mul(step, _i64(step_bytes))
                x_offset = builder.shl(step, _i64(3))
                vectors = []
                for panel in range(panels):
                    at = builder.add(weights[panel], offset)
                    for byte in range(0, step_bytes, 64):
                        later = builder.add(at, ahead[panel])
                        prefetch_line(builder, builder.add(later, _i64(byte)))
                    vectors.append(_two_fours(builder, form, at, tables))
                for half in range(2):
                    for row in range(rows):
                        where = builder.add(builder.add(inputs[row], x_offset), _i64(4 * half))
                        four = splatted(builder, loaded(builder, where, _i32))
                        for panel in range(panels):
                            sum_ = builder.load(sums[row, panel])
                            name = "llvm.x86.avx512.vpdpbusd.512"
                            sum_ = called(builder, name, _ints, sum_, vectors[panel][half], four)
                            builder.store(sum_, sums[row, panel])
            scales_at = [group_scales.address(at, groups.index) for at in scales]
            with builder.if_then(group_scales.has_offsets):
                offsets = [group_scales.offsets(at) for at in scales_at]
                for row, panel in grid:
                    sum_ = builder.sitofp(loaded(builder, sums_at[row], _i32), _f32)
                    sum_ = builder.fmul(sum_, _f32(-1 / 128))
                    sum_of_x = splatted(builder, builder.fmul(sum_, loaded(builder, steps_at[row], _f32)))
                    total = builder.load(totals[row, panel])
                    builder.store(multiply_add(builder, offsets[panel], sum_of_x, total), totals[row, panel])
            factors = [group_scales.factors(at) for at in scales_at]
            for row, panel in grid:
                total = builder.load(totals[row, panel])
                factor = builder.fmul(factors[panel], splatted(builder, loaded(builder, steps_at[row], _f32)))
                sum_ = builder.sitofp(builder.load(sums[row, panel]), _floats)
                builder.store(multiply_add(builder, factor, sum_, total), totals[row, panel])
        for row, panel in grid:
            to = builder.add(outputs[row], _i64(4 * WIDTH * panel))
            builder.store(builder.load(totals[row, panel]), pointer(builder, to, _floats), align=4)

    return llvm_function(f"ramify_linear_{form}_int8_{rows}x{panels}", 1, fill)


def products(form: str) -> dict[int, Any]:
    """The kernels of a weight format by their number of rows."""
    return {rows: _product(form, rows, panels) for rows, panels in PANELS_AT_ONCE.items()}


def _rounder(form: str) -> Any:
    """Rounds the bfloat16 row at X to int8 at C, and writes the steps and corrections of its groups to SUMS.

    The step of a group with a NaN is NaN; the step of a group with an infinity is infinite.
    """
    order = ir.Constant(_ints, [8 * (lane // 8) + _ORDER[form][lane % 8] for lane in range(WIDTH)])

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(code.argument_at, builder, block)

        def reduced(name: str, vector: ir.Value) -> ir.Value:
            return called(builder, f"llvm.vector.reduce.{name}", vector.type.element, vector)

        x, to, sums = argument(code.X), argument(code.C), argument(code.SUMS)
        vectors = builder.lshr(argument(code.STEPS), _i64(1))
        cell: Any = cgutils.alloca_once_value
        largest, total = cell(builder, constant(_words, 0)), cell(builder, constant(_ints, 0))
        with cgutils.for_range(builder, argument(code.GROUPS)) as groups:
            before = builder.mul(groups.index, vectors)
            builder.store(constant(_words, 0), largest)
            with cgutils.for_range(builder, vectors) as loop:
                at = builder.add(x, builder.shl(builder.add(before, loop.index), _i64(5)))
                # The bits of non-negative floats have the order of the floats, with NaN above all.
                bits = builder.and_(loaded(builder, at, _words), constant(_words, 0x7FFF))
                known = builder.load(largest)
                larger = builder.icmp_unsigned(">", bits, known)
                builder.store(builder.select(larger, bits, known), largest)
            most = builder.zext(reduced("umax.v16i16", builder.load(largest)), _i32)
            most = builder.bitcast(builder.shl(most, _i32(16)), _f32)
            step = builder.fdiv(most, _f32(127.0))
            # Below 2**-100 the quotient could overflow, and the products would vanish in any sum.
            tiny = builder.fcmp_ordered("<", most, _f32(2.0**-100))
            steps = builder.select(tiny, _f32(0.0), builder.fdiv(_f32(127.0), most))
            builder.store(constant(_ints, 0), total)
            with cgutils.for_range(builder, vectors) as loop:
                place = builder.add(before, loop.index)
                bits = builder.zext(
                    loaded(builder, builder.add(x, builder.shl(place, _i64(5))), _words), _ints
                )
                wide = builder.bitcast(builder.shl(bits, constant(_ints, 16)), _floats)
                moved = multiply_add(builder, wide, splatted(builder, steps), constant(_floats, _MAGIC))
                numbers = builder.sub(builder.bitcast(moved, _ints), constant(_ints, _MAGIC_BITS))
                builder.store(builder.add(builder.load(total), numbers), total)
                numbers = builder.trunc(builder.shuffle_vector(numbers, numbers, order), _bytes)
                at = builder.add(to, builder.shl(place, _i64(4)))
                builder.store(numbers, pointer(builder, at, _bytes), align=1)
            sum_ = reduced("add.v16i32", builder.load(total))
            sum_ = builder.mul(sum_, _i32(-128))
            at = builder.add(sums, builder.shl(groups.index, _i64(3)))
            builder.store(step, pointer(builder, at, _f32))
            builder.store(sum_, pointer(builder, builder.add(at, _i64(4)), sum_.type))

    return llvm_function(f"ramify_linear_round_{form}", 1, fill)


round_int8, round_int4 = _rounder("int8"), _rounder("int4")
"""Round x for int8 and int4 weights. Called only with VNNI."""
