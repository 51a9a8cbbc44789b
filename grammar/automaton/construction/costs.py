"""Shortest completions: the way from each state to the end of its rule.

Lengths in bytes come first, by Knuth's generalisation of Dijkstra's algorithm (1977): the length of a call is
the length of the called rule plus the length of the rest of the caller. Costs in tokens come next, by dynamic
programming from the end along the shortest text. A token may reach beyond the ends of called rules, but not
beyond the end of the rule itself, so that the cost of a configuration is the sum over its states. A token may
not reach into a unique item (`expression.UniqueItem`) or beyond it either: whether that item is unique
depends on what was read before.

With the rule ``"[" ("x" | "yy") "]"`` and the tokens ``[``, ``]``, ``x``, ``y`` and ``x]`` the shortest text
is ``[x]``. From its end: "]" costs 1, "x]" costs 1, and "[x]" costs 2.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

from ramify.grammar.automaton.construction.byte_edges import EDGES, Edges
from ramify.grammar.automaton.masks.trie import TRIE, Trie
from ramify.grammar.automaton.numba_types import BOOLS, INTS

UNREACHABLE = 1 << 30
"""Length for a state from which the end of its rule cannot be reached."""


@numba.njit((EDGES,), cache=True, nogil=True)
def shortest(graph: Edges) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays, (states,) int32: the fewest bytes from each state to the end of its rule, and the first
    edge on that way. The edge is -1 at the end, and if the end cannot be reached."""
    offsets, target, push, final = graph.offsets, graph.target, graph.push, graph.final
    states = final.size
    source = np.empty(target.size, np.int32)
    # By state, the edges that lead to it or return to it.
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
                continue  # if the called rule is empty, edges of the caller itself apply
            whole = np.int64(read) + length[into]
            if push[edge] >= 0:
                whole += length[push[edge]]
            if whole < length[source[edge]]:
                length[source[edge]] = whole
                best[source[edge]] = edge
                heapq.heappush(heap, (whole, np.int64(source[edge])))
    return length, best


@numba.njit((TRIE, INTS, EDGES, INTS, INTS, INTS, BOOLS), cache=True, nogil=True)
def token_costs(
    trie: Trie,
    first_node: np.ndarray,
    edges: Edges,
    best: np.ndarray,
    order: np.ndarray,
    length: np.ndarray,
    border: np.ndarray,
) -> np.ndarray:
    """The costs in tokens: `cost` of `pushdown.Arrays`. `length` and `best` are those of `shortest`; `order`
    has the states that can reach the end of their rule, sorted by `length`. `border`: (states,) bool, the
    states to which no token returns from a called rule."""
    target, push, after_item = edges.target, edges.push, edges.after_item
    cost = np.zeros(length.size, np.int32)
    stack = np.empty(64, np.int32)
    for state in order:
        if length[state] == 0:
            continue
        least = UNREACHABLE
        here = state
        depth = 0
        returning = 0  # cost of the states on the stack
        node = -1
        while True:
            while length[here] == 0 and depth > 0 and not border[stack[depth - 1]]:
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
            byte = edges.low[edge]
            here = into
            if node < 0:
                child = first_node[byte]
            else:
                child = -1
                below = node + 1
                while below < trie.end[node]:
                    if trie.byte[below] >= byte:
                        if trie.byte[below] == byte:
                            child = below
                        break
                    below = trie.end[below]
            if child < 0:
                break
            node = child
            if trie.token_start[node + 1] > trie.token_start[node]:
                least = min(least, 1 + cost[here] + returning)
        cost[state] = least
    return cost
