"""The construction of states in too little room: it begins again with more, and writes nowhere else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ramify import constraint
from ramify.grammar.automaton import subset_construction
from ramify.grammar.automaton.construction import TOUCHED
from ramify.grammar.automaton.nodes import Nodes
from tests.grammar.vocabularies import compiled

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
    "wanted",
    [
        constraint.ebnf(classes(12, 0)),
        constraint.ebnf(classes(60, 0)),
        constraint.json_schema(SCHEMA),
        constraint.json_schema(SCHEMA, any_order=True),
        constraint.json_schema({"type": "string", "maxLength": 5000}),
    ],
    ids=["classes", "more-classes", "schema", "any-order", "counted"],
)
def test_the_automaton_is_the_same(
    wanted: constraint.Constraint, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compiled(wanted).automaton.arrays
    rounds = []
    construct, room_for = subset_construction._construct, subset_construction.room_for

    def checked(nodes: Nodes, work: subset_construction.Work) -> None:
        construct(nodes, work)
        rounds.append(work)
        assert work.counts[TOUCHED] <= work.atoms.size

    first = 0

    def small(nodes: Nodes, asked: int) -> subset_construction.Work:
        nonlocal first
        first = first or asked
        return room_for(nodes, max(room, room * asked // first))

    monkeypatch.setattr(subset_construction, "_construct", checked)
    monkeypatch.setattr(subset_construction, "room_for", small)
    found = compiled(wanted).automaton.arrays
    assert len(rounds) > 1
    for name in expected._fields:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
