"""Attention over paged keys and values: plans of a batch, and their launches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.arguments.checks import ALL_DTYPES, FLOAT8, check_attention, check_lengths
from ramify.kernels.triton.plan.attention_config import CHUNK, GRAIN, block_dim, device_of, tiles
from ramify.kernels.triton.plan.attention_plan import Launch, Merge, Plan, Shape, Tasks, make_plan
from ramify.kernels.triton.tiles.attention_tile import ITEM_FIELDS, attend
from ramify.kernels.triton.tiles.launch import check_device
from ramify.kernels.triton.tiles.merge import AT_ONCE, merge_states

_LOG2_E = 1.4426950408889634


def plan_shape(q: Tensor, k_pages: Tensor, *, window: int, deterministic: bool) -> Shape:
    """The `Shape` of plans for these tensors."""
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    device = device_of(q.device)
    chosen = tiles(head_dim, q.dtype, device, deterministic=deterministic)
    size = k_pages.element_size()
    return Shape(heads, kv_heads, head_dim, size, page_size, window, deterministic, chosen, device)


def plan_attention(
    query_starts: Sequence[int], kv_lens: Sequence[int], shape: Shape, device: torch.device
) -> Plan:
    """The plan of a batch without a cascade, from lengths on the host.

    Parameters
    ----------
    query_starts, kv_lens : B + 1 and B integers, as in `paged_attention`; not checked
    shape : from `plan_shape`
    device : of the plan's tensors
    """
    starts, lens = np.asarray(query_starts, np.int64), np.asarray(kv_lens, np.int64)
    new = starts[1:] - starts[:-1]
    row = np.flatnonzero(new)
    position = lens[row] - new[row]
    begin = np.zeros_like(position)
    grain = CHUNK if shape.deterministic else GRAIN
    if shape.window:
        begin = np.maximum(position - shape.window + 1, 0) // grain * grain
    tasks = Tasks(starts[row], new[row], position, row, begin, lens[row], np.zeros(len(row), bool))
    return make_plan(tasks, np.zeros(0, np.int64), shape, device)


def run_plan(
    plan: Plan,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    out: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run `plan` on one layer and return `out`; shapes as in `paged_attention`, not checked.

    Only launches kernels: no transfer, no wait.
    """
    _, heads, head_dim = q.shape
    shape = plan.shape
    kv_heads = shape.kv_heads
    room = plan.state_rows * kv_heads
    count = room * (head_dim + 2)
    if plan.space is None:
        states = torch.empty(count, dtype=torch.float32, device=q.device)
    else:
        states = plan.space[:count]
    acc, top, total = torch.split(states, [room * head_dim, room, room])
    if soft_cap > 0.0:
        in_factor, out_factor = scale / soft_cap, soft_cap * _LOG2_E
    else:
        in_factor, out_factor = 1.0, scale * _LOG2_E
    for launch in plan.launches:
        tile = launch.tile
        attend[(kv_heads * len(launch.items),)](
            q, k_pages, v_pages, out, acc, top, total, page_table, launch.items, plan.tokens,
            total if sinks is None else sinks,
            q.stride(0), out.stride(0), *k_pages.stride()[:3], page_table.stride(0),
            in_factor, out_factor, shape.window,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_dim(head_dim),
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, PAGE_SIZE=shape.page_size,
            CHUNK=CHUNK if shape.deterministic else 0,
            LISTED=launch.listed, WINDOWED=shape.window > 0, SOFT_CAP=soft_cap > 0.0,
            SINKS=sinks is not None, PRECISION="ieee",
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    if plan.merge is not None:
        shaped = acc.view(-1, kv_heads, head_dim), top.view(-1, kv_heads), total.view(-1, kv_heads)
        merge_states(shaped, out, plan.merge.tokens, plan.merge.starts, plan.merge.index, sinks)
    return out


def warm_up(
    shape: Shape,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    *,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    cascade: bool = True,
) -> None:
    """Compile every specialisation that plans of `shape` can launch, so that no request waits for a compiler.

    The tensors are as in `paged_attention`, with at least one token; they are neither read nor written.
    Without `cascade` the specialisations that only cascade plans launch are skipped.
    """
    device = q.device
    none = torch.zeros(1, dtype=torch.int32, device=device)
    item = torch.zeros(1, int(ITEM_FIELDS), dtype=torch.int32, device=device)
    launches = tuple(
        Launch(tile, listed, item) for tile in shape.tiles for listed in (False, *[True] * cascade)
    )
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    for states in AT_ONCE:
        index = torch.zeros(states, dtype=torch.int32, device=device)
        plan = Plan(shape, launches, none, 0, Merge(none, starts, index))
        out = torch.empty_like(q)
        run_plan(plan, q, k_pages, v_pages, page_table, out, scale=1.0, soft_cap=soft_cap, sinks=sinks)


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
    deterministic: bool = False,
) -> Tensor:
    """As `reference.attention.paged_attention`, also for float16. `scale` must be positive.

    `query_starts` and `kv_lens` may be on the host. From the device both are copied to the host, which waits
    for the device. `plan_attention` and `run_plan` never wait.

    deterministic : the bits of a token's output depend only on its query and the keys and values it sees,
        not on the batch, the chunk, or the pages

    Raises
    ------
    KernelUnavailable
        The tensors are on the host and Triton's interpreter is off.
    """
    check_device(q)
    tensors = q, k_pages, v_pages, page_table, query_starts, kv_lens
    out = check_attention(*tensors, window, soft_cap, out, sinks, dtypes=ALL_DTYPES, page_dtypes=(FLOAT8,))
    if scale <= 0.0:
        raise ValueError(f"scale is {scale}; it must be positive.")
    shape = plan_shape(q, k_pages, window=window, deterministic=deterministic)
    lengths = check_lengths(query_starts, kv_lens, len(q), page_table.shape[1] * shape.page_size)
    plan = plan_attention(*lengths, shape, q.device)
    return run_plan(plan, q, k_pages, v_pages, page_table, out, scale=scale, soft_cap=soft_cap, sinks=sinks)
