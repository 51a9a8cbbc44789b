"""The tree of shared prefixes of a batch, from its page tables, and the choice of prefixes to read once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.kernels.triton.plan.attention_plan import Shape

LAUNCH_S, MARGIN = 4e-6, 0.05
"""The time of one more launch, and the share of the time without a cascade that a cascade must save. Neither
was measured on a card (docs/kernels.md); errors matter only for close choices."""


class Group(NamedTuple):
    """A node of the tree of prefixes: its members have positions [begin, begin + tokens) in the same pages.

    members : rows of the page table, ascending; at least one
    """

    members: tuple[int, ...]
    begin: int
    tokens: int


def find_groups(
    page_table: NDArray[np.int32], query_starts: Sequence[int], kv_lens: Sequence[int], page_size: int
) -> list[Group]:
    """Every node with at least two sequences of the tree of equal leading pages, parents first.

    Only whole pages before a sequence's new tokens count, so every member sees all of a node. Sequences
    without new tokens are not members. If no first page is shared, nothing else is compared.

    Example: page size 4, page tables 1 2 3 8, 1 2 4 9, 1 2 3 7 with new tokens in the last page:
    [Group((0, 1, 2), begin=0, tokens=8), Group((0, 2), begin=8, tokens=4)].

    Parameters
    ----------
    page_table : (B, max_pages)
    query_starts, kv_lens : B + 1 and B integers, as in `paged_attention`
    """
    starts, lens = np.asarray(query_starts, np.int64), np.asarray(kv_lens, np.int64)
    new = starts[1:] - starts[:-1]
    pages = (lens - new) // page_size
    families: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero((new > 0) & (pages > 0)):
        families[int(page_table[row, 0])].append(int(row))
    groups: list[Group] = []
    for family in families.values():
        if len(family) > 1:
            groups += _tree([(row, page_table[row, : pages[row]]) for row in family], page_size)
    return sorted(groups, key=lambda group: group.begin)


def _tree(rows: list[tuple[int, NDArray[np.int32]]], page_size: int) -> list[Group]:
    """The nodes below one first page. In lexical order, rows that share a prefix are adjacent."""
    rows.sort(key=lambda item: item[1].tobytes())
    common = [_common(one[1], other[1]) for one, other in itertools.pairwise(rows)]
    groups = []
    open_nodes: list[tuple[int, int]] = []  # (pages, first row), both ascending
    for index, depth in enumerate([*common, 0]):
        first = index
        while open_nodes and open_nodes[-1][0] > depth:
            pages, first = open_nodes.pop()
            above = max(depth, open_nodes[-1][0] if open_nodes else 0)
            members = tuple(sorted(row for row, _ in rows[first : index + 1]))
            groups.append(Group(members, above * page_size, (pages - above) * page_size))
        if depth and not (open_nodes and open_nodes[-1][0] == depth):
            open_nodes.append((depth, first))
    return groups


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The number of equal leading pages."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


def check_groups(groups: Sequence[Group], cached: Sequence[int]) -> None:
    """Raise ValueError naming the first group that is not a node of one tree within the cached prefixes.

    cached : for each sequence, its number of tokens before the new tokens
    """
    reached = [0] * len(cached)
    for index, (members, begin, tokens) in enumerate(groups):
        ascending = bool(members) and list(members) == sorted({*members})
        if not (ascending and members[0] >= 0 and members[-1] < len(cached)):
            raise ValueError(f"group {index}: members must be ascending rows of the {len(cached)} sequences.")
        for row in members:
            if begin < reached[row] or tokens < 1 or begin + tokens > cached[row]:
                raise ValueError(
                    f"group {index}: positions [{begin}, {begin + tokens}) of sequence {row} must lie within "
                    f"its {cached[row]} cached tokens and after those of the groups before."
                )
            reached[row] = begin + tokens


def choose(groups: Sequence[Group], new: Sequence[int], kv_lens: Sequence[int], shape: Shape) -> list[Group]:
    """The nodes that save more than their states cost; [] if together they are not worth two launches.

    A node that does not begin where its chosen parent ends costs one more state for each of its tokens.

    Parameters
    ----------
    groups : parents before children, as from `find_groups`
    new, kv_lens : for each sequence, its number of new tokens and of all tokens
    """
    chosen: list[Group] = []
    reached = [0] * len(new)
    saved = 0.0
    for group in groups:
        counts = [new[row] for row in group.members if new[row]]
        rest = sum(new[row] for row in group.members if new[row] and reached[row] < group.begin)
        gain = time_of(counts, group.tokens, shape) - time_of([sum(counts)], group.tokens, shape)
        gain -= _state_time(sum(counts) + rest, shape)
        if gain > 0:
            chosen.append(group)
            saved += gain
            for row in group.members:
                reached[row] = group.begin + group.tokens
    merged = sum(count for count, end in zip(new, reached, strict=True) if end)
    flat = sum(time_of([count], length, shape) for count, length in zip(new, kv_lens, strict=True))
    fixed = 2 * LAUNCH_S + _state_time(merged, shape)
    return chosen if saved - fixed > MARGIN * flat else []


def time_of(counts: Sequence[int], tokens: int, shape: Shape) -> float:
    """Seconds for tasks of `counts` queries each to attend to the same `tokens` positions."""
    group, device = shape.heads // shape.kv_heads, shape.device
    sizes = [tile.rows for tile in shape.tiles]
    tiles = padded = 0
    for count in counts:
        rows = count * group
        size = next((size for size in sizes if size >= rows), sizes[-1])
        tiles += -(-rows // size)
        padded += -(-rows // size) * size
    if not tiles or not tokens:
        return 0.0
    read = 2 * tokens * shape.kv_heads * shape.head_dim * shape.element_size
    again = device.cache if read <= device.cache_bytes else device.memory
    moving = read / device.memory + (tiles - 1) * read / again
    computing = 4 * padded * shape.kv_heads * tokens * shape.head_dim / device.flops
    return max(moving, computing)


def _state_time(tokens: int, shape: Shape) -> float:
    """Seconds to write and read back one state for each of `tokens` tokens."""
    return 2 * 4 * tokens * shape.heads * (shape.head_dim + 2) / shape.device.memory
