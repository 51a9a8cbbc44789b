"""Dot products of bytes: the processor's instruction for them, and the sums of its results.

A vector is 16 outputs by four inputs, in 64 bytes. Results are exact, so the same with each instruction:

    vpdpbusd    AVX512_VNNI and AVX-VNNI: unsigned by signed bytes, added in fours to int32
    sdot        Arm's dot product extension: signed bytes, added in fours to int32
    vpmaddubsw  AVX2 without AVX-512: unsigned by signed bytes, added in pairs to int16

Int8 weights are multiplied by x in int16 with AVX2 (vpmaddwd: int16 in pairs, added to int32).

An int16 has room for 16 products of a code (at most 15) with a number of x (at most 127). So 32 inputs of an
output are added in two int16, and these two are then added to the output's int32. Weights of a table are
signed: x takes their signs and is multiplied by their magnitudes. Each pair of products is added to int32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
    if "+avx2" in _HAS and LANES < WIDTH
    else ""
)
"""The processor's dot product of bytes. Empty if it has none, and for AVX-512 without VNNI: such processors
multiply in float32."""
UNSIGNED = INSTRUCTION == "vpdpbusd"
"""Whether the instruction needs unsigned weights: signed weights are raised by `packed.RAISED`."""
FORMS: tuple[str, ...] = {"": (), "vpmaddubsw": ("int4",)}.get(INSTRUCTION, ("int8", "int4"))
"""Formats of weights that are multiplied by x in int8. For int8 weights vpmaddubsw gains nothing over
float32."""
INT16_X = "+avx2" in _HAS and LANES < WIDTH
"""Whether int8 weights are multiplied by x in int16 (vpmaddwd): 1.2 times as fast as in float32 on Zen 3."""
SHORT_INPUTS = 32
"""The number of inputs whose products with codes below 16 are added in int16, before the sums go to int32."""

_BYTES = 64 if _WHOLE else 16 if INSTRUCTION == "sdot" else 32
"""Bytes of an operand of the instruction."""
_i1, _i8, _i16, _i32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32)
ints = ir.VectorType(_i32, WIDTH)
"""The type of a vector of sums, or of weights or numbers of x, four bytes in each lane."""
_all_bytes, _all_shorts = ir.VectorType(_i8, 4 * WIDTH), ir.VectorType(_i16, 2 * WIDTH)
_part_ints = ir.VectorType(_i32, _BYTES // 4)
_part_shorts, _part_bytes = ir.VectorType(_i16, _BYTES // 2), ir.VectorType(_i8, _BYTES)


def _parts(builder: ir.IRBuilder, whole: ir.Value, kind: ir.Type) -> list[ir.Value]:
    """The 64 bytes of `whole` as operands of the instruction, of type `kind`."""
    count = _BYTES // 4
    found = []
    for first in range(0, WIDTH, count):
        lanes = ir.Constant(_part_ints, list(range(first, first + count)))
        found.append(builder.bitcast(builder.shuffle_vector(whole, whole, lanes), kind))
    return found


def _each(builder: ir.IRBuilder, name: str, result: ir.Type, *operands: tuple[ir.Value, ir.Type]) -> ir.Value:
    """The 64 bytes that the intrinsic `name` computes, part by part. `result` is the type of a part of the
    result. Each operand is 64 bytes, and the type of a part."""
    parts = zip(*(_parts(builder, *operand) for operand in operands), strict=True)
    return _joined(builder, [called(builder, name, result, *each) for each in parts])


def _joined(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    parts = [builder.bitcast(part, _part_ints) for part in parts]
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(_i32, count), list(range(count)))
        parts = [builder.shuffle_vector(*pair, lanes) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _maddubs(builder: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Products of bytes, added in pairs to int16."""
    operands = (unsigned, _part_bytes), (signed, _part_bytes)
    return _each(builder, "llvm.x86.avx2.pmadd.ub.sw", _part_shorts, *operands)


def looked_up(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value) -> ir.Value:
    """The bytes at `codes` (0 to 15) in a table of 16 bytes, of which `table` has four copies."""
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
    """`sums` plus the products of weights with four numbers of x, by vpdpbusd or sdot."""
    if INSTRUCTION == "sdot":
        name, kind = "llvm.aarch64.neon.sdot.v4i32.v16i8", _part_bytes
    else:
        name, kind = f"llvm.x86.avx512.vpdpbusd.{8 * _BYTES}", _part_ints
    return _each(builder, name, _part_ints, (sums, _part_ints), (weights, kind), (four, kind))


def add_signed(
    builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, magnitude: ir.Value, four: ir.Value
) -> ir.Value:
    """As `add`, by vpmaddubsw, for signed weights. `magnitude` is `magnitudes(weights)`."""
    turned = _each(builder, "llvm.x86.avx2.psign.b", _part_bytes, (four, _part_bytes), (weights, _part_bytes))
    return add_shorts(builder, sums, _maddubs(builder, magnitude, turned))


