"""Attention of whole prompts, without a cached prefix, by cuDNN through torch.

On an H100 our kernel took 1.38 times cuDNN's time for 8k tokens (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LEAST_TOKENS = 1024
"""The fewest tokens of a prompt: each costs six launches a layer, where our kernel takes one for all
prompts."""


def prompt_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lens: Sequence[int], *, scale: float
) -> Tensor:
    """`reference.attention.paged_attention` where every sequence's tokens are all new, `lens` of each;
    without window, soft cap and sinks. On the CPU torch chooses among its own kernels."""
    out, start = torch.empty_like(q, memory_format=torch.contiguous_format), 0
    backends = [SDPBackend.CUDNN_ATTENTION] if q.is_cuda else [SDPBackend.MATH]
    page_size = k_pages.shape[2]
    with sdpa_kernel(backends):
        for row, length in enumerate(lens):
            pages = page_table[row, : -(-length // page_size)]
            k, v = (
                each[pages].transpose(0, 1).flatten(1, 2)[None, :, :length].to(q.dtype)
                for each in (k_pages, v_pages)
            )
            rows = slice(start, start + length)
            queries = q[rows].transpose(0, 1)[None]
            found = F.scaled_dot_product_attention(
                queries, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            out[rows] = found[0].transpose(0, 1)
            start += length
    return out
