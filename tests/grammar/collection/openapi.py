"""Schemas like those of OpenAPI documents: resources, paginated lists, errors, and tagged unions."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.grammar.collection.case import Case

FIELDS: dict[str, Any] = {
    "id": {"type": "string", "format": "uuid", "readOnly": True},
    "number": {"type": "integer", "format": "int64", "minimum": 1},
    "name": {"type": "string", "minLength": 1, "maxLength": 100, "example": "Widget"},
    "slug": {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
    "email": {"type": "string", "format": "email"},
    "url": {"type": "string", "format": "uri"},
    "created_at": {"type": "string", "format": "date-time"},
    "birthday": {"type": "string", "format": "date"},
    "status": {"type": "string", "enum": ["active", "inactive", "pending", "on_hold"]},
    "price": {"type": "number", "format": "double", "exclusiveMinimum": 0},
    "rating": {"type": "number", "minimum": 0, "maximum": 5, "multipleOf": 0.5},
    "amount": {"type": "number", "multipleOf": 0.01, "minimum": 0},
    "quantity": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 10000, "default": 1},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 10},
    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    "metadata": {"type": "object"},
    "active": {"type": "boolean", "default": True},
    "parent": {"type": ["string", "null"]},
    "country": {"type": "string", "pattern": "^[A-Z]{2}$"},
    "phone": {"type": "string", "pattern": "^\\+[1-9]\\d{1,14}$"},
    "currency": {"type": "string", "minLength": 3, "maxLength": 3},
    "ip": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
    "address": {"$ref": "#/components/schemas/Address"},
    "history": {"type": "array", "items": {"$ref": "#/components/schemas/Event"}},
    "avatar": {"type": "string", "format": "byte"},
    "secret": {"type": "string", "format": "password", "minLength": 8},
    "color": {"type": "string", "pattern": "^#(?:[0-9a-fA-F]{3}){1,2}$"},
    "version": {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+(-[0-9A-Za-z.-]+)?$"},
    "coordinates": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
    "scopes": {"type": "array", "items": {"enum": ["read", "write", "admin"]}, "uniqueItems": True},
}
COMPONENTS = {
    "Address": {
        "type": "object",
        "required": ["street", "city"],
        "properties": {
            "street": {"type": "string", "maxLength": 200},
            "city": {"type": "string"},
            "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
            "country": FIELDS["country"],
        },
    },
    "Event": {
        "type": "object",
        "properties": {"at": FIELDS["created_at"], "what": {"type": "string"}, "by": {"type": "integer"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "Error": {
        "type": "object",
        "required": ["code", "message"],
        "properties": {
            "code": {"type": "integer", "minimum": 400, "maximum": 599},
            "message": {"type": "string"},
            "details": {"type": "array", "items": {"$ref": "#/components/schemas/Error"}},
        },
    },
}
WITH = {"components": {"schemas": COMPONENTS}}


def resource(random: Random, size: int) -> dict[str, Any]:
    names = random.sample(list(FIELDS), size)
    schema: dict[str, Any] = {"type": "object", "properties": {name: FIELDS[name] for name in names}}
    required = [name for name in names if random.random() < 0.5]
    if required:
        schema["required"] = required
    if random.random() < 0.4:
        schema["additionalProperties"] = random.choice([False, False, {"type": "string"}, True])
    return schema


def open_resource(random: Random, size: int) -> dict[str, Any]:
    schema = resource(random, size)
    schema.pop("additionalProperties", None)
    return schema


def cases() -> Iterator[Case]:
    random = Random(7)
    for i in range(45):
        yield Case("openapi", f"resource {i}", {**resource(random, random.randint(2, 14)), **WITH})
    for i in range(8):
        page = {
            "type": "object",
            "properties": {
                "items": {"type": "array", "items": resource(random, 5)},
                "next": {"type": ["string", "null"]},
                "total": {"type": "integer", "minimum": 0},
            },
            "required": ["items", "total"],
        }
        yield Case(
            "openapi",
            f"page {i}",
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **page, **WITH},
        )
    for i in range(8):
        yield Case(
            "openapi",
            f"inheritance {i}",
            {
                "allOf": [
                    {"$ref": "#/components/schemas/Base"},
                    open_resource(random, 4),
                    {"required": ["kind"]},
                ],
                "components": {"schemas": {**COMPONENTS, "Base": open_resource(random, 3)}},
            },
        )
    for i in range(8):
        kinds = {f"kind_{k}": resource(random, random.randint(1, 5)) for k in range(random.randint(2, 6))}
        for kind, schema in kinds.items():
            schema["properties"] = {"kind": {"enum": [kind]}, **schema["properties"]}
            schema["required"] = ["kind", *schema.get("required", [])]
        yield Case(
            "openapi",
            f"tagged {i}",
            {
                "oneOf": [{"$ref": f"#/components/schemas/{kind}"} for kind in kinds],
                "discriminator": {"propertyName": "kind"},
                "components": {"schemas": COMPONENTS | kinds},
            },
        )
    yield Case(
        "openapi",
        "result or error",
        {"oneOf": [open_resource(random, 4) | {"required": ["data"]}, COMPONENTS["Error"]], **WITH},
    )
    yield Case("openapi", "error", {"$ref": "#/components/schemas/Error", **WITH})
    patch = {
        name: {"anyOf": [FIELDS[name], {"type": "null"}]} for name in ("name", "price", "status", "tags")
    }
    yield Case(
        "openapi",
        "patch",
        {"type": "object", "properties": patch, "minProperties": 1, "additionalProperties": False},
    )
    yield Case(
        "openapi",
        "map of resources",
        {"type": "object", "additionalProperties": resource(random, 4), "maxProperties": 20, **WITH},
    )
