"""Functions of rows whose bits depend on the row alone: norms, gated activations, soft caps, log-sums.

    for row: for vector of the row: y = silu(x) · up, gelu(x) · up, or cap · tanh(x / cap)
    for token, head: y = x · weight / sqrt(mean(x²) + eps)
    for row: m = max(x);  for block of 1,024: total (float64) += Σ exp(x - m);  y = m + log(total)

Memory: rows as torch has them, gate before up projection. Reading and writing them bounds the speed.

torch computes the whole vectors of a thread's share by one formula and the remaining numbers by another, and
divides the sum of a single long row among threads. So its last bits depend on the number of rows.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.arguments.checks import check_gated, check_norm
from ramify.kernels.arguments.sampling_inputs import check_logits
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import callback, carray, compiled, part
from ramify.kernels.cpu.codegen.functions import run_body
from ramify.kernels.cpu.codegen.simd import LANES, LOG2_E
from ramify.kernels.cpu.parts.norm import normalise
from ramify.kernels.machine.records import Arena, ThreadCall, record

SILU, GELU, SOFT_CAP, LOG_SUM = range(4)

FRAME = record(
    "kind", "x", "x_row", "out", "out_row", "bf16", "rows",
    "size",  # numbers of a row of x that are read; half as many for gates
    "threads", "team", "body", "arena", "arena_bytes",
    floats=("cap",),
)  # fmt: skip
"""The arguments of a call, which its threads share. The number of the next row is at `arena`."""
BLOCK = 1024
"""Exponentials of a block, which are added in float32; the sums of blocks are added in float64."""
SERIAL_NUMBERS = 1 << 14
"""Calls of fewer numbers run on one thread: a second thread would not help."""


@part
def _sigmoid_scaled(x, slope):  # type: ignore[no-untyped-def]
    """x / (1 + 2**slope), with `slope` clamped to 127, the largest exponent that `exp2` takes."""
    power = vl.minimum(slope, vl.splat_f32(127.0))
    return vl.div(x, vl.add(vl.splat_f32(1.0), vl.exp2(power)))


@part
def _gelu(x):  # type: ignore[no-untyped-def]
    """x (1 + tanh u) / 2 = x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x³)."""
    cube = vl.mul(vl.mul(x, x), x)
    inner = vl.fma(vl.splat_f32(0.044715), cube, x)
    return _sigmoid_scaled(x, vl.mul(inner, vl.splat_f32(-2.0 * 0.7978845608028654 * LOG2_E)))


@part
def _value(frame, x, through):  # type: ignore[no-untyped-def]
    if frame.kind == SILU:
        return vl.mul(_sigmoid_scaled(x, vl.mul(x, vl.splat_f32(-LOG2_E))), through)
    if frame.kind == GELU:
        return vl.mul(_gelu(x), through)
    cap = vl.splat_f32(frame.cap)
    return vl.mul(vl.tanh(vl.div(x, cap)), cap)


@part
def _row(frame, row):  # type: ignore[no-untyped-def]
    size, bf16 = 2 if frame.bf16 else 4, frame.bf16 != 0
    at, to = frame.x + row * frame.x_row, frame.out + row * frame.out_row
    up = at if frame.kind == SOFT_CAP else at + size * frame.size
    whole = frame.size - frame.size % LANES
    for i in range(0, whole, LANES):
        y = _value(frame, vl.load_as(at + size * i, bf16), vl.load_as(up + size * i, bf16))
        vl.store_as(to + size * i, y, bf16)
    for i in range(whole, frame.size):  # by the same operations, on a vector of equal numbers
        x, through = vl.read_as(at + size * i, bf16), vl.read_as(up + size * i, bf16)
        y = _value(frame, vl.broadcast(x), vl.broadcast(through))
        vl.write_as(to + size * i, vl.first_lane(y), bf16)


@part
def _log_sum(frame, row):  # type: ignore[no-untyped-def]
    """log Σ exp(x) of a row of float32."""
    at, size = frame.x + row * frame.x_row, frame.size
    whole = size - size % LANES
    best = vl.splat_f32(-np.inf)
    for i in range(0, whole, LANES):
        best = vl.maximum(vl.load(at + 4 * i), best)
    top = vl.max_lanes(best)
    for i in range(whole, size):
        top = max(top, vl.read_f32(at + 4 * i))
    if top == -np.inf or top == np.inf:
        return top
    shift, log2_e, total = vl.broadcast(top), vl.splat_f32(LOG2_E), 0.0
    for first in range(0, whole, BLOCK):
        mass = vl.splat_f32(0.0)
        for i in range(first, min(first + BLOCK, whole), LANES):
            mass = vl.add(mass, vl.exp2(vl.mul(vl.sub(vl.load(at + 4 * i), shift), log2_e)))
        total += np.float64(vl.sum_lanes(mass))
    for i in range(whole, size):
        x = vl.broadcast(vl.read_f32(at + 4 * i))
        total += np.float64(vl.first_lane(vl.exp2(vl.mul(vl.sub(x, shift), log2_e))))
    return np.float32(top + math.log(total))


@callback(types.void(types.voidptr))
def _body(data):  # type: ignore[no-untyped-def]
    frame = carray(data, 1, FRAME)[0]
    row = vl.fetch_increment(frame.arena)
    while row < frame.rows:
        if frame.kind == LOG_SUM:
            vl.write_f32(frame.out + row * frame.out_row, _log_sum(frame, row))
        else:
            _row(frame, row)
        row = vl.fetch_increment(frame.arena)


@compiled(types.int64(types.int64))
def _run_rows(call_at):  # type: ignore[no-untyped-def]
    frame = carray(vl.as_pointer(call_at), 1, FRAME)[0]
    vl.write_i64(frame.arena, 0)
    run_body(frame, call_at, frame.threads)
    return 0


NORM = record(
    "x", "x_token", "x_head", "out", "out_token", "out_head",  # addresses, and bytes between tokens and heads
    "weight", "tokens", "heads", "size", "bf16", "weight_bf16",
    floats=("eps",),
)  # fmt: skip


@compiled(types.int64(types.int64))
def _norm_rows(call_at):  # type: ignore[no-untyped-def]
    call = carray(vl.as_pointer(call_at), 1, NORM)[0]
    bf16, weight_bf16 = call.bf16, call.weight_bf16
    for token in range(call.tokens):
        for head in range(call.heads):
            at = call.x + token * call.x_token + head * call.x_head
            to = call.out + token * call.out_token + head * call.out_head
            normalise(at, to, call.weight, call.size, call.eps, bf16, weight_bf16)
    return 0


_arena = Arena(FRAME, _body.address, 64)
_norm = ThreadCall(NORM)


def _compute(kind: int, x: Tensor, out: Tensor, size: int, cap: float = 0.0) -> Tensor:
    """Run the operation `kind` and return `out`; `size` is as in `FRAME`."""
    rows = len(x)
    if not rows or not size:
        return out
    call, bytes_ = _arena.call, x.element_size()
    call.kind, call.rows, call.size, call.cap, call.bf16 = kind, rows, size, cap, bytes_ == 2
    call.x, call.x_row = x.data_ptr(), bytes_ * x.stride(0)
    call.out, call.out_row = out.data_ptr(), bytes_ * out.stride(0)
    call.threads = 1 if rows * size < SERIAL_NUMBERS else min(rows, torch.get_num_threads())
    _run_rows(_arena.call_at)
    return out


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} is {x.dtype}; here it must be float32 or bfloat16.")


def silu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As `reference.activation.silu_mul`, for float32 and bfloat16."""
    _check_dtype("x", x)
    out = check_gated(x, out)
    return _compute(SILU, x, out, out.shape[1])


