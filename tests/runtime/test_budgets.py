"""Limits of programs in the scheduler: the requests of a limit share its tokens, and end with its time."""

from __future__ import annotations

from typing import Any

import pytest

from ramify.engine_messages import Submit
from ramify.messages import LimitHint, ProgramHint, Usage
from ramify.runtime.scheduler.requests.accounts import Budgets
from ramify.runtime.scheduler.requests.request import Request
from ramify.sampling_params import SamplingParams
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.test_scheduler import prompt_of


def hint(*limits: LimitHint, program: str = "p") -> ProgramHint:
    return ProgramHint(program=program, limits=limits)


def tokens_of(*results: Result) -> int:
    usages = [result.usage or Usage() for result in results]
    return sum(usage.prompt_tokens + usage.completion_tokens for usage in usages)


def ended_by(result: Result) -> str | None:
    assert result.finish is not None, result.error
    return None if result.finish.limit is None else result.finish.limit.id


def test_a_request_ends_at_the_last_token_that_its_limit_allows(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    told = hint(LimitHint(id="a", max_total_tokens=30))
    rid = local.submit(prompt_of(20), max_tokens=100, ignore_eos=True, hint=told)
    local.run()
    result = local.results[rid]
    assert (len(result.ids), tokens_of(result), ended_by(result)) == (10, 30, "a")
    assert result.finish.limit.tokens == 30  # type: ignore[union-attr]
    assert not result.finish.limit.timed_out  # type: ignore[union-attr]
    later = local.submit(prompt_of(5), max_tokens=1, hint=told)
    alone = local.submit(prompt_of(5), max_tokens=1)
    local.run()
    assert (ended_by(local.results[later]), tokens_of(local.results[later])) == ("a", 0)
    assert ended_by(local.results[alone]) is None


def test_a_limit_that_is_just_enough_ends_nothing(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    told = hint(LimitHint(id="a", max_total_tokens=30))
    rid = local.submit(prompt_of(20), max_tokens=10, ignore_eos=True, hint=told)
    local.run()
    assert local.results[rid].finish.reason == "length"  # type: ignore[union-attr]
    score = local.submit(prompt_of(20), max_tokens=0, hint=hint(LimitHint(id="b", max_total_tokens=20)))
    local.run()
    assert local.results[score].finish.reason == "length"  # type: ignore[union-attr]


@pytest.mark.parametrize("max_running", [1, 8])
def test_concurrent_branches_never_spend_more_together(tiny_model: Any, max_running: int) -> None:
    local = LocalScheduler(tiny_model, max_running=max_running, chunk_tokens=32)
    told = hint(LimitHint(id="a", max_total_tokens=100))
    other = local.submit(prompt_of(12, 99), max_tokens=60, ignore_eos=True, hint=hint(program="q"))
    rids = [local.submit(prompt_of(12, seed), max_tokens=60, ignore_eos=True, hint=told) for seed in range(6)]
    local.run()
    results = [local.results[rid] for rid in rids]
    assert 90 <= tokens_of(*results) <= 100
    assert {ended_by(result) for result in results} <= {"a", None}
    assert [ended_by(result) for result in results].count("a") >= 5
    assert len(local.results[other].ids) == 60
    assert local.cache.counts().in_use == 0


def test_a_queued_request_that_does_not_fit_ends_at_no_cost(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=1)
    told = hint(LimitHint(id="a", max_total_tokens=60))
    running = local.submit(prompt_of(20), max_tokens=30, ignore_eos=True, hint=told)
    queued = local.submit(prompt_of(45, 1), max_tokens=30, ignore_eos=True, hint=told)
    local.step()
    assert ended_by(local.results[queued]) == "a"
    assert tokens_of(local.results[queued]) == 0
    local.run()
    assert ended_by(local.results[running]) is None


def test_nested_limits_and_the_one_that_ended_a_request(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    outer, inner = LimitHint(id="outer", max_total_tokens=60), LimitHint(id="inner", max_total_tokens=30)
    first = local.submit(prompt_of(20), max_tokens=50, ignore_eos=True, hint=hint(outer, inner))
    local.run()
    second = local.submit(prompt_of(10, 1), max_tokens=50, ignore_eos=True, hint=hint(outer))
    local.run()
    assert (ended_by(local.results[first]), ended_by(local.results[second])) == ("inner", "outer")
    assert tokens_of(local.results[first], local.results[second]) == 60


def test_time_ends_queued_and_running_requests(tiny_model: Any) -> None:
    now = 0.0
    local = LocalScheduler(tiny_model, max_running=2, clock=lambda: now)
    told = hint(LimitHint(id="a", seconds_left=5.0))
    rids = [local.submit(prompt_of(12, seed), max_tokens=60, ignore_eos=True, hint=told) for seed in range(3)]
    local.step(4)
    assert not any(local.results[rid].ended for rid in rids)
    now = 5.0
    local.step()
    results = [local.results[rid] for rid in rids]
    assert [ended_by(result) for result in results] == ["a"] * 3
    assert all(result.finish.limit.timed_out for result in results)  # type: ignore[union-attr]
    assert sorted(tokens_of(result) > 0 for result in results) == [False, True, True]
    assert not local.scheduler.busy


def request(seed: int, *limits: LimitHint) -> Counted:
    submit = Submit(rid=f"r{seed}", ids=(1,) * 12, sampling=SamplingParams(), hint=hint(*limits))
    return Counted(submit, arrival=0.0, max_tokens=60)


class Counted(Request):
    reads = 0

    @property
    def output_len(self) -> int:
        Counted.reads += 1
        return super().output_len


def test_limits_without_requests_are_forgotten() -> None:
    budgets = Budgets(remembered=3)
    for number in range(6):
        one = request(number, LimitHint(id=str(number), max_total_tokens=99))
        budgets.join(one)
        budgets.leave(one)
    assert [str(number) in budgets for number in range(6)] == [False] * 3 + [True] * 3


def test_a_step_reads_only_running_requests() -> None:
    budgets = Budgets()
    requests = [request(seed, LimitHint(id="a", max_total_tokens=10_000)) for seed in range(20)]
    for one in requests:
        budgets.join(one)
    Counted.reads = 0
    assert not list(budgets.exceeding(0.0, requests[:2]))
    assert Counted.reads == 2


def test_a_limit_that_is_named_twice_counts_once(tiny_model: Any) -> None:
    now = 0.0
    local = LocalScheduler(tiny_model, clock=lambda: now)
    spent, timed = LimitHint(id="a", max_total_tokens=30), LimitHint(id="b", seconds_left=5.0)
    first = local.submit(prompt_of(20), max_tokens=100, ignore_eos=True, hint=hint(spent, spent))
    local.run()
    assert (tokens_of(local.results[first]), ended_by(local.results[first])) == (30, "a")
    second = local.submit(prompt_of(20), max_tokens=100, ignore_eos=True, hint=hint(timed, timed))
    now = 5.0
    local.step()
    assert ended_by(local.results[second]) == "b"
