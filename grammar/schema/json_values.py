"""JSON values: their types, and equality as JSON has it, where 1 is 1.0 and not true."""

from __future__ import annotations

from decimal import Decimal
from typing import Any


class Value:
    """A JSON value as a key: equal to all that are equal as JSON."""

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


def value_of(value: Any) -> Value:
    return Value(value)


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
    """Of the types of `formula.TYPES`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case Decimal() | float():
            return "integer" if is_whole(value) else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_whole(value: Decimal | float) -> bool:
    return value.is_integer() if isinstance(value, float) else value == value.to_integral_value()
