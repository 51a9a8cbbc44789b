"""Checks of scripted answers, which no grammar constrains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ramify.constraint import Constraint
from ramify.errors import BackendError, UnsupportedNode


def check_answer(text: str, constraint: Constraint) -> None:
    """Raise `BackendError` unless `constraint` allows `text`."""
    problem = _problem(text, constraint)
    if problem:
        raise BackendError(f"The scripted answer {text!r} breaks its {constraint.kind}: {problem}.")


def _problem(text: str, constraint: Constraint) -> str | None:
    source = constraint.source
    match constraint.kind:
        case "choices":
            return None if text in json.loads(source) else f"it is none of {source}"
        case "regex":
            return None if re.fullmatch(source, text) else f"it does not match {source}"
        case "json_object":
            return _check_object(text)
        case "json_schema":
            return _check_schema(text, json.loads(source))
        case "structural_tag":
            return _check_tag(text, json.loads(source))
    raise UnsupportedNode(f"A scripted backend cannot check a constraint of kind {constraint.kind}.")


def _check_object(text: str) -> str | None:
    try:
        return None if isinstance(json.loads(text), dict) else "it is no object"
    except ValueError as error:
        return str(error)


def _check_schema(text: str, schema: Any) -> str | None:
    """The first problem of a JSON text under a JSON schema; None if it is valid."""
    from ramify.grammar.schema.instance import validate

    try:
        failures = validate(schema, json.loads(text))
    except ValueError as error:
        return str(error)
    return f"{failures[0].message} ({failures[0].schema})" if failures else None


def _check_tag(text: str, tag: Any) -> str | None:
    """The problem of `text` under a structural tag; None if it fits."""
    ends = _ends(text, 0, tag["format"])
    return None if any(end == len(text) for end in ends) else "it does not fit the structural tag"


def _ends(text: str, start: int, form: dict[str, Any]) -> Iterator[int]:
    """Where a text of `form` that begins at `start` may end."""
    kind = form["type"]
    if kind == "const_string":
        if text.startswith(form["value"], start):
            yield start + len(form["value"])
    elif kind == "any_text":
        limits = [at for word in form.get("excludes", ()) if (at := text.find(word, start)) >= 0]
        yield from range(min(limits, default=len(text)), start - 1, -1)
    elif kind == "regex":
        whole = re.compile(form["pattern"])
        yield from (end for end in range(len(text), start - 1, -1) if whole.fullmatch(text, start, end))
    elif kind == "json_schema":
        yield from _json_end(text, start, form["json_schema"])
    elif kind == "sequence":
        yield from _sequence(text, start, form["elements"])
    elif kind == "or":
        for element in form["elements"]:
            yield from _ends(text, start, element)
    elif kind == "tag":
        parts = [_const(form["begin"]), form["content"], _const(form["end"])]
        yield from _sequence(text, start, parts)
    elif kind in ("optional", "plus", "star", "repeat"):
        low, high = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}.get(
            kind, (form.get("min", 0), form.get("max"))
        )
        yield from _repeated(text, start, form["content"], low, high)
    else:
        raise UnsupportedNode(f"A scripted backend cannot check the format {kind} of a structural tag.")


def _const(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def _json_end(text: str, start: int, schema: Any) -> Iterator[int]:
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return
    if _check_schema(text[start:end], schema) is None:
        yield end


def _sequence(text: str, start: int, elements: list[dict[str, Any]]) -> Iterator[int]:
    if not elements:
        yield start
        return
    for end in _ends(text, start, elements[0]):
        yield from _sequence(text, end, elements[1:])


def _repeated(text: str, start: int, content: dict[str, Any], low: int, high: int | None) -> Iterator[int]:
    if low <= 0:
        yield start
    if high is None or high > 0:
        for end in _ends(text, start, content):
            if end > start:
                yield from _repeated(text, end, content, low - 1, None if high is None else high - 1)
