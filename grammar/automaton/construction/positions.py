"""Positions and continuations in a grammar, and the sets of positions that follow them.

Equal positions have one number, and so have equal continuations. `subset_construction` explains the terms.
"""

from __future__ import annotations

import numpy as np

from ramify.grammar.automaton.construction.nodes import (
    ACCEPTED,
    CALL,
    CHARS,
    MARKED,
    OPTIONS,
    REPEAT,
    SEQUENCE,
    TEXT,
    Nodes,
)
from ramify.grammar.automaton.construction.work import (
    CONTINUATIONS,
    DONE,
    FOUND,
    FULL,
    POSITIONS,
    ROUND,
    SETS,
    STATUS,
    Work,
    part,
)

END = 0
"""The position after the end of a rule, and the empty continuation."""

MARK = 1
"""A position that reads nothing: it marks the states after a `UniqueItem`."""


@part
def _hash(a: int, b: int, c: int) -> int:
    code = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15)
    code = (code ^ (code >> np.uint64(29)) ^ np.uint64(b)) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(32)) ^ np.uint64(c)) * np.uint64(0x94D049BB133111EB)
    return int((code ^ (code >> np.uint64(30))) >> np.uint64(1))


@part
def continuation_of(work: Work, node: int, times: int, after: int) -> int:
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
    number = int(work.counts[CONTINUATIONS])
    if number == work.then.size:
        work.counts[STATUS] = FULL
        return int(END)
    table[slot] = number + 1
    work.counts[CONTINUATIONS] += 1
    work.then[number].node = node
    work.then[number].times = times
    work.then[number].after = after
    work.then[number].depth = work.then[after].depth
    work.then[number].set = -1
    return number


@part
def position_of(nodes: Nodes, work: Work, node: int, after: int) -> int:
    """The position at the beginning of `node`, followed by the continuation `after`. `node` is a text, a set
    of characters or a call."""
    table = work.at_table
    slot = _hash(node, 0, after) & (table.size - 1)
    while table[slot] > 0:
        known = table[slot] - 1
        if work.at[known].node == node and work.at[known].after == after:
            return int(known)
        slot = (slot + 1) & (table.size - 1)
    number = int(work.counts[POSITIONS])
    length = nodes.node[node].last - nodes.node[node].first if nodes.node[node].kind == TEXT else 1
    if number + length > work.at.size:
        work.counts[STATUS] = FULL
        return int(END)
    table[slot] = number + 1
    work.counts[POSITIONS] += length
    for i in range(length):
        work.at[number + i].node = node
        work.at[number + i].letter = nodes.node[node].first + i
        work.at[number + i].after = after
        work.at[number + i].set = -1
    return number


@part
def _nullable(nodes: Nodes, work: Work, node: int, times: int) -> bool:
    if nodes.node[node].kind == REPEAT and nodes.bounds[nodes.node[node].last].low <= times:
        return True
    return work.nullable[node]


@part
def _push(work: Work, depth: int, node: int, times: int, after: int) -> int:
    if depth == work.stack.size:
        work.counts[STATUS] = FULL
        return 0
    work.stack[depth].node = node
    work.stack[depth].times = times
    work.stack[depth].after = after
    return depth + 1


@part
def note_position(work: Work, position: int) -> None:
    if work.counts[FOUND] == work.found.size:
        work.counts[STATUS] = FULL
        return
    work.found[work.counts[FOUND]] = position
    work.counts[FOUND] += 1


