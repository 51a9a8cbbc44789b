"""Triton's compiler, watched: counts of the kernels compiled in this process, and of files in the cache on
disk."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any


@dataclasses.dataclass(slots=True)
class Compiled:
    """Counts of kernels since `watched` was first called.

    kernels : kernels that were compiled
    loaded : kernels that were found in Triton's cache on disk
    seconds : sum of their compile times, also of kernels that are compiled at the same time
    """

    kernels: int = 0
    loaded: int = 0
    seconds: float = 0.0


@functools.cache
def watched() -> Compiled:
    """The counts of this process, which are updated from now on. They stay 0 if Triton is not installed."""
    counts = Compiled()
    try:
        from triton import knobs
    except ImportError:
        return counts
    before = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if event["cache_hit"]:
            counts.loaded += 1
        else:
            counts.kernels += 1
            counts.seconds += event["times"].total / 1e6
        if before is not None:
            before(**event)

    knobs.compilation.listener = listen
    return counts


def cache_on_disk() -> Path:
    """The folder of Triton's cache, for this process and those that it starts."""
    from triton import knobs

    return Path(os.environ.get("TRITON_CACHE_DIR") or knobs.cache.dir)


def files_on_disk(cache: Path) -> dict[str, int]:
    """The numbers of compiled kernels and of C modules in the cache. The modules are Triton's own and, in
    some of its versions, a launcher for each signature."""
    return {name: len([*cache.glob(f"*/*.{end}")]) for name, end in (("kernels", "cubin"), ("modules", "so"))}
