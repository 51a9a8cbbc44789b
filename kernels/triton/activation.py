"""Gated activations of SwiGLU and GEGLU: each number is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import check_gated
from ramify.kernels.triton.tiles.dependent import wait
from ramify.kernels.triton.tiles.launch import check_device, padded, warps

_BLOCK = 2048
"""Results of a program: with 16-bit numbers, 128 threads with four loads of 16 bytes each."""


@triton.jit
def gated(gate, up, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """gate · sigmoid(s) · up. s is the gate for silu, a cubic polynomial of the gate for tanh gelu."""
    s = gate
    if GELU:
        s = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    power = tl.exp(-tl.abs(s))
    return gate * tl.where(s >= 0.0, 1.0, power) / (1.0 + power) * up


@triton.jit
def _gated_mul(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, x_row, out_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    GELU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    column = program % PARTS * BLOCK + tl.arange(0, BLOCK)
    in_bounds = column < SIZE
    wait(DEPENDENT)
    gate = tl.load(x_ptr + row * x_row + column, mask=in_bounds).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + SIZE + column, mask=in_bounds).to(tl.float32)
    y = gated(gate, up, GELU)
    tl.store(out_ptr + row * out_row + column, y.to(out_ptr.dtype.element_ty), mask=in_bounds)


def silu_mul(x: Tensor, *, out: Tensor | None = None, dependent: bool = False) -> Tensor:
    """As `reference.activation.silu_mul`; `dependent` as in `norm.rms_norm`."""
    return _gated(x, out, gelu=False, dependent=dependent)


def gelu_mul(x: Tensor, *, out: Tensor | None = None, dependent: bool = False) -> Tensor:
    """As `reference.activation.gelu_mul`; `dependent` as in `norm.rms_norm`."""
    return _gated(x, out, gelu=True, dependent=dependent)


def _gated(x: Tensor, out: Tensor | None, *, gelu: bool, dependent: bool) -> Tensor:
    check_device(x)
    out = check_gated(x, out)
    size = x.shape[1] // 2
    block = min(_BLOCK, padded(size))
    parts = triton.cdiv(size, block)
    _gated_mul[(len(x) * parts,)](
        x, out, x.stride(0), out.stride(0), SIZE=size, BLOCK=block, PARTS=parts, GELU=gelu,
        DEPENDENT=dependent, num_warps=warps(block, x.element_size(), most=8), launch_pdl=dependent,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
