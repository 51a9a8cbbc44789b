"""Products with plain weights in Triton's interpreter: right, and the same bits for any number of rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from ramify.kernels.reference import matmul as reference
from ramify.kernels.triton import matmul
from tests.kernels import ops_cases as cases

# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16]


# Each shape in one type, and the parts of a long sum in both.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*zip(cases.MATMUL_SHAPES, itertools.cycle(DTYPES), strict=False), ((20, 40, 1030), torch.float16)],
    ids=str,
)
def test_product(shape, dtype):
    cases.check_matmul(shape, dtype, "cpu")


@pytest.mark.parametrize("add", [False, True])
def test_bias_and_sum(add):
    cases.check_matmul((3, 130, 1100), torch.float32, "cpu", bias=True, add=add)
    cases.check_matmul((66, 30, 1100), torch.float16, "cpu", bias=True, add=add)


def test_parts_are_summed_alike_in_registers_and_from_memory(launches):
    x, weight = torch.randn(70, 2500), torch.randn(40, 2500)
    whole = matmul.matmul(x, weight)
    few = matmul.matmul(x[:7], weight)
    assert [form["SPREAD"] for form in launches.forms("_product")] == [False, True]
    assert torch.equal(whole[:7], few)


@pytest.mark.parametrize("module", [reference, matmul], ids=["twin", "kernel"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.int32)}, "x is"),
        ({"weight": torch.zeros(4, 7)}, "weight is"),
        ({"weight": torch.zeros(8, 4).t()}, "weight is"),
        ({"bias": torch.zeros(5)}, "bias"),
        ({"out": torch.zeros(2, 5)}, "out must be"),
        ({"add": True}, "no out to add to"),
    ],
)
def test_refusals_name_the_argument(module, change, words):
    given = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8)}
    with pytest.raises(ValueError, match=words):
        module.matmul(**{**given, **change})
