"""Launch parameters: block sizes and warps."""

from __future__ import annotations

from typing import NamedTuple

import triton

_VECTOR = 16
"""Bytes that a thread loads at once."""


class ProductTile(NamedTuple):
    """The tile of a program that multiplies matrices; `inputs` is 0 where the layout of weights gives it."""

    rows: int
    outputs: int
    warps: int
    stages: int
    inputs: int = 0


def padded(size: int) -> int:
    """The size of a block for `size` numbers: the next power of two."""
    return int(triton.next_power_of_2(size))


def warps(numbers: int, itemsize: int, vectors: int = 2, most: int = 16) -> int:
    """Warps for a block of `numbers`, so that each thread has `vectors` loads of 16 bytes in flight."""
    threads = numbers * itemsize // (_VECTOR * vectors)
    return max(1, min(most, threads // 32))
