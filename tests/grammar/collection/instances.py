"""Instances of schemas, sampled by following the keywords naively, and small changes to them.

What comes out is often valid and sometimes not: `case` asks the jsonschema package which it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

from tests.grammar.collection.pattern_text import matching

FORMATS = {
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["12:30:00Z", "23:59:59.5+01:00"],
    "date-time": ["2024-05-06T07:08:09Z", "2021-01-01T00:00:00.123+02:00"],
    "duration": ["P1DT2H", "P3W"],
    "email": ["ada@example.org", "a.b+c@mail.example.com"],
    "hostname": ["example.org", "db-1.internal"],
    "ipv4": ["10.0.0.1", "192.168.255.1"],
    "ipv6": ["::1", "2001:db8::8a2e:370:7334"],
    "uri": ["https://example.org/a?b=c#d", "urn:isbn:0451450523"],
    "uri-reference": ["../a/b", "https://example.org"],
    "uri-template": ["https://example.org/users{/id}{?page,size*}", "/a/b"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "json-pointer": ["/a/0/b~1c"],
    "regex": ["^a+(b|c)$"],
    "byte": ["aGVsbG8="],
}
WORDS = ["alpha", "Beta 2", "", "x", "größe", "日本", 'a "quoted" word', "line\nbreak", "id-42", "snake_case"]
NAMES = ["extra", "x-note", "foo", "zeta", "B", "a1"]
ANYTHING = [None, True, 7, -2.5, "text", [1, "a"], {"k": None}, [], {}]


class Sampler:
    def __init__(self, root: Any, random: Random, *, lean: bool = False) -> None:
        """`lean`: objects have their required properties alone, which are more often valid."""
        self._root = root
        self._random = random
        self._shares = [0.0] if lean else [0.0, 0.3, 0.6, 1.0]

    def instance(self) -> Any:
        return self._value(self._root, 0)

    def _value(self, schema: Any, depth: int) -> Any:
        random = self._random
        if not isinstance(schema, dict) or depth > 12:
            return random.choice(ANYTHING)
        schema = self._merged(schema, depth)
        if "const" in schema:
            return copy.deepcopy(schema["const"])
        if "enum" in schema:
            return copy.deepcopy(random.choice(schema["enum"]))
        kind = schema.get("type", self._guessed(schema))
        kind = random.choice(kind) if isinstance(kind, list) else kind
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, kind)
            case "boolean":
                return random.random() < 0.5
            case "null":
                return None
        return random.choice(ANYTHING)

    def _merged(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """`schema` with one option of each anyOf and oneOf chosen, and merged with all adjacent keywords."""
        parts = [schema]
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema and depth < 12:
                parts.append(self._target(schema[keyword]))
        parts += schema.get("allOf", [])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts.append(self._random.choice(schema[keyword]))
        if "if" in schema:
            parts += self._random.choice([[schema["if"], schema.get("then", {})], [schema.get("else", {})]])
        merged: dict[str, Any] = {}
        for part in parts:
            if part is not schema and isinstance(part, dict) and part.keys() & _COMPOSED:
                part = self._merged(part, depth + 1)
            for keyword, value in part.items() if isinstance(part, dict) else ():
                if keyword in ("properties", "patternProperties"):
                    known = merged.setdefault(keyword, {})
                    for name, wanted in value.items():
                        known[name] = {"allOf": [known[name], wanted]} if name in known else wanted
                elif keyword == "required":
                    merged[keyword] = [*merged.get(keyword, []), *value]
                elif keyword not in _COMPOSED:
                    merged[keyword] = value
        return merged

    def _target(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return {}
        here = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            here = here[int(step)] if isinstance(here, list) else here.get(step, {})
        return here

    def _guessed(self, schema: dict[str, Any]) -> str | None:
        for keywords, kind in _OF_TYPE.items():
            if schema.keys() & set(keywords):
                return kind
        return None

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        random = self._random
        named = schema.get("properties", {})
        required = schema.get("required", [])
        share = random.choice(self._shares) / (1 + depth / 4)
        found: dict[str, Any] = {}
        for name in [*named, *(name for name in required if name not in named)]:
            if name in required or random.random() < share:
                found[name] = self._value(named.get(name, True), depth + 1)
        others = schema.get("additionalProperties", True)
        for pattern, wanted in schema.get("patternProperties", {}).items():
            if random.random() < 0.6:
                found[matching(pattern, self._random)] = self._value(wanted, depth + 1)
        least = schema.get("minProperties", 0)
        if others is not False:
            for _ in range(max(random.choice([0, 0, 1, 2]), least - len(found))):
                name = self._value(schema.get("propertyNames", {"enum": NAMES}), depth + 1)
                found.setdefault(name if isinstance(name, str) else "n", self._value(others, depth + 1))
        for name, needed in schema.get("dependentRequired", {}).items():
            for other in needed if name in found else ():
                found.setdefault(other, self._value(named.get(other, True), depth + 1))
        return found

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        low, high = schema.get("minItems", 0), schema.get("maxItems", 6)
        prefix = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if isinstance(rest, list):
            prefix, rest = rest, schema.get("additionalItems", True)
        count = max(low, min(high, self._random.choice([0, 1, 2, 3, len(prefix)]) if depth < 8 else 0))
        count = min(count, len(prefix)) if rest is False else count
        found = [self._value(prefix[i] if i < len(prefix) else rest, depth + 1) for i in range(count)]
        if "contains" in schema and len(found) < high:
            found.insert(self._random.randint(0, len(found)), self._value(schema["contains"], depth + 1))
        if schema.get("uniqueItems"):
            found = [item for i, item in enumerate(found) if item not in found[:i]]
        return found

    def _string(self, schema: dict[str, Any]) -> str:
        if "pattern" in schema:
            found = matching(schema["pattern"], self._random)
        elif schema.get("format") in FORMATS:
            return self._random.choice(FORMATS[schema["format"]])
        else:
            found = self._random.choice(WORDS)
            low, high = schema.get("minLength", 0), schema.get("maxLength", 4000)
            found = found.ljust(low, "m")[:high]
        return found

    def _number(self, schema: dict[str, Any], kind: str) -> Any:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -50))
        high = schema.get("maximum", schema.get("exclusiveMaximum", max(low, 0) + 1000))
        low, high = (0 if isinstance(low, bool) else low), (99 if isinstance(high, bool) else high)
        step = schema.get("multipleOf", 1 if kind == "integer" else self._random.choice([1, 0.5, 0.125]))
        found = self._random.randint(int(low // step), int(high // step)) * step
        return round(found, 6) if isinstance(found, float) else found


_COMPOSED = frozenset(["$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else"])
_OF_TYPE = {
    ("properties", "required", "additionalProperties", "patternProperties", "propertyNames"): "object",
    ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"): "array",
    ("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum"): "number",
    ("pattern", "format", "minLength", "maxLength"): "string",
}


def mutations(instance: Any, random: Random) -> Iterator[Any]:
    """Copies of the instance with one change each, in various places."""
    places = list(_places(instance))
    random.shuffle(places)
    for path in places[:12]:
        for change in random.sample(_CHANGES, 4):
            changed = copy.deepcopy({"root": instance})
            holder: Any = changed
            for step in ("root", *path)[:-1]:
                holder = holder[step]
            last = ("root", *path)[-1]
            if change == "missing" and path and isinstance(holder, dict):
                del holder[last]
            else:
                holder[last] = _changed(holder[last], change, random)
            yield changed["root"]


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    steps = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for step in steps:
        for path in _places(value[step]):
            yield (step, *path)


_CHANGES = ["missing", "null", "kind", "more", "less", "larger", "smaller"]


def _changed(value: Any, change: str, random: Random) -> Any:
    match (change, value):
        case ("null", _):
            return None
        case ("kind", str()):
            return 17
        case ("kind", _):
            return "text"
        case (_, bool() | None):
            return random.choice([0, "true", {}])
        case ("more", str()):
            return value + random.choice(["!", "a", " ", "0"])
        case ("larger", str()):
            return value * 40 + "long"
        case (_, str()):
            return value[: random.randint(0, max(0, len(value) - 1))]
        case ("more" | "larger", int() | float()):
            return value + random.choice([1, 0.5, 1000, 10**6])
        case (_, int() | float()):
            return value - random.choice([1, 0.5, 1000, 10**6])
        case ("more" | "larger", list()):
            return [*value, random.choice(ANYTHING)] if change == "more" else value * 3
        case (_, list()):
            return value[:-1]
        case ("more" | "larger", dict()):
            return {**value, random.choice(NAMES): random.choice(ANYTHING)}
        case (_, dict()) if value:
            left = dict(value)
            del left[random.choice(list(left))]
            return left
    return None
