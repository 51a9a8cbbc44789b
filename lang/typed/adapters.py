"""pydantic's adapters of Python types, and the members of object types."""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
import typing
from collections.abc import Mapping
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    get_args,
    get_origin,
)

if TYPE_CHECKING:
    import pydantic
    from pydantic.fields import FieldInfo


def adapter_of(kind: Any) -> pydantic.TypeAdapter[Any]:
    """The adapter of a type. Raises pydantic's errors for types that pydantic does not support."""
    try:
        return _adapter_of(kind, members_in_order(kind))
    except TypeError:  # unhashable, as an annotation that holds a list may be: not cached
        return _adapter_of.__wrapped__(kind, "")


def members_in_order(kind: Any) -> str:
    """Part of a cache's key beside `kind`. ``A | B`` equals ``B | A``, but of the members that fit a value
    equally well pydantic takes the first, and a schema lists them in order."""
    return repr(kind) if get_args(kind) else ""


@functools.lru_cache(maxsize=1024)
def _adapter_of(kind: Any, order: str) -> pydantic.TypeAdapter[Any]:
    import pydantic

    return pydantic.TypeAdapter(modern(kind))


def modern(kind: Any) -> Any:
    """`kind` with every `typing.TypedDict` in it, at any depth, replaced by a `typing_extensions.TypedDict`,
    because before Python 3.12 pydantic does not support `typing.TypedDict`.

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

    fields = {
        name: (Required if required else NotRequired)[modern(hint)]
        for name, (hint, required) in (members_of(kind) or {}).items()
    }
    make: Any = typing_extensions.TypedDict  # mypy takes only literal names
    remade = make(kind.__name__, fields)
    remade.__doc__ = kind.__doc__
    return remade


def members_of(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """Name in JSON → (type, whether the member is required), for a pydantic model, dataclass or TypedDict.
    None for types without fixed members. Raises NameError for an annotation that cannot be evaluated."""
    # Not `typing.is_typeddict`, which does not know the TypedDict of typing_extensions.
    if (required := getattr(class_of(kind), "__required_keys__", None)) is not None:
        return {name: _qualified(hint, name in required) for name, hint in _hints(kind).items()}
    fields = fields_of(kind)
    if fields is None:
        return None
    return {name: (_annotated(info), info.is_required()) for name, (_, info) in fields.items()}


def fields_of(kind: Any) -> dict[str, tuple[str, FieldInfo]] | None:
    """Name in JSON → (name of the attribute, pydantic's description of the field), for a pydantic model or
    dataclass; None for other types. Raises NameError for an annotation that cannot be evaluated."""
    infos = getattr(kind, "model_fields", None)
    if not isinstance(infos, Mapping):
        if not dataclasses.is_dataclass(class_of(kind)):
            return None
        infos = _dataclass_fields(kind)
    return {_json_name(name, info): (name, info) for name, info in infos.items()}


@functools.lru_cache(maxsize=1024)
def _dataclass_fields(kind: Any) -> dict[str, FieldInfo]:
    from pydantic.fields import FieldInfo

    hints = _hints(kind)
    fields = [one for one in dataclasses.fields(class_of(kind)) if one.init]
    defaults = [one.default if isinstance(one.default, FieldInfo) else one for one in fields]
    return {
        one.name: FieldInfo.from_annotated_attribute(hints[one.name], default)
        for one, default in zip(fields, defaults, strict=True)
    }


def class_of(kind: Any) -> Any:
    """The class of a type: `kind` itself, or that of a generic type with its arguments. None for others."""
    found = get_origin(kind) or kind
    return found if isinstance(found, type) else None


def _hints(kind: Any) -> dict[str, Any]:
    """The annotations of a class, with the arguments of a generic type in place of its type variables."""
    hints, found = typing.get_type_hints(class_of(kind), include_extras=True), get_args(kind)
    given = dict(zip(getattr(class_of(kind), "__parameters__", ()), found, strict=False))
    return {name: _substituted(hint, given) for name, hint in hints.items()} if given else hints


def _substituted(hint: Any, given: Mapping[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return given.get(hint, hint)
    open_ones = getattr(hint, "__parameters__", ())
    return hint[tuple(given.get(one, one) for one in open_ones)] if open_ones else hint


def has_extras(kind: Any) -> bool:
    """Whether the model or dataclass `kind` keeps the members that are none of its fields."""
    config = getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None) or {}
    return config.get("extra") == "allow"


def plain(kind: Any) -> Any:
    """The type `kind` without aliases and annotations around it."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif hasattr(kind, "__value__"):
            kind = kind.__value__
        else:
            return kind


def root_of(kind: Any) -> Any:
    """The type in a pydantic root model; None for other types."""
    return kind.model_fields["root"].annotation if getattr(kind, "__pydantic_root_model__", False) else None


def _qualified(hint: Any, required: bool) -> tuple[Any, bool]:
    # `__required_keys__` ignores NotRequired in annotations that are strings; the evaluated hint has it.
    if get_origin(hint) in (Required, NotRequired):
        return get_args(hint)[0], get_origin(hint) is Required
    return hint, required


def _annotated(info: FieldInfo) -> Any:
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def _infos(kind: Any) -> dict[str, tuple[Any, Any]]:
    """Name of the attribute → (annotation, pydantic's FieldInfo), for the fields of a dataclass that are in
    its JSON."""
    from pydantic.fields import FieldInfo

    found: dict[str, tuple[Any, Any]] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        if one.init:
            default: Any = one.default if isinstance(one.default, FieldInfo) else one
            found[one.name] = hints[one.name], FieldInfo.from_annotated_attribute(hints[one.name], default)
    return found


def _json_name(name: str, info: FieldInfo) -> str:
    """The name in pydantic's JSON schema: of several aliases the first that is no path."""
    aliases = getattr(info.validation_alias, "choices", [info.validation_alias])
    return next((one for one in aliases if isinstance(one, str)), name)
