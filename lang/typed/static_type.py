"""What every value of a type has: its fields, and those that can be put into text by their JSON alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

from ramify.graph import Scalar
from ramify.lang.typed.typed_dict import modern

SCALARS: dict[str, frozenset[str]] = {
    "str": frozenset({"min_length", "max_length", "pattern", "regex_engine"}),
    "int": frozenset({"ge", "gt", "le", "lt", "multiple_of"}),
    "float": frozenset({"ge", "gt", "le", "lt", "multiple_of", "allow_inf_nan"}),
    "bool": frozenset(),
}
"""Pydantic's scalars, and what it may ask of one without changing it."""
ALWAYS = frozenset({"type", "strict", "ref", "metadata"})
PLAIN_CONFIG = frozenset({"title", "extra_fields_behavior", "frozen"})
"""Settings of a class that change no value in it."""


class StaticType:
    """A type as pydantic reads it (``TypeAdapter.core_schema``): what is not here for certain is None.

    A field that may be missing, or that a function of the type makes or changes, is not here.
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
        """What ``value.name`` is: a field of a pydantic model or of a dataclass."""
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
                return None  # a function of the class sees the values
        return self._field(field)

    def item(self, key: object) -> StaticType | None:
        """What ``value[key]`` is: of a TypedDict, a tuple, or a list that is at least so long."""
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
        """The type that it is, where JSON holds it as it is."""
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


def static_type(kind: Any) -> StaticType | None:
    """The shape of a Python type; None where pydantic does not take it for one."""
    if isinstance(kind, Mapping | str) or kind is None:
        return None
    try:
        return _static_type(kind)
    except TypeError:  # unhashable, as an annotation that holds a list may be: not cached
        return _static_type.__wrapped__(kind)


@functools.lru_cache(maxsize=256)
def _static_type(kind: Any) -> StaticType | None:
    import pydantic

    try:
        return StaticType(pydantic.TypeAdapter(modern(kind)).core_schema, {})
    except (pydantic.errors.PydanticUserError, RecursionError):
        return None


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Nothing of the class stands between its JSON and its fields."""
    owner = schema.get("cls", dict)
    return (
        PLAIN_CONFIG.issuperset(schema.get("config", {}))
        and not schema.get("custom_init")
        and not schema.get("post_init")
        and not schema.get("root_model")
        and owner.__getattribute__ in (object.__getattribute__, dict.__getattribute__)
    )
