"""Products with plain weights on a GPU: right, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.triton import matmul
from tests.kernels import ops_cases as cases

CUDA = "cuda"


SHAPES = [*cases.MATMUL_SHAPES, (300, 576, 576), (7, 4096, 14336), (130, 1000, 4096)]


@pytest.mark.parametrize(
    ("shape", "dtype"), cases.in_dtypes(SHAPES, (3, 130, 70), (130, 1000, 4096)), ids=str
)
def test_product(shape, dtype):
    cases.check_matmul(shape, dtype, CUDA)


@pytest.mark.parametrize("add", [False, True])
def test_bias_and_sum(add):
    cases.check_matmul((33, 6144, 4096), torch.bfloat16, CUDA, bias=True, add=add)


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (4096, 14336), (1536, 576)])
def test_the_number_of_rows_changes_no_bit(shape):
    outputs, inputs = shape
    x = cases.random(520, inputs, dtype=torch.bfloat16, device=CUDA)
    weight = cases.random(outputs, inputs, dtype=torch.bfloat16, device=CUDA, seed=1)
    whole = matmul.matmul(x, weight)
    for count in (1, 2, 16, 63, 64, 65, 128, 257):
        for first in (0, 3, 520 - count):
            assert torch.equal(matmul.matmul(x[first : first + count], weight), whole[first : first + count])
