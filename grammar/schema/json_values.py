"""JSON values: their types, and equality as JSON has it, where 1 equals 1.0 and not true."""

from __future__ import annotations

from decimal import Decimal
from typing import Any


class Value:
    """A JSON value as a key of dictionaries: two are equal where their values are equal as JSON."""

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key = _key(value)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self._key == other._key

    def __repr__(self) -> str:
        return f"Value({self.value!r})"


def _key(value: Any) -> Any:
    match value:
        case bool():
            return ("boolean", value)
        case int() | float() | Decimal():
            return ("number", value)
        case list():
            return ("array", tuple(map(_key, value)))
        case dict():
            return ("object", frozenset((name, _key(item)) for name, item in value.items()))
    return value


def type_of(value: Any) -> str:
    """The type of a value as in `formula.TYPES`: "integer" for a whole number, "fraction" for another."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case Decimal():
            return "integer" if value == value.to_integral_value() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
