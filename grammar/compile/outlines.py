"""outlines-core: turns a schema into a regular expression, and this into an automaton over bytes.

outlines-core indexes a regular expression by state and token. For a string of at most 200 characters and 49k
tokens, that index takes 57 MB, and it does not support budgets. We therefore request the index over a
vocabulary of the 256 bytes. This index is the automaton itself (0.4 MB), and our engine fills the masks:

    {"type": "string", "maxLength": 1}     outlines-core's schema
    "([^"\\\\…]|\\\\["\\\\/bfnrt]){0,1}"          its regular expression
    0: " → 1    1: " → 3, a → 2, …           its index over bytes, a pushdown automaton without calls
"""

from __future__ import annotations

import contextlib
import json

import numpy as np
import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from ramify.constraint import Constraint, alternation
from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction.byte_edges import Edges, edges_of
from ramify.grammar.automaton.construction.compiler import compile_edges
from ramify.grammar.schema.document.check import SchemaDocument
from ramify.grammar.vocabulary import Vocabulary
from ramify.text import shortened

_STOP = 256
_UNSUPPORTED = "Unsupported JSON Schema structure "
_MARK = "\U0010ffff"
"""A mark that is appended to the pattern. outlines-core leaves out transitions from a final state to a state
that is not final, so over bytes ``a(?:bc)?`` would always end after "a". With the mark, no state before the
mark is final."""


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary) -> bytes:
    """Compile a constraint. Returns the payload of a `PushdownGrammar`. Raises `InvalidConstraint` with
    outlines-core's reason."""
    try:
        pattern = pattern_of(constraint)
        bytes_alone = outlines_core.Vocabulary(_STOP, {bytes([byte]): [byte] for byte in range(256)})
        index = outlines_core.Index(f"(?:{pattern}){_MARK}", bytes_alone)
    except ValueError as error:
        raise _refusal(constraint, str(error)) from None
    return compile_edges(_edges(index, vocabulary.spelled_bytes), vocabulary).to_bytes()


def _refusal(constraint: Constraint, message: str) -> InvalidConstraint:
    """The error for `message`. If the message quotes a subschema, the error has the pointer of that
    subschema."""
    reason = message.strip().partition("\n")[0].rstrip(" .")
    pointer = None
    if reason.startswith(_UNSUPPORTED):
        with contextlib.suppress(ValueError):
            quoted = json.loads(reason.removeprefix(_UNSUPPORTED))
            subschemas = SchemaDocument(json.loads(constraint.source)).subschemas
            pointer = next((place for place, found in subschemas.items() if found == quoted), None)
    return InvalidConstraint(
        f"outlines-core refuses it: {shortened(reason, 300)}.",
        field=constraint.kind,
        pointer=pointer,
        remedy="Leave that part out, or start the engine with grammar_backend='auto' "
        "(--grammar-backend auto).",
    )


def pattern_of(constraint: Constraint) -> str:
    """The regular expression of a constraint. Raises `ValueError` with outlines-core's reason."""
    if constraint.kind == "regex":
        return constraint.source
    if constraint.kind == "choices":
        return alternation(constraint.source)
    space = {"natural": "[ ]?", "compact": ""}.get(str(constraint.whitespace))
    return build_regex_from_schema(
        constraint.source, rf"[ \t\n\r]{{0,{constraint.whitespace}}}" if space is None else space
    )


def _edges(index: outlines_core.Index, alphabet: frozenset[int]) -> Edges:
    """The automaton of an index over bytes. It has no calls, and its start is state 0."""
    transitions = index.get_transitions()
    start = index.get_initial_state()
    order = [start, *sorted(transitions.keys() - {start})]
    number = {state: i for i, state in enumerate(order)}
    marked = index.get_final_states()

    def is_final(state: int | None) -> bool:
        for byte in _MARK.encode():
            state = transitions.get(state, {}).get(byte) if state is not None else None
        return state in marked

    edges: list[list[int]] = []
    """State, lowest byte, highest byte and target of each edge, and -1 for no call."""
    for i, state in enumerate(order):
        row = transitions[state]
        for byte in sorted(alphabet & row.keys()):
            target = number[row[byte]]
            last = edges[-1] if edges else None
            if last is not None and (last[0], *last[2:4]) == (i, byte - 1, target):
                last[2] = byte
            else:
                edges.append([i, byte, byte, target, -1])
    return edges_of(
        np.array(edges, np.int32).reshape(-1, 5), np.array([is_final(state) for state in order], np.bool_)
    )
