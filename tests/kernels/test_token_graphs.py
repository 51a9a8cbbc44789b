"""Steps of several tokens a request as graphs: their forms, what they launch, and what capture forbids.

Nothing is compiled or run; `tests/kernels/interpreted/test_token_graphs.py` compares what they compute.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ramify.runtime.executor.attention import PlannedAttention
from ramify.runtime.executor.captured_steps import OFTEN
from ramify.runtime.executor.runner import Runner
from ramify.runtime.executor.token_graphs import LARGEST, TokenGraphs, buckets
from tests.kernels.graph_cases import (
    KV_HEADS,
    forms_of,
    plan_of,
    planner_of,
    runner_of,
    step_of,
    token_graphs_of,
)
from tests.kernels.kernel_compiler import compiling
from tests.kernels.test_capture import check_replays


def captured() -> tuple[Runner, TokenGraphs]:
    runner = runner_of()
    runner.capture_graphs([1, 8], max_pages=250, buckets=[8, 32, 64, 256])
    return runner, token_graphs_of(runner)


@pytest.mark.parametrize("largest", [5, 48, 100, 600, 9000])
def test_buckets_reach_the_largest_step_or_the_largest_bucket(largest: int) -> None:
    found = buckets(largest)
    assert found == sorted(set(found))
    assert found[-1] <= min(largest, LARGEST)
    assert found[-1] >= min(largest, LARGEST) / 2
    assert all(4 * (high - low) <= high for low, high in itertools.pairwise(found) if low >= 128)


def test_forms_of_prompts_and_verification_have_a_graph_from_the_start() -> None:
    with compiling(90, noting=True), torch.inference_mode():
        _, graphs = captured()
        before = len(forms_of(graphs))
        prompt, verification = step_of((60, 60)), step_of(*[(4, 1000)] * 7)
        for batch in (prompt, verification):
            hidden = graphs.replay(batch)
            assert hidden is not None
            assert len(hidden) == batch.tokens.shape[1]
        assert len(forms_of(graphs)) == before


def test_a_form_is_captured_when_it_comes_often() -> None:
    """The form is a chunk of a prompt beside decodes."""
    with compiling(90, noting=True), torch.inference_mode():
        runner, graphs = captured()
        before, batch = len(forms_of(graphs)), step_of((200, 700), *[(1, 900)] * 6)
        assert all(graphs.replay(batch) is not None for _ in range(OFTEN + 2)), "by the graph of mixed steps"
        assert len(forms_of(graphs)) == before + 1
        assert runner.captured.awaited == OFTEN


def test_steps_that_do_not_fit_run_eagerly() -> None:
    with compiling(90, noting=True), torch.inference_mode():
        _, graphs = captured()
        for spans in ([(300, 300)], [(180, 180)], [(2, 40)] * 9):
            assert graphs.replay(step_of(*spans)) is None, (
                "too many tokens, too much padding, too many requests"
            )


def test_a_captured_step_can_be_replayed() -> None:
    with compiling(90, noting=True), torch.inference_mode():
        _, graphs = captured()
        check_replays(graphs)


def test_a_step_launches_the_programs_of_its_form() -> None:
    """The kernel's grid in both layers has at most twice the plan's items, or the least room."""
    with compiling(90, noting=True) as launches:
        runner, _ = captured()
        assert isinstance(runner.attention, PlannedAttention)
        for spans in ([(60, 60)], [(4, 1000)] * 7, [(250, 250)]):
            batch = step_of(*spans)
            (plan,) = (plan_of(planner, batch) for planner in runner.attention.planners.values())
            launches.clear()
            runner.forward(batch)
            programs = sum(launch.programs for launch in launches if launch.name == "attend")
            room = sum(max(16, 2 * len(launch.items)) for launch in plan.launches)
            assert 0 < programs <= 2 * KV_HEADS * room


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "spans", [[(16, 16)], [(512, 9000)], [(5, 2000)] * 40, [(400, 3000), *[(1, 5000)] * 60]]
)
def test_a_form_holds_the_plan_that_it_is_of(spans: list[tuple[int, int]], deterministic: bool) -> None:
    planner = planner_of(deterministic=deterministic)
    batch = step_of(*[(new, min(length, 8192)) for new, length in spans])
    plan = plan_of(planner, batch)
    tokens = batch.tokens.shape[1]
    form = planner.token_form(plan, tokens)
    room = planner.token_room(form, tokens, None)
    assert room.load(plan)
    assert planner.token_form(room.plan, tokens) == form, "rounding once is enough"
