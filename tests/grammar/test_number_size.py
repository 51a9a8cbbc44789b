"""Sizes of the numbers that grammars write: every one fits a double, and Python's integers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ramify import constraint
from ramify.grammar.schema.instance import validate_text
from ramify.grammar.schema.values.number_text import MOST_DIGITS, integers
from tests.grammar.languages import Language
from tests.grammar.vocabularies import accepts, compiled

NINES = "9" * MOST_DIGITS
ALLOWED = {
    "number": [NINES, f"-{NINES}.5", "9.99e307", "-1E-307", "5e+05", "0.0001", "1" + "0" * 99, "9.9e299"],
    "integer": [NINES, "-" + NINES, "0", str(2**256), str(2**63)],
}
REFUSED = {
    "number": [NINES + "9", "1e308", "9e400", "1e-308", "12e3", "1e1000", "1e0300", f"{NINES}0.5", "9e310"],
    "integer": [NINES + "9", "-1" + NINES, "1e3", "1.0"],
}
ONE_SIDED: list[tuple[dict[str, Any], int]] = [
    ({"minimum": 0}, MOST_DIGITS),
    ({"exclusiveMaximum": 5}, MOST_DIGITS),
    ({"minimum": 1, "multipleOf": 0.01}, MOST_DIGITS),
    ({"not": {"const": 7}}, MOST_DIGITS),
    ({"multipleOf": 0.5}, MOST_DIGITS),
    ({"not": {"multipleOf": 3}}, 83),
    ({"multipleOf": 86_400}, 18),
    ({"multipleOf": 3_999}, 7),
]


def language(schema: Any) -> Any:
    return compiled(constraint.json_schema(schema))


@pytest.mark.parametrize("kind", ALLOWED)
def test_free_numbers(kind: str) -> None:
    alone, within = language({"type": kind}), language({"type": "array", "items": {"type": kind}})
    for text in ALLOWED[kind]:
        assert accepts(alone, text), text
        assert accepts(within, f"[{text}, {text}]"), text
        assert math.isfinite(json.loads(text))
        assert validate_text({"type": kind}, text) == []
    for text in REFUSED[kind]:
        assert not accepts(alone, text), text
        assert not accepts(within, f"[{text}]"), text
    anything = language(True)
    for text in REFUSED["number"]:
        assert not accepts(anything, text)


@pytest.mark.parametrize(("schema", "most"), ONE_SIDED, ids=str)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_under_conditions_have_a_longest(kind: str, schema: dict[str, Any], most: int) -> None:
    grammar = language({"type": kind} | schema)
    step = int(max(1, schema.get("multipleOf", 1)))

    def allowed(digits: int) -> bool:
        number = -(-(10 ** (digits - 1)) // step) * step + (1 if "not" in schema else 0)
        return accepts(grammar, f"{number}") or accepts(grammar, f"-{number}")

    assert allowed(most)
    assert not any(map(allowed, (most + 1, most + 2, 150, 310)))


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_schema_may_name_longer_numbers(kind: str, sign: int) -> None:
    far = sign * 10**150
    beyond = {"minimum": far} if sign > 0 else {"maximum": far}
    grammar = language({"type": kind} | beyond)
    assert accepts(grammar, str(far))
    assert accepts(grammar, str(far * 9))
    assert not accepts(grammar, str(far * 100))
    assert not accepts(grammar, str(far // 10))
    for exact in (language({"type": kind, "const": far}), language({"enum": [0, far]})):
        assert accepts(exact, str(far))
    multiple = language({"type": "integer", "multipleOf": 10**150})
    assert accepts(multiple, str(10**150))
    assert not accepts(multiple, str(10**149))
    both = language({"type": kind, "minimum": 10**140, "maximum": 10**141})
    assert accepts(both, str(10**141))


def test_items_that_are_unique_are_as_long() -> None:
    grammar = language({"type": "array", "items": {"type": "number"}, "uniqueItems": True})
    assert accepts(grammar, f"[{NINES}, {NINES}.5]")
    assert not accepts(grammar, f"[{NINES}9]")


@pytest.mark.parametrize("low", [0, 1, 7, 10, 95, 100])
def test_integers_up_to_all_nines(low: int) -> None:
    found = Language(integers(low, 999))
    for number in range(1200):
        assert found.accepts(str(number).encode()) == (low <= number <= 999)


def test_numbers_add_few_states() -> None:
    """50 numbers, each with a grammar of its own, would take 10,000 states."""
    fields = {f"n{i}": {"type": "number"} for i in range(50)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    assert language(schema).automaton.states < 1500
