"""The tree of shared prefixes of a batch, from its page tables, and the choice of prefixes to read once.

Both run once a step on the host, so they are array operations over all members of all nodes: a loop over
members takes 5 ms for 1,024 sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.kernels.triton.plan.attention_plan import Ints, Shape

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


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """G nodes of the tree of prefixes as arrays, parents before children. Iteration yields `Group`s.

    begin, tokens, sizes : (G,); `sizes` are the numbers of members
    members : (M,) rows of the page table: the members of the first node, ascending, then those of the next
    """

    begin: Ints
    tokens: Ints
    sizes: Ints
    members: Ints

    @staticmethod
    def of(groups: Iterable[Group]) -> Groups:
        groups = list(groups)
        members = [row for group in groups for row in group.members]
        columns = [(group.begin, group.tokens, len(group.members)) for group in groups]
        begin, tokens, sizes = np.array(columns, np.int64).reshape(-1, 3).T
        return Groups(begin, tokens, sizes, np.array(members, np.int64))

    def __len__(self) -> int:
        return len(self.begin)

    def __iter__(self) -> Iterator[Group]:
        parts = np.split(self.members, np.cumsum(self.sizes)[:-1]) if len(self) else []
        for members, begin, tokens in zip(parts, self.begin.tolist(), self.tokens.tolist(), strict=True):
            yield Group(tuple(members.tolist()), begin, tokens)

    @property
    def end(self) -> Ints:
        """(G,) positions."""
        return self.begin + self.tokens

    @property
    def owner(self) -> Ints:
        """(M,), the node of each member."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def chosen(self, nodes: NDArray[np.bool_]) -> Groups:
        """The nodes where `nodes`, (G,), is True."""
        columns = (self.begin[nodes], self.tokens[nodes], self.sizes[nodes])
        return Groups(*columns, self.members[np.repeat(nodes, self.sizes)])


def previous(rows: Ints) -> Ints:
    """For each of `rows`, (M,), the index of the last equal row before it; -1 for the first of its kind.

    Example: (7, 5, 7, 7) gives (-1, -1, 0, 2).
    """
    order = np.argsort(rows, kind="stable")
    again = np.zeros(len(rows), bool)
    again[1:] = rows[order[1:]] == rows[order[:-1]]
    found = np.full(len(rows), -1)
    found[order[again]] = order[np.flatnonzero(again) - 1]
    return found


