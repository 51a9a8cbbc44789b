"""Work space of `subset_construction`: arrays of records, allocated for a given number of states."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

import ramify.machine_code as machine_code
from ramify.grammar.automaton.construction.nodes import (
    ACCEPTED,
    CALL,
    CHARS,
    INLINED,
    MARKED,
    OPTIONS,
    REPEAT,
    SEQUENCE,
    TEXT,
    Nodes,
)
from ramify.grammar.automaton.numba_types import array_dtypes, record, tuple_type

DONE, TOO_LARGE, NOT_COUNTED, FULL = range(4)
"""Results of the construction. FULL: the arrays of `Work` are too small."""

WORDS = 4
"""Words of 64 bits in a mask of first bytes."""

# Indices of `Work.counts`.
STATUS, CONTINUATIONS, POSITIONS, SETS, STATES, EDGES, CALLS, CLASSES, FOUND, ROUND = range(10)
INLINES, POSITIONS_LEFT, MOST_STATES, NONDETERMINISTIC, SPLITS = range(10, 15)
COUNTS = 15


class Work(NamedTuple):
    """Continuations, positions, sets of positions, states and classes of atoms under construction. A hash
    table finds the number of an equal continuation, position, set or class: 0 is a free slot, and n + 1
    stands for the number n. The fields of the records are in `_RECORDS`; `seen` is the value of
    ``counts[ROUND]`` when a search last met the record.

    then            continuations: a node, how many of its repetitions are over, and what follows
    at              positions: the node, and for TEXT the index in `letters`, consecutive within a text
    sets            sets of positions, sorted, in `set_items` from `begin` up to `begin` of the next set
    inlines         the calls to inline in a state, as a linked list
    first           by node, the mask of its first bytes; `atom_first` by atom, `class_first` by class
    found, parts, called            scratch: positions
    stack           scratch: nodes to look into
    splits          scratch: the positions that read an atom: `position` and those of `parent`
    groups          scratch: groups of atoms that the same positions read (`split`); the first of these is at
                    `first` in `parts`. By atom, `of_atom`: the group that had `atom` alone
    group_bits      scratch: the atoms of each group
    rest_bits       scratch: the atoms of a position that are in no group yet
    node_bits       by node of the kind CHARS, its atoms
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
    groups: np.ndarray
    group_bits: np.ndarray
    rest_bits: np.ndarray
    node_bits: np.ndarray
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
    "splits": record("parent", "position"),
    "groups": record("split", "first", "key", "order", "target", "atom", "of_atom"),
}
_DTYPES = array_dtypes(Work, flags=("nullable",)) | _RECORDS
for _name in (
    "first",
    "atom_first",
    "class_bits",
    "class_first",
    "group_bits",
    "rest_bits",
    "node_bits",
    "masks",
    "going_on",
):
    _DTYPES[_name] = np.dtype(np.uint64)
_DTYPES["counts"] = np.dtype(np.int64)
WORK = tuple_type(Work, _DTYPES)

COMPILED = {"cache": True, "nogil": True, "_nrt": False, "error_model": "numpy"}
"""numba's options, with reference counts turned off. No array is made in compiled code, so that passing
`Work` on costs nothing."""

njit: Any = numba.njit  # its types do not know these options
part: Any = machine_code.part(_nrt=False, error_model="numpy")


@part
def meet(first: np.ndarray, a: int, others: np.ndarray, b: int) -> bool:
    """Whether two masks of first bytes, mask `a` of `first` and mask `b` of `others`, have a byte in
    common."""
    common = np.uint64(0)
    for word in range(WORDS):
        common |= first[a * WORDS + word] & others[b * WORDS + word]
    return common != 0


