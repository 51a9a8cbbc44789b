"""Random schemas: grammar, validator and the jsonschema package agree on every value.

Grammars are read by a recogniser that has nothing in common with the engines.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.compiler import compile_schema
from ramify.grammar.schema.document.json_values import as_decimals
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.schema.instance import validate
from ramify.grammar.schema.values.schema_grammar import Options
from tests.grammar.random_schemas import VALUES, Schemas
from tests.grammar.recogniser import Recogniser
from tests.grammar.schema_order import in_schema_order

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(8))
def test_all_agree(seed: int) -> None:
    random = Random(seed)
    schemas = Schemas(random)
    refused = 0
    for _ in range(40):
        schema = schemas.schema(random.choice([1, 2, 2, 3]))
        oracle = jsonschema.Draft202012Validator(schema)
        allowed = [oracle.is_valid(value) for value in VALUES]
        assert [not validate(schema, value) for value in VALUES] == allowed, json.dumps(schema)
        grammar = grammar_of(schema)
        if isinstance(grammar, Recogniser):
            written = [in_schema_order(schema, value) for value in VALUES]
            assert list(map(grammar.accepts, written)) == allowed, json.dumps(schema)
        elif isinstance(grammar, Unenforceable):
            refused += 1
        else:
            assert "No JSON value" in str(grammar)
            assert not any(allowed), json.dumps(schema)
    assert refused <= 4


def grammar_of(schema: Any, most_multiplied: int | None = None) -> Recogniser | InvalidConstraint:
    """The grammar of a schema, or the error that refuses the schema."""
    try:
        return Recogniser(compile_schema(as_decimals(schema), Options(most_multiplied=most_multiplied)).rules)
    except InvalidConstraint as error:
        return error
