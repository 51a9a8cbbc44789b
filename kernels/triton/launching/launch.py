"""Launch parameters of the bandwidth-bound kernels: block sizes and warps."""

from __future__ import annotations

import triton

_VECTOR = 16
"""Bytes that a thread loads at once."""


def padded(size: int) -> int:
    """The size of a block for `size` numbers: the next power of two."""
    return int(triton.next_power_of_2(size))


def warps(numbers: int, itemsize: int, vectors: int = 2, most: int = 16) -> int:
    """Warps for a block of `numbers`, so that each thread has `vectors` loads of 16 bytes in flight."""
    threads = numbers * itemsize // (_VECTOR * vectors)
    return max(1, min(most, threads // 32))
