"""The long run finds what is wrong, and a short one finds nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.soak import Processes, Soak, main, theil_sen
from benchmarks.soak_requests import Cases, Wrong, compare, without_chance


class Answers:
    """Cases of which each request ends with `outcome`."""

    clients = (SimpleNamespace(),)

    def __init__(self, outcome: Exception | None, models: tuple[str, ...] = ("a",)) -> None:
        self._outcome, self.models = outcome, models

    def __getattr__(self, kind: str) -> Any:
        async def send(draw: random.Random, client: object, model: str) -> None:
            if self._outcome is not None:
                raise self._outcome

        return send


@pytest.mark.parametrize(
    ("outcome", "killed", "harmed", "wrong"),
    [
        (None, False, ["a"], False),
        (Wrong("another text"), False, ["a"], True),
        (Wrong("another text"), True, ["a"], True),
        (OSError("refused"), False, ["a"], True),
        (OSError("refused"), True, ["a"], False),
        (OSError("refused"), True, ["another"], True),
    ],
)
async def test_a_failure_is_wrong_unless_a_kill_of_its_model_explains_it(
    outcome: Exception | None, killed: bool, harmed: list[str], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(100))
    monkeypatch.setattr("benchmarks.soak.time", SimpleNamespace(monotonic=lambda: next(now), strftime=str))
    run = Soak(Answers(outcome), None, 1, False)  # type: ignore[arg-type]
    run._harmed = harmed
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


def test_growth_is_told_of_each_process_and_quantity_without_its_first_seconds() -> None:
    processes = Processes(None)
    processes.samples["scheduler 7"] = [(0.0, 10.0, 1.0, 1.0)] + [
        (5.0 + at, 100.0 + at, 9.0, 4.0) for at in range(10)
    ]
    processes.samples["short 8"] = [(float(at), 1.0, 1.0, 1.0) for at in range(10)]
    found = {(process, name): rest for process, name, *rest in processes.growth(warm_s=4.0)}
    assert found == {
        ("scheduler 7", "MB"): [100.0, 1.0, 9.0],
        ("scheduler 7", "fds"): [9.0, 0.0, 9.0],
        ("scheduler 7", "threads"): [4.0, 0.0, 9.0],
    }


def test_the_processes_of_a_model_can_be_left_out() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        processes = Processes(os.getpid())
        below = processes.pids()
        assert child.pid in below
        assert len(set(below) - set(processes.pids(without=[child.pid]))) == 2
        for pid in set(Processes(child.pid).pids()):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("cached", "wrong"), [((0, 0, 48), False), ((0, 48, 48), True), ((16, 0, 48), True)])
async def test_a_prompt_that_another_key_finds_is_wrong(cached: tuple[int, ...], wrong: bool) -> None:
    answers = iter(cached)

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        details = {"cached_tokens": next(answers)}
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
        return {"choices": [], "usage": {**usage, "prompt_tokens_details": details}}

    clients: Any = [SimpleNamespace(post=post), SimpleNamespace(post=post)]
    cases = Cases(["a"], clients)
    with pytest.raises(Wrong, match="cached for a key") if wrong else contextlib.nullcontext():
        await cases.scopes(random.Random(1), clients[0], "a")
    assert cases.found == ({} if wrong else {"sent again": 1, "found": 1})


@pytest.mark.slow
@pytest.mark.weights
def test_a_short_run_finds_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Cases, "LENGTHS", (12, 200))
    monkeypatch.setattr("benchmarks.soak_requests.LEASE_S", 1.0)
    status = main(["--minutes", "0.15", "--clients", "4", "--no-kills"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "nothing is wrong" in shown
    assert all(f"'{kind}': " in shown for kind in ("plain", "streamed"))
