"""Float8 KV pages on a GPU that converts float8: read as their values, stored as the twin stores them."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import float8_page_cases as pages
from tests.kernels import ops_cases as cases

CUDA = "cuda"
LONG = [*pages.MIXED, (1, 5000), (300, 700)]


@pytest.fixture(autouse=True)
def _has_float8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9: older GPUs do not convert float8")


@pytest.mark.parametrize(
    ("head_dim", "page_size", "options", "dtype"),
    [*((*read, torch.bfloat16) for read in pages.READS), (*pages.READS[0], torch.float16)],
    ids=str,
)
def test_attention_on_float8_pages_is_that_on_their_values(head_dim, page_size, options, dtype) -> None:
    """The compiler may lay both out differently, so that products are summed in another order."""
    share = 2 * torch.finfo(dtype).eps
    pages.check_attention(LONG, head_dim, page_size, dtype, CUDA, heads=(8, 2), share=share, **options)


def test_a_cascade_reads_float8_pages() -> None:
    pages.check_cascade(torch.bfloat16, CUDA, share=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize(
    ("shape", "norms", "dtype"),
    [
        *((shape, True, torch.bfloat16) for shape in cases.ROPE_SHAPES),
        (cases.ROPE_SHAPES[0], False, torch.bfloat16),
        (cases.ROPE_SHAPES[0], True, torch.float32),
    ],
    ids=str,
)
def test_the_store_rounds_as_the_twin_does(shape, norms: bool, dtype: torch.dtype) -> None:
    pages.check_store(shape, dtype, CUDA, norms=norms)


@pytest.mark.parametrize("layers", [(), (2,)])
def test_pages_are_copied(layers: tuple[int, ...]) -> None:
    pages.check_copies(layers, CUDA)
