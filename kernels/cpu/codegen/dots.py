"""Dot products of bfloat16 pairs (AVX512_BF16): which processors profit, and the instruction.

A lane holds a pair of neighbouring inputs. The instruction multiplies two pairs exactly and adds both
products to a float32.
"""

from __future__ import annotations

from llvmlite import ir

from ramify.kernels.cpu.codegen.compiler import features, processor
from ramify.kernels.cpu.codegen.simd import LANES

WIDTH = 16
"""float32 lanes of the instruction."""
BF16 = "+avx512bf16" in features() and "+avx512bw" in features() and LANES == WIDTH
"""Whether the processor has the instruction."""
DOTS = BF16 and processor().startswith("znver")
"""Whether the instruction is faster than float32. It does twice the products of a float32 instruction: in the
same time on AMD's processors, in four times the time on Intel's."""


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


pairs = ir.VectorType(_BFloat(), 2 * WIDTH)
"""The type of a vector of pairs."""
_floats = ir.VectorType(ir.FloatType(), WIDTH)


def dot(builder: ir.IRBuilder, sum_: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """sum_ + the products of the pairs of a and b; a and b are vectors of 512 bits of any type."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    kind = ir.FunctionType(_floats, [_floats, pairs, pairs])
    operands = [value if value.type is pairs else builder.bitcast(value, pairs) for value in (a, b)]
    return builder.call(builder.module.declare_intrinsic(name, (), kind), [sum_, *operands])
