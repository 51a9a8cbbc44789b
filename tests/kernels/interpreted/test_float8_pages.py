"""Float8 KV pages in Triton's interpreter: stored as the twin stores them, and read as their values."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.arguments.checks import FLOAT8
from ramify.kernels.reference import attention as reference_attention
from ramify.kernels.triton import attention
from tests.kernels import float8_page_cases as pages
from tests.kernels import ops_cases as cases
from tests.kernels.attention_cases import make_batch
from tests.kernels.float8_page_cases import MIXED, float8

HALF = torch.float16


@pytest.mark.parametrize(("head_dim", "page_size", "options"), pages.READS)
def test_attention_on_float8_pages_is_that_on_their_values(head_dim, page_size, options) -> None:
    pages.check_attention(MIXED, head_dim, page_size, HALF, **options)


def test_float32_queries_read_float8_pages() -> None:
    batch = float8(make_batch(MIXED, heads=2, kv_heads=1, head_dim=16))
    found = attention.paged_attention(*batch, scale=0.25)
    torch.testing.assert_close(
        found, reference_attention.paged_attention(*batch, scale=0.25), atol=1e-5, rtol=0
    )


def test_a_cascade_reads_float8_pages() -> None:
    pages.check_cascade(HALF)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_outputs_are_off_by_a_few_hundredths(dtype: torch.dtype) -> None:
    """The largest deviation from pages of floats: a key and a value have four bits each."""
    batch = make_batch([(20, 400)], heads=4, kv_heads=2, head_dim=64, dtype=torch.float32)
    exact = reference_attention.paged_attention(*batch, scale=0.125)
    stored = float8(batch)._replace(q=batch.q.to(dtype))
    found = attention.paged_attention(*stored, scale=0.125).float()
    assert 0.005 < (found - exact).std() / exact.std() < 0.05


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("shape", cases.ROPE_SHAPES)
def test_the_store_rounds_as_the_twin_does(shape: tuple[int, int, int, int], norms: bool) -> None:
    pages.check_store(shape, torch.float32, norms=norms)


@pytest.mark.parametrize("layers", [(), (2,)])
def test_pages_are_copied(layers: tuple[int, ...]) -> None:
    pages.check_copies(layers)


def test_keys_and_values_have_one_dtype() -> None:
    batch = make_batch(MIXED, dtype=HALF)
    with pytest.raises(ValueError, match="new tokens are"):
        attention.paged_attention(*batch._replace(k_pages=batch.k_pages.to(FLOAT8)), scale=0.125)
