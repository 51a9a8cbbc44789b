"""Products with quantised weights on GPUs, in torch: float32 inside, rounded once."""

from __future__ import annotations

from torch import Tensor

from ramify.kernels.arguments.checks import check_quantised
from ramify.kernels.weights.quantised import QuantisedWeight


def quantised_matmul(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """x Wᵀ + b, with the values of W rounded to the dtype of x.

    Parameters
    ----------
    x : (T, inputs) float32, float16 or bfloat16; rows contiguous
    weight : W (outputs, inputs)
    bias : (outputs,), dtype of x; optional
    out : (T, outputs), dtype of x, rows contiguous; optional
        Receives the result. Must not overlap x.
    add : bool
        Add the result to `out`, before rounding.
    """
    out = check_quantised(x, weight, bias, out, add)
    y = x.float() @ weight.values().to(x.dtype).float().t()
    if bias is not None:
        y += bias.float()
    return out.copy_(y + out.float() if add else y)
