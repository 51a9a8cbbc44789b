"""Schemas like those of analytics events, messages and tool arguments: tags, conditions, many options."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.grammar.collection.case import Case

CONTEXT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ip": {"type": "string", "format": "ipv4"},
        "locale": {"type": "string", "pattern": "^[a-z]{2}(-[A-Z]{2})?$"},
        "page": {
            "type": "object",
            "properties": {
                "url": {"type": "string", "format": "uri"},
                "title": {"type": "string", "maxLength": 300},
            },
            "required": ["url"],
        },
        "screen": {
            "type": "object",
            "properties": {
                "width": {"type": "integer", "minimum": 1},
                "height": {"type": "integer", "minimum": 1},
            },
        },
    },
    "additionalProperties": False,
}
PROPERTIES: dict[str, Any] = {
    "order_id": {"type": "string", "minLength": 1},
    "value": {"type": "number", "minimum": 0},
    "currency": {"enum": ["EUR", "USD", "CHF", "JPY"]},
    "coupon": {"type": ["string", "null"]},
    "items": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["sku"],
            "properties": {
                "sku": {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"},
                "quantity": {"type": "integer", "minimum": 1},
            },
        },
    },
    "plan": {"enum": ["free", "pro", "team", None]},
    "step": {"type": "integer", "minimum": 1, "maximum": 12},
    "success": {"type": "boolean"},
    "duration_ms": {"type": "integer", "minimum": 0},
    "query": {"type": "string", "maxLength": 500},
    "experiment": {
        "type": "object",
        "patternProperties": {"^exp_[0-9]+$": {"enum": ["control", "variant"]}},
        "additionalProperties": False,
    },
}


def event(random: Random, name: str) -> dict[str, Any]:
    names = random.sample(list(PROPERTIES), random.randint(1, 6))
    return {
        "type": "object",
        "required": ["event", "timestamp"],
        "properties": {
            "event": {"const": name},
            "timestamp": {"type": "string", "format": "date-time"},
            "user_id": {"type": "string"},
            "anonymous_id": {"type": "string", "format": "uuid"},
            "context": CONTEXT,
            "properties": {
                "type": "object",
                "properties": {n: PROPERTIES[n] for n in names},
                "required": names[: len(names) // 2],
                "additionalProperties": random.random() < 0.3,
            },
        },
    }


TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "City and country"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["location"],
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "filters": {
                "type": "array",
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {
                                "field": {"type": "string"},
                                "equals": {"type": ["string", "number"]},
                            },
                            "required": ["field", "equals"],
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "properties": {"any": {"type": "array", "items": {"type": "string"}}},
                            "required": ["any"],
                            "additionalProperties": False,
                        },
                    ]
                },
            },
            "limit": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 100}, {"type": "null"}]},
        },
        "required": ["query", "filters", "limit"],
        "additionalProperties": False,
    },
    "plan": {
        "$defs": {
            "task": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "done": {"type": "boolean"},
                    "after": {"type": "array", "items": {"$ref": "#/$defs/task"}},
                },
                "required": ["title"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/task"},
        "minItems": 1,
        "maxItems": 5,
    },
    "edit": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "pattern": "^(/[^/\\u0000]+)+$"},
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"from": {"type": "string"}, "to": {"type": "string"}},
                    "required": ["from", "to"],
                },
            },
        },
        "required": ["path", "edits"],
    },
    "expression": {
        "$defs": {
            "expr": {
                "anyOf": [
                    {"type": "number"},
                    {
                        "type": "object",
                        "properties": {
                            "op": {"enum": ["+", "-", "*"]},
                            "left": {"$ref": "#/$defs/expr"},
                            "right": {"$ref": "#/$defs/expr"},
                        },
                        "required": ["op", "left", "right"],
                        "additionalProperties": False,
                    },
                ]
            }
        },
        "$ref": "#/$defs/expr",
    },
}
CONDITIONS: dict[str, Any] = {
    "country decides": {
        "type": "object",
        "properties": {"country": {"enum": ["US", "CA", "NL"]}, "postal_code": {"type": "string"}},
        "required": ["country"],
        "if": {"properties": {"country": {"const": "US"}}},
        "then": {"properties": {"postal_code": {"pattern": "^[0-9]{5}$"}}},
        "else": {"properties": {"postal_code": {"pattern": "^[A-Z0-9 ]{4,7}$"}}},
    },
    "chain": {
        "type": "object",
        "properties": {"method": {"enum": ["card", "iban", "cash"]}},
        "required": ["method"],
        "allOf": [
            {
                "if": {"properties": {"method": {"const": "card"}}},
                "then": {
                    "required": ["number"],
                    "properties": {"number": {"type": "string", "pattern": "^[0-9]{12,19}$"}},
                },
            },
            {
                "if": {"properties": {"method": {"const": "iban"}}},
                "then": {"required": ["iban"], "properties": {"iban": {"type": "string", "minLength": 15}}},
            },
        ],
    },
    "dependent": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "card": {"type": "integer"},
            "billing": {"type": "string"},
        },
        "dependentRequired": {"card": ["billing"]},
        "dependentSchemas": {"billing": {"properties": {"name": {"minLength": 2}}}},
        "additionalProperties": False,
    },
    "unevaluated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "anyOf": [
            {"properties": {"cat": {"type": "string"}}, "required": ["cat"]},
            {"properties": {"dog": {"type": "string"}}, "required": ["dog"]},
        ],
        "unevaluatedProperties": False,
    },
    "contains": {
        "type": "array",
        "items": {"enum": ["a", "b", "c"]},
        "contains": {"const": "a"},
        "maxContains": 2,
        "maxItems": 5,
    },
    "either or both": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "not both": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "not": {"required": ["a", "b"]},
    },
    "exactly one": {
        "type": "object",
        "properties": {n: {"type": "integer"} for n in "abc"},
        "oneOf": [{"required": [n]} for n in "abc"],
    },
    "reserved names": {
        "type": "object",
        "propertyNames": {"not": {"enum": ["id", "type"]}, "minLength": 1},
        "additionalProperties": {"type": "integer"},
    },
    "not empty string": {
        "type": "object",
        "properties": {"a": {"type": "string", "not": {"const": ""}}},
        "required": ["a"],
    },
}


def cases() -> Iterator[Case]:
    random = Random(11)
    names = ["Order Completed", "Signed Up", "Step Viewed", "Searched", "Plan Changed", "Checkout Started"]
    for i in range(24):
        yield Case("events", f"event {i}", event(random, random.choice(names)))
    for count in (2, 3, 4, 6):
        events = [event(random, name) for name in names[:count]]
        yield Case("events", f"one of {count}", {"oneOf": events})
        yield Case("events", f"any of {count}", {"anyOf": events})
        yield Case(
            "events",
            f"batch of {count}",
            {
                "type": "object",
                "properties": {"batch": {"type": "array", "items": {"oneOf": events}, "maxItems": 100}},
                "required": ["batch"],
                "additionalProperties": False,
            },
        )
    for name, schema in {**TOOLS, **CONDITIONS}.items():
        yield Case("events", name, schema)
        yield Case(
            "events",
            f"{name} in an object",
            {
                "type": "object",
                "properties": {"value": schema},
                "required": ["value"],
                "additionalProperties": False,
            }
            | ({"$defs": schema["$defs"]} if "$defs" in schema else {}),
        )
