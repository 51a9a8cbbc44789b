"""Products with float8 weights and activations rounded to float8 (W8A8): two launches.

`_round` rounds x to float8_e4m3fn with a factor for each row or, before weights with groups of inputs, for
each row and block of `QuantisedWeight.block` inputs. `_float8_product` multiplies the float8 numbers on
tensor cores: W is the left operand, so that few rows fill an instruction's narrow side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import check_float8
from ramify.kernels.triton.matmul import PART, finish, gather, place
from ramify.kernels.triton.plan.attention_config import device_of
from ramify.kernels.triton.quantised import quantised_matmul
from ramify.kernels.triton.tiles.launch import ProductTile, check_device, jit, padded, warps
from ramify.kernels.weights.quantised import QuantisedWeight, Rounded, multiplies_float8

_FEW_ROWS, _SPREAD_ROWS = 16, 64
"""Rows up to which tiles have 16 rows, and up to which parts are spread over programs, as in `quantised`."""
_GROUP = 8
_BLOCK = 4096
"""Inputs that a program rounds at once."""
MOST = tl.constexpr(448.0)
"""The largest number of float8_e4m3fn."""
LEAST = tl.constexpr(1e-20)
"""The lower bound on the maximum of inputs that share a factor: even for zeros the factor must not be 0."""


@jit
def to_float8(x):  # type: ignore[no-untyped-def]
    """float32 to the nearest float8_e4m3fn, ties to even; larger numbers are clamped to ± 448.

    x is rounded by float32 additions, so that the conversion is exact: Triton's interpreter converts other
    numbers wrongly. A step is the distance of neighbouring float8 numbers at x's exponent, at least 2**-9.
    Adding 1.5 * 2**23 steps to x leaves no bits below one step.
    """
    x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) >> 23 & 255, 121)
    steps = (exponent + 20 << 23 | 0x400000).to(tl.float32, bitcast=True)
    return (x + steps - steps).to(tl.float8e4nv)


@jit
def _whole_factor(x_at, inputs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        x = tl.load(x_at + start + column, mask=start + column < inputs, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(x))
    return tl.maximum(tl.max(top, 0), LEAST)


@jit(do_not_specialize=["rows"])
def _round(  # type: ignore[no-untyped-def]
    x_ptr, number_ptr, factor_ptr, rows, inputs, padded, x_row,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (r, i): round the i-th BLOCK inputs of row r, with a factor for each GROUP inputs. With GROUP 0
    program (r, 0) rounds the whole row, with one factor."""
    row = tl.program_id(0).to(tl.int64)
    x_at, number_at = x_ptr + row * x_row, number_ptr + row * padded
    column = tl.arange(0, BLOCK)
    if GROUP == 0:
        top = _whole_factor(x_at, inputs, BLOCK)
        tl.store(factor_ptr + row, tl.div_rn(top, MOST))
        inverse = tl.div_rn(MOST, top)
        for start in range(0, padded, BLOCK):
            x = tl.load(x_at + start + column, mask=start + column < inputs, other=0.0).to(tl.float32)
            tl.store(number_at + start + column, to_float8(x * inverse), mask=start + column < padded)
    else:
        column += tl.program_id(1) * BLOCK
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        x = tl.load(x_at + column, mask=column < inputs, other=0.0).to(tl.float32)
        x = tl.reshape(x, [BLOCK // GROUP, GROUP])
        top = tl.maximum(tl.max(tl.abs(x), 1), LEAST)
        tl.store(factor_ptr + group * rows + row, tl.div_rn(top, MOST), mask=group * GROUP < padded)
        numbers = tl.reshape(to_float8(x * tl.div_rn(MOST, top)[:, None]), [BLOCK])
        tl.store(number_at + column, numbers, mask=column < padded)


@jit
def _part(  # type: ignore[no-untyped-def]
    x_at, number_at, x_factor_at, factor_at, low, high, rows, outputs, per, row_there, output_there,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """The sum over inputs [low, high), (OUTPUTS, ROWS), a block at a time in ascending order."""
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    byte = tl.arange(0, BYTES)
    stride = tl.cast(outputs, tl.int64) * BYTES
    for start in range(low, high, BYTES):
        block = start // BYTES
        numbers = tl.load(number_at + block * stride, mask=output_there[:, None], other=0.0)
        x = tl.load(x_at + start + byte[:, None], mask=row_there[None, :], other=0.0)
        if GROUPED:
            x_factor = tl.load(x_factor_at + block * rows, mask=row_there, other=0.0)
            factor = tl.load(factor_at + block // per * outputs, mask=output_there, other=0.0).to(tl.float32)
            total += tl.dot(numbers, x) * factor[:, None] * x_factor[None, :]
        else:
            # Tensor cores of sm_90 keep some 14 bits of a sum: each block goes to a float32 register.
            total = tl.dot(numbers, x, total, max_num_imprecise_acc=BYTES)
    if not GROUPED:
        x_factor = tl.load(x_factor_at, mask=row_there, other=0.0)
        factor = tl.load(factor_at, mask=output_there, other=0.0).to(tl.float32)
        total = total * factor[:, None] * x_factor[None, :]
    return total


@jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["parts", "per"])
def _float8_product(  # type: ignore[no-untyped-def]
    x_ptr, number_ptr, x_factor_ptr, factor_ptr, bias_ptr, out_ptr, part_ptr,
    rows, outputs, padded, per, length, parts, out_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, SPREAD: tl.constexpr,
    GROUP: tl.constexpr, GROUPED: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One tile of the result; with SPREAD its float32 sum over part `program_id(1)` of the inputs. `parts` is
    as in `matmul._product`; `length` is the number of inputs of a part."""
    row, output = place(tl.program_id(0), rows, outputs, ROWS, OUTPUTS, GROUP)
    row_there, output_there = row < rows, output < outputs
    x_at = x_ptr + row.to(tl.int64)[None, :] * padded
    number_at = number_ptr + output.to(tl.int64)[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    first = tl.program_id(1) * length
    total = _part(
        x_at, number_at, x_factor_ptr + row, factor_ptr + output, first, tl.minimum(first + length, padded),
        rows, outputs, per, row_there, output_there, ROWS, OUTPUTS, BYTES, GROUPED,
    )  # fmt: skip
    if SPREAD:
        at = part_ptr + (tl.program_id(1) * rows + row).to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(at, total, mask=row_there[None, :] & output_there[:, None])
    else:
        for part in range(1, parts):
            low = part * length
            total += _part(
                x_at, number_at, x_factor_ptr + row, factor_ptr + output, low,
                tl.minimum(low + length, padded), rows, outputs, per, row_there, output_there,
                ROWS, OUTPUTS, BYTES, GROUPED,
            )  # fmt: skip
        total = tl.trans(total)
        finish(total, out_ptr, bias_ptr, row, row_there, output, output_there, out_row, BIASED, ADD)


def room_for(x: Tensor, weight: QuantisedWeight) -> Rounded:
    """Memory for the rows of x, rounded for products with `weight`."""
    rows, width, group = len(x), weight.padded, weight.activation_group
    numbers = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    factors = torch.empty(width // group if group else 1, rows, dtype=torch.float32, device=x.device)
    return Rounded(numbers, factors, x.dtype)


def rounded(x: Tensor, weight: QuantisedWeight) -> Rounded:
    """As `reference.float8.rounded`."""
    found, width, group = room_for(x, weight), weight.padded, weight.activation_group
    block = min(_BLOCK, padded(width))
    _round[(len(x), triton.cdiv(width, block) if group else 1)](
        x, found.numbers, found.factors, len(x), weight.inputs, width, x.stride(0), BLOCK=block, GROUP=group,
        num_warps=warps(block, x.element_size(), most=8), enable_fp_fusion=False,
    )  # fmt: skip
    return found


def float8_matmul(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    add: bool = False,
    by_row: bool = False,
) -> Tensor:
    """As `reference.float8.float8_matmul`; `by_row` is as in `quantised_matmul`."""
    check_device(x)
    out = check_float8(x, weight, bias, out, add)
    if not out.numel():
        return out
    return multiply_float8(rounded(x, weight), weight, bias, out=out, add=add, by_row=by_row)


def multiply_float8(
    x: Rounded,
    matrix: QuantisedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    add: bool = False,
    by_row: bool = False,
) -> Tensor:
    """As `reference.float8.multiply_float8`; `by_row` is as in `quantised_matmul`."""
    numbers, factors, _ = x
    rows, outputs = out.shape
    if not rows or not outputs:
        return out
    bytes_, group, device = matrix.block, matrix.activation_group, device_of(out.device)
    tile = _tile(rows, by_row=by_row, shared_bytes=device.shared_bytes)
    length = PART if by_row or rows <= _SPREAD_ROWS else matrix.padded
    parts, across = triton.cdiv(matrix.padded, length), triton.cdiv(outputs, tile.outputs)
    spread = parts > 1 and rows <= _SPREAD_ROWS and across < 2 * device.processors
    room = parts * rows * outputs if spread else 0
    sums = torch.empty(room, dtype=torch.float32, device=out.device)
    biased = bias is not None
    _float8_product[(triton.cdiv(rows, tile.rows) * across, parts if spread else 1)](
        numbers, matrix.numbers.view(torch.float8_e4m3fn), factors, matrix.factors,
        bias if biased else factors, out, sums, rows, outputs, matrix.padded, matrix.group // bytes_, length,
        1 if spread else parts, out.stride(0),
        ROWS=tile.rows, OUTPUTS=tile.outputs, BYTES=bytes_, SPREAD=spread,
        GROUP=_GROUP, GROUPED=group > 0, BIASED=biased, ADD=add,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if spread:
        gather(sums, bias, out, parts, add=add)
    return out


def rounding_matmul(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    add: bool = False,
    by_row: bool = False,
) -> Tensor:
    """`float8_matmul` where `multiplies_float8(weight)`, else `quantised_matmul`."""
    chosen = float8_matmul if multiplies_float8(weight) else quantised_matmul
    return chosen(x, weight, bias, out=out, add=add, by_row=by_row)


def _tile(rows: int, *, by_row: bool, shared_bytes: int) -> ProductTile:
    """The tile of a program. `wgmma` takes at least 64 outputs. The sums of a tile and the sums of its block
    take up to 64 registers a thread each; with `by_row` the sums of a part as well. With `mma.sync`, on
    devices of less shared memory, a tile of 128 rows spills registers."""
    if by_row:
        return ProductTile(64, 128, 8, 3)
    if rows <= _FEW_ROWS:
        return ProductTile(16, 64, 4, 4)
    if rows <= _SPREAD_ROWS:
        return ProductTile(64, 64, 4, 3)
    return ProductTile(128, 128, 8, 4) if shared_bytes > 200_000 else ProductTile(64, 128, 8, 4)
