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

The mask allows "[", "x", "x]" and "x]]". The mask depends on state 1, on the one entry of the stack, which
was popped, and on the end of the stack, where an entry was missing. So `examined` is 2.
"""

from __future__ import annotations

import numba
import numpy as np

from ramify.grammar.automaton.numba_types import BYTES, INTS, packed_bytes, packed_flags, packed_ints
from ramify.machine_code import part


@part()
def allow_tokens(token_start: np.ndarray, token_ids: np.ndarray, node: int, row: np.ndarray) -> None:
    """Set the bits in `row` of the tokens that `node` of a trie spells."""
    for i in range(token_start[node], token_start[node + 1]):
        token = token_ids[i]
        row[token >> 5] |= numba.uint32(1) << numba.uint32(token & 31)


@part()
def link_stack(
    stack: np.ndarray, cost: np.ndarray, returned: np.ndarray, below: np.ndarray, returning: np.ndarray
) -> None:
    """Write `stack` as a linked list into the other arrays: entry i returns to state ``returned[i]`` and lies
    on entry ``below[i]``.

    ``returning[i + 1]`` is the cost of the entries up to i, less the cost of the whole stack.
    """
    height = stack.size
    returning[height] = 0
    for i in range(height):
        entry = height - 1 - i
        returned[entry] = stack[i]
        below[entry] = entry - 1
        returning[entry] = returning[entry + 1] - cost[stack[i]]


@part()
def _write_out(
    offsets: np.ndarray, low: np.ndarray, high: np.ndarray, target: np.ndarray, push: np.ndarray,
    state: int, row: np.ndarray,
) -> None:  # fmt: skip
    # -1: no edge; a state; or -2 - e for an edge e that pushes or calls.
    row[:] = -1
    for edge in range(offsets[state], offsets[state + 1]):
        into = target[edge] if push[edge] < 0 and target[edge] >= 0 else -2 - edge
        for byte in range(low[edge], numba.int64(high[edge]) + 1):
            row[byte] = into


@part()
def _edge(offsets: np.ndarray, low: np.ndarray, high: np.ndarray, state: int, byte: int) -> int:
    for edge in range(offsets[state], offsets[state + 1]):
        if low[edge] <= byte <= high[edge]:
            return edge
    return -1


@numba.njit(
    (
        BYTES, BYTES, numba.int64, BYTES, numba.int64, INTS, numba.int64, numba.int64, numba.int64,
        numba.int64, numba.uint32[::1], numba.uint32[::1],
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def walk(
    trie: np.ndarray,
    longest: np.ndarray,
    root: int,
    automaton: np.ndarray,
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

    `trie` is packed by `pack_trie`, `longest` is `Trie.longest`, and `automaton` is the packed
    `pushdown.Arrays`. Only nodes below `root` are walked, and only the bytes after the text of `root` are
    read; a `root` of -1 stands for the whole trie. `levels` is the depth of the trie plus two. Subtrees
    without a token of more than `skipped` characters are left out: their tokens are in `row` already.
    `doubtful` is empty if it is not wanted. Returns `examined` and `rise` of `token_trie.Walk`.
    """
    # Local names: each access to an array of a tuple would count a reference.
    offsets, low, high = packed_ints(automaton, 0), packed_bytes(automaton, 1), packed_bytes(automaton, 2)
    target, push, final = packed_ints(automaton, 3), packed_ints(automaton, 4), packed_flags(automaton, 5)
    cost = packed_ints(automaton, 9)
    after_item, before_item = packed_flags(automaton, 10), packed_flags(automaton, 11)
    byte_of, depth_of, end_of = packed_bytes(trie, 0), packed_ints(trie, 1), packed_ints(trie, 2)
    token_start, token_ids, first_node = packed_ints(trie, 3), packed_ints(trie, 4), packed_ints(trie, 5)
    # The edges of the state at each depth, written out by byte. Successive nodes of one depth mostly have the
    # same state, and then cost one look-up each.
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
    crossed_at = np.zeros(levels, np.bool_)  # whether a unique item began or ended above this depth
    state_at[0], top_at[0], free_at[0] = state, height - 1, height
    edges_of[0] = state
    _write_out(offsets, low, high, target, push, state, edges_at[0])
    examined = 0
    rise = 0
    above = 0 if root < 0 else depth_of[root] + 1
    for first in range(256 if root < 0 else 1):
        if root >= 0:
            node, stop = root + 1, end_of[root]
        else:
            node = first_node[first]
            if node < 0 or (edges_at[0, first] == -1 and not final[state]):
                continue
            stop = end_of[node]
        while node < stop:
            if longest[node] <= skipped:
                node = end_of[node]
                continue
            depth = depth_of[node] - above
            byte = byte_of[node]
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
                        pushed = push[edge]
                        if pushed >= 0:
                            returned[free] = pushed
                            below[free] = top
                            returning[free + 1] = returning[top + 1] + cost[pushed]
                            crossed |= after_item[pushed]
                            top = free
                            free += 1
                        if target[edge] >= 0:
                            after = target[edge]
                            break
                        here = ~target[edge]
                    edge = _edge(offsets, low, high, here, byte)
            if after < 0:
                node = end_of[node]
                continue
            if token_start[node + 1] > token_start[node]:
                left = cost[after] + returning[top + 1]
                if left <= limit:
                    rise = max(rise, left - cost[state])
                    allow_tokens(token_start, token_ids, node, row)
                    if doubtful.size > 0 and (crossed or before_item[after]):
                        allow_tokens(token_start, token_ids, node, doubtful)
            if end_of[node] > node + 1:
                state_at[depth + 1] = after
                top_at[depth + 1] = top
                free_at[depth + 1] = free
                crossed_at[depth + 1] = crossed
                if edges_of[depth + 1] != after:
                    edges_of[depth + 1] = after
                    _write_out(offsets, low, high, target, push, after, edges_at[depth + 1])
            node += 1
    return examined, rise
