"""Schemas of the JSON Schema Store and of MCP servers' tools: what is refused, and that all else is exact."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.grammar.schema.compiler import schema_rules
from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.schema.instance import validate
from tests.grammar.collection.recorded import ReferringCase, mcp_tools, schema_store
from tests.grammar.schema_order import in_schema_order
from tests.grammar.test_collection import goes_through
from tests.grammar.vocabularies import compiled

STORE = schema_store()
TOOLS = mcp_tools()


def made(case: ReferringCase) -> Constraint:
    return constraint.json_schema(case.schema, definitions=case.definitions)


def refusal(case: ReferringCase) -> str | None:
    try:
        schema_rules(parse_json(made(case).source))
    except Unenforceable as error:
        return error.message
    return None


OPEN_OBJECTS = "uniqueItems is not enforced for objects with properties that are not named."
REFUSED = dict.fromkeys(
    ["rust-project", "schema-draft-v4", "size-limit", "solidaritySchema", "sourcemap-v3", "workflows"],
    OPEN_OBJECTS,
) | {"dein": "A word boundary (\\b) is not supported (position 70 of the pattern)."}
NARROWED = {"contextive-glossary"}
"""Schemas with unique items that have more properties than are named: grammars write the named ones alone."""


@pytest.mark.slow
def test_what_is_refused_of_the_store() -> None:
    found = {case.name: message for case in STORE if (message := refusal(case))}
    assert found == REFUSED
    assert len(STORE) == 53


@pytest.mark.slow
def test_no_tool_is_refused_but_one() -> None:
    refused = {case.name: message for case in TOOLS if (message := refusal(case))}
    assert refused.keys() <= {"firecrawl-mcp firecrawl_search"}
    assert len(TOOLS) == 197


def check(case: ReferringCase) -> None:
    source = made(case).source
    whole = json.loads(source)
    grammar = compiled(made(case))
    valid, invalid = case.instances
    for instance, right in [*((each, True) for each in valid), *((each, False) for each in invalid)]:
        assert goes_through(grammar, in_schema_order(whole, instance)) == right, json.dumps(instance)
        assert (validate(parse_json(source), instance) == []) == right, json.dumps(instance)


@pytest.mark.parametrize("case", [case for case in STORE if case.definitions], ids=repr)
def test_schemas_that_refer_to_others(case: ReferringCase) -> None:
    if case.name not in REFUSED:
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in STORE if not case.definitions], ids=repr)
def test_a_schema_of_the_store(case: ReferringCase) -> None:
    if case.name not in REFUSED.keys() | NARROWED:
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", TOOLS[::4], ids=repr)
def test_a_tool(case: ReferringCase) -> None:
    check(case)


def test_the_collections_are_mixed() -> None:
    servers = Counter(case.source for case in TOOLS)
    assert len(servers) == 15
    assert sum(bool(case.definitions) for case in STORE) >= 10
    assert all(case.instances[0] for case in STORE + TOOLS)
    assert sum(len(case.instances[1]) for case in STORE + TOOLS) > 1000
