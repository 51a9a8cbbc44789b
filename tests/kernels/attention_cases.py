"""Ragged batches over poisoned pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    """Node n is `node_pages[n]` pages that all branches below it share. Pages lie in random order; rows of no
    sequence are NaN."""
    own_pages = [-(-branch.own // page_size) for branch in branches]
    num_pages = sum(node_pages) + sum(own_pages) + 2
    free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.full((2, num_pages, kv_heads, page_size, head_dim), torch.nan)
    random = torch.Generator().manual_seed(seed)

    def filled(pages: int, tokens: int) -> list[int]:
        """New pages, whose first `tokens` rows of keys and values have numbers."""
        found, place = [free.pop() for _ in range(pages)], torch.arange(tokens)
        numbers = torch.randn(tokens, 2, kv_heads, head_dim, generator=random)
        pool[:, torch.tensor(found, dtype=torch.long)[place // page_size], :, place % page_size] = numbers
        return found

    unused = free.pop()
    nodes = [filled(count, count * page_size) for count in node_pages]
    rows = [
        [page for node in branch.path for page in nodes[node]] + filled(count, branch.own)
        for branch, count in zip(branches, own_pages, strict=True)
    ]
    width = max(map(len, rows)) + 1
    lens = [sum(node_pages[node] for node in branch.path) * page_size + branch.own for branch in branches]
    starts = torch.tensor([0, *(branch.new for branch in branches)]).cumsum(0)
    return Batch(
        torch.randn(int(starts[-1]), heads, head_dim, generator=random).to(dtype),
        *pool.to(dtype),
        torch.tensor([row + [unused] * (width - len(row)) for row in rows], dtype=torch.int32),
        starts.to(torch.int32),
        torch.tensor(lens, dtype=torch.int32),
    )


def make_batch(lengths: Sequence[tuple[int, int]], **options: Any) -> Batch:
    """Sequences that share nothing, by their new tokens and their tokens in the pages. Their numbers do not
    depend on the size of pages."""
    branches = [Branch((), stored, new) for new, stored in lengths]
    return make_tree((), branches, **{"heads": 9, "kv_heads": 3, "dtype": torch.float32} | options)


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
