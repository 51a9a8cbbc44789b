"""The RMS norm of one row: a pass for the sum of squares, a pass to scale, with the row in the L1 cache."""

from __future__ import annotations

import numpy as np

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import part
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
