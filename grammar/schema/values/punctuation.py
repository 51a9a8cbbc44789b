"""What stands between JSON values: commas, colons and brackets, with the white space around them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ramify.constraint import Whitespace
from ramify.grammar.rules.expression import EMPTY, Expression, Text, chars, repeat, seq, text
from ramify.grammar.schema.values.json_text import COLON, COMMA, spelled


class Punctuation(NamedTuple):
    """What stands before, between and after values, and the fixed text of commas and colons."""

    comma: Expression
    colon: Expression
    opening: Expression
    """After an opening bracket or brace that something follows."""
    closing: Expression
    """Before a closing one that something precedes."""
    empty: Expression
    """Between the two when they hold nothing."""
    around: Expression
    """Before and after the whole."""


def punctuation(whitespace: Whitespace) -> Punctuation:
    """Of "natural" white space, a space after commas and colons; of "compact", none; of a number, up to
    so many characters of white space wherever JSON allows them."""
    if whitespace == "natural":
        return Punctuation(Text(COMMA), Text(COLON), EMPTY, EMPTY, EMPTY, EMPTY)
    if whitespace == "compact" or whitespace == 0:
        return Punctuation(Text(","), Text(":"), EMPTY, EMPTY, EMPTY, EMPTY)
    assert isinstance(whitespace, int)
    gap = repeat(chars((ord(char), ord(char)) for char in " \n\t"), 0, whitespace)
    return Punctuation(seq(gap, Text(","), gap), seq(gap, Text(":"), gap), gap, gap, gap, gap)


def value_text(value: Any, marks: Punctuation) -> Expression:
    """The texts of one JSON value."""
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
