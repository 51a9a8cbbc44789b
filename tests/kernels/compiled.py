"""Triton kernels compiled for a GPU that is not there: launchers are given CPU tensors and stop early.

What the interpreter accepts is more than what the compiler does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class _Driver:
    """As much of a driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Launches inside only compile for sm_`capability`; gives the PTX by the kernel's name."""
    texts: dict[str, str] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        texts[self.fn.__name__] = kernel.asm["ptx"]
        return kernel

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(driver, "_active", _Driver(capability))
        yield texts