def short_sums(
    builder: ir.IRBuilder, weights: list[ir.Value], inputs: ir.Value, rows: int, steps: int
) -> list[list[ir.Value]]:
    """Products of 4-bit codes with x by vpmaddubsw, added in int16 over `steps` steps of eight inputs.
    Returns the sums by row and panel.

    weights : the addresses of the codes of up to two panels
    inputs : the address of x, with the rows interleaved
    """

    def decode(number: int, panel: str, codes: Sequence[str], mask: str) -> Iterator[str]:
        for half, code in enumerate(codes):
            at = f"{64 * (number // 2) + 32 * half}({panel})"
            if number % 2:
                yield f"vmovdqu {at}, {code}; vpsrld $$4, {code}, {code}; vpand {mask}, {code}, {code}"
            else:
                yield f"vpand {at}, {mask}, {code}"

    mask = ir.Constant(_part_bytes, [15] * _BYTES)
    return _assembled(builder, ("vpmaddubsw", "vpaddw"), decode, weights, inputs, rows, 2 * steps, mask)


def int16_sums(
    builder: ir.IRBuilder, weights: list[ir.Value], inputs: ir.Value, rows: int, steps: int
) -> list[list[ir.Value]]:
    """As `short_sums`, for int8 weights and x in int16: products by vpmaddwd, added in int32."""

    def decode(number: int, panel: str, codes: Sequence[str], mask: str) -> Iterator[str]:
        first, second = f"{32 * number}({panel})", f"{32 * number + 16}({panel})"
        low, high = (f"${{{code[1:]}:x}}" for code in codes)
        yield f"vmovdqu {first}, {low}; vpunpckhbw {second}, {low}, {high}; vpunpcklbw {second}, {low}, {low}"
        for narrow, code in zip((low, high), codes, strict=True):
            yield f"vpmovsxbw {narrow}, {code}"

    return _assembled(builder, ("vpmaddwd", "vpaddd"), decode, weights, inputs, rows, 4 * steps, None)


def _assembled(
    builder: ir.IRBuilder,
    instructions: tuple[str, str],
    decode: Callable[[int, str, Sequence[str], str], Iterator[str]],
    weights: list[ir.Value],
    inputs: ir.Value,
    rows: int,
    count: int,
    mask: ir.Constant | None,
) -> list[list[ir.Value]]:
    """Sums by row and panel over `count` vectors of weights, each times four bytes of each row of x.

    `decode` gives the lines that load a vector's weights into two registers; it takes the vector's number and
    the panel's register. A vector of 16 outputs takes two registers, so each has half of a panel's sums.

    This is assembly because LLVM would add up one row after the other and spill the decoded weights to
    memory. The assembly is not declared to read memory: nothing writes x or weights while a kernel runs, and
    no kernel is inlined.
    """
    multiply, add = instructions
    panels = len(weights)
    names = iter([f"${i}" for i in range(2 * panels * (rows + 1) + 2 + panels + 2)])
    sums = [[next(names) for _ in range(2 * panels)] for _ in range(rows)]
    codes = [next(names) for _ in range(2 * panels)]
    four, product, *at, x, constant_ = names
    lines: list[str] = []
    for number in range(count):
        for panel in range(panels):
            lines += decode(number, at[panel], codes[2 * panel : 2 * panel + 2], constant_)
        for row in range(rows):
            lines.append(f"vpbroadcastd {4 * (rows * number + row)}({x}), {four}")
            for code, sum_ in zip(codes, sums[row], strict=True):
                if number:
                    lines.append(f"{multiply} {four}, {code}, {product}; {add} {product}, {sum_}, {sum_}")
                else:
                    lines.append(f"{multiply} {four}, {code}, {sum_}")
    written = 2 * panels * (rows + 1) + 2
    assert written + (mask is not None) <= 16, "AVX2 has 16 registers"
    operands = [*weights, inputs, *([] if mask is None else [mask])]
    constraints = ["=&x"] * written + ["r"] * (panels + 1) + ["x"] * (mask is not None)
    kind = ir.FunctionType(
        ir.LiteralStructType([_part_ints] * written), [operand.type for operand in operands]
    )
    found = builder.asm(kind, "\n".join(lines), ",".join(constraints), operands, side_effect=False)
    halves = [builder.extract_value(found, i) for i in range(2 * panels * rows)]
    whole = [_joined(builder, halves[i : i + 2]) for i in range(0, len(halves), 2)]
    return [whole[row * panels : (row + 1) * panels] for row in range(rows)]


def add_shorts(builder: ir.IRBuilder, sums: ir.Value, shorts: ir.Value) -> ir.Value:
    """`sums`, with both int16 of each lane of `shorts` added to the same lane."""
    ones = constant(_all_shorts, 1)
    operands = (shorts, _part_shorts), (builder.bitcast(ones, ints), _part_shorts)
    return builder.add(sums, _each(builder, "llvm.x86.avx2.pmadd.wd", _part_ints, *operands))