def find_groups(
    page_table: NDArray[np.int32], query_starts: Sequence[int], kv_lens: Sequence[int], page_size: int
) -> Groups:
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
    pages = np.where(new > 0, (lens - new) // page_size, 0)
    rows: Ints = np.flatnonzero(pages)
    # Of each row: its node above, and the end of that node.
    parent, depth = (np.zeros(len(rows), np.int64) for _ in range(2))
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    while len(rows):  # once for each level of the tree
        page: Any = page_table[rows, depth]
        order = np.lexsort((rows, page, parent))
        rows, page, parent, depth = (each[order] for each in (rows, page, parent, depth))
        differs = np.ones(len(rows), bool)
        differs[1:] = (page[1:] != page[:-1]) | (parent[1:] != parent[:-1])
        sizes = np.diff(np.flatnonzero(differs), append=len(rows))
        shared = np.repeat(sizes > 1, sizes)
        rows, depth, sizes = rows[shared], depth[shared], sizes[sizes > 1]
        if not len(rows):
            break
        heads, parent = np.cumsum(sizes) - sizes, np.repeat(np.arange(len(sizes)), sizes)
        begin = depth[heads]
        end = _common(page_table, pages, rows, heads, parent, int(begin.min()))
        found.append((begin, end - begin, sizes, rows))
        depth = end[parent]
        longer = pages[rows] > depth
        rows, parent, depth = rows[longer], parent[longer], depth[longer]
    if not found:
        return Groups.of(())
    begin, tokens, sizes, members = (np.concatenate(column) for column in zip(*found, strict=True))
    return Groups(begin * page_size, tokens * page_size, sizes, members)


def _common(
    page_table: NDArray[np.int32], pages: Ints, rows: Ints, heads: Ints, owner: Ints, least: int
) -> Ints:
    """The number of leading pages that all `rows` of a node have in common. The rows of node i begin at
    ``heads[i]``; `least` pages are known to be common."""
    shortest = np.minimum.reduceat(pages[rows], heads)
    seen = page_table[rows, least : int(shortest.max())]
    differ = seen != seen[heads][owner]
    common = least + np.where(differ.any(axis=1), differ.argmax(axis=1), differ.shape[1])
    ends: Ints = np.minimum(np.minimum.reduceat(common, heads), shortest)
    return ends


def check_groups(groups: Groups, cached: Ints) -> None:
    """Raise ValueError naming the first group that is not a node of one tree within the cached prefixes.

    cached : (B,), for each sequence its number of tokens before the new tokens
    """
    rows, owner = groups.members, groups.owner
    follows = np.zeros(len(rows), bool)
    follows[1:] = owner[1:] == owner[:-1]
    ascending = np.diff(rows, prepend=-1) > 0
    refused = (rows < 0) | (rows >= len(cached)) | (follows & ~ascending)
    wrong = (groups.sizes < 1) | (np.bincount(owner[refused], minlength=len(groups)) > 0)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(f"group {index}: members must be ascending rows of the {len(cached)} sequences.")
    before = previous(rows)
    reached = np.where(before < 0, 0, groups.end[owner[before]])
    outside = (
        (groups.begin[owner] < reached) | (groups.tokens < 1)[owner] | (groups.end[owner] > cached[rows])
    )
    if outside.any():
        place = int(outside.argmax())
        index, row = int(owner[place]), int(rows[place])
        raise ValueError(
            f"group {index}: positions [{groups.begin[index]}, {groups.end[index]}) of sequence {row} must "
            f"lie within its {cached[row]} cached tokens and after those of the groups before."
        )


def choose(groups: Groups, new: Ints, kv_lens: Ints, shape: Shape) -> Groups:
    """The nodes that save more than their states cost; none if together they are not worth two launches.

    A node that does not begin where its chosen parent ends costs one more state for each of its tokens.

    Parameters
    ----------
    groups : parents before children, as from `find_groups`
    new, kv_lens : (B,), for each sequence its number of new tokens and of all tokens
    """
    rows, owner, count = groups.members, groups.owner, len(groups)
    queries = new[rows]
    total = _sum(queries, owner, count)
    tiles, padded = tiles_of(queries, shape)
    apart = time_of(_sum(tiles, owner, count), _sum(padded, owner, count), groups.tokens, shape)
    saves = apart - time_of(*tiles_of(total, shape), groups.tokens, shape)
    level = np.zeros(count, np.int64)  # the number of nodes above
    for place, above in enumerate(_parents(rows, owner, count).tolist()):
        level[place] = 0 if above < 0 else level[above] + 1
    chosen = np.zeros(count, bool)
    reached = np.zeros(len(new), np.int64)
    saved = 0.0
    for depth in range(int(level.max(initial=-1)) + 1):
        at = level[owner] == depth
        nodes, members = owner[at], rows[at]
        rest = _sum(queries[at] * (reached[members] < groups.begin[nodes]), nodes, count)
        gain = saves - _state_time(total + rest, shape)
        taken = (level == depth) & (gain > 0)
        chosen |= taken
        saved += float(gain[taken].sum())
        reached[members[taken[nodes]]] = groups.end[nodes[taken[nodes]]]
    flat = time_of(*tiles_of(new, shape), kv_lens, shape).sum()
    fixed = 2 * LAUNCH_S + _state_time(new[reached > 0].sum(), shape)
    return groups.chosen(chosen if saved - fixed > MARGIN * flat else np.zeros(count, bool))


def _sum(values: Ints, owner: Ints, count: int) -> Ints:
    """(count,), the sum of `values` of each owner."""
    return np.bincount(owner, values, minlength=count).astype(np.int64)


def _parents(rows: Ints, owner: Ints, count: int) -> Ints:
    """(count,), the node above each node; -1 for none."""
    before = previous(rows)
    heads = np.flatnonzero(np.diff(owner, prepend=-1))
    found = np.full(count, -1)
    found[owner[heads]] = np.where(before[heads] < 0, -1, owner[before[heads]])
    return found


def tiles_of(queries: Ints, shape: Shape) -> tuple[Ints, Ints]:
    """For tasks of `queries` queries, (n,): the number of their tiles, and the rows of all of these."""
    sizes = np.array([tile.rows for tile in shape.tiles])
    rows = queries * (shape.heads // shape.kv_heads)
    size = sizes[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)]
    tiles = -(-rows // size)
    return tiles, tiles * size


def time_of(tiles: Ints, padded: Ints, tokens: Ints, shape: Shape) -> NDArray[np.float64]:
    """Seconds, (n,), in which `tiles` tiles of `padded` rows in all attend to the same `tokens` positions."""
    device = shape.device
    read = 2.0 * tokens * shape.kv_heads * shape.head_dim * shape.element_size
    again = np.where(read <= device.cache_bytes, device.cache, device.memory)
    moving = read / device.memory + (tiles - 1) * read / again
    computing = 4.0 * padded * shape.kv_heads * tokens * shape.head_dim / device.flops
    seconds: Any = np.where(tiles > 0, np.maximum(moving, computing), 0.0)
    return seconds


def _state_time(tokens: Ints, shape: Shape) -> NDArray[np.float64]:
    """Seconds to write and read back one state for each of `tokens` tokens."""
    seconds: Any = 2.0 * 4 * tokens * shape.heads * (shape.head_dim + 2) / shape.device.memory
    return seconds
