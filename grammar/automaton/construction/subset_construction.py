"""Subset construction with calls, in compiled code: from the nodes of a grammar to states over atoms.

A *position* is what is read next (a character of a text, a set of characters, or a call of a rule) and a
*continuation*: the nodes that follow up to the end of the rule (Glushkov 1961). A state is a set of
positions. In ``("ab" | [c-d]) "e"``:

    state 0          "ab", then "e"    [c-d], then "e"
    after "a"        "b", then "e"
    after "b" or c   "e", then the end
    after "e"        END

Where the first bytes of a called rule are distinct from those of everything else in the state, there is a
call: the rule is read from its own start state, and then the state after the call. Otherwise one level of
calls is inlined: the positions of the rule's body take the place of the call. A called rule ends at the first
character that it cannot read. If some character can both continue the rule and follow it, the rule is inlined
as well. So one state and one stack suffice: the automaton is deterministic. In a nondeterministic automaton,
recursive rules and rules that remember the text read in them are always called.

With ``root ::= "x" | list`` and ``list ::= "[" list "]" | "y"``, state 0 reads "x" and calls `list` on "["
and "y". With ``root ::= "[x" | list`` both begin with "[": `list` is inlined in state 0, and "[" leads to a
state that reads "x" or calls `list`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.construction.groups import divide, place_atom, sort_groups
from ramify.grammar.automaton.construction.nodes import (
    CALL,
    CHARS,
    INLINED,
    MARKED,
    NODES,
    TEXT,
    Nodes,
    NotCounted,
    TooLarge,
)
from ramify.grammar.automaton.construction.positions import (
    END,
    MARK,
    after_char,
    closure,
    collect,
    continuation_of,
    interned,
    note_position,
    note_set,
)
from ramify.grammar.automaton.construction.work import (
    CALLS,
    CLASSES,
    COMPILED,
    CONTINUATIONS,
    DONE,
    EDGES,
    FOUND,
    FULL,
    INLINES,
    MOST_STATES,
    NONDETERMINISTIC,
    NOT_COUNTED,
    POSITIONS,
    POSITIONS_LEFT,
    ROUND,
    SETS,
    SPLITS,
    STATES,
    STATUS,
    TOO_LARGE,
    WORDS,
    WORK,
    Work,
    join,
    learn_nodes,
    meet,
    njit,
    part,
    room_for,
)

MOST_INLINED = 100
"""Most levels of calls that are inlined in one state. A rule that needs more levels begins with a call of
itself."""

MAX_DEPTH = 10
"""Most levels of recursive rules that are inlined in each other. If more are needed, two of the rules are
read at the same time, and each needs a stack of its own."""


class States(NamedTuple):
    """States as arrays, (states,): `final`; `after_item`, a unique item has just ended; `mark`, the mark that
    was just read, or -1. The edges of a state are those from `edge_begin` up to `edge_end`, its calls those
    from `call_begin` up to `call_end`.

    Edge e leads to ``edge_target[e]`` on the atoms of class ``edge_class[e]``. `class_bits`, (classes, words)
    uint64, has a bit for each atom of a class. Call c, of the rule ``call_rule[c]``, pushes ``call_after[c]``
    and goes to ``call_start[c]``. `first`, (nodes, 4) uint64, is a bitmask of the first bytes of each node.
    """

    final: np.ndarray
    after_item: np.ndarray
    mark: np.ndarray
    edge_begin: np.ndarray
    edge_end: np.ndarray
    edge_class: np.ndarray
    edge_target: np.ndarray
    call_begin: np.ndarray
    call_end: np.ndarray
    call_rule: np.ndarray
    call_start: np.ndarray
    call_after: np.ndarray
    class_bits: np.ndarray
    first: np.ndarray


@part
def _state(work: Work, number: int) -> int:
    """The state of the set of positions `number`. Adds the state if it does not exist."""
    if work.sets[number].state < 0:
        state = work.counts[STATES]
        if state >= work.counts[MOST_STATES]:
            work.counts[STATUS] = TOO_LARGE
            return 0
        if state == work.states.size:
            work.counts[STATUS] = FULL
            return 0
        work.sets[number].state = state
        work.states[state].set = number
        work.states[state].inline = -1
        work.counts[STATES] += 1
    return int(work.sets[number].state)


@part
def _is_always_called(nodes: Nodes, work: Work, rule: int) -> bool:
    """Whether `rule` is called even if other alternatives begin with the same bytes."""
    kept_apart = nodes.rules[rule].recursive or nodes.rules[rule].item or nodes.rules[rule].array
    return work.counts[NONDETERMINISTIC] > 0 and kept_apart


@part
def _inline(nodes: Nodes, work: Work, rule: int, after: int) -> None:
    """Add to `work.found` the positions at which non-empty texts of the inlined `rule` begin, followed by the
    continuation `after`."""
    if nodes.rules[rule].counted:
        work.counts[STATUS] = NOT_COUNTED
        return
    if nodes.rules[rule].item or nodes.rules[rule].array:
        work.counts[STATUS] = TOO_LARGE
        return
    if nodes.rules[rule].recursive:
        depth = work.then[after].depth
        if depth >= MAX_DEPTH:
            work.counts[STATUS] = TOO_LARGE
            return
        after = continuation_of(work, INLINED, 0, after)
        work.then[after].depth = depth + 1
    collect(nodes, work, nodes.rules[rule].body, 0, after)


@part
def _without_conflicts(nodes: Nodes, work: Work, state: int) -> tuple[int, int]:
    """Inline calls of `state` until the first bytes tell the remaining calls from everything else. Returns
    the number of positions other than calls, which are in `work.parts`, and the number of remaining calls,
    which are in `work.called`."""
    count, found, calls = work.counts, work.found, work.called
    begun = count[FOUND]
    note_set(work, work.states[state].set)
    count[ROUND] += 1
    round_ = count[ROUND]
    parts = 0
    called = 0
    masks = work.masks  # two masks: first bytes of at least one alternative, of at least two
    for _ in range(MOST_INLINED):
        pending = count[FOUND] - begun
        count[POSITIONS_LEFT] -= pending
        if count[POSITIONS_LEFT] < 0:
            count[STATUS] = TOO_LARGE
        if parts + pending > work.parts.size or called + pending > calls.size:
            count[STATUS] = FULL
        if count[STATUS] != DONE:
            count[FOUND] = begun
            return 0, 0
        for i in range(begun, count[FOUND]):
            position = found[i]
            if position <= MARK or work.at[position].seen == round_:
                continue
            if nodes.node[work.at[position].node].kind == MARKED:
                continue
            work.at[position].seen = round_
            if nodes.node[work.at[position].node].kind == CALL:
                calls[called] = position
                called += 1
            else:
                work.parts[parts] = position
                parts += 1
        count[FOUND] = begun
        if called == 0:
            return parts, 0
        masks[:] = 0
        for i in range(parts):
            node = work.at[work.parts[i]].node
            if nodes.node[node].kind == CHARS:
                join(masks, 0, work.first, node)
            else:
                join(masks, 0, work.atom_first, nodes.letters[work.at[work.parts[i]].letter])
        count[ROUND] += 1
        marked = count[ROUND]
        for i in range(called):
            rule = nodes.node[work.at[calls[i]].node].first
            if work.rules[rule].seen != marked:
                work.rules[rule].seen = marked
                body = nodes.rules[rule].body
                for word in range(WORDS):
                    masks[WORDS + word] |= masks[word] & work.first[body * WORDS + word]
                join(masks, 0, work.first, body)
        inlined = work.states[state].inline
        while inlined >= 0:
            work.rules[work.inlines[inlined].rule].inlined = marked
            inlined = work.inlines[inlined].next
        kept = 0
        for i in range(called):
            rule = nodes.node[work.at[calls[i]].node].first
            doubtful = work.rules[rule].inlined == marked or meet(
                work.first, nodes.rules[rule].body, masks, 1
            )
            if doubtful and not _is_always_called(nodes, work, rule):
                work.at[calls[i]].seen = 0
                _inline(nodes, work, rule, work.at[calls[i]].after)
            else:
                calls[kept] = calls[i]
                kept += 1
        if kept == called:
            return parts, called
        called = kept
    count[STATUS] = TOO_LARGE
    return 0, 0


@part
def _class(work: Work, bits: np.ndarray) -> int:
    """The number of the class whose atoms are `bits`. Adds the class if it does not exist."""
    code = np.uint64(0)
    for word in bits:
        code = (code ^ word) * np.uint64(0x9E3779B97F4A7C15)
        code ^= code >> np.uint64(29)
    table = work.class_table
    slot = np.int64(code >> np.uint64(1)) & (table.size - 1)
    while table[slot] > 0:
        begin = (table[slot] - 1) * bits.size
        equal = True
        for i in range(bits.size):
            equal &= work.class_bits[begin + i] == bits[i]
        if equal:
            return int(table[slot] - 1)
        slot = (slot + 1) & (table.size - 1)
    number = int(work.counts[CLASSES])
    if (number + 1) * WORDS > work.class_first.size or (number + 1) * bits.size > work.class_bits.size:
        work.counts[STATUS] = FULL
        return 0
    table[slot] = number + 1
    work.counts[CLASSES] += 1
    for word in range(bits.size):
        work.class_bits[number * bits.size + word] = bits[word]
    for atom in range(bits.size * 64):
        if bits[atom >> 6] >> np.uint64(atom & 63) & np.uint64(1):
            join(work.class_first, number, work.atom_first, atom)
    return number


@part
def _target(nodes: Nodes, work: Work, split: int) -> int:
    """The state after a character that all positions of `split` read."""
    if work.splits[split].parent == 0:
        return int(_state(work, after_char(nodes, work, work.splits[split].position)))
    begun = work.counts[FOUND]
    while split > 0:
        note_set(work, after_char(nodes, work, work.splits[split].position))
        split = work.splits[split].parent
    after = interned(work, work.found[begun : work.counts[FOUND]])
    work.counts[FOUND] = begun
    return int(_state(work, after))


@part
def _read(nodes: Nodes, work: Work, parts: int) -> None:
    """Append the edges of the first `parts` positions in `work.parts`. No position there is a call.

    A group has the atoms that the same positions read. Each position divides the groups before it.
    """
    count = work.counts
    count[SPLITS] = 1
    words = work.rest_bits.size
    groups = 0
    for i in range(parts):
        position = work.parts[i]
        if nodes.node[work.at[position].node].kind == TEXT:
            atom = nodes.letters[work.at[position].letter]
            groups = place_atom(work, groups, i, position, atom, words)
    for i in range(parts):
        position = work.parts[i]
        node = work.at[position].node
        if nodes.node[node].kind != TEXT:
            for word in range(words):
                work.rest_bits[word] = work.node_bits[node * words + word]
            groups = divide(work, groups, i, position, words)
        if count[STATUS] != DONE:
            return
    sort_groups(work, groups, words)
    for i in range(groups):
        group = work.groups[i].order
        work.groups[group].target = _target(nodes, work, work.groups[group].split)
    # All atoms that lead to the same state make one edge.
    count[ROUND] += 1
    if count[EDGES] + groups > work.edges.size:
        count[STATUS] = FULL
        return
    begun = count[EDGES]
    for i in range(groups):
        group = work.groups[i].order
        target = work.groups[group].target
        if work.states[target].seen != count[ROUND]:
            work.states[target].seen = count[ROUND]
            work.states[target].group = group
            work.edges[count[EDGES]].target = target
            count[EDGES] += 1
        else:
            leader = work.states[target].group
            for word in range(words):
                work.group_bits[leader * words + word] |= work.group_bits[group * words + word]
    for edge in range(begun, count[EDGES]):
        group = work.states[work.edges[edge].target].group
        work.edges[edge].class_ = _class(work, work.group_bits[group * words : (group + 1) * words])


@part
def _call(nodes: Nodes, work: Work, begin: int, called: int) -> None:
    """Append one call of the rule that ``work.called[begin]`` calls. The state after the call has the
    continuations of all calls of that rule from `begin` up to `called`."""
    count = work.counts
    rule = nodes.node[work.at[work.called[begin]].node].first
    begun = count[FOUND]
    for i in range(begin, called):
        if nodes.node[work.at[work.called[i]].node].first == rule:
            note_set(work, closure(nodes, work, work.at[work.called[i]].after))
    if nodes.rules[rule].item:
        note_position(work, MARK)
    after = interned(work, work.found[begun : count[FOUND]])
    count[FOUND] = begun
    number = count[CALLS]
    if number == work.calls.size:
        count[STATUS] = FULL
        return
    count[CALLS] += 1
    work.calls[number].rule = rule
    work.calls[number].start = _state(
        work, closure(nodes, work, continuation_of(work, nodes.rules[rule].body, 0, END))
    )
    work.calls[number].after = _state(work, after)


@part
def _expand(nodes: Nodes, work: Work, state: int) -> None:
    count = work.counts
    parts, called = _without_conflicts(nodes, work, state)
    work.states[state].edge_begin = count[EDGES]
    if parts > 0 and count[STATUS] == DONE:
        _read(nodes, work, parts)
    work.states[state].edge_end = count[EDGES]
    work.states[state].call_begin = count[CALLS]
    if called > 0:
        count[ROUND] += 1
        marked = count[ROUND]
        for i in range(called):
            rule = nodes.node[work.at[work.called[i]].node].first
            if work.rules[rule].seen != marked and count[STATUS] == DONE:
                work.rules[rule].seen = marked
                _call(nodes, work, i, called)
    work.states[state].call_end = count[CALLS]


@part
def _is_final(work: Work, state: int) -> bool:
    begin = work.sets[work.states[state].set].begin
    return work.sets[work.states[state].set + 1].begin > begin and work.set_items[begin] == END


@part
def _add_first(nodes: Nodes, work: Work, state: int, masks: np.ndarray, at: int) -> None:
    """Add to the mask at `at` in `masks` the first bytes that `state` can read."""
    for edge in range(work.states[state].edge_begin, work.states[state].edge_end):
        join(masks, at, work.class_first, work.edges[edge].class_)
    for call in range(work.states[state].call_begin, work.states[state].call_end):
        join(masks, at, work.first, nodes.rules[work.calls[call].rule].body)


@part
def _conflicts(nodes: Nodes, work: Work) -> int:
    """Number of states with a call that must be inlined, because some byte could both continue the called
    rule and follow the call. The field `conflicting` of ``work.states`` lists these states."""
    states = work.counts[STATES]
    found = 0
    # By state, the bytes that may be read in the final states that are reachable from the state.
    going_on = work.going_on
    going_on[: states * WORDS] = 0
    changed = False
    for state in range(states):
        reads = (
            work.states[state].edge_end > work.states[state].edge_begin
            or work.states[state].call_end > work.states[state].call_begin
        )
        if reads and _is_final(work, state):
            _add_first(nodes, work, state, going_on, state)
            changed = True
    while changed:
        changed = False
        for state in range(states - 1, -1, -1):  # most states are found before those that they lead to
            for edge in range(work.states[state].edge_begin, work.states[state].edge_end):
                changed |= join(going_on, state, going_on, work.edges[edge].target)
            for call in range(work.states[state].call_begin, work.states[state].call_end):
                changed |= join(going_on, state, going_on, work.calls[call].after)
                if _is_final(work, work.calls[call].after):
                    changed |= join(going_on, state, going_on, work.calls[call].start)
    following = work.masks
    for state in range(states):
        for call in range(work.states[state].call_begin, work.states[state].call_end):
            if _is_always_called(nodes, work, work.calls[call].rule):
                continue
            following[:] = 0
            _add_first(nodes, work, work.calls[call].after, following, 0)
            greedy = nodes.rules[work.calls[call].rule].greedy
            after = work.states[work.calls[call].after]
            for other in range(after.call_begin, after.call_end if greedy > 0 else after.call_begin):
                # The automaton reads a greedy rule to its end.
                if nodes.rules[work.calls[other].rule].greedy == greedy:
                    body = nodes.rules[work.calls[other].rule].body
                    for word in range(WORDS):
                        following[word] &= ~work.first[body * WORDS + word]
            if not meet(going_on, work.calls[call].start, following, 0):
                continue
            number = work.counts[INLINES]
            if number == work.inlines.size:
                work.counts[STATUS] = FULL
                return 0
            work.counts[INLINES] += 1
            work.inlines[number].rule = work.calls[call].rule
            work.inlines[number].next = work.states[state].inline
            work.states[state].inline = number
            if found == 0 or work.states[found - 1].conflicting != state:
                work.states[found].conflicting = state
                found += 1
    return found


@njit((NODES, WORK), **COMPILED)
def _construct(nodes: Nodes, work: Work) -> None:
    count = work.counts
    # END and MARK are positions, END is a continuation, and its closure is the set of END alone.
    count[CONTINUATIONS], count[POSITIONS] = 1, 2
    work.then[END].node, work.then[END].times, work.then[END].after, work.then[END].depth = -1, 0, END, 0
    work.at[END].node = work.at[MARK].node = -1
    work.sets[0].begin = 0
    work.found[0] = END
    work.then[END].set = interned(work, work.found[:1])
    learn_nodes(nodes, work)
    _state(work, closure(nodes, work, continuation_of(work, nodes.rules[0].body, 0, END)))
    expanded = 0
    while count[STATUS] == DONE:
        while expanded < count[STATES] and count[STATUS] == DONE:
            _expand(nodes, work, expanded)
            expanded += 1
        if count[STATUS] != DONE or count[CALLS] == 0:
            break
        conflicting = _conflicts(nodes, work)
        if conflicting == 0:
            break
        for i in range(conflicting):
            if count[STATUS] == DONE:
                _expand(nodes, work, work.states[i].conflicting)


def construct(
    nodes: Nodes,
    most_states: int,
    most_positions: int,
    *,
    nondeterministic: bool = False,
    room: int | None = None,
) -> States:
    """States that are reachable from the start of the first rule, which is state 0.

    Raises `TooLarge` beyond `most_states` states, or `most_positions` positions in all states together, and
    `NotCounted`. `room` is the number of states that memory is allocated for at first; the default suffices
    for most schemas.
    """
    # Published schemas have 0.9 to 1.5 times as many states as nodes and letters of texts together.
    room = room or 2 * max(256, len(nodes.node) + len(nodes.letters))
    while True:
        work = room_for(nodes, room)
        count = work.counts
        count[MOST_STATES], count[POSITIONS_LEFT] = most_states, most_positions
        count[NONDETERMINISTIC] = nondeterministic
        _construct(nodes, work)
        if count[STATUS] == TOO_LARGE:
            raise TooLarge
        if count[STATUS] == NOT_COUNTED:
            raise NotCounted
        if count[STATUS] == DONE:
            break
        room *= 4
    states = work.states[: count[STATES]]
    edges = work.edges[: count[EDGES]]
    calls = work.calls[: count[CALLS]]
    words = len(work.rest_bits)
    begin, end = work.sets["begin"][states["set"]], work.sets["begin"][states["set"] + 1]
    return States(
        (end > begin) & (work.set_items[begin] == END),
        # MARK is the first position of a set, or the second after END.
        ((end > begin) & (work.set_items[begin] == MARK))
        | ((end > begin + 1) & (work.set_items[begin + 1] == MARK)),
        _marks(nodes, work)[states["set"]],
        states["edge_begin"],
        states["edge_end"],
        edges["class_"],
        edges["target"],
        states["call_begin"],
        states["call_end"],
        calls["rule"],
        calls["start"],
        calls["after"],
        work.class_bits[: count[CLASSES] * words].reshape(-1, words),
        work.first.reshape(-1, WORDS),
    )


def _marks(nodes: Nodes, work: Work) -> np.ndarray:
    """(sets,) int32: the mark that each set of positions contains, or -1."""
    count = int(work.counts[SETS])
    if not (nodes.node["kind"] == MARKED).any():
        return np.full(count, -1, np.int32)
    node = nodes.node[work.at["node"][: work.counts[POSITIONS]]]
    of_position = np.where(node["kind"] == MARKED, node["first"], np.int32(-1))
    of_position[[END, MARK]] = -1
    begin = work.sets["begin"][: count + 1]
    items = np.append(of_position[work.set_items[: begin[count]]], np.int32(-1))
    found = np.maximum.reduceat(items, begin[:count])
    found[begin[:count] == begin[1:]] = -1
    return found
