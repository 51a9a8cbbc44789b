"""The rows of KV pages. Imports no torch, as the size of a page is asked before torch is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

SCALE_BYTES = 4
"""Bytes of the float32 scale behind the codes of a row of int8 pages."""
MOST_CODE = 127
"""Codes of int8 rows lie in ± MOST_CODE."""
LEAST = 2.0**-100
"""A row whose largest magnitude is below this has codes of 0; else MOST_CODE / magnitude is a float32."""


class PageDtype(Protocol):
    """A torch.dtype, or a stand-in for it where torch is not imported."""

    @property
    def itemsize(self) -> int: ...
    @property
    def is_floating_point(self) -> bool: ...


def row_bytes(head_dim: int, dtype: PageDtype) -> int:
    """Bytes of the key or the value of one token and KV head in pages of `dtype`."""
    return head_dim * dtype.itemsize + (0 if dtype.is_floating_point else SCALE_BYTES)


def head_dim_of(pages: Tensor) -> int:
    """The numbers in a row of `pages`: (..., head_dim), or (..., head_dim + SCALE_BYTES) int8."""
    return pages.shape[-1] - (0 if pages.dtype.is_floating_point else SCALE_BYTES)
