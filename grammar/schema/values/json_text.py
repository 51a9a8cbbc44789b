"""How JSON values are written (RFC 8259): the spellings that grammars allow.

In a string, a character is written as itself or, where JSON requires an escape, as its shortest escape.
Strings without a restriction may have any valid escape. Halves of surrogate pairs are never written. What is
between values is in `punctuation`.
"""

from __future__ import annotations

import json
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    Alt,
    CharAutomaton,
    Chars,
    Expression,
    Ranges,
    Repeat,
    Text,
    UniqueItem,
    alt,
    chars,
    complement,
    intersection,
    normal_ranges,
    optional,
    rebuilt,
    repeat,
    seq,
    text,
)
from ramify.grammar.schema.json_values import decimal_of, integer_of
from ramify.json_text import no_constant

COMMA = ", "
COLON = ": "


def parse_json(source: str) -> Any:
    """The value of a JSON text. Raises `InvalidConstraint` for a text that is not JSON, and `NumberTooLong`.

    Numbers with a fraction or an exponent are returned as `Decimal`, so bounds are exact to the last digit.
    """
    try:
        return json.loads(source, parse_int=integer_of, parse_float=decimal_of, parse_constant=no_constant)
    except RecursionError:
        raise InvalidConstraint(
            "The JSON is nested too deeply.", remedy="Put parts of it beside one another."
        ) from None
    except ValueError as error:
        raise InvalidConstraint(
            f"This is not JSON: {error}.", remedy="Send the text of one JSON value."
        ) from None


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
    """A number in plain notation below 20 digits, else with an exponent."""
    if abs(value.adjusted()) < 20:
        return plain_number(value)
    return str(value.normalize()).replace("E", "e")


def plain_number(value: Decimal) -> str:
    """A number without an exponent."""
    return str(int(value)) if value == value.to_integral_value() else format(value.normalize(), "f")


# --- strings ------------------------------------------------------------------------------------

_ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_PLAIN: Ranges = complement(_ESCAPED)
_BACKSLASH: Ranges = ((0x5C, 0x5C),)

QUOTE = Text('"')


