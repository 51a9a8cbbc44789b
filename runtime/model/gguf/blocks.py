"""The quantised blocks of GGUF files as integers and scales, without dequantising them.

Layouts: ggml's `block_q4_0` to `block_q6_K` (ggml-common.h). The resulting `kernels.packed.Rows`
have the same float32 values, bit for bit, as `gguf.quants.dequantize` returns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ramify.kernels.packed import Rows

Blocks = NDArray[np.uint8]
"""(outputs, blocks of a row, bytes of a block)"""


def rows_of(raw: Blocks, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Rows | None:
    """The matrix of `shape` in the bytes `raw`; None for a block type without a packed layout."""
    reader = _READERS.get(kind)
    if reader is None or len(shape) != 2:
        return None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    numbers, factors, offsets = reader(raw.reshape(shape[0], shape[1] // block, block_bytes))
    flat = torch.from_numpy(np.ascontiguousarray(numbers.reshape(shape)))
    return Rows(flat, _scales(factors, shape), None if offsets is None else _scales(offsets, shape))


Read = tuple[NDArray[np.generic], NDArray[np.floating], NDArray[np.floating] | None]
"""Numbers, factors and offsets, in the order of the inputs."""


def _scales(scales: NDArray[np.floating], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(scales.reshape(shape[0], -1)))


def _half(blocks: Blocks, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _nibbles(quants: Blocks) -> Blocks:
    """The low four bits of all bytes, then the high four bits."""
    return np.concatenate([quants & 15, quants >> 4], -1)


def _q4_0(blocks: Blocks) -> Read:
    factors = _half(blocks, 0)
    return _nibbles(blocks[..., 2:]), factors, factors * np.float16(-8)  # a power of two: exact


def _q4_1(blocks: Blocks) -> Read:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Read:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little") << 4
    return (_nibbles(blocks[..., 6:]) | fifth).view(np.int8) - np.int8(16), _half(blocks, 0), None


def _q8_0(blocks: Blocks) -> Read:
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0), None


def _q4_k(blocks: Blocks) -> Read:
    """Eight groups of 32. Twelve bytes hold eight factors and eight offsets of six bits each."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    factors = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    scale, offset_scale = _half(blocks, 0).astype(np.float32), _half(blocks, 2).astype(np.float32)
    return _nibbles(pairs), scale * factors.astype(np.float32), -(offset_scale * offsets.astype(np.float32))


def _q6_k(blocks: Blocks) -> Read:
    """Two halves of 128 numbers, with four bits from `low` and two from `high`; sixteen groups of 16."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    upper = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(*low.shape[:3], 128)
    numbers = (_nibbles(low) | upper << 4).view(np.int8) - np.int8(32)
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return numbers, _half(blocks, 208).astype(np.float32) * factors, None


_READERS: dict[GGMLQuantizationType, Callable[[Blocks], Read]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
