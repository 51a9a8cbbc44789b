"""The rows of int8 pages, and copying pages, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.kernels.arguments.checks import check_copy
from ramify.kernels.arguments.pages import LEAST, MOST_CODE, SCALE_BYTES


def quantise_rows(x: Tensor) -> Tensor:
    """Rows of numbers as rows of int8 pages: (..., dim) float32 to (..., dim + SCALE_BYTES) int8.

    A row has a scale of its own, so its bytes depend on no other row: codes round(x / scale), ties to even,
    then the bytes of the float32 scale max |x| / 127. An error is at most half a scale.
    """
    most = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(most >= LEAST, most.new_tensor(MOST_CODE) / most, 0.0)
    codes = torch.round(x * inverse).to(torch.int8)
    return torch.cat((codes, (most / MOST_CODE).view(torch.int8)), dim=-1)


def read_rows(rows: Tensor) -> Tensor:
    """Rows of pages of any dtype as float32: (..., dim). int8 rows are (..., dim + SCALE_BYTES)."""
    if rows.dtype != torch.int8:
        return rows.float()
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    return codes.float() * scales.contiguous().view(torch.float32)


def copy_pages(k_pages: Tensor, v_pages: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy page ``src[i]`` to page ``dst[i]`` in every layer, in place (copy-on-write of shared pages).

    No page may be copied to twice, nor be both a source and a destination.

    Parameters
    ----------
    k_pages, v_pages : (num_pages, kv_heads, page_size, bytes or numbers of a row)
        Or with a leading axis of layers.
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
