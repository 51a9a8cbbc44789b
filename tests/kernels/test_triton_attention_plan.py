"""Attention plans, read back: a token sees each position in exactly one item; each state is merged once."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.kernels.triton.attention import plan_attention
from ramify.kernels.triton.cascade import plan_cascade
from ramify.kernels.triton.plan.attention_config import CHUNK, H100, Device, Tile, tiles
from ramify.kernels.triton.plan.attention_plan import Plan, Shape
from ramify.kernels.triton.plan.cascade_groups import Group, Groups

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def shape_of(
    group: int, *, window: int = 0, deterministic: bool = False, processors: int = 132, head_dim: int = 128
) -> Shape:
    device = Device(processors, H100.shared_bytes)
    forms = tiles(head_dim, torch.bfloat16, device, deterministic=deterministic)
    return Shape(2 * group, 2, head_dim, 2, 16, window, deterministic, forms, device)


def check(plan: Plan, starts: list[int], lens: list[int], shape: Shape, *, shared: bool = False) -> None:
    """Read the plan as the kernels do."""
    group = shape.heads // shape.kv_heads
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(
        list
    )  # (token, member): ranges, slots
    owner = np.repeat(np.arange(len(lens)), np.diff(starts))
    for launch in plan.launches:
        lengths = [end - begin for *_, begin, end, _, _ in launch.items.tolist()]
        assert lengths == sorted(lengths, reverse=True)
        for first, row, rows, start, table, begin, end, slot, stride in launch.items.tolist():
            assert 0 < rows <= launch.tile.rows
            assert 0 <= begin < end
            assert begin % launch.tile.columns == 0
            for r in range(row, row + rows):
                token = first + r // group
                if launch.listed:
                    token = int(plan.tokens[token])
                elif not shared:
                    assert owner[token] == table
                low, high = begin, min(end, start + r // group + 1)
                if shape.window:
                    low = max(low, start + r // group - shape.window + 1)
                pieces = [(begin, end)]
                if shape.deterministic and slot >= 0:
                    assert begin % CHUNK == 0 or shape.window
                    cuts = sorted({begin, end, *range(-(-begin // CHUNK) * CHUNK, end, CHUNK)})
                    pieces = list(itertools.pairwise(cuts))
                for number, (left, right) in enumerate(pieces):
                    at = slot + number * stride + r if slot >= 0 else -1
                    if max(low, left) < min(high, right):
                        seen[token, r % group].append((max(low, left), min(high, right), at))
    merged: dict[int, list[int]] = {}
    if plan.merge is not None:
        bounds, index = plan.merge.starts.tolist(), plan.merge.index.tolist()
        for entry, token in enumerate(plan.merge.tokens.tolist()):
            assert token not in merged
            merged[token] = index[bounds[entry] : bounds[entry + 1]]
            assert merged[token]
    used: set[int] = set()
    for row, length in enumerate(lens):
        new = starts[row + 1] - starts[row]
        for token in range(starts[row], starts[row + 1]):
            position = length - new + token - starts[row]
            lowest = max(0, position - shape.window + 1) if shape.window else 0
            for member in range(group):
                parts = sorted(seen.pop((token, member)))
                assert [part[0] for part in parts] == [lowest, *(part[1] for part in parts[:-1])]
                assert parts[-1][1] == position + 1
                slots = [part[2] for part in parts]
                if token in merged:
                    assert slots == [base + member for base in merged[token]], "in ascending order"
                    assert not used & {*slots}
                    used |= {*slots}
                else:
                    assert slots == [-1]
    assert not seen
    assert max(used, default=-1) < plan.state_rows or not used


@st.composite
def batches(draw):
    """(starts, lens, group)"""
    lengths = draw(
        st.lists(
            st.tuples(st.sampled_from([0, 1, 1, 1, 2, 17, 700]), st.sampled_from([0, 1, 300, 1000, 5000])),
            min_size=1,
            max_size=5,
        )
    )
    starts = np.cumsum([0, *(new for new, _ in lengths)]).tolist()
    return starts, [new + cached for new, cached in lengths], draw(st.sampled_from([1, 3, 20]))


@settings(max_examples=80, deadline=None)
@given(
    batches(), st.sampled_from([0, 1, 200, 3000]), st.booleans(), st.sampled_from([1, 8, 132]),
    st.sampled_from([64, 128, 256]),
)  # fmt: skip
def test_every_position_is_covered_once(batch, window, deterministic, processors, head_dim):
    starts, lens, group = batch
    shape = shape_of(
        group, window=window, deterministic=deterministic, processors=processors, head_dim=head_dim
    )
    check(plan_attention(starts, lens, shape, CPU), starts, lens, shape)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([1, 132]), st.sampled_from([1, 4, 20]))
def test_cascade_covers_every_position_once(data, deterministic, processors, group):
    """Any groups that `check_groups` allows, nested or not, holes and idle sequences included."""
    count = data.draw(st.integers(1, 5))
    new = [data.draw(st.sampled_from([0, 1, 1, 9])) for _ in range(count)]
    lens = [extra + data.draw(st.integers(0, 3000)) for extra in new]
    reached = [0] * count
    groups = []
    for _ in range(data.draw(st.integers(0, 4))):
        members = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
        low, high = max(reached[row] for row in members), min(lens[row] - new[row] for row in members)
        if low < high:
            begin = data.draw(st.integers(low, high - 1))
            tokens = data.draw(st.integers(1, high - begin))
            groups.append(Group(tuple(members), begin, tokens))
            for row in members:
                reached[row] = begin + tokens
    starts = np.cumsum([0, *new]).tolist()
    shape = shape_of(group, deterministic=deterministic, processors=processors)
    check(plan_cascade(starts, lens, Groups.of(groups), shape, CPU), starts, lens, shape, shared=True)


def items(plan: Plan) -> int:
    return sum(len(launch.items) for launch in plan.launches)


def test_parts_fill_the_device_and_no_more():
    starts, lens = [0, 1], [131072]
    few = items(plan_attention(starts, lens, shape_of(4, processors=8), CPU))
    many = items(plan_attention(starts, lens, shape_of(4), CPU))
    assert 8 <= few < many <= 512
    assert items(plan_attention(list(range(513)), [1024] * 512, shape_of(4), CPU)) == 512
    assert items(plan_attention([0, 1], [200], shape_of(4), CPU)) == 1


def test_deterministic_parts_stop_where_their_states_would_not_fit():
    shape = shape_of(1, deterministic=True)._replace(heads=64, kv_heads=64)
    lens = [131072] * 4
    plan = plan_attention(list(range(5)), lens, shape, CPU)
    assert plan.state_rows * 64 * 130 * 4 <= 256 << 20


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, [16]), (16, [16]), (17, [64]), (64, [64]), (65, [128]), (999, [128])]
)
def test_the_smallest_tile_that_holds_a_sequence(rows, sizes):
    plan = plan_attention([0, rows], [rows], shape_of(1), CPU)
    assert [launch.tile.rows for launch in plan.launches] == sizes


def test_a_chosen_tile_is_used_for_everything():
    shape = shape_of(4)._replace(tiles=(Tile(32, 32, 4, 1),))
    plan = plan_attention([0, 1, 41], [50, 90], shape, CPU)
    check(plan, [0, 1, 41], [50, 90], shape)
    assert [launch.tile.rows for launch in plan.launches] == [32]


@pytest.mark.parametrize("deterministic", [False, True])
def test_parts_of_a_window_that_moves_along_a_chunk(deterministic):
    """The last tile begins in a later part than the first."""
    shape = shape_of(1, window=3000, deterministic=deterministic)
    plan = plan_attention([0, 900], [5900], shape, CPU)
    assert plan.merge is not None
    check(plan, [0, 900], [5900], shape)
