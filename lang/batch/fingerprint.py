"""A readable record of a batch's program, options, backend and model, and the difference between two records.

    LABELS = ("yes", "no")                  values  LABELS: ('yes', 'no')
    class Order(BaseModel): …               code    Order: the class's source
    def shorten(text): …                    code    shorten: its source
    @rm.function
    def classify(s, text): …                code    classify: its source, which uses the three above
    client = Client()                       unknown client: of type Client; changes of it cannot be told

The record covers what the program's functions reach through globals and closures, in all modules of the user.
Objects of installed packages are recorded by name.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import decimal
import dis
import enum
import functools
import hashlib
import inspect
import io
import itertools
import pathlib
import re
import sys
import textwrap
import tokenize
import types
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from ramify.credentials import SECRET, without_credentials
from ramify.lang.backends.base import Backend
from ramify.lang.batch.json_text import valid
from ramify.lang.batch.masking import hidden, masked
from ramify.lang.common.caller import is_users
from ramify.lang.graph.execute import Traced
from ramify.lang.tools.tool import Tool
from ramify.model_info import ModelInfo

NUMBERS = (int, float, complex, type(None))
PLAIN = (str, int, float, bool, bytes, type(None), complex, type(...))
READABLE: tuple[type, ...] = (
    *(enum.Enum, re.Pattern, pathlib.PurePath, decimal.Decimal, uuid.UUID, range),
    *(datetime.date, datetime.time, datetime.timedelta),
)
"""Types whose repr is complete and the same in every process."""
WITHOUT_EFFECT = ("priority",)
"""Options without effect on outputs."""
DEEPEST = 5
"""Number of levels of nested containers and objects that are followed."""
LONGEST_VALUE = 4000
"""Most characters of a value's text. A longer text is cut, and ends in a checksum of the whole text."""
SHOWN = 60
"""Most characters of a line or value in a message."""

Record = dict[str, Any]


class Recorded(Protocol):
    """The attributes of a program from which its record is made."""

    body: Callable[..., Any]
    bound: dict[str, Any]
    arg_names: list[str]
    traced: Traced | None


def record_of(
    program: Recorded,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    backend: object,
    info: ModelInfo | None,
    loras: Mapping[str, str],
) -> Record:
    """The record of `program`: a mapping for each part in `SAID`, and one mapping from names to source code.
    `loras` maps LoRA adapters to their revisions. With `info` None the parts of the model are empty."""
    body = _written(program.body)
    reader = _Reader(body.__module__)
    reader.function(body.__qualname__, body)
    for name, value in program.bound.items():
        if name in program.arg_names:
            reader.value(f"{body.__qualname__}.{name}", value)
    if program.traced is not None:  # compiled: the graph contains the values given then
        reader.values["graph"] = _recorded(msgspec.json.encode(program.traced.graph).decode())
    given = _Reader(body.__module__)
    for name, value in arguments.items():
        given.value(name, value)
    model = {}
    if info is not None:
        model = {"name": valid(info.name), "path": valid(without_credentials(info.path))}
    return {
        "program": {"name": body.__qualname__},
        "backend": _backend(backend),
        "model": {name: valid(value) for name, value in model.items() if value},
        "loras": dict(loras),
        "options": {
            name: _recorded(repr(value))
            for name, value in sorted(options.items())
            if name not in WITHOUT_EFFECT
        },
        "arguments": given.values | given.code | given.names | given.unknown,
        "code": reader.code,
        "values": reader.values,
        "names": reader.names,
        "unknown": reader.unknown,
    }


def _backend(backend: object) -> Record:
    found: Record = {"kind": type(backend).__name__}
    lora = getattr(backend, "lora", "")
    if isinstance(lora, str) and lora:
        found["lora"] = lora
    url = getattr(backend, "base_url", None)
    if isinstance(url, str):
        found["url"] = without_credentials(url)
    inner = getattr(backend, "backend", None)  # a recording wraps another backend
    parts = getattr(backend, "backends", {}) if inner is None else {"backend": inner}  # a router has several
    return found | {name: repr(_backend(part)) for name, part in parts.items()}


