"""LoRA adapters of several requests in one product: segmented gathers of matrices (S-LoRA, arXiv 2311.03285).

Two launches for each projection. `_shrink` writes hidden = scale · (x Aᵀ) for each segment of at most 16 rows
of one adapter, `_expand` adds hidden Bᵀ to the result. The grids have room for the most segments that the
number of rows allows, so they do not depend on which request has which adapter. Addresses of A and B come
from a table on the device, by slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.reference.norm import rms_norm
from ramify.kernels.triton.tiles.launch import check_device
from ramify.kernels.weights.lora import MOST_PARTS, MULTIPLE, RECORD, SEGMENT_ROWS, LoraRows, LoraTable

_FIELDS = len(RECORD.names or ())
_COLUMNS = 64
"""Columns of the result that a program writes."""
_INPUTS = 64
_RANK_ROWS = 16
"""Rows of A that a program multiplies by."""


@triton.jit
def _segment(segments_ptr, order_ptr, table_ptr, count, segment, FIELDS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A segment's places in the order of rows, its row ids, their mask, and the address of its `RECORD`."""
    there = segment < count
    slot = tl.load(segments_ptr + 3 * segment, mask=there, other=0)
    first = tl.load(segments_ptr + 3 * segment + 1, mask=there, other=0)
    stop = tl.load(segments_ptr + 3 * segment + 2, mask=there, other=0)
    place = first + tl.arange(0, ROWS)
    row_there = place < stop
    row = tl.load(order_ptr + place, mask=row_there, other=0)
    return place, row, row_there, table_ptr + slot * FIELDS


@triton.jit(do_not_specialize=["count"])
def _shrink(  # type: ignore[no-untyped-def]
    x_ptr, table_ptr, segments_ptr, order_ptr, hidden_ptr, count, inputs, padded, ranks_row, x_row,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Program (s, r): rows of segment s by rows [r * RANKS, …) of A."""
    place, row, row_there, fields = _segment(
        segments_ptr, order_ptr, table_ptr, count, tl.program_id(0), FIELDS, ROWS
    )
    ranks = tl.load(fields + 2)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    rank_there = rank < ranks
    a_ptr = tl.load(fields).to(tl.pointer_type(x_ptr.dtype.element_ty))
    scales_ptr = tl.load(fields + 1).to(tl.pointer_type(tl.float32))
    total = tl.zeros([ROWS, RANKS], tl.float32)
    column = tl.arange(0, INPUTS)
    for start in range(0, inputs, INPUTS):
        known = start + column < inputs
        x = tl.load(
            x_ptr + row[:, None] * x_row + start + column[None, :],
            mask=row_there[:, None] & known[None, :], other=0.0,
        )  # fmt: skip
        a = tl.load(
            a_ptr + rank[None, :] * padded + start + column[:, None],
            mask=rank_there[None, :] & known[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(x, a, total, input_precision="ieee")
    scale = tl.load(scales_ptr + rank, mask=rank_there, other=0.0)
    to = hidden_ptr + place[:, None] * ranks_row + rank[None, :]
    tl.store(to, total * scale[None, :], mask=row_there[:, None] & rank_there[None, :])


@triton.jit(do_not_specialize=["count"])
def _expand(  # type: ignore[no-untyped-def]
    hidden_ptr, table_ptr, segments_ptr, order_ptr, out_ptr, x_ptr, count, ranks_row, out_row,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (s, c): columns [c * COLUMNS, …) of each part of the result, for the rows of segment s."""
    place, row, row_there, fields = _segment(
        segments_ptr, order_ptr, table_ptr, count, tl.program_id(0), FIELDS, ROWS
    )
    parts = tl.load(fields + 3)
    before = tl.full([], 0, tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for part in tl.static_range(PARTS):
        if part < parts:
            b_ptr = tl.load(fields + 5 + 4 * part).to(tl.pointer_type(x_ptr.dtype.element_ty))
            rank = tl.load(fields + 6 + 4 * part)
            start = tl.load(fields + 7 + 4 * part)
            columns = tl.load(fields + 8 + 4 * part)
            column_there = column < columns
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for low in range(0, rank, RANKS):
                each = low + tl.arange(0, RANKS)
                known = each < rank
                hidden = tl.load(
                    hidden_ptr + place[:, None] * ranks_row + before + each[None, :],
                    mask=row_there[:, None] & known[None, :], other=0.0,
                )  # fmt: skip
                block = column // WIDTH * WIDTH
                at = block[None, :] * rank + each[:, None] * WIDTH + (column - block)[None, :]
                b = tl.load(b_ptr + at, mask=known[:, None] & column_there[None, :], other=0.0)
                total = tl.dot(hidden, b.to(tl.float32), total, input_precision="ieee")
            to = out_ptr + row[:, None] * out_row + start + column[None, :]
            in_bounds = row_there[:, None] & column_there[None, :]
            total += tl.load(to, mask=in_bounds, other=0.0).to(tl.float32)
            tl.store(to, total.to(out_ptr.dtype.element_ty), mask=in_bounds)
            before += rank


def lora(
    x: Tensor,
    table: LoraTable,
    rows: LoraRows,
    *,
    out: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """As `reference.lora.lora`."""
    check_device(x)
    found = [table.weights[slot] for slot in rows.present if slot in table.weights]
    if not found:
        return out
    if norm is not None:
        x = rms_norm(x, *norm)
    order, segments = rows.on(x.device)
    inputs, ranks = x.shape[1], max(len(weight.a) for weight in found)
    columns = max(part.columns for weight in found for part in weight.parts)
    hidden = torch.empty(len(rows.slots), ranks, dtype=torch.float32, device=x.device)
    most = min(len(rows.slots), len(rows.slots) // SEGMENT_ROWS + len(table.addresses))
    shared = {"FIELDS": _FIELDS, "ROWS": SEGMENT_ROWS, "num_warps": 4, "enable_fp_fusion": False}
    records = table.records(x.device)
    padded = -(-inputs // MULTIPLE) * MULTIPLE
    _shrink[(most, triton.cdiv(ranks, _RANK_ROWS))](
        x, records, segments, order, hidden, len(segments), inputs, padded, ranks, x.stride(0),
        RANKS=_RANK_ROWS, INPUTS=_INPUTS, **shared,
    )  # fmt: skip
    _expand[(most, triton.cdiv(columns, _COLUMNS))](
        hidden, records, segments, order, out, x, len(segments), ranks, out.stride(0),
        RANKS=_RANK_ROWS, COLUMNS=_COLUMNS, WIDTH=MULTIPLE, PARTS=MOST_PARTS, **shared,
    )  # fmt: skip
    return out
