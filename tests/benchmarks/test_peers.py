"""The benchmark of peers: a driver answers what it is asked, and one that ends is told of."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from tests.runtime.tiny import write_tiny

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


def test_a_driver_generates_what_it_is_asked_for(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = peers.Engine("ramify", sys.executable, tiny_folder, threads=1)
    try:
        assert engine.run([[3, 4, 5], [3, 4]], 6) > 0
        assert engine.peak_gb() > 0.05
        peers.print_table([engine], {("single", "ramify"): [10.0, 30.0, 20.0]})
        assert "20.0 [10.0, 30.0]" in capsys.readouterr().out
        with pytest.raises(peers.Ended, match="ramify has ended: exit status 1"):
            engine.run([[3, 4, 5]], 100_000)
    finally:
        engine.close()


class Stub:
    """Stand-in for an `Engine`: it runs `turns` workloads, and ends."""

    def __init__(self, name: str, turns: int) -> None:
        self.name, self.turns, self.start_s = name, turns, 0.0

    def run(self, prompts: list[list[int]], output: int) -> float:
        self.turns -= 1
        if self.turns < 0:
            raise peers.Ended(f"{self.name} has ended")
        return 2.0

    def peak_gb(self) -> float:
        return 0.0


def test_the_others_go_on_where_an_engine_ends(capsys: pytest.CaptureFixture[str]) -> None:
    engines: list[Any] = [Stub("first", 2), Stub("second", 9)]
    found = peers.measured(engines, argparse.Namespace(rounds=2, rest=0.0, only=["single", "prefill-512"]))
    assert found["single", "first"] == [64.0]  # 128 tokens in 2 s
    assert ("prefill-512", "first") not in found
    assert found["prefill-512", "second"] == [256.0, 256.0]
    peers.print_table(engines, found)
    told = capsys.readouterr().out
    assert "first has ended" in told
    assert "256.0 [256.0, 256.0]" in told


def test_a_warm_run_has_the_prefix_of_the_cold_one() -> None:
    work = {each.name: each for each in peers.WORKLOADS}
    prefix: list[int] = []
    draw = random.Random(1)
    cold = peers.prompts_of(work["cold"], draw, prefix)
    warm = peers.prompts_of(work["warm"], draw, prefix)
    assert {tuple(prompt[:1024]) for prompt in cold + warm} == {tuple(prefix)}
    assert len({tuple(prompt[1024:]) for prompt in cold + warm}) == len(cold + warm)
    assert peers.rate(work["batch"], 2.0) == 32 * 128 / 2
