"""The engine's tests. They measure the device's memory, or compile on all cores, so nothing else runs beside
them."""

from __future__ import annotations

from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.pytest_runs import run_tests

TESTS = ["tests/gpu/test_engine.py", "tests/gpu/test_start.py"]
INTERPRETED = ["tests/kernels/interpreted/test_decode_graphs.py::test_padding_touches_no_live_page"]


def run(figures: Figures) -> None:
    if figures.tiny:
        figures.add("rehearsal", instead_of=" ".join(TESTS), tests=" ".join(INTERPRETED))
    run_tests(figures, INTERPRETED if figures.tiny else TESTS)
