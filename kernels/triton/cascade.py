"""Cascade attention: a prefix of several sequences is read once, then merged with the rest of each sequence.

The state of attention over a set of positions is its output and the log-sum-exp of its scores. States over
disjoint sets merge exactly (arXiv 2402.05099, 2501.01005).

Example: page size 128, three sequences with one new token each; A and B share 4 pages, C shares the first 2:

    page tables   A = 1 2 3 4 7    B = 1 2 3 4 8    C = 1 2 5 9
    tree          find_groups: Group((A, B, C), begin 0, tokens 256), Group((A, B), 256, 256)
    chosen        choose keeps the nodes whose saved reads are worth their states; here both
    tasks         A, B, C x [0, 256) in A's pages; A, B x [256, 512) in A's pages; each token x its rest
    parts         a task becomes work items of a tile of rows and a range of positions; each leaves a state
    merge         A and B merge 3 states each, C merges 2, in ascending order of positions
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ramify.kernels.triton.attention import plan_attention
from ramify.kernels.triton.plan.attention_config import CHUNK, GRAIN
from ramify.kernels.triton.plan.attention_plan import (
    EVERY_POSITION,
    Ints,
    Plan,
    Shape,
    Tasks,
    make_plan,
    ranges,
)
from ramify.kernels.triton.plan.cascade_groups import Groups, check_groups, choose, find_groups, previous


def plan_cascade(
    query_starts: Sequence[int],
    kv_lens: Sequence[int],
    groups: Groups,
    shape: Shape,
    device: torch.device,
) -> Plan:
    """The plan that reads each group once, even where this saves no time.

    Groups are rounded down to positions where parts may begin: multiples of GRAIN, or of CHUNK in a
    deterministic plan.

    Raises
    ------
    ValueError
        The groups are not nodes of one tree within the cached prefixes, or `shape` has a window, which
        cascade does not support.
    """
    if shape.window:
        raise ValueError(f"a window of {shape.window} positions leaves nothing for cascade to share.")
    starts, lens = np.asarray(query_starts, np.int64), np.asarray(kv_lens, np.int64)
    new = starts[1:] - starts[:-1]
    check_groups(groups, lens - new)
    grain = CHUNK if shape.deterministic else GRAIN
    begin, end = groups.begin // grain * grain, groups.end // grain * grain
    rows, node = groups.members, groups.owner
    read = (new[rows] > 0) & (begin < end)[node]
    rows, node = rows[read], node[read]
    before = previous(rows)
    reached = np.where(before < 0, 0, end[node[before]])
    counts = new[rows]
    owner, place = ranges(counts)
    listed = starts[rows[owner]] + place
    heads = np.flatnonzero(np.diff(node, prepend=-1))
    gap = np.flatnonzero(reached < begin[node])
    own = np.flatnonzero(new)
    done = np.zeros_like(lens)
    done[rows] = end[node]  # of several nodes of a sequence the last counts

    def column(of_gaps: Ints, of_nodes: Ints, of_rests: Ints) -> Ints:
        return np.concatenate([of_gaps, of_nodes, of_rests])

    def every(tasks: Ints) -> Ints:
        return np.full(len(tasks), EVERY_POSITION)

    tasks = Tasks(
        first=column(starts[rows[gap]], (np.cumsum(counts) - counts)[heads], starts[own]),
        tokens=column(counts[gap], np.add.reduceat(counts, heads) if len(heads) else heads, new[own]),
        position=column(every(gap), every(heads), (lens - new)[own]),
        table=column(rows[gap], rows[heads], own),
        begin=column(reached[gap], begin[node[heads]], done[own]),
        end=column(begin[node[gap]], end[node[heads]], lens[own]),
        listed=np.repeat([False, True, False], [len(gap), len(heads), len(own)]),
    )
    return make_plan(tasks, listed, shape, device)


def plan_from_page_tables(
    page_table: NDArray[np.int32],
    query_starts: Sequence[int],
    kv_lens: Sequence[int],
    shape: Shape,
    device: torch.device,
) -> Plan:
    """The plan of a batch from its page tables, with a cascade if this saves time on the shape's device.

    Parameters
    ----------
    page_table : (B, max_pages) int32, on the host
    query_starts, kv_lens : B + 1 and B integers, as in `paged_attention`; not checked
    shape : from `plan_shape`; with a window the plan has no cascade
    """
    if not shape.window:
        groups = find_groups(page_table, query_starts, kv_lens, shape.page_size)
        if groups:
            starts = np.asarray(query_starts, np.int64)
            new = starts[1:] - starts[:-1]
            groups = choose(groups, new, np.asarray(kv_lens, np.int64), shape)
        if groups:
            return plan_cascade(query_starts, kv_lens, groups, shape, device)
    return plan_attention(query_starts, kv_lens, shape, device)
