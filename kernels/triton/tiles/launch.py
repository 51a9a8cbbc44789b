"""Parts that launches share: Triton's interpreter, the error if kernels cannot run, block sizes and warps.

``TRITON_INTERPRET=1`` must be set before triton is first imported, and holds for the whole process. The
interpreter runs the kernels in numpy, on CPU tensors: for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from ramify.kernels.machine.errors import KernelUnavailable

INTERPRETED: bool = triton.knobs.runtime.interpret
absent_capability: int | None = None
"""The compute capability, such as 90, of an absent GPU that kernels are compiled for (`ahead.absent`), or
None."""


def _take_scalars_as_indices() -> None:
    """Patch the interpreter of Triton 3.6: it calls `int` on arrays of one number, which numpy 2.4 refuses.
    Triton 3.7 drops their axis first."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if INTERPRETED and triton.__version__.startswith("3.6."):
    _take_scalars_as_indices()


def jit(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, typed for mypy."""
    return triton.jit(kernel, **options)


def check_device(tensor: torch.Tensor) -> None:
    """Raise KernelUnavailable unless a kernel can be launched on `tensor`."""
    if not tensor.is_cuda and not INTERPRETED and absent_capability is None:
        raise KernelUnavailable(
            f"the Triton kernels need a CUDA device, or TRITON_INTERPRET=1 before triton is imported; the "
            f"tensors are on {tensor.device.type}. The cpu and torch attention backends run there."
        )


_VECTOR = 16
"""Bytes that a thread loads at once."""


class ProductTile(NamedTuple):
    """The tile of a program that multiplies matrices; `inputs` is 0 if the layout of the weights fixes it."""

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
