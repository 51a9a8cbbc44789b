"""The walk over the token trie for deterministic automata: one state and one stack at each node.

The rule ``list ::= "[" list "]" | "x"`` is the automaton with the states

    0   [ → 1    x → 3
    1   [, x: push 2, and read the byte from state 0
    2   ] → 3
    3   final

After the text ``[[`` the state is 1, and the stack holds one 2. With the tokens ``[``, ``]``, ``x``,
``x]``, ``x]]`` and ``x]]]`` the trie is walked in depth-first order:

    node     state    stack      what happens
    [        1        2 2        push 2, read "[" from state 0: the token "[" is allowed
    ]        -                   state 1 has no edge for "]" and is not final: the subtree is left out
    x        3        2 2        push 2, read "x" from state 0: "x" is allowed
    x]       3        2          state 3 has no edge and is final: pop 2, read "]". "x]" is allowed
    x]]      3                   the same again: "x]]" is allowed
    x]]]     -                   the stack is empty: the subtree of this node is left out

The mask allows "[", "x", "x]" and "x]]". It depends on state 1 and on both entries that were popped or found
missing, hence `examined` is 2: the one entry of the stack, and its end.
"""

from __future__ import annotations

import numba
import numpy as np

from ramify.grammar.automaton.numba_types import INTS, tuple_type
from ramify.grammar.automaton.pushdown import DTYPES, Arrays
from ramify.grammar.automaton.trie import TRIE, Trie

ARRAYS = tuple_type(Arrays, DTYPES, readonly=True)


@numba.njit(cache=True)
def allow_tokens(token_start: np.ndarray, token_ids: np.ndarray, node: int, row: np.ndarray) -> None:
    """Set the bits in `row` of the tokens that `node` of a trie spells."""
    for i in range(token_start[node], token_start[node + 1]):
        token = token_ids[i]
        row[token >> 5] |= numba.uint32(1) << numba.uint32(token & 31)


@numba.njit(cache=True)
def link_stack(
    stack: np.ndarray, cost: np.ndarray, returned: np.ndarray, below: np.ndarray, returning: np.ndarray
) -> None:
    """Write `stack` as a linked list: entry i returns to state ``returned[i]`` and lies on entry
    ``below[i]``.

    ``returning[i + 1]`` is the cost of the entries up to i, less the cost of all of `stack`.
    """
    height = stack.size
    returning[height] = 0
    for i in range(height):
        entry = height - 1 - i
        returned[entry] = stack[i]
        below[entry] = entry - 1
        returning[entry] = returning[entry + 1] - cost[stack[i]]


@numba.njit(cache=True)
def _write_out(automaton: Arrays, state: int, row: np.ndarray) -> None:
    # -1: no edge; a state; or -2 - e for an edge e that pushes or calls.
    row[:] = -1
    for edge in range(automaton.offsets[state], automaton.offsets[state + 1]):
        target = automaton.target[edge]
        simple = automaton.push[edge] < 0 and target >= 0
        row[automaton.low[edge] : numba.int64(automaton.high[edge]) + 1] = target if simple else -2 - edge


@numba.njit(cache=True)
def _edge(automaton: Arrays, state: int, byte: int) -> int:
    for edge in range(automaton.offsets[state], automaton.offsets[state + 1]):
        if automaton.low[edge] <= byte <= automaton.high[edge]:
            return edge
    return -1


@numba.njit(
    (
        TRIE, numba.int64, ARRAYS, numba.int64, INTS, numba.int64, numba.int64, numba.int64, numba.int64,
        numba.uint32[::1], numba.uint32[::1],
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def walk(
    trie: Trie,
    root: int,
    automaton: Arrays,
    levels: int,
    stack: np.ndarray,
    state: int,
    skipped: int,
    limit: int,
    most_pushed: int,
    row: np.ndarray,
    doubtful: np.ndarray,
) -> tuple[int, int]:
    """Set the bits in `row` of the tokens that can be read from `state`, for `TokenTrie.allow`.

    Only nodes below `root` are walked, and what they spell after it is read; -1 stands for the whole trie.
    `levels` is the depth of the trie plus two. Subtrees without a token of more than `skipped` characters are
    left out: their tokens are in `row` already. `doubtful` is empty where it is not asked for.
    Returns `examined` and `rise` of `token_trie.Walk`.
    """
    final, cost, after_item = automaton.final, automaton.cost, automaton.after_item
    # The edges of the state at each depth, written out by byte. The state at a depth is mostly the same as at
    # the node before of that depth, and a node then costs one look-up.
    edges_at = np.empty((levels, 256), np.int32)
    edges_of = np.full(levels, -1, np.int32)
    state_at = np.empty(levels, np.int32)
    # Entries that are pushed at a depth are overwritten when the walk comes back to that depth.
    height = stack.size
    returned = np.empty(height + levels * most_pushed, np.int32)
    below = np.empty(returned.size, np.int32)
    returning = np.empty(returned.size + 1, np.int32)
    link_stack(stack, cost, returned, below, returning)
    top_at = np.empty(levels, np.int32)
    free_at = np.empty(levels, np.int32)
    crossed_at = np.zeros(levels, np.bool_)  # an item began or ended on the way to this depth
    state_at[0], top_at[0], free_at[0] = state, height - 1, height
    edges_of[0] = state
    _write_out(automaton, state, edges_at[0])
    examined = 0
    rise = 0
    node = root + 1
    stop = trie.byte.size if root < 0 else trie.end[root]
    above = 0 if root < 0 else trie.depth[root] + 1
    while node < stop:
        if trie.longest[node] <= skipped:
            node = trie.end[node]
            continue
        depth = trie.depth[node] - above
        byte = trie.byte[node]
        here = state_at[depth]
        top = top_at[depth]
        free = free_at[depth]
        crossed = crossed_at[depth]
        after = edges_at[depth, byte]
        if after < -1 or (after == -1 and final[here]):
            edge = -2 - after
            after = -1
            while True:
                if edge < 0:
                    if not final[here]:
                        break
                    if top < height:
                        examined = max(examined, height - top)
                    if top < 0:
                        break
                    here = returned[top]
                    crossed |= after_item[here]
                    top = below[top]
                else:
                    pushed = automaton.push[edge]
                    if pushed >= 0:
                        returned[free] = pushed
                        below[free] = top
                        returning[free + 1] = returning[top + 1] + cost[pushed]
                        crossed |= after_item[pushed]
                        top = free
                        free += 1
                    if automaton.target[edge] >= 0:
                        after = automaton.target[edge]
                        break
                    here = ~automaton.target[edge]
                edge = _edge(automaton, here, byte)
        if after < 0:
            node = trie.end[node]
            continue
        if trie.token_start[node + 1] > trie.token_start[node]:
            left = cost[after] + returning[top + 1]
            if left <= limit:
                rise = max(rise, left - cost[state])
                allow_tokens(trie.token_start, trie.token_ids, node, row)
                if doubtful.size > 0 and (crossed or automaton.before_item[after]):
                    allow_tokens(trie.token_start, trie.token_ids, node, doubtful)
        if trie.end[node] > node + 1:
            state_at[depth + 1] = after
            top_at[depth + 1] = top
            free_at[depth + 1] = free
            crossed_at[depth + 1] = crossed
            if edges_of[depth + 1] != after:
                edges_of[depth + 1] = after
                _write_out(automaton, after, edges_at[depth + 1])
        node += 1
    return examined, rise
