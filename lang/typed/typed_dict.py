"""Conversion of `typing.TypedDict` for pydantic, which before Python 3.12 takes only the TypedDict of
typing_extensions."""

from __future__ import annotations

import functools
import operator
import sys
import types
import typing
from typing import Annotated, Any, Literal, NotRequired, Required, get_args, get_origin


def modern(kind: Any) -> Any:
    """`kind` with every `typing.TypedDict` in it, at any depth, replaced by one of typing_extensions.

    Raises RecursionError for a TypedDict that contains itself.
    """
    if sys.version_info >= (3, 12):
        return kind
    if typing.is_typeddict(kind):
        return _remade(kind)
    args, origin = get_args(kind), get_origin(kind)
    if not args or origin is Literal:
        return kind
    if origin is Annotated:
        return Annotated[(modern(args[0]), *args[1:])]
    changed = tuple(modern(arg) for arg in args)
    if changed == args:
        return kind
    if origin is types.UnionType or origin is typing.Union:
        return functools.reduce(operator.or_, changed)
    return origin[changed]


def _remade(kind: Any) -> Any:
    import typing_extensions

    fields = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        # `__required_keys__` ignores NotRequired in annotations that are strings; the evaluated hint has it.
        qualifier = get_origin(hint)
        required: Any = Required if name in kind.__required_keys__ else NotRequired
        if qualifier in (Required, NotRequired):
            required, hint = qualifier, get_args(hint)[0]
        fields[name] = required[modern(hint)]
    make: Any = typing_extensions.TypedDict  # mypy takes only literal names
    remade = make(kind.__name__, fields)
    remade.__doc__ = kind.__doc__
    return remade
