"""A toy engine in deterministic mode: two of the engine's tests, in which no feature may change a bit."""

from __future__ import annotations

from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.parts.engine_tests import INTERPRETED
from benchmarks.gpu_visit.pytest_runs import run_tests

TESTS = ["tests/gpu/test_engine.py", "-k", "no_bit and (cascade or naive)"]


def run(figures: Figures) -> None:
    run_tests(figures, INTERPRETED if figures.tiny else TESTS)
