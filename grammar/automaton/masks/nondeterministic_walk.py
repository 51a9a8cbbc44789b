"""The walk over the token trie for nondeterministic automata: several configurations at each node.

The rules ``root ::= "a" root "a" | "a" root "b" | "x"`` read "a" in two ways: one configuration will return
to a state that reads "a", the other to one that reads "b". The walk keeps a list of (node, configuration)
pairs whose children are still to be visited. It allows a token once any of its configurations survives the
last byte.
"""

from __future__ import annotations

import numba
import numpy as np

from ramify.grammar.automaton.masks.registers import (
    DEAD,
    MISSING,
    NONE,
    OWED,
    ROWS,
    begin_object,
    entered_object,
    left_of,
)
from ramify.grammar.automaton.masks.walk import allow_tokens, link_stack
from ramify.grammar.automaton.members import MEMBERS, Members
from ramify.grammar.automaton.numba_types import BYTES, INTS, packed_bytes, packed_flags, packed_ints
from ramify.machine_code import part

MOST_STEPS = 4_000_000
"""Most (node, configuration) pairs of one walk, which take about 40 ms. In some grammars each byte doubles
the number of configurations, so that a walk without this limit would hardly end. Tokens that the walk does
not reach are not allowed."""

ROOM = 1024
"""First value of `room`. No array grows during a walk: numba would count references to a growing array in
every step, which makes a walk 20 times as slow."""

FULL = -1

NO_EDGE, SEVERAL = -1, -2

NO_LIMIT = 1 << 30
"""A limit that no cost of completion exceeds."""


@part()
def _write_out(
    offsets: np.ndarray, low: np.ndarray, high: np.ndarray, state: int, edge_on: np.ndarray
) -> None:
    """Write into `edge_on`, (256,), the edge of `state` for each byte: NO_EDGE if there is none, SEVERAL if
    there is more than one."""
    edge_on[:] = NO_EDGE
    for edge in range(offsets[state], offsets[state + 1]):
        for byte in range(low[edge], numba.int64(high[edge]) + 1):
            edge_on[byte] = edge if edge_on[byte] == NO_EDGE else SEVERAL


