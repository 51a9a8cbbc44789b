"""Cascade attention in the interpreter: equal to flat attention over random trees, and what it reads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.kernels.triton import attention
from ramify.kernels.triton.attention import plan_attention, plan_shape, run_plan
from ramify.kernels.triton.cascade import plan_cascade, plan_from_page_tables
from ramify.kernels.triton.plan.attention_config import H100
from ramify.kernels.triton.plan.attention_graph import Form, StaticPlan, form_of, launches_of
from ramify.kernels.triton.plan.attention_plan import Plan, Shape
from ramify.kernels.triton.plan.cascade_groups import Group, Groups
from ramify.kernels.triton.tiles.merge import merge_states
from tests.kernels.attention_cases import Batch, Branch, make_batch, make_tree
from tests.kernels.cascade_cases import assert_as_good, cascade_attention, dense, groups_of

FREE = dataclasses.replace(H100, memory=1e30, cache=1.0)
"""A device on which every node pays."""


def host(batch: Batch) -> tuple[np.ndarray, list[int], list[int]]:
    return batch.page_table.numpy(), batch.query_starts.tolist(), batch.kv_lens.tolist()


def free_plan(batch: Batch, shape: Shape) -> Plan:
    return plan_from_page_tables(*host(batch), shape._replace(device=FREE), batch.q.device)


def listed(plan: Plan) -> int:
    """The number of items that read for several sequences."""
    return sum(len(launch.items) for launch in plan.launches if launch.listed)


@st.composite
def trees(draw):
    """Trees of up to 5 sequences below up to 4 nodes of 1 to 5 pages of 64: decodes, chunks, idle ones."""
    parents = draw(st.lists(st.integers(-1, 2), min_size=1, max_size=4))
    parents = [min(parent, index - 1) for index, parent in enumerate(parents)]
    node_pages = [draw(st.integers(1, 5)) for _ in parents]
    branches = []
    for idle in (False, *draw(st.lists(st.booleans(), max_size=4))):
        node = draw(st.integers(0, len(parents) - 1))
        path: tuple[int, ...] = ()
        while node >= 0:
            path, node = (node, *path), parents[node]
        own = draw(st.integers(1, 70))
        branches.append(Branch(path, own, 0 if idle else draw(st.sampled_from([1, 1, min(own, 9)]))))
    return node_pages, branches


@settings(max_examples=12, deadline=None, derandomize=True)
@given(trees(), st.sampled_from([0.0, 4.0]), st.booleans(), st.booleans())
def test_random_trees_equal_flat_attention(tree, soft_cap, half, with_sinks):
    dtype = torch.float16 if half else torch.float32
    batch = make_tree(*tree, heads=2, kv_heads=1, page_size=64, dtype=dtype)
    sinks = torch.tensor([0.5, 4.0]) if with_sinks else None
    options = {"scale": 0.125, "soft_cap": soft_cap, "sinks": sinks}
    assert_as_good(cascade_attention(batch, groups_of(batch), **options), batch, **options)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(trees())
def test_random_trees_by_cost(tree):
    batch = make_tree(*tree, heads=2, kv_heads=1, page_size=64, dtype=torch.float32)
    options = {"scale": 0.125, "sinks": torch.tensor([0.5, 4.0])}
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=False)
    plan = free_plan(batch, shape)
    out = run_plan(plan, *batch[:4], torch.full_like(batch.q, torch.nan), **options)
    assert_as_good(out, batch, **options)


DEEP = ((3, 5, 2, 9), [Branch((0, 1), 70, 1)] * 3 + [Branch((0, 1, 2), 3, 2), Branch((0, 3), 40, 1)])


@pytest.mark.parametrize("page_size", [16, 50])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (24, 1), (6, 3)])
def test_nodes_that_end_anywhere(page_size, heads, kv_heads):
    """Pages of 50 end where no block does; 24 heads need the larger tiles."""
    batch = make_tree(*DEEP, heads=heads, kv_heads=kv_heads, page_size=page_size)
    groups = groups_of(batch)
    assert_as_good(cascade_attention(batch, groups, scale=0.125), batch, scale=0.125)
    # A hole in the path: the root is left out, then the first of its children.
    assert_as_good(cascade_attention(batch, groups[1:], scale=0.125), batch, scale=0.125)


def test_shared_pages_are_read_through_one_sequence():
    batch = make_tree((8,), [Branch((0,), 9, 1) for _ in range(4)], page_size=16)
    expected = attention.paged_attention(*batch, scale=0.125)
    empty = int(batch.page_table[0, -1])
    assert batch.k_pages[empty].isnan().all()
    batch.page_table[1:, :8] = empty
    groups = [Group((0, 1, 2, 3), 0, 128)]
    result = cascade_attention(batch, groups, scale=0.125)
    assert torch.allclose(result.float(), expected.float(), atol=2e-3)
    assert dense(batch, torch.float32, scale=0.125)[1:].isnan().all(), "their own tables lead nowhere"


def test_a_node_shorter_than_a_part_is_left_to_its_members():
    batch = make_tree((2,), [Branch((0,), 9, 1) for _ in range(4)], page_size=16)
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=False)
    plan = plan_cascade(*host(batch)[1:], Groups.of(groups_of(batch)), shape, batch.q.device)
    assert listed(plan) == 0
    assert plan.merge is None


def test_the_cost_model_decides_by_default():
    batch = make_tree((10,), [Branch((0,), 9, 1) for _ in range(6)], page_size=64)
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=False)
    assert listed(plan_from_page_tables(*host(batch), shape, batch.q.device)) == 0, "640 tokens, 2 heads"
    assert listed(free_plan(batch, shape)) > 0
    large = shape._replace(heads=512, kv_heads=128, head_dim=128)
    assert listed(plan_from_page_tables(*host(batch), large, batch.q.device)) > 0
    windowed = large._replace(window=100)
    assert listed(plan_from_page_tables(*host(batch), windowed, batch.q.device)) == 0


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_cascade_gives_the_bits_of_flat_attention_when_deterministic(soft_cap):
    branches = [Branch((0, 1), 70, 1), Branch((0, 1), 130, 2), Branch((0, 2), 3, 1), Branch((0,), 600, 1)]
    batch = make_tree((9, 8, 17), branches, heads=2, kv_heads=1, page_size=64)
    options = {"scale": 0.125, "soft_cap": soft_cap, "sinks": torch.tensor([0.5, 4.0])}
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=True)
    cascade = free_plan(batch, shape)
    flat = plan_attention(*host(batch)[1:], shape, batch.q.device)
    assert listed(cascade) > 0
    results = [
        run_plan(plan, *batch[:4], torch.full_like(batch.q, torch.nan), **options) for plan in (cascade, flat)
    ]
    assert torch.equal(*results)
    assert torch.equal(results[0], attention.paged_attention(*batch, **options, deterministic=True))
    assert_as_good(results[0], batch, **options)


def test_a_window_is_refused():
    batch = make_tree((8,), [Branch((0,), 9, 1) for _ in range(2)])
    shape = plan_shape(batch.q, batch.k_pages, window=7, deterministic=False)
    with pytest.raises(ValueError, match="window of 7"):
        plan_cascade(*host(batch)[1:], Groups.of(groups_of(batch)), shape, batch.q.device)


# The merge on its own.


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("parts", [1, 2, 3, 11])
def test_merging_states(parts, head_dim):
    heads, kv_heads, tokens = 6, 2, 3
    group = heads // kv_heads
    outs = torch.randn(parts, tokens, heads, head_dim)
    lses = 5 * torch.randn(parts, tokens, heads)
    lses[0, 1] = -torch.inf if parts > 1 else 0.0
    expected = (torch.softmax(lses, 0)[..., None] * outs).sum(0)
    # Any split of 2**lse into a maximum and a sum is the same state.
    base = torch.log2(torch.e * torch.ones(())) * lses
    total = torch.rand(parts, tokens, heads) + 0.5
    top = base - torch.log2(total)
    total[lses == -torch.inf] = 0.0
    acc = torch.where(lses[..., None] == -torch.inf, 0.0, outs * total[..., None])
    order = torch.randperm(parts * tokens)  # states in any order in memory, unused rows between them
    rows = parts * tokens * group + group
    states = [torch.full((rows, kv_heads, *tail), torch.nan) for tail in ((head_dim,), (), ())]
    for index in range(parts * tokens):
        part, token = divmod(index, tokens)
        at = int(order[index]) * group
        for state, value in zip(states, (acc, top, total), strict=True):
            whole = value[part, token]
            state[at : at + group] = whole.view(kv_heads, group, *whole.shape[1:]).transpose(0, 1)
    index = (order.view(parts, tokens).t() * group).flatten().to(torch.int32)
    starts = torch.arange(tokens + 1, dtype=torch.int32) * parts
    out = torch.full((tokens + 2, heads, head_dim), torch.nan)
    written = torch.tensor([4, 0, 2], dtype=torch.int32)
    merge_states(tuple(states), out, written, starts, index)
    assert torch.allclose(out[written.long()], expected, atol=1e-5)
    assert out[[1, 3]].isnan().all()


# A plan at fixed addresses, as a captured graph needs it.


def test_a_static_plan_serves_step_after_step():
    branches = [Branch((0,), 70 + 300 * row, 1) for row in range(3)]
    batch = make_tree((6,), branches, heads=2, kv_heads=1, page_size=64)
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=False)
    forms = launches_of(shape, Form(4, 3, tuple((tile, 32) for tile in shape.tiles)), 3)
    cpu = torch.device("cpu")
    static = StaticPlan(shape, cpu, tokens=3, forms=forms, states=64, listed_tokens=3)
    addresses = [launch.items.data_ptr() for launch in static.plan.launches]
    table, starts, lens = host(batch)
    out = torch.full_like(batch.q, torch.nan)
    free = shape._replace(device=FREE)
    for shorter, planned in ((0, free), (2, shape), (64, free)):
        now = [length - shorter for length in lens]
        plan = plan_from_page_tables(table, starts, now, planned, cpu)
        assert (listed(plan) > 0) == (planned is free)
        assert static.load(plan)
        out.fill_(torch.nan)
        step = batch._replace(kv_lens=torch.tensor(now, dtype=torch.int32))
        assert_as_good(run_plan(static.plan, *batch[:4], out, scale=0.125), step, scale=0.125)
        assert [launch.items.data_ptr() for launch in static.plan.launches] == addresses
    short = StaticPlan(shape, cpu, tokens=3, forms=[(shape.tiles[0], False, 1)], states=64)
    before = [launch.items.clone() for launch in short.plan.launches]
    assert short.load(plan_attention([0, 1], [70], shape, cpu))
    assert not torch.equal(before[0], short.plan.launches[0].items)
    assert not short.load(plan_attention([0, 1, 2], [70, 70], shape, cpu)), "two items"
    assert not short.load(plan_from_page_tables(table, starts, lens, free, cpu)), "listed items"


def test_room_for_few_merges_gives_the_same_bits():
    """One of three decodes is split; room for every token's merge leaves two void entries."""
    batch = make_batch([(1, 70), (1, 1500), (1, 9)], heads=2, kv_heads=1, page_size=64, dtype=torch.float16)
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=False)
    cpu = torch.device("cpu")
    plan = plan_attention(*host(batch)[1:], shape, cpu)
    form = form_of(plan, 3)
    assert form.merges == 1
    found = []
    for merges in (form.merges, None):
        static = StaticPlan(shape, cpu, tokens=3, forms=launches_of(shape, form, 3), states=32, merges=merges)
        assert static.load(plan)
        assert len(static.plan.merge.tokens) == (merges or 3)
        found.append(run_plan(static.plan, *batch[:4], torch.full_like(batch.q, torch.nan), scale=0.125))
    wanted = run_plan(plan, *batch[:4], torch.full_like(batch.q, torch.nan), scale=0.125)
    assert all(torch.equal(each, wanted) for each in found)
    assert_as_good(wanted, batch, scale=0.125)
    two = plan_attention([0, 1, 2, 3], [1500, 1500, 9], shape, cpu)
    forms = launches_of(shape, Form(4, 1), 3)
    assert not StaticPlan(shape, cpu, tokens=3, forms=forms, states=64, merges=1).load(two), "two merges"


def test_padding_of_a_static_plan_touches_nothing():
    batch = make_tree((6,), [Branch((0,), 9, 1)], heads=2, kv_heads=1, page_size=64)
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=True)
    cpu = torch.device("cpu")
    static = StaticPlan(shape, cpu, tokens=4, forms=launches_of(shape, Form(1, 4), 4), states=8)
    assert static.load(plan_attention(*host(batch)[1:], shape, cpu))
    out = torch.full((4, 2, 64), torch.nan, dtype=torch.float16)
    q = torch.cat([batch.q, torch.full((3, 2, 64), torch.nan, dtype=torch.float16)])
    run_plan(static.plan, q, *batch[1:4], out, scale=0.125)
    assert out[1:].isnan().all()
    assert torch.equal(out[:1], attention.paged_attention(*batch, scale=0.125, deterministic=True))
