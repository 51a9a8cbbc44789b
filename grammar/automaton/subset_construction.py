"""Subset construction with calls, in compiled code: from the nodes of a grammar to states over atoms.

A *position* is what is read next (a character of a text, a set of characters, or a call of a rule) and a
*continuation*: the nodes that follow up to the end of the rule (Glushkov 1961). A state is a set of
positions. In ``("ab" | [c-d]) "e"``:

    state 0          "ab", then "e"    [c-d], then "e"
    after "a"        "b", then "e"
    after "b" or c   "e", then the end
    after "e"        END

Where the first bytes of a called rule are distinct from those of everything else in the state, there is a
call: the rule is read from its own start state, and then the state after the call. Elsewhere the rule is
inlined by one level of calls. A rule ends at a character that it cannot go on with; where that character
could also follow the rule, the rule is inlined as well. So one state and one stack suffice: the automaton is
deterministic. Where that is not asked for, recursive rules and rules with unique items are always called.

With ``root ::= "x" | list`` and ``list ::= "[" list "]" | "y"``, state 0 reads "x" and calls `list` on "["
and "y". With ``root ::= "[x" | list`` both begin with "[": `list` is inlined in state 0, and "[" leads to a
state that reads "x" or calls `list`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from ramify.grammar.automaton.nodes import (
    ACCEPTED,
    CALL,
    CHARS,
    INLINED,
    MARKED,
    NODES,
    OPTIONS,
    REPEAT,
    SEQUENCE,
    TEXT,
    Nodes,
    NotCounted,
    TooLarge,
)
from ramify.grammar.automaton.numba_types import array_dtypes, record, tuple_type

END = 0
"""The position behind the end of the rule, and the empty continuation."""

MARK = 1
"""A position that reads nothing: it marks the states after a `UniqueItem`."""

MOST_INLINED = 100
"""Most levels of calls that are inlined in one state: a rule that needs more begins with a call of itself."""

MAX_DEPTH = 10
"""Levels of recursive rules that are inlined in each other. If that is not enough, two of them are read at
the same time, and each needs a stack of its own."""

DONE, TOO_LARGE, NOT_COUNTED, FULL = range(4)
"""How the construction ended. FULL: it takes more room."""

_WORDS = 4
"""Words of 64 bits in a mask of first bytes."""

# Indices of `_Work.counts`.
_STATUS, _CONTINUATIONS, _POSITIONS, _SETS, _STATES, _EDGES, _CALLS, _CLASSES, _FOUND, _ROUND = range(10)
_INLINES, _POSITIONS_LEFT, _MOST_STATES, _NONDETERMINISTIC, _TOUCHED, _SPLITS = range(10, 16)
_COUNTS = 16


class States(NamedTuple):
    """By state, (states,): `final`, `after_item` (a unique item has just ended), `mark` (the mark of a member
    that was just read, or -1), and the edges and calls, which begin at `edge_begin` and `call_begin` and end
    before `edge_end` and `call_end`.

    Edge e leads to ``edge_target[e]`` on the atoms of class ``edge_class[e]``; `class_bits`, (classes, words)
    uint64, has a bit for each atom. Call c, of ``call_rule[c]``, pushes ``call_after[c]`` and goes to
    ``call_start[c]``. `first`, (nodes, 4) uint64: the mask of the first bytes of each node.
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


class _Work(NamedTuple):
    """Continuations, positions, sets of positions, states and classes of atoms under construction, each with
    a hash table that numbers equal ones alike: 0 is a free place, and n + 1 stands for the number n. Records
    by `_RECORDS`; `seen` is the round that met one last.

    then            continuations: a node, how many of its repetitions are over, and what follows
    at              positions: the node, and for TEXT the index in `letters`; those of a text are in sequence
    sets            sets of positions, sorted, from `begin` in `set_items` up to the next one's
    inlines         which calls to inline in a state, as a list
    first           by node, the mask of its first bytes; `atom_first` and `class_first` likewise
    found, parts, called            scratch: positions
    stack           scratch: nodes to look into
    splits          scratch: which positions read an atom: those of `parent` and one more
    group_bits      scratch: the atoms that lead to a state
    """

    counts: np.ndarray
    nullable: np.ndarray
    first: np.ndarray
    atom_first: np.ndarray
    rules: np.ndarray
    then: np.ndarray
    then_table: np.ndarray
    at: np.ndarray
    at_table: np.ndarray
    sets: np.ndarray
    set_items: np.ndarray
    set_table: np.ndarray
    states: np.ndarray
    inlines: np.ndarray
    edges: np.ndarray
    calls: np.ndarray
    class_bits: np.ndarray
    class_first: np.ndarray
    class_table: np.ndarray
    found: np.ndarray
    parts: np.ndarray
    called: np.ndarray
    stack: np.ndarray
    splits: np.ndarray
    atoms: np.ndarray
    group_bits: np.ndarray
    masks: np.ndarray
    going_on: np.ndarray