def gelu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As `reference.activation.gelu_mul`, for float32 and bfloat16."""
    _check_dtype("x", x)
    out = check_gated(x, out)
    return _compute(GELU, x, out, out.shape[1])


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """As `reference.logits.soft_cap`, for float32 and bfloat16."""
    check_logits(logits)
    _check_dtype("logits", logits)
    return _compute(SOFT_CAP, logits, logits, logits.shape[1], cap)


def log_sum(logits: Tensor) -> Tensor:
    """As `reference.logits.log_sum`, for float32."""
    check_logits(logits)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits are {logits.dtype}; here they must be float32.")
    return _compute(LOG_SUM, logits, torch.empty(len(logits)), logits.shape[1])


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As `reference.norm.rms_norm`."""
    out = check_norm(x, weight, out)
    call, size = _norm.call, x.element_size()
    x_stride, out_stride = x.stride(), out.stride()
    call.x, call.x_token = x.data_ptr(), x_stride[0] * size
    call.out, call.out_token = out.data_ptr(), out_stride[0] * size
    call.tokens, call.heads, call.size, call.x_head, call.out_head = len(x), 1, x.shape[-1], 0, 0
    if len(x_stride) == 3:
        call.heads, call.x_head, call.out_head = x.shape[1], x_stride[1] * size, out_stride[1] * size
    call.weight, call.weight_bf16 = weight.data_ptr(), weight.element_size() == 2
    call.bf16, call.eps = size == 2, eps
    _norm_rows(_norm.call_at)
    return out
