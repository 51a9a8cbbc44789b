"""Products with unpacked weights, x Wᵀ, whose bits in a row do not depend on the number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import check_matmul
from ramify.kernels.triton.plan.attention_config import device_of
from ramify.kernels.triton.tiles.launch import ProductTile, check_device, jit

PART = 1024
"""Inputs of a part. The sums of parts are added in ascending order, in registers or from memory, so spreading
parts over programs (split-K) changes no bit."""
_FEW_ROWS = 64
"""Rows up to which parts are spread over programs: one row of tiles."""
_GROUP = 8
"""Rows of tiles that run one after the other, so that they share the weights in the L2 cache."""


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    x_at, weight_at, low, inputs, row_there, output_there,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, LENGTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum over inputs [low, low + LENGTH), INPUTS at a time in ascending order."""
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    column = tl.arange(0, INPUTS)
    for start in range(low, low + LENGTH, INPUTS):
        known = start + column < inputs
        x = tl.load(x_at + start + column[None, :], mask=row_there[:, None] & known[None, :], other=0.0)
        weight = tl.load(
            weight_at + start + column[:, None], mask=known[:, None] & output_there[None, :], other=0.0
        )
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    return total


@triton.jit
def place(  # type: ignore[no-untyped-def]
    program, rows, outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr
):
    """The rows and outputs of a program's tile: GROUP rows of tiles run one after the other."""
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    first = program // (GROUP * tiles_across) * GROUP
    down = tl.minimum(tiles_down - first, GROUP)
    within = program % (GROUP * tiles_across)
    row = (first + within % down) * ROWS + tl.arange(0, ROWS)
    return row, within // down * OUTPUTS + tl.arange(0, OUTPUTS)


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    total, out_ptr, bias_ptr, row, row_there, output, output_there, out_row,
    BIASED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    in_bounds = row_there[:, None] & output_there[None, :]
    if BIASED:
        total += tl.load(bias_ptr + output, mask=output_there, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * out_row + output[None, :]
    if ADD:
        total += tl.load(at, mask=in_bounds, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_bounds)


@jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["parts"])
def _product(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, part_ptr, rows, outputs, inputs, parts, x_row, weight_row, out_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, LENGTH: tl.constexpr,
    SPREAD: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the result; with SPREAD its float32 sum over part `program_id(1)` of the inputs.

    parts : the number of parts of the inputs, used without SPREAD. Triton compiles a form for 1, which needs
        no loop, and a form for all other numbers.
    """
    row, output = place(tl.program_id(0), rows, outputs, ROWS, OUTPUTS, GROUP)
    row_there, output_there = row < rows, output < outputs
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_row
    weight_at = weight_ptr + output.to(tl.int64)[None, :] * weight_row
    if SPREAD:
        part = tl.program_id(1)
        total = _part(
            x_at, weight_at, part * LENGTH, inputs, row_there, output_there,
            ROWS, OUTPUTS, INPUTS, LENGTH, PRECISION,
        )  # fmt: skip
        at = part_ptr + (part * rows + row).to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(at, total, mask=row_there[:, None] & output_there[None, :])
    else:
        total = _part(
            x_at, weight_at, 0, inputs, row_there, output_there,
            ROWS, OUTPUTS, INPUTS, LENGTH, PRECISION,
        )  # fmt: skip
        for part in range(1, parts):
            total += _part(
                x_at, weight_at, part * LENGTH, inputs, row_there, output_there,
                ROWS, OUTPUTS, INPUTS, LENGTH, PRECISION,
            )  # fmt: skip
        finish(total, out_ptr, bias_ptr, row, row_there, output, output_there, out_row, BIASED, ADD)


@triton.jit(do_not_specialize=["rows"])
def _gather(  # type: ignore[no-untyped-def]
    part_ptr, bias_ptr, out_ptr, rows, outputs, out_row,
    PARTS: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program (i, r): outputs [i * OUTPUTS, …) of row r, by adding the parts' sums in ascending order."""
    row = tl.program_id(1) + tl.arange(0, 1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_there, output_there = row < rows, output < outputs
    in_bounds = row_there[:, None] & output_there[None, :]
    at = part_ptr + row.to(tl.int64)[:, None] * outputs + output[None, :]
    total = tl.load(at, mask=in_bounds, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + tl.cast(part, tl.int64) * rows * outputs, mask=in_bounds, other=0.0)
    finish(total, out_ptr, bias_ptr, row, row_there, output, output_there, out_row, BIASED, ADD)


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """As `reference.matmul.matmul`.

    The tile, and the order of the inputs in parts of PART, are the same for any number of rows.
    """
    check_device(x)
    out = check_matmul(x, weight, bias, out, add)
    rows, (outputs, inputs) = len(x), weight.shape
    if not rows or not outputs:
        return out
    tile = _tile(x.dtype)
    parts = max(1, triton.cdiv(inputs, PART))
    across = triton.cdiv(outputs, tile.outputs)
    spread = parts > 1 and rows <= _FEW_ROWS and across < 2 * device_of(x.device).processors
    room = parts * rows * outputs if spread else 0
    sums = torch.empty(room, dtype=torch.float32, device=x.device)
    biased = bias is not None
    _product[(triton.cdiv(rows, tile.rows) * across, parts if spread else 1)](
        x, weight, bias if biased else x, out, sums, rows, outputs, inputs, 1 if spread else parts,
        x.stride(0), weight.stride(0), out.stride(0),
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, LENGTH=PART, SPREAD=spread,
        GROUP=_GROUP, BIASED=biased, ADD=add, PRECISION="ieee",
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if spread:
        gather(sums, bias, out, parts, add=add)
    return out


def gather(sums: Tensor, bias: Tensor | None, out: Tensor, parts: int, *, add: bool) -> None:
    """out, (T, outputs), from the sums of its parts, (parts, T, outputs) float32."""
    rows, outputs = out.shape
    biased = bias is not None
    _gather[(triton.cdiv(outputs, 1024), rows)](
        sums, bias if biased else sums, out, rows, outputs, out.stride(0),
        PARTS=parts, OUTPUTS=1024, BIASED=biased, ADD=add, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _tile(dtype: torch.dtype) -> ProductTile:
    """The tile of a program. `wgmma` takes at least 64 rows. A block of weights is 16 KiB; the sums of a tile
    and of its part take 128 registers a thread. float32 has no exact tensor cores, so its tile is smaller."""
    if dtype == torch.float32:
        return ProductTile(16, 64, 4, 3, inputs=32)
    return ProductTile(64, 128, 4, 4, inputs=64)
