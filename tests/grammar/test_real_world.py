"""Schemas that others have published: the grammar accepts every valid instance and no invalid one.

The oracle is the jsonschema package, which has judged the recorded instances. A sample runs here;
``python -m benchmarks.schemas`` runs all, beside other libraries.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.grammar.collection import real_world
from tests.grammar.collection.case import oracle
from tests.grammar.test_collection import check, is_refused

pytestmark = pytest.mark.slow

CASES = list(real_world.cases())
SAMPLE = CASES[::16]


@pytest.mark.parametrize("case", SAMPLE, ids=repr)
def test_case(case: real_world.RecordedCase) -> None:
    if is_refused(case):
        pytest.skip("refused")
    check(case)


@pytest.mark.parametrize("case", SAMPLE, ids=repr)
def test_instances_are_judged_by_jsonschema(case: real_world.RecordedCase) -> None:
    is_valid = oracle(case.schema)
    valid, invalid = case.instances
    assert [is_valid(json.dumps(instance)) for instance in valid + invalid] == [True] * len(valid) + [
        False
    ] * len(invalid)


def test_the_collection_is_large_and_mixed() -> None:
    assert len(CASES) > 500
    assert len({repr(case) for case in CASES}) == len(CASES)
    shares = Counter(case.style for case in CASES)
    assert len(shares) > 15
    assert max(shares.values()) < 0.2 * len(CASES)
    sizes = Counter(min(2, len(json.dumps(case.schema)) // 1000) for case in CASES)
    assert min(sizes.values()) > 50
