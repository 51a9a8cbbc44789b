"""Number ranges: exactly the numbers within the bounds, in plain notation."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import constraint
from ramify.grammar.rules.expression import NOTHING
from ramify.grammar.schema.values import json_text, number_text
from ramify.grammar.schema.values.decimal_language import (
    Divisor,
    after_digits,
    all_spellings,
    decimals_automaton,
    with_fraction,
)
from ramify.grammar.schema.values.number_text import Bound
from tests.grammar.languages import Language, language_of
from tests.grammar.vocabularies import compiled

pytestmark = pytest.mark.slow

DECIMALS = st.decimals(-150, 150, places=3) | st.sampled_from(
    [Decimal(x) for x in ("0", "-0.5", "1", "10", "99.99")]
)


@lru_cache
def integer_language(low: int | None, high: int | None) -> Language:
    return Language(number_text.integers(low, high))


@settings(max_examples=300, deadline=None)
@given(
    st.none() | st.integers(-3000, 3000),
    st.none() | st.integers(-3000, 3000),
    st.lists(st.integers(-4000, 4000)),
)
def test_integers(low: int | None, high: int | None, numbers: list[int]) -> None:
    language = integer_language(low, high)
    near = [bound + step for bound in (low, high) if bound is not None for step in (-1, 0, 1)]
    for number in [*numbers, *near, 0, 10**20, -(10**20)]:
        inside = (low is None or number >= low) and (high is None or number <= high)
        assert language.accepts(str(number).encode()) == inside
    for text in ("", "-", "-0", "00", "01", "+1", "1.0"):
        assert not language.accepts(text.encode())


@settings(max_examples=300, deadline=None)
@given(
    st.none() | st.tuples(DECIMALS, st.booleans()),
    st.none() | st.tuples(DECIMALS, st.booleans()),
    st.none() | st.integers(0, 4),
    st.lists(st.decimals(-200, 200, places=4), max_size=10),
)
def test_decimals(
    low: tuple[Decimal, bool] | None,
    high: tuple[Decimal, bool] | None,
    places: int | None,
    numbers: list[Decimal],
) -> None:
    bounds = [None if bound is None else Bound(*bound) for bound in (low, high)]
    language = Language(number_text.decimals(bounds[0], bounds[1], places))
    near = [bound[0] + Decimal(step) / 10000 for bound in (low, high) if bound for step in (-1, 0, 1)]
    for number in [*numbers, *near, Decimal(0), Decimal("1e9")]:
        text = format(number.normalize(), "f").replace("-0", "-0" if number else "0", 1)
        if number == 0:
            text = "0"
        inside = low is None or number > low[0] or (low[1] and number == low[0])
        inside &= high is None or number < high[0] or (high[1] and number == high[0])
        inside &= places is None or len(text.partition(".")[2]) <= places
        assert language.accepts(text.encode()) == inside, text
        if "." in text and places is None:
            assert language.accepts(text.encode() + b"00") == inside
    for text in ("", "-", ".5", "1.", "00", "01.5", "-0", "1e5"):
        assert not language.accepts(text.encode())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.none() | st.integers(-500, 500), st.none() | st.integers(-500, 500))
def test_multiples(unit: int, low: int | None, high: int | None) -> None:
    step = Divisor.of_step(Decimal(unit), positive=True)
    states = decimals_automaton(number_text.integers(low, high), [], [step], 50_000)
    assert states is not None
    language = language_of(states)
    for number in range(-600, 600):
        inside = (low is None or number >= low) and (high is None or number <= high)
        assert language.accepts(str(number).encode()) == (inside and number % unit == 0)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([Decimal(step) for step in ("0.25", "0.5", "2.5", "0.1", "0.03", "7", "12", "50")]),
    st.sampled_from([Decimal(step) for step in ("0.5", "2", "0.3", "1.25", "10")]),
    st.booleans(),
    st.lists(st.decimals(-200, 200, places=4) | st.integers(-300, 300).map(lambda n: Decimal(n) / 8)),
    st.lists(st.decimals(-9, 9, places=1), max_size=3),
)
def test_conditions_on_decimals(
    positive: Decimal, unwanted: Decimal, fraction: bool, numbers: list[Decimal], excluded: list[Decimal]
) -> None:
    steps = [Divisor.of_step(positive, positive=True), Divisor.of_step(unwanted, positive=False)]
    further = [(all_spellings(value), False) for value in excluded]
    further += [(with_fraction(), True)] if fraction else []
    states = decimals_automaton(number_text.decimals(None, None), further, steps, 200_000)
    assert states is not None
    language = language_of(states)
    near = [value + shift for value in excluded for shift in (0, positive)]
    for number in [*numbers, *near, positive * 7, positive * unwanted, unwanted * 3, Decimal(0), positive]:
        text = "0" if number == 0 else format(number.normalize(), "f")
        inside = number % positive == 0 and number % unwanted != 0 and number not in excluded
        inside &= not fraction or number != int(number)
        assert language.accepts(text.encode()) == inside, text
        assert language.accepts(text.encode() + (b"00" if "." in text else b".0")) == inside, text


def test_bounds_that_leave_nothing() -> None:
    assert number_text.integers(3, 2) == NOTHING
    assert number_text.decimals(Bound(Decimal(1), True), Bound(Decimal(1), False)) == NOTHING
    assert number_text.decimals(Bound(Decimal("0.1"), False), Bound(Decimal("0.2"), False), 1) == NOTHING


def test_numbers_are_spelled_plainly() -> None:
    spelled = [json_text.spelled(Decimal(text)) for text in ("1.50", "1E+2", "1e-7", "-0.0", "2e300", "0")]
    assert spelled == ["1.5", "100", "0.0000001", "0", "2e+300", "0"]


@pytest.mark.parametrize("unit", [1, 7, 8, 40, 96, 100, 125, 300, 1024, 1500])
def test_remainders_that_are_one_state_are_equivalent(unit: int) -> None:
    """Against all remainders: after the same digits, the state is 0 exactly for multiples."""
    following = after_digits(unit)
    assert following is not None
    for start in range(3000):
        state = 0
        for digit in str(start):
            state = following[state][int(digit)]
        assert (state == 0) == (start % unit == 0)


@pytest.mark.parametrize(
    ("unit", "states"), [(100_000, 6), (86_400, 400), (3_600_000, 200), (10**50, 51), (10**30 + 7, None)]
)
def test_large_units_take_few_remainders(unit: int, states: int | None) -> None:
    following = after_digits(unit)
    assert (following is None) == (states is None)
    assert following is None or states is None or len(following) <= states


@pytest.mark.parametrize(
    "number",
    ["0.10000000000000000000000000000000000000001", "12345678901234567890123456789.25", "1" * 40, "1e+400"],
)
def test_constants_are_exact(number: str) -> None:
    grammar = compiled(constraint.json_schema(f'{{"const": {number}}}'))
    assert Decimal(grammar.matcher().forced_bytes().decode()) == Decimal(number)
