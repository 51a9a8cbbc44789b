"""Command-line flags from a configuration dataclass: names, types, choices, defaults and help."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ramify.errors import InvalidRequest
from ramify.runtime.config import SEVERAL_MODELS

C = TypeVar("C")

MODEL_HELP = (
    "A name, a folder, a .gguf file, or a repository on the hub: org/repo, org/repo:FORMAT for one of its "
    "GGUF files, such as org/repo:Q4_K_M, and org/repo@revision."
)


GROUPS = {
    "model": (
        *("model", "model_impl", "load_format", "dtype", "quantization", "exact_activations"),
        *("context_length", "rope_scaling", "loras", "served_model_name", "sampling_defaults", "calibration"),
    ),
    "several models": SEVERAL_MODELS,
    "memory": (
        *("kv_memory_gb", "num_pages", "page_size", "kv_cache_dtype", "prefix_cache", "memory_fraction"),
        "max_pinned_share",
        *("state_memory_gb", "num_states", "packed_cache_gb", "cold_dir", "cold_gb", "host_kv_gb"),
    ),
    "limits": (
        *("max_running", "max_waiting", "chunk_tokens", "max_output_tokens", "grammar_timeout_s"),
        *("grammar_memory_gb", "max_lease_s", "batch_gb", "drain_s"),
    ),
    "network and access": (
        *("host", "port", "api_key", "api_key_file", "keys", "insecure", "allowed_hosts", "cors"),
        *("open_metrics", "live_texts", "lora_loading"),
    ),
    "the server's answers": ("strict_fields", "incremental_streaming_output", "store", "batch_dir"),
    "scheduling": ("policy", "itl_target_ms", "overlap", "deterministic", "seed"),
    "speculation": ("speculation", "draft_model"),
    "constrained outputs": ("grammar_backend", "jump_forward", "schemas", "special_tokens_in_messages"),
    "processors and replicas": (
        *("device", "threads", "tensor_parallel", "replicas", "prefill_replicas"),
        *("cpus_per_replica", "gpus_per_replica", "requests_per_replica"),
    ),
}
"""Heading → fields whose flags are below it, in this order. All other flags are below `ADVANCED`."""
ADVANCED = "advanced"


def add_config_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    config: type[Any],
    names: Container[str] | None = None,
    heading: str = "{}",
    others: Sequence[type[Any]] = (),
) -> None:
    """Add a flag for each field of the dataclass `config`: ``page_size: int`` becomes ``--page-size N``.

    `names`: the fields that get a flag; None for all. `heading`: the heading of each of the `GROUPS`, with {}
    for its name; a `parser` that is a group gets all flags itself. `others`: dataclasses whose fields are
    flags of the same command, which a help text names as such.

    The docstring of a field is the help text of its flag. A flag that is not given sets nothing in the
    namespace, so that defaults come only from the dataclass. `configs` of the namespace has (config, names of
    the fields with flags) of each call.
    """
    hints = typing.get_type_hints(config)
    known = {name: hint for one in (*others, config) for name, hint in typing.get_type_hints(one).items()}
    docs = dict(field_docs(config))
    fields = {
        field.name: field for field in dataclasses.fields(config) if names is None or field.name in names
    }
    grouped = {heading: [name for name in group if name in fields] for heading, group in GROUPS.items()}
    parser.set_defaults(configs=(*(parser.get_default("configs") or ()), (config, tuple(fields))))
    listed = [name for group in grouped.values() for name in group]
    grouped[ADVANCED] = [name for name in fields if name not in listed]
    for group, members in grouped.items():
        if not members:
            continue
        flags = parser
        if isinstance(parser, argparse.ArgumentParser):
            flags = parser.add_argument_group(heading.format(group))
        for name in members:
            flags.add_argument(
                flag_of(name, hints[name]),
                dest=name,
                default=argparse.SUPPRESS,
                help=_help(fields[name], docs.get(name, ""), known).replace("%", "%%"),
                **_how_to_parse(hints[name]),
            )


def flag_of(name: str, hint: Any) -> str:
    """The flag of a field. The flag of a mapping of texts is given once for each entry: --lora for loras."""
    return f"--{(name.removesuffix('s') if hint == Mapping[str, str] else name).replace('_', '-')}"


def _help(field: dataclasses.Field[Any], doc: str, hints: Mapping[str, Any]) -> str:
    """The docstring `doc` of a field for somebody at a shell: names of other fields become flags, and None
    becomes the default."""

    def flag(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return flag_of(name, hints[name]) if name in hints and name != field.name else found[0]

    text = re.sub(r"`(\w+)`|\b([a-z]+(?:_[a-z]+)+)\b", flag, doc)
    text = re.sub(r"\bNone(?=[:,])", "Default", text)
    if field.default is True:
        return f"{text} (default: on)"
    shown = field.default not in (None, False, "", (), dataclasses.MISSING)
    return f"{text} (default: {field.default})" if shown else text


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
        (kind,) = typing.get_args(hint)
        if typing.get_origin(kind) is typing.Literal:
            return {"action": "append", "choices": typing.get_args(kind)}
        return {"action": "append", "metavar": "NAME"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}
