"""Rules for any JSON value, which all grammars of schemas share by name; punctuation between values; rules
for the members of an array or object, one for each state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from ramify.constraint import Whitespace
from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    Call,
    Expression,
    Text,
    alt,
    chars_of,
    optional,
    repeat,
    seq,
    text,
)
from ramify.grammar.rules.rule_set import Rules
from ramify.grammar.schema.values import number_text
from ramify.grammar.schema.values.json_text import COLON, COMMA, QUOTE, free_character, spelled

State = TypeVar("State")

VALUE = Call("json_value")
OBJECT = Call("json_object")
ARRAY = Call("json_array")
STRING = Call("json_string")
NUMBER = Call("json_number")
INTEGER = Call("json_integer")
MEMBER = Call("json_member")
CHARACTERS = Call("json_characters")


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


@lru_cache(maxsize=16)
def json_rules(whitespace: Whitespace) -> dict[str, Expression]:
    """The rules, by name, for values of any type, with the white space of the option `whitespace`."""
    marks = punctuation(whitespace)
    member = seq(STRING, marks.colon, VALUE)
    return {
        VALUE.rule: alt(OBJECT, ARRAY, STRING, NUMBER, Text("true"), Text("false"), Text("null")),
        OBJECT.rule: enclosed("{", any_number(MEMBER, marks), "}", marks),
        ARRAY.rule: enclosed("[", any_number(VALUE, marks), "]", marks),
        MEMBER.rule: member,
        STRING.rule: seq(QUOTE, CHARACTERS, QUOTE),
        CHARACTERS.rule: repeat(free_character(), 0, None),
        NUMBER.rule: number_text.any_number(),
        INTEGER.rule: number_text.any_integer(),
    }


def any_number(item: Expression, marks: Punctuation) -> Expression:
    """One or more texts of `item`, separated by commas."""
    return seq(item, repeat(seq(marks.comma, item), 0, None))


def enclosed(
    opening: str, content: Expression, closing: str, marks: Punctuation, *, empty: bool = True
) -> Expression:
    """`content` between `opening` and `closing`. `content` must not match the empty text; with `empty`, it
    may be absent."""
    filled = NOTHING if content == NOTHING else seq(marks.opening, content, marks.closing)
    if not empty:
        return seq(Text(opening), filled, Text(closing))
    if marks.empty == marks.opening == marks.closing and filled != NOTHING:
        # The white space is the same with and without content. It is read once, to avoid ambiguity.
        return seq(Text(opening), marks.opening, optional(seq(content, marks.closing)), Text(closing))
    return seq(Text(opening), alt(filled, marks.empty), Text(closing))


def by_states(
    rules: Rules,
    marks: Punctuation,
    start: State,
    steps: Callable[[State], Iterator[tuple[Expression, State]]],
    may_end: Callable[[State], bool],
    check_count: Callable[[int], None] = lambda states: None,
) -> Expression:
    """One or more items or members separated by commas, with one rule for each state between two of them.
    `steps` returns the ways to write the next item or member from a state: the text, and the next state. No
    step leads back to `start`. `check_count` may refuse a number of states."""
    calls = {start: rules.reserve()}
    queue: list[State] = []

    def texts(state: State) -> list[Expression]:
        found = []
        for step, after in steps(state):
            if after not in calls:
                check_count(len(calls))
                calls[after] = rules.reserve()
                queue.append(after)
            found.append(seq(step, calls[after]))
        return found

    content = alt(*texts(start))
    for state in queue:
        ending = [EMPTY] if may_end(state) else []
        rules.set_body(calls[state], alt(*(seq(marks.comma, step) for step in texts(state)), *ending))
    return content
