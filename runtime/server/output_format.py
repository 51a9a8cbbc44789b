"""Every way in which clients of the OpenAI surface ask for a constraint.

``response_format`` is OpenAI's, with types beyond its own; top-level `regex`, `ebnf`, `json_schema` are
SGLang's; ``guided_*`` and ``structured_outputs`` are vLLM's. One constraint a request; every other field
is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ramify import constraint
from ramify.constraint import Constraint, Strict, Whitespace
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.params import make_constraint

Found = tuple[str, Constraint]
"""The field that a constraint was in, and the constraint."""


def take_output_format(fields: Fields) -> Found | None:
    """The constraint that the fields ask for, and the field that it was in.

    Raises `InvalidRequest` where two are given, `InvalidConstraint` for one that cannot be meant.
    """
    takers: tuple[Callable[[Fields], Found | None], ...] = (
        _response_format,
        lambda fields: _schema(fields, "json_schema"),
        lambda fields: _text(fields, "regex", constraint.regex),
        lambda fields: _text(fields, "ebnf", constraint.ebnf),
        lambda fields: _structural_tag(fields, "structural_tag"),
        lambda fields: _schema(fields, "guided_json"),
        lambda fields: _text(fields, "guided_regex", constraint.regex),
        lambda fields: _choices(fields, "guided_choice"),
        lambda fields: _grammar(fields, "guided_grammar"),
        _structured_outputs,
    )
    found = [one for take in takers if (one := take(fields)) is not None]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0][0]} and {found[1][0]} are both given; give one constraint.", field=found[1][0]
        )
    return found[0] if found else None


def _response_format(fields: Fields) -> Found | None:
    form = fields.take_object("response_format")
    if form is None:
        return None
    kind: str | None = form.take("type", str)
    taker = _TYPES.get(kind or "")
    if taker is None:
        path = form.path("type")
        known = ", ".join(sorted(_TYPES))
        raise UnsupportedField(f"{path} is {kind!r}; it must be one of {known}.", field=path)
    found = taker(form)
    form.refuse_rest()
    if found is None and kind != "text":
        path = form.path(str(kind))
        raise InvalidRequest(f"{path} is missing.", field=path)
    return found


def _wrapped_schema(form: Fields) -> Found | None:
    """OpenAI's ``{"json_schema": {name, schema, strict}}``, and our options beside the schema."""
    wrapper = form.take_object("json_schema")
    schema = wrapper.take_text("schema") if wrapper is not None else None
    if wrapper is None or schema is None:
        path = form.path("json_schema.schema")
        raise InvalidRequest(f"{path} is missing.", field=path)
    wrapper.take("name", str)  # for the reader
    # OpenAI's clients send false for "best effort"; what can be enforced always is.
    strict: Strict = wrapper.take("strict", Strict, True)
    whitespace: Whitespace = wrapper.take("whitespace", Whitespace, "natural")
    any_order: bool = wrapper.take("any_order", bool, False)
    wrapper.refuse_rest({"description": "Write it into the prompt or the schema."})
    path = wrapper.path("schema")
    return path, make_constraint(
        path,
        lambda source: constraint.json_schema(
            source, strict=strict, whitespace=whitespace, any_order=any_order
        ),
        schema,
    )


def _json_object(form: Fields) -> Found | None:
    whitespace: Whitespace = form.take("whitespace", Whitespace, "natural")
    return form.path("type"), make_constraint(
        form.path("whitespace"), lambda size: constraint.json_object(whitespace=size), whitespace
    )


def _tag_in_place(form: Fields) -> Found | None:
    """The tag's own fields stand beside ``type``, as XGrammar, SGLang and vLLM write them."""
    parts = {field: form.take_text(field) for field in ("format", "structures", "triggers")}
    given = {field: msgspec.Raw(text.encode()) for field, text in parts.items() if text is not None}
    if not given:
        return None
    source = msgspec.json.encode(({"type": "structural_tag"} if "format" in given else {}) | given).decode()
    path = form.path("format" if "format" in given else "structures")
    return path, make_constraint(path, constraint.structural_tag, source)


_TYPES: dict[str, Callable[[Fields], Found | None]] = {
    "text": lambda form: None,
    "json_object": _json_object,
    "json_schema": _wrapped_schema,
    "regex": lambda form: _text(form, "regex", constraint.regex) or _text(form, "pattern", constraint.regex),
    "ebnf": lambda form: _text(form, "ebnf", constraint.ebnf) or _text(form, "grammar", constraint.ebnf),
    "lark": lambda form: _text(form, "lark", constraint.lark) or _text(form, "grammar", constraint.lark),
    "choice": lambda form: _choices(form, "choice"),
    "structural_tag": _tag_in_place,
}


def _structured_outputs(fields: Fields) -> Found | None:
    """vLLM's object of alternatives."""
    form = fields.take_object("structured_outputs")
    if form is None:
        return None
    compact: bool = form.take("disable_any_whitespace", bool, False)
    found = [
        one
        for one in (
            _schema(form, "json", whitespace="compact" if compact else "natural"),
            _text(form, "regex", constraint.regex),
            _choices(form, "choice"),
            _grammar(form, "grammar"),
            (form.path("json_object"), constraint.json_object())
            if form.take("json_object", bool, False)
            else None,
            _structural_tag(form, "structural_tag"),
        )
        if one is not None
    ]
    form.refuse_rest(
        {
            "whitespace_pattern": "Use response_format with a json_schema and its whitespace.",
            "disable_additional_properties": "Write additionalProperties: false into the schema.",
            "disable_fallback": "",
            "backend": "",
        }
    )
    if len(found) != 1:
        path = fields.path("structured_outputs")
        raise InvalidRequest(f"{path} must hold exactly one constraint; it holds {len(found)}.", field=path)
    return found[0]


# --- one field ----------------------------------------------------------------------------------------


def _text(fields: Fields, field: str, make: Callable[[str], Constraint]) -> Found | None:
    value: str | None = fields.take(field, str)
    return None if value is None else (fields.path(field), make_constraint(fields.path(field), make, value))


def _choices(fields: Fields, field: str) -> Found | None:
    value: list[str] | None = fields.take(field, list[str])
    path = fields.path(field)
    return None if value is None else (path, make_constraint(path, constraint.choices, value))


def _grammar(fields: Fields, field: str) -> Found | None:
    """vLLM takes GBNF and Lark in one field and tells them apart by the sign of definition."""
    value: str | None = fields.take(field, str)
    if value is None:
        return None
    make = constraint.ebnf if "::=" in value else constraint.lark
    return fields.path(field), make_constraint(fields.path(field), make, value)


def _schema(fields: Fields, field: str, whitespace: Whitespace = "natural") -> Found | None:
    """A schema as JSON, or as a string that holds JSON."""
    text = _json_text(fields, field)
    if text is None:
        return None
    path = fields.path(field)
    return path, make_constraint(
        path, lambda source: constraint.json_schema(source, whitespace=whitespace), text
    )


def _structural_tag(fields: Fields, field: str) -> Found | None:
    text = _json_text(fields, field)
    path = fields.path(field)
    return None if text is None else (path, make_constraint(path, constraint.structural_tag, text))


def _json_text(fields: Fields, field: str) -> str | None:
    text = fields.take_text(field)
    if text is not None and text.lstrip().startswith('"'):
        text = msgspec.json.decode(text, type=str)
    return text
