"""Open objects of a type: the fields that have come, as attributes.

    text      {"place": "Bern", "days": [1, 12        of the type Plan
    value     Plan(place='Bern', days=[1])
    .days     [1]
    .hotel    AttributeError: Plan.hotel has not come yet.

Nothing is constructed: ``__init__`` and ``__post_init__`` do not run, and defaults are not filled in. An
instance of the type itself could not keep the defaults out, since those of a dataclass are attributes of the
class.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from ramify.lang.typed.adapters import class_of, fields_of, has_extras, members_of, plain, root_of


class OpenObject:
    """An object of the type `kind` with the `fields` that have come, which `vars` returns, and the other
    members that have come, if `kind` keeps these (`extra`).

    `isinstance` takes it for a `kind`. Properties and methods of `kind` work if they only read such fields,
    ``model_dump`` of a model among them.
    """

    # A model's methods read the names of pydantic.
    __slots__ = (
        "__dict__",
        "__kind",
        "__pydantic_extra__",
        "__pydantic_fields_set__",
        "__pydantic_private__",
    )

    def __init__(
        self, kind: type[Any], fields: Mapping[str, Any], extra: dict[str, Any] | None = None
    ) -> None:
        self.__kind = kind
        self.__dict__.update(fields)
        self.__pydantic_fields_set__ = {*fields, *(extra or ())}
        self.__pydantic_extra__ = extra
        self.__pydantic_private__ = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__kind

    def __getattr__(self, name: str) -> Any:
        kind, extra = self.__kind, self.__pydantic_extra__
        if extra and name in extra:
            return extra[name]
        if name in (_names_of(kind) or ()):
            raise AttributeError(f"{kind.__name__}.{name} has not come yet.", name=name, obj=self)
        found = inspect.getattr_static(kind, name, None)
        special = name.startswith("__") and isinstance(found, types.FunctionType)
        # A slot, and a method such as __deepcopy__, belong to instances of `kind` alone.
        if found is None or special or isinstance(found, types.MemberDescriptorType):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=self)
        bind = getattr(type(found), "__get__", None)
        return found if bind is None else bind(found, self, kind)

    def __reduce__(self) -> tuple[Any, ...]:
        extra = self.__pydantic_extra__
        fields = {name: value for name, value in fields_in(self).items() if name not in (extra or ())}
        return OpenObject, (self.__kind, fields, extra)

    def __eq__(self, other: object) -> bool:
        if type(other) is not OpenObject:
            return NotImplemented
        return self.__kind is other.__kind and fields_in(self) == fields_in(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join([f"{name}={value!r}" for name, value in fields_in(self).items()])
        return f"{self.__kind.__name__}({fields})"


def fields_in(value: Any) -> dict[str, Any]:
    """Name → value of the fields and extra members of an `OpenObject`, a model or a dataclass; empty for
    other values."""
    kind = value.__class__
    names = _names_of(kind)
    if names is None:
        return {}
    extra = getattr(value, "__pydantic_extra__", vars(value) if has_extras(kind) else None)
    return {name: getattr(value, name) for name in (*names, *(extra or ())) if hasattr(value, name)}


def _names_of(kind: Any) -> Sequence[str] | None:
    """The names of the attributes of a model or dataclass that are its fields; None for other types."""
    if isinstance(models := getattr(kind, "model_fields", None), Mapping):
        return tuple(models)
    return [one.name for one in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


def opened(kind: Any, members: Any) -> Any:
    """The value of an open object or array of the type `kind`, of which `members` have come: an `OpenObject`
    for a model or a dataclass, else `members`. Members of a `Literal` type rule out types of a union. The
    value is an object of the type that is left; while several are left, the value is `members`."""
    kind = plain(kind)
    root = root_of(kind)
    if root is not None:
        return OpenObject(kind, {"root": opened(root, members)})
    if isinstance(members, list):
        return members
    if get_origin(kind) in (Union, types.UnionType):
        possible = [one for one in get_args(kind) if _allows(one, members)]
        return opened(possible[0], members) if len(possible) == 1 else members
    fields, found = fields_of(kind), class_of(kind)
    if fields is None:
        return members
    known = {fields[key][0]: value for key, value in members.items() if key in fields}
    extra = {key: value for key, value in members.items() if key not in fields} if has_extras(found) else None
    return OpenObject(found, known, extra)


def _allows(kind: Any, members: dict[str, Any]) -> bool:
    """Whether an object with `members` can become a value of the type `kind`."""
    kind = plain(kind)
    if (root := root_of(kind)) is not None:
        return _allows(root, members)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_allows(one, members) for one in get_args(kind))
    hints = members_of(kind)
    if hints is None:
        found = get_origin(kind) or kind
        return not isinstance(found, type) or found is object or issubclass(found, Mapping)
    return all(_is_one_of(hints[key][0], value) for key, value in members.items() if key in hints)


def _is_one_of(kind: Any, value: Any) -> bool:
    kind = plain(kind)
    return get_origin(kind) is not Literal or any(
        type(one) is type(value) and one == value for one in get_args(kind)
    )
