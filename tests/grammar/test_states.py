"""The states over characters, and the look-up of a property's conditions."""

from __future__ import annotations

import numpy as np

from ramify.grammar.automaton.construction.compiler import MAX_STATES, MOST_POSITIONS, called_rules
from ramify.grammar.automaton.construction.nodes import flatten
from ramify.grammar.automaton.construction.subset_construction import construct
from ramify.grammar.rules.expression import alt, chars_of, seq, text
from ramify.grammar.schema.logic.assertions import STRING, Properties, Types
from ramify.grammar.schema.logic.disjunct import Disjunct
from ramify.grammar.schema.logic.formula import FALSE, TRUE, Formula, conjunction
from tests.grammar.languages import Language, schema_rules


def test_one_edge_leads_from_a_state_to_another_on_all_their_characters() -> None:
    rules = schema_rules({"type": "object", "properties": {"abc": {}, "abd": {"enum": ["x", "é", "ü"]}}})
    nodes, _, _ = flatten(rules, *called_rules(rules), counting=False)
    states = construct(nodes, MAX_STATES, MOST_POSITIONS)
    atoms = np.unpackbits(states.class_bits.view(np.uint8), axis=1).sum(axis=1)
    several = 0
    for begin, end in zip(states.edge_begin, states.edge_end, strict=True):
        targets = states.edge_target[begin:end].tolist()
        assert len(set(targets)) == len(targets)
        several += sum(atoms[states.edge_class[begin:end]] > 1)
    assert several > 3


def test_a_set_divides_the_groups_of_texts_that_begin_with_its_characters() -> None:
    letters = [chr(0x4E00 + 7 * index % 100) for index in range(100)]
    read = {*letters[::3], "x", "y"}
    words = [text(letter + end) for letter in letters for end in "ab"]
    language = Language(alt(*words[:90], seq(chars_of(read), text("c")), *words[90:]))
    for letter in [*letters, "x", "y"]:
        expected = ("ab" if letter in letters else "") + ("c" if letter in read else "")
        assert "".join(end for end in "abcd" if language.accepts((letter + end).encode())) == expected


def test_a_property_has_all_conditions_that_name_it_match_it_or_are_about_all_others() -> None:
    starts_with_a: Formula = Types(STRING)

    def test(formula: Formula, name: object) -> bool:
        assert formula == starts_with_a
        return str(name).startswith("a")

    kinds = [Types(frozenset([kind])) for kind in ("null", "boolean", "integer", "string", "array")]
    null, boolean, integer, string, array = kinds
    disjunct = Disjunct(
        assertions=(
            Properties((("a", null),), (), TRUE),
            Properties((("b", boolean),), ((starts_with_a, integer),), string),
            Properties((("a", array), ("c", FALSE)), (), TRUE),
        )
    )
    expected = {
        "a": (null, integer, array),
        "b": (boolean,),
        "c": (string, FALSE),
        "ab": (integer,),
        "d": (string,),
    }
    for name, formulas in expected.items():
        assert disjunct.property_formula(name, test) == conjunction(*formulas), name
