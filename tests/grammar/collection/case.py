"""A schema with valid and invalid instances, as the jsonschema package judges them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
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
            judge = oracle(self.schema)
            sampler = Sampler(self.schema, random)
            seen: set[str] = set()
            valid: list[Any] = []
            invalid: list[Any] = []

            def take(instance: Any) -> None:
                text = json.dumps(instance)
                if text not in seen and len(text) < 4000:
                    seen.add(text)
                    (valid if judge(text) else invalid).append(instance)

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


def oracle(schema: Any) -> Callable[[str], bool]:
    """Whether a JSON text is an instance, as the jsonschema package judges it."""
    exact = _exact(json.dumps(schema))
    validator = validator_for(exact, default=jsonschema.Draft202012Validator)(exact, format_checker=CHECKER)
    return lambda text: validator.is_valid(_exact(text))


def _exact(text: str) -> Any:
    """The value with exact decimals: 627.93 is a multiple of 0.01, the nearest float is not."""
    return json.loads(text, parse_float=Decimal)
