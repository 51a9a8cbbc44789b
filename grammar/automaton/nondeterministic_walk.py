"""The walk over the prefix tree of all tokens for automata that may read a text in several ways at once."""

from __future__ import annotations

import numba
import numpy as np

MOST_STEPS = 4_000_000
"""Most (node, configuration) pairs of one walk, 40 ms: grammars that read the same byte in twice as many ways
after every further one do not come to an end. What is not walked is not allowed."""

_BYTES = numba.types.Array(numba.uint8, 1, "C", readonly=True)
_INTS = numba.types.Array(numba.int32, 1, "C", readonly=True)
_BOOLS = numba.types.Array(numba.boolean, 1, "C", readonly=True)


@numba.njit(cache=True)
def _longer(array: np.ndarray) -> np.ndarray:
    grown = np.empty(2 * array.size, array.dtype)
    grown[: array.size] = array
    return grown


@numba.njit(
    (
        _BYTES, _INTS, _BYTES, _INTS, _INTS,
        _INTS, _BYTES, _BYTES, _INTS, _INTS, _BOOLS, _INTS,
        _INTS, numba.int64, numba.int64, numba.int64, numba.int64, numba.uint32[::1],
        _BOOLS, _BOOLS, numba.uint32[::1],
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def walk_nondeterministic(
    node_byte: np.ndarray,
    node_end: np.ndarray,
    node_longest: np.ndarray,
    token_start: np.ndarray,
    token_ids: np.ndarray,
    offsets: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    target: np.ndarray,
    push: np.ndarray,
    final: np.ndarray,
    cost: np.ndarray,
    stack: np.ndarray,
    state: int,
    skipped: int,
    limit: int,
    most_steps: int,
    row: np.ndarray,
    after_item: np.ndarray,
    before_item: np.ndarray,
    doubtful: np.ndarray,
) -> tuple[int, int]:
    """As `walk.walk`, but without a lead, and all edges of a state are taken, and its end as well."""
    held = stack.size
    # Stacks are linked: entry i returns to kept[i] and lies on below[i]. Equal stacks are the same entry:
    # those on entry i are a list that begins with above[i + 1] and goes on with beside.
    entries = held
    room = held + 1024
    kept = np.empty(room, np.int32)
    below = np.empty(room, np.int32)
    beside = np.full(room, -1, np.int32)
    above = np.full(room + 1, -1, np.int32)
    returning = np.empty(room + 1, np.int32)
    returning[held] = 0
    for i in range(held):
        entry = held - 1 - i
        kept[entry] = stack[i]
        below[entry] = entry - 1
        returning[entry] = returning[entry + 1] - cost[stack[i]]
    # The configurations from which the children of a node are still to be walked.
    todo_node = np.empty(1024, np.int32)
    todo_state = np.empty(1024, np.int32)
    todo_top = np.empty(1024, np.int32)
    todo_crossed = np.zeros(1024, np.bool_)
    todo_node[0], todo_state[0], todo_top[0] = -1, state, held - 1
    count = 1
    # Those from which the next byte is still to be read; `entered` where a rule has been called for it.
    branch_state = np.empty(64, np.int32)
    branch_top = np.empty(64, np.int32)
    entered = np.empty(64, np.bool_)
    crossed = np.empty(64, np.bool_)
    examined = 0
    rise = 0
    steps = 0
    while count > 0 and steps < most_steps:
        count -= 1
        node = todo_node[count]
        first_state, first_top, first_crossed = todo_state[count], todo_top[count], todo_crossed[count]
        child = node + 1
        end = node_byte.size if node < 0 else node_end[node]
        while child < end:
            if node_longest[child] <= skipped:
                child = node_end[child]
                continue
            steps += 1
            byte = node_byte[child]
            begun = count
            branches = 1
            branch_state[0], branch_top[0], entered[0] = first_state, first_top, False
            crossed[0] = first_crossed
            while branches > 0:
                branches -= 1
                here, top, crossing = branch_state[branches], branch_top[branches], crossed[branches]
                while branches + 1 + offsets[here + 1] - offsets[here] >= branch_state.size:
                    branch_state, branch_top = _longer(branch_state), _longer(branch_top)
                    entered, crossed = _longer(entered), _longer(crossed)
                # What is called for a byte reads it: what may be empty has been left out before.
                if final[here] and not entered[branches]:
                    if top < held:
                        examined = max(examined, held - top)
                    if top >= 0:
                        branch_state[branches], branch_top[branches] = kept[top], below[top]
                        entered[branches], crossed[branches] = False, crossing or after_item[kept[top]]
                        branches += 1
                for edge in range(offsets[here], offsets[here + 1]):
                    if byte < low[edge] or byte > high[edge]:
                        continue
                    over = top
                    cross = crossing or (push[edge] >= 0 and after_item[push[edge]])
                    if push[edge] >= 0:
                        over = above[top + 1]
                        while over >= 0 and kept[over] != push[edge]:
                            over = beside[over]
                        if over < 0:
                            if entries + 1 >= kept.size:
                                kept, below, returning = _longer(kept), _longer(below), _longer(returning)
                                beside, above = _longer(beside), _longer(above)
                                beside[entries:] = -1
                                above[entries + 1 :] = -1
                            over = entries
                            entries += 1
                            kept[over] = push[edge]
                            below[over] = top
                            beside[over] = above[top + 1]
                            above[top + 1] = over
                            returning[over + 1] = returning[top + 1] + cost[push[edge]]
                    if target[edge] < 0:
                        branch_state[branches], branch_top[branches] = ~target[edge], over
                        entered[branches], crossed[branches] = True, cross
                        branches += 1
                        continue
                    after = target[edge]
                    known = False
                    for i in range(begun, count):
                        known |= todo_state[i] == after and todo_top[i] == over and todo_crossed[i] == cross
                    if known:
                        continue
                    if token_start[child + 1] > token_start[child]:
                        left = cost[after] + returning[over + 1]
                        if left <= limit:
                            rise = max(rise, left - cost[state])
                            for i in range(token_start[child], token_start[child + 1]):
                                token = token_ids[i]
                                row[token >> 5] |= numba.uint32(1) << numba.uint32(token & 31)
                                if doubtful.size > 0 and (cross or before_item[after]):
                                    doubtful[token >> 5] |= numba.uint32(1) << numba.uint32(token & 31)
                    if node_end[child] > child + 1:
                        if count == todo_node.size:
                            todo_node, todo_state = _longer(todo_node), _longer(todo_state)
                            todo_top, todo_crossed = _longer(todo_top), _longer(todo_crossed)
                        todo_node[count], todo_state[count], todo_top[count] = child, after, over
                        todo_crossed[count] = cross
                        count += 1
            child = node_end[child]
    return examined, rise
