"""Flows: requests that arrive together share one place in the queue. A flow that runs alone loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ramify.engine_messages import Submit
from ramify.messages import ProgramHint
from ramify.runtime.scheduler.plan import Precedence
from ramify.runtime.scheduler.requests.flows import CHUNKS, Flow, Flows
from ramify.runtime.scheduler.requests.limits import TUNED, Tuning
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.speculation.acceptance import StepCost
from ramify.sampling_params import SamplingParams
from tests.runtime.local import LocalScheduler
from tests.runtime.test_priority import Timed, chat
from tests.runtime.test_scheduler import prompt_of

ROOM = {"max_running": 16, "num_pages": 400}


def listed(
    local: LocalScheduler, count: int, tokens: int = 40, length: int = 20, name: str = "list"
) -> list[str]:
    """Submit `count` prompts as one flow; returns their ids."""
    first = sum(map(ord, name))
    return [
        local.submit(prompt_of(length, first + row), max_tokens=tokens, ignore_eos=True, flow=name)
        for row in range(count)
    ]


def alone(model: Any, **options: Any) -> float:
    timed = Timed(model, **options)
    return timed.time_of(chat(timed.local))


@pytest.mark.parametrize(
    "flood",
    [
        lambda local: listed(local, 60),
        lambda local: [
            local.submit(prompt_of(20), max_tokens=60, ignore_eos=True, flow="n") for _ in range(32)
        ],
        lambda local: listed(local, 12, length=500, tokens=4),
        lambda local: listed(local, 1, length=1500, tokens=4),
    ],
    ids=["many-prompts", "many-choices", "long-prompts", "one-long-prompt"],
)
@pytest.mark.parametrize("policy", ["program", "fcfs"])
def test_a_chat_beside_any_one_body_takes_at_most_three_times_as_long(
    tiny_model: Any, flood: Any, policy: str
) -> None:
    options = {
        "max_running": 32,
        "num_pages": 100,
        "chunk_tokens": 64,
        "context_length": 1600,
        "policy": policy,
    }
    usual = alone(tiny_model, **options)
    timed = Timed(tiny_model, **options)
    flood(timed.local)
    for begun in range(2):
        timed.local.step(4)
        assert timed.time_of(chat(timed.local, seed=90 + begun)) < 3 * usual


def test_a_chat_is_admitted_in_the_next_step(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=4)
    rids = listed(local, 12, tokens=10)
    local.step(5)
    running = local.scheduler.requests.running
    assert [request.rid for request in running] == rids[:4]
    new = chat(local)
    local.step()
    assert [request.rid for request in running] == [new, *rids[:3]]
    local.run()
    assert [len(local.results[rid].ids) for rid in rids] == [10] * 12
    assert sum(local.results[rid].usage.retractions for rid in rids) == 1  # type: ignore[union-attr]


def test_a_list_beside_chats_loses_little_time(tiny_model: Any) -> None:
    """A chat that takes 0.13 s arrives every 0.5 s."""

    def seconds(chats: bool) -> tuple[float, int]:
        timed = Timed(tiny_model, **ROOM)
        rids, began, sent = listed(timed.local, 80), timed.now, 0
        while not all(timed.local.results[rid].ended for rid in rids):
            if chats and timed.now > began + sent / 2:
                chat(timed.local, seed=sent)
                sent += 1
            timed.local.step()
        return timed.now - began, sent

    apart, _ = seconds(chats=False)
    beside, sent = seconds(chats=True)
    assert sent > 2
    assert beside - apart < 1.1 * sent * alone(tiny_model)


def test_a_list_has_its_share_whatever_comes(tiny_model: Any) -> None:
    """One chat runs at any time. The list and the chats get half of the time each."""
    timed = Timed(tiny_model, **ROOM)
    rids, told_at, began = listed(timed.local, 32), "", timed.now
    chats = 0.0
    for seed in range(10_000):
        if not told_at or timed.local.results[told_at].ended:
            told_at = chat(timed.local, seed=seed)
        before, sitting = timed.now, timed.local.scheduler.planner
        timed.local.step()
        chats += (timed.now - before) if sitting.rule.leaves_out else 0.0
        if all(timed.local.results[rid].ended for rid in rids):
            break
    assert 1 / 3 < chats / (timed.now - began) < 0.6


def test_two_lists_share_the_places(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=10, policy="fcfs", tuning=Tuning(window=16))
    listed(local, 40, tokens=12)
    local.step(3)
    listed(local, 40, tokens=12, name="other")
    local.step(40)
    running = [request.flow_key[-1] for request in local.scheduler.requests.running]
    assert 3 <= running.count("list") <= 7
    assert len(running) == 10


def test_the_calls_of_a_program_are_one_flow(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=10)
    for row in range(30):
        hint = ProgramHint(program="p", name="p")
        local.submit(prompt_of(20, row), max_tokens=40, ignore_eos=True, hint=hint)
    local.step(3)
    new = chat(local)
    local.step()
    assert local.scheduler.requests.running[0].rid == new


# --- API keys ---


def flood(local: LocalScheduler, count: int, key: str, tokens: int = 60) -> list[str]:
    """Submit `count` requests of the key, each a flow of its own; returns their ids."""
    return [
        local.submit(prompt_of(20, sum(map(ord, key)) + row), max_tokens=tokens, ignore_eos=True, key=key)
        for row in range(count)
    ]


@pytest.mark.parametrize("policy", ["program", "fcfs"])
def test_a_chat_beside_the_flood_of_another_key_takes_at_most_three_times_as_long(
    tiny_model: Any, policy: str
) -> None:
    options = {"max_running": 16, "num_pages": 100, "chunk_tokens": 64, "policy": policy}
    usual = alone(tiny_model, **options)

    def beside(key: str) -> float:
        timed = Timed(tiny_model, **options)
        flood(timed.local, 40, "flood", tokens=40)
        timed.local.step(4)
        return timed.time_of(chat(timed.local, key=key))

    assert beside("other") < 3 * usual < beside("flood")


def test_a_first_request_of_a_key_takes_the_place_of_one_of_a_flood(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=10)
    rids = flood(local, 20, "flood", tokens=10)
    local.step(5)
    running = local.scheduler.requests.running
    assert [request.rid for request in running] == rids[:10]
    new = chat(local, key="other")
    local.step()
    assert [request.rid for request in running] == [new, *rids[:9]]
    local.run()
    assert [len(local.results[rid].ids) for rid in rids] == [10] * 20


def test_two_keys_share_the_places_whatever_their_flows(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=10, policy="fcfs", tuning=Tuning(window=16))
    flood(local, 60, "flood", tokens=12)
    local.step(3)
    for row in range(40):
        hint = ProgramHint(program="p", name="p")
        local.submit(prompt_of(20, row), max_tokens=12, ignore_eos=True, hint=hint, key="other")
    local.step(40)
    running = [request.flow_key[1] for request in local.scheduler.requests.running]
    assert 3 <= running.count("other") <= 7
    assert len(running) == 10


def test_a_key_that_floods_yields_with_all_of_its_flows() -> None:
    flows = Flows(100)
    flooding = [request(name, key="flood") for name in ("list",) * 20 + ("chat", "")]
    other = [request("", key="other")]
    for one in (*flooding, *other):
        flows.join(one)
    assert flows.judge(flooding, other)
    assert flows.share == 1 / 2, "one of two keys, of however many flows"
    assert [flooding[0].rank, flooding[-1].rank, other[0].rank] == [-2, -1, 0]
    flows.leave(other[0])
    assert flows.judge(flooding, [])
    assert [flooding[0].rank, flooding[-1].rank] == [-1, 0], "alone, a key has only its flows"
    for one in flooding:
        flows.leave(one)
    assert not flows._keys


# --- who yields -----------------------------------------------------------------------------------


def request(flow: str, priority: int = 0, prompt: int = 1, rid: str = "r", key: str = "") -> Request:
    submit = Submit(
        rid=rid, ids=(1,) * prompt, sampling=SamplingParams(), priority=priority, flow=flow, key=key
    )
    return Request(submit, arrival=0.0, max_tokens=1)


def judged(*groups: tuple[str, int, int], chunk: int = 100) -> tuple[list[str], float]:
    """(flows that yield, their share), for groups (name, requests, prompt tokens of each)."""
    flows = Flows(chunk)
    running = [request(name, prompt=length) for name, count, length in groups for _ in range(count)]
    for one in running:
        flows.join(one)
    flows.judge(running, [])
    assert {one.flow_key[-1] for one in running if one.rank < 0} == {
        one.flow_key[-1] for one in running if one.flow.yields
    }
    yielding = sorted({one.flow_key[-1] for one in running if one.flow.yields})
    for one in running:
        flows.leave(one)
    assert not len(flows)
    return yielding, flows.share


def test_long_lists_and_long_prompts_yield_beside_others_alone() -> None:
    assert judged(("chat", 1, 20), ("list", TUNED.light_requests + 1, 1)) == (["list"], 1 / 2)
    assert judged(("chat", 1, 20), ("list", TUNED.light_requests, 1)) == ([], 0.0)
    assert judged(("chat", 1, CHUNKS * 100), ("essay", 1, CHUNKS * 100 + 1), ("list", 50, 9)) == (
        ["essay", "list"],
        2 / 3,
    )
    assert judged(("list", 50, 9)) == ([], 0.0)
    assert judged(("list", 50, 9), ("other", 50, 9)) == ([], 0.0)


def test_programs_bodies_and_scopes_of_one_name_are_flows_of_their_own() -> None:
    def key(**given: Any) -> Any:
        submit = Submit(rid="r", ids=(1,), sampling=SamplingParams(), **given)
        return Request(submit, arrival=0.0, max_tokens=1).flow_key

    agent = ProgramHint(program="agent")
    keys = [key(flow="agent"), key(hint=agent), key(hint=agent, scope="a"), key(hint=agent, scope="b")]
    keys.append(key(hint=agent, scope="b", key="alice"))
    assert len(set(keys)) == 5
    assert key(flow="r") != key()
    assert key(hint=agent, flow="body") == key(hint=agent)


def test_each_rank_has_its_turn_whichever_others_are_there() -> None:
    turns, served = Precedence(StepCost(), Tuning(patience_s=0.0)), []
    for step in range(12):
        lower = (-1, -2, -3) if step % 2 == 0 else (-1, -2)
        served.append(turns.begin_turn([request("", rank) for rank in (0, *lower)], []).rule.most // 3)
    assert all(served.count(rank) >= 2 for rank in (-1, -2, -3))


def test_a_newcomer_goes_before_a_step_that_is_owed_once() -> None:
    turns = Precedence(StepCost(), Tuning(patience_s=0.0))
    running, came = [request("", -1)], request("")
    rules = []
    for _ in range(4):  # the newcomer never joins
        rules.append(turns.begin_turn(running, [came]).rule)
        turns.end_turn(1.0 if rules[-1].leaves_out else 0.0)
    assert [rule.leaves_out for rule in rules] == [True, False, True, False]
    came.stats.first_pass = 1.0
    assert all(turns.begin_turn(running, [came]).rule.shared for _ in range(3))


def test_flows_of_lower_priority_neither_yield_to_others_nor_make_them_yield() -> None:
    flows = Flows(100)
    running = [request("list") for _ in range(20)] + [request("chat", priority=-1)]
    for one in running:
        flows.join(one)
    assert not flows.judge(running, [])
    assert flows.share == 0.0


def test_a_long_prompt_that_is_cached_is_light(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, chunk_tokens=16)
    prompt = prompt_of(120)
    for _ in range(2):
        rid = local.submit(prompt, max_tokens=2)
        uncached = local.scheduler.requests.open[rid].uncached
        local.run()
    assert uncached == 1


def test_a_long_prompt_is_heavy_until_all_of_it_is_computed(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, chunk_tokens=8, num_pages=400)
    requests = local.scheduler.requests
    local.submit(prompt_of(9), max_tokens=200, ignore_eos=True)
    essay = requests.open[local.submit(prompt_of(CHUNKS * 8 + 20, 1), max_tokens=90, ignore_eos=True)]
    while essay.prefilling:
        local.step()
        assert essay.flow.heavy
        if essay.computed_len > 40 and not essay.stats.retractions:
            requests.retract(essay)  # its pages stay in the tree
    assert essay.stats.retractions == 1
    local.step()
    assert not essay.flow.heavy


def test_the_common_prompt_of_choices_counts_once(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, chunk_tokens=8, num_pages=2000)

    def flow_of(name: str, seeds: Sequence[int]) -> Flow:
        rids = [local.submit(prompt_of(28, seed), max_tokens=9, ignore_eos=True, flow=name) for seed in seeds]
        return local.scheduler.requests.open[rids[0]].flow

    chat(local)
    choices = flow_of("n", (0, 0, 0, 0, 3, 3, 3, 3))
    prompts = flow_of("prompts", (4, 5, 6, 7))
    local.step()
    assert (choices.heavy, prompts.heavy) == (False, True)
