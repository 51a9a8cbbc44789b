"""White space, order and strictness of JSON: what the options of a constraint change."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.schema.compiler import compile_schema
from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.schema.instance import validate
from ramify.grammar.schema.values.schema_grammar import Options
from tests.grammar.recogniser import Recogniser
from tests.grammar.vocabularies import accepts, compiled

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", {"k": [1, 2]}]}},
    },
    "required": ["name"],
}
VALUE = {"name": "Ada", "age": 36, "tags": ["a", {"k": [1, 2]}], "more": [{}, []]}


def test_compact() -> None:
    grammar = compiled(constraint.json_schema(PERSON, whitespace="compact"))
    assert accepts(grammar, json.dumps(VALUE, separators=(",", ":")))
    assert not accepts(grammar, json.dumps(VALUE))
    assert accepts(compiled(constraint.json_object(whitespace="compact")), '{"a":[1,{}]}')


@pytest.mark.parametrize("most", [1, 3])
def test_bounded(most: int) -> None:
    grammar = compiled(constraint.json_schema(PERSON, whitespace=most))
    assert accepts(grammar, json.dumps(VALUE, separators=(",", ":")))
    assert accepts(grammar, json.dumps(VALUE))
    for gap in (" " * most, "\n" * most, "\t" * most):
        spaced = json.dumps(VALUE, separators=(f"{gap},{gap}", f"{gap}:{gap}"))
        for opening in "[{":
            spaced = spaced.replace(opening, opening + gap)
        for closing in "]}":
            spaced = spaced.replace(closing, gap + closing)
        spaced = spaced.replace(gap + gap, gap)  # between empty brackets there is one gap
        assert accepts(grammar, spaced), spaced
        assert accepts(grammar, gap + spaced + gap)
        assert not accepts(grammar, spaced.replace(gap + ",", gap + " ,", 1))


def test_indented() -> None:
    assert accepts(compiled(constraint.json_schema(PERSON, whitespace=9)), json.dumps(VALUE, indent=2))


def test_white_space_inside_strings_is_not_white_space() -> None:
    grammar = compiled(constraint.json_schema({"const": "a b"}, whitespace=2))
    assert accepts(grammar, ' "a b" ')
    assert not accepts(grammar, '"a  b"')


CLOSED = {**PERSON, "additionalProperties": False}


@pytest.mark.parametrize("schema", [PERSON, CLOSED], ids=["open", "closed"])
def test_any_order(schema: dict[str, Any]) -> None:
    grammar = compiled(constraint.json_schema(schema, any_order=True))
    members = ['"name": "x"', '"age": 3', '"tags": []']
    for count in range(4):
        for chosen in itertools.permutations(members, count):
            assert accepts(grammar, "{" + ", ".join(chosen) + "}") == (members[0] in chosen)
    assert not accepts(grammar, '{"name": "x", "age": 3, "name": "y"}')
    assert accepts(grammar, '{"z": 1, "name": "x", "y": [], "age": 3, "w": 0}') == (schema is PERSON)


def test_any_order_with_counts() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
        "minProperties": 2,
        "maxProperties": 2,
    }
    grammar = compiled(constraint.json_schema(schema, any_order=True))
    assert accepts(grammar, '{"c": 3, "a": 1}')
    assert accepts(grammar, '{"x": 0, "a": 1}')
    assert not accepts(grammar, '{"c": 3}')
    assert not accepts(grammar, '{"c": 3, "b": 2, "a": 1}')


def test_any_order_of_many_properties_with_a_condition_on_unnamed_ones_is_refused() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(16)}}
    schema["not"] = {"additionalProperties": {"type": "integer"}}
    with pytest.raises(InvalidConstraint, match="any_order takes more than 4096 orders for 16"):
        compiled(constraint.json_schema(schema, any_order=True))


NOT_ENFORCED = {
    "type": "object",
    "properties": {
        "size": {"type": "number", "multipleOf": 0.123456789, "minimum": 0},
        "word": {"type": "string", "pattern": "(?<=a)b", "maxLength": 3},
        "kind": {"allOf": [{"anyOf": [{"minimum": i}, {"maxLength": i}]} for i in range(12)]},
    },
    "required": ["size"],
}


@pytest.mark.parametrize("strict", [False, "validate"])
def test_what_is_not_enforced_is_left_out_and_named(strict: Any) -> None:
    schema = parse_json(json.dumps(NOT_ENFORCED))
    found = compile_schema(schema, Options(strict=strict))
    assert [left.schema for left in found.unenforced] == [
        "/properties/size/multipleOf",
        "/properties/word/pattern",
        *(f"/properties/kind/allOf/{i}" for i in range(8, 12)),
    ]
    assert "remainders" in found.unenforced[0].message
    grammar = compiled(constraint.json_schema(NOT_ENFORCED, strict=strict))
    assert grammar.enforcement.unenforced == found.unenforced
    assert accepts(grammar, '{"size": 0.5, "word": "ab"}')
    assert not accepts(grammar, '{"size": -1}')
    assert not accepts(grammar, '{"size": 1, "word": "long"}')


def test_what_no_value_satisfies_is_refused_in_any_case() -> None:
    with pytest.raises(InvalidConstraint, match="No JSON value"):
        compiled(constraint.json_schema({"type": "integer", "minimum": 2, "maximum": 1}, strict="validate"))


def test_constraints_that_differ_in_an_option_compile_apart() -> None:
    plain = constraint.json_schema(PERSON)
    others = [constraint.json_schema(PERSON, whitespace=2), constraint.json_schema(PERSON, any_order=True)]
    others += [
        constraint.json_schema(PERSON, strict="validate"),
        constraint.json_schema(PERSON, whitespace=0),
    ]
    assert len({made.key for made in [plain, *others]}) == 5
    assert constraint.json_schema(PERSON, whitespace="natural", strict=True).key == plain.key


def test_patterns_that_no_automaton_reads_are_validated() -> None:
    assert validate({"pattern": "(a)\\1(?<=a)"}, "xaa") == []
    assert validate({"pattern": "(a)\\1"}, "aba") != []
    with pytest.raises(InvalidConstraint, match="takes longer than"):
        validate({"pattern": "^(a|aa|ab|b)*(?<=c)$"}, "ab" * 60)


def test_a_name_is_not_written_twice_where_members_are_counted() -> None:
    grammar = compiled(constraint.json_schema({"type": "object", "minProperties": 2}))
    assert accepts(grammar, '{"a": 1, "b": {"a": 1, "a": 2}}')
    assert not accepts(grammar, '{"a": 1, "a": 2}')
    assert not accepts(grammar, '{"a": 1, "\\u0061": 2}')


def test_unique_items_with_white_space() -> None:
    schema = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "uniqueItems": True}
    grammar = compiled(constraint.json_schema(schema, whitespace=2))
    assert accepts(grammar, "[ [1, 2],  [2, 1] ]")
    assert not accepts(grammar, "[[1, 2], [1, 2]]")
    assert not accepts(grammar, "[[1, 2], [1,  2]]")


WORD = {"patternProperties": {r"\bx": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "left_out", "value"),
    [
        ({**WORD, "unevaluatedProperties": False}, "/patternProperties", {"x": None}),
        ({"allOf": [WORD], "unevaluatedProperties": False}, "/allOf/0/patternProperties", {"x": None}),
        (
            {"$ref": "#/$defs/w", "$defs": {"w": WORD}, "unevaluatedProperties": False},
            "/$defs/w/patternProperties",
            {"x": None},
        ),
        (
            {"anyOf": [{"properties": {f"x{i}": {}}} for i in range(7)], "unevaluatedProperties": False},
            "/anyOf",
            {"x0": 1},
        ),
        (
            {"anyOf": [{"prefixItems": [{}] * i} for i in range(7)], "unevaluatedItems": False},
            "/anyOf",
            [1],
        ),
    ],
)
def test_what_a_left_out_keyword_evaluates_is_not_excluded(schema: Any, left_out: str, value: Any) -> None:
    found = compile_schema(schema, Options(strict="validate"))
    assert [each.schema for each in found.unenforced] == [left_out]
    assert validate(schema, value) == []
    assert Recogniser(found.rules).accepts(json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "array", "not": {"uniqueItems": True}}, [[1, 1], [[], []]]),
        ({"oneOf": [{"type": "array", "uniqueItems": True}, {"type": "array"}]}, [["a", "a"]]),
        ({"if": {"pattern": r"\bx"}, "then": {"maxLength": 3}}, ["abcdef", "x", 1]),
        ({"type": "object", "not": {"properties": {"a": {"pattern": r"\bx"}}}}, [{"a": "y"}]),
        ({"not": {"$ref": "#/$defs/u"}, "$defs": {"u": {"pattern": r"\bx"}}}, ["y"]),
        ({"patternProperties": {r"\bx": {"type": "null"}}, "additionalProperties": False}, [{"x": None}]),
    ],
)
def test_what_is_left_out_below_a_negation_excludes_nothing(schema: Any, values: list[Any]) -> None:
    found = compile_schema(parse_json(json.dumps(schema)), Options(strict="validate"))
    assert found.unenforced
    grammar = Recogniser(found.rules)
    for value in values:
        assert validate(schema, value) == []
        assert grammar.accepts(json.dumps(value))