_RECORDS = {
    "rules": record("inlined", "seen"),
    "then": record("node", "times", "after", "depth", "set", "seen"),
    "at": record("node", "letter", "after", "set", "seen"),
    "sets": record("begin", "state"),
    "states": record(
        "set", "inline", "edge_begin", "edge_end", "call_begin", "call_end", "group", "conflicting", "seen"
    ),
    "inlines": record("rule", "next"),
    "edges": record("class_", "target"),
    "calls": record("rule", "start", "after"),
    "stack": record("node", "times", "after"),
    "splits": record("parent", "position", "by", "into", "target"),
    "atoms": record("split", "touched", "group_target"),
}
_DTYPES = array_dtypes(_Work, flags=("nullable",)) | _RECORDS
for _name in ("first", "atom_first", "class_bits", "class_first", "group_bits", "masks", "going_on"):
    _DTYPES[_name] = np.dtype(np.uint64)
_DTYPES["counts"] = np.dtype(np.int64)
WORK = tuple_type(_Work, _DTYPES)

_OPTIONS = {"cache": True, "nogil": True, "_nrt": False, "error_model": "numpy"}
"""Without reference counts: no array is made in compiled code, and passing `_Work` on costs nothing."""

_njit: Any = numba.njit  # its types do not know these options
_part = _njit(no_cpython_wrapper=True, **_OPTIONS)


@_part
def _hash(a: int, b: int, c: int) -> int:
    code = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15)
    code = (code ^ (code >> np.uint64(29)) ^ np.uint64(b)) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(32)) ^ np.uint64(c)) * np.uint64(0x94D049BB133111EB)
    return int((code ^ (code >> np.uint64(30))) >> np.uint64(1))


@_part
def _continuation(work: _Work, node: int, times: int, after: int) -> int:
    table = work.then_table
    slot = _hash(node, times, after) & (table.size - 1)
    while table[slot] > 0:
        known = table[slot] - 1
        if (
            work.then[known].node == node
            and work.then[known].times == times
            and work.then[known].after == after
        ):
            return int(known)
        slot = (slot + 1) & (table.size - 1)
    number = int(work.counts[_CONTINUATIONS])
    if number == work.then.size:
        work.counts[_STATUS] = FULL
        return int(END)
    table[slot] = number + 1
    work.counts[_CONTINUATIONS] += 1
    work.then[number].node = node
    work.then[number].times = times
    work.then[number].after = after
    work.then[number].depth = work.then[after].depth
    work.then[number].set = -1
    return number


@_part
def _position(nodes: Nodes, work: _Work, node: int, after: int) -> int:
    """The position where `node`, a text, a set or a call, begins before `after`."""
    table = work.at_table
    slot = _hash(node, 0, after) & (table.size - 1)
    while table[slot] > 0:
        known = table[slot] - 1
        if work.at[known].node == node and work.at[known].after == after:
            return int(known)
        slot = (slot + 1) & (table.size - 1)
    number = int(work.counts[_POSITIONS])
    length = nodes.node[node].last - nodes.node[node].first if nodes.node[node].kind == TEXT else 1
    if number + length > work.at.size:
        work.counts[_STATUS] = FULL
        return int(END)
    table[slot] = number + 1
    work.counts[_POSITIONS] += length
    for i in range(length):
        work.at[number + i].node = node
        work.at[number + i].letter = nodes.node[node].first + i
        work.at[number + i].after = after
        work.at[number + i].set = -1
    return number


