"""Values of options by the types of their fields: from texts, and from values of TOML or JSON.

=====================  ==============================  =================================
type of the field      text                            value of a file
=====================  ==============================  =================================
int, float             4, 0.5                          a number
bool                   true or false, on or off, 1, 0  true or false
str, Literal           the text                        a text
Sequence[str]          a,b                             a list of texts, or one text
Mapping[str, str]      name=path,other=path            a table of texts
Mapping[str, Any]      JSON of an object               a table
=====================  ==============================  =================================
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from ramify.credentials import is_secret
from ramify.errors import InvalidRequest

_SWITCHES = dict.fromkeys(("true", "on", "yes", "1"), True) | dict.fromkeys(
    ("false", "off", "no", "0"), False
)
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def bare(hint: Any) -> Any:
    """The type `hint` without None: int for ``int | None``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return hint


def from_text(hint: Any, text: str, name: str) -> Any:
    """The value of the option `name` that `text` spells, which has the type `hint`.

    "none" is None for an option of numbers or switches that may be None. Raises `InvalidRequest` for another
    text than the type has.
    """
    kind = bare(hint)
    if kind is not hint and kind is not str and text == "none":
        return None
    try:
        if kind is bool:
            return _SWITCHES[text.lower()]
        if kind in (int, float):
            return kind(text)
    except (KeyError, ValueError):
        raise _wrong(name, text, _KINDS[kind]) from None
    origin = typing.get_origin(kind)
    if origin is Sequence:
        return [part for part in text.split(",") if part]
    if kind == Mapping[str, str]:
        pairs = [part.partition("=") for part in text.split(",") if part]
        if not all(key and equals and value for key, equals, value in pairs):
            raise _wrong(name, text, "name=path, with commas between several")
        return {key: value for key, _, value in pairs}
    if origin is Mapping:
        try:
            return from_value(kind, json.loads(text), name)
        except ValueError:
            raise _wrong(name, text, "JSON of an object") from None
    return text


def from_value(hint: Any, given: Any, name: str) -> Any:
    """`given`, a value of TOML or JSON, as the value of the option `name` of the type `hint`.

    Raises `InvalidRequest` for a value of another type. A Literal's value is left to the configuration.
    """
    kind = bare(hint)
    if kind is not hint and given is None:
        return None
    origin = typing.get_origin(kind)
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if kind is float and number:
        return float(given)
    if kind is int and number and float(given).is_integer():
        return int(given)
    if kind is bool and isinstance(given, bool):
        return given
    if kind is str and (isinstance(given, str) or (number and isinstance(given, int))):
        return str(given)
    if origin is Sequence:
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise _wrong(name, given, "a list of texts")
        return listed
    if origin is Mapping:
        texts = kind == Mapping[str, str]
        if not isinstance(given, Mapping) or (texts and not all(map(_is_text, given.values()))):
            raise _wrong(name, given, "a table of name = path" if texts else "a table")
        return dict(given)
    if origin is typing.Literal:
        return given
    raise _wrong(name, given, _KINDS[kind])


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _wrong(name: str, given: Any, expected: str) -> InvalidRequest:
    shown = "…" if is_secret(name) else f"{given!r:.80}"
    return InvalidRequest(f"{name} is {shown}; it must be {expected}.", field=name)
