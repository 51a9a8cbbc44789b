"""Command-line flags from a configuration dataclass: names, types, choices, defaults and help."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ramify.errors import InvalidRequest

C = TypeVar("C")

MODEL_HELP = (
    "a name, a folder, a .gguf file, or a repository on the hub: org/repo, org/repo:FORMAT for one of its "
    "GGUF files, such as org/repo:Q4_K_M, and org/repo@revision"
)


def add_config_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    config: type[Any],
    names: Container[str] | None = None,
) -> None:
    """Add a flag for each field of the dataclass `config`: ``page_size: int`` becomes ``--page-size N``.

    `names`: the fields that get a flag; None for all.

    The docstring of a field is the help text of its flag. A flag that is not given sets nothing in the
    namespace, so that defaults come only from the dataclass.
    """
    hints = typing.get_type_hints(config)
    docs = dict(field_docs(config))
    for field in dataclasses.fields(config):
        if names is not None and field.name not in names:
            continue
        default = f"(default: {field.default})"
        if field.default is None or field.default is dataclasses.MISSING:
            default = ""
        several = hints[field.name] == Mapping[str, str]
        parser.add_argument(
            f"--{(field.name.removesuffix('s') if several else field.name).replace('_', '-')}",
            dest=field.name,
            default=argparse.SUPPRESS,
            help=f"{docs.get(field.name, '')} {default}".strip().replace("%", "%%"),
            **_how_to_parse(hints[field.name]),
        )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add a positional argument for the model, which may be given in place of ``--model``."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=MODEL_HELP)


def given_fields(options: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """The fields of `config` that were given on the command line, by name."""
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(config)
        if hasattr(options, field.name)
    }


def configured(make: Callable[..., C], fields: Mapping[str, Any]) -> C:
    """Return `make(**fields)`, a configuration or an engine.

    Raises `InvalidRequest` in place of ValueError.
    """
    try:
        return make(**fields)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def field_docs(config: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, docstring) for a dataclass and its bases. The docstring is the string below the field."""
    for kind in reversed(config.__mro__):
        if not dataclasses.is_dataclass(kind):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    yield name, " ".join(text.split())


class _Pairs(argparse.Action):
    """An action for a repeatable flag: it collects the values, each name=path, in a dict."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name, equals, path = values.partition("=")
        if not (name and equals and path):
            raise argparse.ArgumentError(self, f"{values!r} must be name=path")
        given = getattr(namespace, self.dest, {})
        if name in given:
            raise argparse.ArgumentError(self, f"{name!r} is given twice")
        setattr(namespace, self.dest, given | {name: path})


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def _how_to_parse(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if hint == Mapping[str, Any]:
        return {"type": _json_object, "metavar": "JSON"}
    if typing.get_origin(hint) is Mapping:
        return {"action": _Pairs, "metavar": "NAME=PATH"}
    if typing.get_origin(hint) is Sequence:
        return {"action": "append", "metavar": "NAME"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}