@_part
def _nullable(nodes: Nodes, work: _Work, node: int, times: int) -> bool:
    if nodes.node[node].kind == REPEAT and nodes.bounds[nodes.node[node].last].low <= times:
        return True
    return work.nullable[node]


@_part
def _push(work: _Work, depth: int, node: int, times: int, after: int) -> int:
    if depth == work.stack.size:
        work.counts[_STATUS] = FULL
        return 0
    work.stack[depth].node = node
    work.stack[depth].times = times
    work.stack[depth].after = after
    return depth + 1


@_part
def _find(work: _Work, position: int) -> None:
    if work.counts[_FOUND] == work.found.size:
        work.counts[_STATUS] = FULL
        return
    work.found[work.counts[_FOUND]] = position
    work.counts[_FOUND] += 1


@_part
def _collect(nodes: Nodes, work: _Work, node: int, times: int, after: int) -> None:
    """Find the positions where texts of `node`, not the empty one, begin before `after`."""
    work.counts[_ROUND] += 1
    round_ = work.counts[_ROUND]
    depth = _push(work, 0, node, times, after)
    while depth > 0 and work.counts[_STATUS] == DONE:
        depth -= 1
        node, times, after = work.stack[depth].node, work.stack[depth].times, work.stack[depth].after
        kind = nodes.node[node].kind
        first, last = nodes.node[node].first, nodes.node[node].last
        if kind in (TEXT, CHARS) or (kind == CALL and nodes.rules[first].called):
            _find(work, _position(nodes, work, node, after))
        elif kind == MARKED:
            _find(work, _position(nodes, work, node, END))
        elif kind == CALL:
            whole = _continuation(work, node, 0, after)
            if work.then[whole].seen != round_:
                work.then[whole].seen = round_
                depth = _push(work, depth, nodes.rules[first].body, 0, after)
        elif kind == ACCEPTED:
            for i in range(first + 1, last, 2):
                rest = nodes.parts[i + 1]
                follows = after if rest < 0 else _continuation(work, rest, 0, after)
                _find(work, _position(nodes, work, nodes.parts[i], follows))
        elif kind == OPTIONS:
            for i in range(first, last):
                depth = _push(work, depth, nodes.parts[i], 0, after)
        elif kind == SEQUENCE:
            # Only the parts up to the first one that is not nullable can come first.
            ahead = first
            while ahead < last and work.nullable[nodes.parts[ahead]]:
                ahead += 1
            for i in range(last - 1, first - 1, -1):
                if i <= ahead:
                    depth = _push(work, depth, nodes.parts[i], 0, after)
                after = _continuation(work, nodes.parts[i], 0, after)
        elif kind == REPEAT:
            low, high = nodes.bounds[last].low, nodes.bounds[last].high
            if times + 1 != high:
                after = _continuation(work, node, times + 1 if high >= 0 else min(times + 1, low), after)
            depth = _push(work, depth, first, 0, after)


@_part
def _sort(values: np.ndarray) -> None:
    """Shell's sort with the gaps of Ciura (2001), nearly sorted values in linear time."""
    for gap in (701, 301, 132, 57, 23, 10, 4, 1):
        for i in range(gap, values.size):
            value = values[i]
            j = i
            while j >= gap and values[j - gap] > value:
                values[j] = values[j - gap]
                j -= gap
            values[j] = value


@_part
def _interned(work: _Work, found: np.ndarray) -> int:
    """The number of the set of `found`, which is sorted here; equal ones in it count once."""
    size = 0
    if found.size > 1:
        ordered = True
        for i in range(1, found.size):
            ordered &= found[i - 1] < found[i]
        if not ordered:
            _sort(found)
    code = np.uint64(0)
    for i in range(found.size):
        if i == 0 or found[i] != found[i - 1]:
            found[size] = found[i]
            size += 1
            code = (code ^ np.uint64(found[i])) * np.uint64(0x9E3779B97F4A7C15)
            code ^= code >> np.uint64(29)
    table = work.set_table
    slot = np.int64(code >> np.uint64(1)) & (table.size - 1)
    while table[slot] > 0:
        known = table[slot] - 1
        begin = work.sets[known].begin
        equal = work.sets[known + 1].begin - begin == size
        for i in range(size if equal else 0):
            if work.set_items[begin + i] != found[i]:
                equal = False
                break
        if equal:
            return int(known)
        slot = (slot + 1) & (table.size - 1)
    number = int(work.counts[_SETS])
    begin = work.sets[number].begin
    if number + 1 == work.sets.size or begin + size > work.set_items.size:
        work.counts[_STATUS] = FULL
        return 0
    table[slot] = number + 1
    work.counts[_SETS] += 1
    for i in range(size):
        work.set_items[begin + i] = found[i]
    work.sets[number + 1].begin = begin + size
    work.sets[number].state = -1
    return number


