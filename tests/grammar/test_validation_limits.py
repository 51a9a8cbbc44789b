"""Limits of validating a value: numbers of bounded size, and bounded time for everything else."""

from __future__ import annotations

import inspect
import itertools
import json
import time
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.document.check import SchemaDocument
from ramify.grammar.schema.document.json_values import (
    MAX_DIGITS,
    NumberTooLong,
    parse_json,
    place_of_long_number,
)
from ramify.grammar.schema.document.string_patterns import (
    MAX_STEPS,
    SearchPattern,
    TakesTooLong,
    TimeLimit,
)
from ramify.grammar.schema.instance import Validator, validate, validate_text
from ramify.grammar.schema.logic.assertions import is_multiple

LONG = "9" * (MAX_DIGITS + 1)


@pytest.mark.parametrize("schema", [{"type": "number", "multipleOf": 999983}, {"type": "number"}, True])
@pytest.mark.parametrize(
    "number",
    ["9E9999999999", "9E-9999999999", "9E999999999999999999999", f"1E{MAX_DIGITS}", LONG, "0." + LONG],
)
def test_a_number_that_is_too_long_is_a_failure(schema: Any, number: str) -> None:
    for text in (number, f"[{number}]"):
        (failure,) = validate_text(schema, text)
        assert "is too long: at most 4300 digits" in failure.message
        assert len(failure.message) < 200


@pytest.mark.parametrize("number", ["9E3999", "-" + "9" * MAX_DIGITS, f"1E-{MAX_DIGITS - 1}"])
def test_numbers_up_to_the_limit_are_validated(number: str) -> None:
    assert validate_text({"type": "number"}, number) == []
    (failure,) = validate_text({"multipleOf": 999983}, number)
    assert failure.schema == "/multipleOf"
    assert validate_text({"multipleOf": 5e-324}, "1e3000") == []


@pytest.mark.parametrize("text", ["1e999999999", "[" * 50_000, '{"a": ', "NaN", "-Infinity", ""])
def test_what_cannot_be_read_is_a_failure(text: str) -> None:
    (failure,) = validate_text({"type": "object"}, text)
    assert (failure.instance, failure.schema) == ("", "")
    assert failure.message


@pytest.mark.parametrize(
    "number", [f"1E{MAX_DIGITS}", f"1E-{MAX_DIGITS}", LONG, "0." + LONG, "9E99999999999999999999"]
)
def test_the_place_of_a_number_is_that_of_the_one_that_is_not_read(number: str) -> None:
    most = "0." + "9" * MAX_DIGITS
    assert parse_json(most)
    assert place_of_long_number(f'{{"minimum": {most}, "enum": [1, {number}]}}') == "/enum/1"


def test_a_schema_has_no_number_that_is_too_long() -> None:
    for source in ('{"const": 1e999999999}', f'{{"enum": [{LONG}]}}', '{"minimum": 1e99999999999999999999}'):
        with pytest.raises(NumberTooLong, match="fits a double"):
            parse_json(source)
    for value in (10**MAX_DIGITS * 10, float("inf"), float("nan"), Decimal("1e5000")):
        with pytest.raises(InvalidConstraint):
            validate({"const": value}, 1)
        with pytest.raises(InvalidConstraint):
            validate(True, [value])


NUMBERS = st.integers(-(10**6), 10**6) | st.integers(-(10**40), 10**40)


@given(NUMBERS, st.integers(-60, 60), st.integers(1, 10**6), st.integers(-30, 30))
def test_multiples_are_exact(digits: int, exponent: int, unit: int, scale: int) -> None:
    with localcontext(prec=100):  # by default Decimal rounds to 28 digits
        value, divisor = Decimal(digits).scaleb(exponent), Decimal(unit).scaleb(scale)
        multiple = value * unit
    assert is_multiple(value, divisor) == ((Fraction(value) / Fraction(divisor)).denominator == 1)
    assert is_multiple(multiple, Decimal(unit).scaleb(min(0, exponent)))


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


DOUBLING = {
    "$defs": {"n": {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["b"]}] * 2}},
    "$ref": "#/$defs/n",
}
"""Each level is validated twice for each time that the level above is."""


def test_options_that_overlap_are_given_up() -> None:
    ticks = itertools.count()
    validator = Validator(SchemaDocument(DOUBLING), TimeLimit(1000, lambda: float(next(ticks))))
    assert validator.failures("", deep(5))
    with pytest.raises(TakesTooLong, match="more than 1000 s"):
        validator.failures("", deep(60))


def test_an_output_that_takes_too_long_is_told_apart() -> None:
    ticks = itertools.count()
    limit = TimeLimit(1000, lambda: float(next(ticks)))
    (failure,) = validate_text(DOUBLING, json.dumps(deep(60)), limit)
    assert failure.message.startswith("It was not validated: Validating takes more than 1000 s")


def test_the_limit_is_of_processor_time() -> None:
    limit = TimeLimit(60)
    assert 0 < limit.left("") <= 60
    assert inspect.signature(TimeLimit).parameters["clock"].default is time.thread_time


def test_a_pattern_is_given_up_and_keeps_few_steps() -> None:
    pattern = SearchPattern("^(a|b)*a(a|b){14}c$")
    text = "".join("ab"[bin(n).count("1") % 2] for n in range(3 * MAX_STEPS))
    assert not pattern.matches(text)
    assert len(pattern.steps) <= MAX_STEPS
    calls = []
    pattern.matches(text, lambda: calls.append(1) or 1.0)
    assert len(calls) >= len(text) // 1024

    def give_up() -> float:
        raise TakesTooLong("late")

    with pytest.raises(TakesTooLong):
        pattern.matches(text, give_up)


def test_backtracking_shares_the_limit() -> None:
    """Each of the strings alone takes less than its own limit."""
    schema = {"items": {"pattern": r"^(a+)+(?<!b)\1$"}}
    clock = iter([0.0, *[0.1] * 6, *[99.0] * 9])
    validator = Validator(SchemaDocument(schema), TimeLimit(2, lambda: next(clock)))
    with pytest.raises(TakesTooLong) as given_up:
        validator.failures("", ["aa"] * 6)
    assert str(given_up.value.pointer).startswith("/items")