@lru_cache(maxsize=4096)
def escaped(expression: Expression) -> Expression:
    """An expression over the characters of a string as one over the JSON text between its quotes.

    Rules that it calls must be escaped already.
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
    return alt(chars(plain), *(seq(Text(start), _char_of(ends)) for start, ends in by_start.items()))


@lru_cache(maxsize=2048)
def _spellings(ranges: Ranges) -> tuple[Ranges, tuple[str, ...]]:
    """Those of the characters that are written as themselves, and the escapes of the others."""
    points = (point for low, high in intersection(ranges, _ESCAPED) for point in range(low, high + 1))
    return intersection(ranges, _PLAIN), tuple(json.dumps(chr(point))[1:-1] for point in points)


def escaped_automaton(automaton: CharAutomaton) -> CharAutomaton:
    """As `escaped`, for an automaton over the characters of a string: its states, then those inside
    escapes."""
    inside: list[list[tuple[Ranges, int]]] = []
    number: dict[tuple[tuple[str, int], ...], int] = {}

    def behind_backslash(escapes: tuple[tuple[str, int], ...]) -> int:
        if escapes not in number:
            start = number[escapes] = len(automaton.edges) + len(inside)
            targets = list(dict.fromkeys(after for _, after in escapes))
            rows = _escape_tree(tuple((escape, targets.index(after)) for escape, after in escapes))
            inside.extend(
                [(ranges, start + to if to >= 0 else targets[~to]) for ranges, to in row] for row in rows
            )
        return number[escapes]

    edges: list[list[tuple[Ranges, int]]] = []
    for row in automaton.edges:
        found: list[tuple[Ranges, int]] = []
        escapes: list[tuple[str, int]] = []
        for ranges, after in row:
            plain, others = _spellings(ranges)
            found += [(plain, after)] if plain else []
            escapes += [(escape[1:], after) for escape in others]
        edges.append([*found, (_BACKSLASH, behind_backslash(tuple(escapes)))] if escapes else found)
    return CharAutomaton([*edges, *inside], [*automaton.final, *[False] * len(inside)])


@lru_cache(maxsize=256)
def _escape_tree(escapes: tuple[tuple[str, int], ...]) -> list[list[tuple[Ranges, int]]]:
    """The states that read (escape without its backslash, number of its target); ~n leads to target n."""
    tree = [escapes]
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
        rows.append([(_ranges_of(members), to) for to, members in chars_to.items()])
    return rows


_HEX = chars(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))


def _hex_of(digits: str) -> Expression:
    return chars((ord(char), ord(char)) for digit in digits for char in {digit.lower(), digit.upper()})


def free_character() -> Expression:
    """One character of a string, in any spelling that JSON allows."""
    surrogate = _hex_of("d")
    scalar = alt(
        seq(_hex_of("0123456789abcef"), _HEX, _HEX, _HEX), seq(surrogate, _hex_of("01234567"), _HEX, _HEX)
    )
    high = seq(surrogate, _hex_of("89ab"), _HEX, _HEX)
    low = seq(surrogate, _hex_of("cdef"), _HEX, _HEX)
    code = seq(Text("u"), alt(scalar, seq(high, Text("\\u"), low)))
    short = chars((ord(char), ord(char)) for char in '"\\/bfnrt')
    return alt(chars(_PLAIN), seq(Text("\\"), alt(short, code)))


# --- numbers ------------------------------------------------------------------------------------

_DIGIT = chars(((0x30, 0x39),))
_NONZERO = chars(((0x31, 0x39),))
_MINUS = Text("-")


MOST_DIGITS = 100
"""Most digits before the point of a number, unless the schema names longer ones. Without a limit an integer
could have more digits than Python reads (4,300), and a number more than a double holds (308)."""


def any_integer() -> Expression:
    return alt(Text("0"), seq(optional(_MINUS), _whole(MOST_DIGITS)))


def any_number() -> Expression:
    """In plain notation, or with an exponent and one digit before the point: less than 1e308, so that all fit
    a double (IEEE 754, binary64), whose largest is 1.8e308."""
    size = alt(
        seq(_digits("0", "2"), _DIGIT, _DIGIT), seq(Text("30"), _digits("0", "7")), repeat(_DIGIT, 1, 2)
    )
    exponent = seq(_char_of("eE"), optional(_char_of("+-")), size)
    whole = alt(Text("0"), _whole(MOST_DIGITS))
    return seq(
        optional(_MINUS), alt(seq(whole, _any_fraction(None)), seq(_DIGIT, _any_fraction(None), exponent))
    )


def _whole(most: int | None) -> Expression:
    """The integers above 0 of at most that many digits; None is no limit."""
    return seq(_NONZERO, repeat(_DIGIT, 0, _one_less(most)))


def decimal_once(most: int | None = None) -> Expression:
    """Numbers in plain notation without trailing zeros in the fraction, so that each has one text; `most`
    digits before the point at most."""
    fraction = seq(Text("."), repeat(_DIGIT, 0, None), _NONZERO)
    whole = _whole(most)
    return alt(
        Text("0"),
        seq(optional(_MINUS), alt(seq(whole, optional(fraction)), seq(Text("0"), fraction))),
    )


def integers(low: int | None, high: int | None) -> Expression:
    """The integers from `low` to `high`, both included; None is no bound."""
    if low is not None and high is not None and low > high:
        return NOTHING
    negative: Expression = NOTHING
    if low is None or low < 0:
        largest = None if low is None else -low
        negative = seq(_MINUS, _naturals(max(1, -high) if high is not None else 1, largest))
    natural: Expression = NOTHING
    if high is None or high >= 0:
        natural = _naturals(max(0, low or 0), high)
    return alt(negative, natural)


def _naturals(low: int, high: int | None) -> Expression:
    """The integers from `low` >= 0 to `high`."""
    if high is not None and low > high:
        return NOTHING
    lowest = str(low)
    if high is None:
        longer = seq(_NONZERO, repeat(_DIGIT, len(lowest), None))
        return alt(_same_length(lowest, "9" * len(lowest)), longer)
    highest = str(high)
    if len(lowest) == len(highest):
        return _same_length(lowest, highest)
    if highest == "9" * len(highest):
        longer = seq(_NONZERO, repeat(_DIGIT, len(lowest), len(highest) - 1))
        return alt(_same_length(lowest, "9" * len(lowest)), longer)
    between: Expression = NOTHING
    if len(highest) - len(lowest) > 1:
        between = seq(_NONZERO, repeat(_DIGIT, len(lowest), len(highest) - 2))
    return alt(
        _same_length(lowest, "9" * len(lowest)),
        between,
        _same_length("1" + "0" * (len(highest) - 1), highest),
    )


def _same_length(low: str, high: str) -> Expression:
    """The digit strings from `low` to `high`, all of one length."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if low[0] == high[0]:
        return seq(Text(low[0]), _same_length(low[1:], high[1:]))
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return seq(_digits(low[0], high[0]), repeat(_DIGIT, rest, rest))
    options = [
        seq(Text(low[0]), _same_length(low[1:], "9" * rest)),
        seq(_digits(_shifted(low[0], 1), _shifted(high[0], -1)), repeat(_DIGIT, rest, rest)),
        seq(Text(high[0]), _same_length("0" * rest, high[1:])),
    ]
    return alt(*options)