@part
def collect(nodes: Nodes, work: Work, node: int, times: int, after: int) -> None:
    """Add to `work.found` the positions at which non-empty texts of `node` begin, followed by the
    continuation `after`. `times` repetitions of `node` have been read."""
    work.counts[ROUND] += 1
    round_ = work.counts[ROUND]
    depth = _push(work, 0, node, times, after)
    while depth > 0 and work.counts[STATUS] == DONE:
        depth -= 1
        node, times, after = work.stack[depth].node, work.stack[depth].times, work.stack[depth].after
        kind = nodes.node[node].kind
        first, last = nodes.node[node].first, nodes.node[node].last
        if kind in (TEXT, CHARS) or (kind == CALL and nodes.rules[first].called):
            note_position(work, position_of(nodes, work, node, after))
        elif kind == MARKED:
            note_position(work, position_of(nodes, work, node, END))
        elif kind == CALL:
            whole = continuation_of(work, node, 0, after)
            if work.then[whole].seen != round_:
                work.then[whole].seen = round_
                depth = _push(work, depth, nodes.rules[first].body, 0, after)
        elif kind == ACCEPTED:
            for i in range(first + 1, last, 2):
                rest = nodes.parts[i + 1]
                follows = after if rest < 0 else continuation_of(work, rest, 0, after)
                note_position(work, position_of(nodes, work, nodes.parts[i], follows))
        elif kind == OPTIONS:
            for i in range(first, last):
                depth = _push(work, depth, nodes.parts[i], 0, after)
        elif kind == SEQUENCE:
            # A text can begin only in the parts up to the first one that is not nullable.
            ahead = first
            while ahead < last and work.nullable[nodes.parts[ahead]]:
                ahead += 1
            for i in range(last - 1, first - 1, -1):
                if i <= ahead:
                    depth = _push(work, depth, nodes.parts[i], 0, after)
                after = continuation_of(work, nodes.parts[i], 0, after)
        elif kind == REPEAT:
            low, high = nodes.bounds[last].low, nodes.bounds[last].high
            if times + 1 != high:
                after = continuation_of(work, node, times + 1 if high >= 0 else min(times + 1, low), after)
            depth = _push(work, depth, first, 0, after)


@part
def _sort(values: np.ndarray) -> None:
    """Sort in place by Shell's sort with the gaps of Ciura (2001), which is fast for nearly sorted values."""
    for gap in (701, 301, 132, 57, 23, 10, 4, 1):
        for i in range(gap, values.size):
            value = values[i]
            j = i
            while j >= gap and values[j - gap] > value:
                values[j] = values[j - gap]
                j -= gap
            values[j] = value


@part
def interned(work: Work, found: np.ndarray) -> int:
    """The number of the set of the positions in `found`. Sorts `found` in place; equal positions count
    once."""
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
    number = int(work.counts[SETS])
    begin = work.sets[number].begin
    if number + 1 == work.sets.size or begin + size > work.set_items.size:
        work.counts[STATUS] = FULL
        return 0
    table[slot] = number + 1
    work.counts[SETS] += 1
    for i in range(size):
        work.set_items[begin + i] = found[i]
    work.sets[number + 1].begin = begin + size
    work.sets[number].state = -1
    return number


@part
def note_set(work: Work, number: int) -> None:
    """Add all positions of the set `number` to `work.found`."""
    for i in range(work.sets[number].begin, work.sets[number + 1].begin):
        note_position(work, work.set_items[i])


@part
def closure(nodes: Nodes, work: Work, continuation: int) -> int:
    """The set of positions at which `continuation` may begin. END is among them if `continuation` may be
    empty."""
    if work.then[continuation].set >= 0:
        return int(work.then[continuation].set)
    begun = work.counts[FOUND]
    here = continuation
    while work.counts[STATUS] == DONE:
        if work.then[here].set >= 0:
            note_set(work, work.then[here].set)
            break
        collect(nodes, work, work.then[here].node, work.then[here].times, work.then[here].after)
        if not _nullable(nodes, work, work.then[here].node, work.then[here].times):
            break
        here = work.then[here].after
    number = interned(work, work.found[begun : work.counts[FOUND]])
    work.counts[FOUND] = begun
    work.then[continuation].set = number
    return number


@part
def after_char(nodes: Nodes, work: Work, position: int) -> int:
    """The set of positions after one character at `position`, which is not a call."""
    if work.at[position].set < 0:
        node = work.at[position].node
        if nodes.node[node].kind == TEXT and work.at[position].letter + 1 < nodes.node[node].last:
            begun = work.counts[FOUND]
            note_position(work, position + 1)
            work.at[position].set = interned(work, work.found[begun : work.counts[FOUND]])
            work.counts[FOUND] = begun
        else:
            work.at[position].set = closure(nodes, work, work.at[position].after)
    return int(work.at[position].set)