@_part
def _find_all(work: _Work, number: int) -> None:
    """Find all positions of a set."""
    for i in range(work.sets[number].begin, work.sets[number + 1].begin):
        _find(work, work.set_items[i])


@_part
def _closure(nodes: Nodes, work: _Work, continuation: int) -> int:
    """The set of positions where `continuation` begins, END among them if it may be empty."""
    if work.then[continuation].set >= 0:
        return int(work.then[continuation].set)
    begun = work.counts[_FOUND]
    here = continuation
    while work.counts[_STATUS] == DONE:
        if work.then[here].set >= 0:
            _find_all(work, work.then[here].set)
            break
        _collect(nodes, work, work.then[here].node, work.then[here].times, work.then[here].after)
        if not _nullable(nodes, work, work.then[here].node, work.then[here].times):
            break
        here = work.then[here].after
    number = _interned(work, work.found[begun : work.counts[_FOUND]])
    work.counts[_FOUND] = begun
    work.then[continuation].set = number
    return number


@_part
def _after(nodes: Nodes, work: _Work, position: int) -> int:
    """The set of positions after one character at `position`, which is not a call."""
    if work.at[position].set < 0:
        node = work.at[position].node
        if nodes.node[node].kind == TEXT and work.at[position].letter + 1 < nodes.node[node].last:
            begun = work.counts[_FOUND]
            _find(work, position + 1)
            work.at[position].set = _interned(work, work.found[begun : work.counts[_FOUND]])
            work.counts[_FOUND] = begun
        else:
            work.at[position].set = _closure(nodes, work, work.at[position].after)
    return int(work.at[position].set)


@_part
def _state(work: _Work, number: int) -> int:
    """The state of a set of positions."""
    if work.sets[number].state < 0:
        state = work.counts[_STATES]
        if state >= work.counts[_MOST_STATES]:
            work.counts[_STATUS] = TOO_LARGE
            return 0
        if state == work.states.size:
            work.counts[_STATUS] = FULL
            return 0
        work.sets[number].state = state
        work.states[state].set = number
        work.states[state].inline = -1
        work.counts[_STATES] += 1
    return int(work.sets[number].state)


@_part
def _is_always_called(nodes: Nodes, work: _Work, rule: int) -> bool:
    """`rule` is called whatever else may be read there."""
    kept_apart = nodes.rules[rule].recursive or nodes.rules[rule].item or nodes.rules[rule].array
    return work.counts[_NONDETERMINISTIC] > 0 and kept_apart


@_part
def _meet(first: np.ndarray, a: int, others: np.ndarray, b: int) -> bool:
    """Whether masks of first bytes, at `a` in one array and at `b` in the other, have a byte in common."""
    common = np.uint64(0)
    for word in range(_WORDS):
        common |= first[a * _WORDS + word] & others[b * _WORDS + word]
    return common != 0


@_part
def _join(mask: np.ndarray, at: int, others: np.ndarray, b: int) -> bool:
    """Add one mask to another; whether that changed it."""
    changed = False
    for word in range(_WORDS):
        joined = mask[at * _WORDS + word] | others[b * _WORDS + word]
        changed |= joined != mask[at * _WORDS + word]
        mask[at * _WORDS + word] = joined
    return changed


