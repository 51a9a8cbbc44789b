"""Which captured step a plan takes, and which late step gives way; nothing is compiled or run."""

from __future__ import annotations

import itertools
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from ramify.kernels.triton.plan.attention_graph import Form, TokenForm
from ramify.runtime.executor import captured_steps
from ramify.runtime.executor.captured_steps import OFTEN, CapturedSteps
from ramify.runtime.executor.decode_graphs import DecodeGraphs, ladder, most_graphs
from ramify.runtime.executor.graph_buffers import Captures, GraphBuffers, GraphStep
from tests.kernels.graph_cases import planner_of

PAGE = 64


class Room(NamedTuple):
    """A form of `items` items; an odd form holds no other."""

    items: int

    def holds(self, other: Room) -> bool:
        return self == other or (self.items % 2 == 0 and self.items >= other.items)


class Step(GraphStep):
    programs = property(lambda self: self.rooms[0])  # type: ignore[assignment]


def steps_of(*planned: tuple[int, int], most: int = 2) -> CapturedSteps[Room]:
    """Steps planned as (index of the size, items), of which `most` late ones are kept."""
    buffers = mock.MagicMock(spec=GraphBuffers, captured=Captures())
    keys = [(index, (Room(items),)) for index, items in planned]
    return CapturedSteps(buffers, lambda key: Step({0: key[1][0].items}), keys, most=most)  # type: ignore[dict-item]


def take(steps: CapturedSteps[Room], items: int, times: int = 1, *, last: int = 3) -> tuple[int, int] | None:
    """(index, items) of the step that a plan of `items` items takes at the size 0, the last of `times`."""
    for _ in range(times):
        index, step = steps.find((0, (Room(items),)), last)
    return None if step is None else (index, step.programs)


def test_a_plan_takes_the_smallest_step_with_room_until_its_form_is_captured() -> None:
    steps = steps_of((0, 20), (0, 12), (1, 10))
    assert take(steps, 5) == (0, 12)
    assert take(steps, 15) == (0, 20)
    assert take(steps, 5, OFTEN - 2) == (0, 12)
    assert take(steps, 5) == (0, 5)
    assert take(steps, 15) == (0, 20), "an odd form holds no other"


def test_a_plan_without_a_step_at_its_size_is_padded_as_far_as_allowed() -> None:
    steps = steps_of((0, 4), (2, 30), (3, 30))
    assert take(steps, 21) == (2, 30)
    assert take(steps, 21, last=1) is None


def test_the_step_used_the_longest_ago_gives_way() -> None:
    steps = steps_of()
    for items in (1, 3):
        assert take(steps, items, OFTEN) == (0, items)
    assert take(steps, 1) == (0, 1)
    assert take(steps, 5, OFTEN) == (0, 5), "in the place of 3"
    steps._buffers.release.assert_called_once()  # type: ignore[attr-defined]
    assert take(steps, 1) == (0, 1)
    assert take(steps, 3) is None


def test_a_step_that_is_in_use_stays() -> None:
    """Three forms in turn with room for two: replacing one for another would capture all the time."""
    steps = steps_of()
    taken = [take(steps, items) for items in itertools.islice(itertools.cycle((1, 3, 5)), 30 * OFTEN)]
    assert steps._buffers.release.call_count == 0  # type: ignore[attr-defined]
    assert taken[-3:] == [(0, 1), (0, 3), None]


def test_a_form_that_came_once_early_is_captured_when_it_comes_often() -> None:
    steps = steps_of()
    take(steps, 5)
    for items in (1, 3):
        take(steps, items, OFTEN)
    assert take(steps, 5, 2 * OFTEN) == (0, 5)


def test_a_late_step_of_another_form_counts_as_used() -> None:
    steps = steps_of()
    take(steps, 8, OFTEN)
    take(steps, 1, OFTEN)
    assert take(steps, 7) == (0, 8)
    assert take(steps, 11, OFTEN) == (0, 11), "in the place of 1"
    assert take(steps, 8) == (0, 8)


def test_forms_are_forgotten_beyond_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "MOST_WAITING", 10)
    steps = steps_of()
    for items in range(1, 2001, 2):
        take(steps, items)
    assert len(steps._waiting) == 10 == len(steps._roomy)


def test_rooms_of_attention_hold_what_fits() -> None:
    planner = planner_of()
    small, large = planner.shape.tiles[0], planner.shape.tiles[1]
    form = Form(2, 8, ((small, 32),))
    assert form.holds(Form(1, 8, ((small, 16),)))
    assert form.holds(Form(2, 0))
    for other in (Form(3, 8), Form(2, 9), Form(2, 8, ((small, 64),)), Form(2, 8, ((large, 16),))):
        assert not form.holds(other)
    tokens = TokenForm(((small, False, 32), (large, True, 16)), 64, 128)
    assert tokens.holds(TokenForm(((small, False, 16),), 0, 0))
    for more in (
        TokenForm(((small, True, 16),), 0, 0),
        TokenForm(((small, False, 64),), 0, 0),
        TokenForm((), 128, 0),
        TokenForm((), 0, 256),
    ):
        assert not tokens.holds(more)


def graphs_of(most: int) -> DecodeGraphs:
    """Graphs for up to `most` decodes of Llama-3.1-8B's shape, uncaptured."""
    buffers = mock.MagicMock(spec=GraphBuffers, space=None, longest=32768, captured=Captures())
    buffers.attention = mock.MagicMock(planners={0: planner_of()})
    buffers.pool = mock.MagicMock(num_pages=60000, page_size=PAGE)
    buffers.device = torch.device("cpu")
    return DecodeGraphs(ladder(most), buffers)


@pytest.mark.parametrize(
    ("branches", "prefix", "tail"),
    [(64, 8192, 20), (16, 4096, 20), (200, 1024, 20), (8, 16384, 20), (64, 2048, 4000), (8, 8192, 6000)],
)
def test_each_step_of_a_forked_program_has_a_graph(branches: int, prefix: int, tail: int) -> None:
    """Branches behind one prefix, each with `tail` tokens of its own, decode and end one after the other.
    Before, up to 68 of about 290 steps ran eagerly."""
    graphs = graphs_of(256)
    planner, shared = graphs._attention.planners[0], prefix // PAGE
    ends, cascades = np.linspace(32, 280, branches).astype(int), 0
    for done in range(0, 280, 8):
        live = np.flatnonzero(ends > done)
        length = prefix + tail + done
        own = -(-length // PAGE) - shared
        table = np.zeros((len(live), shared + own), np.int32)
        table[:, :shared] = np.arange(shared)
        table[:, shared:] = shared + 256 * live[:, None] + np.arange(own)
        plans = {0: planner.plan(table, np.arange(len(live) + 1), [length] * len(live), torch.device("cpu"))}
        first, last = graphs.range_of(len(live))
        _, step = graphs.steps.find(graphs._key(first, plans), last)
        assert step is not None
        assert step.rooms[0].load(plans[0])
        cascades += any(launch.listed for launch in plans[0].launches)
    assert cascades > 10


@pytest.mark.parametrize("most", [4, 256, 1024])
def test_the_memory_of_all_graphs_is_planned(most: int) -> None:
    graphs = graphs_of(most)
    planned = most_graphs(graphs._attention, graphs.sizes, 60000 * PAGE, 32768)
    assert len(graphs.steps.planned) + captured_steps.MOST_LATE <= planned
    assert planned < len(graphs.steps.planned) + captured_steps.MOST_LATE + 2 * len(graphs.sizes)
