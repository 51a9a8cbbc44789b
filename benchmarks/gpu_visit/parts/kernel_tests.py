"""The other tests that need a GPU, shared out among processes: most of their time is compilation by
Triton."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.parts import engine_tests
from benchmarks.gpu_visit.pytest_runs import run_tests

FOLDER = Path("tests/gpu")
FIRST = ("attention", "attention_cascade", "float8_pages", "quantised", "float8", "ops", "matmul", "sampling")
"""Test files that run before all others, the most important first, as the last ones may be cut."""
INTERPRETED = [f"tests/kernels/interpreted/test_{name}.py" for name in ("ops_cases", "matmul")]
SHARES = 12


def files() -> list[str]:
    order = [FOLDER / f"test_{name}.py" for name in FIRST]
    others = sorted({*FOLDER.glob("test_*.py")} - {*order, *map(Path, engine_tests.TESTS)})
    return [str(path) for path in (*order, *others)]


def run(figures: Figures) -> None:
    # Two cores are left for the driver of the device and for this process.
    shares = max(1, min(SHARES, len(os.sched_getaffinity(0)) - 2))
    if figures.tiny:
        figures.add("rehearsal", instead_of=" ".join(files()), tests=" ".join(INTERPRETED))
        shares = 2
    run_tests(figures, INTERPRETED if figures.tiny else files(), shares)
