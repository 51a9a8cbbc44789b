"""Attention over paged keys and values, in torch, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.arguments.checks import FLOAT8, check_attention, check_lengths
from ramify.kernels.reference.kv_store import read_rows


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v under the causal mask, for a packed, ragged batch of B sequences.

    Prefill chunks and decodes mix freely: sequence b has ``query_starts[b+1] - query_starts[b]`` new tokens,
    whose keys and values are in the pages already. Query j is at position ``kv_lens[b] - new_tokens + j`` and
    sees positions up to its own.

    Parameters
    ----------
    q : (T, heads, head_dim) float32 or bfloat16; the stride between tokens may be larger
    k_pages, v_pages : (num_pages, kv_heads, page_size, head_dim), dtype of q or float8_e4m3fn
        One layer's pool. Head h reads KV head ``h // (heads / kv_heads)``. Slots past a sequence's end are
        ignored: they may hold anything, NaN included. Or int8 rows with their scales (`quantise_rows`).
    page_table : (B, max_pages) int32
        Page ``page_table[b, i]`` holds positions ``[i * page_size, (i + 1) * page_size)``. Entries up to
        `kv_lens` must lie in ``[0, num_pages)``; this is not checked.
    query_starts : (B + 1,) int32
        Offsets into T, ascending. Tokens outside all sequences get no output.
    kv_lens : (B,) int32
        Tokens in the pages, new tokens included.
    scale : float
        Multiplies scores.
    window : int
        Positions that a query sees, its own included; 0 means all.
    soft_cap : float
        Scores become ``soft_cap * tanh(score / soft_cap)`` (arXiv 2408.00118); 0 means no cap.
    sinks : (heads,) float32, contiguous, optional
        A score of each head that takes part in every softmax but has no value, so that the other weights sum
        to less than 1 (gpt-oss, arXiv 2508.10925; a relative of arXiv 2309.17453). Neither scaled nor capped.
    out : (T, heads, head_dim), optional
        Receives the output. Its stride between tokens may be larger.

    Returns
    -------
    (T, heads, head_dim) in q's dtype
    """
    out = check_attention(
        q, k_pages, v_pages, page_table, query_starts, kv_lens, window, soft_cap, out, sinks,
        page_dtypes=(FLOAT8, torch.int8),
    )  # fmt: skip
    starts, lens = check_lengths(query_starts, kv_lens, len(q), page_table.shape[1] * k_pages.shape[2])
    heads, kv_heads, page_size = q.shape[1], k_pages.shape[1], k_pages.shape[2]
    for row, length in enumerate(lens):
        low, high = starts[row], starts[row + 1]
        if low == high:
            continue
        pages = page_table[row, : -(-length // page_size)].long()
        # (kv_heads, length, head_dim)
        keys, values = (
            read_rows(each[pages].transpose(0, 1).flatten(1, 2)[:, :length]) for each in (k_pages, v_pages)
        )
        queries = q[low:high].reshape(high - low, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3)
        # Products and sums in float32, as the kernels accumulate: (kv_heads, group, queries, length).
        scores = torch.einsum("hgqd,hkd->hgqk", queries.float(), keys) * scale
        if soft_cap > 0.0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(length - (high - low), length, device=q.device)[:, None]
        key_position = torch.arange(length, device=q.device)[None, :]
        hidden = key_position > position
        if window > 0:
            hidden |= key_position <= position - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        mixed = torch.einsum("hgqk,hkd->qhgd", weights, values)
        out[low:high] = mixed.flatten(1, 2).to(q.dtype)
    return out
