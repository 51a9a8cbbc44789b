"""Speculation: outputs are the same with and without it, and accepted draft tokens save steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ramify.runtime.scheduler.requests.limits import TUNED, Tuning
from ramify.runtime.scheduler.speculation import drafter
from ramify.runtime.scheduler.speculation.acceptance import WAITING_SHARE
from tests.runtime.local import LocalScheduler, Result, fail
from tests.runtime.test_overlap import Load, answer, told

pytestmark = pytest.mark.slow

REPEATING = [*b"the same words, the same words, the same"]


class Twice(Load):
    """A load that submits all requests at once, and then all of them again."""

    def __init__(self, model: Any, *, speculation: bool, **options: Any) -> None:
        super().__init__(model, overlap=False, seed=2, speculation=speculation, max_running=5, **options)

    def run(self) -> list[Result]:
        scheduler = self.local.scheduler
        state = self.random.getstate()
        submitted = []
        for _ in range(2):
            self.random.setstate(state)
            submitted += [self.submit(kind) for kind in [*range(11)] * 2]
            while scheduler.busy or self.jobs:
                while self.jobs:
                    scheduler.receive(answer(self.jobs.pop(), self.vocabulary))
                self.local.step()
        return [self.local.results[rid] for rid in submitted]


@pytest.mark.parametrize("gain", [TUNED.least_gain, 0.0], ids=["worthwhile", "all"])
@pytest.mark.parametrize(
    "options",
    [
        {"longest": 40},
        {"page_size": 4, "num_pages": 40, "chunk_tokens": 16, "longest": 50},
        {"jump_forward": False, "prefix_cache": "naive"},
    ],
    ids=["plain", "short-of-pages", "no-jumps"],
)
def test_the_same_tokens(tiny_folder: Path, options: Any, gain: float) -> None:
    expected = Twice(tiny_folder, speculation=False, **options).run()
    load = Twice(tiny_folder, speculation=True, tuning=Tuning(least_gain=gain), **options)
    found = load.run()
    assert [told(result) for result in found] == [told(result) for result in expected]
    assert [result.forced for result in found] == [result.forced for result in expected]
    counters = load.local.scheduler.counters
    assert counters.accepted_tokens > 20
    if gain == 0.0:
        assert counters.accepted_tokens < counters.draft_tokens
    if "num_pages" in options:
        assert counters.retractions > 0
    counts = load.local.cache.counts()
    assert counts.in_use == 0
    assert counts.free + counts.evictable + counts.leased == counts.total


def steps(local: LocalScheduler, prompt: list[int], **sampling: Any) -> tuple[list[int], int]:
    before = local.scheduler.counters.steps
    (result,) = local.complete([prompt], max_tokens=32, ignore_eos=True, **sampling)
    return result.ids, local.scheduler.counters.steps - before


@pytest.mark.parametrize("pages", ["auto", "int8"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "drawn"])
def test_what_an_equal_prompt_gave_is_verified_many_at_a_time(
    tiny_folder: Path, sampling: Any, pages: Any
) -> None:
    plain = LocalScheduler(tiny_folder, deterministic=True, kv_cache_dtype=pages)
    local = LocalScheduler(tiny_folder, deterministic=True, kv_cache_dtype=pages, speculation=True)
    first, slow = steps(local, REPEATING, **sampling)
    assert first == steps(plain, REPEATING, **sampling)[0]
    again, fast = steps(local, REPEATING, **sampling)
    assert again == first
    assert fast < slow / 2


def test_scopes_do_not_learn_from_each_other(tiny_folder: Path) -> None:
    local = LocalScheduler(tiny_folder, deterministic=True, speculation=True)
    draw = {"temperature": 1.0, "seed": 3}
    _, alone = steps(local, REPEATING, **draw)
    _, other = steps(local, REPEATING, scope="other", **draw)
    assert other >= alone


@pytest.mark.parametrize(("place", "name"), [(drafter, "find"), (drafter.RecentOutputs, "remember")])
def test_an_error_ends_speculation_and_nothing_else(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    local = LocalScheduler(tiny_folder, deterministic=True, speculation=True)
    expected, slow = steps(local, REPEATING)

    monkeypatch.setattr(place, name, fail)
    steps(local, REPEATING)  # the error may come at its end
    again, unaided = steps(local, REPEATING)
    assert again == expected
    assert unaided >= slow
    assert local.cache.counts().in_use == 0
    assert not local.scheduler.busy


def test_pauses_between_lookups_are_bounded(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalScheduler(tiny_folder, speculation=True)
    monkeypatch.setattr(drafter, "find", lambda *_: None)
    rid = local.submit(REPEATING, max_tokens=30, ignore_eos=True)
    local.step(20)
    pause = local.scheduler.requests.open[rid].speculation.next_pause
    assert pause == 1024


@pytest.mark.parametrize("others", [0, 5])
def test_drafts_of_some_do_not_hold_up_the_others(tiny_folder: Path, others: int) -> None:
    """Drafts of one request make a step at most a quarter longer for requests without drafts."""
    local = LocalScheduler(tiny_folder, speculation=True, num_pages=400)
    for _ in range(4):
        local.complete([REPEATING], max_tokens=32, ignore_eos=True)
    cost, run = local.scheduler.drafter.cost, local.scheduler.run_pass
    seen: list[tuple[list[int], int]] = []
    rng = random.Random(2)

    def recorded(plan: Any) -> Any:
        decoding = [request for request, *_ in plan if request.decoding]
        lengths = [request.draft_len for request in decoding]
        if len(decoding) == len(plan) == 1 + others:
            seen.append((lengths, int(WAITING_SHARE / cost.share_of_a_row(len(plan)))))
        return run(plan)

    local.scheduler.run_pass = recorded  # type: ignore[method-assign]
    for _ in range(others):
        draws = [rng.randrange(256) for _ in range(9)]
        local.submit(draws, max_tokens=60, ignore_eos=True, temperature=3.0, seed=rng.randrange(99))
    local.step(3 if others else 0)
    local.submit(REPEATING, max_tokens=32, ignore_eos=True)
    local.run()
    most = max(sum(lengths) for lengths, _ in seen)
    if others:
        assert most > 0
        assert all(sum(lengths) <= room for lengths, room in seen if 0 in lengths)
    else:
        assert most > max(room for _, room in seen)
