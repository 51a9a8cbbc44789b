"""Validate a text against a structural tag, by backtracking over the possible ends of each format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

Check = Callable[[str, str], str | None]
"""(JSON text, JSON text of a schema) → a problem, or None."""


def check_tag(text: str, source: str, check_schema: Check) -> str | None:
    """The problem of `text` under the structural tag `source`; None if it fits.

    Raises `NotImplementedError` for a format that is not known here.
    """
    tag = json.loads(source)
    ends = _ends(text, 0, tag["format"], check_schema)
    return None if any(end == len(text) for end in ends) else "it does not fit the structural tag"


def _ends(text: str, start: int, form: dict[str, Any], check: Check) -> Iterator[int]:
    """The positions at which a text of `form` that begins at `start` may end."""
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
        yield from _json_end(text, start, json.dumps(form["json_schema"]), check)
    elif kind == "sequence":
        yield from _sequence(text, start, form["elements"], check)
    elif kind == "or":
        for element in form["elements"]:
            yield from _ends(text, start, element, check)
    elif kind == "tag":
        parts = [_const(form["begin"]), form["content"], _const(form["end"])]
        yield from _sequence(text, start, parts, check)
    elif kind in ("optional", "plus", "star", "repeat"):
        low, high = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}.get(
            kind, (form.get("min", 0), form.get("max"))
        )
        yield from _repeated(text, start, form["content"], check, low, high)
    else:
        raise NotImplementedError(kind)


def _const(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def _json_end(text: str, start: int, schema: str, check: Check) -> Iterator[int]:
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return
    if check(text[start:end], schema) is None:
        yield end


def _sequence(text: str, start: int, elements: list[dict[str, Any]], check: Check) -> Iterator[int]:
    if not elements:
        yield start
        return
    for end in _ends(text, start, elements[0], check):
        yield from _sequence(text, end, elements[1:], check)


def _repeated(
    text: str, start: int, content: dict[str, Any], check: Check, low: int, high: int | None
) -> Iterator[int]:
    if low <= 0:
        yield start
    if high is None or high > 0:
        for end in _ends(text, start, content, check):
            if end > start:
                yield from _repeated(text, end, content, check, low - 1, None if high is None else high - 1)
