"""Products of x in int8 or int16 with int8 and int4 weights: the rounding of x, and the inner loop.

    for group of a row of x: step = max |x| / 127;  numbers = round(x / step)       once a call
    for group of inputs:
        for four inputs, panel, row: sums[row, panel] += four bytes of w · four bytes of x       int32
        totals += offsets · sum of x in the group + factors · step · sums

A row of x has the same groups of inputs as the weights. Each group becomes int8 numbers and a float32 step,
with the largest magnitude equal to 127 steps (ggml's Q8_1). Products of bytes are added to int32, which is
exact (`byte_dots.py`). Sums of groups are scaled and added in float32, in ascending order, for any number of
rows and panels that a kernel handles at once.

vpdpbusd needs unsigned weights: int4 codes are, and int8 numbers and those of a table are raised by 128.
Codes whose numbers are `code - n`, as Q4_0 has them, need no table: the codes are the numbers, raised by n.
`sums` has three numbers for each group of a row: the step; -`raised` times the int32 sum of the int8 numbers,
where the accumulation of raised weights begins; and the step times that int32 sum, by which the offsets are
multiplied.

With AVX2, int8 weights are multiplied by x in int16 (vpmaddwd), with the largest magnitude equal to 32,767
steps. int32 has room for the sum of a group of up to MOST_INT16_GROUP inputs; the error for groups of 32 is a
hundredth of that of bfloat16. Products with larger groups are float32, as an outlier would cost all inputs of
its group their precision.

The rows that a kernel takes at once are interleaved: for each four inputs, the four bytes of every row side
by side, and likewise the three numbers of each group. All addresses in the inner loop are then one register
and a constant, and rows of 4096 bytes do not share the sets of the first-level cache.

A kernel for one row prefetches nothing: the processor's own prefetching reaches 90% of the bandwidth.
Requests for the next item, which another thread may take, cost up to a fifth of the bandwidth.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ramify.kernels.cpu.codegen.functions import llvm_function
from ramify.kernels.cpu.codegen.simd import LANES, pointer, prefetch_line
from ramify.kernels.cpu.packed_linear import byte_dots
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
from ramify.kernels.weights.packed import TABLE_BYTES_AT

PANELS_AT_ONCE = {1: 4, 2: 4, 4: 2, 8: 2} if LANES == WIDTH else {1: 2, 2: 1, 4: 1}
"""Panels of a kernel by its number of rows, so that the sums of a group stay in registers."""

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _ints = ir.VectorType(_f32, WIDTH), ir.VectorType(_i32, WIDTH)
_words, _bytes = ir.VectorType(_i16, WIDTH), ir.VectorType(_i8, WIDTH)
_all_bytes = ir.VectorType(_i8, 4 * WIDTH)
_STEP_BYTES = {"int8": 8 * WIDTH, "int4": 4 * WIDTH, "table": 4 * WIDTH}
"""Bytes of a panel's weights for eight inputs."""
_ORDER = {"int8": (0, 1, 2, 3, 4, 5, 6, 7), "int4": (0, 4, 1, 5, 2, 6, 3, 7)}
"""The order of the inputs in the bytes of `_two_fours`. Rounded x is written in the same order."""
_STEP, _BEGIN, _SUM = 0, 1, 2
GROUP_BYTES = 12
"""Bytes of the three numbers for a group of a row of x: the float32 step, the int32 at which sums begin, and
the float32 sum of the group."""
_UNROLLED = 2
"""Steps of eight inputs that are unrolled; a group is a multiple of 16 inputs."""
_TOGETHER = byte_dots.SHORT_INPUTS // 8
"""Steps of eight inputs that are unrolled in assembly, for groups of a multiple of 32 inputs."""
_STRAIGHT = {"int4": ((code.F16, 0, 4), (code.F16, 1, 4), (code.F32, 1, 4)), "int8": ((code.F16, 0, 4),)}
"""(kind of scales, offsets, steps of a group) of the assembly loops that have no branches inside a group:
Q4_0, Q4_1 and Q4_K, and Q8_0."""
MOST_INT16_GROUP = 512
"""The most inputs of a group whose products with x in int16 can be added in int32; a product is at most 128 *
32,767."""
_MAGIC = 1.5 * 2**23
"""Adding 1.5 * 2**23 to a float32 rounds it to an integer and leaves the integer in the lower bits."""
_MAGIC_BITS = 0x4B400000