@part
def join(mask: np.ndarray, at: int, others: np.ndarray, b: int) -> bool:
    """Add the bytes of mask `b` of `others` to mask `at` of `mask`. Returns whether this added a byte."""
    changed = False
    for word in range(WORDS):
        joined = mask[at * WORDS + word] | others[b * WORDS + word]
        changed |= joined != mask[at * WORDS + word]
        mask[at * WORDS + word] = joined
    return changed


@part
def learn_nodes(nodes: Nodes, work: Work) -> None:
    """Find the nodes that match the empty text, and the first bytes of each node: two fixed points over
    recursive rules."""
    for i in range(nodes.ranges.size):
        for byte in range(nodes.ranges[i].lead, nodes.ranges[i].last_lead + 1):
            work.atom_first[nodes.ranges[i].atom * WORDS + (byte >> 6)] |= np.uint64(1) << np.uint64(
                byte & 63
            )
    words = work.rest_bits.size
    for node in range(nodes.node.size):
        if nodes.node[node].kind == CHARS:
            for member in range(nodes.node[node].first, nodes.node[node].last):
                atom = nodes.set_atoms[member]
                work.node_bits[node * words + (atom >> 6)] |= np.uint64(1) << np.uint64(atom & 63)
    work.nullable[INLINED] = True
    changed = True
    while changed:
        changed = False
        for node in range(nodes.node.size):  # mostly after its parts
            kind, first, last = nodes.node[node].kind, nodes.node[node].first, nodes.node[node].last
            empty = work.nullable[node]
            if kind == TEXT:
                join(work.first, node, work.atom_first, nodes.letters[first])
            elif kind == CHARS:
                for member in range(first, last):
                    join(work.first, node, work.atom_first, nodes.set_atoms[member])
            elif kind == CALL:
                changed |= join(work.first, node, work.first, nodes.rules[first].body)
                empty = work.nullable[nodes.rules[first].body]
            elif kind == REPEAT:
                changed |= join(work.first, node, work.first, first)
                empty = nodes.bounds[last].low == 0 or work.nullable[first]
            elif kind == MARKED:
                empty = True
            elif kind == ACCEPTED:
                empty = nodes.parts[first] > 0
                for i in range(first + 1, last, 2):
                    changed |= join(work.first, node, work.first, nodes.parts[i])
            elif kind == OPTIONS:
                for i in range(first, last):
                    changed |= join(work.first, node, work.first, nodes.parts[i])
                    empty |= work.nullable[nodes.parts[i]]
            elif kind == SEQUENCE:
                empty = True
                for i in range(first, last):
                    if empty:
                        changed |= join(work.first, node, work.first, nodes.parts[i])
                        empty = work.nullable[nodes.parts[i]]
            changed |= empty != work.nullable[node]
            work.nullable[node] = empty
    for rule in range(nodes.rules.size):
        if nodes.rules[rule].item and work.nullable[nodes.rules[rule].body]:
            work.counts[STATUS] = TOO_LARGE


def room_for(nodes: Nodes, room: int) -> Work:
    """Arrays for about `room` states."""
    atoms = int(nodes.atoms[0])
    words = (atoms + 63) // 64
    many, few = 4 * room + atoms, room + atoms
    table = 1 << many.bit_length()
    sizes = {
        "counts": COUNTS, "nullable": len(nodes.node), "first": len(nodes.node) * WORDS,
        "atom_first": words * 64 * WORDS, "rules": len(nodes.rules), "states": room,
        "then_table": table, "at_table": table, "set_table": table, "class_table": table,
        "sets": many + 1, "set_items": 2 * many, "found": 2 * many,
        "class_bits": few * words, "class_first": few * WORDS, "groups": atoms, "group_bits": atoms * words,
        "rest_bits": words, "node_bits": len(nodes.node) * words, "masks": 2 * WORDS,
        "going_on": room * WORDS,
    }  # fmt: skip
    # np.zeros leaves the memory untouched until it is written, which matters after a fork.
    return Work(**{name: np.zeros(sizes.get(name, many), dtype) for name, dtype in _DTYPES.items()})