def _is_ours(function: Callable[..., Any]) -> bool:
    """Whether `function` was made by Ramify: a program, or a body that runs a graph."""
    module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return str(module).startswith("ramify.")


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function that `function`, made by Ramify, wraps; any other function itself."""
    while _is_ours(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# --- what a program reaches ---------------------------------------------------------------------


class _Reader:
    """A recorder of functions and values, and of all that they reach. Names in the module `home` are recorded
    without the name of the module."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._known: set[int] = set()
        self._recorded: set[int] = set()
        """The id() of each function that was recorded."""
        self._kept: list[object] = []
        """The objects whose id() is in `_known`, kept alive so that no other object gets the same id()."""
        self.code: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.unknown: dict[str, str] = {}

    def _is_new(self, value: object) -> bool:
        new = id(value) not in self._known
        self._known.add(id(value))
        self._kept.append(value)
        return new

    def function(self, name: str, function: types.FunctionType | Callable[..., Any]) -> None:
        if not isinstance(function, types.FunctionType):
            self.unknown[name] = f"of type {type(function).__qualname__}"
            return
        if id(function) in self._recorded:
            return
        self._recorded.add(id(function))
        while name in self.code:  # a wrapper may have the name of the function it wraps
            name += ", wrapped"
        self.code[name] = masked(_source(function))
        for parameter, default in inspect.signature(function).parameters.items():
            if default.default is not inspect.Parameter.empty:
                self.value(f"{name}.{parameter}", default.default)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {}
        for free, cell in cells:
            try:
                closure[free] = cell.cell_contents
            except ValueError:  # a cell that is not bound yet
                continue
        self._chains(_chains(function.__code__), {**function.__globals__, **closure}, function.__module__)

    def _class(self, name: str, kind: type) -> None:
        source = _source(kind)
        self.code[name] = masked(source)
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
        module = sys.modules.get(kind.__module__)
        used = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        self._chains(((one,) for one in used), vars(module) if module else {}, kind.__module__)

    def _chains(self, chains: Iterator[tuple[str, ...]], scope: Mapping[str, Any], module: str) -> None:
        for first, *rest in chains:
            if first not in scope:
                continue  # a builtin, or a name that is not in `scope`
            name, value = first, scope[first]
            place = module
            while isinstance(value, types.ModuleType) and rest:
                place, name = value.__name__, rest.pop(0)
                if not hasattr(value, name):
                    break
                value = getattr(value, name)
            if not isinstance(value, types.ModuleType):
                self.value(name if place == self._home else f"{place}.{name}", value)

    def value(self, name: str, value: Any, depth: int = 0) -> None:
        """Record `value`, which the program reaches as `name`. `depth` is the value's level of nesting."""
        if _is_plain(value):
            self.values[name] = _recorded(_repr(value, name))
        elif depth <= DEEPEST and self._is_new(value):
            try:
                self._object(name, value, depth)
            except Exception:  # an object whose attributes raise, or exist under any name
                self.unknown[name] = f"of type {type(value).__qualname__}"

    def _object(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tool):
            self.values[f"{name}.schema"] = _recorded(repr((value.name, value.description, value.parameters)))
            self.value(f"{name}.function", value.function, depth + 1)
        elif isinstance(value, functools.partial):
            for part, inner in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self.value(f"{name}.{part}", inner, depth + 1)
        elif isinstance(value, types.MethodType):
            self._reached(value.__func__, name)
            self.value(f"{name}.self", value.__self__, depth + 1)
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            self._reached(value, name)
        elif callable(getattr(value, "__wrapped__", None)):  # such as a function with a cache
            self._reached(_written(value) if _is_ours(value) else inspect.unwrap(value), name)
        elif type(value).__module__ in ("typing", "types"):  # such as Literal["a"] or list[Order]
            self.names[name] = _recorded(repr(value))
            for number, part in enumerate(typing.get_args(value)):
                self.value(f"{name}[{number}]", part, depth + 1)
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, part in parts:
                self.value(f"{name}[{key!r}]", part, depth + 1)
        elif isinstance(value, Backend):
            self.values[name] = repr(_backend(value))
        elif dataclasses.is_dataclass(value) or callable(getattr(value, "model_dump", None)):
            self.value(f"type of {name}", type(value), depth + 1)
            self.value(name, msgspec.json.decode(msgspec.json.encode(value, enc_hook=_encoded)))
        else:
            self.unknown[name] = f"of type {type(value).__qualname__}"

    def _reached(self, value: Any, name: str) -> None:
        module = getattr(value, "__module__", None) or "builtins"
        qualname = getattr(value, "__qualname__", name)
        if not is_users(module):
            self.names[name] = f"{module.partition('.')[0]}.{qualname}"
        elif isinstance(value, type):
            self._class(qualname if module == self._home else f"{module}.{qualname}", value)
        else:
            self.function(qualname if module == self._home else f"{module}.{qualname}", value)


