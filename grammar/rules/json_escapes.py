"""Rules of texts as rules of JSON strings: each character becomes the way in which JSON writes it.

    "a" [\\n"]       becomes    "a" ("\\\\n" | "\\\\\\"")

Each text has one spelling, that of Python's ``json.dumps(…, ensure_ascii=False)``: a quote, a backslash and
control characters are escaped, with two characters where JSON has such an escape; all others are raw.
"""

from __future__ import annotations

import json

from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import (
    Accepted,
    Chars,
    Expression,
    MemberMark,
    ObjectEnd,
    Text,
    UniqueItem,
    alt,
    chars,
    complement,
    intersection,
    ranges_of,
    rebuilt,
    text,
)

_ESCAPED = [chr(point) for point in range(0x20)] + ['"', "\\"]
_RAW = complement(ranges_of(_ESCAPED))


def json_escaped(expression: Expression) -> Expression:
    """The escaped texts of `expression`, without the quotes around them. Calls remain: the rules that they
    name are to be replaced as well.

    Raises `InvalidConstraint` for the parts of a JSON schema that are automata or depend on earlier text.
    """
    match expression:
        case Text(literal):
            return text(json.dumps(literal, ensure_ascii=False)[1:-1])
        case Chars(ranges):
            inside = (char for char in _ESCAPED if any(low <= ord(char) <= high for low, high in ranges))
            return alt(chars(intersection(ranges, _RAW)), *(json_escaped(Text(char)) for char in inside))
        case Accepted() | UniqueItem() | MemberMark() | ObjectEnd():
            raise InvalidConstraint("A JSON schema inside a JSON string is not supported.")
    return rebuilt(expression, json_escaped)
