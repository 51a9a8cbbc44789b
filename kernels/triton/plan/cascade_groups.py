"""The tree of shared prefixes of a batch, found in its page tables."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ramify.kernels.reference.cascade import Group


def find_groups(
    page_table: NDArray[np.int32], query_starts: Sequence[int], kv_lens: Sequence[int], page_size: int
) -> list[Group]:
    """Every node with at least two sequences of the tree of equal leading pages, parents first.

    Only whole pages before a sequence's new tokens count, so every member sees all of a node. Sequences
    without new tokens are not members. If no first page is shared, only first pages are compared.

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
