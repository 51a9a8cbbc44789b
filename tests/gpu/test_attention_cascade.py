"""Cascade attention on a GPU: equal to torch and to flat attention over trees, bit for bit where promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.kernels.triton import attention
from ramify.kernels.triton.attention import plan_shape, run_plan
from ramify.kernels.triton.cascade import plan_from_page_tables
from tests.kernels.attention_cases import Batch, Branch, make_tree
from tests.kernels.cascade_cases import assert_as_good, cascade_attention, groups_of


def tree_batch(node_pages, branches, **options) -> tuple[Batch, list]:
    batch = make_tree(node_pages, branches, **options)
    return Batch(*(tensor.cuda() for tensor in batch)), groups_of(batch)


@st.composite
def trees(draw):
    parents = [min(draw(st.integers(-1, 4)), index - 1) for index in range(draw(st.integers(1, 6)))]
    node_pages = [draw(st.integers(1, 40)) for _ in parents]
    branches = []
    for idle in (False, *draw(st.lists(st.booleans(), max_size=20))):
        node, path = draw(st.integers(0, len(parents) - 1)), ()
        while node >= 0:
            path, node = (node, *path), parents[node]
        own = draw(st.integers(1, 300))
        branches.append(Branch(path, own, 0 if idle else draw(st.sampled_from([1, 1, 1, min(own, 90)]))))
    return node_pages, branches


@settings(max_examples=30, deadline=None, derandomize=True)
@given(trees(), st.booleans())
def test_random_trees(tree, deterministic):
    batch, groups = tree_batch(*tree, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    out = cascade_attention(batch, groups, scale=0.09, deterministic=deterministic)
    assert_as_good(out, batch, scale=0.09)
    if deterministic:
        flat = attention.paged_attention(*batch, scale=0.09, deterministic=True)
        assert torch.equal(out, flat)


@pytest.mark.parametrize("shared_pages", [64, 512])
def test_many_branches_are_chosen_and_right(shared_pages):
    branches = [Branch((0,), 50 + row, 1) for row in range(64)]
    options = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    batch, _ = tree_batch((shared_pages,), branches, **options)
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=False)
    plan = plan_from_page_tables(
        batch.page_table.cpu().numpy(),
        batch.query_starts.tolist(),
        batch.kv_lens.tolist(),
        shape,
        batch.q.device,
    )
    assert any(launch.listed for launch in plan.launches)
    out = torch.full_like(batch.q, torch.nan)
    assert_as_good(run_plan(plan, *batch[:4], out, scale=0.09), batch, scale=0.09)
