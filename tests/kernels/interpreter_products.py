"""Products of Triton's interpreter whose bits do not depend on a row's place in its tile.

The interpreter's own come from a library whose float32 bits do. Summed in float64 and rounded once, they
depend on the values alone, as on a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """A replacement for `InterpreterBuilder.create_dot`."""
    from triton.runtime.interpreter import TensorHandle

    exact = np.matmul(_numbers(a), _numbers(b), dtype=np.float64) + d.data
    return TensorHandle(exact.astype(d.data.dtype), d.dtype.scalar)


def _numbers(operand: Any) -> Any:
    if operand.dtype.primitive_bitwidth > 8:
        return operand.data
    return torch.from_numpy(operand.data.copy()).view(torch.float8_e4m3fn).float().numpy()
