"""The arguments of the inner loops of products with packed weights, and LLVM code that the loops share.

An inner loop takes the address of a block of int64 arguments; the constants below are places in that block.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ramify.kernels.cpu.codegen.compiler import features
from ramify.kernels.cpu.codegen.simd import pointer

WIDTH = 16
"""Outputs of a panel."""

Q, S = 0, 4  # the weights and the scales of up to four panels
AHEAD = 8  # for each of them, the distance in bytes from a weight to the one to prefetch
X, X_ROW = 12, 13  # the first row, prepared; bytes from row to row
SUMS, SUMS_ROW = 14, 15  # what is kept of each group of x: its sum, or for int8 three numbers (`int8.py`)
C, C_ROW = 16, 17  # float32 results: (rows, panels * 16); for the rounding of x, int8 numbers
GROUPS, STEPS = 18, 19  # groups of inputs, and eights of inputs in a group
SCALE_KIND = 20  # of a weight's scales: F16, F32 or BF16
B, B_OTHER = 21, 22  # two panels of bfloat16 weights, for tiles
TABLES = 23  # what the codes of int4 stand for: `packed.tables`
OFFSETS = 24  # 1 if each group of a panel has offsets after its factors, else 0
RAISED = 25  # what was added to the weights to make them unsigned, for int8 x
FOUR_BYTES = 26  # from four numbers of a rounded row to its next four: 4 for each row that is interleaved
BLOCK_BYTES = 8 * 32

F16, F32, BF16 = 0, 1, 2
"""Kinds of scales."""

_HAS = features()
_F16C = "+f16c" in _HAS or "+sse2" not in _HAS

_i16, _i32, _i64, _f32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _ints, _halves = (ir.VectorType(kind, WIDTH) for kind in (_f32, _i32, _i16))


def argument_at(builder: ir.IRBuilder, block: ir.Value, place: int) -> ir.Value:
    """The argument at a place in the block."""
    return builder.load(pointer(builder, builder.add(block, _i64(8 * place)), _i64))


def row_address(builder: ir.IRBuilder, block: ir.Value, first: int, stride: int, index: int) -> ir.Value:
    """The address of row `index`; `first` and `stride` are the places of the first row's address and of the
    bytes between rows."""
    offset = builder.mul(argument_at(builder, block, stride), _i64(index))
    return builder.add(argument_at(builder, block, first), offset)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def splatted(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """All WIDTH lanes hold `value`."""
    kind = ir.VectorType(value.type, WIDTH)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _i32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), constant(_ints, 0))


def loaded(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(pointer(builder, address, kind), align=1)


def called(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """The result of the LLVM intrinsic `name`."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c of WIDTH lanes."""
    return called(builder, "llvm.fmuladd.v16f32", _floats, a, b, c)


def widened(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """float16 as float32, exactly."""
    if _F16C:
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), WIDTH)), _floats)
    # Without the instruction: shift the bits into place, and multiply by 2**112 to adjust the exponent.
    bits = builder.zext(halves, _ints)
    magnitude = builder.shl(builder.and_(bits, constant(_ints, 0x7FFF)), constant(_ints, 13))
    value = builder.fmul(builder.bitcast(magnitude, _floats), constant(_floats, 2.0**112))
    sign = builder.shl(builder.and_(bits, constant(_ints, 0x8000)), constant(_ints, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, _ints), sign), _floats)


class Scales:
    """The scales of groups of inputs: 16 factors a group and, where OFFSETS is set, then 16 offsets."""

    def __init__(self, builder: ir.IRBuilder, kind: ir.Value, offsets: ir.Value) -> None:
        """`kind` and `offsets` as SCALE_KIND and OFFSETS: arguments of a block, or constants."""
        self._builder = builder
        self._kind = kind
        self.has_offsets = builder.icmp_unsigned("!=", offsets, _i64(0))
        doubled = builder.and_(self._kind, _i64(1))
        self._vector_bytes = builder.shl(_i64(2 * WIDTH), doubled)
        self._group_bytes = builder.shl(self._vector_bytes, offsets)

    def address(self, first: ir.Value, group: ir.Value) -> ir.Value:
        """The address of a group's factors; `first` is that of the panel's first group."""
        return self._builder.add(first, self._builder.mul(group, self._group_bytes))

    def factors(self, at: ir.Value) -> ir.Value:
        """The vector of scales at an address, as float32."""
        builder = self._builder
        cell: Any = cgutils.alloca_once
        target = cell(builder, _floats)
        with builder.if_else(builder.icmp_unsigned("==", self._kind, _i64(F32))) as (then, otherwise):
            with then:
                builder.store(loaded(builder, at, _floats), target)
            with otherwise:
                short = loaded(builder, at, _halves)
                with builder.if_else(builder.icmp_unsigned("==", self._kind, _i64(F16))) as (half, brain):
                    with half:
                        builder.store(widened(builder, short), target)
                    with brain:
                        bits = builder.shl(builder.zext(short, _ints), constant(_ints, 16))
                        builder.store(builder.bitcast(bits, _floats), target)
        return builder.load(target)

    def offsets(self, at: ir.Value) -> ir.Value:
        """The offsets of the group whose factors are at an address."""
        return self.factors(self._builder.add(at, self._vector_bytes))
