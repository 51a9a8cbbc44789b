"""Rotary position embedding, and the store of new keys and values, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.arguments.checks import FLOAT8, check_head_norms, check_rope, check_store
from ramify.kernels.reference.float8 import MOST
from ramify.kernels.reference.kv_store import quantise_rows


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate q in place; rotate k and write the result and v into one layer's pages (arXiv 2104.09864).

    Numbers 2i and 2i + 1 of a head are a complex number, multiplied by ``rotation[t, i]`` in float32 and
    rounded once. With norms each head is normalised first (`norm.rms_norm`); a kernel may round the
    normalised heads.

    Parameters
    ----------
    q : (T, heads, head_dim) float32 or bfloat16, changed in place; the stride between tokens may be larger
    k, v : (T, kv_heads, head_dim), dtype of q, not changed; the stride between tokens may be larger
    rotation : (T, head_dim / 2) complex64, contiguous
    k_pages, v_pages : (num_pages, kv_heads, page_size, head_dim), dtype of q
        Or float8_e4m3fn, for any dtype of q: numbers are rounded, and clamped to ± 448. Or int8
        rows of head_dim + 4 bytes, for any dtype of q: see `kv_store.quantise_rows`.
    slots : (T,) int64
        ``page * page_size + offset`` of each token, all distinct. The range is not checked.
    q_norm, k_norm : (head_dim,), float32 or dtype of q, contiguous; optional
        Weights of the norm over each head of q and of k (arXiv 2505.09388).
    eps : float
        The epsilon of these norms.
    """
    check_rope(q, k, rotation)
    check_head_norms(q, q_norm, k_norm)
    check_store(k, v, k_pages, v_pages, slots, page_dtypes=(FLOAT8, torch.int8))
    page_size = k_pages.shape[2]
    page, offset = slots // page_size, slots % page_size
    for pages, numbers in ((k_pages, _rotated(k, k_norm, eps, rotation)), (v_pages, v)):
        if pages.dtype == torch.int8:
            numbers = quantise_rows(numbers.float())
        elif pages.dtype == FLOAT8:
            numbers = numbers.float().clamp(-MOST, MOST)
        pages[page, :, offset] = numbers.to(pages.dtype)
    q.copy_(_rotated(q, q_norm, eps, rotation))


def _rotated(x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor) -> Tensor:
    exact = x.float()
    if weight is not None:
        exact = F.rms_norm(exact, weight.shape, weight.float(), eps)
    pairs = exact.reshape(*x.shape[:2], x.shape[2] // 2, 2)
    return torch.view_as_real(torch.view_as_complex(pairs) * rotation[:, None]).flatten(2)
