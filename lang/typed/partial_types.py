"""Checkers of the values inside a partial value, by the type or subschema of each value."""

from __future__ import annotations

import functools
import json
import operator
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from ramify.json_text import read_json
from ramify.lang.typed.adapters import adapter_of, members_of, plain, root_of
from ramify.lang.typed.open_object import opened

if TYPE_CHECKING:
    from ramify.lang.typed.partial_schema import SchemaChecker


def checker_of(kind: Any) -> TypeChecker | SchemaChecker:
    """The checker of a Python type, or of a JSON schema as a mapping or as text."""
    if isinstance(kind, str):
        kind = json.loads(kind)
    if not isinstance(kind, Mapping | bool):
        return TypeChecker(kind)
    from ramify.lang.typed.partial_schema import schema_checker

    return schema_checker(kind)


class TypeChecker:
    """A checker of the values at one place inside a value. pydantic validates the values against the type at
    this place."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def check(self, raw: str) -> Any:
        """Parse and validate `raw`, the JSON text of a value, and return the value. Raises ValueError if the
        value is invalid."""
        if self._kind is Any:
            return read_json(raw, strict=False)
        return adapter_of(self._kind).validate_json(raw)

    def opened(self, members: Any) -> Any:
        """The value of an open object or array at this place, of which `members` have come."""
        return opened(self._kind, members)

    def child(self, key: str | int) -> TypeChecker:
        """The checker of the object's member or the array's item at `key`."""
        return TypeChecker(_member(self._kind, key))


def _member(kind: Any, key: str | int) -> Any:
    """The type of the member or item `key` of a `kind`; Any if `kind` does not define this type."""
    kind = _bare(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        found = [_member(one, key) for one in args if _holds(one, key)]
        return functools.reduce(operator.or_, found) if found and Any not in found else Any
    if isinstance(key, int):
        if origin is tuple and args and args[-1] is not ...:
            return args[key] if key < len(args) else Any
        return args[0] if args else Any
    fields = _fields(kind)
    if fields is not None:
        return fields.get(key, Any)
    return args[1] if len(args) == 2 else Any


def _bare(kind: Any) -> Any:
    """The type `kind` without aliases, annotations and root models around it, which make no difference in
    JSON."""
    kind = plain(kind)
    while (root := root_of(kind)) is not None:
        kind = plain(root)
    return kind


def _holds(kind: Any, key: str | int) -> bool:
    kind = _bare(kind)
    found = get_origin(kind) or kind
    if isinstance(key, int):
        return isinstance(found, type) and issubclass(found, list | tuple | set | frozenset)
    fields = _fields(kind)
    return key in fields if fields is not None else isinstance(found, type) and issubclass(found, dict)


def _fields(kind: Any) -> dict[str, Any] | None:
    """Name in JSON → type, for the members of an object type; None for types without fixed members."""
    try:
        members = members_of(kind)
    except NameError:  # a name local to a function: members are validated only with their whole object
        return {}
    return None if members is None else {name: hint for name, (hint, _) in members.items()}
