"""Working memory of the compiled kernels."""

from __future__ import annotations

import threading

import numpy as np


class Arena(threading.local):
    """One calling thread's memory, kept between calls: `size` bytes at `address`, a multiple of 64."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.grow(size)

    def grow(self, size: int) -> None:
        """Allocate `size` bytes instead; the old contents are lost."""
        self.memory = np.empty(size + 64, np.uint8)
        self.address = -(-self.memory.ctypes.data // 64) * 64
        self.size = size
