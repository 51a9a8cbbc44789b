"""The rules for any JSON value, which all grammars of schemas share by name."""

from __future__ import annotations

from functools import lru_cache

from ramify.constraint import Whitespace
from ramify.grammar.rules.expression import NOTHING, Call, Expression, Text, alt, optional, repeat, seq
from ramify.grammar.schema.values import number_text
from ramify.grammar.schema.values.json_text import QUOTE, free_character
from ramify.grammar.schema.values.punctuation import Punctuation, punctuation

VALUE = Call("json_value")
OBJECT = Call("json_object")
ARRAY = Call("json_array")
STRING = Call("json_string")
NUMBER = Call("json_number")
INTEGER = Call("json_integer")
MEMBER = Call("json_member")
CHARACTERS = Call("json_characters")


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