class Bound(NamedTuple):
    """A limit on a number, which may equal it if it is `inclusive`."""

    value: Decimal
    inclusive: bool

    def negation(self) -> Bound:
        return Bound(-self.value, self.inclusive)


def decimals(low: Bound | None, high: Bound | None, places: int | None = None) -> Expression:
    """The numbers within the bounds in plain notation, with at most `places` digits after the point.

    ``decimals(Bound(0.75, True), None)`` is "0.", then "7" and "5" or more, or "8" or "9" and any digits, or
    a whole number of at least 1 with or without a fraction.
    """
    zero = Bound(Decimal(0), False)
    options: list[Expression] = []
    if low is None or low.value < 0:
        nearest = high.negation() if high is not None and high.value < 0 else zero
        options.append(seq(_MINUS, _positive(nearest, None if low is None else low.negation(), places)))
    if high is None or high.value >= 0:
        lowest = low if low is not None and low.value >= 0 else Bound(Decimal(0), True)
        options.append(_positive(lowest, high, places))
    return alt(*options)


def _positive(low: Bound, high: Bound | None, places: int | None) -> Expression:
    """The numbers from `low` >= 0 to `high`, without a sign."""
    first, above = _whole_and_tail(low)
    if high is None:
        return alt(
            seq(text(str(first)), _fraction(_at_least(above, places))),
            seq(_naturals(first + 1, None), _any_fraction(places)),
        )
    last, below = _whole_and_tail(high)
    if high.value < low.value or (high.value == low.value and not (low.inclusive and high.inclusive)):
        return NOTHING
    if first == last:
        return seq(text(str(first)), _fraction(_between(above, below, places)))
    return alt(
        seq(text(str(first)), _fraction(_at_least(above, places))),
        seq(_naturals(first + 1, last - 1), _any_fraction(places)),
        seq(text(str(last)), _fraction(_at_most(below, places))),
    )


class _Tail(NamedTuple):
    """A bound on the digits after the point: its own digits, without trailing zeros."""

    digits: str
    inclusive: bool

    @property
    def head(self) -> str:
        return self.digits[:1] or "0"

    @property
    def rest(self) -> _Tail:
        return _Tail(self.digits[1:], self.inclusive)


