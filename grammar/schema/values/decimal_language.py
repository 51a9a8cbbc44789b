"""Numbers in plain notation under several conditions, as an automaton that reads them digit by digit.

A multiple of 0.25 is recognised by the remainder modulo 25 of the digits up to two places after the point;
all later digits must be 0. Reading "1.75" gives 1, 17, 175, and 175 % 25 == 0.

Remainders from which the same digits lead to a multiple are one state. For multipleOf 100,000, only the
number of zeros at the end of the digits matters, so there are 6 states instead of 100,000 remainders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from ramify.grammar.rules.derivative import Product, Residual, explore
from ramify.grammar.rules.expression import (
    CharAutomaton,
    Expression,
    Ranges,
    Text,
    alt,
    chars,
    optional,
    repeat,
    seq,
    text,
)

MAX_REMAINDERS = 4000
"""Most remainders, after merging, that are told apart for one multipleOf."""

_ONE: dict[int, Ranges] = {ord(char): ((ord(char), ord(char)),) for char in "0123456789.-"}
_POINT = ord(".")
_ZERO = ord("0")


class Divisor(NamedTuple):
    """The multiples of `unit` / 10 ** `places` or, if `positive` is False, all other numbers."""

    unit: int
    places: int
    positive: bool

    @staticmethod
    def of_step(step: Decimal, *, positive: bool) -> Divisor:
        """The divisor for a `step` above 0, the value of multipleOf."""
        unit, scale = step.as_integer_ratio()
        places = max(0, -int(step.normalize().as_tuple().exponent))
        return Divisor(unit * 10**places // scale, places, positive)


class _Read(NamedTuple):
    """The state of the automaton for one divisor."""

    remainder: int = 0
    after_point: int | None = None
    """Number of digits read after the point, at most the divisor's places; None before the point."""
    beyond: bool = False
    """Whether a digit other than 0 was read after the divisor's places, so that the number is no multiple."""


def _next(step: Divisor, read: _Read, point: int) -> _Read:
    if point == _POINT:
        return read._replace(after_point=0)
    digit = point - _ZERO
    if not 0 <= digit <= 9 or read.beyond:
        return read
    if read.after_point is not None:
        if read.after_point == step.places:
            return _Read(0, step.places, True) if digit else read
        read = read._replace(after_point=read.after_point + 1)
    following = after_digits(step.unit)
    assert following is not None, "the caller has asked whether there are few enough"
    return read._replace(remainder=following[read.remainder][digit])


@lru_cache(maxsize=64)
def after_digits(unit: int) -> dict[int, tuple[int, ...]] | None:
    """A mapping from each remainder modulo `unit` to the remainders after each of the ten digits; None if
    there are more than `MAX_REMAINDERS`.

    Equivalent remainders are merged into the one that was found first.
    """
    # The largest divisor of `unit` that is coprime to 10, and the number of further digits after which only
    # the remainder modulo this divisor matters.
    coprime, digits = unit, 0
    while (common := math.gcd(coprime, 10)) > 1:
        coprime //= common
        digits += 1
    if coprime > MAX_REMAINDERS:
        return None
    powers = [10**n for n in range(digits)]
    first: dict[tuple[int, ...], int] = {}

    def representative(remainder: int) -> int:
        # The number that the next n digits must form; it may be too great for n digits.
        missing = ((-remainder * power) % unit for power in powers)
        key = tuple(number if number < power else -1 for number, power in zip(missing, powers, strict=True))
        return first.setdefault((remainder % coprime, *key), remainder)

    found: dict[int, tuple[int, ...]] = {}
    queue = [representative(0)]
    for remainder in queue:
        if remainder not in found:
            if len(found) == MAX_REMAINDERS:
                return None
            after = tuple(representative((remainder * 10 + digit) % unit) for digit in range(10))
            found[remainder] = after
            queue += after
    return found


def _satisfied(step: Divisor, read: _Read) -> bool:
    missing = step.places - (read.after_point or 0)
    is_multiple = not read.beyond and read.remainder * 10**missing % step.unit == 0
    return is_multiple == step.positive


def decimals_automaton(
    expression: Expression,
    further: Sequence[tuple[Expression, bool]],
    steps: Sequence[Divisor],
    most_states: int,
) -> CharAutomaton | None:
    """The texts of `expression` that satisfy all conditions of `further` and all divisors of `steps`; None
    beyond `most_states` states.

    A condition of `further` is an expression, and True if the text must match the expression, False if it
    must not.
    """
    product = Product([(expression, True), *further])
    Reads = tuple[_Read, ...]
    State = tuple[tuple[Residual, ...], Reads]
    rows: dict[Reads, dict[int, Reads]] = {}  # the steps do not depend on the count of digits

    def after(state: State) -> list[tuple[Ranges, State]]:
        residuals, reads = state
        row = rows.setdefault(reads, {})
        found: list[tuple[Ranges, State]] = []
        for ranges, following in product.steps(residuals):
            for point in (point for low, high in ranges for point in range(low, high + 1)):
                read = row.get(point)
                if read is None:
                    pairs = zip(steps, reads, strict=True)
                    read = row[point] = tuple(_next(step, known, point) for step, known in pairs)
                found.append((_ONE[point], (following, read)))
        return found

    def final(state: State) -> bool:
        residuals, reads = state
        return product.final(residuals) and all(map(_satisfied, steps, reads))

    start = (product.start, tuple(_Read() for _ in steps))
    return explore(start, after, final, most_states)


def all_spellings(value: int | Decimal) -> Expression:
    """The number `value` in plain notation, with any number of trailing zeros in its fraction."""
    zeros = repeat(Text("0"), 1, None)
    if value == int(value):
        return seq(text(str(int(value))), optional(seq(Text("."), zeros)))
    return seq(text(format(Decimal(value).normalize(), "f")), optional(zeros))


def with_fraction() -> Expression:
    """Numbers that are not whole."""
    digit, nonzero = chars(((0x30, 0x39),)), chars(((0x31, 0x39),))
    some = repeat(digit, 0, None)
    whole = alt(Text("0"), seq(nonzero, some))
    zeros = repeat(Text("0"), 0, None)
    return seq(optional(Text("-")), whole, Text("."), zeros, nonzero, some)
