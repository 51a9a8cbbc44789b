"""The quantised blocks of GGUF files as integers and scales.

Layouts: ggml's `block_q4_0` to `block_q6_K` (ggml-common.h). Block types without a reader here are
dequantised in chunks, and the integers of each group are recovered from the values. The resulting
`kernels.weights.rows.Rows` have the same float32 values, bit for bit, as `gguf.quants.dequantize` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4, dequantize
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.cpu.parts.packing import nibbles
from ramify.kernels.weights.rows import NumbersAt, Rows, Stored, Verbatim

CHUNK = 1 << 19
"""Elements dequantised at once. A model of 135M parameters takes 0.25 s in chunks of this size, and 1.2 s by
whole tensors, over which `gguf` loops sixteen rows at a time."""

Blocks = NDArray[np.uint8]
"""(outputs, blocks of a row, bytes of a block)"""


def rows_of(raw: Blocks, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Rows | None:
    """The matrix of `shape` stored in the bytes `raw`; None for a block type without a packed layout."""
    if len(shape) != 2 or not (kind in _GROUPS or kind in _READERS or kind in _VERBATIM):
        return None
    data = torch.from_numpy(raw.reshape(shape[0], -1))
    return Rows.from_stored(Stored((data,), *_decoder(kind)))


@functools.cache
def _decoder(kind: GGMLQuantizationType) -> tuple[Callable[[Tensor], Rows], Verbatim | None]:
    """The functions `decode` and `verbatim` of a type's `Stored`. Cached, since rows with the same functions
    can be joined."""
    verbatim = _VERBATIM.get(kind)
    table = torch.tensor(_TABLES[kind], dtype=torch.int8) if kind in _TABLES else None

    def split(data: Tensor) -> Blocks:
        return data.numpy().reshape(len(data), -1, GGML_QUANT_SIZES[kind][1])

    def laid(scales: Scales, count: int) -> tuple[Tensor, Tensor | None]:
        factors, offsets = (
            None if part is None else torch.from_numpy(np.ascontiguousarray(part.reshape(count, -1)))
            for part in scales
        )
        assert factors is not None
        return factors.bfloat16() if kind in _POWERS else factors, offsets

    def decode(data: Tensor) -> Rows:
        numbers, scales = _read(split(data), kind)
        flat = torch.from_numpy(np.ascontiguousarray(numbers.reshape(len(data), -1)))
        return Rows(flat, *laid(scales, len(data)), table)

    if verbatim is None:
        return decode, None
    numbers_at, read_scales = verbatim
    return decode, Verbatim(numbers_at, lambda data: laid(read_scales(split(data)), len(data)))


def floats(blocks: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """The dequantised values of (blocks, bytes), flat."""
    # `dequantize` handles sixteen rows at a time: here one iteration does sixteen long rows.
    rows = 16 if len(blocks) % 16 == 0 else 1
    return dequantize(blocks.reshape(rows, -1), kind).reshape(-1)


def _int8_numbers(
    blocks: NDArray[np.uint8], kind: GGMLQuantizationType
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """The int8 numbers and scales of (blocks, bytes), dequantised `CHUNK` elements at a time."""
    block, group = GGML_QUANT_SIZES[kind][0], _GROUPS[kind]
    numbers = np.empty((len(blocks) * block // group, group), np.int8)
    factors = np.empty(len(numbers), np.float32)
    per_chunk = CHUNK // block
    done = 0
    for start in range(0, len(blocks), per_chunk):
        values = floats(blocks[start : start + per_chunk], kind).reshape(-1, group)
        part = slice(done, done + len(values))
        numbers[part], factors[part] = _integers(values)
        done += len(values)
    return numbers, factors


def _integers(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(groups, inputs) as int8 numbers and one scale for each group.

    Example: 0.75, -0.5, 0, 1.25 become 3, -2, 0, 5 with the scale 0.25, their greatest common divisor. If the
    values of a group are not multiples, from -127 to 127 times, of one scale, they are rounded to steps of
    1/127 of the largest magnitude.
    """
    largest = np.abs(values).max(-1)
    # After this shift every float32 of at least 1/128 of the largest is a whole number.
    shift = 31 - np.frexp(largest)[1]
    with np.errstate(invalid="ignore"):  # a file may hold infinite scales; its factors are NaN then
        shifted = np.ldexp(values, shift[:, None])
        whole = shifted.astype(np.int64)
        divisor = np.gcd.reduce(whole, -1)
        exact = (whole == shifted).all(-1) & (np.abs(whole).max(-1) <= 127 * divisor)
        factors = np.where(exact, np.ldexp(divisor.astype(np.float32), -shift), largest / np.float32(127))
        numbers = np.rint(values / np.where(factors == 0, 1, factors)[:, None]).astype(np.int8)
    return numbers, factors


