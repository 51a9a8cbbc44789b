"""Programs that captured decoding steps launch, beside those that have work; nothing is compiled or run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from ramify.kernels.triton import cascade
from ramify.kernels.triton.plan.attention_plan import Plan
from ramify.kernels.triton.planner import Planner
from ramify.runtime.executor.attention import PlannedAttention
from ramify.runtime.executor.captured_steps import OFTEN
from ramify.runtime.executor.graph_buffers import Captures, GraphBuffers
from tests.kernels.graph_cases import (
    HEADS,
    KV_HEADS,
    decodes,
    forms_of,
    graphs_of,
    plan_of,
    planner_of,
    runner_of,
)
from tests.kernels.kernel_compiler import Compiled, compiling

PAGES = 64  # of plans: the default on CUDA


@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("context", [1024, 8192, 131072])
@pytest.mark.parametrize("batch", [1, 32, 256])
def test_at_most_half_of_the_programs_have_no_work(
    batch: int, context: int, deterministic: bool, window: int
) -> None:
    """A batch fills at least two thirds of its graph, as the ladder of sizes has it."""
    planner = planner_of(window=window, deterministic=deterministic)
    assert most_without_work(planner, [context] * batch) <= 2


@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("short", "long"),
    [
        ([1024] * 255, [131072]),
        ([200] * 255, [8192]),
        ([200] * 239, [8192] * 17),
        ([1024] * 31, [131072]),
        ([200] * 7, [8192]),
        ([200] * 3, [131072]),
    ],
)
def test_a_few_long_sequences_launch_few_merges(
    short: list[int], long: list[int], deterministic: bool, window: int
) -> None:
    """Sequences that are not split need no merge, however many they are beside one that is."""
    planner = planner_of(window=window, deterministic=deterministic)
    assert most_without_work(planner, short + long) <= 2


def most_without_work(planner: Planner, lengths: list[int]) -> float:
    """Programs launched for each with work: the larger ratio of a full graph and one filled to 3/4."""
    batch = len(lengths)
    pages = [-(-length // PAGES) for length in lengths]
    table = np.zeros((batch, max(pages)), np.int32)
    for row, (count, end) in enumerate(zip(pages, np.cumsum(pages), strict=True)):
        table[row, :count] = np.arange(end - count, end)
    positions = max(sum(lengths), 1_000_000)
    plan = planner.plan(table, np.arange(batch + 1), lengths, torch.device("cpu"))
    ratios = []
    for size in {batch, batch * 4 // 3}:
        form = planner.form(plan, size)
        assert form.level <= planner.highest_level(size, positions), "it is captured at start"
        room = planner.room(form, size, positions, None)
        assert room.load(plan)
        ratios.append(count_programs(room.plan) / count_programs(plan))
    return max(ratios)


def count_programs(plan: Plan) -> int:
    """Programs of attention and merge, in one layer."""
    merged = 0 if plan.merge is None else len(plan.merge.tokens)
    return 8 * sum(len(launch.items) for launch in plan.launches) + 32 * merged


def programs(launches: list[Compiled]) -> Counter[str]:
    found: Counter[str] = Counter()
    for launch in launches:
        found[launch.name] += launch.programs
    return found


def test_a_step_launches_the_programs_of_its_level() -> None:
    """The kernels' own grids: of two layers, at two lengths, in a graph for four."""
    with compiling(90, noting=True) as launches:
        runner = runner_of()
        runner.capture_graphs([1, 4], max_pages=250)
        for lengths, attend, merge in (([30, 40, 50], 4, 0), ([3000], 16, 1)):
            launches.clear()
            runner.forward(decodes(lengths))
            found = programs(launches)
            assert found["attend"] == 2 * KV_HEADS * attend
            assert found["_merge"] == 2 * HEADS * merge


def test_sizes_between_have_the_two_lowest_levels() -> None:
    """A plan of a higher level is padded to the next size that has it."""
    with compiling(90, noting=True) as launches:
        runner = runner_of()
        runner.capture_graphs([1, 2, 4, 5, 6, 8], max_pages=250)
        graphs = graphs_of(runner)
        levels = Counter(graphs.sizes[index] for index in forms_of(graphs))
        assert levels[5] == 2 < levels[4]
        for lengths, size in (([30] * 5, 5), ([3000] * 5, 6)):
            launches.clear()
            runner.forward(decodes(lengths))
            flat = [launch.programs for launch in launches if launch.name == "attend"]
            assert flat
            assert flat[0] % (KV_HEADS * size) == 0
            assert flat[0] // (KV_HEADS * size) in (1, 2, 4, 8, 16, 32)


