"""Products with quantised weights on a GPU: right, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.triton import quantised
from tests.kernels import ops_cases as cases
from tests.kernels.quantised_cases import FORMS, GGUF, check, weight_of

CUDA = "cuda"


@pytest.mark.parametrize(("form", "group"), [*FORMS, *GGUF], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_product(form: str, group: int, rows: int) -> None:
    check(form, group, (rows, 1536, 4096), torch.bfloat16, CUDA, share=1e-5)


@pytest.mark.parametrize(("form", "group"), [*FORMS, *GGUF], ids=str)
def test_product_of_uneven_shapes(form: str, group: int) -> None:
    check(form, group, (17, 1000, 1120), torch.bfloat16, CUDA, share=1e-5, bias=True, add=True)


def test_product_in_float16() -> None:
    for rows in (1, 300):
        check("int4", 128, (rows, 1000, 1120), torch.float16, CUDA, share=1e-5, bias=True, add=True)


@pytest.mark.parametrize(("form", "group"), [("int4", 128), ("int4 table", 32), ("int8", 128), ("Q4_K", 32)])
def test_the_number_of_rows_changes_no_bit_by_row(form: str, group: int) -> None:
    weight = weight_of(form, group, 2048, 4096, CUDA)
    x = cases.random(300, 4096, dtype=torch.bfloat16, device=CUDA)
    whole = quantised.quantised_matmul(x, weight, by_row=True)
    for count in (1, 16, 17, 64, 65, 257):
        assert torch.equal(quantised.quantised_matmul(x[:count], weight, by_row=True), whole[:count])
