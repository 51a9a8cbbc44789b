"""A schema with valid and invalid instances, as the jsonschema package judges them."""

from __future__ import annotations

import json
import warnings
from decimal import Decimal
from functools import cached_property
from random import Random
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

from tests.grammar.collection.formats import CHECKER
from tests.grammar.collection.instances import Sampler, mutations

VALID, INVALID = 6, 12
"""Most instances of each kind."""


class Case:
    """`schema` in one of the styles of the collection; `extra` are instances written by hand."""

    def __init__(self, style: str, name: str, schema: Any, extra: tuple[Any, ...] = ()) -> None:
        self.style = style
        self.name = name
        self.schema = schema
        self._extra = extra

    def __repr__(self) -> str:
        return f"{self.style}: {self.name}"

    @cached_property
    def instances(self) -> tuple[list[Any], list[Any]]:
        """(valid, invalid): samples from the schema, and these with one change each."""
        random = Random(json.dumps(self.schema))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jsonschema warns of the references it still resolves
            exact = _decimals(self.schema)
            oracle = validator_for(exact, default=jsonschema.Draft202012Validator)(
                exact, format_checker=CHECKER
            )
            sampler = Sampler(self.schema, random)
            seen: set[str] = set()
            valid: list[Any] = []
            invalid: list[Any] = []

            def take(instance: Any) -> None:
                text = json.dumps(instance)
                if text not in seen and len(text) < 4000:
                    seen.add(text)
                    (valid if oracle.is_valid(_decimals(instance)) else invalid).append(instance)

            for instance in self._extra:
                take(instance)
            for _ in range(4 * VALID):
                if len(valid) < VALID:
                    take(sampler.instance())
            for instance in list(valid[:VALID]):
                for changed in mutations(instance, random):
                    if len(invalid) < INVALID or random.random() < 0.1:
                        take(changed)
        return valid[: 2 * VALID], invalid[:INVALID]


def _decimals(value: Any) -> Any:
    """With exact decimals: 627.93 is a multiple of 0.01, the nearest float is not."""
    return json.loads(json.dumps(value), parse_float=Decimal)
