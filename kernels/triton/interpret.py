"""Whether Triton's interpreter is on, and the refusal where the kernels cannot run at all.

``TRITON_INTERPRET=1`` counts only when it is set before triton is first imported; from then on it holds for
the whole process. The interpreter runs the kernels as written, in numpy, on CPU tensors: for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from ramify.kernels.errors import KernelUnavailable

INTERPRETED: bool = triton.knobs.runtime.interpret


def jit(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, which has no types of its own."""
    return triton.jit(kernel, **options)


def check_device(tensor: torch.Tensor) -> None:
    """Raise KernelUnavailable unless a kernel can be launched on `tensor`."""
    if not tensor.is_cuda and not INTERPRETED:
        raise KernelUnavailable(
            f"the Triton kernels need a CUDA device, or TRITON_INTERPRET=1 before triton is imported; the "
            f"tensors are on {tensor.device.type}. The cpu and torch attention backends run there."
        )
