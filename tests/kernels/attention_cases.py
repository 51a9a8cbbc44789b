"""Ragged batches over poisoned pages, and the dense attention in float64 that everything is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

MIXED = [(1, 1), (1, 300), (50, 50), (37, 290), (0, 5), (3, 130), (1, 64), (5, 65)]
"""(new tokens, tokens in the pages): prefills with and without a prefix, decodes, one with nothing new."""


class Batch(NamedTuple):
    """The positional arguments of `paged_attention`."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    kv_lens: torch.Tensor


def make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """A batch whose pages lie in random order; every row that no sequence owns is NaN."""
    random = torch.Generator().manual_seed(seed)
    needed = [-(-stored // page_size) for _, stored in lengths]
    num_pages = sum(needed) + 2
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    k_pages = torch.full((num_pages, kv_heads, page_size, head_dim), torch.nan)
    v_pages = k_pages.clone()
    page_table = torch.full((len(lengths), max(needed) + 1), int(order[-1]), dtype=torch.int32)
    used = 0
    for row, (_, stored) in enumerate(lengths):
        pages = order[used : used + needed[row]]
        used += needed[row]
        page_table[row, : needed[row]] = pages
        position = torch.arange(stored)
        for pool in (k_pages, v_pages):
            rows = torch.randn(stored, kv_heads, head_dim, generator=random)
            pool[pages[position // page_size], :, position % page_size] = rows
    starts = np.cumsum([0, *(new for new, _ in lengths)])
    q = torch.randn(int(starts[-1]), heads, head_dim, generator=random)
    return Batch(
        q.to(dtype),
        k_pages.to(dtype),
        v_pages.to(dtype),
        page_table,
        torch.from_numpy(starts.astype(np.int32)),
        torch.tensor([stored for _, stored in lengths], dtype=torch.int32),
    )


def alone(batch: Batch, row: int) -> Batch:
    """Sequence `row` as a batch of its own, over the same pages."""
    low, high = batch.query_starts[row], batch.query_starts[row + 1]
    return Batch(
        batch.q[low:high],
        batch.k_pages,
        batch.v_pages,
        batch.page_table[row : row + 1].contiguous(),
        torch.tensor([0, high - low], dtype=torch.int32),
        batch.kv_lens[row : row + 1].contiguous(),
    )


def oracle(
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, heads, head_dim) float64, one query at a time."""
    q = batch.q.double()
    out = torch.zeros_like(q)
    page_size = batch.k_pages.shape[2]
    group = q.shape[1] // batch.k_pages.shape[1]
    for row, stored in enumerate(batch.kv_lens.tolist()):
        low, high = batch.query_starts[row : row + 2].tolist()
        position = torch.arange(stored)
        page = batch.page_table[row].long()[position // page_size]
        keys, values = (  # (stored, heads, head_dim)
            pages[page, :, position % page_size].double().repeat_interleave(group, dim=1)
            for pages in (batch.k_pages, batch.v_pages)
        )
        for query in range(low, high):
            last = stored - (high - low) + query - low
            first = max(0, last - window + 1) if window else 0
            scores = (keys[first : last + 1] * q[query]).sum(-1) * scale  # (seen, heads)
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[None]))
            weights = torch.softmax(scores, dim=0)[: last + 1 - first]
            out[query] = (weights[:, :, None] * values[first : last + 1]).sum(0)
    return out
