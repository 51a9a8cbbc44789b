"""Entry point of a worker: ``python -m ramify.runtime.processes.worker_start <module> …``.

Garbage collection is off while a worker imports and loads. It would walk a million live objects again and
again, which took 0.9 of the scheduler's 3.0 s of processor time when measured.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys

GC_THRESHOLDS = (20_000, 20, 20)
"""Arguments of `gc.set_threshold`. A worker drops few reference cycles. With Python's own thresholds,
collecting took 0.45 ms of each scheduler step with 32 requests."""


def main() -> None:
    gc.disable()
    module = sys.argv.pop(1)
    if module == "processes.grammar_compiler":
        from ramify.runtime.compile_ahead import compile_grammars  # 50 ms, which others are spared

        compile_grammars()  # before its imports compile them
    importlib.import_module(f"ramify.runtime.{module}").main()


def finish_startup() -> None:
    """Exclude all existing objects from garbage collection. A worker calls this when it has loaded
    everything.

    Otherwise a collection would stall a step by tens of milliseconds, and would copy every page of memory
    that a forked child shares.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system, which the C library would otherwise keep. Linux with glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    main()
