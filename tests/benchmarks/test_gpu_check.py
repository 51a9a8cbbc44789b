"""`make gpu-check` as far as it goes without a GPU, and its table from figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import Part
from tests.gpu import test_engine as engine_tests

pytestmark = pytest.mark.slow


def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "needs a CUDA device, and torch finds none" in capsys.readouterr().err


def test_its_limits_leave_room_within_nine_minutes() -> None:
    tests = gpu_check.TESTS_S + gpu_check.ENGINE_TESTS_S
    assert tests + gpu_check.KERNELS_S + gpu_check.ENGINE_S <= 9 * 60 - 30


def test_a_part_ends_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "waits.py").write_text("import signal; signal.pause()")
    monkeypatch.chdir(tmp_path)
    assert not gpu_check.run("good", ["platform"], 60.0).failed
    assert gpu_check.run("bad", ["fails"], 60.0).outcome == "failed with status 3"
    (tmp_path / "shares.py").write_text("import sys; raise SystemExit(3 * (sys.argv[2] == '1/3'))")
    assert gpu_check.run("two", ["shares"], 60.0, shares=2).outcome == "passed"
    assert gpu_check.run("three", ["shares"], 60.0, shares=3).outcome == "failed with status 3"
    assert gpu_check.run("long", ["waits"], 0.5).outcome.startswith("stopped after")


def test_the_table_holds_every_figure() -> None:
    kernels = {"rows": [{"case": "decode", "of_ceiling": 0.91}, {"case": "other", "skipped": "too large"}]}
    engine = {
        "device": "some card",
        "rows": [
            {"case": "decode 64", "tokens_s": 5000.0, "seconds": 0.01, "host_s": 0.0001, "of_roofline": 0.8},
            {"case": "cascade", "tokens_s": 900.0, "seconds": 0.02, "ratio": 5.2, "of": "without it"},
            {"case": "none", "skipped": "these kernels have none"},
        ],
    }
    text = gpu_check.table([Part("tests/gpu", "passed", 61.4)], kernels, engine)
    for part in ("some card", "passed, 61 s", "91% of its ceiling", "5000 tokens/s", "80% of the roofline",
                 "host 1.0%", "5.20x without it"):  # fmt: skip
        assert part in text
    assert "none" not in text


@pytest.mark.parametrize("options", [*engine_tests.OPTIONS, {"memory_fraction": 0.5}], ids=str)
def test_the_engine_tests_check_few_pages(options: dict[str, Any]) -> None:
    """A check goes over all pages after every step, and a large card holds millions of a toy model's."""
    config = engine_tests.config_of(options)
    assert not config.check_pages or (config.num_pages or 1 << 30) <= 1 << 14