def _two_fours(builder: ir.IRBuilder, form: str, at: ir.Value, tables: ir.Value) -> list[ir.Value]:
    """The weights of a panel for eight inputs as two vectors of bytes, each with four inputs of every output.
    Weights of int8 and of a table are raised if the instruction needs unsigned weights."""
    raised = constant(_ints, 0x80808080)
    if form != "int8":
        packed = loaded(builder, at, _ints)
        halves = [packed, builder.lshr(packed, constant(_ints, 4))]
        codes = [builder.and_(half, constant(_ints, 0x0F0F0F0F)) for half in halves]
        if form == "int4":
            return codes
        table = loaded(builder, builder.add(tables, _i64(TABLE_BYTES_AT)), _ints)
        found = [byte_dots.looked_up(builder, table, code) for code in codes]
        return found if byte_dots.UNSIGNED else [builder.xor(number, raised) for number in found]
    vectors = []
    for half in range(2):
        inputs = loaded(builder, builder.add(at, _i64(4 * WIDTH * half)), _all_bytes)
        mask = [lane // 4 + WIDTH * (lane % 4) for lane in range(4 * WIDTH)]
        turned = builder.shuffle_vector(inputs, inputs, ir.Constant(ir.VectorType(_i32, 4 * WIDTH), mask))
        fours = builder.bitcast(turned, _ints)
        vectors.append(builder.xor(fours, raised) if byte_dots.UNSIGNED else fours)
    return vectors


def _product(form: str, rows: int, panels: int, int16_x: bool = False) -> Any:
    """C = x Wᵀ for `rows` rows and `panels` panels; `int16_x`: with x in int16."""
    step_bytes = _STEP_BYTES[form]
    grid = [(row, panel) for row in range(rows) for panel in range(panels)]
    by_maddubs = byte_dots.INSTRUCTION == "vpmaddubsw"
    together = int16_x or (by_maddubs and form == "int4")  # in assembly
    step_bytes_of_x = rows * (16 if int16_x else 8)

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(code.argument_at, builder, block)
        place = functools.partial(code.row_address, builder, block)
        weights = [argument(f"weights{panel}") for panel in range(panels)]
        scales = [argument(f"scales{panel}") for panel in range(panels)]
        ahead = [argument(f"ahead{panel}") for panel in range(panels)]
        inputs, sums_of_x = argument("x"), argument("sums")
        outputs = [place("c", row) for row in range(rows)]
        tables = argument("tables")
        cell: Any = cgutils.alloca_once_value
        sums = {spot: cell(builder, constant(_ints, 0)) for spot in grid}
        totals = {spot: cell(builder, constant(_floats, 0.0)) for spot in grid}

        def of_row(at: ir.Value, which: int, row: int, kind: ir.Type) -> ir.Value:
            """One of the three numbers of a group of a row of x (`which`: _STEP, _BEGIN or _SUM), in all
            lanes."""
            place = builder.add(at, _i64(4 * (rows * which + row)))
            return splatted(builder, loaded(builder, place, kind))

        def prefetch_step(at: ir.Value, panel: int) -> None:
            if rows > 1:
                for byte in range(0, step_bytes, 64):
                    prefetch_line(builder, builder.add(builder.add(at, ahead[panel]), _i64(byte)))

        def multiply_step(step: ir.Value) -> None:
            offset = builder.mul(step, _i64(step_bytes))
            at_x = builder.add(inputs, builder.mul(step, _i64(step_bytes_of_x)))
            vectors, magnitudes = [], []
            for panel in range(panels):
                at = builder.add(weights[panel], offset)
                prefetch_step(at, panel)
                vectors.append(_two_fours(builder, form, at, tables))
                if by_maddubs:
                    magnitudes.append([byte_dots.magnitudes(builder, each) for each in vectors[-1]])
            for half in range(2):
                for row in range(rows):
                    where = builder.add(at_x, _i64(4 * (rows * half + row)))
                    four = splatted(builder, loaded(builder, where, _i32))
                    for panel in range(panels):
                        sum_, numbers = builder.load(sums[row, panel]), vectors[panel][half]
                        if by_maddubs:
                            magnitude = magnitudes[panel][half]
                            sum_ = byte_dots.add_signed(builder, sum_, numbers, magnitude, four)
                        else:
                            sum_ = byte_dots.add(builder, sum_, numbers, four)
                        builder.store(sum_, sums[row, panel])

        def multiply_together(step: ir.Value, count: int) -> None:
            """`count` steps whose products are added in registers."""
            offset = builder.mul(step, _i64(step_bytes))
            at = [builder.add(panel, offset) for panel in weights]
            for panel in range(panels):
                for later in range(count):
                    prefetch_step(builder.add(at[panel], _i64(step_bytes * later)), panel)
            at_x = builder.add(inputs, builder.mul(step, _i64(step_bytes_of_x)))
            added = (byte_dots.int16_sums if int16_x else byte_dots.short_sums)(
                builder, at, at_x, rows, count
            )
            for row, panel in grid:
                sum_, more = builder.load(sums[row, panel]), added[row][panel]
                if int16_x:
                    sum_ = builder.add(sum_, more)
                else:
                    sum_ = byte_dots.add_shorts(builder, sum_, more)
                builder.store(sum_, sums[row, panel])

        def multiply_steps(first: ir.Value, steps: ir.Value, count: int) -> None:
            """The `steps` steps of a group, `count` at a time; `count` is a power of two and divides
            `steps`."""
            with cgutils.for_range(builder, builder.lshr(steps, _i64(count.bit_length() - 1))) as loop:
                start = builder.add(first, builder.mul(loop.index, _i64(count)))
                if together:
                    multiply_together(start, count)
                else:
                    for step in range(count):
                        multiply_step(builder.add(start, _i64(step)))

        def multiply_groups(kind: ir.Value, offsets: ir.Value, steps: ir.Value) -> None:
            group_scales = Scales(builder, kind, offsets)
            with cgutils.for_range(builder, argument("groups")) as groups:
                of_group = builder.add(sums_of_x, builder.mul(groups.index, _i64(GROUP_BYTES * rows)))
                for row in range(rows):
                    begin = of_row(of_group, _BEGIN, row, _i32)
                    if int16_x or (form != "int4" and not byte_dots.UNSIGNED):
                        begin = constant(_ints, 0)
                    for panel in range(panels):
                        builder.store(begin, sums[row, panel])
                before = builder.mul(groups.index, steps)
                if together:
                    rest = builder.and_(steps, _i64(_TOGETHER - 1))
                    with builder.if_else(builder.icmp_unsigned("==", rest, _i64(0))) as (whole, part):
                        with whole:
                            multiply_steps(before, steps, _TOGETHER)
                        with part:
                            multiply_steps(before, steps, _UNROLLED)
                else:
                    multiply_steps(before, steps, _UNROLLED)
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

        given = argument("scale_kind"), argument("offsets"), argument("steps")

        def choose(straight: Sequence[tuple[int, int, int]]) -> None:
            if not straight:
                multiply_groups(*given)
                return
            fixed = [_i64(number) for number in straight[0]]
            equal = [builder.icmp_unsigned("==", *pair) for pair in zip(given, fixed, strict=True)]
            with builder.if_else(functools.reduce(builder.and_, equal)) as (same, other):
                with same:
                    multiply_groups(*fixed)
                with other:
                    choose(straight[1:])

        choose(_STRAIGHT[form] if together else ())
        for row, panel in grid:
            to = builder.add(outputs[row], _i64(4 * WIDTH * panel))
            builder.store(builder.load(totals[row, panel]), pointer(builder, to, _floats), align=4)

    bits = 16 if int16_x else 8
    return llvm_function(f"ramify_linear_{form}_int{bits}_{rows}x{panels}", 1, fill)


def products(form: str, int16_x: bool = False) -> dict[int, Any]:
    """The kernels of a weight format by their number of rows; `int16_x`: with x in int16."""
    return {rows: _product(form, rows, panels, int16_x) for rows, panels in PANELS_AT_ONCE.items()}


def _rounder(form: str, kind: str, int16_x: bool = False) -> Any:
    """A function that rounds the row of `kind` ("bf16" or "f32") at `x` to int8 at `c`, or with `int16_x` to
    int16, and writes the steps and corrections of its groups to `sums`.

    The step of a group with a NaN is NaN; the step of a group with an infinity is infinite.
    """
    size = 2 if kind == "bf16" else 4
    limit = _f32(32767.0 if int16_x else 127.0)
    numbers_of_x = _words if kind == "bf16" else _ints
    order = ir.Constant(_ints, [8 * (lane // 8) + _ORDER[form][lane % 8] for lane in range(WIDTH)])

    def fill(builder: ir.IRBuilder, block: ir.Value) -> None:
        argument = functools.partial(code.argument_at, builder, block)

        def reduced(name: str, vector: ir.Value) -> ir.Value:
            return called(builder, f"llvm.vector.reduce.{name}", vector.type.element, vector)

        x, to, sums = argument("x"), argument("c"), argument("sums")
        four_bytes, raised = argument("four_bytes"), argument("raised")
        group_bytes = builder.mul(four_bytes, _i64(GROUP_BYTES // 4))
        vectors = builder.lshr(argument("steps"), _i64(1))
        cell: Any = cgutils.alloca_once_value
        largest, total = cell(builder, constant(numbers_of_x, 0)), cell(builder, constant(_ints, 0))

        def bits_of(place: ir.Value) -> ir.Value:
            """WIDTH numbers of the row as integers."""
            return loaded(builder, builder.add(x, builder.mul(place, _i64(size * WIDTH))), numbers_of_x)

        with cgutils.for_range(builder, argument("groups")) as groups:
            before = builder.mul(groups.index, vectors)
            builder.store(constant(numbers_of_x, 0), largest)
            with cgutils.for_range(builder, vectors) as loop:
                # The bits of non-negative floats have the order of the floats, with NaN above all.
                magnitude = constant(numbers_of_x, (1 << (8 * size - 1)) - 1)
                bits = builder.and_(bits_of(builder.add(before, loop.index)), magnitude)
                known = builder.load(largest)
                larger = builder.icmp_unsigned(">", bits, known)
                builder.store(builder.select(larger, bits, known), largest)
            most = reduced(f"umax.v16i{8 * size}", builder.load(largest))
            if kind == "bf16":
                most = builder.shl(builder.zext(most, _i32), _i32(16))
            most = builder.bitcast(most, _f32)
            step = builder.fdiv(most, limit)
            # Below 2**-100 the quotient could overflow, and the products would vanish in any sum.
            tiny = builder.fcmp_ordered("<", most, _f32(2.0**-100))
            steps = builder.select(tiny, _f32(0.0), builder.fdiv(limit, most))
            builder.store(constant(_ints, 0), total)
            with cgutils.for_range(builder, vectors) as loop:
                place = builder.add(before, loop.index)
                bits = bits_of(place)
                if kind == "bf16":
                    bits = builder.shl(builder.zext(bits, _ints), constant(_ints, 16))
                wide = builder.bitcast(bits, _floats)
                moved = multiply_add(builder, wide, splatted(builder, steps), constant(_floats, _MAGIC))
                numbers = builder.sub(builder.bitcast(moved, _ints), constant(_ints, _MAGIC_BITS))
                builder.store(builder.add(builder.load(total), numbers), total)
                if int16_x:
                    numbers, fours_of = builder.trunc(numbers, _words), 8
                else:
                    numbers = builder.trunc(builder.shuffle_vector(numbers, numbers, order), _bytes)
                    fours_of = 4
                fours = builder.bitcast(numbers, ir.VectorType(_i32, fours_of))
                at = builder.add(to, builder.mul(place, builder.mul(four_bytes, _i64(fours_of))))
                for four in range(fours_of):
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

    bits = 16 if int16_x else 8
    return llvm_function(f"ramify_linear_round_{form}_{kind}_int{bits}", 1, fill)


round_int8, round_int4 = _rounder("int8", "bf16"), _rounder("int4", "bf16")
round_wide_int8, round_wide_int4 = _rounder("int8", "f32"), _rounder("int4", "f32")
"""Round x to int8, for int8 and int4 weights. `round_wide_*` take float32 x, the others bfloat16 x."""
round_int16, round_wide_int16 = _rounder("int8", "bf16", True), _rounder("int8", "f32", True)
"""Round x to int16, for int8 weights. `round_wide_int16` takes float32 x, `round_int16` bfloat16 x."""