Scales = tuple[NDArray[np.floating], NDArray[np.floating] | None]
"""The scales and offsets of groups, in the order of the inputs. A value is scale * number + offset."""
Read = tuple[NDArray[np.generic], Scales]
"""Quantised numbers, and their scales and offsets, in the order of the inputs."""


def _read(blocks: Blocks, kind: GGMLQuantizationType) -> Read:
    if kind in _VERBATIM:
        at, scales = _VERBATIM[kind]
        return _numbers(blocks, at), scales(blocks)
    if kind in _GROUPS:
        numbers, factors = _int8_numbers(blocks.reshape(-1, blocks.shape[-1]), kind)
        return numbers, (factors, None)
    return _READERS[kind](blocks)


def _half(blocks: Blocks, at: int) -> NDArray[np.float16]:
    return blocks[..., at : at + 2].view(np.float16).copy()


_TWO_BITS = np.array([0, 2, 4, 6], np.uint8)[:, None]
"""Shifts that extract the four 2-bit numbers of a byte."""


def _nibbles(quants: Blocks) -> Blocks:
    """The low four bits of all bytes, then the high four bits."""
    # One dimension for rows and blocks, one for the parts of a block, if it has several.
    parts = quants.reshape(-1, *([1] if quants.ndim == 3 else []), *quants.shape[2:])
    return nibbles(parts).reshape(*quants.shape[:-1], -1)


def _numbers(blocks: Blocks, at: NumbersAt) -> NDArray[np.generic]:
    runs = blocks[..., at.first : at.first + at.runs * at.size]
    if at.bits == 8:
        return np.ascontiguousarray(runs).view(np.int8)
    return _nibbles(runs.reshape(*blocks.shape[:2], at.runs, at.size))


def _one_factor(blocks: Blocks) -> Scales:
    return _half(blocks, 0), None


def _q4_0_scales(blocks: Blocks) -> Scales:
    factors = _half(blocks, 0)
    offsets = torch.from_numpy(factors) * -8  # exact: a power of two. Much faster than numpy's float16
    return factors, offsets.numpy()


def _factor_and_offset(blocks: Blocks) -> Scales:
    return _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Read:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little") << 4
    return (_nibbles(blocks[..., 6:]) | fifth).view(np.int8) - np.int8(16), _one_factor(blocks)


def _q5_1(blocks: Blocks) -> Read:
    fifth = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little") << 4
    return (_nibbles(blocks[..., 8:]) | fifth).view(np.int8), _factor_and_offset(blocks)


def _q2_k(blocks: Blocks) -> Read:
    """Sixteen groups of 16. A byte holds a group's scale (low four bits) and offset (high four bits)."""
    pairs = blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 1, 32)
    numbers = pairs >> _TWO_BITS & 3
    scale, offset_scale = _half(blocks, 80).astype(np.float32), _half(blocks, 82).astype(np.float32)
    low, high = blocks[..., :16] & 15, blocks[..., :16] >> 4
    return numbers, (scale * low.astype(np.float32), -(offset_scale * high.astype(np.float32)))


def _q3_k(blocks: Blocks) -> Read:
    """Sixteen groups of 16. A code has two bits from `low` and one from `high`, and stands for the number
    code - 4. The sixteen 6-bit scales are in twelve bytes."""
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 1, 32) >> _TWO_BITS & 3
    codes = low.reshape(*blocks.shape[:2], 8, 32) | high << 2
    upper = (blocks[..., None, 104:108] >> _TWO_BITS & 3).reshape(*blocks.shape[:2], 16)
    factors = (_nibbles(blocks[..., 96:104]) | upper << 4).view(np.int8) - np.int8(32)
    return codes, (_half(blocks, 108).astype(np.float32) * factors.astype(np.float32), None)


