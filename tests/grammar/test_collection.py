"""Schemas as in practice: the grammar accepts every valid instance and no invalid one.

The oracle is the jsonschema package. Samples of the large collections run here;
``python -m benchmarks.schemas`` runs all, beside other libraries.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.schema.instance import validate
from tests.grammar.collection.cases import Case, mcp_tools, real_world, schema_store, written
from tests.grammar.collection.oracle import oracle
from tests.grammar.languages import schema_rules
from tests.grammar.schema_order import in_schema_order
from tests.grammar.vocabularies import compiled, goes_through

WRITTEN, PUBLISHED, STORE, TOOLS = written(), real_world(), schema_store(), mcp_tools()
SAMPLE = WRITTEN[::6]
PUBLISHED_SAMPLE = PUBLISHED[::16]
OPEN_OBJECTS = "uniqueItems is not enforced for objects with properties that are not named."
REFUSED = dict.fromkeys(
    ["rust-project", "schema-draft-v4", "size-limit", "solidaritySchema", "sourcemap-v3", "workflows"],
    OPEN_OBJECTS,
) | {"dein": "A word boundary (\\b) is not supported (position 70 of the pattern)."}
"""Schemas of the store that are refused, and why."""
NARROWED = {"contextive-glossary"}
"""Schemas with unique items that have more properties than are named: grammars write the named ones alone."""


def made(case: Case) -> Constraint:
    return constraint.json_schema(case.schema, definitions=case.definitions)


def refusal(case: Case) -> str | None:
    try:
        schema_rules(parse_json(made(case).source))
    except Unenforceable as error:
        return error.message
    return None


def check(case: Case) -> None:
    """Grammar and validator judge the instances as the oracle does."""
    source = made(case).source
    whole = json.loads(source)
    grammar = compiled(made(case))
    valid, invalid = case.instances
    for instance, right in [*((each, True) for each in valid), *((each, False) for each in invalid)]:
        assert goes_through(grammar, in_schema_order(whole, instance)) == right, json.dumps(instance)
        assert (validate(parse_json(source), instance) == []) == right, json.dumps(instance)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE + PUBLISHED_SAMPLE + TOOLS[::4], ids=repr)
def test_a_case_of_a_sample(case: Case) -> None:
    if refusal(case):
        pytest.skip("refused")
    check(case)


STORED = [case for case in STORE if case.name not in REFUSED]


@pytest.mark.parametrize("case", [case for case in STORED if case.definitions], ids=repr)
def test_schemas_that_refer_to_others(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in STORED if not case.definitions and case.name not in NARROWED], ids=repr
)
def test_a_schema_of_the_store(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE + PUBLISHED_SAMPLE, ids=repr)
def test_instances_are_judged_by_jsonschema(case: Case) -> None:
    is_valid = oracle(case.schema)
    valid, invalid = case.instances
    assert all(is_valid(json.dumps(instance)) for instance in valid)
    assert not any(is_valid(json.dumps(instance)) for instance in invalid)


@pytest.mark.slow
def test_few_are_refused() -> None:
    refused = [case for case in WRITTEN if refusal(case)]
    assert len(refused) <= 0.03 * len(WRITTEN), refused
    assert {case.name: message for case in STORE if (message := refusal(case))} == REFUSED
    assert {case.name for case in TOOLS if refusal(case)} <= {"firecrawl-mcp firecrawl_search"}


def test_the_collections_are_large_and_mixed() -> None:
    assert len(WRITTEN) > 400
    styles = {case.style for case in WRITTEN}
    assert styles == {"openapi", "kubernetes", "configs", "events", "published", "shapes", "suite"}
    assert len(PUBLISHED) > 500
    shares = Counter(case.style for case in PUBLISHED)
    assert len(shares) > 15
    assert max(shares.values()) < 0.2 * len(PUBLISHED)
    sizes = Counter(min(2, len(json.dumps(case.schema)) // 1000) for case in PUBLISHED)
    assert min(sizes.values()) > 50
    for cases in (WRITTEN, PUBLISHED):
        assert len({repr(case) for case in cases}) == len(cases)
    assert (len(STORE), len(TOOLS)) == (53, 197)
    assert len(Counter(case.source for case in TOOLS)) == 15
    assert sum(bool(case.definitions) for case in STORE) >= 10
    assert all(case.instances[0] for case in STORE + TOOLS)
    assert sum(len(case.instances[1]) for case in STORE + TOOLS) > 1000
