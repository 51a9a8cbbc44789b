"""Dot products of bytes: the instruction that the processor has for them, and how sums are taken with it.

A vector is 16 outputs by four inputs, in 64 bytes. The results are exact and so the same with each of these:

    vpdpbusd    AVX512_VNNI and AVX-VNNI: unsigned by signed bytes, added in fours to int32
    sdot        Arm's dot product extension: signed bytes, added in fours to int32
    vpmaddubsw  AVX2: unsigned by signed bytes, added in pairs to int16

int16 has room for 16 products of a code below 16 with a number of x, which is at most 127: 32 inputs of an
output are added before they go to int32. Other weights are multiplied as their magnitudes, and x with their
signs; each pair of those products goes to int32 at once.
"""

from __future__ import annotations

from llvmlite import ir

from ramify.kernels.cpu.codegen.compiler import features
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.cpu.packed_linear.code import WIDTH, called, constant

_HAS = features()
_WHOLE = {"+avx512vnni", "+avx512bw"} <= _HAS and LANES == WIDTH
INSTRUCTION = (
    "vpdpbusd"
    if _WHOLE or "+avxvnni" in _HAS
    else "sdot"
    if "+dotprod" in _HAS
    else "vpmaddubsw"
    if "+avx2" in _HAS
    else ""
)
"""Empty where the processor has none."""
UNSIGNED = INSTRUCTION == "vpdpbusd"
"""Whether all weights must be unsigned: those that are not are raised by `packed.RAISED`."""
FORMS: tuple[str, ...] = {"": (), "vpmaddubsw": ("int4",)}.get(INSTRUCTION, ("int8", "int4"))
"""Formats of weights whose products are faster with it: as fast as in float32 for int8 by vpmaddubsw."""
SHORT_INPUTS = 32
"""Inputs whose products with codes below 16 are added in int16."""

_BYTES = 64 if _WHOLE else 16 if INSTRUCTION == "sdot" else 32
"""Of an operand of the instruction."""
_i1, _i8, _i16, _i32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32)
ints = ir.VectorType(_i32, WIDTH)
"""A vector of sums, or of weights or x by fours."""
_all_bytes, _all_shorts = ir.VectorType(_i8, 4 * WIDTH), ir.VectorType(_i16, 2 * WIDTH)
_part_ints = ir.VectorType(_i32, _BYTES // 4)
_part_shorts, _part_bytes = ir.VectorType(_i16, _BYTES // 2), ir.VectorType(_i8, _BYTES)


def _parts(builder: ir.IRBuilder, whole: ir.Value, kind: ir.Type) -> list[ir.Value]:
    """The operands of the instruction that make up 64 bytes."""
    count = _BYTES // 4
    found = []
    for first in range(0, WIDTH, count):
        lanes = ir.Constant(_part_ints, list(range(first, first + count)))
        found.append(builder.bitcast(builder.shuffle_vector(whole, whole, lanes), kind))
    return found


def _each(builder: ir.IRBuilder, name: str, result: ir.Type, *operands: tuple[ir.Value, ir.Type]) -> ir.Value:
    """64 bytes of results of an intrinsic; an operand is 64 bytes and the type of a part."""
    parts = zip(*(_parts(builder, *operand) for operand in operands), strict=True)
    return _joined(builder, [called(builder, name, result, *each) for each in parts])


def _joined(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    parts = [builder.bitcast(part, _part_ints) for part in parts]
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(_i32, count), list(range(count)))
        parts = [builder.shuffle_vector(*pair, lanes) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _pairs(builder: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Products of bytes, added in pairs to int16."""
    operands = (unsigned, _part_bytes), (signed, _part_bytes)
    return _each(builder, "llvm.x86.avx2.pmadd.ub.sw", _part_shorts, *operands)


def looked_up(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value) -> ir.Value:
    """The bytes of a table of 16, which `table` has four times, for codes below 16."""
    names = {64: "x86.avx512.pshuf.b.512", 32: "x86.avx2.pshuf.b", 16: "aarch64.neon.tbl1.v16i8"}
    operands = (table, _part_bytes), (codes, _part_bytes)
    return _each(builder, f"llvm.{names[_BYTES]}", _part_bytes, *operands)


def magnitudes(builder: ir.IRBuilder, weights: ir.Value) -> ir.Value:
    """The magnitudes of signed weights as unsigned bytes, for `add_signed`."""
    bytes_, poison = builder.bitcast(weights, _all_bytes), ir.Constant(_i1, 0)  # -128 gives 128
    kind = ir.FunctionType(_all_bytes, [_all_bytes, _i1])
    function = builder.module.declare_intrinsic("llvm.abs.v64i8", (), kind)
    return builder.bitcast(builder.call(function, [bytes_, poison]), ints)


def add(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, four: ir.Value) -> ir.Value:
    """`sums` and the products of weights with four numbers of x, by vpdpbusd or sdot."""
    if INSTRUCTION == "sdot":
        name, kind = "llvm.aarch64.neon.sdot.v4i32.v16i8", _part_bytes
    else:
        name, kind = f"llvm.x86.avx512.vpdpbusd.{8 * _BYTES}", _part_ints
    return _each(builder, name, _part_ints, (sums, _part_ints), (weights, kind), (four, kind))


def add_signed(
    builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, magnitude: ir.Value, four: ir.Value
) -> ir.Value:
    """As `add`, by vpmaddubsw, for signed weights."""
    turned = _each(builder, "llvm.x86.avx2.psign.b", _part_bytes, (four, _part_bytes), (weights, _part_bytes))
    return add_shorts(builder, sums, _pairs(builder, magnitude, turned))


def add_to_shorts(builder: ir.IRBuilder, shorts: ir.Value, codes: ir.Value, four: ir.Value) -> ir.Value:
    """`shorts`, which are int16, and the products of codes below 16 with four numbers of x, by vpmaddubsw."""
    before, more = (_parts(builder, each, _part_shorts) for each in (shorts, _pairs(builder, codes, four)))
    sums = [builder.add(*each) for each in zip(before, more, strict=True)]
    # An empty assembly keeps LLVM from adding in another order, for which 16 registers are too few.
    kind = ir.FunctionType(_part_shorts, [_part_shorts])
    return _joined(builder, [builder.asm(kind, "", "=x,0", [each], side_effect=False) for each in sums])


def add_shorts(builder: ir.IRBuilder, sums: ir.Value, shorts: ir.Value) -> ir.Value:
    """`sums` and both int16 of each of its lanes."""
    ones = constant(_all_shorts, 1)
    operands = (shorts, _part_shorts), (builder.bitcast(ones, ints), _part_shorts)
    return builder.add(sums, _each(builder, "llvm.x86.avx2.pmadd.wd", _part_ints, *operands))