def _chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Global and closure names that `code` loads, each with the attributes that directly follow it. Example:
    ``prompts.FEW_SHOT``."""
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(step.argval)
            continue
        if chain:
            yield tuple(chain)
        outer = step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
        chain = [step.argval] if outer else []
    if chain:
        yield tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _chains(constant)


def _source(value: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        schema = getattr(value, "model_json_schema", None)
        if callable(schema):
            return repr(schema())
        code = getattr(value, "__code__", None)
        return "no source" if code is None else f"no source; bytecode {_digest(_bytecode(code).encode())}"


def _bytecode(code: types.CodeType) -> str:
    """Bytecode, names and constants of `code` as text, the same in every process."""
    constants = [_bytecode(one) if isinstance(one, types.CodeType) else _repr(one) for one in code.co_consts]
    return repr((code.co_code, code.co_names, constants))


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, PLAIN) or (isinstance(value, READABLE) and not isinstance(value, type)):
        return True
    if depth > 8 or type(value) not in (list, tuple, set, frozenset, dict):
        return False
    parts = itertools.chain(value, value.values()) if type(value) is dict else value
    return all(_is_plain(part, depth + 1) for part in parts)


def _repr(value: Any, name: str = "") -> str:
    """The repr of `value`, the same in every process. If `name` looks like the name of a secret, a checksum
    of the repr instead."""
    if SECRET.search(name) and not isinstance(value, NUMBERS):
        return hidden(_repr(value))
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(_repr, value)))})"
    if type(value) is dict:
        return "{" + ", ".join(f"{_repr(key)}: {_repr(part, str(key))}" for key, part in value.items()) + "}"
    if type(value) in (list, tuple):
        begin, end = "[]" if type(value) is list else "()"
        return begin + ", ".join(map(_repr, value)) + end
    return repr(value)


def _encoded(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) else type(value).__qualname__


def _recorded(text: str) -> str:
    """`text` for a record: made valid Unicode, with credentials masked, and cut."""
    text = masked(valid(text))
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:LONGEST_VALUE]}… ({len(text)} characters, {_digest(text.encode())})"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# --- the difference of two records --------------------------------------------------------------

SAID = {
    "program": "the program",
    "backend": "the backend's {name}",
    "model": "the model's {name}",
    "loras": "the LoRA adapter {name}",
    "options": "{name}",
    "arguments": "the argument {name}",
    "values": "{name}",
    "names": "{name}",
    "unknown": "{name}",
}


def difference(old: Record, new: Record) -> str | None:
    """First difference between two records as one line; None if the records differ at most in comments and
    layout."""
    for part, said in SAID.items():
        if part == "values":  # after options and arguments; code first, as its change says more
            found = _code_difference(old.get("code", {}), new.get("code", {}), new["program"]["name"])
            if found is not None:
                return found
        before, after = old.get(part, {}), new.get(part, {})
        for name in [*before, *(name for name in after if name not in before)]:
            was, now = before.get(name), after.get(name)
            if part == "loras" and None in (was, now):
                continue  # loaded or unloaded since; a program that needs it would fail
            if was != now:
                return f"{said.format(name=name)} was {_shown(was, now)}, is {_shown(now, was)}"
    return None


def _code_difference(old: Mapping[str, str], new: Mapping[str, str], body: str) -> str | None:
    for name in sorted({**old, **new}, key=lambda name: name != body):
        what = "the body of " if name == body else ""
        if name not in old or name not in new:
            gone = name in old
            return f"{name} is {'not used any more' if gone else 'used, and was not'}"
        if _normal(old[name]) != _normal(new[name]):
            return f"{what}{name} changed: {_line_difference(old[name], new[name])}"
    return None


def _normal(source: str) -> str:
    """`source` without comments, blank lines and formatting."""
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return source


def _line_difference(old: str, new: str) -> str:
    for was, now in itertools.zip_longest(_lines(old), _lines(new)):
        if was is None or now is None or was[1] != now[1]:
            number = (was or now or (0,))[0]
            before, after = (None if line is None else line[2] for line in (was, now))
            if was and now and before == after:  # the difference is in later lines of a long string
                before, after = was[1], now[1]
            return f"line {number} was {_shown(before, after)}, is {_shown(after, before)}"
    return "its layout"  # only where the source does not parse


def _lines(source: str) -> list[tuple[int, str, str]]:
    """(line number, tokens, text) of each line that contains code."""
    texts = source.splitlines()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found: dict[int, list[str]] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in skipped and token.string:
                found.setdefault(token.start[0], []).append(token.string)
    except (tokenize.TokenError, IndentationError):
        found = {number: line.split() for number, line in enumerate(texts, 1) if line.strip()}
    return [(number, " ".join(tokens), texts[number - 1].strip()) for number, tokens in found.items()]


def _shown(text: str | None, other: str | None) -> str:
    """`text`, cut to the part that differs from `other`."""
    if text is None:
        return "not there"
    if len(text) <= SHOWN:
        return text
    same = next((at for at, (a, b) in enumerate(zip(text, other or "", strict=False)) if a != b), 0)
    start = max(min(same - SHOWN // 3, len(text) - SHOWN), 0)
    part = text[start : start + SHOWN].replace("\n", " ")
    return f"{'…' * (start > 0)}{part}{'…' * (start + SHOWN < len(text))}"
