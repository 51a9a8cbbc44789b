"""Sizes that the bandwidth-bound kernels derive from a shape: padded blocks, and the warps of one."""

from __future__ import annotations

import triton

_VECTOR = 16
"""Bytes that a thread loads at once."""


def padded(size: int) -> int:
    """The power of two that a block of `size` numbers takes."""
    return int(triton.next_power_of_2(size))


def warps(numbers: int, itemsize: int, vectors: int = 2, most: int = 16) -> int:
    """Warps for a block of `numbers`: each thread has `vectors` loads of 16 bytes on their way."""
    threads = numbers * itemsize // (_VECTOR * vectors)
    return max(1, min(most, threads // 32))
