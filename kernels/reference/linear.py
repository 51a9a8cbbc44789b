"""Products with packed weights, in torch: unpacked to float32 first."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.checks import check_linear
from ramify.kernels.packed import PackedWeight, in_order, unpack
from ramify.kernels.reference.norm import rms_norm


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """x Wᵀ + b, or of a gated weight silu(x Gᵀ + b) · (x Uᵀ + c): float32 inside, rounded once.

    A kernel may take int8 and int4 weights rounded to bfloat16 where x is bfloat16 and has many rows.

    Parameters
    ----------
    x : (T, inputs) float32 or bfloat16; rows contiguous
    weight : W (outputs, inputs) and b; gated: the rows of G, then those of U
    norm : (inputs,) weight in the dtype of x, and eps; optional
        Multiply by `rms_norm` of x, rounded to the dtype of x, instead of x.
    out : (T, outputs), gated (T, outputs / 2), float32 or bfloat16, rows contiguous; optional
        Where to write; the dtype of x without it. Must not overlap x.
    add : bool
        Add to what `out` holds, before rounding.

    Raises
    ------
    ValueError
        Naming the argument whose shape, stride or dtype does not fit.
    """
    out = check_linear(x, weight, norm, out, add)
    if norm is not None:
        x = rms_norm(x, *norm)
    y = x.float() @ unpack(weight).t()
    if len(weight.bias):
        y += in_order(weight.bias.view(-1, 16), weight)
    if weight.gated:
        gate, through = y.chunk(2, dim=-1)
        y = F.silu(gate) * through
    return out.copy_(y + out.float() if add else y)
