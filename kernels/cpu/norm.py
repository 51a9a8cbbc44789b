"""RMS normalisation: a pass for the sum of squares and a pass to scale, with the row in the L1 cache."""

from __future__ import annotations

from numba import types
from torch import Tensor

from ramify.kernels.arguments.checks import check_norm
from ramify.kernels.cpu.codegen.compiler import compiled
from ramify.kernels.cpu.parts.norm import normalise


@compiled(types.int64(*[types.int64] * 12, types.float64))
def _run(  # type: ignore[no-untyped-def]
    x, x_token, x_head, out, out_token, out_head, weight, tokens, heads, size, bf16, weight_bf16, eps
):
    for token in range(tokens):
        for head in range(heads):
            at, to = x + token * x_token + head * x_head, out + token * out_token + head * out_head
            normalise(at, to, weight, size, eps, bf16, weight_bf16)
    return 0


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As `reference.norm.rms_norm`."""
    out = check_norm(x, weight, out)
    size = x.element_size()
    x_stride, out_stride = x.stride(), out.stride()
    two = len(x_stride) == 2
    _run(
        x.data_ptr(), x_stride[0] * size, 0 if two else x_stride[1] * size,
        out.data_ptr(), out_stride[0] * size, 0 if two else out_stride[1] * size,
        weight.data_ptr(), x.shape[0], 1 if two else x.shape[1], x.shape[-1],
        size == 2, weight.element_size() == 2, eps,
    )  # fmt: skip
    return out
