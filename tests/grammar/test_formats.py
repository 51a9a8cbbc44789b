"""Formats: what a grammar writes is of the format, also where characters are counted."""

from __future__ import annotations

from typing import Any

import pytest

from ramify import constraint
from ramify.grammar.compile.policy import compile_constraint, prepare
from ramify.grammar.rules.derivative import Derivatives, explore
from ramify.grammar.rules.expression import ANY_CHAR, Expression, nullable, repeat
from ramify.grammar.schema.document.formats import FORMATS, StringFormat, meaning
from ramify.grammar.schema.document.string_patterns import search_pattern
from ramify.grammar.schema.instance import validate
from ramify.grammar.schema.values.string_language import uncounted
from tests.grammar.vocabularies import accepts, compiled, tiny

pytestmark = pytest.mark.slow

OF_STRINGS = {name: texts for name in FORMATS if isinstance(texts := meaning(name, ""), StringFormat)}


def is_part_of(part: Expression, whole: Expression) -> bool:
    """Whether `whole` matches every text that `part` matches."""
    derivatives = Derivatives({})
    start = tuple(frozenset([expression]) for expression in (repeat(ANY_CHAR, 0, None), part, whole))

    def only_part(residuals: Any) -> bool:
        return any(map(nullable, residuals[1])) and not any(map(nullable, residuals[2]))

    found = explore(start, derivatives.product_transitions, only_part, 50_000)
    assert found is not None
    return not any(found.final)


@pytest.mark.parametrize("name", OF_STRINGS)
def test_what_is_written_is_of_the_format(name: str) -> None:
    whole, written, counted = (search_pattern("", text).expression for text in OF_STRINGS[name])
    assert is_part_of(written, whole)
    if OF_STRINGS[name].counted:
        assert is_part_of(counted, whole)


LONG = "https://example.org/" + "a" * 180


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"format": "uri", "maxLength": 2048}, ["https://a.b/c?d#e", LONG], ["a", "https://" + "a" * 2048]),
        ({"format": "uri", "maxLength": 20}, ["https://a.b/c"], [LONG, ""]),
        ({"format": "email", "maxLength": 255}, ["ada.l@mail.example.org"], ["ada", "a" * 250 + "@a.bcd"]),
        ({"format": "email", "maxLength": 10}, ["a@b.de"], ["ada.l@mail.example.org"]),
        ({"format": "hostname", "maxLength": 64}, ["a.example.org"], ["a" * 65, "-"]),
        (
            {"format": "uri", "pattern": "^https://", "minLength": 10},
            ["https://ab"],
            ["https://a", "urn:abcdefgh"],
        ),
        ({"pattern": "^(?!\\s*$).+", "maxLength": 10_000}, ["x", " a "], ["", "  "]),
    ],
)
def test_formats_and_patterns_with_a_length(schema: Any, valid: list[str], invalid: list[str]) -> None:
    schema = {"type": "string", **schema}
    grammar = compiled(constraint.json_schema(schema))
    for text in valid:
        assert accepts(grammar, f'"{text}"'), text
        assert validate(schema, text) == []
    for text in invalid:
        assert not accepts(grammar, f'"{text}"'), text
        assert validate(schema, text) != []


def test_the_automata_of_formats_are_made_once() -> None:
    prepare(tiny())
    made = uncounted.cache_info().misses
    for length in ({}, {"maxLength": 40}, {"maxLength": 70}):
        compile_constraint(constraint.json_schema({"type": "string", "format": "date-time"} | length), tiny())
    assert uncounted.cache_info().misses == made


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("email", ['"quoted @ text"@a.b', "a@[127.0.0.1]"], ["a@b c"]),
        (
            "time",
            ["23:59:60Z", "01:29:60+01:30", "15:59:60.5-08:00", "00:29:60-23:30", "23:29:60+23:30"],
            ["22:59:60Z", "23:59:60+01:00", "23:59:60-00:30", "23:29:60+23:31"],
        ),
        ("date-time", ["1998-12-31T15:59:60.123-08:00"], ["1998-12-31T15:59:60.123-07:00"]),
        ("hostname", [".".join("abcdefghijk"), ".".join(["a" * 40] * 6)], ["a..b", ".".join(["a" * 63] * 4)]),
        ("regex", ["((((a))))(?=b)"], ["(", "[z-a]"]),
    ],
)
def test_the_whole_format_is_validated(name: str, valid: list[str], invalid: list[str]) -> None:
    for text in valid:
        assert validate({"format": name}, text) == []
    for text in invalid:
        assert validate({"format": name}, text) != []
