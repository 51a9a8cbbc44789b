"""Cascade on the host: the tree found in page tables, and the cost model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ramify.kernels.triton.plan.attention_config import H100, Device, figures_of, tiles
from ramify.kernels.triton.plan.attention_plan import Shape
from ramify.kernels.triton.plan.cascade_groups import (
    Group,
    Groups,
    check_groups,
    choose,
    find_groups,
    previous,
    tiles_of,
    time_of,
)

LLAMA = Shape(32, 8, 128, 2, 64, 0, False, tiles(128, torch.bfloat16, H100), H100)
"""Llama-3.1-8B in bfloat16."""


@st.composite
def tables(draw):
    """(page_table, query_starts, kv_lens, page_size): few page ids, so that much is equal."""
    page_size = draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=7))
    width = max(map(len, rows))
    table = np.array([row + [9] * (width - len(row)) for row in rows], np.int32)
    lens = [draw(st.integers(0, len(row) * page_size)) for row in rows]
    new = [draw(st.integers(0, length)) for length in lens]
    return table, [0, *np.cumsum(new).tolist()], lens, page_size


@given(tables())
def test_groups_are_exactly_the_shared_leading_pages(case):
    """Page i of two sequences is in one group if and only if all their pages up to i are equal and cached."""
    table, starts, lens, page_size = case
    groups = find_groups(*case)
    new = np.diff(starts)
    pages = [(length - count) // page_size if count else 0 for length, count in zip(lens, new, strict=True)]
    together: set[tuple[int, int, int]] = set()
    for members, begin, tokens in groups:
        assert len(members) > 1
        assert tokens > 0
        assert begin % page_size == tokens % page_size == 0
        for page in range(begin // page_size, (begin + tokens) // page_size):
            for one in members:
                for other in members:
                    assert (one, other, page) not in together, "no page is read twice"
                    together.add((one, other, page))
    expected = {
        (one, other, page)
        for one in range(len(lens))
        for other in range(len(lens))
        for page in range(min(pages[one], pages[other]))
        if (table[one, : page + 1] == table[other, : page + 1]).all()
        and sum(
            pages[third] > page and (table[third, : page + 1] == table[one, : page + 1]).all()
            for third in range(len(lens))
        )
        > 1
    }
    assert together == expected
    check_groups(groups, np.array(lens) - new)
    assert [*Groups.of(groups)] == [*groups]


def test_groups_of_a_deep_tree():
    table = np.array([[1, 2, 3, 8], [1, 2, 4, 9], [1, 2, 3, 7], [5, 2, 3, 6]], np.int32)
    groups = find_groups(table, [0, 1, 2, 3, 4], [14, 14, 14, 14], 4)
    assert [*groups] == [Group((0, 1, 2), 0, 8), Group((0, 2), 8, 4)]


def test_previous_finds_the_last_equal_row():
    assert previous(np.array([7, 5, 7, 7, 5])).tolist() == [-1, -1, 0, 2, 1]


# The cost model.


@pytest.mark.parametrize(
    ("branches", "shared", "suffix", "pays"),
    [
        (1, 8192, 100, False),
        (2, 64, 100, False),
        (64, 128, 4000, False),
        (4, 8192, 100, True),
        (64, 1024, 100, True),
        (64, 8192, 100, True),
        (64, 32768, 100, True),
        (2, 1024, 30000, False),
    ],
)
def test_when_a_shared_prefix_pays(branches, shared, suffix, pays):
    assert reads_once(branches, shared, suffix) == pays


def test_more_branches_or_more_shared_tokens_pay_more():
    for fixed in (8, 64):
        lengths = [reads_once(fixed, shared, 2000) for shared in range(16, 32768, 256)]
        branches = [reads_once(branches, 100 * fixed, 2000) for branches in range(2, 200)]
        for found in (lengths, branches):
            assert found == sorted(found)
            assert found[-1]
            assert not found[0]


def test_long_prefills_already_read_a_prefix_often_enough():
    assert reads_once(8, 8192, 100)
    assert not reads_once(8, 8192, 2048, new=2048)


def reads_once(branches: int, shared: int, suffix: int, new: int = 1) -> bool:
    """Whether `branches` sequences of `suffix` own tokens, `new` of them new, read `shared` tokens once."""
    node = Group(tuple(range(branches)), 0, shared)
    return chosen([node], [new] * branches, [shared + suffix] * branches) == [node]


def chosen(groups: list[Group], new: list[int], lens: list[int]) -> list[Group]:
    return [*choose(Groups.of(groups), np.array(new), np.array(lens), LLAMA)]


def test_the_costs_are_those_of_the_device():
    """An H100's costs from its driver's figures are within a sixth of the defaults. On a card with a quarter
    of that bandwidth, reading a prefix again costs over three times as much."""

    def device(processors, clock, memory_clock, width, capability, cache):
        found = {"multiprocessor_count": processors, "max_shared_mem": 101376, "sm_clock_rate": clock,
                 "mem_clock_rate": memory_clock, "mem_bus_width": width}  # fmt: skip
        return figures_of(found, capability, cache)

    h100 = device(132, 1980000, 2619000, 5120, (9, 0), 50 << 20)
    for name in ("memory", "cache", "cache_bytes", "flops"):
        assert getattr(h100, name) == pytest.approx(getattr(H100, name), rel=1 / 6)
    l40s = device(142, 2520000, 9001000, 384, (8, 9), 96 << 20)
    assert l40s.memory == pytest.approx(0.9 * 864e9, rel=0.01)
    assert l40s.flops < H100.flops / 2
    saved = [
        float(time_of(*tiles_of(np.array([4]), shape), np.array([1024]), shape)[0])
        for shape in (LLAMA._replace(device=card) for card in (H100, l40s))
    ]
    assert saved[1] > 3 * saved[0]
    silent = device(60, 0, 0, 0, (8, 6), 0)
    assert (silent.memory, silent.flops) == (Device(60, 101376).memory, H100.flops), "a driver without rates"


def test_nodes_are_chosen_one_by_one():
    root, small, large = Group(tuple(range(32)), 0, 4096), Group((0, 1), 4096, 16), Group((2, 3), 4096, 16384)
    lens = [4300] * 32
    lens[2] = lens[3] = 20600
    assert chosen([root, small, large], [1] * 32, lens) == [root, large]
    assert chosen([Group((0, 1), 0, 16)], [1, 1], [20, 20]) == []
    assert chosen([root], [0] * 32, lens) == []


@pytest.mark.parametrize(
    "groups",
    [
        [Group((), 0, 16)],
        [Group((1, 0), 0, 16)],
        [Group((0, 2), 0, 16)],
        [Group((0, 1), 0, 0)],
        [Group((0, 1), 0, 17)],
        [Group((0, 1), 0, 16), Group((0,), 8, 8)],
    ],
)
def test_groups_that_are_no_tree_are_refused(groups):
    with pytest.raises(ValueError, match=f"group {len(groups) - 1}"):
        check_groups(Groups.of(groups), np.array([16, 16]))
