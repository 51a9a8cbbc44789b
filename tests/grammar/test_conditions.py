"""Conditions that some property must meet: random schemas about objects, on all small objects.

The jsonschema package judges each object, and a recogniser that has nothing in common with the engines reads
its text. A schema that is refused counts as a failure here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import pytest

from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.schema.document.unenforceable import Unenforceable
from tests.grammar.languages import schema_rules
from tests.grammar.recogniser import Recogniser
from tests.grammar.schema_order import writer
from tests.grammar.test_schema_random import grammar_of

VALUES: list[Any] = [None, "s", 1, True]
OBJECTS: list[dict[str, Any]] = [
    dict(zip(names, values, strict=True))
    for size in range(4)
    for names in itertools.permutations(["a", "b", "x"], size)
    for values in itertools.product(VALUES, repeat=size)
    if size < 3 or names == ("a", "b", "x")
]
TYPES = ["null", "string", "number", "boolean"]


class Conditions:
    """Random schemas whose objects must have properties of some kinds."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def schema(self) -> dict[str, Any]:
        random = self._random
        found: dict[str, Any] = {"type": "object"}
        if random.random() < 0.4:
            found["properties"] = {
                name: self._value() for name in random.sample(["a", "b"], random.choice([1, 2]))
            }
        if random.random() < 0.2:
            found["additionalProperties"] = self._value()
        if random.random() < 0.2:
            found["required"] = [random.choice("ax")]
        if random.random() < 0.3:
            found["maxProperties"] = random.choice([1, 2])
        if random.random() < 0.3:
            found["minProperties"] = 1
        applied = random.choice(["not anyOf", "allOf not", "oneOf", "if", "nested"])
        some = [self._every() for _ in range(random.choice([2, 2, 3, 4]))]
        match applied:
            case "not anyOf":
                found["not"] = {"anyOf": some}
            case "allOf not":
                found["allOf"] = [{"not": each} for each in some]
            case "oneOf":
                found["oneOf"] = some
            case "if":
                found |= {"if": some[0], "then": {"not": some[1]}, "else": {"not": {"anyOf": some[2:]}}}
                if len(some) == 2:
                    del found["else"]
            case "nested":
                found["anyOf"] = [{"not": {"anyOf": some[:2]}}, *some[2:]]
        return found

    def dependent(self) -> dict[str, Any]:
        """Properties that depend on one another: most choices here are between single properties."""
        random = self._random
        found: dict[str, Any] = {} if random.random() < 0.3 else {"type": "object"}
        found["allOf"] = [self._dependence() for _ in range(random.choice([2, 3, 4]))]
        if random.random() < 0.7:
            found["properties"] = {
                name: self._value() for name in random.sample("abx", random.choice([2, 3]))
            }
        for keyword, values in {
            "maxProperties": [1, 2],
            "minProperties": [1, 2],
            "required": ["a", "x"],
        }.items():
            if random.random() < 0.2:
                value = random.choice(values)
                found[keyword] = [value] if keyword == "required" else value
        return found

    def _dependence(self) -> dict[str, Any]:
        random = self._random
        one, other = random.sample("abx", 2)
        match random.choice(["pair", "any", "if", "if", "dependent", "other"]):
            case "pair":
                return {"not": {"required": [one, other]}}
            case "any":
                return {"anyOf": [{"required": [one]}, {"properties": {other: self._value()}}]}
            case "dependent":
                return {"dependentRequired": {one: [other]}}
            case "other":
                return {"anyOf": [{"required": [one]}, {"not": self._every()}]}
        condition = {
            "properties": {one: self._value()},
            **({"required": [one]} if random.random() < 0.7 else {}),
        }
        then = random.choice([{"required": [other]}, {"properties": {other: self._value()}}])
        return {"if": condition, random.choice(["then", "else"]): then}

    def _value(self) -> Any:
        random = self._random
        kinds = random.sample(TYPES, random.choice([1, 1, 2, 3]))
        return random.choice([{"type": kinds}, {"type": kinds}, {"enum": random.sample(VALUES, 2)}, {}])

    def _every(self) -> dict[str, Any]:
        """A subschema about all properties of an object, whose negation asks for one of another kind."""
        random = self._random
        match random.choice(["additional", "additional", "closed", "patterns", "names", "both"]):
            case "additional":
                return {"additionalProperties": self._value()}
            case "closed":
                names = random.sample(["a", "b", "x"], 2)
                return {"properties": {name: self._value() for name in names}, "additionalProperties": False}
            case "patterns":
                return {"patternProperties": {random.choice(["^a", "^[bx]"]): self._value()}}
            case "names":
                return {"propertyNames": random.choice([{"enum": ["a", "x"]}, {"pattern": "^[ab]"}])}
        return {"patternProperties": {"^a": self._value()}, "additionalProperties": self._value()}


def check(schema: dict[str, Any], most_multiplied: int | None = None) -> bool:
    """Whether the grammar has any object; it accepts exactly the valid values."""
    valid = jsonschema.Draft202012Validator(schema).is_valid
    allowed = [valid(value) for value in (*OBJECTS, *VALUES)]
    grammar = grammar_of(schema, most_multiplied)
    if not isinstance(grammar, Recogniser):
        assert "No JSON value" in str(grammar), schema
        assert not any(allowed), schema
        return False
    written = writer(schema, most_multiplied=most_multiplied)
    assert [grammar.accepts(written(value)) for value in (*OBJECTS, *VALUES)] == allowed, schema
    return any(allowed[: len(OBJECTS)])


