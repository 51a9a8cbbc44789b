"""Float8 KV pages on any device: stored as the twin stores them, and read as their values."""

from __future__ import annotations

from typing import Any

import torch

from ramify.kernels.arguments.checks import FLOAT8
from ramify.kernels.reference import rope as reference_rope
from ramify.kernels.triton import attention, kv_store, rope
from ramify.kernels.triton.plan.cascade_groups import Group
from tests.kernels import ops_cases as cases
from tests.kernels.attention_cases import Batch, make_batch
from tests.kernels.cascade_cases import cascade_attention

MIXED = [(1, 1), (1, 70), (20, 20), (17, 90), (0, 5)]
READS: list[tuple[int, int, dict[str, Any]]] = [
    (64, 16, {}),
    (80, 64, {}),
    (128, 64, {"deterministic": True}),
    (64, 8, {"window": 33, "sinks": True}),
    (32, 16, {"soft_cap": 5.0}),
]
"""(head_dim, page_size, options)"""


def float8(batch: Batch) -> Batch:
    return batch._replace(k_pages=batch.k_pages.to(FLOAT8), v_pages=batch.v_pages.to(FLOAT8))


def widened(batch: Batch) -> Batch:
    """The batch with the same values in pages of q's dtype."""
    pages = {name: getattr(batch, name).to(batch.q.dtype) for name in ("k_pages", "v_pages")}
    return batch._replace(**pages)


def check_attention(
    lengths: list[tuple[int, int]],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    heads: tuple[int, int] = (2, 1),
    share: float = 0.0,
    **options: Any,
) -> None:
    """Compare with pages of q's dtype and the same values: outputs differ by `share` of the largest at
    most."""
    given = make_batch(
        lengths, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, page_size=page_size, dtype=dtype
    )
    batch = float8(Batch(*(tensor.to(device) for tensor in given)))
    if options.pop("sinks", False):
        options["sinks"] = torch.ones(heads[0], device=device)
    found = attention.paged_attention(*batch, scale=head_dim**-0.5, **options)
    assert_close(found, attention.paged_attention(*widened(batch), scale=head_dim**-0.5, **options), share)


def check_cascade(dtype: torch.dtype, device: str = "cpu", *, share: float = 0.0) -> None:
    """A cascade of three sequences that share their first four pages."""
    given = float8(make_batch([(1, 70)] * 3, heads=2, kv_heads=1, dtype=dtype))
    batch = Batch(*(tensor.to(device) for tensor in given))
    batch.page_table[:, :4] = batch.page_table[0, :4].clone()
    groups = [Group((0, 1, 2), 0, 64)]
    found = cascade_attention(batch, groups, scale=0.125)
    assert_close(found, cascade_attention(widened(batch), groups, scale=0.125), share)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    apart = (found.float() - wanted.float()).abs().max()
    assert apart <= share * wanted.float().abs().max()


def check_store(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu", *, norms: bool
) -> None:
    """Compare stored pages: values exactly; rotated keys may differ by a last bit of `dtype`, and so by a
    float8 step."""
    dim, page_size, heads, kv_heads = shape
    qkv = 30 * cases.random(21, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    qkv[0, -kv_heads:, 0] = 1000
    angle = 9 * cases.random(21, dim // 2, dtype=torch.float32, device=device, seed=1)
    slots = torch.randperm((21 // page_size + 3) * page_size)[:21].to(device)
    weight = cases.random(dim, dtype=dtype, device=device, seed=2) if norms else None
    found = []
    for store in (rope.rope_store_kv, reference_rope.rope_store_kv):
        pages = [
            torch.zeros(21 // page_size + 3, kv_heads, page_size, dim, device=device).to(FLOAT8)
            for _ in range(2)
        ]
        q, k, v = qkv.clone().split([heads, kv_heads, kv_heads], dim=1)
        turn = torch.polar(torch.ones_like(angle), angle)
        store(q, k, v, turn, *pages, slots, q_norm=weight, k_norm=weight)
        found.append([each.float() for each in (*pages, q)])
    (k, v, q), (wanted_k, wanted_v, wanted_q) = found
    assert torch.equal(v, wanted_v)
    assert v.abs().max() == 448, "larger numbers become the largest"
    apart = (k - wanted_k).abs()
    assert (apart <= torch.clamp(wanted_k.abs() / 8, min=2.0**-9)).all()
    assert (apart > 0).float().mean() < max(1e-3, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(q, wanted_q, rtol=max(1e-5, 2 * torch.finfo(dtype).eps), atol=1e-4)


def check_copies(layers: tuple[int, ...], device: str = "cpu") -> None:
    pools = [
        cases.random(*layers, 8, 2, 4, 16, dtype=torch.float16, device=device, seed=i).to(FLOAT8)
        for i in (1, 2)
    ]
    wanted = [pool.float() for pool in pools]
    for pool in wanted:
        pool[..., [5, 7], :, :, :] = pool[..., [0, 2], :, :, :]
    kv_store.copy_pages(*pools, [0, 2], [5, 7])
    assert all(torch.equal(pool.float(), want) for pool, want in zip(pools, wanted, strict=True))
