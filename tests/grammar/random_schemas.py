"""Small random schemas over all keywords, and values on which they differ."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

NAMES = ["a", "b", "ab"]
VALUES: list[Any] = [None, True, False, 0, 1, 2, 1.5, -1, "", "a", "b", "ab", "xb", [], [1], ["a"], [1, "a"]]
VALUES += [[None, None], [1, 1, 2], [1, 2], [True, False], ["a", None, 1], [0, 1, 2, 3], [[1], [1]]]
VALUES += [[{"a": 1}, "x", [1]], {}, {"a": 1}, {"b": "a"}, {"a": 1, "b": 2}, {"ab": None}, {"c": 1}]
VALUES += [{"a": {"a": 1}}, {"x": [1]}, {"a": [], "c": "a"}, {"b": 1.5, "ab": "ab", "x": 0}]
ITEMS: list[Any] = [
    {"enum": [1, 2, "a", None]},
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 3},
]
ITEMS += [{"enum": [[1], {"a": 1}, "x"]}, {"type": ["integer", "string"]}, {"type": ["array", "null"]}]
KEYS: list[Any] = [{"pattern": "^a"}, {"maxLength": 1}, {"enum": ["a", "x"]}, {"not": {"const": "b"}}]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


class Schemas:
    def __init__(self, random: Random) -> None:
        self._random = random
        choice = random.choice
        self._leaves: list[Callable[[], Any]] = [
            lambda: {"type": choice(TYPES)},
            lambda: {"type": ["string", "integer"]},
            lambda: {"const": choice(VALUES)},
            lambda: {"enum": random.sample(VALUES, 3)},
            lambda: {"minimum": choice([0, 1, 1.5])},
            lambda: {"exclusiveMaximum": choice([1, 2])},
            lambda: {"multipleOf": choice([0.5, 2])},
            lambda: {"pattern": choice(["^a", "b$", "a.*b", "^(?!a)"])},
            lambda: {"minLength": choice([1, 2])},
            lambda: {"maxLength": choice([0, 1])},
            lambda: {"required": random.sample(NAMES, choice([1, 2]))},
            lambda: {"minItems": choice([1, 2])},
            lambda: {"maxItems": choice([0, 1])},
            lambda: {"minProperties": choice([1, 2])},
            lambda: {"maxProperties": choice([0, 1, 2])},
            lambda: choice([True, False, {}]),
        ]
        self._keywords: dict[str, Callable[[Callable[[], Any]], Any]] = {
            "type": lambda sub: choice(["array", "object"]),
            "properties": lambda sub: {name: sub() for name in random.sample(NAMES, choice([1, 2]))},
            "patternProperties": lambda sub: {
                p: sub() for p in random.sample(["^a", "b$", "c"], choice([1, 2]))
            },
            "additionalProperties": lambda sub: sub(),
            "propertyNames": lambda sub: choice([*KEYS, sub()]),
            "items": lambda sub: sub(),
            "prefixItems": lambda sub: [sub() for _ in range(choice([1, 2]))],
            "contains": lambda sub: sub(),
            "uniqueItems": lambda sub: True,
            "not": lambda sub: sub(),
            "if": lambda sub: sub(),
            "anyOf": lambda sub: [sub() for _ in range(choice([1, 2, 3]))],
            "oneOf": lambda sub: [sub() for _ in range(choice([1, 2, 3]))],
            "allOf": lambda sub: [sub() for _ in range(choice([1, 2]))],
            "dependentRequired": lambda sub: {choice(NAMES): random.sample(NAMES, 1)},
            "dependentSchemas": lambda sub: {choice(NAMES): sub()},
            "unevaluatedProperties": lambda sub: sub(),
            "unevaluatedItems": lambda sub: sub(),
        }

    def schema(self, depth: int) -> Any:
        leaf = self._random.choice(self._leaves)()
        if depth == 0 or self._random.random() < 0.15:
            return leaf
        schema = dict(leaf) if isinstance(leaf, dict) else {}
        for keyword in self._random.sample(list(self._keywords), self._random.choice([1, 1, 2, 3])):
            schema[keyword] = self._keywords[keyword](lambda: self.schema(depth - 1))
            self._beside(schema, keyword, depth)
        return schema

    def _beside(self, schema: dict[str, Any], keyword: str, depth: int) -> None:
        """Add keywords that have a meaning only together with `keyword`."""
        random = self._random
        if keyword == "uniqueItems":
            schema["items"] = random.choice(ITEMS)
        for other, share in _BESIDE.get(keyword, {}).items():
            if random.random() < share:
                schema[other] = self.schema(depth - 1) if keyword == "if" else random.choice([0, 1, 2])


_BESIDE = {"if": {"then": 0.7, "else": 0.7}, "contains": {"minContains": 0.4, "maxContains": 0.4}}
