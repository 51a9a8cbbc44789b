"""The arguments of the inner loops of products with packed weights, and LLVM code that these loops share."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, features, part
from ramify.kernels.cpu.codegen.simd import pointer
from ramify.kernels.machine.records import record

WIDTH = 16
"""Outputs of a panel."""

BLOCK = record(
    "weights0", "weights1", "weights2", "weights3",  # up to four panels
    "scales0", "scales1", "scales2", "scales3",
    "ahead0", "ahead1", "ahead2", "ahead3",  # bytes from a panel's weight to the one to prefetch
    "x", "x_row",  # the first row, prepared; bytes from row to row
    "sums", "sums_row",  # of each group of x: its sum, or for int8 three numbers (`int8.py`)
    "c", "c_row",  # float32 results: (rows, panels * 16); for the rounding of x, int8 numbers
    "groups", "steps",  # groups of inputs, and eights of inputs in a group
    "scale_kind",  # F16, F32 or BF16
    "b0", "b1",  # two panels of bfloat16 weights, for tiles
    "more",  # 1 if tiles add to c, else 0
    "kept",  # mask of the offsets from b0 and b1 at which decoded weights are kept
    "tables",  # the numbers of int4 codes: `packed.tables`
    "offsets",  # 1 if each group of a panel has offsets after its factors, else 0
    "raised",  # added to the weights to make them unsigned, for int8 x
    "four_bytes",  # bytes from four numbers of a rounded row to its next four: 4 for each interleaved row
)  # fmt: skip
"""The arguments of an inner loop, in a record whose address the loop takes."""
BLOCK_BYTES = 256


def _offset_of(name: str) -> int:
    assert BLOCK.fields is not None
    return int(BLOCK.fields[name][1])


WEIGHTS_AT, SCALES_AT, AHEAD_AT = _offset_of("weights0"), _offset_of("scales0"), _offset_of("ahead0")
"""Byte offsets in a `BLOCK` of its four addresses of weights, its four addresses of scales and its four
prefetch distances."""
assert BLOCK.itemsize <= BLOCK_BYTES

F16, F32, BF16 = 0, 1, 2
"""Kinds of scales."""

_HAS = features()
_F16C = "+f16c" in _HAS or "+sse2" not in _HAS

_i16, _i32, _i64, _f32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _ints, _halves = (ir.VectorType(kind, WIDTH) for kind in (_f32, _i32, _i16))


@part
def block_at(address):  # type: ignore[no-untyped-def]
    """The `BLOCK` at an address."""
    return carray(vl.as_pointer(address), 1, BLOCK)[0]


def argument_at(builder: ir.IRBuilder, block: ir.Value, name: str) -> ir.Value:
    """The field `name` of the `BLOCK` at an address."""
    return builder.load(pointer(builder, builder.add(block, _i64(_offset_of(name))), _i64))


def row_address(builder: ir.IRBuilder, block: ir.Value, first: str, index: int) -> ir.Value:
    """The address of row `index` of a matrix; the field `first` is the address of its row 0."""
    offset = builder.mul(argument_at(builder, block, f"{first}_row"), _i64(index))
    return builder.add(argument_at(builder, block, first), offset)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def splatted(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector whose WIDTH lanes all hold `value`."""
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
    """The scales of groups of inputs: 16 factors for each group and, if `offsets` is 1, then 16 offsets."""

    def __init__(self, builder: ir.IRBuilder, kind: ir.Value, offsets: ir.Value) -> None:
        """`kind` and `offsets` are the fields `scale_kind` and `offsets` of a `BLOCK`, or constants."""
        self._builder = builder
        self._kind = kind
        self.has_offsets = builder.icmp_unsigned("!=", offsets, _i64(0))
        doubled = builder.and_(self._kind, _i64(1))
        self._vector_bytes = builder.shl(_i64(2 * WIDTH), doubled)
        self._group_bytes = builder.shl(self._vector_bytes, offsets)

    def address(self, first: ir.Value, group: ir.Value) -> ir.Value:
        """The address of the factors of `group`; `first` is the address of the factors of group 0."""
        return self._builder.add(first, self._builder.mul(group, self._group_bytes))

    def factors(self, at: ir.Value) -> ir.Value:
        """The 16 factors, or 16 offsets, at address `at`, as float32."""
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
        """The 16 offsets of the group whose factors are at address `at`, as float32."""
        return self.factors(self._builder.add(at, self._vector_bytes))
