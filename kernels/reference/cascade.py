"""Cascade attention: attention over a tree of shared prefixes, in torch.

The state of attention over a set of positions is its output and the log-sum-exp of its scores. States over
disjoint sets merge exactly (arXiv 2402.05099, 2501.01005), so a shared prefix is computed once for all of its
sequences.

Example: sequences A and B share 100 tokens, A has 20 more and B 30, each with one new token:

    groups                        [Group((0, 1), begin=0, tokens=100)]
    part for the group            2 queries x positions 0-99, keys read once: one state for A, one for B
    parts for the rest            A x positions 100-119, B x positions 100-129, with the causal mask
    merge for each query          weights exp(lse_i - lse) with lse = log(exp(lse_1) + exp(lse_2))
    keys read                     100 + 20 + 30 = 150 instead of 250
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.kernels.arguments.checks import check_attention, check_lengths

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Group(NamedTuple):
    """A node of the tree of prefixes: its members have positions [begin, begin + tokens) in the same pages.

    members : rows of the page table, ascending; at least one
    """

    members: tuple[int, ...]
    begin: int
    tokens: int


def attention_state(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float, soft_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The state of attention over m positions: output and log-sum-exp of the scores, in float32.

    Parameters
    ----------
    q : (n, heads, head_dim)
    keys, values : (m, kv_heads, head_dim)
    hidden : (n, m) bool, optional
        True where a query does not see a position. A query that sees none has output 0 and log-sum-exp -inf.

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
    """The state over the union of disjoint sets of positions, from the states over each set.

    Parameters
    ----------
    outs : (parts, n, heads, head_dim) float32
    lses : (parts, n, heads) float32
        -inf for an empty part, whose output is not used. Each query needs a part that is not empty.

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

    cached : for each sequence, its number of tokens before the new ones
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
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `attention.paged_attention`, with each group's positions computed once for all its members.

    Parameters
    ----------
    groups : sequence of Group
        Parents before children. Positions of a sequence outside its groups are computed for it alone.

    Raises
    ------
    ValueError
        Naming the argument or group that does not fit.
    """
    out = check_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        query_starts,
        kv_lens,
        0,
        soft_cap,
        out,
        sinks,
        dtypes=DTYPES,
        float8=True,
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
        if sinks is not None:  # the state of one more position, whose value is 0
            states[row].append((torch.zeros_like(states[row][0][0]), sinks.expand(new[row], -1)))
        merged, _ = merge_states(*(torch.stack(part) for part in zip(*states[row], strict=True)))
        out[starts[row] : starts[row + 1]] = merged.to(q.dtype)
    return out


def _rows(k_pages: Tensor, v_pages: Tensor, pages: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (n, kv_heads, head_dim) at the positions `place`."""
    page_size = k_pages.shape[2]
    page = pages.long()[place // page_size]
    return k_pages[page, :, place % page_size], v_pages[page, :, place % page_size]
