"""Products with float8 weights and activations on a GPU that multiplies float8."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.reference import float8 as reference
from ramify.kernels.triton import float8
from tests.kernels.float8_cases import activations, check, weight_of

CUDA = "cuda"


@pytest.fixture(autouse=True)
def _has_float8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9: older GPUs do not multiply float8")


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("rows", [1, 17, 65, 300])
def test_product(group: int, rows: int) -> None:
    """Tensor cores of sm_90 keep about 14 bits of the sum of a block."""
    check(group, (rows, 6144, 4096), torch.bfloat16, CUDA, share=1e-4)
    check(group, (rows, 1000, 1100), torch.bfloat16, CUDA, share=1e-4, bias=True, add=True)


@pytest.mark.parametrize("group", [0, 128])
def test_numbers_are_the_twins(group: int) -> None:
    weight, x = weight_of(8, 5000, group, CUDA), activations(9, 5000, torch.bfloat16, CUDA)
    for found, wanted in zip(float8.rounded(x, weight), reference.rounded(x, weight), strict=True):
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("group", [0, 128])
def test_the_number_of_rows_changes_no_bit_by_row(group: int) -> None:
    weight, x = weight_of(4096, 4096, group, CUDA), activations(300, 4096, torch.bfloat16, CUDA)
    whole = float8.float8_matmul(x, weight, by_row=True)
    for count in (1, 16, 17, 64, 65, 257):
        assert torch.equal(float8.float8_matmul(x[:count], weight, by_row=True), whole[:count])
