"""Deep, wide and recursive schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.grammar.collection.case import Case

LEAVES: list[Any] = [
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"enum": ["a", "b"]},
    {"type": ["boolean", "null"]},
    {"type": "number"},
]


def nested(depth: int, *, closed: bool, array: bool) -> Any:
    schema: Any = {"type": "string", "maxLength": 10}
    for level in range(depth):
        if array and level % 2:
            schema = {"type": "array", "items": schema, "maxItems": 3}
        else:
            schema = {
                "type": "object",
                "properties": {"id": {"type": "integer"}, f"level{level}": schema},
                "required": [f"level{level}"],
            }
            if closed:
                schema["additionalProperties"] = False
    return schema


def wide(count: int, *, required: bool, closed: bool) -> Any:
    properties = {f"{'abcdefgh'[i % 8]}_field{i}": LEAVES[i % len(LEAVES)] for i in range(count)}
    schema: Any = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(properties)
    if closed:
        schema["additionalProperties"] = False
    return schema


SELF: dict[str, Any] = {
    "list": {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value"],
        "additionalProperties": False,
    },
    "tree": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name"],
    },
    "json": {
        "$defs": {
            "value": {
                "anyOf": [
                    {"type": ["null", "boolean", "number", "string"]},
                    {"type": "array", "items": {"$ref": "#/$defs/value"}},
                    {"type": "object", "additionalProperties": {"$ref": "#/$defs/value"}},
                ]
            }
        },
        "$ref": "#/$defs/value",
    },
    "markup": {
        "$defs": {
            "node": {
                "oneOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "properties": {
                            "tag": {"pattern": "^[a-z][a-z0-9]*$", "type": "string"},
                            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                        },
                        "required": ["tag"],
                        "additionalProperties": False,
                    },
                ]
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
    },
    "anchors": {
        "$id": "https://example.org/tree",
        "$defs": {
            "leaf": {"$anchor": "leaf", "type": "integer"},
            "branch": {"$id": "branch", "type": "array", "items": {"$ref": "tree#leaf"}},
        },
        "type": "object",
        "properties": {"a": {"$ref": "#leaf"}, "b": {"$ref": "branch"}},
        "additionalProperties": False,
    },
    "dynamic": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$dynamicAnchor": "node",
        "type": "object",
        "properties": {
            "data": {"type": "integer"},
            "children": {"type": "array", "items": {"$dynamicRef": "#node"}},
        },
    },
    "logic": {
        "$defs": {
            "f": {
                "oneOf": [
                    {"type": "boolean"},
                    {
                        "type": "object",
                        "properties": {"not": {"$ref": "#/$defs/f"}},
                        "required": ["not"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {"all": {"type": "array", "items": {"$ref": "#/$defs/f"}}},
                        "required": ["all"],
                        "additionalProperties": False,
                    },
                ]
            }
        },
        "$ref": "#/$defs/f",
    },
}


def cases() -> Iterator[Case]:
    for depth in (3, 6, 10, 16, 25):
        for closed in (True, False):
            for array in (True, False):
                yield Case(
                    "shapes", f"{depth} deep, {closed=}, {array=}", nested(depth, closed=closed, array=array)
                )
    for count in (8, 20, 40, 80, 150):
        for required in (True, False):
            for closed in (True, False):
                yield Case(
                    "shapes",
                    f"{count} wide, {required=}, {closed=}",
                    wide(count, required=required, closed=closed),
                )
    for name, schema in SELF.items():
        yield Case("shapes", name, schema)
    for count in (50, 400, 3000):
        yield Case(
            "shapes",
            f"enum of {count}",
            {
                "type": "object",
                "properties": {"code": {"enum": [f"code-{i:05}" for i in range(count)]}},
                "required": ["code"],
            },
        )
    for length in (50, 500, 2000):
        yield Case(
            "shapes",
            f"{length} characters",
            {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "maxLength": length},
                    "name": {"type": "string", "minLength": 3, "maxLength": length},
                },
                "required": ["text"],
            },
        )
    for count in (20, 200, 500):
        constants = [{"const": f"value {i}", "title": f"Value {i}"} for i in range(count)]
        yield Case(
            "shapes",
            f"one of {count} constants",
            {"type": "object", "properties": {"v": {"oneOf": constants}}, "required": ["v"]},
        )
    for count in (10, 40, 80):
        kinds = [wide(1 + i % 5, required=False, closed=False) for i in range(count)]
        for i, kind in enumerate(kinds):
            kind["properties"] = {"kind": {"const": f"kind{i}"}, **kind["properties"]}
            kind["required"] = ["kind"]
        yield Case("shapes", f"one of {count} kinds", {"oneOf": kinds})
    for format_, length in (
        ("email", 254),
        ("email", 100),
        ("uri", 2048),
        ("hostname", 253),
        ("hostname", 100),
    ):
        yield Case(
            "shapes",
            f"{format_} of {length}",
            {
                "type": "object",
                "properties": {"x": {"type": "string", "format": format_, "maxLength": length}},
                "required": ["x"],
            },
        )
