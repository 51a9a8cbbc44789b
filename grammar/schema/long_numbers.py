"""Where in the text of a schema a number stands that is too long to be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from ramify.grammar.schema.check import escape

MAX_DIGITS = 4300
"""Most digits of a number, zeros before its point included: as many as `int` reads
(`sys.int_info.default_max_str_digits`)."""


def place_of_long_number(source: str) -> str | None:
    """The JSON pointer of the first such number in `source`; None where there is none, or `source` is not
    JSON."""
    try:
        value = json.loads(source, parse_int=_is_long, parse_float=_is_long, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return next(_places(value, ""), None)


def _is_long(text: str) -> object:
    try:
        number = Decimal(text)
    except InvalidOperation:  # an exponent beyond Decimal's
        return _LONG
    return _LONG if len(text) > MAX_DIGITS + 1 or abs(number.adjusted()) >= MAX_DIGITS else None


_LONG = object()


def _places(value: Any, pointer: str) -> Iterator[str]:
    if value is _LONG:
        yield pointer
    elif isinstance(value, dict):
        for name, inside in value.items():
            yield from _places(inside, f"{pointer}/{escape(name)}")
    elif isinstance(value, list):
        for index, inside in enumerate(value):
            yield from _places(inside, f"{pointer}/{index}")
