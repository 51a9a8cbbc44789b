"""Products with quantised weights, x Wᵀ: int4, int8 and float8 are converted in registers (W4A16, W8A16).

A program multiplies a tile of W by a tile of xᵀ: converted weights, as the left operand, need no shared
memory. Inputs are summed in parts, spread over programs for few rows, as in `matmul`. Grids depend on the
number of rows alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import check_quantised
from ramify.kernels.triton.matmul import PART, finish, gather, place
from ramify.kernels.triton.plan.attention_config import device_of
from ramify.kernels.triton.tiles.launch import ProductTile, check_device, jit
from ramify.kernels.weights.quantised import QuantisedWeight

_FEW_ROWS, _SPREAD_ROWS = 16, 64
"""Rows up to which tiles have 16 rows; and up to which parts are spread over programs."""
_GROUP = 8
"""Rows of tiles that run one after the other, so that they share the weights in the L2 cache."""


@triton.jit
def _number(codes, FORM: tl.constexpr, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 number of each of `codes`, which are int32."""
    if FORM == "fp8":
        # A float16 with these bits is the float8 divided by 256.
        half = ((codes & 128) << 8 | (codes & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256.0
    # The bits of 2**23 + code: conversions have fewer units than additions (CUDA programming guide).
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 - SHIFT)


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    x_at, number_at, factor_at, offset_at, low, high, inputs, outputs, per, row_there, output_there,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, FORM: tl.constexpr, SHIFT: tl.constexpr,
    OFFSETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum over inputs [low, high), (OUTPUTS, ROWS), a block at a time in ascending order."""
    HALVES: tl.constexpr = 2 if FORM == "int4" else 1
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    byte = tl.arange(0, BYTES)
    stride = tl.cast(outputs, tl.int64) * BYTES
    for start in range(low, high, BYTES * HALVES):
        step = start // BYTES
        numbers = tl.load(number_at + step // HALVES * stride, mask=output_there[:, None], other=0)
        for half in tl.static_range(HALVES):
            column = start + half * BYTES + byte
            x = tl.load(
                x_at + column[:, None], mask=(column < inputs)[:, None] & row_there[None, :], other=0.0
            )
            codes = numbers.to(tl.int32)
            if FORM == "int4":
                codes = codes >> 4 * half & 15
            group = (step + half) // per * outputs
            factor = tl.load(factor_at + group, mask=output_there, other=0.0).to(tl.float32)
            weight = _number(codes, FORM, SHIFT) * factor[:, None]
            if OFFSETS:
                offset = tl.load(offset_at + group, mask=output_there, other=0.0).to(tl.float32)
                weight += offset[:, None]
            total = tl.dot(weight.to(x.dtype), x, total, input_precision=PRECISION)
    return total


@jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["per"])
def _quantised_product(  # type: ignore[no-untyped-def]
    x_ptr, number_ptr, factor_ptr, offset_ptr, bias_ptr, out_ptr, part_ptr,
    rows, outputs, inputs, padded, per, x_row, out_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, LENGTH: tl.constexpr,
    PARTS: tl.constexpr, SPREAD: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    SHIFT: tl.constexpr, OFFSETS: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the result; with SPREAD its float32 sum over part `program_id(1)` of the inputs.

    PARTS : the number of parts of the inputs, used without SPREAD. As an argument instead of a constant,
        PARTS would cost 26 of 144 registers a thread, and so halve the programs of a multiprocessor.
    """
    row, output = place(tl.program_id(0), rows, outputs, ROWS, OUTPUTS, GROUP)
    row_there, output_there = row < rows, output < outputs
    x_at = x_ptr + row.to(tl.int64)[None, :] * x_row
    number_at = number_ptr + output.to(tl.int64)[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    factor_at, offset_at = factor_ptr + output, offset_ptr + output
    first = tl.program_id(1) * LENGTH
    total = _part(
        x_at, number_at, factor_at, offset_at, first, tl.minimum(first + LENGTH, padded), inputs, outputs,
        per, row_there, output_there, ROWS, OUTPUTS, BYTES, FORM, SHIFT, OFFSETS, PRECISION,
    )  # fmt: skip
    if SPREAD:
        at = part_ptr + (tl.program_id(1) * rows + row).to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(at, total, mask=row_there[None, :] & output_there[:, None])
    else:
        for part in range(1, PARTS):
            low = part * LENGTH
            total += _part(
                x_at, number_at, factor_at, offset_at, low, tl.minimum(low + LENGTH, padded), inputs, outputs,
                per, row_there, output_there, ROWS, OUTPUTS, BYTES, FORM, SHIFT, OFFSETS, PRECISION,
            )  # fmt: skip
        total = tl.trans(total)
        finish(total, out_ptr, bias_ptr, row, row_there, output, output_there, out_row, BIASED, ADD)


def quantised_matmul(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    add: bool = False,
    by_row: bool = False,
) -> Tensor:
    """As `reference.quantised.quantised_matmul`. With `by_row` tiles have the same size for any number of
    rows, so that a row's bits do not depend on other rows."""
    check_device(x)
    out = check_quantised(x, weight, bias, out, add)
    rows, outputs = len(x), weight.outputs
    if not rows or not outputs:
        return out
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    tile = _tile(x.dtype, few=rows <= _FEW_ROWS and not by_row)
    bytes_, offsets = weight.numbers.shape[2], weight.offsets
    step = weight.block // (2 if weight.form == "int4" else 1)
    parts, across = triton.cdiv(weight.padded, PART), triton.cdiv(outputs, tile.outputs)
    spread = parts > 1 and rows <= _SPREAD_ROWS and across < 2 * device_of(x.device).processors
    room = parts * rows * outputs if spread else 0
    sums = torch.empty(room, dtype=torch.float32, device=x.device)
    biased = bias is not None
    _quantised_product[(triton.cdiv(rows, tile.rows) * across, parts if spread else 1)](
        x, weight.numbers, weight.factors, weight.factors if offsets is None else offsets,
        bias if biased else x, out, sums, rows, outputs, weight.inputs, weight.padded, weight.group // step,
        x.stride(0), out.stride(0),
        ROWS=tile.rows, OUTPUTS=tile.outputs, BYTES=bytes_, LENGTH=PART, PARTS=1 if spread else parts,
        SPREAD=spread, GROUP=_GROUP, FORM=weight.form, SHIFT=weight.shift, OFFSETS=offsets is not None,
        BIASED=biased, ADD=add, PRECISION="ieee",
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if spread:
        gather(sums, bias, out, parts, add=add)
    return out


def _tile(dtype: torch.dtype, *, few: bool) -> ProductTile:
    """The tile of a program. The converted weights of a step take 32 registers a thread, the sums of the tile
    and its part 64."""
    if dtype == torch.float32:
        return ProductTile(16, 64, 4, 3)
    return ProductTile(16, 64, 4, 4) if few else ProductTile(64, 128, 8, 3)