def _k_scales(blocks: Blocks) -> Scales:
    """Scales and offsets of eight groups of 32, six bits each, in twelve bytes."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    factors = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    scale, offset_scale = _half(blocks, 0).astype(np.float32), _half(blocks, 2).astype(np.float32)
    return scale * factors.astype(np.float32), -(offset_scale * offsets.astype(np.float32))


def _q5_k(blocks: Blocks) -> Read:
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    return (low.reshape(fifth.shape) | fifth << 4).view(np.int8), _k_scales(blocks)


def _q6_k(blocks: Blocks) -> Read:
    """Two halves of 128 numbers in eight groups of 16. A number has four bits from `low`, two from `high`."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    upper = (high >> _TWO_BITS & 3).reshape(*low.shape[:3], 128)
    numbers = (_nibbles(low) | upper << 4).view(np.int8) - np.int8(32)
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return numbers, (_half(blocks, 208).astype(np.float32) * factors, None)


def _iq4_xs_scales(blocks: Blocks) -> Scales:
    """Eight groups of 32. Their 6-bit scales have four bits from bytes 4 to 7 and two from bytes 2 and 3."""
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).reshape(*blocks.shape[:2], 8)
    high = (blocks[..., 2:4, None] >> _TWO_BITS[:, 0] & 3).reshape(low.shape)
    factors = (low | high << 4).view(np.int8) - np.int8(32)
    return _half(blocks, 0).astype(np.float32) * factors.astype(np.float32), None


def _mxfp4_scales(blocks: Blocks) -> Scales:
    """The scales: powers of two. The scales are halved, because the table holds the E2M1 values doubled."""
    return np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128), None


def _nvfp4_scales(blocks: Blocks) -> Scales:
    """The scales of four groups of 16: E4M3 without the sign, in which 127 stands for 0. The scales are
    halved, because the table holds the E2M1 values doubled."""
    bits = blocks[..., :4]
    exponents = (bits >> 3 & 15).astype(np.int32)
    mantissas = (bits & 7) + np.where(exponents > 0, 8, 0)
    factors = np.ldexp(mantissas.astype(np.float32), np.maximum(exponents, 1) - 11)
    return np.where(bits == 127, np.float32(0), factors), None


_VERBATIM: dict[GGMLQuantizationType, tuple[NumbersAt, Callable[[Blocks], Scales]]] = {
    GGMLQuantizationType.Q4_0: (NumbersAt(4, block=18, first=2, size=16), _q4_0_scales),
    GGMLQuantizationType.Q4_1: (NumbersAt(4, block=20, first=4, size=16), _factor_and_offset),
    GGMLQuantizationType.Q8_0: (NumbersAt(8, block=34, first=2, size=32), _one_factor),
    GGMLQuantizationType.Q4_K: (NumbersAt(4, block=144, first=16, size=32, runs=4), _k_scales),
    GGMLQuantizationType.IQ4_NL: (NumbersAt(4, block=18, first=2, size=16), _one_factor),
    GGMLQuantizationType.IQ4_XS: (NumbersAt(4, block=136, first=8, size=16, runs=8), _iq4_xs_scales),
    GGMLQuantizationType.MXFP4: (NumbersAt(4, block=17, first=1, size=16), _mxfp4_scales),
    GGMLQuantizationType.NVFP4: (NumbersAt(4, block=36, first=4, size=8, runs=4), _nvfp4_scales),
}
"""Block type → (places of the numbers in a block, function that reads the scales), for types whose numbers
the kernels read from the blocks themselves."""

_READERS: dict[GGMLQuantizationType, Callable[[Blocks], Read]] = {
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}

_TABLES: dict[GGMLQuantizationType, tuple[int, ...]] = {
    GGMLQuantizationType.Q3_K: tuple(range(-4, 12)),
    GGMLQuantizationType.IQ4_NL: IQ4_NL.kvalues,
    GGMLQuantizationType.IQ4_XS: IQ4_NL.kvalues,
    GGMLQuantizationType.MXFP4: MXFP4.kvalues,
    GGMLQuantizationType.NVFP4: MXFP4.kvalues,
}
"""Type → the value of each code."""

_POWERS = (GGMLQuantizationType.MXFP4, GGMLQuantizationType.NVFP4)
"""Types whose scales bfloat16 holds exactly."""

_GROUPS: dict[GGMLQuantizationType, int] = {
    GGMLQuantizationType[name]: group
    for group, names in {
        16: "IQ1_M IQ2_XS IQ2_S",
        32: "IQ1_S IQ2_XXS IQ3_XXS IQ3_S TQ1_0 TQ2_0",
    }.items()
    for name in names.split()
}
"""Type → inputs that share a scale, for types that are dequantised and packed as int8."""
