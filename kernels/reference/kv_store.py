"""Writing new keys and values into pages, and copying pages, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.kernels.arguments.checks import FLOAT8, check_copy, check_store
from ramify.kernels.reference.float8 import MOST


def store_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write the keys and values of T tokens into one layer's pages, in place.

    Parameters
    ----------
    k, v : (T, kv_heads, head_dim), dtype of the pages; the stride between tokens may be larger
    k_pages, v_pages : (num_pages, kv_heads, page_size, head_dim)
        Or float8_e4m3fn, for any dtype of k and v: numbers are rounded, and clamped to ± 448.
    slots : (T,) int64
        ``page * page_size + offset`` of each token, all distinct. The range is not checked.

    Raises
    ------
    ValueError
        Naming the argument whose shape, stride or dtype does not fit.
    """
    check_store(k, v, k_pages, v_pages, slots, float8=True)
    write(k, v, k_pages, v_pages, slots)


def write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """`store_kv` without checks: k and v may have any two dtypes."""
    page_size = k_pages.shape[2]
    page, offset = slots // page_size, slots % page_size
    for pages, numbers in ((k_pages, k), (v_pages, v)):
        if pages.dtype == FLOAT8:
            numbers = numbers.float().clamp(-MOST, MOST)
        pages[page, :, offset] = numbers.to(pages.dtype)


def copy_pages(k_pages: Tensor, v_pages: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy page ``src[i]`` to page ``dst[i]`` in every layer, in place (copy-on-write of shared pages).

    No page may be copied to twice, nor be both a source and a destination.

    Parameters
    ----------
    k_pages, v_pages : (num_pages, kv_heads, page_size, head_dim), or with a leading axis of layers
    src, dst : equally long sequences of page ids

    Raises
    ------
    ValueError
        Pages are out of range or overlap.
    """
    check_copy(k_pages, v_pages, src, dst)
    sources, destinations = (
        torch.tensor(pages, dtype=torch.int64, device=k_pages.device) for pages in (src, dst)
    )
    for pages in (k_pages, v_pages):
        if pages.dtype == FLOAT8:
            pages = pages.view(torch.uint8)
        pages.index_copy_(pages.dim() - 4, destinations, pages.index_select(pages.dim() - 4, sources))
