"""RMS normalisation: a pass for the sum of squares and a pass to scale, with the row in the L1 cache."""

from __future__ import annotations

import numpy as np
from numba import types
from torch import Tensor

from ramify.kernels.checks import check_norm
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import compiled, part
from ramify.kernels.cpu.codegen.simd import LANES


@part
def inverse_rms(at, size, eps, bf16):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(x²) + eps) of the row of `size` numbers at an address."""
    bytes_ = 2 if bf16 else 4
    wide = size - size % LANES
    pairs = size - size % (2 * LANES)
    even, odd = vl.splat_f32(0.0), vl.splat_f32(0.0)
    rest = np.float32(0.0)
    for i in range(0, pairs, 2 * LANES):
        a, b = vl.load_as(at + bytes_ * i, bf16), vl.load_as(at + bytes_ * (i + LANES), bf16)
        even, odd = vl.fma(a, a, even), vl.fma(b, b, odd)
    for i in range(pairs, wide, LANES):
        a = vl.load_as(at + bytes_ * i, bf16)
        even = vl.fma(a, a, even)
    for i in range(wide, size):
        x = vl.read_as(at + bytes_ * i, bf16)
        rest += x * x
    mean = np.float64(vl.sum_lanes(vl.add(even, odd)) + rest) / size
    return np.float32(1.0 / np.sqrt(mean + eps))


@part
def normalise(at, to, weight, size, eps, bf16, weight_bf16):  # type: ignore[no-untyped-def]
    """Write the norm of the row of `size` numbers at `at` to `to`, which may be `at`.

    bf16, weight_bf16 : whether the row and the weight are bfloat16; float32 otherwise
    """
    bytes_, weight_bytes = 2 if bf16 else 4, 2 if weight_bf16 else 4
    wide = size - size % LANES
    factor = inverse_rms(at, size, eps, bf16)
    scale = vl.broadcast(factor)
    for i in range(0, wide, LANES):
        y = vl.mul(vl.load_as(at + bytes_ * i, bf16), scale)
        y = vl.mul(y, vl.load_as(weight + weight_bytes * i, weight_bf16))
        vl.store_as(to + bytes_ * i, y, bf16)
    for i in range(wide, size):
        number = vl.read_as(at + bytes_ * i, bf16) * factor
        vl.write_as(to + bytes_ * i, number * vl.read_as(weight + weight_bytes * i, weight_bf16), bf16)


@compiled(types.int64(*[types.int64] * 12, types.float64))
def _run(  # type: ignore[no-untyped-def]
    x, x_token, x_head, out, out_token, out_head, weight, tokens, heads, size, bf16, weight_bf16, eps
):
    for token in range(tokens):
        for head in range(heads):
            at, to = x + token * x_token + head * x_head, out + token * out_token + head * out_head
            normalise(at, to, weight, size, eps, bf16, weight_bf16)
    return 0


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As `reference.norm.rms_norm`."""
    out = check_norm(x, weight, out)
    size = x.element_size()
    x_stride, out_stride = x.stride(), out.stride()
    two = len(x_stride) == 2
    _run(
        x.data_ptr(), x_stride[0] * size, 0 if two else x_stride[1] * size,
        out.data_ptr(), out_stride[0] * size, 0 if two else out_stride[1] * size,
        weight.data_ptr(), x.shape[0], 1 if two else x.shape[1], x.shape[-1],
        size == 2, weight.element_size() == 2, eps,
    )  # fmt: skip
    return out
