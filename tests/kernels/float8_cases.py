"""Products with float8 weights and activations held against their twin, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.reference import float8 as reference
from ramify.kernels.triton import float8
from ramify.kernels.weights.quantised import QuantisedWeight, lay_out
from ramify.kernels.weights.rows import Rows
from tests.kernels import ops_cases as cases


def weight_of(outputs: int, inputs: int, group: int, device: str = "cpu") -> QuantisedWeight:
    """A float8 weight with a factor for each output (`group` 0), or for each block of group x group."""
    made = torch.Generator().manual_seed(1)
    numbers = (4 * torch.randn(outputs, inputs, generator=made)).to(torch.float8_e4m3fn)
    shape = (-(-outputs // group), -(-inputs // group)) if group else (outputs, 1)
    factors = (torch.rand(shape, generator=made) + 0.5) / 64
    if group:
        factors = factors.repeat_interleave(group, 0)[:outputs]
    rows = Rows(numbers, factors, group=group, float8_activations=True)
    laid = lay_out(rows, inputs=inputs, device=device)
    assert laid is not None
    return laid


def activations(rows: int, inputs: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows of x with NaN behind each, among them zeros, a large input, and numbers below float8's range."""
    x = cases.poisoned(rows, inputs + 3, dtype=dtype, device=device)[:, :inputs]
    x.copy_(cases.random(rows, inputs, dtype=dtype, device=device))
    x[0, :32] *= 1e-4
    x[-1] = 0
    x[0, inputs // 2] = 1000
    return x


def check(
    group: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    share: float = 1e-5,
    **given: bool,
) -> None:
    """Compare with the reference: sums may differ by `share` of the sum of absolute values; `shape` is (rows,
    outputs, inputs)."""
    rows, outputs, inputs = shape
    weight, x = weight_of(outputs, inputs, group, device), activations(rows, inputs, dtype, device)
    cases.check_product(float8.float8_matmul, reference.float8_matmul, x, weight, share, **given)
