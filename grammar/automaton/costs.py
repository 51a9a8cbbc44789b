"""Shortest completions: how far it is from each state to the end of the rule that is read.

First in bytes (Knuth 1977, "A generalization of Dijkstra's algorithm": a call costs what is called and
what follows it), then in tokens along that shortest text. The tokens are the fewest, by dynamic
programming from the end; they may reach beyond the ends of called rules, but not of the rule itself, so
that the cost of a configuration is the sum over its states. Nor do they reach into what must be fresh
(`expression.Fresh`), or beyond it: whether it is depends on what was read before.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

UNREACHABLE = 1 << 30
"""Distance of a state from which the end cannot be reached."""

_BYTES = numba.types.Array(numba.uint8, 1, "C", readonly=True)
_INTS = numba.types.Array(numba.int32, 1, "C", readonly=True)
_BOOLS = numba.types.Array(numba.boolean, 1, "C", readonly=True)


@numba.njit((_INTS, _INTS, _INTS, _BOOLS), cache=True, nogil=True)
def shortest(
    offsets: np.ndarray, target: np.ndarray, push: np.ndarray, final: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(states,) int32: bytes to the end of the rule, and the edge that they begin with or -1."""
    states = final.size
    source = np.empty(target.size, np.int32)
    # The edges that lead to a state, or return to it.
    begin = np.zeros(states + 1, np.int64)
    for state in range(states):
        for edge in range(offsets[state], offsets[state + 1]):
            source[edge] = state
            into = target[edge] if target[edge] >= 0 else ~target[edge]
            begin[into + 1] += 1
            if push[edge] >= 0:
                begin[push[edge] + 1] += 1
    for state in range(states):
        begin[state + 1] += begin[state]
    edges = np.empty(begin[states], np.int32)
    filled = begin[:-1].copy()
    for edge in range(target.size):
        into = target[edge] if target[edge] >= 0 else ~target[edge]
        edges[filled[into]] = edge
        filled[into] += 1
        if push[edge] >= 0:
            edges[filled[push[edge]]] = edge
            filled[push[edge]] += 1
    length = np.full(states, UNREACHABLE, np.int32)
    best = np.full(states, -1, np.int32)
    done = np.zeros(states, np.bool_)
    heap = [(np.int64(0), np.int64(0)) for _ in range(0)]
    for state in range(states):
        if final[state]:
            length[state] = 0
            heapq.heappush(heap, (np.int64(0), np.int64(state)))
    while len(heap) > 0:
        _, nearest = heapq.heappop(heap)
        state = int(nearest)
        if done[state]:
            continue
        done[state] = True
        for i in range(begin[state], begin[state + 1]):
            edge = edges[i]
            read = 1
            into = target[edge]
            if into < 0:
                into = ~into
                read = 0
            if not done[into] or (push[edge] >= 0 and not done[push[edge]]):
                continue
            if read == 0 and length[into] == 0:
                continue  # what is called may be empty, and then what follows it has edges of its own
            whole = np.int64(read) + length[into]
            if push[edge] >= 0:
                whole += length[push[edge]]
            if whole < length[source[edge]]:
                length[source[edge]] = whole
                best[source[edge]] = edge
                heapq.heappush(heap, (whole, np.int64(source[edge])))
    return length, best


@numba.njit(
    numba.void(
        _BYTES, _INTS, _INTS, _INTS, _INTS,
        _BYTES, _INTS, _INTS, _BOOLS, _INTS, _INTS, _INTS,
        numba.int32[::1], numba.int32[::1],
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def token_costs(
    node_byte: np.ndarray,
    node_end: np.ndarray,
    token_start: np.ndarray,
    token_ids: np.ndarray,
    first_node: np.ndarray,
    low: np.ndarray,
    target: np.ndarray,
    push: np.ndarray,
    after_item: np.ndarray,
    best: np.ndarray,
    order: np.ndarray,
    length: np.ndarray,
    cost: np.ndarray,
    token: np.ndarray,
) -> None:
    """Fill `cost` and `token` of `Frames`; `order` has the states by their distance in bytes."""
    stack = np.empty(64, np.int32)
    for state in order:
        if length[state] == 0:
            cost[state] = 0
            token[state] = -1
            continue
        least = UNREACHABLE
        chosen = -1
        here = state
        depth = 0
        returning = 0  # cost of what is on the stack
        node = -1
        while True:
            while length[here] == 0 and depth > 0 and not after_item[stack[depth - 1]]:
                depth -= 1
                here = stack[depth]
                returning -= cost[here]
            if length[here] == 0:
                break
            edge = best[here]
            if push[edge] >= 0:
                if after_item[push[edge]] and node >= 0:
                    break
                if depth == stack.size:
                    stack = np.append(stack, stack)
                stack[depth] = push[edge]
                returning += cost[push[edge]]
                depth += 1
            into = target[edge]
            if into < 0:
                here = ~into
                continue
            byte = low[edge]
            here = into
            if node < 0:
                child = first_node[byte]
            else:
                child = -1
                below = node + 1
                while below < node_end[node]:
                    if node_byte[below] >= byte:
                        if node_byte[below] == byte:
                            child = below
                        break
                    below = node_end[below]
            if child < 0:
                break
            node = child
            if token_start[node + 1] > token_start[node]:
                whole = 1 + cost[here] + returning
                if whole < least:
                    least = whole
                    chosen = token_ids[token_start[node]]
        cost[state] = least
        token[state] = chosen
