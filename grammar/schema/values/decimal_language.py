"""Numbers in plain notation that satisfy several conditions: an automaton that reads them digit by digit."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from ramify.grammar.rules.derivative import CharAutomaton, Derivatives, Residual, explore
from ramify.grammar.rules.expression import (
    Expression,
    Ranges,
    Text,
    alt,
    chars,
    nullable,
    optional,
    repeat,
    seq,
    text,
)

_POINT = ord(".")
_ZERO = ord("0")


class Divisor(NamedTuple):
    """Multiples of `unit` / 10 ** `places`, or all other numbers."""

    unit: int
    places: int
    positive: bool

    @staticmethod
    def of(step: Decimal, *, positive: bool) -> Divisor:
        """For `step` above 0."""
        unit, scale = step.as_integer_ratio()
        places = max(0, -int(step.normalize().as_tuple().exponent))
        return Divisor(unit * 10**places // scale, places, positive)


class _Read(NamedTuple):
    """What counts of the digits read, for one step."""

    remainder: int = 0
    after_point: int | None = None
    """Digits after the point, up to the step's places; None before the point."""
    beyond: bool = False
    """A digit other than 0 came after those places: no multiple any more."""


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
    return read._replace(remainder=(read.remainder * 10 + digit) % step.unit)


def _satisfied(step: Divisor, read: _Read) -> bool:
    missing = step.places - (read.after_point or 0)
    is_multiple = not read.beyond and read.remainder * 10**missing % step.unit == 0
    return is_multiple == step.positive


def decimals_automaton(
    positive: Expression,
    further: Sequence[tuple[Expression, bool]],
    steps: Sequence[Divisor],
    most_states: int,
) -> CharAutomaton | None:
    """The texts of `wanted` that match each expression of `further`, or match it not, and are numbers that
    satisfy all `steps`; None beyond `most_states` states."""
    derivatives = Derivatives({})
    expressions = [positive, *(expression for expression, _ in further)]
    needed = [True, *(matching for _, matching in further)]
    State = tuple[tuple[Residual, ...], tuple[_Read, ...]]

    def after(state: State) -> list[tuple[Ranges, State]]:
        residuals, reads = state
        found: list[tuple[Ranges, State]] = []
        for ranges, following in derivatives.product_transitions(residuals):
            if not all(residual or not need for residual, need in zip(following, needed, strict=True)):
                continue
            for point in (point for low, high in ranges for point in range(low, high + 1)):
                read = tuple(_next(step, known, point) for step, known in zip(steps, reads, strict=True))
                found.append((((point, point),), (following, read)))
        return found

    def final(state: State) -> bool:
        residuals, reads = state
        return all(
            any(map(nullable, residual)) == need for residual, need in zip(residuals, needed, strict=True)
        ) and all(map(_satisfied, steps, reads))

    start = (tuple(frozenset([expression]) for expression in expressions), tuple(_Read() for _ in steps))
    return explore(start, after, final, most_states)


def all_spellings(value: int | Decimal) -> Expression:
    """A number in plain notation, with any number of zeros at the end of its fraction."""
    zeros = repeat(Text("0"), 1, None)
    if value == int(value):
        return seq(text(str(int(value))), optional(seq(Text("."), zeros)))
    return seq(text(format(Decimal(value).normalize(), "f")), optional(zeros))


def with_fraction() -> Expression:
    """Numbers that are no integers."""
    digit, nonzero = chars(((0x30, 0x39),)), chars(((0x31, 0x39),))
    some = repeat(digit, 0, None)
    whole = alt(Text("0"), seq(nonzero, some))
    zeros = repeat(Text("0"), 0, None)
    return seq(optional(Text("-")), whole, Text("."), zeros, nonzero, some)
