"""Punctuation between JSON values: commas, colons and brackets, with the white space around them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ramify.constraint import Whitespace
from ramify.grammar.rules.expression import EMPTY, Expression, Text, chars_of, repeat, seq, text
from ramify.grammar.schema.values.json_text import COLON, COMMA, spelled


class Punctuation(NamedTuple):
    """The punctuation of JSON, with the white space next to each mark."""

    comma: Expression
    colon: Expression
    opening: Expression
    """White space after the opening bracket or brace of a non-empty array or object."""
    closing: Expression
    """White space before the closing bracket or brace of a non-empty array or object."""
    empty: Expression
    """White space between the brackets or braces of an empty array or object."""
    around: Expression
    """White space before and after the whole text."""


def punctuation(whitespace: Whitespace) -> Punctuation:
    """The punctuation for a white space option of `ramify.constraint`.

    "natural" has a space after commas and colons, "compact" has none, and a number n allows up to n
    characters of white space wherever JSON does.
    """
    if whitespace == "natural":
        return Punctuation(Text(COMMA), Text(COLON), EMPTY, EMPTY, EMPTY, EMPTY)
    if whitespace == "compact" or whitespace == 0:
        return Punctuation(Text(","), Text(":"), EMPTY, EMPTY, EMPTY, EMPTY)
    assert isinstance(whitespace, int)
    gap = repeat(chars_of(" \n\t"), 0, whitespace)
    return Punctuation(seq(gap, Text(","), gap), seq(gap, Text(":"), gap), gap, gap, gap, gap)


def value_text(value: Any, marks: Punctuation) -> Expression:
    """The texts of one JSON value. They differ only in white space."""
    match value:
        case dict() if value:
            members = [
                seq(text(spelled(name)), marks.colon, value_text(item, marks)) for name, item in value.items()
            ]
            return _enclosed("{", members, "}", marks)
        case list() if value:
            return _enclosed("[", [value_text(item, marks) for item in value], "]", marks)
        case dict() | list():
            opening, closing = "{}" if isinstance(value, dict) else "[]"
            return seq(Text(opening), marks.empty, Text(closing))
    return text(spelled(value))


def _enclosed(opening: str, parts: list[Expression], closing: str, marks: Punctuation) -> Expression:
    between = [piece for part in parts for piece in (marks.comma, part)][1:]
    return seq(Text(opening), marks.opening, *between, marks.closing, Text(closing))
