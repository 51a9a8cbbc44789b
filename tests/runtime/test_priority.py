"""Priority: who goes first, that the tokens stay the same, and that nobody starves."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine_messages import ChoiceTokens, Submit
from ramify.grammar.compile.child_jobs import answer
from ramify.runtime.scheduler.admission import OVERTAKING, OVERTAKING_BATCHES
from ramify.runtime.scheduler.plan import PATIENCE_STEPS, SHARE, Precedence
from ramify.runtime.scheduler.requests.limits import TUNED, Tuning
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.speculation.acceptance import StepCost
from ramify.sampling_params import SamplingParams
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.test_overlap import Load, told
from tests.runtime.test_scheduler import prompt_of

STEP_S, TOKEN_S = 5.5e-3, 0.6e-3
"""Seconds of a forward pass itself and of each of its tokens: about those of SmolLM2-135M on two cores."""


class Timed:
    """A scheduler whose clock is advanced only by its forward passes."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.now = 0.0
        self.local = LocalScheduler(model, clock=lambda: self.now, speculation=False, **options)
        self.local.runner.before_pass = self._take_time

    def _take_time(self, batch: Any) -> None:
        self.now += STEP_S + TOKEN_S * len(batch.ids)

    def time_of(self, rid: str) -> float:
        """Step until `rid` has ended; returns the simulated seconds that this took."""
        began = self.now
        while not self.local.results[rid].ended:
            self.local.step()
        return self.now - began


def chat(local: LocalScheduler, seed: int = 99, **options: Any) -> str:
    return local.submit(prompt_of(30, seed), max_tokens=20, ignore_eos=True, **options)


def batch(local: LocalScheduler, rows: int, tokens: int = 300) -> list[str]:
    return [
        local.submit(prompt_of(20, row), max_tokens=tokens, ignore_eos=True, priority=-1)
        for row in range(rows)
    ]


# --- tokens -------------------------------------------------------------------------------------


class Mixed(Load):
    """Requests of every kind, a few at each step, with random priorities out of `priorities`, and `flows` in
    turn."""

    def __init__(
        self, model: Any, priorities: tuple[int, ...], flows: tuple[str, ...] = ("",), **options: Any
    ) -> None:
        super().__init__(model, seed=3, max_running=8, **options)
        chosen, flow, submit = random.Random(4), itertools.cycle(flows), self.local.submit

        def submitted(ids: Any, **options: Any) -> str:
            return submit(ids, priority=chosen.choice(priorities), flow=next(flow), **options)

        self.local.submit = submitted  # type: ignore[method-assign]
        self.sat_out = 0

    def run(self) -> list[Result]:
        scheduler = self.local.scheduler
        kinds = [*range(11)] * 3
        self.random.shuffle(kinds)
        submitted: list[str] = []
        while kinds or scheduler.busy or self.jobs:
            if len(submitted) < 6 or scheduler.counters.steps % 3 == 0 or not scheduler.busy:
                submitted += [self.submit(kinds.pop()) for _ in range(2) if kinds]
            while self.jobs:
                scheduler.receive(answer(self.jobs.pop(), self.vocabulary))
            self.local.step()
            self.sat_out += scheduler.planner.rule.leaves_out
        return [self.local.results[rid] for rid in submitted]


