"""Working memory of the compiled kernels."""

from __future__ import annotations

import threading

import numpy as np


class Arena(threading.local):
    """That of one calling thread, kept between calls: `size` bytes from `address` on, a multiple of 64."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.grow(size)

    def grow(self, size: int) -> None:
        """Take `size` bytes instead; what they hold is lost."""
        self.memory = np.empty(size + 64, np.uint8)
        self.address = -(-self.memory.ctypes.data // 64) * 64
        self.size = size
