"""Conditions that some property must meet: random schemas about objects, on all small objects.

The jsonschema package judges each object, and a recogniser that has nothing in common with the engines reads
its text. A schema that is refused counts as a failure here.
"""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any

import jsonschema
import pytest

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.compiler import schema_rules
from ramify.grammar.schema.values.json_text import parse_json
from tests.grammar.recogniser import Recogniser
from tests.grammar.schema_order import writer

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
            found["properties"] = {name: self._value() for name in random.sample(["a", "b"], random.choice([1, 2]))}
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


def check(schema: dict[str, Any]) -> bool:
    """Whether the grammar has any object; it accepts exactly the valid ones."""
    valid = jsonschema.Draft202012Validator(schema).is_valid
    allowed = [valid(value) for value in OBJECTS]
    try:
        grammar = Recogniser(schema_rules(parse_json(json.dumps(schema))))
    except InvalidConstraint as error:
        assert "No JSON value" in str(error), schema
        assert not any(allowed), schema
        return False
    written = writer(schema)
    accepted = [grammar.accepts(written(value)) for value in OBJECTS]
    assert accepted == allowed, (schema, [v for v, a, b in zip(OBJECTS, accepted, allowed) if a != b][:4])
    return any(allowed)


@pytest.mark.parametrize("seed", range(4))
def test_the_grammar_has_exactly_the_valid_objects(seed: int) -> None:
    conditions = Conditions(Random(seed))
    assert sum(check(conditions.schema()) for _ in range(40)) > 25
