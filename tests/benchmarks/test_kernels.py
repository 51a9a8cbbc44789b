"""`benchmarks.kernels` without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.kernels import line

pytestmark = pytest.mark.slow


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_the_benchmark_says_what_it_needs():
    command = [sys.executable, "-m", "benchmarks.kernels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr


def test_a_line_of_the_benchmark():
    row = {"case": "decode", "seconds": 2e-4, "bound": "bandwidth", "rate": 3e12, "of_ceiling": 0.75}
    text = line({**row, "rivals": {"torch math": 4.0, "torch flash": 1.25, "flat": 5.5}})
    assert text.split() == ["decode", "200.0", "3000", "GB/s", "75%", "1.25x", "flash", "flat", "5.50x"]
    text = line({**row, "bound": "products", "rate": 4.1e14, "rivals": {}})
    assert text.split() == ["decode", "200.0", "410.0", "TFLOP/s", "75%"]
    assert "skipped: too large" in line({"case": "decode", "skipped": "too large"})
