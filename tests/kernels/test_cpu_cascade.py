"""The compiled attention's cascade: the bits of flat attention over any tree, each prefix read once."""

from __future__ import annotations

import functools
import random
from collections import Counter

import pytest
import torch

from ramify.kernels.cpu import attention as cpu
from ramify.kernels.cpu.attention_plan import ITEM_ROWS, LEAST_ROWS
from ramify.kernels.cpu.attention_records import BLOCK
from ramify.kernels.reference.kv_store import quantise_rows

from . import attention_cases
from .attention_cases import Batch, Branch, make_batch

SCALE = 0.125
pytestmark = pytest.mark.usefixtures("one_thread")
make_tree = functools.partial(attention_cases.make_tree, dtype=torch.float32)


def check(batch: Batch, threads: int, **options) -> int:
    """Assert that the cascade has flat attention's bits; returns the rows of its tiles, 0 for no cascade."""
    torch.set_num_threads(threads)
    flat = cpu.paged_attention(*batch, scale=SCALE, **options, cascade=False)
    assert cpu.arena.call.cascade_rows == 0
    result = torch.full_like(batch.q, torch.nan)
    cpu.paged_attention(*batch, scale=SCALE, **options, out=result)
    assert torch.equal(result, flat)
    assert not result.isnan().any()
    return int(cpu.arena.call.cascade_rows)


def random_tree(seed: int) -> Batch:
    """Up to 40 branches below up to 6 nodes; decodes, chunks, and chunks that begin in shared pages."""
    draw = random.Random(seed)
    nodes = draw.randint(1, 6)
    above = [-1] + [draw.randrange(node) for node in range(1, nodes)]

    def path(node: int) -> tuple[int, ...]:
        return () if node < 0 else (*path(above[node]), node)

    branches = []
    for _ in range(draw.choice([2, 5, 9, 20, 40])):
        own = draw.choice([1, 2, 15, 16, 17, 40, 64, 100])
        new = draw.choice([1, 1, 1, 1, 0, min(3, own), own, min(33, own)])
        branches.append(Branch(path(draw.randrange(nodes)) if draw.random() < 0.9 else (), own, new))
    heads, kv_heads = draw.choice([(9, 3), (4, 4), (8, 2), (5, 1)])
    batch = make_tree(
        [draw.choice([1, 3, 4, 8, 17]) for _ in range(nodes)],
        branches,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice([64, 32, 128, 20]),
        page_size=draw.choice([16, 16, 5, 64]),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        seed=seed,
    )
    if draw.random() < 0.6:
        return batch
    pages = {name: quantise_rows(getattr(batch, name).float()) for name in ("k_pages", "v_pages")}
    return batch._replace(**pages)


def test_random_trees_give_the_bits_of_flat_attention():
    seen: Counter[bool] = Counter()
    for seed in range(40):
        batch = random_tree(seed)
        options = random.Random(seed).choice([{}, {}, {"window": 70}, {"window": 300}, {"soft_cap": 5.0}])
        for threads in (1, 2, 5):
            seen[check(batch, threads, **options) > 0] += 1
    assert min(seen[True], seen[False]) > 20


def tree(branches: int, shared: int, own: int = 20, new: int = 1, **options) -> Batch:
    """`branches` sequences below one node of `shared` pages of 16."""
    return make_tree([shared], [Branch((0,), own, new)] * branches, heads=9, kv_heads=3, **options)


def test_a_prefix_is_read_once_for_all_branches():
    batch = tree(32, 40)
    check(batch, 1)
    assert cpu.arena.call.blocks == 3 * (40 * 16 // BLOCK + 32)
    # One too many for a tile.
    check(tree(33, 40), 1)
    assert cpu.arena.call.blocks == 3 * (2 * (40 * 16 // BLOCK) + 33)


def test_every_level_of_a_tree_is_read_once():
    """A root, two nodes below it, four branches below each; the root fills whole blocks, they do not."""
    branches = [Branch((0, 1), 20, 1)] * 4 + [Branch((0, 2), 20, 1)] * 4
    batch = make_tree([8, 9, 8], branches[::2] + branches[1::2], heads=9, kv_heads=3)
    check(batch, 1)
    root, levels = 8 * 16 // BLOCK, 2 + 2
    cut_off = 4 * 16 + 20 - BLOCK  # above one block
    assert 0 < cut_off < BLOCK
    assert cpu.arena.call.blocks == 3 * (root + levels + 8)


def test_the_order_of_another_call_is_only_a_beginning():
    """Calls with other tables, of as many sequences and of fewer, disturb nothing."""
    one = make_tree([6, 6], [Branch((row % 2,), 10, 1) for row in range(12)], seed=1)
    other = make_tree([6, 6], [Branch((row // 6,), 10, 1) for row in range(12)], seed=2)
    few = make_tree([6], [Branch((0,), 10, 1)] * 3)
    for batch in (one, other, few, other, one, make_batch([(1, 90)] * 12), one):
        check(batch, 1)
    assert cpu.arena.call.cascade_rows > 0
    assert cpu.arena.call.blocks == 2 * (2 * (6 * 16 // BLOCK) + 12)


@pytest.mark.parametrize("new", [2, 4, 7])
def test_chunks_of_prefill_share_as_well(new):
    batch = tree(6, 12, own=40, new=new, dtype=torch.bfloat16)
    assert check(batch, 1) > 0
    tiles = -(-6 * 3 * new // (ITEM_ROWS // (3 * new) * 3 * new))
    assert cpu.arena.call.blocks == 3 * (tiles * (12 * 16 // BLOCK) + 6)


def test_the_flat_form_reads_every_prefix_for_each_branch():
    batch = tree(32, 40)
    flat = cpu.paged_attention(*batch, scale=SCALE, cascade=False)
    assert cpu.arena.call.blocks == 3 * 32 * (40 * 16 // BLOCK + 1)
    assert torch.equal(flat, cpu.paged_attention(*batch, scale=SCALE))


# Each way that the cost model can go was gone.


def test_nothing_in_common_stays_flat():
    assert check(make_batch([(1, 300)] * 8), 2) == 0


def test_less_than_a_block_in_common_stays_flat():
    assert check(tree(8, BLOCK // 16 - 1), 1) == 0


def test_one_thread_takes_the_largest_tiles():
    assert check(tree(32, 60), 1) == ITEM_ROWS


def test_more_threads_take_smaller_tiles():
    rows = [check(tree(32, 60), threads) for threads in (1, 2, 4, 16)]
    assert rows == sorted(rows, reverse=True)
    assert LEAST_ROWS <= rows[-1] < rows[0]


def test_where_tiles_would_leave_threads_idle_it_stays_flat():
    batch = tree(2, 60)
    assert check(batch, 1) > 0
    assert check(batch, 16) == 0
    assert cpu.arena.call.split


def test_long_chunks_keep_tiles_of_their_own():
    for new in (31, 33, 50):
        assert check(tree(3, 12, own=50, new=new), 1) == 0


def test_long_chunks_and_decodes_of_one_prefix_mix():
    branches = [Branch((0,), 30, 1)] * 9 + [Branch((0,), 100, 100)] + [Branch((0,), 30, 1)] * 9
    assert check(make_tree([12], branches, heads=9, kv_heads=3), 1) == ITEM_ROWS
