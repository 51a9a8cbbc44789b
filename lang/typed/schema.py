"""Constraints for Python types, and parsers of the generated text.

Plain `str`, `int`, `float`, `bool`, and `Literal` or `Enum` of strings or integers are generated as plain
text. Values of all other types (pydantic models, dataclasses, TypedDict, lists, dicts, optional and annotated
types) are generated as JSON under the type's schema and validated by pydantic.
"""

from __future__ import annotations

import datetime
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

import msgspec

from ramify.constraint import Constraint, choices, json_schema, regex, with_definitions
from ramify.errors import InvalidConstraint
from ramify.json_text import finite, read_json
from ramify.lang.typed.adapters import adapter_of, members_in_order
from ramify.schema_bundle import finder

END = (" ", "\n")
"""Stop strings after a number, because a base model continues with prose and not with an end-of-sequence
token."""

# 18 digits fit a signed 64-bit integer. Without a bound, the grammar would never force a number to end.
INT = r"-?(0|[1-9][0-9]{0,17})[ \n]?"
# The largest double is 1.8e308, and 18 digits with the exponent 289 are less than 1e307.
FLOAT = r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?([0-9]{1,2}|[01][0-9]{2}|2[0-8][0-9]))?[ \n]?"

# SGLang's dtypes. The variable holds the generated text.
DTYPES: dict[Any, tuple[str, tuple[str, ...]]] = {
    int: (r"[-+]?[0-9]+[ \n]*", END),
    float: (r"[-+]?[0-9]*\.?[0-9]+[ \n]*", END),
    bool: (r"(True|False)", ()),
    str: (r'"[\w\d\s]*"', ()),
}
DTYPE_NAMES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "string": str}


@dataclass(frozen=True)
class Schema:
    """The constraint for a type (None for any text), the stop strings, and the parser of the generated text.
    The parser raises ValueError for invalid text."""

    constraint: Constraint | None
    parse: Callable[[str], Any]
    stop: tuple[str, ...] = ()


def schema_of(kind: Any) -> Schema:
    """The `Schema` for `kind`, which is a Python type, or a JSON schema as a mapping or as JSON text. Raises
    `InvalidConstraint` for a type without a JSON schema."""
    if isinstance(kind, Mapping | str):
        return Schema(json_schema(kind), read_json)
    today = datetime.date.today()
    try:
        return _schema_of_type(kind, today, members_in_order(kind))
    except TypeError:  # unhashable, as an annotation that holds a list may be: not cached
        return _schema_of_type.__wrapped__(kind, today, "")


def with_json_options(schema: Schema, options: Mapping[str, Any]) -> Schema:
    """`schema` with those `options` of JSON output that are not None: whitespace, any_order, strict,
    definitions (`constraint.json_schema`).

    With ``strict="validate"`` the parser of the returned schema also refuses text that violates the JSON
    schema. Raises `InvalidConstraint` for an invalid option, and if the output of `schema` is not JSON.
    """
    given = {field: value for field, value in options.items() if value is not None}
    if not given:
        return schema
    if schema.constraint is None:
        field = next(iter(given))
        raise InvalidConstraint(
            f"{field} is for JSON, and this output is plain text.",
            field=field,
            remedy="Give a json_schema=, or a schema= whose values are written as JSON.",
        )
    definitions = given.pop("definitions", None)
    constraint = msgspec.structs.replace(schema.constraint, **given).check()
    if definitions is not None:
        if constraint.kind != "json_schema":
            raise InvalidConstraint(
                f"definitions is for JSON schemas, not for a constraint of kind {constraint.kind}.",
                field="definitions",
            )
        constraint = with_definitions(constraint, finder(definitions))
    parse = functools.partial(_validated, constraint.source, schema.parse)
    checked = constraint.kind == "json_schema" and constraint.strict == "validate"
    return replace(schema, constraint=constraint, parse=parse if checked else schema.parse)


def _validated(source: str, parse: Callable[[str], Any], text: str) -> Any:
    from ramify.grammar.schema.document.json_values import parse_json
    from ramify.grammar.schema.instance import validate_text

    for failure in validate_text(parse_json(source), text):
        raise ValueError(str(failure))
    return parse(text)


def dtype_schema(dtype: Any) -> Schema:
    """The schema for SGLang's ``dtype``, whose values are the generated text."""
    dtype = DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    found = DTYPES.get(dtype)
    if found is None:
        raise InvalidConstraint(
            f"dtype is {dtype!r}; it must be int, float, bool or str.",
            field="dtype",
            remedy="For other types use schema=.",
        )
    pattern, stop = found
    return Schema(regex(pattern), str, stop)


@functools.lru_cache(maxsize=1024)
def _schema_of_type(kind: Any, today: datetime.date, order: str) -> Schema:
    """The schema of a type. `today` is part of the cache's key because the dates that a PastDate allows
    depend on it."""
    if kind is str:
        return Schema(None, str)
    if kind is bool:
        return _one_of({"true": True, "false": False})
    if kind is int:
        return Schema(regex(INT), int, END)
    if kind is float:
        return Schema(regex(FLOAT), finite, END)
    values = _named_values(kind)
    if values:
        return _one_of(values)
    return _json_of(kind)


def _named_values(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is Literal:
        pairs = [(value, value) for value in get_args(kind)]
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        pairs = [(member.value, member) for member in kind]
    else:
        return {}
    if any(isinstance(raw, bool) or not isinstance(raw, str | int) for raw, _ in pairs):
        return {}
    values = {raw.value if isinstance(raw, enum.Enum) else str(raw): value for raw, value in pairs}
    return values if len(values) == len(pairs) and "" not in values else {}


def _one_of(values: Mapping[str, Any]) -> Schema:
    def parse(text: str) -> Any:
        if text not in values:
            raise ValueError(f"{text!r} is none of {', '.join(map(repr, values))}.")
        return values[text]

    return Schema(choices(list(values)), parse)


def _json_of(kind: Any) -> Schema:
    import pydantic
    import pydantic_core

    from ramify.lang.typed.type_schema import TypeSchema

    if inspect.isfunction(kind):  # pydantic would call it with what the model wrote
        raise InvalidConstraint(f"{kind!r} is a function, not a type.", field="schema")
    try:
        adapter = adapter_of(kind)
        source = adapter.json_schema(schema_generator=TypeSchema)
    except InvalidConstraint as error:
        error.message = f"{kind!r} cannot be generated. {error.message}"
        raise
    except (
        *(pydantic.errors.PydanticUserError, pydantic_core.SchemaError, RecursionError),
        *(ImportError, TypeError),  # an extra of pydantic's is missing; a part of an annotation is no type
    ) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InvalidConstraint(f"{kind!r} has no JSON schema: {reason}.", field="schema") from error
    _close(source)
    return Schema(json_schema(source), adapter.validate_json)


_SCHEMA_MAPS = ("$defs", "properties", "patternProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains")


def _close(schema: Any) -> None:
    """Set ``additionalProperties: false`` in every object schema that has ``properties`` but not the keyword
    ``additionalProperties``. By default JSON Schema allows unnamed properties, but pydantic drops them."""
    if not isinstance(schema, dict):
        return
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    below = [schema.get(keyword) for keyword in _SCHEMAS]
    for keyword in _SCHEMA_LISTS:
        below += schema.get(keyword, [])
    for keyword in _SCHEMA_MAPS:
        below += schema.get(keyword, {}).values()
    for child in below:
        _close(child)


def convert(value: Any, kind: Any) -> Any:
    """`value`, which is no JSON text, validated and converted to the type `kind` by pydantic."""
    return adapter_of(kind).validate_python(value)
