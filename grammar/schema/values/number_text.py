"""Numbers in JSON text (RFC 8259): integers and decimals within bounds, as expressions over their digits."""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    Alt,
    Expression,
    Repeat,
    Text,
    alt,
    chars,
    chars_of,
    optional,
    repeat,
    seq,
    text,
)

_DIGIT = chars(((0x30, 0x39),))
_NONZERO = chars(((0x31, 0x39),))
_MINUS = Text("-")


MOST_DIGITS = 100
"""Most digits before the point of a number, unless the schema names longer numbers. Without a limit, an
integer could have more digits than Python reads (4,300), and a number could exceed the range of a double (308
digits)."""


def any_integer() -> Expression:
    return alt(Text("0"), seq(optional(_MINUS), _whole(MOST_DIGITS)))


def any_number() -> Expression:
    """Numbers in plain notation, or with an exponent and one digit before the point. All are less than 1e308,
    so that they fit a double (IEEE 754, binary64), whose maximum is 1.8e308."""
    size = alt(
        seq(_digits("0", "2"), _DIGIT, _DIGIT), seq(Text("30"), _digits("0", "7")), repeat(_DIGIT, 1, 2)
    )
    exponent = seq(chars_of("eE"), optional(chars_of("+-")), size)
    whole = alt(Text("0"), _whole(MOST_DIGITS))
    return seq(
        optional(_MINUS), alt(seq(whole, _any_fraction(None)), seq(_DIGIT, _any_fraction(None), exponent))
    )


def _whole(most: int | None) -> Expression:
    """The integers above 0 with at most `most` digits; None means no limit."""
    return seq(_NONZERO, repeat(_DIGIT, 0, _one_less(most)))


def decimal_once(most: int | None = None) -> Expression:
    """Numbers in plain notation without trailing zeros in the fraction, so that each number has one text.
    They have at most `most` digits before the point; None means no limit."""
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
    """A bound on a number. If `inclusive` is True, the number may equal the bound."""

    value: Decimal
    inclusive: bool

    def negation(self) -> Bound:
        return Bound(-self.value, self.inclusive)


def decimals(low: Bound | None, high: Bound | None, places: int | None = None) -> Expression:
    """The numbers within the bounds in plain notation, with at most `places` digits after the point.

    ``decimals(Bound(0.75, True), None)`` has two kinds of texts: "0.7" and a digit from 5 on, or "0.8" or
    "0.9", each followed by any digits; and numbers of at least 1, with or without a fraction.
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
    """A bound on the digits after the point, given as digits without trailing zeros."""

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


# The three functions below return the digit strings t, possibly empty, for which 0.t is within bounds.
# `places` is the most digits that t may have; None means no limit.


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
    """A point and `tail`, or nothing where `tail` is the empty text."""
    some, empty = _not_empty(tail)
    return alt(seq(Text("."), some), EMPTY if empty else NOTHING)


def _not_empty(tail: Expression) -> tuple[Expression, bool]:
    """The non-empty texts of `tail`, and whether `tail` matches the empty text. One of the three functions
    above must have made `tail`."""
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
