"""Dot products of bfloat16 pairs (AVX512_BF16): which processors profit, and the instruction.

A lane holds a pair of neighbouring inputs. The instruction multiplies two pairs exactly and adds both
products to a float32.
"""

from __future__ import annotations

from llvmlite import ir

from ramify.kernels.cpu.codegen.compiler import processor
from ramify.kernels.cpu.codegen.simd import BF16, BFloat

WIDTH = 16
"""float32 lanes of the instruction."""
DOTS = BF16 and processor().startswith("znver")
"""Whether the processor has the instruction and is faster with it than with float32 multiply-adds. The
instruction computes twice as many products as a float32 multiply-add. On AMD's processors it takes as long as
a multiply-add, on Intel's four times as long."""


pairs = ir.VectorType(BFloat(), 2 * WIDTH)
"""The type of a vector of pairs."""
_floats = ir.VectorType(ir.FloatType(), WIDTH)


def dot(builder: ir.IRBuilder, sum_: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """sum_ + the products of the pairs of a and b; a and b are vectors of 512 bits of any type."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    kind = ir.FunctionType(_floats, [_floats, pairs, pairs])
    operands = [value if value.type is pairs else builder.bitcast(value, pairs) for value in (a, b)]
    return builder.call(builder.module.declare_intrinsic(name, (), kind), [sum_, *operands])
