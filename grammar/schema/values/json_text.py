"""Spellings of JSON values that grammars allow (RFC 8259).

In a string, a character is written as itself or, if JSON requires an escape, as its shortest escape. Strings
without restrictions may have any valid escapes. Halves of surrogate pairs are never written. Commas and
brackets are in `json_rules`.
"""

from __future__ import annotations

import json
from decimal import Decimal
from functools import lru_cache
from typing import Any

from ramify.grammar.rules.expression import (
    CharAutomaton,
    Chars,
    Expression,
    Ranges,
    Text,
    UniqueItem,
    alt,
    chars,
    chars_of,
    complement,
    intersection,
    ranges_of,
    rebuilt,
    seq,
    text,
)

COMMA = ", "
COLON = ": "


def spelled(value: Any) -> str:
    """The text of a JSON value, with a space after each comma and colon between values."""
    match value:
        case dict():
            members = (f"{spelled(name)}{COLON}{spelled(item)}" for name, item in value.items())
            return "{" + COMMA.join(members) + "}"
        case list():
            return "[" + COMMA.join(map(spelled, value)) + "]"
        case Decimal():
            return number_spelled(value)
    return json.dumps(value, ensure_ascii=False)


def number_spelled(value: Decimal) -> str:
    """A number in plain notation if its decimal exponent is from -19 to 19, else with that exponent."""
    if abs(value.adjusted()) < 20:
        return plain_number(value)
    return str(value.normalize()).replace("E", "e")


def plain_number(value: Decimal) -> str:
    """A number without an exponent."""
    return str(int(value)) if value == value.to_integral_value() else format(value.normalize(), "f")


_ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_PLAIN: Ranges = complement(_ESCAPED)
_ESCAPES = {point: json.dumps(chr(point))[1:-1] for low, high in _ESCAPED for point in range(low, high + 1)}
_BACKSLASH: Ranges = ((0x5C, 0x5C),)

QUOTE = Text('"')


@lru_cache(maxsize=4096)
def escaped(expression: Expression) -> Expression:
    """Turn an expression over the characters of a string into one over the JSON text between the quotes.

    Rules that `expression` calls must be escaped already.
    """
    match expression:
        case Chars(ranges):
            return _escaped_chars(ranges)
        case Text(literal):
            return text(json.dumps(literal, ensure_ascii=False)[1:-1])
        case UniqueItem():
            return expression
    return rebuilt(expression, escaped)


@lru_cache(maxsize=2048)
def _escaped_chars(ranges: Ranges) -> Expression:
    plain, escapes = _spellings(ranges)
    by_start: dict[str, str] = {}
    for escape in escapes:
        by_start[escape[:-1]] = by_start.get(escape[:-1], "") + escape[-1]
    return alt(chars(plain), *(seq(Text(start), chars_of(ends)) for start, ends in by_start.items()))


@lru_cache(maxsize=2048)
def _spellings(ranges: Ranges) -> tuple[Ranges, tuple[str, ...]]:
    """The characters in `ranges` that are written as themselves, and the escapes of all others."""
    points = (point for low, high in intersection(ranges, _ESCAPED) for point in range(low, high + 1))
    return intersection(ranges, _PLAIN), tuple(_ESCAPES[point] for point in points)


def escaped_automaton(automaton: CharAutomaton) -> CharAutomaton:
    """Turn an automaton over the characters of a string into an automaton over JSON text. The states of
    `automaton` come first, then the states inside escapes."""
    inside: list[list[tuple[Ranges, int]]] = []
    number: dict[_Escapes, int] = {}

    def behind_backslash(escapes: _Escapes) -> int:
        if escapes not in number:
            start = number[escapes] = len(automaton.edges) + len(inside)
            targets = list(dict.fromkeys(after for _, after in escapes))
            rows = _escape_tree(tuple((group, targets.index(after)) for group, after in escapes))
            inside.extend(
                [(ranges, start + to if to >= 0 else targets[~to]) for ranges, to in row] for row in rows
            )
        return number[escapes]

    edges: list[list[tuple[Ranges, int]]] = []
    for row in automaton.edges:
        found: list[tuple[Ranges, int]] = []
        escapes: list[tuple[tuple[str, ...], int]] = []
        for ranges, after in row:
            plain, others = _spellings(ranges)
            found += [(plain, after)] if plain else []
            escapes += [(others, after)] if others else []
        edges.append([*found, (_BACKSLASH, behind_backslash(tuple(escapes)))] if escapes else found)
    return CharAutomaton([*edges, *inside], [*automaton.final, *[False] * len(inside)])


_Escapes = tuple[tuple[tuple[str, ...], int], ...]
"""Pairs of a group of escapes and the state, or the number of the target, after any of them."""


@lru_cache(maxsize=256)
def _escape_tree(escapes: _Escapes) -> list[list[tuple[Ranges, int]]]:
    """The edges of the states that read `escapes` behind the backslash. The state ~n in an edge stands for
    target n."""
    tree = [tuple((escape[1:], target) for group, target in escapes for escape in group)]
    rows: list[list[tuple[Ranges, int]]] = []
    for possible in tree:
        going_on: dict[str, tuple[tuple[str, int], ...]] = {}
        for escape, target in possible:
            going_on[escape[0]] = (*going_on.get(escape[0], ()), (escape[1:], target))
        chars_to: dict[int, str] = {}
        for char, rest in going_on.items():
            if rest[0][0] == "":
                to = ~rest[0][1]
            elif rest in tree:
                to = tree.index(rest)
            else:
                to = len(tree)
                tree.append(rest)
            chars_to[to] = chars_to.get(to, "") + char
        rows.append([(ranges_of(members), to) for to, members in chars_to.items()])
    return rows


_HEX = chars(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))


def _hex_of(digits: str) -> Expression:
    return chars_of(digits + digits.upper())


def free_character() -> Expression:
    """One character of a string, in any spelling that JSON allows."""
    surrogate = _hex_of("d")
    scalar = alt(
        seq(_hex_of("0123456789abcef"), _HEX, _HEX, _HEX), seq(surrogate, _hex_of("01234567"), _HEX, _HEX)
    )
    high = seq(surrogate, _hex_of("89ab"), _HEX, _HEX)
    low = seq(surrogate, _hex_of("cdef"), _HEX, _HEX)
    code = seq(Text("u"), alt(scalar, seq(high, Text("\\u"), low)))
    short = chars_of('"\\/bfnrt')
    return alt(chars(_PLAIN), seq(Text("\\"), alt(short, code)))
