"""Copying pages, in torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ramify.kernels.arguments.checks import check_copy


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
    for pages in (k_pages, v_pages):
        by_page = pages if pages.dim() == 4 else pages.transpose(0, 1)
        for source, destination in zip(src, dst, strict=True):
            by_page[destination].copy_(by_page[source])
