"""Products of float8 weights and activations in Triton's interpreter: the twin's numbers and products."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ramify.kernels.reference import float8 as reference
from ramify.kernels.reference.quantised import quantised_matmul
from ramify.kernels.triton import float8
from ramify.kernels.weights.quantised import lay_out
from ramify.kernels.weights.rows import Rows
from tests.kernels.float8_cases import activations, check, weight_of

HALF = torch.float16


@pytest.mark.parametrize("group", [0, 32, 128])
def test_numbers_and_factors_are_the_twins(group: int) -> None:
    weight = weight_of(3, 300, group)
    x = activations(3, 300, torch.float32)
    numbers, factors, _ = float8.rounded(x, weight)
    wanted, wanted_factors, _ = reference.rounded(x, weight)
    assert torch.equal(factors, wanted_factors)
    assert torch.equal(numbers.view(torch.uint8) & 127, wanted.view(torch.uint8) & 127)
    assert torch.equal(numbers.float(), wanted.float())
    back = numbers.float().unflatten(1, (len(factors), -1)) * factors.t()[:, :, None]
    apart = (back.flatten(1)[:, :300] - x).abs()
    step = factors.t().repeat_interleave(weight.padded // len(factors), 1)[:, :300] * 2**-10
    assert (apart <= torch.maximum(x.abs() / 16, step)).all(), "half a step of four bits"


def test_every_float8_and_what_lies_between_rounds_as_in_torch() -> None:
    """All numbers of a row whose largest is 448, so that its factor is 1; ties, and those beside ties."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    ends = torch.tensor([torch.inf, -torch.inf])
    x = torch.cat([codes, middle, *(torch.nextafter(middle, end) for end in ends)])
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, 8))[None]
    numbers, factors, _ = float8.rounded(x, weight_of(1, x.shape[1], 0))
    assert factors.item() == 1
    found, wanted = numbers[0, : x.shape[1]].float(), x[0].to(torch.float8_e4m3fn).float()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("group", [0, 32, 128, 256])
def test_product(group: int) -> None:
    check(group, (3, 70, 160), HALF)
    check(group, (18, 66, 96), torch.float32, bias=True)


@pytest.mark.parametrize("add", [False, True])
def test_parts_bias_and_sum(add: bool) -> None:
    check(128, (2, 40, 1100), HALF, bias=True, add=add)
    check(0, (66, 30, 1056), HALF, bias=True, add=add)


@pytest.mark.parametrize("group", [0, 128])
def test_the_number_of_rows_changes_no_bit_by_row(group: int, launches) -> None:
    weight, x = weight_of(40, 2500, group), activations(70, 2500, HALF)
    whole = float8.float8_matmul(x, weight, by_row=True)
    few = float8.float8_matmul(x[:7], weight, by_row=True)
    float8.float8_matmul(x[:7], weight)
    seen = launches.forms("_float8_product")
    assert [(form["SPREAD"], form["ROWS"]) for form in seen] == [(False, 64), (True, 64), (True, 16)]
    assert torch.equal(whole[:7], few)


@pytest.mark.parametrize("group", [0, 128])
def test_rounding_the_activations_changes_little(group: int) -> None:
    """Rounding x as well changes each input by 2**-5 of it at most, which the sum averages out."""
    weight, x = weight_of(64, 512, group), torch.randn(9, 512)
    exact, found = quantised_matmul(x, weight), reference.float8_matmul(x, weight)
    apart = (found - exact).std() / exact.std()
    assert 0.005 < apart < 0.04


def test_other_weights_keep_the_activations() -> None:
    weight, x = weight_of(8, 128, 0), torch.randn(2, 128, dtype=HALF)
    other = dataclasses.replace(weight, float8_activations=False)
    assert torch.equal(float8.rounding_matmul(x, weight), float8.float8_matmul(x, weight))
    assert torch.equal(float8.rounding_matmul(x, other), float8.quantised_matmul(x, other))
    assert not torch.equal(float8.rounding_matmul(x, weight), float8.rounding_matmul(x, other))


@pytest.mark.parametrize("module", [reference, float8], ids=["twin", "kernel"])
def test_what_is_no_float8_weight_is_refused(module) -> None:
    weight = lay_out(Rows(torch.zeros(4, 64).char(), torch.ones(4, 1)), inputs=64, device="cpu")
    with pytest.raises(ValueError, match="must be fp8"):
        module.float8_matmul(torch.zeros(2, 64), weight)
    with pytest.raises(ValueError, match="x is"):
        module.float8_matmul(torch.zeros(2, 63), weight_of(4, 64, 0))
