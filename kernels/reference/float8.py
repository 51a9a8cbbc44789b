"""Products with float8 weights and activations rounded to float8, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.arguments.checks import check_float8
from ramify.kernels.reference.activation import gelu_mul, silu_mul
from ramify.kernels.reference.norm import add_rms_norm, rms_norm
from ramify.kernels.weights.quantised import QuantisedWeight, Rounded

MOST, LEAST = 448.0, 1e-20
"""The largest float8_e4m3fn, and the lower bound on max |x| over inputs that share a factor."""


def rounded(x: Tensor, weight: QuantisedWeight) -> Rounded:
    """x, (T, inputs) float32, float16 or bfloat16, as factor * float8, rounded to nearest, ties to even."""
    wide = torch.nn.functional.pad(x.float(), (0, weight.padded - weight.inputs))
    groups = wide.unflatten(1, (-1, weight.activation_group or weight.padded))
    top = groups.abs().amax(2).clamp(min=LEAST)
    # Both operands are tensors: with a Python float as either, torch rounds twice on CUDA.
    inverse = top.new_tensor(MOST) / top
    numbers = (groups * inverse[:, :, None]).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
    return Rounded(numbers.flatten(1), (top / top.new_tensor(MOST)).t().contiguous(), x.dtype)


def norm_float8(
    x: Tensor, weight: Tensor, eps: float, matrix: QuantisedWeight, *, residual: Tensor | None = None
) -> Rounded:
    """The bits of `rounded` after `norm.rms_norm`, or with `residual`, which is changed in place, after
    `norm.add_rms_norm`. x and residual are (T, matrix.inputs)."""
    if residual is None:
        return rounded(rms_norm(x, weight, eps), matrix)
    return rounded(add_rms_norm(x, residual, weight, eps), matrix)


def gate_float8(x: Tensor, matrix: QuantisedWeight, *, gelu: bool = False) -> Rounded:
    """The bits of `rounded` after `activation.silu_mul`, or with `gelu` after `activation.gelu_mul`. x is
    (T, 2 matrix.inputs)."""
    return rounded(gelu_mul(x) if gelu else silu_mul(x), matrix)


def float8_matmul(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """x Wᵀ + b with x rounded to float8 (arXiv 2209.05433).

    The products of float8 numbers are summed in float32 for each block of inputs. A block's sum is multiplied
    by the factors of x and of W. If these factors are the same in all blocks, the sum of all blocks may be
    multiplied instead.

    A kernel may sum in another order. In float32 the results then differ by at most 1e-5 of the sum of the
    terms' absolute values. Tensor cores of sm_90 keep about 14 bits of a sum within a block, so there the
    difference may be 1e-4 of that sum.

    Parameters are those of `reference.quantised.quantised_matmul`; `weight.form` is fp8.
    """
    out = check_float8(x, weight, bias, out, add)
    return multiply_float8(rounded(x, weight), weight, bias, out=out, add=add)


def multiply_float8(
    x: Rounded, matrix: QuantisedWeight, bias: Tensor | None = None, *, out: Tensor, add: bool = False
) -> Tensor:
    """`float8_matmul` of activations that are rounded already, for products with `matrix`."""
    blocks = x.numbers.float().unflatten(1, (-1, matrix.block)).transpose(0, 1)
    sums = blocks @ matrix.numbers.view(torch.float8_e4m3fn).float().transpose(1, 2)
    of_outputs = matrix.factors.float().repeat_interleave(matrix.group // matrix.block, 0)[: len(sums)]
    y = (sums * of_outputs[:, None, :] * x.factors[:, :, None]).sum(0)
    if bias is not None:
        y += bias.float()
    return out.copy_(y + out.float() if add else y)
