"""Values of arguments and results as text, which graphs insert into texts and compare in conditions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ramify.errors import InvalidRequest, ProgramError

Scalar = Literal["str", "int", "float", "bool"]

Change = Literal["strip", "lstrip", "rstrip", "lower", "upper", "capitalize", "title"]
"""A method of Python's `str` that takes no arguments."""


def changed(text: str, changes: Iterable[Change]) -> str:
    """Apply the methods `changes` to `text`, in order; returns the result."""
    for change in changes:
        text = getattr(text, change)()
    return text


SCALARS: dict[Scalar, tuple[type, ...]] = {
    "str": (str,),
    "int": (int, float),
    "float": (float, int),
    "bool": (bool,),
}
"""Name of a scalar type → Python types that its JSON values may have. The first type is used to convert a
value."""


def argument_at(name: str, value: Any, path: Sequence[str | int]) -> Any:
    """The item at `path` in `value`, the value of the argument `name`.

    Raises `InvalidRequest` if there is none.
    """
    for depth, key in enumerate(path):
        try:
            value = value[key]
        except (TypeError, LookupError):
            place = "".join(f"[{one!r}]" for one in path[: depth + 1])
            raise InvalidRequest(f"The argument {name!r} has nothing at {place}.", field=name) from None
    return value


def argument_text(name: str, value: Any, path: Sequence[str | int], then: Iterable[Change]) -> str:
    """The item at `path` in an argument, as Python's `str` writes it: ``True``, ``1.0``, ``[1, 2]``.

    The methods `then` are applied to it. Raises `InvalidRequest` if there is no such item, and if `then` is
    not empty while the item is not a text.
    """
    value, then = argument_at(name, value, path), tuple(then)
    if then and not isinstance(value, str):
        raise InvalidRequest(f"{name!r} is {value!r}, which has no {then[0]}().", field=name)
    return changed(str(value), then)


def scalar_text(text: str, path: Sequence[str | int], kind: Scalar) -> str:
    """The value at `path` in the JSON `text`, written as Python's `str` does: ``True``, ``1.0``.

    Raises `ProgramError` if there is no value at `path`, or if the value is not of the type `kind`.
    """
    try:
        value = json.loads(text)
        for key in path:
            value = value[key]
        if type(value) not in SCALARS[kind]:
            raise TypeError(f"there is {value!r}.")
        return str(SCALARS[kind][0](value))
    except (ValueError, TypeError, LookupError) as error:
        place = "".join(f"[{key!r}]" for key in path)
        raise ProgramError(
            f"A result has no {kind} at {place or 'its root'}: {error}", partial=text
        ) from None