@numba.njit(
    (
        BYTES, BYTES, numba.int64, BYTES, INTS, numba.int64, numba.int64, numba.int64, numba.int64,
        numba.int64, numba.uint32[::1], numba.uint32[::1], MEMBERS, ROWS, ROWS,
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def walk_nondeterministic(
    trie: np.ndarray,
    longest: np.ndarray,
    root: int,
    automaton: np.ndarray,
    stack: np.ndarray,
    state: int,
    skipped: int,
    limit: int,
    most_steps: int,
    room: int,
    row: np.ndarray,
    doubtful: np.ndarray,
    members: Members,
    frames: np.ndarray,
    tested: np.ndarray,
) -> tuple[int, int]:
    """Set bits in `row` as `walk.walk` does, but take all edges that read a byte, and the return as well.

    `room` bounds the number of configurations kept; if it is too small, returns (FULL, 0). `frames` has the
    registers of the state and of the entries of the stack (`registers`), no rows if the automaton has no
    registers. The walk writes into `tested` the parts of the registers that the mask depends on.
    """
    # Local names: each access to an array of a tuple would count a reference.
    offsets, low, high = packed_ints(automaton, 0), packed_bytes(automaton, 1), packed_bytes(automaton, 2)
    target, push, final = packed_ints(automaton, 3), packed_ints(automaton, 4), packed_flags(automaton, 5)
    cost = packed_ints(automaton, 9)
    after_item, before_item = packed_flags(automaton, 10), packed_flags(automaton, 11)
    bytes_of, end_of = packed_bytes(trie, 0), packed_ints(trie, 2)
    token_start, token_ids = packed_ints(trie, 3), packed_ints(trie, 4)
    mark_of, start_of, ways, always = members.mark, members.start, members.ways, members.always
    # The stacks are linked lists as in `link_stack`. Equal stacks are the same entry. The entries that lie
    # on entry i form a list: its first element is above[i + 1], and `beside` has the next of each element.
    height = stack.size
    entries = height
    returned = np.empty(height + room, np.int32)
    below = np.empty(height + room, np.int32)
    beside = np.full(height + room, -1, np.int32)
    above = np.full(height + room + 1, -1, np.int32)
    returning = np.empty(height + room + 1, np.int32)
    link_stack(stack, cost, returned, below, returning)
    remembers = mark_of.size > 0
    exact = limit < NO_LIMIT
    rows = np.empty((frames.shape[0] + (room if remembers else 1), frames.shape[1]), np.int32)
    rows[: frames.shape[0]] = frames
    registers = frames.shape[0]
    first_of = np.full(members.room.size, NONE, np.int32)  # by object, the register of a new one
    saved = np.full(height + room, NONE, np.int32)  # by entry, the register to continue with after the return
    if remembers:
        for i in range(height):
            entry = height - 1 - i
            saved[entry] = i + 1 if frames[i + 1, MISSING] >= 0 else NONE
            left = cost[stack[i]]
            if saved[entry] >= 0:
                left = left_of(members, cost, stack[i], rows[saved[entry]], exact, tested)
            returning[entry] = returning[entry + 1] - left
    # The configurations from which the children of a node are still to be walked.
    todo_node = np.empty(room, np.int32)
    todo_state = np.empty(room, np.int32)
    todo_top = np.empty(room, np.int32)
    todo_crossed = np.zeros(room, np.bool_)
    todo_register = np.full(room, NONE, np.int32)
    todo_node[0], todo_state[0], todo_top[0] = root, state, height - 1
    todo_register[0] = 0 if remembers and frames[0, MISSING] >= 0 else NONE
    count = 1
    # The configurations from which one byte is still to be read. `entered`: a rule was called to read it.
    branch_state = np.empty(room, np.int32)
    branch_top = np.empty(room, np.int32)
    entered = np.empty(room, np.bool_)
    crossed = np.empty(room, np.bool_)
    registered = np.empty(room, np.int32)
    # The edges, by byte, of the last state whose children were walked: mostly it is the next one, too.
    edge_on = np.empty(256, np.int32)
    edges_of = -1
    examined = 0
    rise = 0
    steps = 0
    while count > 0 and steps < most_steps:
        count -= 1
        node = todo_node[count]
        first_state, first_top, first_crossed = todo_state[count], todo_top[count], todo_crossed[count]
        first_register = todo_register[count]
        if edges_of != first_state:
            edges_of = first_state
            _write_out(offsets, low, high, first_state, edge_on)
        child = node + 1
        end = bytes_of.size if node < 0 else end_of[node]
        while child < end:
            if longest[child] <= skipped:
                child = end_of[child]
                continue
            steps += 1
            byte = bytes_of[child]
            only = edge_on[byte]
            if only == NO_EDGE and not final[first_state]:
                child = end_of[child]
                continue
            begun = count
            branches = 1
            first = True
            branch_state[0], branch_top[0], entered[0] = first_state, first_top, False
            crossed[0], registered[0] = first_crossed, first_register
            while branches > 0:
                branches -= 1
                here, top, crossing = branch_state[branches], branch_top[branches], crossed[branches]
                register = registered[branches]
                if branches + 1 + offsets[here + 1] - offsets[here] >= room:
                    return FULL, 0
                # A rule that was called for this byte must read it. If the rule is empty, edges of the
                # caller itself apply.
                if final[here] and not entered[branches]:
                    if top < height:
                        examined = max(examined, height - top)
                    if top >= 0:
                        branch_state[branches], branch_top[branches] = returned[top], below[top]
                        entered[branches], crossed[branches] = False, crossing or after_item[returned[top]]
                        registered[branches] = saved[top]
                        branches += 1
                from_edge, to_edge = offsets[here], offsets[here + 1]
                if first and only != SEVERAL:
                    from_edge, to_edge = max(0, only), max(0, only + 1)
                first = False
                if remembers and registers + 2 * (to_edge - from_edge) >= rows.shape[0]:
                    return FULL, 0
                for edge in range(from_edge, to_edge):
                    if byte < low[edge] or byte > high[edge]:
                        continue
                    pushed = push[edge]
                    over = top
                    cross = crossing or (pushed >= 0 and after_item[pushed])
                    if pushed >= 0:
                        left = cost[pushed]
                        if register >= 0 and (
                            ways[pushed] == ways[pushed + 1] or (always[pushed] and not exact)
                        ):
                            left += rows[register, OWED]
                        elif register >= 0:
                            left = left_of(members, cost, pushed, rows[register], exact, tested)
                            if left < 0:
                                continue
                        over = above[top + 1]
                        while over >= 0 and (returned[over] != pushed or saved[over] != register):
                            over = beside[over]
                        if over < 0:
                            if entries + 1 >= returned.size:
                                return FULL, 0
                            over = entries
                            entries += 1
                            returned[over], saved[over] = pushed, register
                            below[over] = top
                            beside[over] = above[top + 1]
                            above[top + 1] = over
                            returning[over + 1] = returning[top + 1] + left
                    after = target[edge]
                    if after < 0:
                        branch_state[branches], branch_top[branches] = ~after, over
                        entered[branches], crossed[branches] = True, cross
                        registered[branches] = NONE
                        if remembers and start_of[~after] >= 0:
                            kind = start_of[~after]
                            if first_of[kind] < 0:
                                begin_object(members, kind, rows, registers)
                                first_of[kind] = registers
                                registers += 1
                            registered[branches] = first_of[kind]
                        branches += 1
                        continue
                    into = register if pushed < 0 else NONE
                    left = cost[after]
                    if into >= 0:
                        mark = mark_of[after]
                        if mark >= 0:
                            into = entered_object(members, mark, rows, register, registers, tested)
                            if into == DEAD:
                                continue
                            if into == registers:
                                registers += 1
                        # A call that passes all arrays of `members` takes 0.2 us, and is mostly not needed.
                        if into >= 0 and (ways[after] == ways[after + 1] or (always[after] and not exact)):
                            left += rows[into, OWED]
                        elif into >= 0:
                            left = left_of(members, cost, after, rows[into], exact, tested)
                            if left < 0:
                                continue
                    known = False
                    for i in range(begun, count):
                        known |= (
                            todo_state[i] == after
                            and todo_top[i] == over
                            and todo_crossed[i] == cross
                            and todo_register[i] == into
                        )
                    if known:
                        continue
                    if token_start[child + 1] > token_start[child]:
                        left += returning[over + 1]
                        if left <= limit:
                            rise = max(rise, left - cost[state])
                            allow_tokens(token_start, token_ids, child, row)
                            if doubtful.size > 0 and (cross or before_item[after]):
                                allow_tokens(token_start, token_ids, child, doubtful)
                    if end_of[child] > child + 1:
                        if count == room:
                            return FULL, 0
                        todo_node[count], todo_state[count], todo_top[count] = child, after, over
                        todo_crossed[count], todo_register[count] = cross, into
                        count += 1
            child = end_of[child]
    return examined, rise
