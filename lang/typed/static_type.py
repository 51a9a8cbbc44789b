"""Static types: the type that a field or item has in every value of a given type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ramify.graph_text import Scalar
from ramify.lang.typed.adapters import adapter_of

SCALARS: dict[str, frozenset[str]] = {
    "str": frozenset({"min_length", "max_length", "pattern", "regex_engine"}),
    "int": frozenset({"ge", "gt", "le", "lt", "multiple_of"}),
    "float": frozenset({"ge", "gt", "le", "lt", "multiple_of", "allow_inf_nan"}),
    "bool": frozenset(),
}
"""pydantic's scalar type → its settings that can reject a value but do not change it."""
ALWAYS = frozenset({"type", "strict", "ref", "metadata"})
PLAIN_CONFIG = frozenset({"title", "extra_fields_behavior", "frozen"})
"""Settings of a class that do not change the values of its fields."""


class StaticType:
    """A type from pydantic's core schema (``TypeAdapter.core_schema``).

    `attribute` and `item` return None unless every value of the type has the named field or item, with the
    value from the JSON. So they return None for a field that may be missing, or that code of the type
    computes or changes.
    """

    def __init__(self, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
        while schema["type"] in ("definitions", "definition-ref"):
            if schema["type"] == "definitions":
                definitions = {**definitions, **{one["ref"]: one for one in schema["definitions"]}}
                schema = schema["schema"]
            else:
                schema = definitions[schema["schema_ref"]]
        self._schema, self._definitions = schema, definitions

    def attribute(self, name: str) -> StaticType | None:
        """The type of ``value.name``, a field of a pydantic model or of a dataclass."""
        schema = self._schema
        if schema["type"] not in ("model", "dataclass") or not _is_plain(schema):
            return None
        fields = schema["schema"]
        match fields["type"]:
            case "model-fields":
                field = fields["fields"].get(name)
            case "dataclass-args":
                field = next((one for one in fields["fields"] if one["name"] == name), None)
            case _:
                return None  # a validator of the class may change the values
        return self._field(field)

    def item(self, key: object) -> StaticType | None:
        """The type of ``value[key]`` in a TypedDict, a tuple, or a list with more than `key` items."""
        schema = self._schema
        match schema["type"], key:
            case "typed-dict", str() if _is_plain(schema):
                field = schema["fields"].get(key)
                return self._field(field) if field is not None and field.get("required", True) else None
            case "tuple", int() if "variadic_item_index" not in schema:
                items = schema["items_schema"]
                return StaticType(items[key], self._definitions) if 0 <= key < len(items) else None
            case "list", int() if "items_schema" in schema and 0 <= key < (schema.get("min_length") or 0):
                return StaticType(schema["items_schema"], self._definitions)
        return None

    @property
    def scalar(self) -> Scalar | None:
        """The name of the scalar type, if it is str, int, float or bool and its values are those in the JSON;
        None for other types."""
        schema, kind = self._schema, self._schema["type"]
        if kind == "literal":
            kinds: set[Any] = {type(value).__name__ for value in schema["expected"]}
            return kinds.pop() if kinds in ({"str"}, {"int"}) else None
        if kind in SCALARS and schema.keys() <= ALWAYS | SCALARS[kind]:
            return cast(Scalar, kind)
        return None

    def _field(self, field: Mapping[str, Any] | None) -> StaticType | None:
        if field is None or "validation_alias" in field or not field.get("init", True):
            return None
        return StaticType(field["schema"], self._definitions)


class KnownType(StaticType):
    """A type with given parts, which are read as attributes and as items."""

    def __init__(self, scalar: Scalar | None = None, parts: Mapping[Any, StaticType] | None = None) -> None:
        self._scalar, self._parts = scalar, parts or {}

    def attribute(self, name: str) -> StaticType | None:
        return self._parts.get(name)

    def item(self, key: object) -> StaticType | None:
        return self._parts.get(key)

    @property
    def scalar(self) -> Scalar | None:
        return self._scalar


def static_type(kind: Any) -> StaticType | None:
    """The static type of a Python type; None for JSON schemas and types that pydantic does not support."""
    if isinstance(kind, Mapping | str) or kind is None:
        return None
    import pydantic

    try:
        return StaticType(adapter_of(kind).core_schema, {})
    except (pydantic.errors.PydanticUserError, RecursionError):
        return None


def _is_plain(schema: Mapping[str, Any]) -> bool:
    owner = schema.get("cls", dict)
    return (
        PLAIN_CONFIG.issuperset(schema.get("config", {}))
        and not schema.get("custom_init")
        and not schema.get("post_init")
        and not schema.get("root_model")
        and owner.__getattribute__ in (object.__getattribute__, dict.__getattribute__)
    )
