"""JSON values: numbers of bounded size, their types, and equality, where 1 equals 1.0 and not true."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

from ramify.errors import InvalidConstraint
from ramify.text import shortened

MAX_DIGITS = 4300
"""Most digits of a number that is read, and most zeros between them and its point. Python's `int` reads
integers of as many digits (`sys.int_info.default_max_str_digits`)."""


class NumberTooLong(InvalidConstraint):
    """A number of more digits than are read: 1e999999999 has ten characters and a billion digits."""

    def __init__(self, number: str) -> None:
        super().__init__(
            f"The number {shortened(number, 24)} is too long: at most {MAX_DIGITS} digits are read, and as"
            " many zeros between them and the point.",
            remedy="Write a number that fits a double, or a string.",
        )


def integer_of(text: str) -> int:
    """The integer of its JSON text. Raises `NumberTooLong`."""
    if len(text) > MAX_DIGITS + text.startswith("-"):
        raise NumberTooLong(text)
    return int(text)


def decimal_of(text: str) -> Decimal:
    """The number of its JSON text, exactly. Raises `NumberTooLong`."""
    try:
        return checked_number(Decimal(text))
    except InvalidOperation:  # an exponent of more than 18 digits
        raise NumberTooLong(text) from None


def checked_number(value: Decimal) -> Decimal:
    """`value`; raises `NumberTooLong` where it has too many digits, and `InvalidConstraint` for infinity and
    NaN."""
    if not value.is_finite():
        raise InvalidConstraint(f"{value} is no JSON number.", remedy="Write a finite number.")
    if abs(value.adjusted()) >= MAX_DIGITS or len(value.as_tuple().digits) > MAX_DIGITS:
        raise NumberTooLong(str(value))
    return value


def as_decimals(value: Any) -> Any:
    """A copy of a JSON value with `Decimal` in place of floats and lists in place of tuples.

    Raises `InvalidConstraint` for infinity and NaN, and `NumberTooLong`.
    """
    match value:
        case bool():
            return value
        case int() if value.bit_length() > _MOST_BITS:
            raise NumberTooLong(hex(value))
        case float():
            return checked_number(Decimal(repr(value)))
        case Decimal():
            return checked_number(value)
        case dict():
            return {name: as_decimals(item) for name, item in value.items()}
        case list() | tuple():
            return [as_decimals(item) for item in value]
    return value


_MOST_BITS = math.ceil(MAX_DIGITS * math.log2(10))


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
