"""The construction of states in too little room: it begins again with more, and writes nowhere else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ramify.grammar.automaton.construction.compiler import MAX_STATES, MOST_POSITIONS, called_rules
from ramify.grammar.automaton.construction.nodes import flatten
from ramify.grammar.automaton.construction.subset_construction import construct
from ramify.grammar.rules.expression import Expression
from ramify.grammar.rules.gbnf import grammar_rules
from tests.grammar.languages import schema_rules

pytestmark = pytest.mark.slow


def classes(count: int, seed: int) -> str:
    """A grammar of alternatives that begin with overlapping sets of characters."""
    draw = random.Random(seed)
    letters = [chr(0x4E00 + 2 * i) for i in range(3 * count)]
    rows = [f'[{"".join(sorted(draw.sample(letters, count)))}] "{i}"' for i in range(count)]
    far = [f'[{"".join(letters)}] "f{i}"' for i in range(count)]
    return "root ::= " + " | ".join(far + rows) + f' | "zz{"".join(letters)}"'


SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "uniqueItems": True, "minItems": 2, "items": {"type": "string"}},
        "kind": {"enum": ["first", "fifth", "last"]},
        "code": {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]+$"},
        "next": {"$ref": "#"},
    },
}


@pytest.mark.parametrize("room", [1, 20, 60])
@pytest.mark.parametrize(
    ("rules", "counting"),
    [
        (grammar_rules(classes(12, 0)), False),
        (grammar_rules(classes(60, 0)), False),
        (schema_rules(SCHEMA), False),
        (schema_rules({"type": "string", "maxLength": 5000}), True),
    ],
    ids=["classes", "more-classes", "schema", "counted"],
)
def test_the_states_are_the_same(rules: dict[str, Expression], counting: bool, room: int) -> None:
    nodes, _, _ = flatten(rules, *called_rules(rules), counting=counting)
    expected = construct(nodes, MAX_STATES, MOST_POSITIONS)
    assert len(expected.final) > room
    found = construct(nodes, MAX_STATES, MOST_POSITIONS, room=room)
    for name in expected._fields:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
