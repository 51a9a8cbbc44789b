"""The long run finds what is wrong, and a short one finds nothing."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.soak import MOST_GROWTH, Soak, main, theil_sen
from benchmarks.soak_requests import Cases, Wrong, compare, without_chance


class Answers:
    """Cases of which each request ends with `outcome`."""

    def __init__(self, outcome: Exception | None) -> None:
        self._outcome = outcome

    def __getattr__(self, kind: str) -> Any:
        async def send(draw: random.Random) -> None:
            if self._outcome is not None:
                raise self._outcome

        return send


@pytest.mark.parametrize(
    ("outcome", "killed", "wrong"),
    [
        (None, False, False),
        (Wrong("another text"), False, True),
        (Wrong("another text"), True, True),
        (OSError("refused"), False, True),
        (OSError("refused"), True, False),
    ],
)
async def test_a_failure_is_wrong_unless_a_kill_explains_it(
    outcome: Exception | None, killed: bool, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(100))
    monkeypatch.setattr("benchmarks.soak.time", SimpleNamespace(monotonic=lambda: next(now), strftime=str))
    run = Soak(SimpleNamespace(), Answers(outcome), None, 1, False)  # type: ignore[arg-type]
    if killed:
        run._down.append((0.0, float("inf")))
    await run._send(random.Random(1), end=2)
    assert bool(run.problems) is wrong
    assert run.counts["failed by a kill"] == (killed and not wrong)


def test_answers_are_compared_without_ids_and_the_sums_of_usage_are_checked() -> None:
    answer = {
        "id": "1",
        "created": 5,
        "choices": [{"text": "a"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }
    compare("chat", without_chance(answer), without_chance(answer | {"id": "2", "created": 6}))
    with pytest.raises(Wrong, match="chat: "):
        compare("chat", without_chance(answer), without_chance(answer | {"choices": [{"text": "b"}]}))
    with pytest.raises(Wrong, match="does not add up"):
        without_chance(answer | {"usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 6}})


def test_the_slope_is_that_of_most_samples() -> None:
    points = [(float(at), 100.0 + 0.5 * at) for at in range(20)]
    points[3], points[11] = (3.0, 900.0), (11.0, 0.0)
    assert theil_sen(points) == pytest.approx(0.5, rel=0.1)


def test_growth_is_told_for_each_process_and_quantity() -> None:
    run = Soak(SimpleNamespace(), SimpleNamespace(), None, 1, False)  # type: ignore[arg-type]
    began = time.monotonic()
    run.processes.samples["scheduler 7"] = [(began + at, 100.0 + at, 9.0, 4.0) for at in range(10)]
    run.processes.samples["short 8"] = [(began, 1.0, 1.0, 1.0)] * 3
    found = {(process, name): slope for process, name, _, slope in run.processes.growth(began)}
    assert found == {("scheduler 7", name): float(name == "MB") for name in MOST_GROWTH}


@pytest.mark.slow
@pytest.mark.weights
def test_a_short_run_finds_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"plain": 4, "streamed": 2, "hang_up": 2, "abort": 1, "batch": 1, "noise": 1}
    monkeypatch.setattr("benchmarks.soak.KINDS", kinds)
    monkeypatch.setattr(Cases, "LENGTHS", (12, 200))
    status = main(["--minutes", "0.15", "--clients", "4", "--no-kills"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "nothing is wrong" in shown
    assert all(f"'{kind}': " in shown for kind in ("plain", "streamed"))
