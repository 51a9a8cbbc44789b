"""RMS normalisation, alone and with the residual addition before it: each row is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import ALL_DTYPES, check_add_norm, check_norm
from ramify.kernels.triton.tiles.dependent import wait
from ramify.kernels.triton.tiles.launch import check_device, padded, warps

LARGEST = 65536
"""Most numbers of a row: 64 a thread in a program of 32 warps."""
_BLOCK = 2048
"""Numbers of a program of several short rows: the same for any T, so that T cannot change a bit."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, rows, heads, x_token, x_head, out_token, out_head, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program i: rows i * ROWS and on, row r being head r % heads of token r // heads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_bounds = (row < rows)[:, None] & (column < SIZE)[None, :]
    x_at = x_ptr + (token * x_token + head * x_head)[:, None] + column[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE).to(tl.float32)
    wait(DEPENDENT)
    x = tl.where(in_bounds, tl.load(x_at, mask=in_bounds).to(tl.float32), 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    y = x * scale[:, None] * weight[None, :]
    out_at = out_ptr + (token * out_token + head * out_head)[:, None] + column[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=in_bounds)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, rows, x_token, residual_token, out_token, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)
    in_bounds = (row < rows)[:, None] & (column < SIZE)[None, :]
    residual_at = residual_ptr + token * residual_token + column[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE).to(tl.float32)
    wait(DEPENDENT)
    x = tl.load(x_ptr + token * x_token + column[None, :], mask=in_bounds).to(tl.float32)
    total = x + tl.load(residual_at, mask=in_bounds).to(tl.float32)
    stored = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, stored, mask=in_bounds)
    total = tl.where(in_bounds, stored.to(tl.float32), 0.0)
    scale = tl.rsqrt(tl.sum(total * total, axis=1) / SIZE + eps)
    y = total * scale[:, None] * weight[None, :]
    out_at = out_ptr + token * out_token + column[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=in_bounds)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, dependent: bool = False
) -> Tensor:
    """As `reference.norm.rms_norm`; float16 as well. With `dependent` the launch starts before the end of the
    one before it (`tiles.dependent`)."""
    check_device(x)
    out = check_norm(x, weight, out, dtypes=ALL_DTYPES)
    heads, size = 1 if x.dim() == 2 else x.shape[1], x.shape[-1]
    rows, block, share, number = _shape(len(x) * heads, x)
    x_head, out_head = (x.stride(1), out.stride(1)) if x.dim() == 3 else (0, 0)
    _rms_norm[(triton.cdiv(rows, share),)](
        x, weight, out, rows, heads, x.stride(0), x_head, out.stride(0), out_head, eps,
        SIZE=size, BLOCK=block, ROWS=share, DEPENDENT=dependent, num_warps=number, launch_pdl=dependent,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """As `reference.norm.add_rms_norm`; `dependent` as in `rms_norm`."""
    check_device(x)
    out = check_add_norm(x, residual, weight, out)
    rows, block, share, number = _shape(len(x), x)
    _add_rms_norm[(triton.cdiv(rows, share),)](
        x, residual, weight, out, rows, x.stride(0), residual.stride(0), out.stride(0), eps,
        SIZE=x.shape[1], BLOCK=block, ROWS=share, DEPENDENT=dependent, num_warps=number,
        launch_pdl=dependent, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _shape(rows: int, x: torch.Tensor) -> tuple[int, int, int, int]:
    """The number of rows, the numbers of a padded row, the rows of a program, and its warps."""
    size = x.shape[-1]
    if size > LARGEST:
        raise ValueError(f"x has {size} numbers a row; the Triton norm takes at most {LARGEST}.")
    block = padded(size)
    return rows, block, *rows_of(block, x)


def rows_of(block: int, x: torch.Tensor) -> tuple[int, int]:
    """The rows of a program, padded to `block` numbers each, and its warps."""
    share = max(1, _BLOCK // block)
    return share, warps(block * share, x.element_size(), most=32)
