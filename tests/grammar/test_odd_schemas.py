"""Odd schemas of real files: empty enums, keywords of later drafts, halves of characters, long numbers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.schema.compiler import compile_schema
from ramify.grammar.schema.instance import validate
from ramify.text import not_unicode
from tests.grammar.vocabularies import accepts, compiled, tiny


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "object", "properties": {"a": {"enum": []}, "b": {}}}, ['{"b": 1}', "{}"], ['{"a": 1}']),
        ({"anyOf": [{"enum": []}, {"type": "null"}]}, ["null"], ["1"]),
        ({"type": "array", "items": {"enum": []}}, ["[]"], ["[1]"]),
        ({"not": {"enum": []}}, ["1", "{}"], []),
    ],
)
def test_an_empty_enum_has_no_value(schema: Any, valid: list[str], invalid: list[str]) -> None:
    grammar = compiled(constraint.json_schema(schema))
    for text in (*valid, *invalid):
        assert accepts(grammar, text) == (text in valid), text
        assert (validate(schema, json.loads(text)) == []) == (text in valid), text


@pytest.mark.parametrize("schema", [{"enum": []}, {"required": ["a"], "properties": {"a": {"enum": []}}}])
def test_a_value_that_must_be_of_an_empty_enum_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidConstraint, match="No JSON value satisfies the schema"):
        compiled(constraint.json_schema(schema | ({"type": "object"} if "required" in schema else {})))


NEWER: list[tuple[int, dict[str, Any], str, str]] = [
    (4, {"const": 1}, "2", "/const"),
    (4, {"contains": {"const": 1}}, "[2]", "/contains"),
    (6, {"if": {"type": "integer"}, "then": {"minimum": 5}}, "2", "/if"),
    (7, {"prefixItems": [{"type": "null"}]}, "[2]", "/prefixItems"),
    (7, {"dependentRequired": {"a": ["b"]}}, '{"a": 1}', "/dependentRequired"),
    (7, {"unevaluatedProperties": False}, '{"a": 1}', "/unevaluatedProperties"),
    (7, {"prefixItems": "not read"}, "[2]", "/prefixItems"),
]


@pytest.mark.parametrize(("draft", "schema", "text", "pointer"), NEWER)
def test_a_keyword_newer_than_the_draft_says_nothing_and_is_told(
    draft: int, schema: dict[str, Any], text: str, pointer: str
) -> None:
    whole = {"$schema": f"http://json-schema.org/draft-0{draft}/schema#", **schema}
    assert accepts(compiled(constraint.json_schema(whole)), text)
    assert validate(whole, json.loads(text)) == []
    by_draft: Any = {number: getattr(jsonschema, f"Draft{number}Validator") for number in (4, 6, 7)}
    assert by_draft[draft](whole).is_valid(json.loads(text))
    told = compile_schema(whole).unenforced
    assert pointer in [left.schema for left in told]
    if schema != {"prefixItems": "not read"}:
        assert not accepts(compiled(constraint.json_schema(schema)), text), "without $schema it counts"


def test_definitions_have_their_name_in_every_draft() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/$defs/a"}
    grammar = compiled(constraint.json_schema({**schema, "$defs": {"a": {"type": "null"}}}))
    assert accepts(grammar, "null")
    assert not accepts(grammar, "1")


HALVES = [
    (r'{"const": "a\ud800"}', "/const"),
    (r'{"enum": ["a", {"b": ["\udfff"]}]}', "/enum"),
    (r'{"type": "object", "properties": {"\ud800": {}}}', "/properties"),
    (r'{"type": "object", "required": ["\ud800"]}', "/required"),
    (r'{"type": "object", "patternProperties": {"\ud800": {}}}', "/patternProperties"),
    (r'{"type": "object", "dependentRequired": {"a": ["\ud800"]}}', "/dependentRequired"),
    (r'{"type": "string", "pattern": "[\ud800-\udfff]"}', "/pattern"),
    (r'{"$defs": {"\ud800": {"type": 5}}}', "/$defs"),
]


@pytest.mark.parametrize(("source", "pointer"), HALVES)
def test_half_of_a_surrogate_pair_is_refused_at_its_keyword(source: str, pointer: str) -> None:
    with pytest.raises(InvalidConstraint, match="half of a surrogate pair") as error:
        compile_constraint(constraint.json_schema(source), tiny())
    assert error.value.pointer == pointer
    str(error.value).encode()


@pytest.mark.parametrize("keyword", ["description", "default", "title", "x-mine"])
def test_an_annotation_may_have_one(keyword: str) -> None:
    assert accepts(compiled(constraint.json_schema(rf'{{"type": "null", "{keyword}": "\ud800"}}')), "null")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"prompt": ("fine", "a\ud800")}, "prompt[1]"),
        ({"sampling": {"stop": ["\udfff"]}}, "sampling.stop[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"metadata": {"\ud800": 1}}, "metadata"),
    ],
)
def test_the_field_of_a_text_that_is_none_is_named(message: Any, field: str) -> None:
    error = not_unicode(message)
    assert error.field == field
    assert error.remedy
    str(error).encode()


DIGITS = "1" * 5000


@pytest.mark.parametrize(
    ("source", "pointer"),
    [
        (f'{{"type": "integer", "minimum": {DIGITS}}}', "/minimum"),
        (f'{{"anyOf": [{{"const": 1}}, {{"enum": [2, -{DIGITS}]}}]}}', "/anyOf/1/enum/1"),
        (f'{{"properties": {{"a/b": {{"default": {DIGITS}}}}}}}', "/properties/a~1b/default"),
        ('{"type": "number", "maximum": 1e999}', "/maximum"),
        ('{"type": "string", "minLength": 1e30}', "/minLength"),
    ],
)
def test_a_number_that_is_too_long_is_refused_at_its_keyword(source: str, pointer: str) -> None:
    with pytest.raises(InvalidConstraint, match=r"digits|is not enforced") as error:
        compile_constraint(constraint.json_schema(source), tiny())
    assert error.value.pointer == pointer


@pytest.mark.parametrize("source", ["-0", "-0.0", "[-0]", '{"a": -0.0}'])
def test_a_constant_of_minus_zero_is_zero(source: str) -> None:
    grammar = compiled(constraint.json_schema(f'{{"const": {source}}}'))
    assert accepts(grammar, source.replace("-0.0", "0").replace("-0", "0"))
    assert not accepts(grammar, source)
