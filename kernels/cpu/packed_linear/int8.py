"""Products of x in int8 with int8 and int4 weights (VNNI): the rounding of x, and the inner loop.

A row of x has the same groups of inputs as the weights. Each group becomes int8 numbers and a float32 step,
with the largest magnitude equal to 127 steps (ggml's Q8_1). An instruction multiplies 64 bytes by 64 bytes
and adds the products in fours to int32, which is exact. Sums of groups are scaled and added in float32, in
ascending order, for any number of rows and panels that a kernel handles at once.

The instruction needs unsigned weights: int4 codes are, and int8 numbers and those of a table are raised by
128. Codes whose numbers are `code - n`, as Q4_0 has them, need no table: they are numbers raised by n. SUMS
has three numbers for each group of a row: the step; -RAISED times the int32 sum of the int8 numbers, where
the accumulation of raised weights begins; and the step times that sum, which multiplies the offsets.

The rows that a kernel takes at once are interleaved: for each four inputs, the four bytes of every row side
by side, and so the three numbers of each group. All addresses in the inner loop are then one register and a
constant, and rows of 4096 bytes do not share the sets of the first-level cache.

A kernel for one row prefetches nothing: the processor's own prefetching reaches 90% of the bandwidth, and
requests for the next item, which another thread may take, cost up to a fifth of it.
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
_STEP, _BEGIN, _SUM = 0, 1, 2
GROUP_BYTES = 12
"""Bytes of a group's numbers of a row of x: float32 step, int32 where sums begin, float32 sum of the row."""
_UNROLLED = 2
"""Steps of eight inputs without a loop; a group is a multiple of 16 inputs."""
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
        inputs, sums_of_x = argument(code.X), argument(code.SUMS)
        outputs = [place(code.C, code.C_ROW, row) for row in range(rows)]
        steps, tables = argument(code.STEPS), argument(code.TABLES)
        group_scales = Scales(builder, block)
        cell: Any = cgutils.alloca_once_value
        sums = {spot: cell(builder, constant(_ints, 0)) for spot in grid}
        totals = {spot: cell(builder, constant(_floats, 0.0)) for spot in grid}

        def of_row(at: ir.Value, which: int, row: int, kind: ir.Type) -> ir.Value:
            """One of the numbers of a group of a row of x, in all lanes."""
            place = builder.add(at, _i64(4 * (rows * which + row)))
            return splatted(builder, loaded(builder, place, kind))

        def multiply_step(step: ir.Value) -> None:
            offset = builder.mul(step, _i64(step_bytes))
            at_x = builder.add(inputs, builder.mul(step, _i64(8 * rows)))
            vectors = []
            for panel in range(panels):
                at = builder.add(weights[panel], offset)
                if rows > 1:
                    for byte in range(0, step_bytes, 64):
                        prefetch_line(builder, builder.add(builder.add(at, ahead[panel]), _i64(byte)))
                vectors.append(_two_fours(builder, form, at, tables))
            for half in range(2):
                for row in range(rows):
                    where = builder.add(at_x, _i64(4 * (rows * half + row)))
                    four = splatted(builder, loaded(builder, where, _i32))
                    for panel in range(panels):
                        sum_ = builder.load(sums[row, panel])
                        name = "llvm.x86.avx512.vpdpbusd.512"
                        sum_ = called(builder, name, _ints, sum_, vectors[panel][half], four)
                        builder.store(sum_, sums[row, panel])

        with cgutils.for_range(builder, argument(code.GROUPS)) as groups:
            of_group = builder.add(sums_of_x, builder.mul(groups.index, _i64(GROUP_BYTES * rows)))
            for row in range(rows):
                begin = of_row(of_group, _BEGIN, row, _i32)
                for panel in range(panels):
                    builder.store(begin, sums[row, panel])
            before = builder.mul(groups.index, steps)
            with cgutils.for_range(builder, builder.lshr(steps, _i64(_UNROLLED.bit_length() - 1))) as loop:
                first = builder.add(before, builder.mul(loop.index, _i64(_UNROLLED)))
                for step in range(_UNROLLED):
                    multiply_step(builder.add(first, _i64(step)))
            scales_at = [group_scales.address(at, groups.index) for at in scales]
            with builder.if_then(group_scales.has_offsets):
                offsets = [group_scales.offsets(at) for at in scales_at]
                for row in range(rows):
                    sum_of_x = of_row(of_group, _SUM, row, _f32)
                    for panel in range(panels):
                        total = builder.load(totals[row, panel])
                        total = multiply_add(builder, offsets[panel], sum_of_x, total)
                        builder.store(total, totals[row, panel])
            factors = [group_scales.factors(at) for at in scales_at]
            for row in range(rows):
                step_of_x = of_row(of_group, _STEP, row, _f32)
                for panel in range(panels):
                    total = builder.load(totals[row, panel])
                    sum_ = builder.sitofp(builder.load(sums[row, panel]), _floats)
                    total = multiply_add(builder, builder.fmul(factors[panel], step_of_x), sum_, total)
                    builder.store(total, totals[row, panel])
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
        four_bytes, raised = argument(code.X_ROW), argument(code.RAISED)
        group_bytes = builder.mul(four_bytes, _i64(GROUP_BYTES // 4))
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
                fours = builder.bitcast(numbers, ir.VectorType(_i32, 4))
                at = builder.add(to, builder.mul(place, builder.shl(four_bytes, _i64(2))))
                for four in range(4):
                    number = builder.extract_element(fours, _i32(four))
                    builder.store(number, pointer(builder, at, _i32), align=4)
                    at = builder.add(at, four_bytes)
            sum_ = reduced("add.v16i32", builder.load(total))
            at = builder.add(sums, builder.mul(groups.index, group_bytes))
            begin = builder.mul(sum_, builder.trunc(builder.neg(raised), _i32))
            numbers = [step, begin, builder.fmul(builder.sitofp(sum_, _f32), step)]
            for number in numbers:
                builder.store(number, pointer(builder, at, number.type), align=4)
                at = builder.add(at, four_bytes)

    return llvm_function(f"ramify_linear_round_{form}", 1, fill)


round_int8, round_int4 = _rounder("int8"), _rounder("int4")
"""Round x for int8 and int4 weights. Called only with VNNI."""
