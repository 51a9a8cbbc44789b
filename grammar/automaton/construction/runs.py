"""Runs: the number of characters of one kind that a state can read in a row, whichever they are.

Inside a JSON string any number of plain characters may come; in ``[a-z]{3,8}`` eight lower-case letters may
come from the first state on, seven from the second. `token_trie` allows all tokens within a run together.
"""

from __future__ import annotations

import numba
import numpy as np

from ramify.grammar.automaton.characters import KINDS
from ramify.grammar.automaton.construction.byte_edges import EDGES, Edges
from ramify.grammar.automaton.numba_types import BOOLS, BYTES, INTS
from ramify.grammar.automaton.pushdown import ENDLESS

_ALPHANUMERIC = np.frombuffer(bytes(byte for byte in range(0x80) if chr(byte).isalnum()), np.uint8)
_LOWER = np.frombuffer(bytes(range(0x61, 0x7B)), np.uint8)


def runs(edges: Edges, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`run`, `run_kind` and `run_cost` of `pushdown.Arrays`, for the first of `KINDS` of which a state has a
    run."""
    count = len(edges.final)
    run = np.zeros(count, np.uint8)
    kind = np.zeros(count, np.uint8)
    run_cost = cost.copy()
    for i in range(len(KINDS)):
        if i == 0:
            covered, source, target = edges.plain, edges.plain_source, edges.plain_target
        else:
            members = _ALPHANUMERIC if i == 1 else _LOWER
            covered, source, target = _steps(edges, members)
        if not covered.any():
            continue
        order = np.argsort(-cost, kind="stable").astype(np.int32)
        length, most = _lengths(covered, source, target, cost, order)
        chosen = (run == 0) & (length > 0)
        run[chosen], kind[chosen], run_cost[chosen] = length[chosen], i, most[chosen]
    return run, kind, run_cost


@numba.njit((EDGES, BYTES), cache=True, nogil=True)
def _steps(edges: Edges, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The states that read all of the ASCII characters `members` without a call, (states,) bool, and the
    steps of these states on members: two arrays with the source and the target of each."""
    offsets, low, high, target, push = edges.offsets, edges.low, edges.high, edges.target, edges.push
    covered = np.zeros(offsets.size - 1, np.bool_)
    source = np.empty(target.size, np.int32)
    after = np.empty(target.size, np.int32)
    found = 0
    for state in range(offsets.size - 1):
        read = 0
        before = found
        for edge in range(offsets[state], offsets[state + 1]):
            if push[edge] >= 0 or target[edge] < 0:
                continue
            here = 0
            for member in members:
                if low[edge] <= member <= high[edge]:
                    here += 1
            if here > 0:
                read += here
                source[found] = state
                after[found] = target[edge]
                found += 1
        covered[state] = read == members.size
        if not covered[state]:
            found = before
    return covered, source[:found].copy(), after[:found].copy()


@numba.njit((BOOLS, INTS, INTS, INTS, INTS), cache=True, nogil=True)
def _lengths(
    covered: np.ndarray, source: np.ndarray, target: np.ndarray, cost: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays, (states,): the run of each state, and the largest cost after any part of the run. `order`
    has the states sorted by cost, the largest first."""
    states = covered.size
    begin = np.zeros(states + 1, np.int64)
    for i in range(target.size):
        begin[target[i] + 1] += 1
    for state in range(states):
        begin[state + 1] += begin[state]
    filled = begin[:-1].copy()
    sources = np.empty(target.size, np.int32)
    for i in range(target.size):
        sources[filled[target[i]]] = source[i]
        filled[target[i]] += 1
    # The distance to the next state that is not covered: breadth first, backwards from those states.
    run = np.full(states, ENDLESS, np.uint8)
    queue = np.empty(states, np.int32)
    count = 0
    for state in range(states):
        if not covered[state]:
            run[state] = 0
            queue[count] = state
            count += 1
    done = 0
    while done < count:
        state = queue[done]
        done += 1
        for i in range(begin[state], begin[state + 1]):
            if run[sources[i]] == ENDLESS:
                run[sources[i]] = min(run[state] + 1, ENDLESS - 1)
                queue[count] = sources[i]
                count += 1
    most = cost.copy()
    seen = np.zeros(states, np.bool_)
    for state in order:
        if seen[state]:
            continue
        seen[state] = True
        queue[0] = state
        count = 1
        while count > 0:
            count -= 1
            here = queue[count]
            for i in range(begin[here], begin[here + 1]):
                if not seen[sources[i]] and covered[sources[i]]:
                    seen[sources[i]] = True
                    most[sources[i]] = cost[state]
                    queue[count] = sources[i]
                    count += 1
    return run, most
