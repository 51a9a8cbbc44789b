"""The keywords of JSON Schema on our engine.

The jsonschema package agrees with the table, except where a case is about the order of properties.
"""

from __future__ import annotations

import json

import jsonschema
import pytest
from jsonschema.validators import validator_for

from ramify import constraint
from ramify.grammar.schema.instance import validate
from tests.grammar import keyword_cases
from tests.grammar.keyword_cases import FORMATS
from tests.grammar.logic_cases import LOGIC_CASES
from tests.grammar.vocabularies import accepts, compiled, json_text

CASES = keyword_cases.CASES | LOGIC_CASES


@pytest.mark.parametrize("name", CASES)
def test_keyword(name: str) -> None:
    schema, valid, invalid = CASES[name]
    grammar = compiled(constraint.json_schema(schema))
    for instance in valid:
        assert accepts(grammar, json_text(instance)), instance
    for instance in invalid:
        assert not accepts(grammar, json_text(instance)), instance


@pytest.mark.parametrize("name", CASES)
def test_the_table_agrees_with_jsonschema(name: str) -> None:
    schema, valid, invalid = CASES[name]
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = jsonschema.FormatChecker(["ipv4"])
    for instance in valid:
        assert validator(schema, format_checker=checker).is_valid(instance), instance
        assert validate(schema, instance) == []
    for instance in invalid if name not in WRITTEN_OTHERWISE else []:
        assert not validator(schema, format_checker=checker).is_valid(instance), instance
        assert validate(schema, instance) != []


WRITTEN_OTHERWISE = {
    "additionalProperties beside": "a named property comes before others",
    "additionalProperties true": "a named property comes before others",
}


@pytest.mark.parametrize("name", FORMATS)
def test_format(name: str) -> None:
    valid, invalid = FORMATS[name]
    grammar = compiled(constraint.json_schema({"type": "string", "format": name}))
    for string in valid:
        assert accepts(grammar, json.dumps(string, ensure_ascii=False)), string
    for string in invalid:
        assert not accepts(grammar, json.dumps(string, ensure_ascii=False)), string


@pytest.mark.parametrize("name", ["password", "double", "float", "binary", "int-or-string", "color"])
def test_a_format_that_restricts_nothing_passes(name: str) -> None:
    grammar = compiled(constraint.json_schema({"type": "string", "format": name}))
    assert accepts(grammar, '"any thing"')


@pytest.mark.parametrize(("bits", "low", "high"), [("int8", -128, 127), ("uint16", 0, 65535)])
def test_formats_of_numbers(bits: str, low: int, high: int) -> None:
    grammar = compiled(constraint.json_schema({"type": "integer", "format": bits}))
    assert accepts(grammar, str(low))
    assert accepts(grammar, str(high))
    assert not accepts(grammar, str(low - 1))
    assert not accepts(grammar, str(high + 1))


def test_nullable_is_for_schemas_that_name_no_dialect() -> None:
    schema = {"type": "string", "nullable": True}
    assert accepts(compiled(constraint.json_schema(schema)), "null")
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    assert not accepts(compiled(constraint.json_schema(dialect | schema)), "null")


def test_failures_say_where() -> None:
    schema = {"properties": {"a/b": {"type": "array", "items": {"minimum": 3}}}, "required": ["c"]}
    found = validate(schema, {"a/b": [4, 1]})
    assert [(failure.instance, failure.schema) for failure in found] == [
        ("/a~1b/1", "/properties/a~1b/items/minimum"),
        ("", "/required"),
    ]
    assert "1 is not at least 3" in str(found[0])
