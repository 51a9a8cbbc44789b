"""RMS normalisation of the rows of a tensor.

    for token, head: y = x · weight / sqrt(mean(x²) + eps)

A pass for the sum of squares, a pass to scale; the row stays in the first-level cache between them. Many rows
are bound by memory, one row by the call itself.
"""

from __future__ import annotations

from numba import types
from torch import Tensor

from ramify.kernels.arguments.checks import check_norm
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, compiled
from ramify.kernels.cpu.codegen.records import Arena, record
from ramify.kernels.cpu.parts.norm import normalise

CALL = record(
    "x", "x_token", "x_head", "out", "out_token", "out_head",  # addresses, and bytes between tokens and heads
    "weight", "tokens", "heads", "size", "bf16", "weight_bf16", "arena", "arena_bytes",
    floats=("eps",),
)  # fmt: skip


@compiled(types.int64(types.int64))
def _norm_rows(call_at):  # type: ignore[no-untyped-def]
    call = carray(vl.as_pointer(call_at), 1, CALL)[0]
    bf16, weight_bf16 = call.bf16, call.weight_bf16
    for token in range(call.tokens):
        for head in range(call.heads):
            at = call.x + token * call.x_token + head * call.x_head
            to = call.out + token * call.out_token + head * call.out_head
            normalise(at, to, call.weight, call.size, call.eps, bf16, weight_bf16)
    return 0


_arena = Arena(CALL, 64)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As `reference.norm.rms_norm`."""
    out = check_norm(x, weight, out)
    call, size = _arena.call, x.element_size()
    x_stride, out_stride = x.stride(), out.stride()
    call.x, call.x_token, call.out, call.out_token = (
        x.data_ptr(), x_stride[0] * size, out.data_ptr(), out_stride[0] * size,
    )  # fmt: skip
    call.tokens, call.heads, call.size, call.x_head, call.out_head = len(x), 1, x.shape[-1], 0, 0
    if len(x_stride) == 3:
        call.heads, call.x_head, call.out_head = x.shape[1], x_stride[1] * size, out_stride[1] * size
    call.weight, call.weight_bf16 = weight.data_ptr(), weight.element_size() == 2
    call.bf16, call.eps = size == 2, eps
    _norm_rows(_arena.call_at)
    return out
