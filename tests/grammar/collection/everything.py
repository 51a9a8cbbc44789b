"""All cases of the collection."""

from __future__ import annotations

from functools import cache

from tests.grammar.collection import configs, events, kubernetes, openapi, published, shapes, suite
from tests.grammar.collection.case import Case


@cache
def all_cases() -> tuple[Case, ...]:
    """A few hundred cases, whose instances are made on first access."""
    families = (openapi, kubernetes, configs, events, published, shapes, suite)
    return tuple(case for family in families for case in family.cases())
