"""Tests that need TRITON_INTERPRET=1 from the start: `tests/kernels/test_triton.py` runs them so."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True)
def products_by_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products come from a library whose float32 bits depend on a row's place in its tile.

    Summed in float64 and rounded once, they do not, as on a device.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(operand):
        if operand.dtype.primitive_bitwidth > 8:
            return operand.data
        return torch.from_numpy(operand.data.copy()).view(torch.float8_e4m3fn).float().numpy()

    def create_dot(self, a, b, d, *precision):
        exact = np.matmul(numbers(a), numbers(b), dtype=np.float64) + d.data
        return TensorHandle(exact.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def scalars_that_numpy_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 calls `int` on arrays of one number, which numpy 2.4 refuses; 3.7 drops their axis first."""
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
