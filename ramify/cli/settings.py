"""Options of a command from a file and from the environment, beside its flags.

Flags win over variables, and variables over the file::

    ramify.toml       page-size = 32         --config ramify.toml, or RAMIFY_CONFIG
    environment       RAMIFY_PAGE_SIZE=64
    command line      --page-size 128        128 is used

The names are those of the flags, or of the fields of the configuration: `page-size`, `page_size`,
`RAMIFY_PAGE_SIZE`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ramify.cli.flags import ADVANCED, GROUPS, configured, flag_of, given_fields
from ramify.credentials import KEY_VARIABLE, is_secret
from ramify.errors import InvalidRequest, RamifyError, UnsupportedField
from ramify.option_values import from_text, from_value
from ramify.spelling import nearest

PREFIX = "RAMIFY_"
FILE_VARIABLE = "RAMIFY_CONFIG"
OTHER_VARIABLES = {
    FILE_VARIABLE: "the file of --config",
    "RAMIFY_HOME": "the folder of all caches",
    KEY_VARIABLE: "the API key of a server, for clients",
}
"""Variable that is no option's → its meaning."""
_LINKS = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?=|_PORT_\d+_(TCP|UDP)(_\w+)?=|_PORT=(tcp|udp)://")
"""Pattern in VARIABLE=text of the variables that Kubernetes and Docker set for a service with the name ramify
or ramify-…: RAMIFY_PORT=tcp://10.0.0.1:80, RAMIFY_SERVICE_HOST=10.0.0.1."""
STRICT = ("serve", "deploy")
"""Commands that refuse options of a file that they do not have. Others read the engine's part of a server's
file."""

Found = dict[str, tuple[Any, str]]
"""Name of a field → (its value, the place where it is given)."""


def add_settings_flags(command: argparse.ArgumentParser) -> None:
    """Add --config, --print-config and --show-secrets to a command that has flags of configurations."""
    group = command.add_argument_group("configuration")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="A TOML file of options, by the names of the flags. Flags win over variables of the environment "
        "(RAMIFY_PAGE_SIZE for --page-size), and variables over the file.",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="Print all options as such a file, with the place where each is given, and exit.",
    )
    group.add_argument("--show-secrets", action="store_true", help="Print keys with --print-config, too.")


def fill(options: argparse.Namespace, command: str) -> None:
    """Set the options of `ramify COMMAND` that no flag gives: by the environment, then by the file.

    `options.sources` gets the place of each option that is given: name of the field → text. Raises
    `UnsupportedField` for an unknown name in the file or the environment, `InvalidRequest` for a value of
    another type, and for a file that cannot be read.
    """
    hints = {name: hint for part in options.configs for name, hint in _hints(part).items()}
    options.sources = {name: flag_of(name, hints[name]) for name in hints if hasattr(options, name)}
    path = options.config or os.environ.get(FILE_VARIABLE)
    for found in (_from_environment(hints), {} if path is None else _from_file(path, hints, command)):
        for name, (value, place) in found.items():
            if name not in options.sources:
                setattr(options, name, value)
                options.sources[name] = place


def place_of(error: RamifyError, options: argparse.Namespace) -> str:
    """A sentence that names the file or the variable which gives the option that `error` is about; "" for a
    flag, and for other errors."""
    sources: dict[str, str] = getattr(options, "sources", {})
    name = error.field if error.field in sources else str(error).partition(" ")[0]
    place = sources.get(name or "", "--")
    return "" if place.startswith("--") else f" ({name} is from {place}.)"


def print_config(options: argparse.Namespace) -> None:
    """Print all options as TOML. Raises `InvalidRequest` for values that the command would refuse."""
    for config, names in options.configs:
        given = {name: one for name, one in given_fields(options, config).items() if name in names}
        _check_server(configured(config, given))
    print(*_toml(options), sep="\n")


def _check_server(config: Any) -> None:
    """Raise `InvalidRequest` for what a server finds wrong before it looks for its models."""
    from ramify.runtime.config import ServerConfig

    if isinstance(config, ServerConfig):
        from ramify.runtime.models.names import keep_alive_s
        from ramify.runtime.server.keys.tenants import Keys

        Keys(config)
        if config.keep_alive is not None:
            keep_alive_s(config.keep_alive)


def _hints(part: tuple[type[Any], tuple[str, ...]]) -> dict[str, Any]:
    hints = typing.get_type_hints(part[0])
    return {name: hints[name] for name in part[1]}


