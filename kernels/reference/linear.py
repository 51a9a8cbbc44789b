"""Products with packed weights, in torch: the weights are unpacked to float32 first."""

from __future__ import annotations

from torch import Tensor

from ramify.kernels.arguments.checks import check_linear
from ramify.kernels.arguments.sampling_inputs import check_masked
from ramify.kernels.reference.activation import expert_gate
from ramify.kernels.reference.norm import rms_norm
from ramify.kernels.weights.lora import Extra
from ramify.kernels.weights.packed import PackedWeight, in_order, unpack


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
    add: bool = False,
    extra: Extra | None = None,
) -> Tensor:
    """x Wᵀ + b: float32 inside, rounded once.

    For a gated weight silu(x Gᵀ + b) · (x Uᵀ + c), or the gate that `weight.clamp` describes.

    A kernel may round quantised weights to bfloat16 if x is bfloat16 and has many rows.

    Parameters
    ----------
    x : (T, inputs) float32 or bfloat16; rows contiguous
    weight : W (outputs, inputs) and b; if gated, the rows of G, then the rows of U
    norm : (inputs,) weight in the dtype of x, and eps; optional
        Apply `rms_norm` to x first, rounded to the dtype of x.
    out : (T, outputs), or (T, outputs / 2) if gated, float32 or bfloat16, rows contiguous; optional
        Receives the result. Must not overlap x. Without `out` the result has the dtype of x.
    add : bool
        Add the result to `out`, before rounding.
    extra : optional
        Terms of x Wᵀ, or of x Gᵀ and x Uᵀ, added before bias and gate.
    """
    out = check_linear(x, weight, norm, out, add)
    if norm is not None:
        x = rms_norm(x, *norm)
    y = x.float() @ unpack(weight).t()
    if extra is not None:
        order, _ = extra.rows.on(x.device)
        y[order] += extra.terms[order]
    if len(weight.bias):
        y += in_order(weight.bias.view(-1, 16), weight)
    if weight.gated:
        y = expert_gate(y, weight.clamp)
    return out.copy_(y + out.float() if add else y)


def masked_linear(
    x: Tensor, weight: PackedWeight, mask: Tensor, mask_rows: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """As `linear`, for rows that need only the outputs that a mask allows.

    An output that the mask forbids is either the product or minus infinity.

    Parameters
    ----------
    weight : not gated
    mask : (M, ceil(outputs / 32)) int32, contiguous
        Bit i % 32 of word i // 32 says whether output i is allowed.
    mask_rows : (T,) int32
        The row of `mask` for each row of x; below 0 for a row that needs all outputs.
    out : (T, outputs) float32, rows contiguous; optional
    """
    return linear(x, weight, out=check_masked(x, weight, mask, mask_rows, out))
