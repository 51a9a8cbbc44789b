"""Products with unpacked weights, in torch: float32 inside, rounded once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.arguments.checks import check_matmul


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """x Wᵀ + b. In a kernel the bits of a row depend on that row, the weight and the bias alone.

    Parameters
    ----------
    x : (T, inputs) float32, float16 or bfloat16; rows contiguous
    weight : (outputs, inputs), dtype of x, rows contiguous
    bias : (outputs,), dtype of x; optional
    out : (T, outputs), dtype of x, rows contiguous; optional
        Receives the result. Must not overlap x.
    add : bool
        Add the result to `out`, before rounding.
    """
    out = check_matmul(x, weight, bias, out, add)
    y = x.float() @ weight.float().t()
    if bias is not None:
        y += bias.float()
    return out.copy_(y + out.float() if add else y)


def plain_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """Matrix product by torch. With `add` the product is added to `out` without a temporary."""
    if out is None:
        return F.linear(x, weight, bias)
    if not add:
        return out.copy_(F.linear(x, weight, bias))
    out.addmm_(x, weight.t())
    return out if bias is None else out.add_(bias)
