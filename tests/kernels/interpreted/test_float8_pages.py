"""Float8 KV pages in Triton's interpreter: stored as the twin stores them, and read as their values."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.checks import FLOAT8
from ramify.kernels.reference import attention as reference_attention
from ramify.kernels.reference import rope as reference_rope
from ramify.kernels.reference.cascade import Group
from ramify.kernels.triton import attention, cascade, kv_store, rope
from tests.kernels import ops_cases as cases
from tests.kernels.attention_cases import Batch, make_batch

HALF = torch.float16
MIXED = [(1, 1), (1, 70), (20, 20), (17, 90), (0, 5)]


def float8(batch: Batch) -> Batch:
    return batch._replace(k_pages=batch.k_pages.to(FLOAT8), v_pages=batch.v_pages.to(FLOAT8))


def widened(batch: Batch) -> Batch:
    """The same values in pages of q's dtype."""
    pages = {name: getattr(batch, name).to(batch.q.dtype) for name in ("k_pages", "v_pages")}
    return batch._replace(**pages)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "options"),
    [
        (64, 16, {}),
        (80, 64, {}),
        (128, 64, {"deterministic": True}),
        (64, 8, {"window": 33, "sinks": torch.ones(2)}),
        (32, 16, {"soft_cap": 5.0}),
    ],
)
def test_attention_on_float8_pages_is_that_on_their_values(head_dim, page_size, options) -> None:
    given = make_batch(MIXED, heads=2, kv_heads=1, head_dim=head_dim, page_size=page_size, dtype=HALF)
    batch = float8(given)
    found = attention.paged_attention(*batch, scale=head_dim**-0.5, **options)
    assert torch.equal(found, attention.paged_attention(*widened(batch), scale=head_dim**-0.5, **options))


def test_float32_queries_read_float8_pages() -> None:
    batch = float8(make_batch(MIXED, heads=2, kv_heads=1, head_dim=16))
    found = attention.paged_attention(*batch, scale=0.25)
    torch.testing.assert_close(
        found, reference_attention.paged_attention(*batch, scale=0.25), atol=1e-5, rtol=0
    )


def test_a_cascade_reads_float8_pages() -> None:
    """All of three sequences share their first four pages."""
    batch = float8(make_batch([(1, 70)] * 3, heads=2, kv_heads=1, dtype=HALF))
    batch.page_table[:, :4] = batch.page_table[0, :4].clone()
    groups = [Group((0, 1, 2), 0, 64)]
    found = cascade.cascade_attention(*batch, groups, scale=0.125)
    assert torch.equal(found, cascade.cascade_attention(*widened(batch), groups, scale=0.125))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_outputs_are_off_by_a_few_hundredths(dtype: torch.dtype) -> None:
    """Of their deviation, against pages of floats: a key and a value have four bits each."""
    batch = make_batch([(20, 400)], heads=4, kv_heads=2, head_dim=64, dtype=torch.float32)
    exact = reference_attention.paged_attention(*batch, scale=0.125)
    stored = float8(batch)._replace(q=batch.q.to(dtype))
    found = attention.paged_attention(*stored, scale=0.125).float()
    assert 0.005 < (found - exact).std() / exact.std() < 0.05


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("shape", cases.ROPE_SHAPES)
def test_the_store_rounds_as_the_twin_does(shape: tuple[int, int, int, int], norms: bool) -> None:
    """Values exactly. Rotated keys may differ by a float32's last bit, and then by a step of float8."""
    dim, page_size, heads, kv_heads = shape
    qkv = 30 * cases.random(21, heads + 2 * kv_heads, dim, dtype=torch.float32, device="cpu")
    qkv[0, -kv_heads:, 0] = 1000
    angle = 9 * cases.random(21, dim // 2, dtype=torch.float32, device="cpu", seed=1)
    slots = torch.randperm((21 // page_size + 3) * page_size)[:21]
    weight = cases.random(dim, dtype=torch.float32, device="cpu", seed=2) if norms else None
    found = []
    for store in (rope.rope_store_kv, reference_rope.rope_store_kv):
        pages = [torch.zeros(21 // page_size + 3, kv_heads, page_size, dim).to(FLOAT8) for _ in range(2)]
        q, k, v = qkv.clone().split([heads, kv_heads, kv_heads], dim=1)
        turn = torch.polar(torch.ones_like(angle), angle)
        store(q, k, v, turn, *pages, slots, q_norm=weight, k_norm=weight)
        found.append([each.float() for each in (*pages, q)])
    (k, v, q), (wanted_k, wanted_v, wanted_q) = found
    assert torch.equal(v, wanted_v)
    assert v.abs().max() == 448, "larger numbers become the largest"
    apart = (k - wanted_k).abs()
    assert (apart <= torch.maximum(wanted_k.abs() / 8, torch.tensor(2.0**-9))).all()
    assert (apart > 0).float().mean() < 1e-3
    torch.testing.assert_close(q, wanted_q, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layers", [(), (2,)])
def test_pages_are_copied(layers: tuple[int, ...]) -> None:
    pools = [cases.random(*layers, 8, 2, 4, 16, dtype=HALF, device="cpu", seed=i).to(FLOAT8) for i in (1, 2)]
    wanted = [pool.float() for pool in pools]
    for pool in wanted:
        pool[..., [5, 7], :, :, :] = pool[..., [0, 2], :, :, :]
    kv_store.copy_pages(*pools, [0, 2], [5, 7])
    assert all(torch.equal(pool.float(), want) for pool, want in zip(pools, wanted, strict=True))


def test_keys_and_values_have_one_dtype() -> None:
    batch = make_batch(MIXED, dtype=HALF)
    with pytest.raises(ValueError, match="new tokens are"):
        attention.paged_attention(*batch._replace(k_pages=batch.k_pages.to(FLOAT8)), scale=0.125)