@pytest.mark.parametrize("seed", range(2))
def test_the_grammar_has_exactly_the_valid_objects(seed: int) -> None:
    conditions = Conditions(Random(seed))
    assert sum(check(conditions.schema()) for _ in range(15)) > 7


@pytest.mark.parametrize("most_multiplied", [1, 1000])
def test_clauses_and_disjuncts_are_the_same(most_multiplied: int) -> None:
    conditions = Conditions(Random(most_multiplied))
    assert sum(check(conditions.dependent(), most_multiplied) for _ in range(15)) > 7


def rules_of(schema: dict[str, Any]) -> int:
    return len(schema_rules(parse_json(json.dumps(schema))))


STRING = {"type": "string"}
BOOLEAN = {"type": "boolean"}


def test_fifty_conditionals_take_rules_for_each_alone() -> None:
    names = [f"f{i}" for i in range(50)]
    properties = {"kind": {"enum": names}, **dict.fromkeys(names, STRING)}
    conditionals = [
        {"if": {"properties": {"kind": {"const": name}}}, "then": {"required": [name]}} for name in names
    ]
    schema = {"type": "object", "properties": properties, "required": ["kind"], "allOf": conditionals}
    assert rules_of(schema) < 1500
    grammar = Recogniser(schema_rules(parse_json(json.dumps(schema))))
    assert grammar.accepts('{"kind": "f7", "f7": "x"}')
    assert grammar.accepts('{"kind": "f49", "f1": "x", "f49": "x", "more": 1}')
    assert not grammar.accepts('{"kind": "f7", "f8": "x"}')


def test_pairs_do_not_multiply() -> None:
    pairs = [[f"p{2 * i}", f"p{2 * i + 1}"] for i in range(12)]
    excluded = {"anyOf": [{"required": pair} for pair in pairs]}
    schema = {"type": "object", "properties": {n: {} for pair in pairs for n in pair}, "not": excluded}
    assert rules_of(schema) < 100
    grammar = Recogniser(schema_rules(parse_json(json.dumps(schema))))
    assert grammar.accepts('{"p0": 1, "p3": 1, "p23": 1}')
    assert not grammar.accepts('{"p0": 1, "p22": 1, "p23": 1}')


ABOUT_ONE_PROPERTY: dict[str, Callable[[int], dict[str, Any]]] = {
    "conditionals": lambda n: {
        "allOf": [
            {"if": {"properties": {f"x{i}": {"const": True}}, "required": [f"x{i}"]}, "then": _other_than(i)}
            for i in range(n)
        ]
    },
    "dependentSchemas": lambda n: {
        "dependentSchemas": {f"x{i}": {"properties": {"z": {"pattern": str(i)}}} for i in range(n)}
    },
    "anyOf in allOf": lambda n: {
        "allOf": [{"anyOf": [{"required": [f"x{i}"]}, _other_than(i)]} for i in range(n)]
    },
}
"""Schemas by a number of choices, of which one value of z may meet any set."""


def _other_than(i: int) -> dict[str, Any]:
    return {"properties": {"z": {"not": {"const": f"{i}"}}}}


@pytest.mark.parametrize("kind", ABOUT_ONE_PROPERTY)
def test_seven_choices_about_one_property_are_written_out(kind: str) -> None:
    """The clauses are refused, and their 128 disjuncts are not."""
    names = [f"x{i}" for i in range(7)]
    schema = {
        "type": "object",
        "properties": {**dict.fromkeys(names, BOOLEAN), "z": STRING},
        "additionalProperties": False,
        **ABOUT_ONE_PROPERTY[kind](7),
    }
    grammar = Recogniser(schema_rules(parse_json(json.dumps(schema))))
    valid = jsonschema.Draft202012Validator(schema).is_valid
    random = Random(7)
    judged = []
    for _ in range(60):
        value = {name: random.random() < 0.7 for name in names if random.random() < 0.6}
        value |= (
            {"z": "".join(random.sample("0123456", random.choice([0, 1, 6])))}
            if random.random() < 0.9
            else {}
        )
        judged.append(valid(value))
        assert grammar.accepts(json.dumps(value)) == judged[-1], value
    assert {*judged} == {True, False}


@pytest.mark.parametrize("kind", ABOUT_ONE_PROPERTY)
def test_ten_choices_about_one_property_are_refused_with_what_to_change(kind: str) -> None:
    schema = {"type": "object", **ABOUT_ONE_PROPERTY[kind](10)}
    with pytest.raises(Unenforceable, match=r"More than 64 sets of .* Use fewer anyOf") as caught:
        schema_rules(schema)
    assert caught.value.pointer == ("" if kind == "dependentSchemas" else "/allOf/6")


def test_what_cannot_be_kept_apart_is_refused_with_its_limit() -> None:
    """A number meets all conditions but its own, so there are 256 sets."""
    conditions = [{"not": {"additionalProperties": {"const": n}}} for n in range(8)]
    with pytest.raises(Unenforceable, match="More than 64 sets of conditions"):
        schema_rules({"type": "object", "properties": {"a": True}, "allOf": conditions})
