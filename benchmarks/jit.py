"""Triton's compiler, watched: kernels that were compiled in this process, and files in the cache on disk."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any


@dataclasses.dataclass(slots=True)
class Compiled:
    """Kernels since `watched` was first called.

    kernels : that were compiled
    loaded : that were found in Triton's cache on disk
    seconds : of compiling; kernels that are compiled at once count each
    """

    kernels: int = 0
    loaded: int = 0
    seconds: float = 0.0


@functools.cache
def watched() -> Compiled:
    """The counts of this process, from now on; they stay 0 where Triton is not installed."""
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
    """Triton's folder for this process and those that it starts."""
    from triton import knobs

    return Path(os.environ.get("TRITON_CACHE_DIR") or knobs.cache.dir)


def files_on_disk(cache: Path) -> dict[str, int]:
    """Numbers of compiled kernels, and of modules in C: Triton's own and, in some of its versions, a launcher
    for each signature."""
    return {name: len([*cache.glob(f"*/*.{end}")]) for name, end in (("kernels", "cubin"), ("modules", "so"))}
