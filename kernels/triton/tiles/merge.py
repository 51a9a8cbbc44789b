"""The merge of softmax states that several work items left for one query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ramify.kernels.triton.tiles.attention_tile import fold, sink_state
from ramify.kernels.triton.tiles.launch import jit

AT_ONCE = (1, 2, 4, 8)
"""States loaded before the first is merged: one memory latency for 8, in 32 registers at head_dim 128."""


@jit(
    do_not_specialize_on_alignment=["part_ptr", "top_ptr", "total_ptr", "token_ptr", "index_ptr", "sink_ptr"]
)
def _merge(  # type: ignore[no-untyped-def]
    part_ptr, top_ptr, total_ptr, out_ptr, token_ptr, start_ptr, index_ptr, sink_ptr, out_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program ``i * heads + h``: merge the states of head h of the i-th token, in ascending order."""
    head = tl.program_id(0) % (KV_HEADS * GROUP)
    entry = tl.program_id(0) // (KV_HEADS * GROUP)
    first, last = tl.load(start_ptr + entry), tl.load(start_ptr + entry + 1)
    if first == last:
        return
    dim = tl.arange(0, BLOCK_D)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    one = tl.arange(0, 1)
    if SINKS:
        top, total = sink_state(sink_ptr + head + one)
    for low in range(first, last, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            in_bounds = low + step + one < last
            row = tl.load(index_ptr + low + step + one, mask=in_bounds, other=0) + head % GROUP
            at = row.to(tl.int64) * KV_HEADS + head // GROUP
            part_top = tl.load(top_ptr + at, mask=in_bounds, other=float("-inf"))
            part_total = tl.load(total_ptr + at, mask=in_bounds, other=0.0)
            part = tl.load(part_ptr + at * HEAD_DIM + dim, mask=in_bounds & (dim < HEAD_DIM), other=0.0)
            top, total, acc = fold(top, total, acc, part_top, part_total, part, False)
    token = tl.load(token_ptr + entry).to(tl.int64)
    out_to = out_ptr + token * out_stride + head * HEAD_DIM + dim
    tl.store(out_to, (acc / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def merge_states(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    index: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the merged states of N tokens to `out`; other rows of `out` are not touched.

    Parameters
    ----------
    states : (acc, top, total)
        acc (P, kv_heads, head_dim): values weighted by ``2 ** (score - top)``; top (P, kv_heads): the maximum
        of the scores, in base 2; total (P, kv_heads): the sum of the weights. All float32, contiguous.
    out : (T, heads, head_dim), contiguous tokens
    tokens : (N,) int32
        Distinct rows of `out`.
    starts : (N + 1,) int32
        ``index[starts[i] : starts[i + 1]]`` are the states of ``tokens[i]``. If empty, nothing is written.
    index : (K,) int32
        Rows of the states: query head g of a KV head is at ``index[k] + g``.
    sinks : (heads,) float32, as in `paged_attention`
    """
    acc, top, total = states
    _, kv_heads, head_dim = acc.shape
    heads = out.shape[1]
    mean = -(-len(index) // len(tokens))
    at_once = next((size for size in AT_ONCE if size >= mean), AT_ONCE[-1])
    _merge[(heads * len(tokens),)](
        acc, top, total, out, tokens, starts, index, total if sinks is None else sinks, out.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), AT_ONCE=at_once, SINKS=sinks is not None, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
