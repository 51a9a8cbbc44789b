"""Copies of pages.

    for layer's pages of keys, then of values: for i: pages[dst[i]] = pages[src[i]]

A page is (KV heads, slots, dim), in all layers of a pool. Reading and writing bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ramify.kernels.arguments.checks import check_copy


def copy_pages(k_pages: Tensor, v_pages: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """As `reference.kv_store.copy_pages`, one page at a time, without temporary memory for all of them."""
    check_copy(k_pages, v_pages, src, dst)
    for pages in (k_pages, v_pages):
        by_page = pages if pages.dim() == 4 else pages.transpose(0, 1)
        for source, destination in zip(src, dst, strict=True):
            by_page[destination].copy_(by_page[source])
