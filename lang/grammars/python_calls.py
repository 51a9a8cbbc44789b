"""A grammar for calls of Python functions with literals as arguments, and a reader that runs nothing.

def weather(city: str, days: int = 1): …

call0         ::= "weather(" call0-first ")"
call0-first   ::= str call0-given1 | call0-named0    # positional first argument, or keyword arguments only
call0-given1  ::= ", " int call0-given2 | call0-more1
call0-given2  ::= ""
call0-named0  ::= "city=" str call0-more1
call0-more1   ::= (", days=" int)? call0-more2       # keyword arguments from the second parameter on
call0-more2   ::= ""
"""

from __future__ import annotations

import ast
import collections.abc
import enum
import inspect
import json
import keyword
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint
from ramify.lang.common.caller import caller_names
from ramify.lang.grammars.notation import either, grammar, listed, quoted, texts
from ramify.lang.tools.tool import Tool, ToolCall
from ramify.lang.typed.adapters import members_of
from ramify.lang.typed.schema import convert

Functions = (
    Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any] | inspect.Signature]
)

SCALARS: dict[Any, str] = {
    int: "int",
    float: "float",
    str: "str",
    bool: "bool",
    None: "none",
    type(None): "none",
}
COMMON = {
    "int": '"-"? ("0" | [1-9] [0-9]{0,17})',
    "float": 'int ("." [0-9]{1,17})? ("e" [-+]? [0-9]{1,2})?',
    "str": r"""["] ([^"\\\x00-\x1f] | escape)* ["] | ['] ([^'\\\x00-\x1f] | escape)* [']""",
    "escape": r"""[\\] ["'\\nrt]""",
    "bool": '"True" | "False"',
    "none": '"None"',
    "any0": "float | str | bool | none",
}

ANY_DEPTH = 3
"""Most nested lists and dicts in a value of any type. Python itself reads up to 200 nested brackets."""

for _depth in range(ANY_DEPTH):
    COMMON[f"any{_depth + 1}"] = (
        f'any0 | "[" ({listed(f"any{_depth}")})? "]" | "{{" ({listed(f"""str ": " any{_depth}""")})? "}}"'
    )


def python_call(functions: Functions) -> Constraint:
    """One call of one of `functions`, as a Python expression: ``weather("Paris", days=3)``.

    The arguments are literals of the annotated types: first positional arguments, then keyword arguments,
    both in the order of the parameters. The output can be parsed with ``ast.parse``, and the arguments in the
    output fit the function's signature. `read_call` returns the arguments.

    Args:
        functions: A function or tool (`tool`), a list of these, or a mapping from names to functions or
            signatures. Parameters may be annotated with int, float, str, bool, None, Literal, Enum (written
            as its value), list, tuple, set, dict, Optional and unions of these, and with dataclasses,
            TypedDicts and pydantic models, which are written as dicts. A parameter without an annotation, or
            of type Any, takes any literal. Nothing is written for ``*args`` and ``**kwargs``.

    Raises `InvalidConstraint` for a function that cannot be called by name with literals, or a type without
    literals.
    """
    rules = {"root": "", **COMMON}
    signatures = _signatures(functions)
    for i, (name, signature) in enumerate(signatures.items()):
        rules |= _call(f"call{i}", name, signature)
    return grammar(rules | {"root": either(*(f"call{i}" for i in range(len(signatures))))})


def read_call(text: str, functions: Functions) -> ToolCall:
    """The name and the arguments of the call in `text`. The arguments are converted to the types of their
    parameters. Nothing is run.

    Raises ValueError if `text` is not a call of one of `functions` with literals that fit its parameters.
    """
    signatures = _signatures(functions)
    try:
        called = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no Python expression: {error}.") from None
    name = ast.unparse(called.func) if isinstance(called, ast.Call) else ""
    if not isinstance(called, ast.Call) or name not in signatures:
        raise ValueError(f"{text!r} is no call of {', '.join(signatures)}.")
    named = {str(one.arg): ast.literal_eval(one.value) for one in called.keywords}
    try:
        bound = signatures[name].bind(*map(ast.literal_eval, called.args), **named)
    except TypeError as error:
        raise ValueError(f"{text!r} does not fit {name}: {error}.") from None
    parameters = signatures[name].parameters
    return ToolCall(name, {key: _converted(value, parameters[key]) for key, value in bound.arguments.items()})


