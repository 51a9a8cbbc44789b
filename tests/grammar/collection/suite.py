"""Small schemas for each keyword, alone and with others, like those of JSON Schema's test suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.grammar.collection.case import Case

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    -1,
    1.5,
    2.5,
    7,
    10,
    100,
    0.0075,
    "",
    "a",
    "ab",
    "abc",
    "foo",
    "é",
    "12",
)
VALUES += (
    [],
    [1],
    [1, 2],
    [1, 2, 3],
    ["a"],
    ["a", "b"],
    [1, "a"],
    [None],
    [[]],
    [{}],
    [2, 3, 4, 5],
    ["foo", 3, "foo"],
)
VALUES += (
    {},
    {"a": 1},
    {"b": 2},
    {"a": "x"},
    {"a": 1, "b": 2},
    {"foo": "bar"},
    {"foo": 1, "bar": 2},
    {"a": {"a": {}}},
    {"x": None},
)
VALUES += (
    {"bar": 2},
    {"bar": 2, "foo": "baz"},
    {"foo": 1},
    {"foo": "x", "vroom": 1},
    {"foobar": 5},
    {"a": 1, "b": 2, "c": 3},
)

INT, STR, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
FOO_BAR = {"properties": {"foo": STR}, "required": ["foo"]}
BAR_INT = {"properties": {"bar": INT}, "required": ["bar"]}

SCHEMAS: dict[str, list[Any]] = {
    "type": [{"type": t} for t in ("integer", "number", "string", "object", "array", "boolean", "null")]
    + [{"type": ["integer", "string"]}, {"type": ["array", "object", "null"]}, {"type": ["number", "null"]}],
    "enum": [
        {"enum": [1, 2, 3]},
        {"enum": [6, "foo", [], True, {"foo": 12}]},
        {"enum": [False]},
        {"enum": [0]},
        {"enum": ["a\nb", ""]},
    ],
    "const": [
        {"const": 2},
        {"const": {"foo": "bar"}},
        {"const": [{"foo": 1}]},
        {"const": None},
        {"const": False},
        {"const": ""},
    ],
    "multipleOf": [
        {"multipleOf": 2},
        {"multipleOf": 1.5},
        {"multipleOf": 0.0001},
        {"type": "integer", "multipleOf": 0.5},
        {"multipleOf": 0.25, "minimum": 1},
    ],
    "minimum": [
        {"minimum": 1.1},
        {"minimum": -2},
        {"exclusiveMinimum": 1.1},
        {"type": "number", "minimum": 1, "maximum": 2.75},
    ],
    "maximum": [
        {"maximum": 3.0},
        {"maximum": 300},
        {"exclusiveMaximum": 3.0},
        {"type": "integer", "exclusiveMaximum": 3},
    ],
    "minLength": [{"minLength": 2}, {"type": "string", "minLength": 1, "maxLength": 2}],
    "maxLength": [{"maxLength": 2}, {"type": "string", "maxLength": 0}],
    "pattern": [
        {"pattern": "^a*$"},
        {"pattern": "a+"},
        {"type": "string", "pattern": "\\d"},
        {"pattern": "^\\S+$", "maxLength": 2},
        {"pattern": "^(foo|bar)$"},
        {"pattern": "^(?!foo).*$", "type": "string"},
    ],
    "format": [
        {"format": f}
        for f in (
            "date",
            "date-time",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uri",
            "uuid",
            "json-pointer",
            "regex",
            "time",
        )
    ],
    "items": [
        {"items": INT},
        {"items": False},
        {"items": True},
        {"type": "array", "items": {"type": "array", "items": STR}},
    ],
    "prefixItems": [
        {"prefixItems": [INT, STR]},
        {"prefixItems": [{"const": 1}], "items": INT},
        {"prefixItems": [{}, {}], "items": False},
    ],
    "additionalItems": [
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [INT, STR],
            "additionalItems": additional,
        }
        for additional in (False, True, INT)
    ],
    "minItems": [{"minItems": 1}, {"minItems": 2, "maxItems": 2}, {"type": "array", "minItems": 3}],
    "maxItems": [{"maxItems": 2}, {"type": "array", "maxItems": 0}],
    "uniqueItems": [
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        {"type": "array", "items": STR, "uniqueItems": True},
        {"type": "array", "items": INT, "uniqueItems": True, "minItems": 2},
        {"uniqueItems": False},
        {"uniqueItems": True},
    ],
    "contains": [
        {"contains": {"minimum": 5}},
        {"contains": {"const": 1}},
        {"contains": True},
        {"contains": False},
        {"contains": {"const": 1}, "minContains": 2},
        {"contains": INT, "maxContains": 1},
        {"contains": INT, "minContains": 0},
        {"items": {"multipleOf": 2}, "contains": {"multipleOf": 3}},
        {"type": "array", "contains": STR, "minContains": 1, "maxContains": 2, "maxItems": 4},
    ],
    "properties": [
        {"properties": {"foo": INT, "bar": STR}},
        {"properties": {"foo": True, "bar": False}},
        {"properties": {'a"b': INT, "é/~": STR}},
        {"type": "object", "properties": {"a": INT}, "additionalProperties": False},
    ],
    "patternProperties": [
        {"patternProperties": {"f.*o": INT}},
        {"patternProperties": {"a*": INT, "aaa*": {"maximum": 20}}},
        {"patternProperties": {"^f": True, "b": False}},
        {"type": "object", "patternProperties": {"^[a-z]$": INT}, "additionalProperties": False},
    ],
    "additionalProperties": [
        {
            "properties": {"foo": {}, "bar": {}},
            "patternProperties": {"^v": {}},
            "additionalProperties": False,
        },
        {"properties": {"foo": {}}, "additionalProperties": {"type": "boolean"}},
        {"additionalProperties": INT},
        {"allOf": [{"properties": {"foo": {}}}], "additionalProperties": {"type": "boolean"}},
    ],
    "propertyNames": [
        {"propertyNames": {"maxLength": 3}},
        {"propertyNames": {"pattern": "^a+$"}},
        {"propertyNames": False},
        {"propertyNames": {"enum": ["foo", "bar"]}},
        {"propertyNames": {"const": "foo"}},
        {"type": "object", "propertyNames": {"anyOf": [{"pattern": "^a"}, {"const": "foo"}]}},
    ],
    "required": [
        {"required": ["foo"]},
        {"properties": {"foo": {}, "bar": {}}, "required": ["foo"]},
        {"required": []},
        {"required": ["toString", "a"]},
    ],
    "minProperties": [{"minProperties": 1}, {"type": "object", "minProperties": 2, "properties": {"a": INT}}],
    "maxProperties": [
        {"maxProperties": 2},
        {"maxProperties": 0},
        {"type": "object", "maxProperties": 1, "additionalProperties": INT},
    ],
    "dependentRequired": [
        {"dependentRequired": {"bar": ["foo"]}},
        {"dependentRequired": {"foo": []}},
        {"dependentRequired": {"a": ["b", "c"]}},
    ],
    "dependentSchemas": [
        {"dependentSchemas": {"bar": {"properties": {"foo": INT, "bar": INT}}}},
        {"dependentSchemas": {"foo": True, "bar": False}},
    ],
    "dependencies": [
        {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"bar": ["foo"]}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "dependencies": {"bar": {"properties": {"foo": INT}}},
        },
    ],
    "allOf": [
        {"allOf": [BAR_INT, FOO_BAR]},
        {"allOf": [{"maximum": 30}, {"minimum": 2}]},
        {"allOf": [True, True]},
        {"properties": {"bar": INT}, "required": ["bar"], "allOf": [FOO_BAR, {"properties": {"baz": NULL}}]},
    ],
    "anyOf": [
        {"anyOf": [INT, {"minimum": 2}]},
        {"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]},
        {"anyOf": [BAR_INT, FOO_BAR]},
        {"anyOf": [True, False]},
    ],
    "oneOf": [
        {"oneOf": [INT, {"minimum": 2}]},
        {"type": "string", "oneOf": [{"minLength": 2}, {"maxLength": 4}]},
        {"oneOf": [BAR_INT, FOO_BAR]},
        {"oneOf": [True, False]},
        {"type": "object", "oneOf": [{"required": ["foo", "bar"]}, {"required": ["foo", "baz"]}]},
        {
            "oneOf": [
                {"properties": {"bar": True, "baz": True}, "required": ["bar"]},
                {"properties": {"foo": True}, "required": ["foo"]},
            ]
        },
    ],
    "not": [
        {"not": INT},
        {"not": {"type": ["integer", "boolean"]}},
        {"not": {"type": "object", "properties": {"foo": STR}}},
        {"properties": {"foo": {"not": {}}}},
        {"not": {"not": INT}},
        {"not": {"enum": [1, "a", None]}},
        {"type": "string", "not": {"pattern": "^a"}},
        {"type": "array", "not": {"minItems": 2}},
        {"not": {"required": ["a"]}},
        {"type": "number", "not": {"multipleOf": 2}},
    ],
    "if": [
        {"if": {"exclusiveMaximum": 0}, "then": {"minimum": -10}, "else": {"multipleOf": 2}},
        {"if": {"const": 0}, "then": False},
        {"if": STR, "else": INT},
        {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
        {"then": {"const": 0}},
    ],
    "$ref": [
        {"properties": {"foo": {"$ref": "#"}}, "additionalProperties": False},
        {"$defs": {"c": {"$ref": "#/$defs/b"}, "b": INT}, "$ref": "#/$defs/c"},
        {"$defs": {"a~b/c%d": INT}, "properties": {"foo": {"$ref": "#/$defs/a~0b~1c%25d"}}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a": {"type": "array"}},
            "properties": {"foo": {"$ref": "#/definitions/a", "maxItems": 2}},
        },
        {"$ref": "#foo", "$defs": {"A": {"$anchor": "foo", "type": "integer"}}},
    ],
    "unevaluatedProperties": [
        {"properties": {"foo": STR}, "unevaluatedProperties": False},
        {"allOf": [FOO_BAR], "unevaluatedProperties": False},
        {
            "properties": {"foo": STR},
            "anyOf": [BAR_INT, {"properties": {"vroom": INT}, "required": ["vroom"]}],
            "unevaluatedProperties": False,
        },
        {"if": FOO_BAR, "then": {"properties": {"a": INT}}, "unevaluatedProperties": INT},
        {"patternProperties": {"^foo": {}}, "unevaluatedProperties": False},
        {
            "dependentSchemas": {"foo": {"properties": {"bar": {}}}},
            "properties": {"foo": {}},
            "unevaluatedProperties": False,
        },
    ],
    "unevaluatedItems": [
        {"prefixItems": [INT], "unevaluatedItems": False},
        {"unevaluatedItems": STR},
        {"contains": INT, "unevaluatedItems": STR},
        {
            "prefixItems": [INT],
            "anyOf": [{"prefixItems": [True, INT]}, {"prefixItems": [True, True, INT]}],
            "unevaluatedItems": False,
        },
    ],
    "boolean": [
        True,
        False,
        {},
        {"title": "anything", "description": "d", "default": 1, "examples": [1], "$comment": "c"},
    ],
    "nullable": [{"type": "string", "nullable": False}, {"type": "array", "items": STR, "deprecated": True}],
}


def cases() -> Iterator[Case]:
    for keyword, schemas in SCHEMAS.items():
        for i, schema in enumerate(schemas):
            if schema is not False:
                yield Case("suite", f"{keyword} {i}", schema, VALUES)
