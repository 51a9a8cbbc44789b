"""Mixtures of unpacked experts: grouped products whose grids depend on the number of rows alone.

Example: 3 rows with 2 experts each are 6 pairs, and blocks have 16 rows. Whatever the choice, the pairs fill
at most 0 + 6 blocks (full blocks, and one partial block for each expert with pairs), so 6 are launched. With
the choice (5, 2), (5, 7), (2, 5), expert 2 has block 0, expert 5 block 1, expert 7 block 2; the programs of
blocks 3 to 5 find no expert and end. A CUDA graph can replay such launches for any choice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import check_experts
from ramify.kernels.triton.tiles.launch import ProductTile, check_device, padded
from ramify.kernels.weights.stack import ExpertMatrices

_PAIRS = 1024
"""Pairs that a program of `_count` and `_arrange` takes at once."""
_FEW_ROWS = 64
"""Rows of a step up to which blocks have 16 rows, because each expert then has few rows."""
_COLUMNS = 1024


@triton.jit(do_not_specialize=["pairs"])
def _count(chosen_ptr, rank_ptr, count_ptr, pairs, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program e: the number of pairs of expert e, and the rank of each pair among them."""
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        mine = tl.load(chosen_ptr + pair, mask=pair < pairs, other=-1) == expert
        tl.store(rank_ptr + pair, total + tl.cumsum(mine.to(tl.int32), 0) - 1, mask=mine)
        total += tl.sum(mine.to(tl.int32), 0)
    tl.store(count_ptr + expert, total)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _arrange(  # type: ignore[no-untyped-def]
    chosen_ptr, rank_ptr, count_ptr, order_ptr, expert_ptr, first_ptr, pairs, blocks,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Program e: the order of the pairs of expert e in its blocks and, for each of these blocks, the expert
    and the rank of the block's first row. Program 0 marks unused blocks with -1."""
    expert = tl.program_id(0)
    each = tl.arange(0, PADDED)
    needed = (tl.load(count_ptr + each, mask=each < EXPERTS, other=0) + ROWS - 1) // ROWS
    low = tl.sum(tl.where(each < expert, needed, 0), 0)
    own = tl.sum(tl.where(each == expert, needed, 0), 0)
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        mine = tl.load(chosen_ptr + pair, mask=pair < pairs, other=-1) == expert
        rank = tl.load(rank_ptr + pair, mask=mine, other=0)
        tl.store(order_ptr + low * ROWS + rank, pair, mask=mine)
    for start in range(0, own, PAIRS):
        place = start + tl.arange(0, PAIRS)
        tl.store(expert_ptr + low + place, expert, mask=place < own)
        tl.store(first_ptr + low + place, place * ROWS, mask=place < own)
    if expert == 0:
        for start in range(tl.sum(needed, 0), blocks, PAIRS):
            place = start + tl.arange(0, PAIRS)
            tl.store(expert_ptr + place, -1, mask=place < blocks)


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, count_ptr,
    x_row, size, hidden, alpha, limit,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BIASED: tl.constexpr, CLAMPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block, tile): a tile of gate · up, the intermediate activations of the pairs of a block."""
    tiles = tl.cdiv(size, OUTPUTS)
    block = tl.program_id(0) // tiles
    expert = tl.load(expert_ptr + block)
    if expert >= 0:
        there = tl.load(first_ptr + block) + tl.arange(0, ROWS) < tl.load(count_ptr + expert)
        pair = tl.load(order_ptr + block * ROWS + tl.arange(0, ROWS), mask=there, other=0).to(tl.int64)
        output = tl.program_id(0) % tiles * OUTPUTS + tl.arange(0, OUTPUTS)
        known, column = output < size, tl.arange(0, INPUTS)
        x_at = x_ptr + (pair // TOP_K)[:, None] * x_row
        gate_at = weight_ptr + (expert.to(tl.int64) * 2 * size + output)[None, :] * hidden
        up_at = gate_at + size.to(tl.int64) * hidden
        gate, up = tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, hidden, INPUTS):
            within = start + column < hidden
            x = tl.load(x_at + start + column[None, :], mask=there[:, None] & within[None, :], other=0.0)
            mask = within[:, None] & known[None, :]
            weight = tl.load(gate_at + start + column[:, None], mask=mask, other=0.0)
            gate = tl.dot(x, weight, gate, input_precision=PRECISION)
            weight = tl.load(up_at + start + column[:, None], mask=mask, other=0.0)
            up = tl.dot(x, weight, up, input_precision=PRECISION)
        if BIASED:
            bias_at = bias_ptr + expert * 2 * size + output
            gate += tl.load(bias_at, mask=known, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_at + size, mask=known, other=0.0).to(tl.float32)[None, :]
        slope = gate
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
            slope = gate * alpha
        power = tl.exp(-tl.abs(slope))
        y = gate * tl.where(slope >= 0.0, 1.0, power) / (1.0 + power) * up
        at = out_ptr + pair[:, None] * size + output[None, :]
        tl.store(at, y.to(out_ptr.dtype.element_ty), mask=there[:, None] & known[None, :])


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, scale_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, count_ptr,
    size, hidden, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block, tile): a tile of the weighted results of the pairs of a block, float32."""
    tiles = tl.cdiv(hidden, OUTPUTS)
    block = tl.program_id(0) // tiles
    expert = tl.load(expert_ptr + block)
    if expert >= 0:
        there = tl.load(first_ptr + block) + tl.arange(0, ROWS) < tl.load(count_ptr + expert)
        pair = tl.load(order_ptr + block * ROWS + tl.arange(0, ROWS), mask=there, other=0).to(tl.int64)
        output = tl.program_id(0) % tiles * OUTPUTS + tl.arange(0, OUTPUTS)
        known, column = output < hidden, tl.arange(0, INPUTS)
        x_at = x_ptr + pair[:, None] * size
        weight_at = weight_ptr + (expert.to(tl.int64) * hidden + output)[None, :] * size
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, size, INPUTS):
            within = start + column < size
            x = tl.load(x_at + start + column[None, :], mask=there[:, None] & within[None, :], other=0.0)
            mask = within[:, None] & known[None, :]
            weight = tl.load(weight_at + start + column[:, None], mask=mask, other=0.0)
            total = tl.dot(x, weight, total, input_precision=PRECISION)
        if BIASED:
            total += tl.load(bias_ptr + expert * hidden + output, mask=known, other=0.0).to(tl.float32)[
                None, :
            ]
        total *= tl.load(scale_ptr + pair, mask=there, other=0.0)[:, None]
        at = out_ptr + pair[:, None] * hidden + output[None, :]
        tl.store(at, total, mask=there[:, None] & known[None, :])


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    y_ptr, out_ptr, out_row, hidden, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """Program (i, t): columns [i * COLUMNS, …) of row t: its pairs, summed in the order of its choice."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < hidden
    at = out_ptr + row * out_row + column
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(y_ptr + (row * TOP_K + place) * hidden + column, mask=known, other=0.0)
    if ADD:
        total += tl.load(at, mask=known, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=known)


def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: ExpertMatrices,
    *,
    out: Tensor | None = None,
    add: bool = False,
    by_row: bool = False,
) -> Tensor:
    """As `reference.experts.mixture`. With `by_row` tiles have the same size for any number of rows, so that
    a row's bits do not depend on other rows."""
    check_device(x)
    out = check_experts(x, chosen, weights, experts, out, add)
    (rows, top_k), (count, _, hidden), size = chosen.shape, experts.gate_up.shape, experts.down.shape[2]
    if not rows:
        return out
    tile, pairs = _tile(x.dtype, few=rows <= _FEW_ROWS and not by_row), rows * top_k
    blocks = pairs // tile.rows + min(count, pairs)

    def integers(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=x.device)

    ranks, counts, order = integers(pairs), integers(count), integers(blocks * tile.rows)
    where = order, expert_of, first_of, _ = order, integers(blocks), integers(blocks), counts
    _count[(count,)](chosen, ranks, counts, pairs, PAIRS=_PAIRS, num_warps=4, enable_fp_fusion=False)
    _arrange[(count,)](
        chosen, ranks, counts, order, expert_of, first_of, pairs, blocks,
        EXPERTS=count, PADDED=padded(count), ROWS=tile.rows, PAIRS=_PAIRS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    inner = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    biased = experts.gate_up_bias is not None
    alpha, limit = (0.0, 0.0) if experts.clamp is None else (experts.clamp.alpha, experts.clamp.limit)
    _gate_up[(blocks * triton.cdiv(size, tile.outputs),)](
        x, experts.gate_up, experts.gate_up_bias if biased else x, inner, *where,
        x.stride(0), size, hidden, alpha, limit,
        TOP_K=top_k, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, BIASED=biased,
        CLAMPED=experts.clamp is not None, PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    _down[(blocks * triton.cdiv(hidden, tile.outputs),)](
        inner, experts.down, experts.down_bias if experts.down_bias is not None else x, weights, y, *where,
        size, hidden, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        BIASED=experts.down_bias is not None, PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    _sum[(triton.cdiv(hidden, _COLUMNS), rows)](
        y, out, out.stride(0), hidden, TOP_K=top_k, COLUMNS=_COLUMNS, ADD=add, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _tile(dtype: torch.dtype, *, few: bool) -> ProductTile:
    """The tile of a program. A block of weights is 8 KiB, or 16 KiB for gate and up together. Sums take at
    most 64 registers a thread."""
    if dtype == torch.float32:
        return ProductTile(16, 64, 4, 3, inputs=32)
    return ProductTile(16, 64, 4, 4, inputs=64) if few else ProductTile(64, 64, 4, 3, inputs=64)
