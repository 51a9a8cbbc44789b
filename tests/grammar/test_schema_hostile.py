"""Schemas built to explode: each is refused with a reason, or its grammar is small."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import size
from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.schema.values.schema_grammar import MAX_RULES, Options
from tests.grammar.languages import schema_rules
from tests.grammar.vocabularies import accepts, compiled

pytestmark = pytest.mark.slow

MOST = 1_500_000
"""Characters of a grammar with its repetitions written out."""


def links(count: int, link: Any) -> dict[str, Any]:
    """A chain of definitions, each made by `link` from a reference to the next."""
    chain = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def either(next_: Any) -> Any:
    return {"anyOf": [{"type": "object", "properties": {name: next_}} for name in "ab"]}


GRAPH = {
    f"n{i}": {
        "anyOf": [
            {"type": "array", "items": {"$ref": f"#/$defs/n{(i * 7 + 3) % 50}"}},
            {"type": "object", "properties": {"x": {"not": {"$ref": f"#/$defs/n{(i * 5 + 1) % 50}"}}}},
        ]
    }
    for i in range(50)
}
HOSTILE: dict[str, Any] = {
    "many items at least": {"type": "array", "minItems": 10**9},
    "many items at most": {"type": "array", "maxItems": 10**9},
    "long at least": {"type": "string", "minLength": 10**9},
    "long at most": {"type": "string", "maxLength": 10**9},
    "many properties": {"type": "object", "minProperties": 10**9},
    "many properties at most": {"type": "object", "maxProperties": 10**9},
    "many contained": {"type": "array", "contains": {"type": "null"}, "minContains": 10**9},
    "contained between": {"contains": {"type": "null"}, "minContains": 900, "maxContains": 1000},
    "large enum": {"enum": [f"value {i * 7919 % 50000}" for i in range(50_000)]},
    "not a large enum": {"type": "string", "not": {"enum": [f"v{i}" for i in range(3000)]}},
    "options to the power of 20": {
        "allOf": [{"anyOf": [{"minimum": i}, {"maxLength": i}]} for i in range(20)]
    },
    "multiples to the power of 10": {
        "allOf": [{"anyOf": [{"minimum": i}, {"multipleOf": i + 2}]} for i in range(10)]
    },
    "exclusive options": {
        "allOf": [{"oneOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]
    },
    "overlapping options": {
        "oneOf": [{"properties": {f"p{i}{j}": {"type": "string"} for j in range(8)}} for i in range(8)]
    },
    "nothing of many": {
        "not": {"anyOf": [{"required": [f"a{i}"], "properties": {f"a{i}": {"const": 1}}} for i in range(30)]}
    },
    "long chain": links(3000, lambda next_: {"type": "array", "items": next_}),
    "doubling chain": links(100, either),
    "graph with not": {"$defs": GRAPH, "$ref": "#/$defs/n0"},
    "cycle": {
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}},
        "$ref": "#/$defs/a",
    },
    "many patterns": {
        "patternProperties": {
            f"{a}.*{b}": {"maxLength": i} for i, (a, b) in enumerate((a, b) for a in "abcde" for b in "vwxyz")
        }
    },
    "nested repetition": {"type": "string", "pattern": "^((a|b){0,200}c){0,50}$", "maxLength": 5000},
    "exponential pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$", "maxLength": 500},
    "huge multiple": {"type": "integer", "multipleOf": 10**30 + 7},
    "tiny step": {"type": "number", "multipleOf": 1e-300},
    "huge numbers": {"type": "number", "minimum": -(10**300), "maximum": 10**300},
    "wide": {"type": "object", "properties": {f"field_number_{i}": {"type": "string"} for i in range(1000)}},
    "unevaluated options": {
        "anyOf": [{"properties": {f"p{i}": {}}} for i in range(12)],
        "unevaluatedProperties": False,
    },
    "many unique": {"type": "array", "items": {"enum": list(range(200))}, "uniqueItems": True},
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "options",
    [Options(counted=False), Options(any_order=True, whitespace=5, counted=False)],
    ids=["plain", "any order"],
)
def test_hostile(name: str, options: Options) -> None:
    try:
        rules = schema_rules(parse_json(json.dumps(HOSTILE[name])), options)
    except InvalidConstraint as error:
        assert error.pointer is not None or "nested too deeply" in str(error)  # noqa: PT017
        return
    assert len(rules) < MAX_RULES + 10_000
    assert sum(map(size, rules.values())) < MOST


def test_deep_schemas_are_refused_or_served() -> None:
    schema: Any = {"type": "null"}
    for _ in range(190):
        schema = {"type": "object", "properties": {"a": schema}}
    assert len(schema_rules(schema)) < 1000


def test_a_thousand_optional_properties_take_a_few_states_each() -> None:
    """Each option may be followed by any later one: written out, that is half a million positions."""
    draw = random.Random(1)
    names = ["".join(draw.choices(string.ascii_lowercase, k=8)) for _ in range(1000)]
    schema = {"properties": {name: {"type": "null"} for name in names}, "additionalProperties": False}
    grammar = compiled(constraint.json_schema(schema | {"type": "object"}))
    assert grammar.automaton.states < 30_000
    assert len(grammar.automaton.arrays.low) < 100_000
    some = sorted(draw.sample(range(1000), 5))
    assert accepts(grammar, json.dumps({names[i]: None for i in some}))
    assert not accepts(grammar, json.dumps({names[i]: None for i in reversed(some)}))
    assert not accepts(grammar, json.dumps({names[some[0]]: None, "other": None}))
