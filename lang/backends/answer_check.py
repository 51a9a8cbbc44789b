"""Checks of scripted answers against their constraints, in place of constrained decoding."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ramify.constraint import Constraint
from ramify.errors import UnsupportedNode
from ramify.json_text import read_json
from ramify.lang.tools.forms import TaggedCalls
from ramify.spelling import nearest

if TYPE_CHECKING:
    from ramify.grammar.matcher import Grammar


MAX_MATCH_S = 0.5
"""Most seconds that matching one text against a regular expression may take."""


class Problem(NamedTuple):
    """The fault of an answer, worded to end a sentence, and a remedy, such as the most similar allowed
    answer."""

    text: str
    remedy: str | None = None


def problem_of(
    text: str, constraint: Constraint, form: TaggedCalls | None = None, opening: str = ""
) -> Problem | None:
    """First fault of `text` under `constraint`; None if `text` is allowed. `form` is the format of the step's
    tool calls. `opening` is the beginning of the first call if the prompt ends in it; else empty."""
    source = constraint.source
    found: str | None
    match constraint.kind:
        case "choices":
            choices = json.loads(source)
            return None if text in choices else Problem(f"it is none of {source}", nearest(text, choices))
        case "regex":
            found = None if _fits(source, text) else f"it does not match {source}"
        case "json_object":
            found = _check_object(text)
        case "json_schema":
            found = _check_schema(text, json.loads(source))
        case "structural_tag":
            tag = json.loads(source)["format"]
            if any(end == len(text) for end in _ends(text, 0, tag)):
                return None
            return _check_calls(opening + text, tag, form) if form else Problem("it does not fit the tag")
        case "ebnf" | "lark":
            found = _check_grammar(text, constraint)
    return Problem(found) if found else None


def _check_object(text: str) -> str | None:
    try:
        return None if isinstance(read_json(text), dict) else "it is no object"
    except ValueError as error:
        return str(error)


def _check_schema(text: str, schema: Any) -> str | None:
    from ramify.grammar.schema.instance import validate_text

    failures = validate_text(schema, text)
    if not failures:
        return None
    first = failures[0]
    return f"{first.message} ({first.schema})" if first.schema else first.message


def _check_grammar(text: str, constraint: Constraint) -> str | None:
    matcher = _compiled(constraint).matcher()
    for i, char in enumerate(text):
        if not matcher.accept_bytes(char.encode()):
            return f"the grammar does not allow {char!r} after {text[:i]!r}"
    return None if matcher.complete else "the grammar does not allow it to end here"


@functools.lru_cache(maxsize=32)
def _compiled(constraint: Constraint, stop: tuple[str, ...] = ()) -> Grammar:
    from ramify.grammar.compile.policy import compile_constraint
    from ramify.grammar.compile.stops import check_stops
    from ramify.grammar.engine.load import load_grammar
    from ramify.grammar.vocabulary import Vocabulary

    vocabulary = Vocabulary((b"", *(bytes([byte]) for byte in range(256))), (0,))
    found = compile_constraint(constraint, vocabulary)
    check_stops(constraint, found, vocabulary, stop)
    return load_grammar(*found, vocabulary)


def refuse_stops(constraint: Constraint, stop: tuple[str, ...]) -> None:
    """Raise `InvalidRequest` for a stop string that may cut an answer that `constraint` allows."""
    _compiled(constraint, stop)


def _check_calls(text: str, tag: Any, form: TaggedCalls) -> Problem:
    schemas = {begin.removesuffix(form.form.call[1]): schema for begin, schema in _tags(tag)}
    try:
        _, calls = form.read(text)
    except ValueError as error:
        return Problem(str(error).rstrip("."))
    for name, arguments in calls:
        if name not in schemas:
            known = ", ".join(map(repr, schemas))
            return Problem(f"it calls {name!r}, which is none of the tools {known}", nearest(name, schemas))
        if found := _check_schema(arguments, schemas[name]):
            return Problem(f"the arguments of {name}: {found}")
    return Problem(f"it makes {len(calls)} calls, which do not fit the turn")


def _tags(tag: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tag, list):
        for one in tag:
            yield from _tags(one)
    elif isinstance(tag, dict) and tag.get("type") == "tag":
        yield tag["begin"], tag["content"]["json_schema"]
    elif isinstance(tag, dict):
        yield from _tags(list(tag.values()))


def _ends(text: str, start: int, form: dict[str, Any]) -> Iterator[int]:
    """Yield the positions at which a match of the structural tag format `form` that begins at `start` may
    end."""
    kind = form["type"]
    if kind == "const_string":
        if text.startswith(form["value"], start):
            yield start + len(form["value"])
    elif kind == "any_text":
        limits = [at for word in form.get("excludes", ()) if (at := text.find(word, start)) >= 0]
        yield from range(min(limits, default=len(text)), start - 1, -1)
    elif kind == "regex":
        ends = range(len(text), start - 1, -1)
        yield from (end for end in ends if _fits(form["pattern"], text, start, end))
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


def _fits(pattern: str, text: str, start: int = 0, end: int | None = None) -> bool:
    """Whether `text` from `start` to `end` matches `pattern`. Raises `UnsupportedNode` after
    `MAX_MATCH_S`."""
    import regex

    try:
        return regex.compile(pattern).fullmatch(text, start, end, timeout=MAX_MATCH_S) is not None
    except TimeoutError:
        raise UnsupportedNode(
            f"A scripted backend gave up matching {pattern!r} after {MAX_MATCH_S} s.",
            remedy="Write the expression without nested repetitions.",
        ) from None


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
