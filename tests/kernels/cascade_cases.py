"""Cascades of the Triton kernels, and attention over whole batches in any precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ramify.kernels.triton.attention import plan_shape, run_plan
from ramify.kernels.triton.cascade import plan_cascade
from ramify.kernels.triton.plan.cascade_groups import Group, Groups, find_groups
from tests.kernels.attention_cases import Batch


def groups_of(batch: Batch) -> list[Group]:
    starts, lens = batch.query_starts.tolist(), batch.kv_lens.tolist()
    return [*find_groups(batch.page_table.cpu().numpy(), starts, lens, batch.k_pages.shape[2])]


def cascade_attention(
    batch: Batch, groups: Sequence[Group], *, deterministic: bool = False, **options
) -> torch.Tensor:
    """The Triton kernels' attention, where every group is read once."""
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=deterministic)
    lengths = batch.query_starts.tolist(), batch.kv_lens.tolist()
    plan = plan_cascade(*lengths, Groups.of(groups), shape, batch.q.device)
    return run_plan(plan, *batch[:4], torch.full_like(batch.q, torch.nan), **options)


def dense(
    batch: Batch,
    dtype: torch.dtype,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch's attention, computed in `dtype`, one sequence at a time: (T, heads, head_dim)."""
    out = torch.zeros_like(batch.q, dtype=dtype)
    page_size = batch.k_pages.shape[2]
    starts = batch.query_starts.tolist()
    for row, stored in enumerate(batch.kv_lens.tolist()):
        low, high = starts[row], starts[row + 1]
        if low == high:
            continue
        place = torch.arange(stored, device=batch.q.device)
        page = batch.page_table[row].long()[place // page_size]
        queries = batch.q[low:high].transpose(0, 1).to(dtype)
        group = batch.q.shape[1] // batch.k_pages.shape[1]
        keys, values = (
            pages[page, :, place % page_size].to(dtype).transpose(0, 1).repeat_interleave(group, 0)
            for pages in (batch.k_pages, batch.v_pages)
        )
        position = place[stored - (high - low) :, None]
        seen = place <= position
        if window:
            seen &= place > position - window
        if soft_cap or sinks is not None:
            scores = queries @ keys.mT * scale
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, high - low, 1)), -1)
            mixed = torch.softmax(scores, -1)[..., :stored] @ values
        else:
            mixed = F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=seen, scale=scale
            )[0]
        out[low:high] = mixed.transpose(0, 1)
    return out


def assert_as_good(result: torch.Tensor, batch: Batch, **options) -> None:
    """Assert at most twice the error of torch at the same dtype, both against float64."""
    exact = dense(batch, torch.float64, **options)
    error = (result.double() - exact).abs().max()
    torchs = (dense(batch, batch.q.dtype, **options).double() - exact).abs().max()
    # One rounding of the largest output: torch may be exact where sums are short.
    floor = torch.finfo(result.dtype).eps * exact.abs().max()
    assert error <= 2 * torchs + floor, f"{error:.3g} against torch's {torchs:.3g}"
    assert error <= 20 * floor, "torch at this dtype is far off itself"
