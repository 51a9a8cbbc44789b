"""Removal of the dead and unreachable states of a pushdown automaton, and merging of equal states."""

from __future__ import annotations

import numba
import numpy as np

from ramify.grammar.automaton.construction.byte_edges import EDGES, Edges
from ramify.grammar.automaton.construction.costs import UNREACHABLE
from ramify.grammar.automaton.numba_types import BOOLS, INTS
from ramify.machine_code import part


def pruned(edges: Edges, length: np.ndarray) -> Edges:
    """`edges` without dead, unreachable and duplicate states; the start remains state 0.

    `length` has the distance of each state from the end (`costs.shortest`). The end must be reachable from
    state 0.
    """
    alive = length < UNREACHABLE
    into = np.where(edges.target < 0, ~edges.target, edges.target)
    useful = alive[into] & (alive[edges.push] | (edges.push < 0))
    useful &= np.repeat(alive, np.diff(edges.offsets))
    order = np.argsort(length, kind="stable").astype(np.int32)
    same = _merged(edges, useful, order[alive[order]])
    reached = _reached(edges, useful, same)
    kept = np.flatnonzero(reached).astype(np.int32)
    if kept[0] != same[0]:  # the start must be the first state
        kept = np.concatenate([same[:1], kept[kept != same[0]]])
    number = np.full(len(length), -1, np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    number = number[same]
    return _renumbered(edges, useful, kept, number, into)


def _renumbered(
    edges: Edges, useful: np.ndarray, kept: np.ndarray, number: np.ndarray, into: np.ndarray
) -> Edges:
    degrees = np.diff(edges.offsets)[kept]
    chosen = np.repeat(edges.offsets[kept], degrees) + _counting(degrees)
    of_state = np.repeat(np.arange(len(kept)), degrees)
    of_state, chosen = of_state[useful[chosen]], chosen[useful[chosen]]
    offsets = np.zeros(len(kept) + 1, np.int32)
    np.cumsum(np.bincount(of_state, minlength=len(kept)), out=offsets[1:])
    target = number[into[chosen]]
    push = edges.push[chosen]
    is_kept = np.zeros(len(number), np.bool_)
    is_kept[kept] = True
    pairs = is_kept[edges.plain_source]
    sources, targets = edges.plain_source[pairs], edges.plain_target[pairs]
    plain = edges.plain.copy()
    plain[sources[number[targets] < 0]] = False
    known = number[targets] >= 0
    return Edges(
        offsets,
        edges.low[chosen],
        edges.high[chosen],
        np.where(edges.target[chosen] < 0, ~target, target).astype(np.int32),
        np.where(push < 0, push, number[push]).astype(np.int32),
        edges.final[kept],
        plain[kept],
        number[sources[known]],
        number[targets[known]],
        edges.after_item[kept],
        edges.mark[kept],
    )


def _counting(degrees: np.ndarray) -> np.ndarray:
    """The concatenation of 0, 1, …, d - 1 for each degree d."""
    ends = np.cumsum(degrees)
    counted: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - degrees, degrees)
    return counted


@numba.njit((EDGES, BOOLS, INTS), cache=True, nogil=True)
def _reached(edges: Edges, useful: np.ndarray, same: np.ndarray) -> np.ndarray:
    """(states,) bool: the state is reachable from the start over `useful` edges, each state replaced by its
    representative in `same`."""
    offsets, target, push = edges.offsets, edges.target, edges.push
    reached = np.zeros(same.size, np.bool_)
    queue = np.empty(same.size, np.int32)
    queue[0] = same[0]
    reached[same[0]] = True
    count = 1
    while count > 0:
        count -= 1
        state = queue[count]
        for edge in range(offsets[state], offsets[state + 1]):
            if not useful[edge]:
                continue
            into = target[edge] if target[edge] >= 0 else ~target[edge]
            for after in (same[into], same[push[edge]] if push[edge] >= 0 else same[into]):
                if not reached[after]:
                    reached[after] = True
                    queue[count] = after
                    count += 1
    return reached


@part()
def _mapped(encoded: int, same: np.ndarray, state: int) -> int:
    """Replace `encoded`, a target or a pushed state, by the representative. A loop to `state` itself gets one
    code in all states, so that loops compare as equal."""
    if encoded == state:
        return -(1 << 31) + 1
    return int(same[encoded]) if encoded >= 0 else ~int(same[~encoded])


@part()
def _mapped_push(push: int, same: np.ndarray, state: int) -> int:
    return -1 if push < 0 else _mapped(push, same, state)


@numba.njit((EDGES, BOOLS, INTS), cache=True, nogil=True)
def _merged(graph: Edges, useful: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(states,) int32: the representative of each state, the first state that has equal edges.

    `order` has the live states, sorted by their distance from the end. In that order most targets have been
    merged before the states that lead to them, so that two rounds find nearly all equal states.
    """
    offsets, low, high, target, push = graph.offsets, graph.low, graph.high, graph.target, graph.push
    final, after_item, mark = graph.final, graph.after_item, graph.mark
    states = final.size
    same = np.arange(states, dtype=np.int32)
    room = 16
    while room < 2 * states:
        room *= 2
    for _ in range(2):
        table = np.full(room, -1, np.int32)
        for state in order:
            code = np.uint64(final[state]) + np.uint64(2) * np.uint64(after_item[state])
            code += np.uint64(4) * np.uint64(mark[state] + 1)
            for edge in range(offsets[state], offsets[state + 1]):
                if useful[edge]:
                    for part in (
                        np.int64(low[edge]) * 256 + high[edge],
                        np.int64(_mapped(target[edge], same, state)),
                        np.int64(_mapped_push(push[edge], same, state)),
                    ):
                        code = (code ^ np.uint64(part)) * np.uint64(0x9E3779B97F4A7C15)
                        code ^= code >> np.uint64(29)
            slot = np.int64(code % np.uint64(room))
            while table[slot] >= 0:
                other = table[slot]
                equal = final[state] == final[other] and after_item[state] == after_item[other]
                equal = equal and mark[state] == mark[other]
                a, b = offsets[state], offsets[other]
                while equal:
                    while a < offsets[state + 1] and not useful[a]:
                        a += 1
                    while b < offsets[other + 1] and not useful[b]:
                        b += 1
                    if a == offsets[state + 1] or b == offsets[other + 1]:
                        equal = a == offsets[state + 1] and b == offsets[other + 1]
                        break
                    equal = (
                        low[a] == low[b]
                        and high[a] == high[b]
                        and _mapped(target[a], same, state) == _mapped(target[b], same, other)
                        and _mapped_push(push[a], same, state) == _mapped_push(push[b], same, other)
                    )
                    a += 1
                    b += 1
                if equal:
                    break
                slot = (slot + 1) % room
            if table[slot] < 0:
                table[slot] = state
            same[state] = table[slot]
    return same
