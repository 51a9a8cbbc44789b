"""Attention over a tree of shared prefixes, in torch: parts with their log-sum-exp, and their merge.

Attention over a set of positions is fully described by its output and the logarithm of the sum of its
exponentials (arXiv 2402.05099, 2501.01005), so positions that several sequences share may be computed apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.kernels.checks import check_attention, check_lengths

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Group(NamedTuple):
    """A node of the tree of prefixes: its members hold positions [begin, begin + tokens) in the same pages.

    members : rows of the page table, ascending; at least one
    begin, tokens : counted in tokens
    """

    members: tuple[int, ...]
    begin: int
    tokens: int


def attention_state(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float, soft_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores, in float32.

    Parameters
    ----------
    q : (n, heads, head_dim)
    keys, values : (m, kv_heads, head_dim)
    hidden : (n, m) bool, optional
        True where a query must not look. Where it sees nothing its output is 0, its log-sum-exp -inf.

    Returns
    -------
    out : (n, heads, head_dim) float32
    lse : (n, heads) float32
    """
    n, heads, _ = q.shape
    kv_heads = keys.shape[1]
    queries = q.float().view(n, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("qhgd,khd->qhgk", queries, keys.float()) * scale
    if soft_cap > 0.0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None, None, :], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    out = torch.einsum("qhgk,khd->qhgd", weights, values.float())
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The state over disjoint sets of positions together, from the states over each.

    Parameters
    ----------
    outs : (parts, n, heads, head_dim) float32
    lses : (parts, n, heads) float32
        -inf for an empty part, whose output is not used. Some part of each query must not be empty.

    Returns
    -------
    out : (n, heads, head_dim) float32
    lse : (n, heads) float32
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse)[..., None]
    return torch.where(weights > 0, weights * outs, 0.0).sum(0), lse


def check_groups(groups: Sequence[Group], cached: Sequence[int]) -> None:
    """Raise ValueError naming the first group that is not a node of one tree within the cached prefixes.

    cached : for each sequence, its tokens before the new ones
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


def cascade_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    groups: Sequence[Group],
    *,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """As `attention.paged_attention`, with each group's positions computed once for all of its members.

    Parameters
    ----------
    groups : sequence of Group
        Parents before children. Positions outside every group of a sequence are its own.

    Raises
    ------
    ValueError
        Naming the argument or group that does not fit.
    """
    out = check_attention(
        q, k_pages, v_pages, page_table, query_starts, kv_lens, 0, soft_cap, out, dtypes=DTYPES
    )
    starts, lens = check_lengths(query_starts, kv_lens, len(q), page_table.shape[1] * k_pages.shape[2])
    new = [high - low for low, high in itertools.pairwise(starts)]
    check_groups(groups, [length - count for length, count in zip(lens, new, strict=True)])
    states: list[list[tuple[Tensor, Tensor]]] = [[] for _ in lens]
    own = [torch.ones(length, dtype=torch.bool, device=q.device) for length in lens]
    for group in groups:
        end = group.begin + group.tokens
        place = torch.arange(group.begin, end, device=q.device)
        keys, values = _rows(k_pages, v_pages, page_table[group.members[0]], place)
        queries = torch.cat([q[starts[row] : starts[row + 1]] for row in group.members])
        shared = attention_state(queries, keys, values, None, scale, soft_cap)
        counts = [new[row] for row in group.members]
        for row, o, lse in zip(group.members, *(torch.split(part, counts) for part in shared), strict=True):
            states[row].append((o, lse))
            own[row][group.begin : end] = False
    for row, length in enumerate(lens):
        if new[row] == 0:
            continue
        place = own[row].nonzero().flatten()
        position = torch.arange(length - new[row], length, device=q.device)
        keys, values = _rows(k_pages, v_pages, page_table[row], place)
        queries = q[starts[row] : starts[row + 1]]
        hidden = place[None, :] > position[:, None]
        states[row].append(attention_state(queries, keys, values, hidden, scale, soft_cap))
        merged, _ = merge_states(*(torch.stack(part) for part in zip(*states[row], strict=True)))
        out[starts[row] : starts[row + 1]] = merged.to(q.dtype)
    return out


def _rows(k_pages: Tensor, v_pages: Tensor, pages: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (n, kv_heads, head_dim) at the positions `place`."""
    page_size = k_pages.shape[2]
    page = pages.long()[place // page_size]
    return k_pages[page, :, place % page_size], v_pages[page, :, place % page_size]
