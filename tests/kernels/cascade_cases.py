"""Batches whose sequences share the pages of a tree, and attention over whole batches in any precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tests.kernels.attention_cases import Batch


class Branch(NamedTuple):
    """A sequence: the nodes on its way from the root, and its own tokens, of which the last `new` are new."""

    path: tuple[int, ...]
    own: int
    new: int


def make_tree(
    node_pages: Sequence[int],
    branches: Sequence[Branch],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Batch:
    """Node n is `node_pages[n]` pages that all branches below it share. Rows that no sequence owns are
    NaN."""
    random = torch.Generator().manual_seed(seed)
    own_pages = [-(-branch.own // page_size) for branch in branches]
    num_pages = sum(node_pages) + sum(own_pages) + 2
    free = torch.randperm(num_pages, generator=random).tolist()
    unused = free.pop()
    nodes = [[free.pop() for _ in range(count)] for count in node_pages]
    rows = [
        [page for node in branch.path for page in nodes[node]] + [free.pop() for _ in range(count)]
        for branch, count in zip(branches, own_pages, strict=True)
    ]
    page_table = torch.full((len(rows), max(map(len, rows)) + 1), unused, dtype=torch.int32)
    k_pages = torch.full((num_pages, kv_heads, page_size, head_dim), torch.nan)
    v_pages = k_pages.clone()
    lens = []
    for index, (branch, row) in enumerate(zip(branches, rows, strict=True)):
        page_table[index, : len(row)] = torch.tensor(row)
        lens.append(sum(node_pages[node] for node in branch.path) * page_size + branch.own)
        for number, page in enumerate(row):
            count = min(page_size, lens[-1] - number * page_size)
            for pages in (k_pages, v_pages):
                if pages[page].isnan().any():
                    pages[page, :, :count] = torch.randn(kv_heads, count, head_dim, generator=random)
    new = torch.tensor([0, *(branch.new for branch in branches)])
    q = torch.randn(int(new.sum()), heads, head_dim, generator=random)
    return Batch(
        q.to(dtype),
        k_pages.to(dtype),
        v_pages.to(dtype),
        page_table,
        new.cumsum(0).to(torch.int32),
        torch.tensor(lens, dtype=torch.int32),
    )


def dense(
    batch: Batch,
    dtype: torch.dtype,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch's attention, computed in `dtype`, one sequence at a time: (T, heads, head_dim)."""
    out = torch.zeros_like(batch.q, dtype=dtype)
    page_size = batch.k_pages.shape[2]
    starts = batch.query_starts.tolist()
    for row, stored in enumerate(batch.kv_lens.tolist()):
        low, high = starts[row], starts[row + 1]
        if low == high:
            continue
        place = torch.arange(stored, device=batch.q.device)
        page = batch.page_table[row].long()[place // page_size]
        queries = batch.q[low:high].transpose(0, 1).to(dtype)
        group = batch.q.shape[1] // batch.k_pages.shape[1]
        keys, values = (
            pages[page, :, place % page_size].to(dtype).transpose(0, 1).repeat_interleave(group, 0)
            for pages in (batch.k_pages, batch.v_pages)
        )
        position = place[stored - (high - low) :, None]
        seen = place <= position
        if window:
            seen &= place > position - window
        if soft_cap or sinks is not None:
            scores = queries @ keys.mT * scale
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, high - low, 1)), -1)
            mixed = torch.softmax(scores, -1)[..., :stored] @ values
        else:
            mixed = F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=seen, scale=scale
            )[0]
        out[low:high] = mixed.transpose(0, 1)
    return out


def assert_as_good(result: torch.Tensor, batch: Batch, **options) -> None:
    """Assert at most twice the error of torch at the same dtype, both against float64."""
    exact = dense(batch, torch.float64, **options)
    error = (result.double() - exact).abs().max()
    torchs = (dense(batch, batch.q.dtype, **options).double() - exact).abs().max()
    # One rounding of the largest output: torch may be exact where sums are short.
    floor = torch.finfo(result.dtype).eps * exact.abs().max()
    assert error <= 2 * torchs + floor, f"{error:.3g} against torch's {torchs:.3g}"
    assert error <= 20 * floor, "torch at this dtype is far off itself"
