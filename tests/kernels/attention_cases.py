"""Ragged batches over poisoned pages."""

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
