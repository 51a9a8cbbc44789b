"""Constraints on the output, in the fields in which clients of OpenAI's API, SGLang and vLLM send them.

A request has at most one constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ramify import constraint
from ramify.constraint import Constraint, Strict, Whitespace
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.params import (
    BESIDE,
    JSON_TEXT,
    FieldConstraint,
    Makers,
    make_constraint,
    only_constraint,
    take_constraints,
    take_definitions,
)
from ramify.runtime.server.tables.openai import SCHEMA, STRUCTURED_OUTPUTS
from ramify.runtime.server.tables.responses import TEXT
from ramify.schema_bundle import check_size

Taker = Callable[[Fields], "FieldConstraint | None"]


def take_output_format(fields: Fields) -> FieldConstraint | None:
    """Take the constraint of a chat completion or completion, with its field; None if there is none.

    Raises `InvalidRequest` if several are given, and `InvalidConstraint` for an invalid one.
    """
    return _take_only(fields, _format(fields, "response_format", _TYPES))


def take_text_format(fields: Fields) -> FieldConstraint | None:
    """Take the constraint of a request of the Responses API, with its field; None if there is none."""
    text, own = fields.take_object("text"), None
    if text is not None:
        own = _format(text, "format", _TYPES | {"json_schema": _schema_with_options})
        text.finish(TEXT)
    return _take_only(fields, own)


def take_json_format(fields: Fields, field: str) -> FieldConstraint | None:
    """Take the constraint in the object `field`, ``{type: json_schema, schema}``; None if there is none."""
    return _format(fields, field, {"json_schema": _schema_with_options})


_FIELDS: Makers = {
    "json_schema": (JSON_TEXT, constraint.json_schema),
    "regex": (str, constraint.regex),
    "ebnf": (str, constraint.ebnf),
    "structural_tag": (JSON_TEXT, constraint.structural_tag),
    "guided_json": (JSON_TEXT, constraint.json_schema),
    "guided_regex": (str, constraint.regex),
    "guided_choice": (list[str], constraint.choices),
    "guided_grammar": (str, constraint.grammar),
}
"""Top-level fields that each hold a constraint."""


def _take_only(fields: Fields, own: FieldConstraint | None) -> FieldConstraint | None:
    found = (own, *take_constraints(fields, _FIELDS), _structured_outputs(fields))
    return only_constraint([one for one in found if one is not None])


def _format(fields: Fields, field: str, types: Mapping[str, Taker]) -> FieldConstraint | None:
    """The constraint in the object `field`. The object's ``type`` must be a key of `types`."""
    form = fields.take_object(field)
    if form is None:
        return None
    kind: str | None = form.take("type", str)
    taker = types.get(kind or "")
    if taker is None:
        path = form.path("type")
        known = ", ".join(sorted(types))
        raise UnsupportedField(f"{path} is {kind!r}; it must be one of {known}.", field=path)
    found = taker(form)
    form.refuse_rest()
    if found is None and kind != "text":
        path = form.path(str(kind))
        raise InvalidRequest(f"{path} is missing.", field=path)
    return found


def _wrapped_schema(form: Fields) -> FieldConstraint | None:
    """The constraint in the form of chat completions: ``{"json_schema": {name, schema, strict}}``."""
    for field in BESIDE:
        if form.given(field):
            raise UnsupportedField(
                f"{form.path(field)} is not a field of this request.",
                field=form.path(field),
                remedy=f"Write it beside the schema: {form.path('json_schema')}.{field}.",
            )
    return _schema_with_options(form.take_object("json_schema") or Fields({}, form.path("json_schema")))


def _schema_with_options(form: Fields) -> FieldConstraint | None:
    """The constraint in ``{name, schema, strict}``, with Ramify's options beside the schema."""
    path = form.path("schema")
    schema = form.take_text("schema")
    if schema is None:
        raise InvalidRequest(f"{path} is missing.", field=path)
    form.take("name", str)  # has no effect on the output
    # OpenAI's clients send false for "best effort". Here every keyword that can be enforced is enforced.
    strict: Strict = form.take("strict", Strict, True)
    whitespace: Whitespace = form.take("whitespace", Whitespace, "natural")
    any_order: bool = form.take("any_order", bool, False)
    definitions = take_definitions(form)
    if definitions is not None:  # checked before the schemas are parsed
        check_size(path, len(schema.encode()) + sum(len(text.encode()) for text in definitions.values()))
    form.finish(SCHEMA)
    return path, make_constraint(
        path,
        lambda source: constraint.json_schema(
            source, strict=strict, whitespace=whitespace, any_order=any_order, definitions=definitions
        ),
        schema,
    )


def _json_object(form: Fields) -> FieldConstraint | None:
    whitespace: Whitespace = form.take("whitespace", Whitespace, "natural")
    return form.path("type"), make_constraint(
        form.path("whitespace"), lambda size: constraint.json_object(whitespace=size), whitespace
    )


def _tag_in_place(form: Fields) -> FieldConstraint | None:
    """The structural tag with its fields beside ``type``, as in requests for XGrammar, SGLang and vLLM."""
    parts = {field: form.take_text(field) for field in ("format", "structures", "triggers")}
    given = {field: msgspec.Raw(text.encode()) for field, text in parts.items() if text is not None}
    if not given:
        return None
    source = msgspec.json.encode(({"type": "structural_tag"} if "format" in given else {}) | given).decode()
    path = form.path("format" if "format" in given else "structures")
    return path, make_constraint(path, constraint.structural_tag, source)


def _source(make: Callable[[Any], Constraint], *names: str, kind: Any = str) -> Taker:
    return lambda form: only_constraint(take_constraints(form, dict.fromkeys(names, (kind, make))))


_TYPES: dict[str, Taker] = {
    "text": lambda form: None,
    "json_object": _json_object,
    "json_schema": _wrapped_schema,
    "regex": _source(constraint.regex, "regex", "pattern"),
    "ebnf": _source(constraint.ebnf, "ebnf", "grammar"),
    "lark": _source(constraint.lark, "lark", "grammar"),
    "choice": _source(constraint.choices, "choice", kind=list[str]),
    "structural_tag": _tag_in_place,
}


def _structured_outputs(fields: Fields) -> FieldConstraint | None:
    """The constraint in a field of vLLM's object ``structured_outputs``; None if there is none."""
    form = fields.take_object("structured_outputs")
    if form is None:
        return None
    whitespace: Whitespace = "compact" if form.take("disable_any_whitespace", bool, False) else "natural"
    makers: Makers = {
        "json": (JSON_TEXT, lambda text: constraint.json_schema(text, whitespace=whitespace)),
        "regex": (str, constraint.regex),
        "choice": (list[str], constraint.choices),
        "grammar": (str, constraint.grammar),
        "structural_tag": (JSON_TEXT, constraint.structural_tag),
    }
    found = take_constraints(form, makers)
    if form.take("json_object", bool, False):
        found.append((form.path("json_object"), constraint.json_object()))
    form.finish(STRUCTURED_OUTPUTS)
    path = fields.path("structured_outputs")
    if not found and whitespace == "compact":
        raise InvalidRequest(f"{path} holds no constraint.", field=path)
    if len(found) > 1:
        raise InvalidRequest(f"{path} must hold one constraint; it holds {len(found)}.", field=path)
    return found[0] if found else None
