"""The thread team that kernels run on: torch's own OpenMP team.

Two teams would take the cores from each other: a thread of torch spins for a while after each operation, on
the core where a second team wants to wake a thread. So the kernels enter parallel regions through the OpenMP
library that torch is linked to. `GOMP_parallel(fn, data, threads, flags)` is the entry point that GCC's
OpenMP code calls (libgomp ABI, "Implementing PARALLEL construct"); LLVM's and Intel's libraries have it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_TEAM_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def compute_alone() -> None:
    """Make torch's operations on the calling thread, and on no other, run without a thread team. Does nothing
    if torch has no OpenMP."""
    torch.get_num_threads()  # else the thread's first operation sets it to the process's number
    setter = _openmp("omp_set_num_threads")
    if setter is not None:
        setter(1)


@functools.cache
def team_entry() -> int:
    """Address of a C function with GOMP_parallel's signature: it runs `fn(data)` on `threads` threads."""
    entry = _openmp("GOMP_parallel")
    if entry is None:
        return python_team_entry()
    return int(ctypes.cast(entry, ctypes.c_void_p).value or 0)


def _openmp(name: str) -> Any:
    """The function `name` of the OpenMP library that torch is linked to; None if there is none."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(str(library)), name)
    return None


def _python_team(body: int, data: int, threads: int, flags: int) -> None:
    run = _BODY(body)
    others = [threading.Thread(target=run, args=(data,)) for _ in range(threads - 1)]
    for other in others:
        other.start()
    run(data)
    for other in others:
        other.join()


_python_team_pointer = _TEAM_ENTRY(_python_team)  # kept: the pointer dies with the object


def python_team_entry() -> int:
    """As `team_entry`, for a torch without OpenMP: Python threads, at 100 us a call instead of 1 us."""
    return int(ctypes.cast(_python_team_pointer, ctypes.c_void_p).value or 0)


def on_threads(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call `work` with each of `items`, on as many threads as torch uses. Errors of `work` are raised here.

    Each of these threads runs torch's operations without gradients and without a thread team: sixteen threads
    with teams of sixteen would be 256.
    """

    def run(item: Item) -> None:
        with torch.inference_mode():
            work(item)

    if len(items) == 1:
        run(items[0])
        return
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=compute_alone) as threads:
        list(threads.map(run, items))
