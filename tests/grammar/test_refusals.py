"""Refused schemas: the error has the JSON pointer of the keyword and a reason."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ramify.grammar
from ramify import constraint
from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.compile.policy import compile_constraint
from tests.grammar.vocabularies import compiled, tiny

OBJECT = {"type": "object"}
BAD_SCHEMAS: list[tuple[Any, str, str]] = [
    # schema, pointer, part of the message
    (3, "", "object or a boolean"),
    (["a"], "", "object or a boolean"),
    ({"type": "objekt"}, "/type", "'objekt' is not a type"),
    ({"type": []}, "/type", "empty"),
    ({"type": {"a": 1}}, "/type", "not a type"),
    ({"properties": []}, "/properties", "is an object"),
    ({"properties": {"a/b~": {"type": 1}}}, "/properties/a~1b~0/type", "not a type"),
    ({"properties": {"a": 5}}, "/properties/a", "object or a boolean"),
    ({"required": "a"}, "/required", "is an array"),
    ({"required": ["a", 1]}, "/required/1", "strings"),
    ({"enum": []}, "", "leave no value"),
    ({"enum": "a"}, "/enum", "is an array"),
    ({"items": 3}, "/items", "object or a boolean"),
    ({"anyOf": {}}, "/anyOf", "is an array"),
    ({"anyOf": []}, "/anyOf", "empty"),
    ({"anyOf": [True, 1]}, "/anyOf/1", "object or a boolean"),
    ({"minLength": -1}, "/minLength", "0 or more"),
    ({"minLength": 1.5}, "/minLength", "0 or more"),
    ({"maxItems": "3"}, "/maxItems", "number"),
    ({"minimum": True}, "/minimum", "number"),
    (
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "exclusiveMinimum": True},
        "/exclusiveMinimum",
        "number",
    ),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "/$schema", "Draft-03"),
    ({"multipleOf": 0}, "/multipleOf", "above 0"),
    ({"pattern": 1}, "/pattern", "string"),
    ({"type": "string", "pattern": "("}, "/pattern", "parenthesis"),
    ({"type": "string", "pattern": "(?=a)b"}, "/pattern", "lookahead"),
    ({"type": "string", "format": "datetime"}, "/format", "date-time"),
    ({"$ref": 1}, "/$ref", "string"),
    ({"$ref": "#/nope"}, "/$ref", "leads nowhere"),
    ({"$ref": "#nope"}, "/$ref", "leads nowhere"),
    ({"$ref": "#/definitions/foo", "$defs": {"foo": {}, "bar": {}}}, "/$ref", "Did you mean #/$defs/foo?"),
    ({"$ref": "#/$defs/usr", "$defs": {"user": {}, "x": {}}}, "/$ref", "Did you mean #/$defs/user?"),
    ({"items": {"$ref": "https://example.com/x"}}, "/items/$ref", "out of the schema"),
    ({"$ref": "#"}, "/$ref", "back to itself"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        "/$defs/b/$ref",
        "back to itself",
    ),
    ({"$ref": "#/properties", "properties": {"type": 5}}, "/properties/type", "object or a boolean"),
    # not enforced
    ({"type": "array", "uniqueItems": True, "contains": {"type": "null"}}, "/uniqueItems", "with contains"),
    (
        {"type": "array", "uniqueItems": True, "items": {**OBJECT, "additionalProperties": {"type": "null"}}},
        "/uniqueItems",
        "properties that are not named",
    ),
    (
        {"type": "array", "uniqueItems": True, "items": OBJECT},
        "/uniqueItems",
        "properties that are not named",
    ),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems", "equal objects have different texts"),
    (
        {"type": "array", "minItems": 2, "uniqueItems": True, "items": {**OBJECT, "required": ["a"]}},
        "/uniqueItems",
        "name all properties",
    ),
    (
        {
            "type": "array",
            "uniqueItems": True,
            "items": {"items": {"type": "string"}, "minItems": 2, "type": "array", "uniqueItems": True},
        },
        "/items/uniqueItems",
        "within arrays",
    ),
    (
        {"type": "array", "uniqueItems": True, "prefixItems": [{"type": "string"}]},
        "/uniqueItems",
        "first items",
    ),
    ({"type": "array", "not": {"uniqueItems": True}}, "/not/uniqueItems", "more than 9 values"),
    ({"type": "number", "multipleOf": 0.123456789}, "/multipleOf", "remainders"),
    ({"type": "string", "pattern": "a(?=b)"}, "/pattern", "lookahead"),
    ({"type": "array", "minItems": 10**9}, "/minItems", "above 1000000"),
    ({"type": "string", "minLength": 10**9}, "/minLength", "above 1000000"),
    (
        {"allOf": [{"anyOf": [{"minimum": i}, {"multipleOf": i + 2}]} for i in range(12)]},
        "/allOf/8",
        "multiply",
    ),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "a", "not": {"$dynamicRef": "#x"}}}},
        "/$defs/a/not/$dynamicRef",
        "leads nowhere",
    ),
    ({"type": "string", "pattern": "^(a|b)*a(a|b){12}$", "maxLength": 100}, "/pattern", "states together"),
    # nothing satisfies them
    (False, "", "No JSON value"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "", "between the bounds"),
    ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "", "between the bounds"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "", "exceeds"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "", "leave no value"),
    ({"enum": [1, 2], "type": "string"}, "", "leave no value: no value of enum has the type string"),
    ({"const": "a", "type": ["number", "null"]}, "", "no value of const has the type number or null"),
    ({"enum": [1.5, 2], "type": "number", "not": {"type": "number"}}, "", "leave no value."),
    (
        {**OBJECT, "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
        "",
        "'b' is required",
    ),
    ({**OBJECT, "properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "", "never ends"),
]


@pytest.mark.parametrize(("schema", "pointer", "reason"), BAD_SCHEMAS, ids=lambda part: json.dumps(part)[:60])
def test_schema(schema: Any, pointer: str, reason: str) -> None:
    with pytest.raises(InvalidConstraint) as refused:
        compile_constraint(Constraint(kind="json_schema", source=json.dumps(schema)), tiny(), "ramify")
    assert refused.value.pointer == pointer
    assert reason in str(refused.value)


GRAMMAR = Path(ramify.grammar.__file__).parent
SAY_WHAT_BELONGS_THERE = {"check.py": "_refuse", "structural_tag.py": "_refuse"}
"""Functions for constraints of the wrong form, whose message says which form is right."""


def refusals() -> Iterator[tuple[str, ast.expr | None]]:
    """All places that refuse a schema or another constraint, each with its remedy."""
    for path in (*GRAMMAR.glob("schema/**/*.py"), *GRAMMAR.glob("compile/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        helpers = [
            range(node.lineno, (node.end_lineno or 0) + 1)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and (node.name == SAY_WHAT_BELONGS_THERE.get(path.name) or path.name == "unenforceable.py")
        ]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or any(node.lineno in lines for lines in helpers):
                continue
            name = getattr(node.func, "id", "")
            if name == "refuse":
                yield f"{path.name}:{node.lineno}", node.args[2]
            elif name in ("InvalidConstraint", "Unenforceable", "NotCanonical"):
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                remedy = node.args[1] if name == "NotCanonical" else keywords.get("remedy")
                yield f"{path.name}:{node.lineno}", remedy


def test_every_refusal_says_what_to_write_instead() -> None:
    found = list(refusals())
    assert len(found) > 40
    for where, remedy in found:
        assert remedy is not None, where
        if isinstance(remedy, ast.Constant):
            assert isinstance(remedy.value, str), where
            assert len(remedy.value.split()) > 2, where


@pytest.mark.parametrize("source", ["{", "nonsense", '{"a": NaN}', '{"minimum": Infinity}', "[" * 100_000])
def test_schema_that_is_not_json(source: str) -> None:
    with pytest.raises(InvalidConstraint, match="JSON"):
        compiled(Constraint(kind="json_schema", source=source))


def test_schema_nested_too_deep() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidConstraint, match="nested"):
        compiled(Constraint(kind="json_schema", source=json.dumps(schema)))


@pytest.mark.parametrize(
    ("constraint_", "reason"),
    [
        (Constraint(kind="choices", source="{}"), "array of strings"),
        (Constraint(kind="choices", source="[]"), "array of strings"),
        (Constraint(kind="choices", source='["a", 1]'), "array of strings"),
        (Constraint(kind="choices", source='["a", "\\ud800"]'), "Unicode"),
        (Constraint(kind="ebnf", source='start ::= "a"'), 'no rule "root"'),
        (Constraint(kind="ebnf", source="root ::= missing"), "'missing' is not defined"),
        (Constraint(kind="ebnf", source="root ::= root"), "No text"),
        (Constraint(kind="structural_tag", source="[]"), "JSON object"),
        (Constraint(kind="structural_tag", source='{"type": "structural_tag"}'), "format"),
    ],
)
def test_other_kinds(constraint_: Constraint, reason: str) -> None:
    with pytest.raises(InvalidConstraint, match=reason):
        compiled(constraint_)


def tag(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<x>", "content": content, "end": "</x>"},
    }


@pytest.mark.parametrize(
    ("source", "pointer"),
    [
        (tag({"type": "json_schema", "json_schema": {"type": "nil"}}), "/format/content/json_schema/type"),
        (tag({"type": "json_schema", "json_schema": {}, "any_order": True}), "/format/content/any_order"),
        (tag({"type": "regex", "pattern": r"(a)\1"}), "/format/content/pattern"),
        (tag({"type": "token", "token": 3}), "/format/content/type"),
        ({"structures": [{"begin": "<x>", "end": ""}], "triggers": ["<"]}, "/structures/0"),
    ],
)
def test_structural_tags(source: dict[str, Any], pointer: str) -> None:
    with pytest.raises(InvalidConstraint) as refused:
        compiled(constraint.structural_tag(source))
    assert refused.value.pointer == pointer


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("whitespace", -1),
        ("whitespace", 101),
        ("whitespace", True),
        ("whitespace", "some"),
        ("strict", "no"),
        ("any_order", 1),
    ],
)
def test_options(field: str, value: Any) -> None:
    with pytest.raises(InvalidConstraint) as refused:
        Constraint(kind="json_object", **{field: value}).check()
    assert refused.value.field == field


def test_options_are_for_json() -> None:
    with pytest.raises(InvalidConstraint, match="is for JSON"):
        Constraint(kind="regex", source="a", whitespace=3).check()
