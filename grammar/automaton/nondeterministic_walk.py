"""The walk over the token trie for nondeterministic automata: several configurations at each node.

The rules ``root ::= "a" root "a" | "a" root "b" | "x"`` read "a" in two ways: one configuration will return
to a state that reads "a", the other to one that reads "b". The walk keeps a list of (node, configuration)
pairs whose children are still to be visited. It allows a token once any of its configurations survives the
last byte.
"""

from __future__ import annotations

import numba
import numpy as np

from ramify.grammar.automaton.numba_types import INTS
from ramify.grammar.automaton.pushdown import Arrays
from ramify.grammar.automaton.trie import TRIE, Trie
from ramify.grammar.automaton.walk import ARRAYS, allow_tokens, link_stack

MOST_STEPS = 4_000_000
"""Most (node, configuration) pairs of one walk, about 40 ms. A grammar may double its configurations with
every byte, and its walk would not end. Tokens that are not reached are not allowed."""


@numba.njit(cache=True)
def _longer(array: np.ndarray) -> np.ndarray:
    grown = np.empty(2 * array.size, array.dtype)
    grown[: array.size] = array
    return grown


@numba.njit(
    (
        TRIE, numba.int64, ARRAYS, INTS, numba.int64, numba.int64, numba.int64, numba.int64,
        numba.uint32[::1], numba.uint32[::1],
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def walk_nondeterministic(
    trie: Trie,
    root: int,
    automaton: Arrays,
    stack: np.ndarray,
    state: int,
    skipped: int,
    limit: int,
    most_steps: int,
    row: np.ndarray,
    doubtful: np.ndarray,
) -> tuple[int, int]:
    """As `walk.walk`; all edges of a state that read the byte are taken, and its return as well."""
    offsets, final, cost, after_item = (
        automaton.offsets,
        automaton.final,
        automaton.cost,
        automaton.after_item,
    )
    # The stacks are linked lists as in `link_stack`. Equal stacks are the same entry: the entries that lie on
    # entry i are a list, which begins with above[i + 1] and goes on with `beside`.
    height = stack.size
    entries = height
    room = height + 1024
    returned = np.empty(room, np.int32)
    below = np.empty(room, np.int32)
    beside = np.full(room, -1, np.int32)
    above = np.full(room + 1, -1, np.int32)
    returning = np.empty(room + 1, np.int32)
    link_stack(stack, cost, returned, below, returning)
    # The configurations from which the children of a node are still to be walked.
    todo_node = np.empty(1024, np.int32)
    todo_state = np.empty(1024, np.int32)
    todo_top = np.empty(1024, np.int32)
    todo_crossed = np.zeros(1024, np.bool_)
    todo_node[0], todo_state[0], todo_top[0] = root, state, height - 1
    count = 1
    # The configurations from which one byte is still to be read; `entered` where a rule was called for that
    # byte.
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
        end = trie.byte.size if node < 0 else trie.end[node]
        while child < end:
            if trie.longest[child] <= skipped:
                child = trie.end[child]
                continue
            steps += 1
            byte = trie.byte[child]
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
                # A rule that was called for this byte reads it: the caller has edges of its own for the case
                # that the rule is empty.
                if final[here] and not entered[branches]:
                    if top < height:
                        examined = max(examined, height - top)
                    if top >= 0:
                        branch_state[branches], branch_top[branches] = returned[top], below[top]
                        entered[branches], crossed[branches] = False, crossing or after_item[returned[top]]
                        branches += 1
                for edge in range(offsets[here], offsets[here + 1]):
                    if byte < automaton.low[edge] or byte > automaton.high[edge]:
                        continue
                    pushed = automaton.push[edge]
                    over = top
                    cross = crossing or (pushed >= 0 and after_item[pushed])
                    if pushed >= 0:
                        over = above[top + 1]
                        while over >= 0 and returned[over] != pushed:
                            over = beside[over]
                        if over < 0:
                            if entries + 1 >= returned.size:
                                returned, below, returning = (
                                    _longer(returned),
                                    _longer(below),
                                    _longer(returning),
                                )
                                beside, above = _longer(beside), _longer(above)
                                beside[entries:] = -1
                                above[entries + 1 :] = -1
                            over = entries
                            entries += 1
                            returned[over] = pushed
                            below[over] = top
                            beside[over] = above[top + 1]
                            above[top + 1] = over
                            returning[over + 1] = returning[top + 1] + cost[pushed]
                    after = automaton.target[edge]
                    if after < 0:
                        branch_state[branches], branch_top[branches] = ~after, over
                        entered[branches], crossed[branches] = True, cross
                        branches += 1
                        continue
                    known = False
                    for i in range(begun, count):
                        known |= todo_state[i] == after and todo_top[i] == over and todo_crossed[i] == cross
                    if known:
                        continue
                    if trie.token_start[child + 1] > trie.token_start[child]:
                        left = cost[after] + returning[over + 1]
                        if left <= limit:
                            rise = max(rise, left - cost[state])
                            allow_tokens(trie, child, row)
                            if doubtful.size > 0 and (cross or automaton.before_item[after]):
                                allow_tokens(trie, child, doubtful)
                    if trie.end[child] > child + 1:
                        if count == todo_node.size:
                            todo_node, todo_state = _longer(todo_node), _longer(todo_state)
                            todo_top, todo_crossed = _longer(todo_top), _longer(todo_crossed)
                        todo_node[count], todo_state[count], todo_top[count] = child, after, over
                        todo_crossed[count] = cross
                        count += 1
            child = trie.end[child]
    return examined, rise
