"""The walk over the prefix tree of all tokens for automata that read every text in one way."""

from __future__ import annotations

import numba
import numpy as np

_BYTES = numba.types.Array(numba.uint8, 1, "C", readonly=True)
_INTS = numba.types.Array(numba.int32, 1, "C", readonly=True)
_BOOLS = numba.types.Array(numba.boolean, 1, "C", readonly=True)


@numba.njit(cache=True)
def _write_out(
    offsets: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    target: np.ndarray,
    push: np.ndarray,
    state: int,
    row: np.ndarray,
) -> None:
    # -1: no edge; a state; or -2 - e for an edge e that does more than lead to a state.
    row[:] = -1
    for edge in range(offsets[state], offsets[state + 1]):
        simple = push[edge] < 0 and target[edge] >= 0
        row[low[edge] : numba.int64(high[edge]) + 1] = target[edge] if simple else -2 - edge


@numba.njit(cache=True)
def _edge(offsets: np.ndarray, low: np.ndarray, high: np.ndarray, state: int, byte: int) -> int:
    for edge in range(offsets[state], offsets[state + 1]):
        if low[edge] <= byte <= high[edge]:
            return edge
    return -1


@numba.njit(
    (
        _BYTES, _INTS, _INTS, _BYTES, _INTS, _INTS, numba.int64,
        _INTS, _BYTES, _BYTES, _INTS, _INTS, _BOOLS, _INTS,
        _INTS, numba.int64, _BYTES, _INTS,
        numba.int64, numba.int64, numba.int64, numba.uint32[::1], _BOOLS, _BOOLS, numba.uint32[::1],
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def walk(
    node_byte: np.ndarray,
    node_depth: np.ndarray,
    node_end: np.ndarray,
    node_longest: np.ndarray,
    token_start: np.ndarray,
    token_ids: np.ndarray,
    levels: int,
    offsets: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    target: np.ndarray,
    push: np.ndarray,
    final: np.ndarray,
    cost: np.ndarray,
    stack: np.ndarray,
    state: int,
    lead: np.ndarray,
    lead_costs: np.ndarray,
    skipped: int,
    limit: int,
    most_pushed: int,
    row: np.ndarray,
    after_item: np.ndarray,
    before_item: np.ndarray,
    doubtful: np.ndarray,
) -> tuple[int, int]:
    """Set the bits in `row` of the tokens that can be read from `state`, for `TokenTrie.allow`.

    `node_…` and `token_…` are the arrays of the trie, `levels` its depth plus two; `offsets` to `cost`,
    `fresh`, `before_fresh` and `most_pushed` are those of `Frames`. A subtree without a token of more than
    `skipped` characters is left out: its tokens are in `row` already. Returns `examined` and `rise` of
    `token_trie.Walk`.
    """
    # rows[d] is the edges of the state at depth d, written out by byte: a state is mostly the same as
    # when the walk was last at that depth, and a node then costs one look-up.
    rows = np.empty((levels, 256), np.int32)
    row_state = np.full(levels, -1, np.int32)
    state_at = np.empty(levels, np.int32)
    # The stack is a linked list: entry i returns to kept[i] and lies on entry below[i]. What is pushed at
    # a depth is overwritten when the walk comes back there: `free_at` is the first entry that is free.
    held = stack.size
    kept = np.empty(held + levels * most_pushed, np.int32)
    below = np.empty(kept.size, np.int32)
    # Cost of the stack up to an entry (at its number plus one), less that of the stack at the beginning.
    returning = np.empty(kept.size + 1, np.int32)
    returning[held] = 0
    for i in range(held):
        entry = held - 1 - i
        kept[entry] = stack[i]
        below[entry] = entry - 1
        returning[entry] = returning[entry + 1] - cost[stack[i]]
    top_at = np.empty(levels, np.int32)
    free_at = np.empty(levels, np.int32)
    crossed_at = np.zeros(levels, np.bool_)
    state_at[0] = state
    top_at[0] = held - 1
    free_at[0] = held
    leading = lead.size
    if leading == 0:
        row_state[0] = state
        _write_out(offsets, low, high, target, push, state, rows[0])
    examined = 0
    rise = 0
    began = cost[state] + lead_costs[0]
    node = 0
    while node < node_byte.size:
        if node_longest[node] <= skipped:
            node = node_end[node]
            continue
        depth = node_depth[node]
        byte = node_byte[node]
        here = state_at[depth]
        top = top_at[depth]
        free = free_at[depth]
        crossed = crossed_at[depth]
        after = -1
        if depth < leading:
            if byte == lead[depth]:
                after = here
        else:
            after = rows[depth, byte]
            if after < -1 or (after == -1 and final[here]):
                edge = -2 - after
                after = -1
                while True:
                    if edge < 0:
                        if not final[here]:
                            break
                        if top < held:
                            examined = max(examined, held - top)
                        if top < 0:
                            break
                        here = kept[top]
                        crossed |= after_item[here]
                        top = below[top]
                    else:
                        if push[edge] >= 0:
                            kept[free] = push[edge]
                            below[free] = top
                            returning[free + 1] = returning[top + 1] + cost[push[edge]]
                            crossed |= after_item[push[edge]]
                            top = free
                            free += 1
                        if target[edge] >= 0:
                            after = target[edge]
                            break
                        here = ~target[edge]
                    edge = _edge(offsets, low, high, here, byte)
        if after < 0:
            node = node_end[node]
            continue
        if token_start[node + 1] > token_start[node]:
            left = cost[after] + returning[top + 1]
            if depth < leading:
                left += lead_costs[depth + 1]
            if left <= limit:
                rise = max(rise, left - began)
                for i in range(token_start[node], token_start[node + 1]):
                    token = token_ids[i]
                    row[token >> 5] |= numba.uint32(1) << numba.uint32(token & 31)
                    if doubtful.size > 0 and (crossed or before_item[after]):
                        doubtful[token >> 5] |= numba.uint32(1) << numba.uint32(token & 31)
        if node_end[node] > node + 1:
            state_at[depth + 1] = after
            top_at[depth + 1] = top
            free_at[depth + 1] = free
            crossed_at[depth + 1] = crossed
            if row_state[depth + 1] != after and depth + 1 >= leading:
                row_state[depth + 1] = after
                _write_out(offsets, low, high, target, push, after, rows[depth + 1])
        node += 1
    return examined, rise
