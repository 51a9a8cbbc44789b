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

import inspect
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from ramify.lang.typed.adapters import attributes_of, members_of, plain, root_of


class OpenObject:
    """An object of the type `kind` with the `fields` that have come, which `vars` returns.

    `isinstance` takes it for a `kind`. Properties and methods of `kind` work if they only read such fields,
    ``model_dump`` of a model among them.
    """

    __slots__ = (
        *("__dict__", "__kind"),
        *(
            "__pydantic_extra__",
            "__pydantic_fields_set__",
            "__pydantic_private__",
        ),  # read by a model's methods
    )

    def __init__(self, kind: type[Any], fields: Mapping[str, Any]) -> None:
        self.__kind = kind
        self.__dict__.update(fields)
        self.__pydantic_fields_set__ = set(fields)
        self.__pydantic_extra__ = self.__pydantic_private__ = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__kind

    def __getattr__(self, name: str) -> Any:
        kind = self.__kind
        known: Mapping[str, Any] = getattr(kind, "model_fields", None) or kind.__dataclass_fields__
        if name in known:
            raise AttributeError(f"{kind.__name__}.{name} has not come yet.", name=name, obj=self)
        found = inspect.getattr_static(kind, name, None)
        special = name.startswith("__") and isinstance(found, types.FunctionType)
        # A slot, and a method such as __deepcopy__, belong to instances of `kind` alone.
        if found is None or special or isinstance(found, types.MemberDescriptorType):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=self)
        bind = getattr(type(found), "__get__", None)
        return found if bind is None else bind(found, self, kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenObject, (self.__kind, self.__dict__)

    def __eq__(self, other: object) -> bool:
        if type(other) is not OpenObject:
            return NotImplemented
        return self.__kind is other.__kind and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join([f"{name}={value!r}" for name, value in self.__dict__.items()])
        return f"{self.__kind.__name__}({fields})"


def opened(kind: Any, members: Any) -> Any:
    """The value of an open object or array of the type `kind`, of which `members` have come: an `OpenObject`
    for a model or a dataclass, else `members`. Of a union it is the only type that the members with a
    `Literal` type still allow; while they allow several types, it is `members`."""
    kind = plain(kind)
    root = root_of(kind)
    if root is not None:
        return OpenObject(kind, {"root": opened(root, members)})
    if isinstance(members, list):
        return members
    if get_origin(kind) in (Union, types.UnionType):
        possible = [one for one in get_args(kind) if _allows(one, members)]
        return opened(possible[0], members) if len(possible) == 1 else members
    names = attributes_of(kind)
    if names is None:
        return members
    return OpenObject(kind, {names[key]: value for key, value in members.items() if key in names})


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