def _converted(value: Any, parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return value
    try:
        return convert(value, parameter.annotation)
    except ValueError as error:
        raise ValueError(f"{value!r} cannot be {parameter.name}: {error}") from error


# --- functions ------------------------------------------------------------------------------------


def _signatures(functions: Functions) -> dict[str, inspect.Signature]:
    if callable(functions) or isinstance(functions, Tool):
        functions = [functions]
    if isinstance(functions, str) or not isinstance(functions, collections.abc.Iterable):
        raise InvalidConstraint(
            f"functions is {functions!r:.80}; it must be functions.",
            field="functions",
            remedy="Give a function, a list of functions, or a dict of functions by name.",
        )
    pairs: list[tuple[Any, Any]]
    if isinstance(functions, Mapping):
        pairs = [*functions.items()]
    else:
        pairs = [
            (one.name if isinstance(one, Tool) else getattr(one, "__name__", None), one) for one in functions
        ]
    found = {}
    for name, function in pairs:
        if not isinstance(name, str):
            raise InvalidConstraint(
                f"{function!r:.80} has no name to be called by.",
                field="functions",
                remedy="Give a dict of functions by name.",
            )
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            raise InvalidConstraint(f"{name!r} cannot be called by that name in Python.", field="functions")
        if name in found:
            raise InvalidConstraint(f"Two functions are named {name!r}.", field="functions")
        found[name] = function if isinstance(function, inspect.Signature) else _signature(name, function)
    if not found:
        raise InvalidConstraint("There are no functions.", field="functions")
    return found


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        found = inspect.signature(function, eval_str=True, locals=caller_names())
    except (NameError, TypeError, ValueError) as error:
        raise InvalidConstraint(
            f"The parameters of {name} cannot be read: {error}.", field="functions"
        ) from None
    for parameter in found.parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise _refused(f"{name}({parameter.name})", "it cannot be given by name")
    if isinstance(function, Tool) and set(function.parameters.get("properties", ())) - {*_named(found)}:
        raise _refused(name, "the tool has a JSON schema, and no Python parameters", "Use call_tools.")
    return found


def _named(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    parameters = signature.parameters.items()
    return {name: one for name, one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}


class _Member(NamedTuple):
    name: str
    value: str
    required: bool
    positional: bool = False


def _call(rule: str, name: str, signature: inspect.Signature) -> dict[str, str]:
    values = _Values(f"{rule}-type")
    members = [
        _Member(
            f"{one.name}=",
            values.of(Any if one.annotation is one.empty else one.annotation, f"{name}({one.name})"),
            required=one.default is one.empty,
            positional=one.kind is one.POSITIONAL_OR_KEYWORD,
        )
        for one in _named(signature).values()
    ]
    found = values.rules | _members(rule, members) | {f"{rule}-given{len(members)}": '""'}
    for i, one in enumerate(members):
        by_place = f"{one.value} {rule}-given{i + 1}" if one.positional else ""
        if i == 0:
            found[f"{rule}-first"] = either(by_place, f"{rule}-named0")
        else:
            found[f"{rule}-given{i}"] = either(by_place and f'", " {by_place}', f"{rule}-more{i}")
    first = f"{rule}-first" if members else ""
    return found | {rule: f'{quoted(name + "(")} {first} ")"'}


def _members(rule: str, members: Sequence[_Member]) -> dict[str, str]:
    """The rules for `members`, written in order with their names. ``named0`` is the rule for all members.
    ``more3`` is the rule for the members from the fourth on, each after a comma."""
    found = {f"{rule}-named{len(members)}": '""', f"{rule}-more{len(members)}": '""'}
    for i, one in enumerate(members):
        written = f"{quoted(one.name)} {one.value}"
        later = f"{rule}-more{i + 1}"
        found[f"{rule}-named{i}"] = either(
            f"{written} {later}", "" if one.required else f"{rule}-named{i + 1}"
        )
        found[f"{rule}-more{i}"] = f'(", " {written}){"" if one.required else "?"} {later}'
    return found


# --- values ---------------------------------------------------------------------------------------


class _Values:
    """A writer of GBNF expressions for literals of types. `rules` collects the rules of the types that have
    members."""

    def __init__(self, prefix: str) -> None:
        self.rules: dict[str, str] = {}
        self._prefix = prefix
        self._known: dict[Any, str] = {}

    def of(self, kind: Any, where: str) -> str:
        kind = _plain(kind, where)
        if kind in (Any, object):
            return f"any{ANY_DEPTH}"
        if kind in SCALARS:
            return SCALARS[kind]
        origin, args = get_origin(kind) or kind, get_args(kind)
        if origin is Literal:
            return self._constants(args, where)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return self._constants([one.value for one in kind], where)
        if origin in (typing.Union, types.UnionType):
            return either(*(self.of(one, where) for one in args))
        if origin is tuple:
            return self._tuple(args or (Any, ...), where)
        if origin in _LISTS:
            return f'"[" ({listed(self.of((*args, Any)[0], where))})? "]"'
        if origin in _SETS:
            return f'("{{" {listed(self._hashable((*args, str)[0], where))} "}}" | "set()")'
        if origin in _DICTS:
            key, value = args or (str, Any)
            return f'"{{" ({listed(f"""{self._hashable(key, where)} ": " {self.of(value, where)}""")})? "}}"'
        return self._object(kind, where)

    def _constants(self, values: Sequence[Any], where: str) -> str:
        written = []
        for value in values:
            if type(value) not in (str, int, bool, type(None)):
                raise _refused(where, f"the value {value!r} is no literal")
            written.append(repr(value))
            if isinstance(value, str) and repr(value)[1:-1] == value and '"' not in value:
                written.append(f'"{value}"')
        return texts(written)

    def _tuple(self, args: Sequence[Any], where: str) -> str:
        if len(args) == 2 and args[1] is ...:
            item = self.of(args[0], where)
            return f'"(" ({item} ("," | (", " {item})+))? ")"'
        items = ' ", " '.join(self.of(one, where) for one in args)
        return f'"(" {items} {quoted(",)" if len(args) == 1 else ")")}'

    def _hashable(self, kind: Any, where: str) -> str:
        plain = _plain(kind, where)
        if (
            plain in SCALARS
            or get_origin(plain) is Literal
            or (isinstance(plain, type) and issubclass(plain, enum.Enum))
        ):
            return self.of(plain, where)
        raise _refused(where, f"{kind!r} is no type of keys, or of items of a set, here")

    def _object(self, kind: Any, where: str) -> str:
        if kind in self._known:
            if self._known[kind] not in self.rules:
                raise _refused(where, f"{kind!r} contains itself")
            return self._known[kind]
        rule = self._known[kind] = f"{self._prefix}{len(self._known)}"
        found = members_of(kind)
        if found is None:
            raise _refused(
                where, f"{kind!r} has no literals", "Take a str or an int, and make the value of it."
            )
        members = [
            _Member(f"{json.dumps(name, ensure_ascii=False)}: ", self.of(of, f"{where}.{name}"), required)
            for name, (of, required) in found.items()
        ]
        self.rules |= _members(rule, members)
        self.rules[rule] = f'"{{" {rule}-named0 "}}"'
        return rule


_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.MutableSequence)
_SETS = (set, frozenset, collections.abc.Set)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def _plain(kind: Any, where: str) -> Any:
    """`kind` without NewType, type aliases, and the texts in an `Annotated`. Raises `InvalidConstraint` for
    an `Annotated` that restricts the values."""
    while True:
        if isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
            for note in notes:
                if not isinstance(note, str) and getattr(note, "metadata", note):
                    raise _refused(
                        where,
                        f"the condition {note!r} is not enforced",
                        "Leave it out, and check it after read_call.",
                    )
        elif hasattr(kind, "__value__"):
            kind = kind.__value__
        else:
            return kind


def _refused(where: str, why: str, remedy: str | None = None) -> InvalidConstraint:
    return InvalidConstraint(f"{where}: {why}.", field="functions", remedy=remedy)