CROWDS: dict[str, dict[str, Any]] = {
    "priorities": {"priorities": (-1, -1, -1, -1, 0, 5)},
    "flows": {"priorities": (0,), "flows": ("list",) * 4 + ("",) * 2},
}
"""Load → options of `Mixed`. In "flows", the list runs when the first other requests arrive."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False, "longest": 40},
    "overlap-and-drafts": {"overlap": True, "longest": 40, "speculation": True},
    "short-of-pages": {
        "overlap": False, "page_size": 4, "num_pages": 36, "chunk_tokens": 16, "longest": 50,
    },
    "no-jumps": {"overlap": True, "jump_forward": False, "prefix_cache": "naive", "policy": "fcfs"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("patience_s", [TUNED.patience_s, 0.03])
@pytest.mark.parametrize(
    ("crowd", "way"),
    [*(("priorities", way) for way in WAYS), ("flows", "overlap-and-drafts"), ("flows", "short-of-pages")],
)
def test_the_same_tokens(tiny_folder: Path, crowd: str, way: str, patience_s: float) -> None:
    expected = Mixed(tiny_folder, (0,), **WAYS[way]).run()
    light = 1 if crowd == "flows" else TUNED.light_requests
    tuning = Tuning(patience_s=patience_s, ride=1.0, light_requests=light)
    load = Mixed(tiny_folder, tuning=tuning, **CROWDS[crowd], **WAYS[way])
    found = load.run()
    assert [told(result) for result in found] == [told(result) for result in expected]
    assert load.sat_out > 20
    assert load.local.cache.counts().in_use == 0


# --- who goes first -------------------------------------------------------------------------------


def test_a_chat_beside_a_batch_takes_little_longer_than_alone(tiny_model: Any) -> None:
    alone = Timed(tiny_model)
    usual = alone.time_of(chat(alone.local))
    beside: dict[int, float] = {}
    for priority in (-1, 0):
        timed = Timed(tiny_model, max_running=40, num_pages=2000)
        batch(timed.local, 60)
        timed.local.step(4)
        beside[priority] = timed.time_of(chat(timed.local, priority=priority))
    assert beside[0] < 1.5 * usual
    assert beside[-1] > 10 * usual, "without a priority it queues, and shares every step"


def test_requests_that_sit_out_compute_nothing_and_go_on_afterwards(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    expected = [
        result.ids for result in local.complete([prompt_of(20, row) for row in range(3)], max_tokens=9)
    ]
    local = LocalScheduler(tiny_model, tuning=Tuning(ride=1.0))
    low = [local.submit(prompt_of(20, row), max_tokens=9, priority=-1) for row in range(3)]
    local.step(3)
    before, computed = [len(local.results[rid].ids) for rid in low], local.scheduler.counters.computed_tokens
    high = chat(local)
    local.step(20)
    assert local.results[high].ended
    assert [len(local.results[rid].ids) for rid in low] == before
    assert local.scheduler.counters.computed_tokens - computed == 30 + 19
    assert local.scheduler.counters.retractions == 0
    local.run()
    assert [local.results[rid].ids for rid in low] == expected


def test_a_place_is_taken_from_the_lowest_priority_and_newest(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=3)
    low: list[str] = []
    for priority in (-2, -2, -1):
        low.append(local.submit(prompt_of(20, len(low)), max_tokens=50, ignore_eos=True, priority=priority))
        local.step()
    high = chat(local)
    local.step()
    running = local.scheduler.requests.running
    assert [request.rid for request in running] == [high, low[2], low[0]]
    equal = chat(local, seed=98, priority=-2)
    local.step()
    assert equal not in [request.rid for request in running]
    local.run()
    assert [local.results[rid].usage.retractions for rid in low] == [0, 1, 0]  # type: ignore[union-attr]


def test_pages_are_taken_from_lower_priorities_only(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=4, num_pages=48, chunk_tokens=64)
    low = [local.submit(prompt_of(60, row), max_tokens=30, ignore_eos=True, priority=-1) for row in range(3)]
    high = local.submit(prompt_of(90, 9), max_tokens=60, ignore_eos=True)
    local.run()
    found = {rid: local.results[rid].usage.retractions for rid in (*low, high)}  # type: ignore[union-attr]
    assert found[high] == 0
    assert sum(found.values()) > 0
    assert all(len(local.results[rid].ids) == 30 for rid in low)


def test_nobody_waits_for_a_prefix_that_a_lower_priority_computes(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, chunk_tokens=16)
    trunk = prompt_of(200)
    local.submit([*trunk, 1], max_tokens=2, priority=-1)
    local.step()
    high = local.submit([*trunk, 2], max_tokens=1)
    steps = -(-(201 - 16) // 16)
    local.step(steps)
    assert local.results[high].ended


def test_the_spans_of_choices_have_the_priority_of_their_request(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=2)
    batch(local, 6)
    local.step()
    prompt = prompt_of(30, 50)
    choices = [ChoiceTokens(shared=30, ids=(1, 2, i, 4)) for i in range(5)]
    rid = local.submit(prompt, choices=choices, max_tokens=0, priority=3)
    local.step(12)
    assert local.results[rid].ended


def test_rows_that_cost_nothing_do_not_sit_out() -> None:
    def places(row_s: float) -> int:
        cost = StepCost()
        for rows in range(1, 100):
            cost.learn(rows, 5e-3 + row_s * rows)
        high, *low = [request(priority) for priority in (0, *[-1] * 200)]
        for one in low:
            one.computed_len = one.prompt_len
        return len(Precedence(cost).begin_turn([high, *low], []).first) - 1

    assert places(0.0) == 200
    assert 1 <= places(0.6e-3) < 10
    assert places(5e-3) == 0


# --- nobody starves --------------------------------------------------------------------------------


def request(priority: int, arrival: float = 0.0) -> Request:
    submit = Submit(rid=f"{priority}", ids=(1,), sampling=SamplingParams(), priority=priority)
    return Request(submit, arrival=arrival, max_tokens=1)


@given(
    steps=st.lists(st.tuples(st.floats(1e-3, 0.1), st.floats(1e-3, 0.5)), min_size=50, max_size=400),
    waits=st.booleans(),
)
@settings(deadline=None)
def test_lower_priorities_have_their_share_of_the_time(steps: list[tuple[float, float]], waits: bool) -> None:
    """A step may take any time, alone (high priorities only) or shared (all priorities)."""
    turns = Precedence(StepCost())
    high, low = [request(0)], [request(-1)]
    low[0].computed_len = 0  # it prefills, so it does not ride along
    total = shared = 0.0
    longest = max(seconds for step in steps for seconds in step)
    for alone_s, together_s in steps:
        turn = turns.begin_turn(high, low) if waits else turns.begin_turn(high + low, [])
        takes_part = not turn.rule.leaves_out
        if not waits:
            assert (low[0] in turn.first) == takes_part
        seconds = together_s if takes_part else alone_s
        turns.end_turn(seconds)
        total, shared = total + seconds, shared + seconds * takes_part
        assert shared >= SHARE * (total - max(TUNED.patience_s, PATIENCE_STEPS * longest) - longest) - 1e-9
        assert shared <= SHARE * total + longest + 1e-9


def test_time_that_lower_priorities_had_to_themselves_is_no_debt() -> None:
    turns = Precedence(StepCost())
    high, low = [request(0)], [request(-1)]
    for _ in range(100):  # a chat of 0.2 s in every 2 s
        assert turns.begin_turn(high + low, []).rule.leaves_out
        turns.end_turn(0.2)
        turns.begin_turn(low, [])
        turns.end_turn(1.8)


@pytest.mark.parametrize(("every", "higher"), [(3, (0,)), (10, (0, 1))])
def test_prefills_of_each_rank_have_their_turn(tiny_model: Any, every: int, higher: tuple[int, ...]) -> None:
    """Prompts of higher priorities alone could fill the chunk of each shared step."""
    local = LocalScheduler(tiny_model, chunk_tokens=8, num_pages=2000, tuning=Tuning(patience_s=0.01))
    low = local.submit(prompt_of(80, 7), max_tokens=2, priority=-1)
    for seed in range(400):
        if seed % every == 0:
            for priority in higher:
                local.submit(prompt_of(90, 100 + seed + priority), max_tokens=8, priority=priority)
        local.step()
        if local.results[low].ended:
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("window", [256, 4])
@pytest.mark.parametrize("policy", ["prefix", "fcfs"])
def test_a_request_that_is_overtaken_too_often_gets_a_place_and_keeps_it(
    tiny_model: Any, policy: str, window: int
) -> None:
    """More high-priority requests always wait than there are places, and than the policy considers."""
    tuning = Tuning(window=window, patience_s=1e9)
    local = LocalScheduler(tiny_model, max_running=2, policy=policy, tuning=tuning)
    running = local.scheduler.requests.running
    highs = [local.submit(prompt_of(8, seed), max_tokens=3, ignore_eos=True) for seed in range(6)]
    low = local.submit(prompt_of(8, 999), max_tokens=12, ignore_eos=True, priority=-1)
    local.submit(prompt_of(8, 998), max_tokens=12, ignore_eos=True, priority=-2)
    place = None
    for seed in range(6, 400):
        highs.append(local.submit(prompt_of(8, seed), max_tokens=3, ignore_eos=True))
        local.step()
        if low in [request.rid for request in running]:
            place = sum(local.results[rid].ended for rid in highs)
            for _ in range(10):  # it sits out, while others come and go beside it
                local.step()
                assert low in [request.rid for request in running]
            break
    local.run()
    assert place is not None
    assert 2 < place <= OVERTAKING * 7 + OVERTAKING_BATCHES * 2 + 2  # seven stood before it
    assert len(local.results[low].ids) == 12
    assert local.results[low].usage.retractions == 0  # type: ignore[union-attr]
