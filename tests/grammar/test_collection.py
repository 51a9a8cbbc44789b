"""Schemas as in practice: the grammar accepts every valid instance and no invalid one.

The oracle is the jsonschema package. A sample runs here; ``python -m benchmarks.schemas`` runs all, beside
other libraries.
"""

from __future__ import annotations

import json

import pytest

from ramify import constraint
from ramify.grammar.matcher import Grammar
from ramify.grammar.schema.compiler import schema_rules
from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.schema.instance import validate
from tests.grammar.collection.case import Case
from tests.grammar.collection.everything import all_cases
from tests.grammar.collection.real_world import RecordedCase
from tests.grammar.schema_order import in_schema_order
from tests.grammar.vocabularies import compiled, tiny, tokenise

pytestmark = pytest.mark.slow


def is_refused(case: Case | RecordedCase) -> bool:
    try:
        schema_rules(parse_json(json.dumps(case.schema)))
    except Unenforceable:
        return True
    return False


SAMPLE = [case for case in all_cases()[::6] if not is_refused(case)]


def goes_through(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept, tokenise(text, tiny()))) and matcher.complete


def check(case: Case | RecordedCase) -> int:
    """The number of instances of `case`, which grammar and validator judge as the oracle does."""
    grammar = compiled(constraint.json_schema(case.schema))
    valid, invalid = case.instances
    for instance in valid:
        assert goes_through(grammar, in_schema_order(case.schema, instance)), json.dumps(instance)
        assert validate(case.schema, instance) == []
    for instance in invalid:
        assert not goes_through(grammar, in_schema_order(case.schema, instance)), json.dumps(instance)
        assert validate(case.schema, instance) != []
    return len(valid) + len(invalid)


@pytest.mark.parametrize("case", SAMPLE, ids=repr)
def test_case(case: Case) -> None:
    assert check(case) > 4


def test_at_most_three_in_a_hundred_are_refused() -> None:
    refused = [case for case in all_cases() if is_refused(case)]
    assert len(refused) <= 0.03 * len(all_cases()), refused


def test_the_collection_is_large_and_mixed() -> None:
    cases = all_cases()
    assert len(cases) > 400
    styles = {case.style for case in cases}
    assert styles == {"openapi", "kubernetes", "configs", "events", "published", "shapes", "suite"}
    assert len({repr(case) for case in cases}) == len(cases)