def test_steps_without_a_cascade_launch_none() -> None:
    with compiling(90, noting=True) as launches:
        runner = runner_of()
        runner.capture_graphs([4], max_pages=250)
        launches.clear()
        runner.forward(decodes([300, 400, 500]))
        assert sum(launch.name == "attend" for launch in launches) == 2, "one a layer"


def test_a_form_that_merges_few_is_captured_when_it_comes_often() -> None:
    """One of eight decodes is split: until then the graph of its level that can merge all eight runs."""
    with compiling(90, noting=True) as launches:
        runner = runner_of()
        runner.capture_graphs([8], max_pages=250)
        graphs = graphs_of(runner)
        before = len(forms_of(graphs))
        for step in range(OFTEN + 2):
            launches.clear()
            assert graphs.replay(decodes([3000 + step, *[30] * 7])) is not None
            merge = 1 if step >= OFTEN - 1 else 8
            assert programs(launches)["_merge"] == 2 * HEADS * merge
        assert len(forms_of(graphs)) == before + 1
        launches.clear()
        graphs.replay(decodes([3000, 3000, *[30] * 6]))
        assert programs(launches)["_merge"] == 2 * HEADS * 8, "room for one merge is too little"


def test_a_form_of_cascade_plans_is_captured_when_it_comes_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "choose", lambda groups, *rest: groups)
    with compiling(90, noting=True) as launches:
        runner = runner_of()
        runner.capture_graphs([1, 96], max_pages=250)
        graphs = graphs_of(runner)
        before = len(forms_of(graphs))
        batch = decodes([1990 + row % 16 for row in range(70)], shared=124)
        assert isinstance(runner.attention, PlannedAttention)
        planner = next(iter(runner.attention.planners.values()))
        plan = plan_of(planner, batch)
        (items,) = (len(launch.items) for launch in plan.launches if launch.listed)
        for step in range(OFTEN + 2):
            launches.clear()
            assert graphs.replay(batch) is not None
            captured = step >= OFTEN - 1
            assert (programs(launches)["attend"] <= 2 * KV_HEADS * 2 * (items + 96)) == captured
        assert len(forms_of(graphs)) == before + 1
        assert runner.captured.awaited == OFTEN


class Memory:
    """A device's memory: a graph takes 3 bytes. The runs before a capture have left 100 in torch's cache;
    `torch.cuda.graph` begins by emptying it."""

    def __init__(self) -> None:
        self.free, self.cached = 10**6, 0

    def synchronize(self) -> None:
        self.free -= 100
        self.cached += 100

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 10**6

    def empty_cache(self) -> None:
        self.free += self.cached
        self.cached = 0

    def graph_pool_handle(self) -> object:
        return self

    @contextlib.contextmanager
    def graph(self, *args: object, pool: object) -> Iterator[None]:
        self.empty_cache()
        yield
        self.free -= 3


def test_captures_are_counted_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures at start, and the capture of a form that comes often."""
    memory = Memory()
    for name in ("synchronize", "mem_get_info", "empty_cache", "graph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, getattr(memory, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.MagicMock)
    with compiling(90, noting=True):
        runner = runner_of()
        assert runner.captured == Captures()
        monkeypatch.setattr(GraphBuffers, "has_graphs", True)
        runner.capture_graphs([8], max_pages=250)
        captured, graphs = runner.captured, graphs_of(runner)
        planned = len(forms_of(graphs))
        assert (captured.graphs, captured.bytes, captured.awaited) == (planned, 3 * planned, 0)
        assert captured.seconds > 0
        for step in range(OFTEN + 2):
            runner.forward(decodes([3000 + step, *[30] * 7]))
        assert (captured.graphs, captured.bytes) == (planned + 1, 3 * (planned + 1))
        assert captured.awaited == OFTEN