def _names(hints: Mapping[str, Any]) -> dict[str, str]:
    """Name of an option as in files, with _ → its field. loras has two: lora is its flag's."""
    flags = {flag_of(name, hint)[2:].replace("-", "_"): name for name, hint in hints.items()}
    return flags | {name: name for name in hints}


def _check_known(name: str, place: str) -> None:
    """Raise `UnsupportedField` unless `ramify serve` or `ramify deploy` has the option: no command has
    others."""
    from ramify.ray.options import ClusterConfig
    from ramify.runtime.config import ELSEWHERE, ServerConfig

    known = _names(typing.get_type_hints(ClusterConfig) | typing.get_type_hints(ServerConfig))
    if name not in known:
        remedy = nearest(name, known, ELSEWHERE)
        raise UnsupportedField(f"{place}: there is no option {name}.", field=name, remedy=remedy)


def _from_environment(hints: Mapping[str, Any]) -> Found:
    variables = {
        variable: text
        for variable, text in os.environ.items()
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES
        if _LINKS.search(f"{variable}={text}") is None
    }
    if not variables:
        return {}
    mine = _names(hints)
    found: Found = {}
    for variable, text in variables.items():
        name = variable.removeprefix(PREFIX).lower()
        if name not in mine:
            _check_known(name, variable)
        else:
            _put(found, from_text, hints[mine[name]], text, mine[name], variable)
    return found


def _from_file(path: str, hints: Mapping[str, Any], command: str) -> Found:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        values = tomllib.loads(text)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", field="config") from None
    except ValueError as error:  # TOML, or UTF-8
        raise InvalidRequest(f"{path} is no TOML file: {error}.", field="config") from None
    mine = _names(hints)
    found: Found = {}
    for spelled, value in values.items():
        name, place = spelled.replace("-", "_"), f"{path}{_line_of(spelled, text)}"
        if name in mine:
            _put(found, from_value, hints[mine[name]], value, mine[name], place)
            continue
        _check_known(name, place)
        if command in STRICT:
            raise UnsupportedField(f"{place}: {name} is no option of `ramify {command}`.", field=name)
    return found


def _put(found: Found, read: Callable[..., Any], hint: Any, given: Any, name: str, place: str) -> None:
    if name in found:
        raise InvalidRequest(f"{name} is given twice: in {found[name][1]} and in {place}.", field=name)
    try:
        found[name] = read(hint, given, name), place
    except InvalidRequest as error:
        error.message = f"{place}: {error.message}"
        raise


def _line_of(spelled: str, text: str) -> str:
    """The line of the key or table `spelled` in a TOML file, as text to append: ", line 3". Empty if the file
    spells it in another way, with escapes."""
    found = re.search(rf"""^[ \t[]*(["']?){re.escape(spelled)}\1[ \t]*[\].=]""", text, re.MULTILINE)
    return f", line {text.count(chr(10), 0, found.start()) + 1}" if found else ""


def _toml(options: argparse.Namespace) -> Iterator[str]:
    """The lines of a file that gives all options the values that they have."""
    fields = {
        field.name: field
        for config, names in options.configs
        for field in dataclasses.fields(config)
        if field.name in names
    }
    listed = [name for group in GROUPS.values() for name in group]
    groups = {**GROUPS, ADVANCED: tuple(name for name in fields if name not in listed)}
    for heading, members in groups.items():
        here = [name for name in members if name in fields]
        if here:
            yield f"# {heading}"
        for name in here:
            field = fields[name]
            default = field.default
            if default is dataclasses.MISSING:
                assert field.default_factory is not dataclasses.MISSING
                default = field.default_factory()
            value = getattr(options, name, default)
            place = options.sources.get(name, "default")
            if value is None:
                yield f"# {name}: unset  # {place}"
            elif is_secret(name) and not options.show_secrets:
                yield f"# {name}: hidden; --show-secrets prints it  # {place}"
            else:
                yield f"{name} = {_toml_value(value)}  # {place}"


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():  # TOML's escapes are JSON's; it takes no raw DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            inside = ", ".join(
                f"{_toml_value(str(key))} = {_toml_value(one)}"
                for key, one in value.items()
                if one is not None
            )
            return f"{{{inside}}}"
        case list() | tuple():
            return f"[{', '.join(map(_toml_value, value))}]"
        case _:
            return str(value)
