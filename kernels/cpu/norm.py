"""RMS normalisation: one pass for the sum of squares, one to scale; a row stays in the first-level cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from torch import Tensor

from ramify.kernels.checks import check_norm
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import compiled, part, sources
from ramify.kernels.cpu.codegen.simd import LANES


@part
def inverse_rms(at, size, eps, bf16):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(x²) + eps) of the row of `size` numbers at an address."""
    wide = size - size % LANES
    pairs = size - size % (2 * LANES)
    even, odd = vl.splat_f32(0.0), vl.splat_f32(0.0)
    rest = np.float32(0.0)
    if bf16:
        for i in range(0, pairs, 2 * LANES):
            a, b = vl.load_bf16(at + 2 * i), vl.load_bf16(at + 2 * (i + LANES))
            even, odd = vl.fma(a, a, even), vl.fma(b, b, odd)
        for i in range(pairs, wide, LANES):
            a = vl.load_bf16(at + 2 * i)
            even = vl.fma(a, a, even)
        for i in range(wide, size):
            rest += vl.read_bf16(at + 2 * i) * vl.read_bf16(at + 2 * i)
    else:
        for i in range(0, pairs, 2 * LANES):
            a, b = vl.load(at + 4 * i), vl.load(at + 4 * (i + LANES))
            even, odd = vl.fma(a, a, even), vl.fma(b, b, odd)
        for i in range(pairs, wide, LANES):
            a = vl.load(at + 4 * i)
            even = vl.fma(a, a, even)
        for i in range(wide, size):
            rest += vl.read_f32(at + 4 * i) * vl.read_f32(at + 4 * i)
    mean = np.float64(vl.sum_lanes(vl.add(even, odd)) + rest) / size
    return np.float32(1.0 / np.sqrt(mean + eps))


@part
def normalise(at, to, weight, size, eps, bf16):  # type: ignore[no-untyped-def]
    """One row of `size` numbers, from one place to another (or the same)."""
    wide = size - size % LANES
    factor = inverse_rms(at, size, eps, bf16)
    scale = vl.broadcast(factor)
    if bf16:
        for i in range(0, wide, LANES):
            y = vl.mul(vl.mul(vl.load_bf16(at + 2 * i), scale), vl.load_bf16(weight + 2 * i))
            vl.store_bf16(to + 2 * i, y)
        for i in range(wide, size):
            vl.write_bf16(to + 2 * i, vl.read_bf16(at + 2 * i) * factor * vl.read_bf16(weight + 2 * i))
    else:
        for i in range(0, wide, LANES):
            vl.store(to + 4 * i, vl.mul(vl.mul(vl.load(at + 4 * i), scale), vl.load(weight + 4 * i)))
        for i in range(wide, size):
            vl.write_f32(to + 4 * i, vl.read_f32(at + 4 * i) * factor * vl.read_f32(weight + 4 * i))


@part
def _normalise_by_f32(at, to, weight, size, eps):  # type: ignore[no-untyped-def]
    """As `normalise`: one bfloat16 row, with a float32 weight."""
    wide = size - size % LANES
    factor = inverse_rms(at, size, eps, True)
    scale = vl.broadcast(factor)
    for i in range(0, wide, LANES):
        vl.store_bf16(to + 2 * i, vl.mul(vl.mul(vl.load_bf16(at + 2 * i), scale), vl.load(weight + 4 * i)))
    for i in range(wide, size):
        vl.write_bf16(to + 2 * i, vl.read_bf16(at + 2 * i) * factor * vl.read_f32(weight + 4 * i))


def _build(sources: str) -> Any:
    @compiled(types.int64(*[types.int64] * 12, types.float64))
    def run(  # type: ignore[no-untyped-def]
        x, x_token, x_head, out, out_token, out_head, weight, tokens, heads, size, bf16, by_f32, eps
    ):
        sources  # noqa: B018
        for token in range(tokens):
            for head in range(heads):
                at, to = x + token * x_token + head * x_head, out + token * out_token + head * out_head
                if bf16 and by_f32:
                    _normalise_by_f32(at, to, weight, size, eps)
                else:
                    normalise(at, to, weight, size, eps, bf16)
        return 0

    return run


_run = _build(sources())


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As `reference.norm.rms_norm`, whose docstring is the contract."""
    out = check_norm(x, weight, out)
    size = x.element_size()
    x_stride, out_stride = x.stride(), out.stride()
    two = len(x_stride) == 2
    _run(
        x.data_ptr(), x_stride[0] * size, 0 if two else x_stride[1] * size,
        out.data_ptr(), out_stride[0] * size, 0 if two else out_stride[1] * size,
        weight.data_ptr(), x.shape[0], 1 if two else x.shape[1], x.shape[-1],
        size == 2, weight.element_size() == 4, eps,
    )  # fmt: skip
    return out