def _whole_and_tail(bound: Bound) -> tuple[int, _Tail]:
    whole, _, tail = format(bound.value, "f").partition(".")
    return int(whole), _Tail(tail.rstrip("0"), bound.inclusive)


# The three functions below give the digit strings t, possibly empty, for which 0.t is within bounds. `places`
# is the most digits that t may have; None is no limit.


def _at_least(low: _Tail, places: int | None) -> Expression:
    if not low.digits and low.inclusive:
        return repeat(_DIGIT, 0, places)
    if places == 0:
        return NOTHING
    fewer = _one_less(places)
    return alt(
        seq(_digits(_shifted(low.head, 1), "9"), repeat(_DIGIT, 0, fewer)),
        # After the digits of an exclusive bound, zeros may precede the digit that exceeds it.
        seq(Text(low.head), _at_least(low.rest, fewer)) if low.digits else _zeros_then_more(fewer),
    )


def _zeros_then_more(places: int | None) -> Expression:
    if places is None:
        return seq(repeat(Text("0"), 1, None), _NONZERO, repeat(_DIGIT, 0, None))
    return alt(
        *(
            seq(text("0" * zeros), _NONZERO, repeat(_DIGIT, 0, places - zeros))
            for zeros in range(1, places + 1)
        )
    )


def _at_most(high: _Tail, places: int | None) -> Expression:
    if not high.digits:
        return repeat(Text("0"), 0, places) if high.inclusive else NOTHING
    if places == 0:
        return EMPTY
    fewer = _one_less(places)
    return alt(
        EMPTY,
        seq(_digits("0", _shifted(high.head, -1)), repeat(_DIGIT, 0, fewer)),
        seq(Text(high.head), _at_most(high.rest, fewer)),
    )


def _between(low: _Tail, high: _Tail, places: int | None) -> Expression:
    if not high.digits:  # both are zero
        return repeat(Text("0"), 0, places) if low.inclusive and high.inclusive else NOTHING
    if not low.digits and low.inclusive:
        return _at_most(high, places)
    if places == 0:
        return NOTHING
    fewer = _one_less(places)
    if low.head == high.head:
        return seq(Text(low.head), _between(low.rest, high.rest, fewer))
    return alt(
        seq(Text(low.head), _at_least(low.rest, fewer)),
        seq(_digits(_shifted(low.head, 1), _shifted(high.head, -1)), repeat(_DIGIT, 0, fewer)),
        seq(Text(high.head), _at_most(high.rest, fewer)),
    )


def _fraction(tail: Expression) -> Expression:
    """A point and `tail`; the point is left out if the tail is empty."""
    some, empty = _not_empty(tail)
    return alt(seq(Text("."), some), EMPTY if empty else NOTHING)


def _not_empty(tail: Expression) -> tuple[Expression, bool]:
    """`tail`, made by a function above, without the empty text, and whether it matched that."""
    match tail:
        case Alt(options):
            pieces = [_not_empty(option) for option in options]
            return alt(*(some for some, _ in pieces)), any(empty for _, empty in pieces)
        case Repeat(item, 0, high):
            return repeat(item, 1, high), True
    return (NOTHING, True) if tail == EMPTY else (tail, False)


def _any_fraction(places: int | None) -> Expression:
    return EMPTY if places == 0 else optional(seq(Text("."), repeat(_DIGIT, 1, places)))


def _one_less(places: int | None) -> int | None:
    return None if places is None else places - 1


def _digits(low: str, high: str) -> Expression:
    return chars(((ord(low), ord(high)),)) if low <= high else NOTHING


def _shifted(digit: str, by: int) -> str:
    return chr(ord(digit) + by)


def _char_of(members: str) -> Expression:
    return chars(_ranges_of(members))


def _ranges_of(members: str) -> Ranges:
    return normal_ranges((ord(char), ord(char)) for char in members)