@_part
def _inline(nodes: Nodes, work: _Work, rule: int, after: int) -> None:
    """Find the positions where a text of `rule`, not an empty one, begins when the rule is inlined."""
    if nodes.rules[rule].counted:
        work.counts[_STATUS] = NOT_COUNTED
        return
    if nodes.rules[rule].item or nodes.rules[rule].array:
        work.counts[_STATUS] = TOO_LARGE
        return
    if nodes.rules[rule].recursive:
        depth = work.then[after].depth
        if depth >= MAX_DEPTH:
            work.counts[_STATUS] = TOO_LARGE
            return
        after = _continuation(work, INLINED, 0, after)
        work.then[after].depth = depth + 1
    _collect(nodes, work, nodes.rules[rule].body, 0, after)


@_part
def _without_conflicts(nodes: Nodes, work: _Work, state: int) -> tuple[int, int]:
    """The contents of `state` with calls inlined until first bytes tell the rest apart: the numbers of
    positions in `parts`, none of them a call, and of calls in `calls`."""
    count, found, calls = work.counts, work.found, work.called
    begun = count[_FOUND]
    _find_all(work, work.states[state].set)
    count[_ROUND] += 1
    round_ = count[_ROUND]
    parts = 0
    called = 0
    masks = work.masks  # first bytes met once, and twice
    for _ in range(MOST_INLINED):
        pending = count[_FOUND] - begun
        count[_POSITIONS_LEFT] -= pending
        if count[_POSITIONS_LEFT] < 0:
            count[_STATUS] = TOO_LARGE
        if parts + pending > work.parts.size or called + pending > calls.size:
            count[_STATUS] = FULL
        if count[_STATUS] != DONE:
            count[_FOUND] = begun
            return 0, 0
        for i in range(begun, count[_FOUND]):
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
        count[_FOUND] = begun
        if called == 0:
            return parts, 0
        masks[:] = 0
        for i in range(parts):
            node = work.at[work.parts[i]].node
            if nodes.node[node].kind == CHARS:
                _join(masks, 0, work.first, node)
            else:
                _join(masks, 0, work.atom_first, nodes.letters[work.at[work.parts[i]].letter])
        count[_ROUND] += 1
        marked = count[_ROUND]
        for i in range(called):
            rule = nodes.node[work.at[calls[i]].node].first
            if work.rules[rule].seen != marked:
                work.rules[rule].seen = marked
                body = nodes.rules[rule].body
                for word in range(_WORDS):
                    masks[_WORDS + word] |= masks[word] & work.first[body * _WORDS + word]
                _join(masks, 0, work.first, body)
        inlined = work.states[state].inline
        while inlined >= 0:
            work.rules[work.inlines[inlined].rule].inlined = marked
            inlined = work.inlines[inlined].next
        kept = 0
        for i in range(called):
            rule = nodes.node[work.at[calls[i]].node].first
            doubtful = work.rules[rule].inlined == marked or _meet(
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
    count[_STATUS] = TOO_LARGE
    return 0, 0


@_part
def _class(work: _Work, bits: np.ndarray) -> int:
    """The number of the set of atoms `bits`."""
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
    number = int(work.counts[_CLASSES])
    if (number + 1) * _WORDS > work.class_first.size or (number + 1) * bits.size > work.class_bits.size:
        work.counts[_STATUS] = FULL
        return 0
    table[slot] = number + 1
    work.counts[_CLASSES] += 1
    for word in range(bits.size):
        work.class_bits[number * bits.size + word] = bits[word]
    for atom in range(bits.size * 64):
        if bits[atom >> 6] >> np.uint64(atom & 63) & np.uint64(1):
            _join(work.class_first, number, work.atom_first, atom)
    return number


@_part
def _split(work: _Work, atom: int, position: int) -> None:
    """Let `position` read `atom` as well."""
    count = work.counts
    known = work.atoms[atom].split
    if known == 0:
        work.atoms[count[_TOUCHED]].touched = atom
        count[_TOUCHED] += 1
    if work.splits[known].by != position:
        new = count[_SPLITS]
        if new == work.splits.size:
            count[_STATUS] = FULL
            return
        count[_SPLITS] += 1
        work.splits[known].by = position
        work.splits[known].into = new
        work.splits[new].parent, work.splits[new].position = known, position
        work.splits[new].by = work.splits[new].target = -1
    work.atoms[atom].split = work.splits[known].into


@_part
def _split_target(nodes: Nodes, work: _Work, split: int) -> int:
    """The state after a character that the positions of `split` read."""
    if work.splits[split].target < 0:
        if work.splits[split].parent == 0:
            after = _after(nodes, work, work.splits[split].position)
        else:
            begun = work.counts[_FOUND]
            here = split
            while here > 0:
                _find_all(work, _after(nodes, work, work.splits[here].position))
                here = work.splits[here].parent
            after = _interned(work, work.found[begun : work.counts[_FOUND]])
            work.counts[_FOUND] = begun
        work.splits[split].target = _state(work, after)
    return int(work.splits[split].target)


@_part
def _read(nodes: Nodes, work: _Work, parts: int) -> None:
    """Append the edges of the positions in `parts`, none of them a call."""
    count = work.counts
    count[_TOUCHED], count[_SPLITS] = 0, 1
    work.splits[0].by = -1
    for i in range(parts):
        position = work.parts[i]
        node = work.at[position].node
        if nodes.node[node].kind == TEXT:
            _split(work, nodes.letters[work.at[position].letter], position)
        else:
            for member in range(nodes.node[node].first, nodes.node[node].last):
                _split(work, nodes.set_atoms[member], position)
    # The atoms that lead to one state are an edge.
    count[_ROUND] += 1
    words = work.group_bits.size // work.atoms.size
    groups = 0
    for i in range(count[_TOUCHED]):
        atom = work.atoms[i].touched
        target = _split_target(nodes, work, work.atoms[atom].split)
        work.atoms[atom].split = 0
        if work.states[target].seen != count[_ROUND]:
            work.states[target].seen = count[_ROUND]
            work.states[target].group = groups
            work.atoms[groups].group_target = target
            work.group_bits[groups * words : (groups + 1) * words] = 0
            groups += 1
        work.group_bits[work.states[target].group * words + (atom >> 6)] |= np.uint64(1) << np.uint64(
            atom & 63
        )
    if count[_EDGES] + groups > work.edges.size:
        count[_STATUS] = FULL
        return
    for group in range(groups):
        edge = count[_EDGES]
        work.edges[edge].class_ = _class(work, work.group_bits[group * words : (group + 1) * words])
        work.edges[edge].target = work.atoms[group].group_target
        count[_EDGES] += 1


@_part
def _call(nodes: Nodes, work: _Work, begin: int, called: int) -> None:
    """Append the call of the rule of ``calls[begin]``, which may go on as in all calls of that rule up to
    `called`."""
    count = work.counts
    rule = nodes.node[work.at[work.called[begin]].node].first
    begun = count[_FOUND]
    for i in range(begin, called):
        if nodes.node[work.at[work.called[i]].node].first == rule:
            _find_all(work, _closure(nodes, work, work.at[work.called[i]].after))
    if nodes.rules[rule].item:
        _find(work, MARK)
    after = _interned(work, work.found[begun : count[_FOUND]])
    count[_FOUND] = begun
    number = count[_CALLS]
    if number == work.calls.size:
        count[_STATUS] = FULL
        return
    count[_CALLS] += 1
    work.calls[number].rule = rule
    work.calls[number].start = _state(
        work, _closure(nodes, work, _continuation(work, nodes.rules[rule].body, 0, END))
    )
    work.calls[number].after = _state(work, after)


@_part
def _expand(nodes: Nodes, work: _Work, state: int) -> None:
    """Find the edges and calls of `state`."""
    count = work.counts
    parts, called = _without_conflicts(nodes, work, state)
    work.states[state].edge_begin = count[_EDGES]
    if parts > 0 and count[_STATUS] == DONE:
        _read(nodes, work, parts)
    work.states[state].edge_end = count[_EDGES]
    work.states[state].call_begin = count[_CALLS]
    if called > 0:
        count[_ROUND] += 1
        marked = count[_ROUND]
        for i in range(called):
            rule = nodes.node[work.at[work.called[i]].node].first
            if work.rules[rule].seen != marked and count[_STATUS] == DONE:
                work.rules[rule].seen = marked
                _call(nodes, work, i, called)
    work.states[state].call_end = count[_CALLS]


@_part
def _is_final(work: _Work, state: int) -> bool:
    begin = work.sets[work.states[state].set].begin
    return work.sets[work.states[state].set + 1].begin > begin and work.set_items[begin] == END


@_part
def _add_first(nodes: Nodes, work: _Work, state: int, masks: np.ndarray, at: int) -> None:
    """Add to the mask at `at` in `masks` the first bytes that `state` can read."""
    for edge in range(work.states[state].edge_begin, work.states[state].edge_end):
        _join(masks, at, work.class_first, work.edges[edge].class_)
    for call in range(work.states[state].call_begin, work.states[state].call_end):
        _join(masks, at, work.first, nodes.rules[work.calls[call].rule].body)


@_part
def _conflicts(nodes: Nodes, work: _Work) -> int:
    """The number of states, in `conflicting`, with a call that a next byte could both continue and follow;
    that call is to be inlined."""
    states = work.counts[_STATES]
    found = 0
    # By state, the bytes that may be read in a final state which is reachable from it.
    going_on = work.going_on
    going_on[: states * _WORDS] = 0
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
                changed |= _join(going_on, state, going_on, work.edges[edge].target)
            for call in range(work.states[state].call_begin, work.states[state].call_end):
                changed |= _join(going_on, state, going_on, work.calls[call].after)
                if _is_final(work, work.calls[call].after):
                    changed |= _join(going_on, state, going_on, work.calls[call].start)
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
                    for word in range(_WORDS):
                        following[word] &= ~work.first[body * _WORDS + word]
            if not _meet(going_on, work.calls[call].start, following, 0):
                continue
            number = work.counts[_INLINES]
            if number == work.inlines.size:
                work.counts[_STATUS] = FULL
                return 0
            work.counts[_INLINES] += 1
            work.inlines[number].rule = work.calls[call].rule
            work.inlines[number].next = work.states[state].inline
            work.states[state].inline = number
            if found == 0 or work.states[found - 1].conflicting != state:
                work.states[found].conflicting = state
                found += 1
    return found


@_part
def _learn_nodes(nodes: Nodes, work: _Work) -> None:
    """Which nodes may be empty, and the first bytes of each: fixed points over recursive rules."""
    for i in range(nodes.ranges.size):
        for byte in range(nodes.ranges[i].lead, nodes.ranges[i].last_lead + 1):
            work.atom_first[nodes.ranges[i].atom * _WORDS + (byte >> 6)] |= np.uint64(1) << np.uint64(
                byte & 63
            )
    work.nullable[INLINED] = True
    changed = True
    while changed:
        changed = False
        for node in range(nodes.node.size):  # mostly after its parts
            kind, first, last = nodes.node[node].kind, nodes.node[node].first, nodes.node[node].last
            empty = work.nullable[node]
            if kind == TEXT:
                _join(work.first, node, work.atom_first, nodes.letters[first])
            elif kind == CHARS:
                for member in range(first, last):
                    _join(work.first, node, work.atom_first, nodes.set_atoms[member])
            elif kind == CALL:
                changed |= _join(work.first, node, work.first, nodes.rules[first].body)
                empty = work.nullable[nodes.rules[first].body]
            elif kind == REPEAT:
                changed |= _join(work.first, node, work.first, first)
                empty = nodes.bounds[last].low == 0 or work.nullable[first]
            elif kind == MARKED:
                empty = True
            elif kind == ACCEPTED:
                empty = nodes.parts[first] > 0
                for i in range(first + 1, last, 2):
                    changed |= _join(work.first, node, work.first, nodes.parts[i])
            elif kind == OPTIONS:
                for i in range(first, last):
                    changed |= _join(work.first, node, work.first, nodes.parts[i])
                    empty |= work.nullable[nodes.parts[i]]
            elif kind == SEQUENCE:
                empty = True
                for i in range(first, last):
                    if empty:
                        changed |= _join(work.first, node, work.first, nodes.parts[i])
                        empty = work.nullable[nodes.parts[i]]
            changed |= empty != work.nullable[node]
            work.nullable[node] = empty
    for rule in range(nodes.rules.size):
        if nodes.rules[rule].item and work.nullable[nodes.rules[rule].body]:
            work.counts[_STATUS] = TOO_LARGE


@_njit((NODES, WORK), **_OPTIONS)
def _construct(nodes: Nodes, work: _Work) -> None:
    """Find all states."""
    count = work.counts
    # END and MARK are positions, END is a continuation, and its closure is the set of END alone.
    count[_CONTINUATIONS], count[_POSITIONS] = 1, 2
    work.then[END].node, work.then[END].times, work.then[END].after, work.then[END].depth = -1, 0, END, 0
    work.at[END].node = work.at[MARK].node = -1
    work.sets[0].begin = 0
    work.found[0] = END
    work.then[END].set = _interned(work, work.found[:1])
    _learn_nodes(nodes, work)
    _state(work, _closure(nodes, work, _continuation(work, nodes.rules[0].body, 0, END)))
    expanded = 0
    while count[_STATUS] == DONE:
        while expanded < count[_STATES] and count[_STATUS] == DONE:
            _expand(nodes, work, expanded)
            expanded += 1
        if count[_STATUS] != DONE or count[_CALLS] == 0:
            break
        conflicting = _conflicts(nodes, work)
        if conflicting == 0:
            break
        for i in range(conflicting):
            if count[_STATUS] == DONE:
                _expand(nodes, work, work.states[i].conflicting)


def construct(
    nodes: Nodes, most_states: int, most_positions: int, *, nondeterministic: bool = False
) -> States:
    """All states that are reachable from the start of the first rule, which is state 0.

    Raises `TooLarge` beyond `most_states` states, or `most_positions` positions in all states together.
    """
    room = max(256, len(nodes.node))
    while True:
        work = _room(nodes, room)
        count = work.counts
        count[_MOST_STATES], count[_POSITIONS_LEFT] = most_states, most_positions
        count[_NONDETERMINISTIC] = nondeterministic
        _construct(nodes, work)
        if count[_STATUS] == TOO_LARGE:
            raise TooLarge
        if count[_STATUS] == NOT_COUNTED:
            raise NotCounted
        if count[_STATUS] == DONE:
            break
        room *= 4
    states = work.states[: count[_STATES]]
    edges = work.edges[: count[_EDGES]]
    calls = work.calls[: count[_CALLS]]
    words = len(work.group_bits) // len(work.atoms)
    begin, end = work.sets["begin"][states["set"]], work.sets["begin"][states["set"] + 1]
    return States(
        (end > begin) & (work.set_items[begin] == END),
        # MARK comes first or, behind END, second.
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
        work.class_bits[: count[_CLASSES] * words].reshape(-1, words),
        work.first.reshape(-1, _WORDS),
    )


def _marks(nodes: Nodes, work: _Work) -> np.ndarray:
    """(sets,) int32: the mark in each set of positions, or -1."""
    count = int(work.counts[_SETS])
    if not (nodes.node["kind"] == MARKED).any():
        return np.full(count, -1, np.int32)
    node = nodes.node[work.at["node"][: work.counts[_POSITIONS]]]
    of_position = np.where(node["kind"] == MARKED, node["first"], np.int32(-1))
    of_position[[END, MARK]] = -1
    begin = work.sets["begin"][: count + 1]
    items = np.append(of_position[work.set_items[: begin[count]]], np.int32(-1))
    found = np.maximum.reduceat(items, begin[:count])
    found[begin[:count] == begin[1:]] = -1
    return found


def _room(nodes: Nodes, room: int) -> _Work:
    """Room for about `room` states."""
    atoms = int(nodes.atoms[0])
    words = (atoms + 63) // 64
    many, few = 4 * room + atoms, room + atoms
    table = 1 << (2 * many).bit_length()
    sizes = {
        "counts": _COUNTS, "nullable": len(nodes.node), "first": len(nodes.node) * _WORDS,
        "atom_first": words * 64 * _WORDS, "rules": len(nodes.rules), "states": room,
        "then_table": table, "at_table": table, "set_table": table, "class_table": table,
        "sets": many + 1, "set_items": 8 * many, "found": 8 * many,
        "class_bits": few * words, "class_first": few * _WORDS, "atoms": atoms, "group_bits": atoms * words,
        "masks": 2 * _WORDS, "going_on": room * _WORDS,
    }  # fmt: skip
    # Memory that is not written stays untouched, which matters in a process that was just forked.
    return _Work(**{name: np.zeros(sizes.get(name, many), dtype) for name, dtype in _DTYPES.items()})
