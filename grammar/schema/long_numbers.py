"""Where in the text of a schema a number stands that is too long to be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ramify.grammar.schema.json_values import NumberTooLong, decimal_of, integer_of
from ramify.json_text import escape


def place_of_long_number(source: str) -> str | None:
    """The JSON pointer of the first such number in `source`; None where there is none, or `source` is not
    JSON."""
    try:
        value = json.loads(
            source,
            parse_int=_marked(integer_of),
            parse_float=_marked(decimal_of),
            parse_constant=lambda name: None,
        )
    except (ValueError, RecursionError):
        return None
    return next(_places(value, ""), None)


def _marked(read: Callable[[str], object]) -> Callable[[str], object]:
    """A function that gives `_LONG` for a number that `read` refuses as too long."""

    def mark(text: str) -> object:
        try:
            return read(text)
        except NumberTooLong:
            return _LONG

    return mark


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
