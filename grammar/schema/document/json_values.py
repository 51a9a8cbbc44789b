"""JSON values: parsing with numbers of bounded size, types, and equality as JSON Schema defines it.

1 equals 1.0, and does not equal true.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import Any

from ramify.errors import InvalidConstraint
from ramify.json_text import escape, no_constant
from ramify.text import shortened

MAX_DIGITS = 4300
"""Most digits of a number that is read, and most zeros between its digits and its decimal point. Python's
`int` has the same limit (`sys.int_info.default_max_str_digits`)."""


MAX_FRAMES = 12_000


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Raise the interpreter's recursion limit to `MAX_FRAMES`, and turn `RecursionError` into
    `InvalidConstraint`.

    The limit is not lowered afterwards, since another thread may have recursed beyond the old one.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MAX_FRAMES))
    try:
        yield
    except RecursionError:
        raise InvalidConstraint(
            "The schema or the value is nested too deeply.", remedy="Put parts of it beside one another."
        ) from None


class NumberTooLong(InvalidConstraint):
    """Error: a number has more than `MAX_DIGITS` digits. 1e999999999, for example, has 11 characters and a
    billion digits."""

    def __init__(self, number: str) -> None:
        super().__init__(
            f"The number {shortened(number, 24)} is too long: at most {MAX_DIGITS} digits are read, and as"
            " many zeros between them and the point.",
            remedy="Write a number that fits a double, or a string.",
        )


def parse_json(source: str) -> Any:
    """The value of a JSON text. Raises `InvalidConstraint` if the text is not JSON, and `NumberTooLong`.

    Numbers with a fraction or an exponent are returned as `Decimal`, so bounds are exact to the last digit.
    """
    try:
        return json.loads(source, parse_int=integer_of, parse_float=decimal_of, parse_constant=no_constant)
    except RecursionError:
        raise InvalidConstraint(
            "The JSON is nested too deeply.", remedy="Put parts of it beside one another."
        ) from None
    except ValueError as error:
        raise InvalidConstraint(
            f"This is not JSON: {error}.", remedy="Send the text of one JSON value."
        ) from None


def integer_of(text: str) -> int:
    """The integer that a JSON text denotes. Raises `NumberTooLong`."""
    if len(text) > MAX_DIGITS + text.startswith("-"):
        raise NumberTooLong(text)
    return int(text)


def decimal_of(text: str) -> Decimal:
    """The exact number that a JSON text denotes. Raises `NumberTooLong`."""
    try:
        return checked_number(Decimal(text))
    except InvalidOperation:  # an exponent of more than 18 digits
        raise NumberTooLong(text) from None


def checked_number(value: Decimal) -> Decimal:
    """Return `value`. Raises `NumberTooLong` if it has too many digits, and `InvalidConstraint` for infinity
    and NaN."""
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
    """A JSON value as a key of dictionaries. Two such keys are equal if their values are equal as JSON."""

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
    """The type of a value, one of `formula.TYPES`. A number is an "integer" if it is whole, else a
    "fraction"."""
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


def is_multiple(value: int | Decimal, divisor: Decimal) -> bool:
    """Whether `value` / `divisor` is a whole number, without rounding. The time depends on the digits of the
    two numbers, not on their exponents: 12e9 is a multiple of 7 if 12 % 7 * (10**9 % 7) is."""
    digits, length, exponent = _digits_and_exponent(Decimal(value))
    unit, _, scale = _digits_and_exponent(divisor)
    if digits == 0 or exponent >= scale:
        return digits % unit * pow(10, max(0, exponent - scale), unit) % unit == 0
    # A multiple has no more places than the divisor, so its digits at further places must be zeros.
    places = scale - exponent
    return places < length and digits % (unit * 10**places) == 0


def _digits_and_exponent(number: Decimal) -> tuple[int, int, int]:
    """The integer n, the number of digits of n, and the exponent e, for `number` = n * 10**e."""
    sign, digits, exponent = number.as_tuple()
    return int(Decimal((sign, digits, 0))), len(digits), int(exponent)


def place_of_long_number(source: str) -> str | None:
    """The JSON pointer of the first number in the text `source` that has too many digits.

    None if there is no such number, or if `source` is not JSON.
    """
    try:
        value = json.loads(
            source,
            parse_int=_marked_if_long(integer_of),
            parse_float=_marked_if_long(decimal_of),
            parse_constant=lambda name: None,
        )
    except (ValueError, RecursionError):
        return None
    return next(_marked_places(value, ""), None)


_LONG = object()


def _marked_if_long(read: Callable[[str], object]) -> Callable[[str], object]:
    """Wrap `read` so that it returns `_LONG` instead of raising `NumberTooLong`."""

    def mark(text: str) -> object:
        try:
            return read(text)
        except NumberTooLong:
            return _LONG

    return mark


def _marked_places(value: Any, pointer: str) -> Iterator[str]:
    if value is _LONG:
        yield pointer
    elif isinstance(value, dict | list):
        for name, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _marked_places(inside, f"{pointer}/{escape(str(name))}")
