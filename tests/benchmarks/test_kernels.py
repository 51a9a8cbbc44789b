"""`benchmarks.kernels` without a GPU."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs
from triton.knobs import CompileTimes

from benchmarks.gpu_timing import Timer, Timing
from benchmarks.gpu_visit.parts.versions import QUERY
from benchmarks.jit import Compiled, watched
from benchmarks.kernels import line, measure, versions
from tests.kernels.kernel_cases.base import Call, Case, Work, difference

pytestmark = pytest.mark.slow


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_the_benchmark_says_what_it_needs():
    command = [sys.executable, "-m", "benchmarks.kernels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr


def test_versions_name_the_driver_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert versions()["driver"] == "unknown", "there is no nvidia-smi"
    program = tmp_path / "nvidia-smi"
    values = ", ".join(["570.1", *["0"] * QUERY.count(",")])
    for answer, driver in ((values, "570.1"), ("no devices were found", "unknown")):
        program.write_text(f"#!/bin/sh\necho '{answer}'\n")
        program.chmod(0o755)
        found = versions()
        assert (found["device"], found["driver"]) == ("a card", driver)
    assert found["torch"] == torch.__version__


def test_a_line_of_the_benchmark():
    row = {"case": "decode", "seconds": 2e-4, "spread": 0.01, "bound": "bandwidth", "rate": 3e12, "eager": []}
    row |= {"of_ceiling": 0.75, "expected": 0.8, "error_of": {"torch flash": 2e-3, "flat": 1e-3}}
    text = line({**row, "rivals": {"torch math": 4.0, "torch flash": 1.25, "flat": 5.5}})
    assert text.split() == [
        *("decode", "200.0", "1.0%", "3000", "GB/s", "75%", "(80%)", "1.0e-03"),
        *("1.25x", "flash", "flat", "5.50x"),
    ]
    row |= {"expected": None, "error_of": {}, "eager": ["ours"]}
    text = line({**row, "bound": "products", "rate": 4.1e14, "rivals": {}})
    assert text.split()[3:7] == ["410.0", "TFLOP/s", "75%", "unchecked"]
    assert text.endswith("without a graph: ours")
    assert "skipped: too large" in line({"case": "decode", "skipped": "too large"})
    assert "error: wrong" in line({"case": "decode", "error": "wrong"})


def added(change: Callable[[torch.Tensor], object] = lambda out: None, **rivals: Call) -> dict[str, Any]:
    """The row of x + 1 on the CPU, whose output `change` falsifies."""

    def build(device: torch.device) -> Work:
        x = torch.randn(1000, device=device)
        out = torch.empty_like(x)

        def run() -> torch.Tensor:
            torch.add(x, 1, out=out)
            change(out)
            return out

        others = {"torch": lambda: x + 1, **{name: partial(call, x) for name, call in rivals.items()}}
        return Work(run, 2 * x.nbytes, rivals=others, reset=partial(out.fill_, torch.nan))

    return measure(Case("add", build), Timer(torch.device("cpu")), 1e9, 1e12, 0.001)


def test_a_kernel_is_timed_if_it_is_right():
    def absent(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not on this card\nat all")

    row = added(**{"torch wrong": lambda x: x + 2, "torch absent": absent})
    assert row["seconds"] > 0
    assert row["of_ceiling"] == pytest.approx(8000 / 1e9 / row["seconds"])
    assert row["rivals"].keys() == row["error_of"].keys() == {"torch"}
    assert row["unavailable"]["torch absent"] == "RuntimeError: not on this card"
    assert row["unavailable"]["torch wrong"].startswith("differs by 0.")
    assert "add" in line(row)


def test_a_wrong_kernel_has_no_time():
    noise = itertools.count()
    wrong: dict[str, Callable[[torch.Tensor], object]] = {
        "1 of 1000 numbers": lambda out: out[7:8].fill_(torch.nan),
        "other bits": lambda out: out[3:4].add_(1e-3 * next(noise)),
        "agrees with none": lambda out: out.mul_(1.02),
    }
    for message, change in wrong.items():
        row = added(change, flat=lambda x: 1.02 * (x + 1))
        assert message in row["error"]
        assert "seconds" not in row
    assert "seconds" in added(lambda out: out.mul_(1.002))
    out = torch.zeros(5)
    work = Work(lambda: out, 0, checks={"torch": lambda: torch.zeros(5)}, reset=partial(out.fill_, torch.nan))
    with pytest.raises(ValueError, match="5 of 5 numbers"):
        work.errors()


def test_a_timing_s_spread_is_between_its_halves():
    timing = Timing.of([1.0, 1.0, 1.0, 1.1, 1.1, 9.0], captured=True)
    assert timing.seconds == pytest.approx(1.05)
    assert timing.spread == pytest.approx(0.1 / 1.05)
    times, failed = Timer(torch.device("cpu")).timings({"good": list, "bad": partial(int, "x")}, seconds=1e-5)
    assert list(times) == ["good"]
    assert times["good"].captured is None
    assert "invalid literal" in failed["bad"]


def test_differences_are_shares():
    x = torch.randn(100)
    assert difference(1.5 * x, x) == pytest.approx(0.5)
    assert difference(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25


def test_compiled_kernels_are_counted():
    """A listener that was there before is called as well."""
    seen: list[bool] = []
    times = CompileTimes(300_000, [("ttir", 1_000_000)], 200_000)
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda **event: seen.append(event["cache_hit"])
        counts = watched.__wrapped__()
        for hit in (False, False, True):
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert counts == Compiled(kernels=2, loaded=1, seconds=3.0)
    assert seen == [False, False, True]
