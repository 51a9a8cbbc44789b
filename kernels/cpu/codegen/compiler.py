"""Compiles the CPU kernels with numba: once per machine, then from the cache folder (`ramify.machine_code`).

Every kernel has one explicit signature and takes shapes, strides and dtypes at run time, so importing it
compiles (or loads) all of it and no call ever waits for a compiler.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numba.extending
from numba.core.errors import NumbaError

import ramify.machine_code as machine_code
from ramify.kernels.machine.errors import KernelUnavailable

Decorator = Callable[[Callable[..., Any]], Any]

machine_code.keep_outside_the_package()
llvm.initialize_native_asmparser()  # for kernels with inline assembly

_REMEDY = "The torch attention backend needs no compiler."


def lanes() -> int:
    """float32 lanes of one vector register: 16 with AVX-512, 8 with AVX, else 4 (SSE, NEON).

    If NUMBA_CPU_FEATURES ("+avx,+fma,...") is set, it overrides the features of the processor.
    """
    found = features()
    if "+avx512f" in found:
        return 16
    return 8 if "+avx" in found else 4


def features() -> frozenset[str]:
    """The instruction sets that kernels are compiled for, as LLVM writes them: "+avx2" if the processor has
    AVX2, "-avx2" if not."""
    chosen = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    return frozenset((chosen or llvm.get_host_cpu_features().flatten()).split(","))


def processor() -> str:
    """LLVM's name of the processor that kernels are compiled for: this one, or NUMBA_CPU_NAME."""
    return numba.config.CPU_NAME or llvm.get_host_cpu_name()  # type: ignore[attr-defined]


def compiled(signature: Any) -> Decorator:
    """Decorate a function that is compiled for `signature`. Calls release the GIL; division follows C, not
    Python."""
    return _checked(numba.njit(signature, cache=True, nogil=True, error_model="numpy"))


def callback(signature: Any) -> Decorator:
    """Decorate a function that is compiled to a C function, with its address in the attribute `address`."""
    return _checked(numba.cfunc(signature, cache=True, error_model="numpy"))


part: Any = machine_code.part(error_model="numpy")
"""A decorator for functions that only kernels call."""


def intrinsic(function: Callable[..., Any]) -> Any:
    """Decorate a function that emits LLVM code, typed by numba's rules for intrinsics."""
    return numba.extending.intrinsic(function)


carray: Any = numba.carray  # type: ignore[attr-defined]
"""The array at an address; inside kernels only."""


def _check_machine() -> None:
    """Raise `KernelUnavailable` if the kernels would not compile or would give wrong results."""
    if platform.machine().lower() not in ("x86_64", "amd64", "arm64", "aarch64"):
        raise KernelUnavailable(
            f"the compiled kernels need a 64-bit x86 or Arm processor, not {platform.machine()}. {_REMEDY}"
        )
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise KernelUnavailable(
            f"NUMBA_DISABLE_JIT is set, so the kernels cannot be compiled; unset it. {_REMEDY}"
        )


def _checked(decorator: Decorator) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Any:
        _check_machine()
        try:
            return decorator(function)
        except NumbaError as error:
            raise KernelUnavailable(
                f"numba {numba.__version__} cannot compile {function.__name__}: {error}\n{_REMEDY}"
            ) from error

    return decorate
