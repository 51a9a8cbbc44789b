"""Norms and gated activations that round their result to float8, for products with float8 weights.

A launch less before each product. The numbers, factors and bits are those of the two launches that each
replaces.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import ALL_DTYPES, check_add_norm, check_gated, check_norm
from ramify.kernels.triton.activation import gated
from ramify.kernels.triton.float8 import LEAST, MOST, room_for, to_float8
from ramify.kernels.triton.norm import rows_of
from ramify.kernels.triton.tiles.dependent import wait
from ramify.kernels.triton.tiles.launch import check_device, jit, padded, warps
from ramify.kernels.weights.quantised import QuantisedWeight, Rounded

_BLOCK = 4096
"""Results that a program rounds at once."""


@jit
def _store(  # type: ignore[no-untyped-def]
    y, number_ptr, factor_ptr, row, column, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Round y, (ROWS, BLOCK), with a factor for each GROUP columns; `column` begins at a group's first."""
    there = (row < rows)[:, None] & (column < WIDTH)[None, :]
    y = tl.reshape(y, [ROWS, BLOCK // GROUP, GROUP])
    top = tl.maximum(tl.max(tl.abs(y), 2), LEAST)
    group = tl.min(column, 0) // GROUP + tl.arange(0, BLOCK // GROUP)
    factor_at = factor_ptr + group.to(tl.int64)[None, :] * rows + row[:, None]
    known = (row < rows)[:, None] & (group * GROUP < WIDTH)[None, :]
    tl.store(factor_at, tl.div_rn(top, MOST), mask=known)
    numbers = tl.reshape(to_float8(y * tl.div_rn(MOST, top)[:, :, None]), [ROWS, BLOCK])
    tl.store(number_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], numbers, mask=there)


@jit(do_not_specialize=["rows"])
def _norm_float8(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, number_ptr, factor_ptr, rows, x_token, residual_token, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)
    in_bounds = (row < rows)[:, None] & (column < SIZE)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    total = tl.load(x_ptr + token * x_token + column[None, :], mask=in_bounds, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual_ptr + token * residual_token + column[None, :]
        stored = total + tl.load(residual_at, mask=in_bounds, other=0.0).to(tl.float32)
        stored = stored.to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, stored, mask=in_bounds)
        total = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=1) / SIZE + eps)
    y = (total * scale[:, None] * weight[None, :]).to(x_ptr.dtype.element_ty).to(tl.float32)
    # BLOCK columns hold the row: a factor for all inputs is that of a group of BLOCK.
    _store(y, number_ptr, factor_ptr, row, column, rows, WIDTH, ROWS, BLOCK, GROUP if GROUP else BLOCK)


@jit
def _results(  # type: ignore[no-untyped-def]
    x_at, column, SIZE: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    gate = tl.load(x_at + column, mask=column < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x_at + SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return gated(gate, up, GELU).to(x_at.dtype.element_ty).to(tl.float32)


@jit(do_not_specialize=["rows"])
def _gate_float8(  # type: ignore[no-untyped-def]
    x_ptr, number_ptr, factor_ptr, rows, x_row,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (r, i): the i-th BLOCK results of row r, with a factor for each GROUP. With GROUP 0 program
    (r, 0) computes the row's results twice: for the factor of all, and to round them."""
    token = tl.program_id(0)
    x_at = x_ptr + token.to(tl.int64) * x_row
    wait(DEPENDENT)
    if GROUP == 0:
        column = tl.arange(0, BLOCK)
        number_at = number_ptr + token.to(tl.int64) * WIDTH
        top = tl.zeros([BLOCK], tl.float32)
        for start in range(0, SIZE, BLOCK):
            top = tl.maximum(top, tl.abs(_results(x_at, start + column, SIZE, GELU)))
        most = tl.maximum(tl.max(top, 0), LEAST)
        tl.store(factor_ptr + token, tl.div_rn(most, MOST))
        inverse = tl.div_rn(MOST, most)
        for start in range(0, WIDTH, BLOCK):
            numbers = to_float8(_results(x_at, start + column, SIZE, GELU) * inverse)
            tl.store(number_at + start + column, numbers, mask=start + column < WIDTH)
    else:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        y = _results(x_at, column, SIZE, GELU)
        row = token + tl.arange(0, 1)
        _store(y[None, :], number_ptr, factor_ptr, row, column, rows, WIDTH, 1, BLOCK, GROUP)


def norm_float8(
    x: Tensor,
    weight: Tensor,
    eps: float,
    matrix: QuantisedWeight,
    *,
    residual: Tensor | None = None,
    dependent: bool = False,
) -> Rounded:
    """As `reference.float8.norm_float8`; `dependent` as in `norm.rms_norm`."""
    check_device(x)
    if residual is None:
        check_norm(x, weight, x, dtypes=ALL_DTYPES)
    else:
        check_add_norm(x, residual, weight, x)
    _check_width(x.shape[1], matrix)
    found, block = room_for(x, matrix), padded(matrix.padded)
    share, number = rows_of(block, x)
    added = x if residual is None else residual
    _norm_float8[(triton.cdiv(len(x), share),)](
        x, added, weight, found.numbers, found.factors, len(x), x.stride(0), added.stride(0), eps,
        SIZE=x.shape[1], WIDTH=matrix.padded, BLOCK=block, ROWS=share, GROUP=matrix.activation_group,
        ADD=residual is not None, DEPENDENT=dependent, num_warps=number, launch_pdl=dependent,
        enable_fp_fusion=False,
    )  # fmt: skip
    return found


def gate_float8(
    x: Tensor, matrix: QuantisedWeight, *, gelu: bool = False, dependent: bool = False
) -> Rounded:
    """As `reference.float8.gate_float8`; `dependent` as in `norm.rms_norm`."""
    check_device(x)
    check_gated(x, x[:, : x.shape[1] // 2])
    _check_width(x.shape[1] // 2, matrix)
    found, width = room_for(x, matrix), matrix.padded
    group = matrix.activation_group
    block = min(_BLOCK, padded(width))
    _gate_float8[(len(x), triton.cdiv(width, block) if group else 1)](
        x, found.numbers, found.factors, len(x), x.stride(0),
        SIZE=matrix.inputs, WIDTH=width, BLOCK=block, GROUP=group, GELU=gelu,
        DEPENDENT=dependent, num_warps=warps(block, x.element_size(), most=8), launch_pdl=dependent,
        enable_fp_fusion=False,
    )  # fmt: skip
    return found


def _check_width(found: int, matrix: QuantisedWeight) -> None:
    if found != matrix.inputs:
        raise ValueError(f"rows have {found} results; the matrix takes {matrix.inputs}.")
