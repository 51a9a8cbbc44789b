"""Every way in which clients of the OpenAI surface ask for a constraint.

``response_format`` is that of OpenAI's chat completions and ``text.format`` that of its Responses API, with
types beyond its own; top-level `regex`, `ebnf`, `json_schema` are SGLang's; ``guided_*`` and
``structured_outputs`` are vLLM's. One constraint a request; every other field is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    return _take_one(fields, lambda fields: _format(fields, "response_format", _TYPES))


def take_text_format(fields: Fields) -> Found | None:
    """The same where the fields are those of the Responses API: ``text.format`` is OpenAI's."""
    return _take_one(fields, _text_format)


def _take_one(fields: Fields, own: Callable[[Fields], Found | None]) -> Found | None:
    takers: tuple[Callable[[Fields], Found | None], ...] = (
        own,
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


def _text_format(fields: Fields) -> Found | None:
    text = fields.take_object("text")
    if text is None:
        return None
    found = _format(text, "format", _TYPES | {"json_schema": _schema_with_options})
    text.refuse_rest({"verbosity": "Ask for it in the instructions."})
    return found


def _format(
    fields: Fields, field: str, types: Mapping[str, Callable[[Fields], Found | None]]
) -> Found | None:
    """The format in `field`, which is one of `types`."""
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


def _wrapped_schema(form: Fields) -> Found | None:
    """Chat completions: ``{"json_schema": {name, schema, strict}}``."""
    return _schema_with_options(form.take_object("json_schema") or Fields({}, form.path("json_schema")))


def _schema_with_options(form: Fields) -> Found | None:
    """``{name, schema, strict}`` and our options beside the schema."""
    path = form.path("schema")
    schema = form.take_text("schema")
    if schema is None:
        raise InvalidRequest(f"{path} is missing.", field=path)
    form.take("name", str)  # for the reader
    # OpenAI's clients send false for "best effort"; what can be enforced always is.
    strict: Strict = form.take("strict", Strict, True)
    whitespace: Whitespace = form.take("whitespace", Whitespace, "natural")
    any_order: bool = form.take("any_order", bool, False)
    form.refuse_rest({"description": "Write it into the prompt or the schema."})
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
