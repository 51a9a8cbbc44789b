"""Where a worker begins: ``python -m ramify.runtime.processes.worker_start <role> …``.

Without collecting garbage while it imports and loads: that would walk a million objects, none of them
garbage, again and again (measured: 0.9 of the scheduler's 3.0 s of processor time).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys

from ramify.runtime.processes.compile_ahead import compile_grammars

COLLECTED = (20_000, 20, 20)
"""When garbage is collected (`gc.set_threshold`): little that a worker drops has cycles, and by Python's own
thresholds collecting took 0.45 ms of each of the scheduler's steps with 32 requests."""


def main() -> None:
    gc.disable()
    role = sys.argv.pop(1)
    if role == "scheduler.process":
        from ramify.runtime.processes.torch_import import import_torch

        import_torch()
    if role == "processes.grammar_compiler":
        compile_grammars()  # before its imports compile them
    importlib.import_module(f"ramify.runtime.{role}").main()


def started() -> None:
    """Called by a worker when it has loaded all that it keeps: no collection walks that from now on.

    One that did would stall a step by tens of milliseconds, and copy every page that a forked child shares.
    """
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    gc.enable()
    give_back()


def give_back() -> None:
    """Give memory back to the system that was needed only for a while: the C library keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    main()
