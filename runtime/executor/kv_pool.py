"""The KV pages of all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.runtime.model.config import ModelShape

if TYPE_CHECKING:
    import torch


class KvPool:
    """`k` and `v`: (layers, num_pages + 1, kv_heads, page_size, head_dim).

    A page of one head is contiguous, so that attention reads it without strides over other heads. No request
    is given the last page (`padding_page`): padded steps write the KV of their padding there.
    """

    def __init__(
        self,
        model: ModelShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        import torch  # not above: `page_bytes` is asked before torch is needed

        shape = (model.num_layers, num_pages + 1, model.num_kv_heads, page_size, model.head_dim)
        # Not zeroed: pages that no request has used take no physical memory, and no row is read before it is
        # written.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def padding_page(self) -> int:
        return self.num_pages


def page_bytes(model: ModelShape, page_size: int, dtype: torch.dtype, draft: ModelShape | None = None) -> int:
    """Bytes of one page over all layers, keys and values: of `model`, and of its draft model if any."""
    if draft is not None:
        return page_bytes(model, page_size, dtype) + page_bytes(draft, page_size, dtype)
    return 2 * model.num_layers * model.num_kv_heads * page_size * model.head_dim * dtype.itemsize
