"""The validator: whether a JSON value satisfies a schema (2020-12 or older), and if not, where and why.

>>> validate({"properties": {"n": {"minimum": 3}}, "required": ["m"]}, {"n": 1})
[Failure(instance='/n', schema='/properties/n/minimum', message='1 is not at least 3'),
 Failure(instance='', schema='/required', message="The property 'm' is missing")]

The validator follows the specification keyword by keyword. It shares nothing with the formulas that grammars
are made of, so that tests can check each against the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.document import formats
from ramify.grammar.schema.document.check import ANY_DRAFT, SchemaDocument, place
from ramify.grammar.schema.document.json_values import (
    Value,
    as_decimals,
    deep_recursion,
    is_multiple,
    parse_json,
    type_of,
)
from ramify.grammar.schema.document.string_patterns import TimeLimit, matches_pattern, matches_regular
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.json_text import escape
from ramify.text import shortened


class Failure(NamedTuple):
    """A keyword that a value does not satisfy. ``str(failure)`` is a sentence with both pointers."""

    instance: str
    """JSON pointer (RFC 6901) of the failing part of the value; "" is the whole value."""
    schema: str
    """JSON pointer of the keyword in the schema. If a $ref leads to the keyword, the pointer goes through the
    target of the $ref, not through the $ref."""
    message: str

    def __str__(self) -> str:
        where = f" ({self.schema})" if self.schema else ""
        return f"At {self.instance or 'the whole value'}: {self.message}{where}."


def validate(schema: Any, value: Any) -> list[Failure]:
    """All failures of a JSON value against a schema, in the order of the schema; empty if the value is valid.

    `schema` and `value` are what `json.loads` or `json_values.parse_json` returns: None, booleans, integers,
    floats or `Decimal`, strings, lists and dictionaries. A float counts as the decimal number that its
    ``repr`` shows, so 0.3 is a multiple of 0.1. Tuples count as arrays. An unknown format restricts nothing.

    Raises `InvalidConstraint`, with the JSON pointer of the place in the schema, in these cases: `schema` is
    no JSON Schema; a pattern is no regular expression, or takes longer than `string_patterns.MAX_SECONDS` to
    match; the schema or the value is nested too deeply, or has numbers that are too long; the whole
    validation takes longer than `string_patterns.MAX_VALIDATION_S`.
    """
    with deep_recursion():
        return Validator(SchemaDocument(as_decimals(schema))).failures("", as_decimals(value))


def validate_text(schema: Any, text: str, limit: TimeLimit | None = None) -> list[Failure]:
    """All failures of a text that is meant to be JSON. If the text is not JSON, or cannot be validated within
    the limits, this is the only failure returned. Raises `InvalidConstraint` if `schema` is no JSON
    Schema."""
    with deep_recursion():
        validator = Validator(SchemaDocument(as_decimals(schema)), limit)
    try:
        value = parse_json(text)
    except InvalidConstraint as error:
        return [Failure("", "", error.message.rstrip("."))]
    try:
        with deep_recursion():
            return validator.failures("", value)
    except InvalidConstraint as error:
        return [Failure("", place(error.pointer or ""), f"It was not validated: {error.message}".rstrip("."))]


class _Evaluated:
    """The properties and items of a value that keywords have evaluated (2020-12 Core, section 11)."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.items: set[int] = set()

    def add(self, other: _Evaluated) -> None:
        self.names |= other.names
        self.items |= other.items


class _Place(NamedTuple):
    """A subschema, and the part of the value that it is applied to."""

    pointer: str
    keywords: dict[str, Any]
    value: Any
    at: str
    """JSON pointer of the part of the value."""
    evaluated: _Evaluated
    """Properties and items that this subschema has evaluated so far."""

    def fail(self, keyword: str, message: str) -> list[Failure]:
        return [Failure(self.at, f"{place(self.pointer)}/{keyword}", message)]


Check = Callable[["Validator", _Place, str, Any], Iterable[Failure]]
"""A function that returns the failures of one keyword. Takes the validator, the place, the keyword and its
value."""


class Validator:
    """A validation of one value against the subschemas of a document, within the time limit `limit` (by
    default a new one)."""

    def __init__(self, document: SchemaDocument, limit: TimeLimit | None = None) -> None:
        self._document = document
        self._limit = limit or TimeLimit()

    def failures(
        self, pointer: str, value: Any, at: str = "", evaluated: _Evaluated | None = None
    ) -> list[Failure]:
        """The failures of `value` against the subschema at `pointer`. `at` is the pointer of `value`.

        If there are no failures, the properties and items that the subschema evaluates are added to
        `evaluated`. Raises `InvalidConstraint` if a pattern is not valid, and `TakesTooLong`.
        """
        self._limit.left(pointer)
        schema = self._document.at(pointer)
        if isinstance(schema, bool):
            return [] if schema else [Failure(at, pointer, "No value is allowed here")]
        pointer = self._document.entered(pointer)
        place = _Place(pointer, self._document.keywords(pointer), value, at, _Evaluated())
        kind = type_of(value)
        found: list[Failure] = []
        for keyword in sorted(place.keywords, key=_LAST.__contains__):
            kinds, check = _CHECKS.get(keyword, (_NO_TYPE, None))
            if check is not None and kind in kinds:
                found += check(self, place, keyword, place.keywords[keyword])
        if evaluated is not None and not found:
            evaluated.add(place.evaluated)
        return found

    def _valid(self, pointer: str, value: Any) -> bool:
        return not self.failures(pointer, value)

    # --- applicators to the value itself ----------------------------------------------------------

    def _in_place(self, place: _Place, below: str) -> list[Failure]:
        """Failures of the same value against the subschema at the pointer `below`, relative to `place`. The
        properties and items that this subschema evaluates count for `place` as well."""
        return self.failures(f"{place.pointer}/{below}", place.value, place.at, place.evaluated)

    def _reference(self, place: _Place, keyword: str, reference: str) -> list[Failure]:
        target = self._document.target(place.pointer, keyword)
        return self.failures(target, place.value, place.at, place.evaluated)

    def _all_of(self, place: _Place, keyword: str, options: list[Any]) -> Iterator[Failure]:
        for i in range(len(options)):
            yield from self._in_place(place, f"allOf/{i}")

    def _any_of(self, place: _Place, keyword: str, options: list[Any]) -> list[Failure]:
        found = [self._in_place(place, f"anyOf/{i}") for i in range(len(options))]
        if not all(found):
            return []
        return found[0] if len(found) == 1 else place.fail("anyOf", f"None of the {len(found)} options holds")

    def _one_of(self, place: _Place, keyword: str, options: list[Any]) -> list[Failure]:
        holding = [str(i) for i in range(len(options)) if not self._in_place(place, f"oneOf/{i}")]
        if len(holding) == 1:
            return []
        if not holding:
            return place.fail("oneOf", f"None of the {len(options)} options holds")
        return place.fail("oneOf", f"The options {' and '.join(holding)} all hold")

    def _not(self, place: _Place, keyword: str, schema: Any) -> list[Failure]:
        if not self._valid(f"{place.pointer}/not", place.value):
            return []
        return place.fail("not", "The value is what it must not be")

    def _if(self, place: _Place, keyword: str, schema: Any) -> list[Failure]:
        chosen = "else" if self._in_place(place, "if") else "then"
        return self._in_place(place, chosen) if chosen in place.keywords else []

    def _dependent(self, place: _Place, keyword: str, consequences: dict[str, Any]) -> Iterator[Failure]:
        """Failures of dependentRequired, of dependentSchemas, or of dependencies, which combines the two."""
        for name, needed in consequences.items():
            if name not in place.value:
                continue
            if isinstance(needed, list):
                for other in needed:
                    if other not in place.value:
                        message = f"{name!r} is there, and {other!r} is missing"
                        yield from place.fail(f"{keyword}/{escape(name)}", message)
            elif keyword == "dependencies":
                yield from self.failures(f"{place.pointer}/{keyword}/{escape(name)}", place.value, place.at)
            else:
                yield from self._in_place(place, f"{keyword}/{escape(name)}")

    # --- any type, numbers, strings ---------------------------------------------------------------

    def _type(self, place: _Place, keyword: str, types: Any) -> list[Failure]:
        names = types if isinstance(types, list) else [types]
        kind = type_of(place.value)
        if kind in names or (kind in _NUMBER and "number" in names):
            return []
        nullable = place.keywords.get("nullable") is True
        if kind == "null" and nullable and self._document.draft(place.pointer) == ANY_DRAFT:
            return []
        shown = "number" if kind == "fraction" else kind
        return place.fail("type", f"This is of type {shown}, not {' or '.join(names)}")

    def _equal(self, place: _Place, keyword: str, allowed: Any) -> list[Failure]:
        if Value(place.value) in map(Value, allowed if keyword == "enum" else [allowed]):
            return []
        return place.fail(keyword, "This is not the value, or none of those, that are allowed")

    def _bound(self, place: _Place, keyword: str, bound: Any) -> list[Failure]:
        holds, words = _BOUNDS[keyword]
        if isinstance(bound, bool):  # draft-04: the boolean says whether minimum or maximum is exclusive
            limit = place.keywords.get("minimum" if keyword == "exclusiveMinimum" else "maximum")
            if not bound or limit is None or place.value != limit:
                return []
        elif holds(place.value, bound):
            return []
        return place.fail(keyword, f"{_shown(place.value)} is not {words} {bound}")

    def _count(self, place: _Place, keyword: str, limit: Any) -> list[Failure]:
        count = len(place.value)
        holds = count >= int(limit) if keyword.startswith("min") else count <= int(limit)
        things = {"Length": "characters", "Items": "items", "Properties": "properties"}[keyword[3:]]
        return [] if holds else place.fail(keyword, f"There are {count} {things}, and {keyword} is {limit}")

    def _multiple_of(self, place: _Place, keyword: str, divisor: Any) -> list[Failure]:
        if is_multiple(place.value, Decimal(divisor)):
            return []
        return place.fail("multipleOf", f"{_shown(place.value)} is no multiple of {divisor}")

    def _pattern(self, place: _Place, keyword: str, pattern: str) -> list[Failure]:
        if matches_pattern(f"{place.pointer}/pattern", pattern, place.value, self._limit):
            return []
        return place.fail("pattern", f"The text does not match {pattern}")

    def _format(self, place: _Place, keyword: str, name: str) -> list[Failure]:
        where = f"{place.pointer}/format"
        try:
            meaning = formats.meaning(name, where)
        except Unenforceable:
            return []
        if isinstance(meaning, formats.StringFormat) and isinstance(place.value, str):
            holds = matches_regular(where, meaning.whole, place.value, self._limit)
            holds = holds and formats.beyond_patterns(name, place.value)
        elif isinstance(meaning, formats.NumberFormat) and type_of(place.value) in _NUMBER:
            holds = meaning.low <= place.value <= meaning.high
        else:
            return []
        return [] if holds else place.fail("format", f"The value is no {name}")

    # --- arrays -----------------------------------------------------------------------------------

    def _items(self, place: _Place, keyword: str, schema: Any) -> Iterator[Failure]:
        """Failures of prefixItems, items or additionalItems. Up to draft 2019-09, items could be an array,
        with the meaning of today's prefixItems, and additionalItems had the meaning of today's items."""
        older = isinstance(place.keywords.get("items"), list)
        prefix, rest = ("items", "additionalItems") if older else ("prefixItems", "items")
        first, count = len(place.keywords.get(prefix, ())), len(place.value)
        if keyword == prefix:
            for i in range(min(first, count)):
                yield from self._item(place, f"{prefix}/{i}", i)
        elif keyword == rest:
            for i in range(first, count):
                yield from self._item(place, rest, i)

    def _item(self, place: _Place, below: str, i: int) -> list[Failure]:
        place.evaluated.items.add(i)
        return self.failures(f"{place.pointer}/{below}", place.value[i], f"{place.at}/{i}")

    def _contains(self, place: _Place, keyword: str, schema: Any) -> Iterator[Failure]:
        pointer = f"{place.pointer}/contains"
        found = [i for i, item in enumerate(place.value) if self._valid(pointer, item)]
        if self._document.draft(place.pointer) != 8:  # in 2019-09, contains evaluates no items
            place.evaluated.items |= set(found)
        low, high = place.keywords.get("minContains", 1), place.keywords.get("maxContains")
        if len(found) < low:
            yield from place.fail("contains", f"{len(found)} items satisfy it, and {low} must")
        if high is not None and len(found) > high:
            yield from place.fail("maxContains", f"{len(found)} items satisfy contains, and {high} may")

    def _unique_items(self, place: _Place, keyword: str, unique: bool) -> list[Failure]:
        if unique and len(set(map(Value, place.value))) < len(place.value):
            return place.fail("uniqueItems", "Two items are equal")
        return []

    def _unevaluated_items(self, place: _Place, keyword: str, schema: Any) -> Iterator[Failure]:
        for i in range(len(place.value)):
            if i not in place.evaluated.items:
                yield from self._item(place, "unevaluatedItems", i)

    # --- objects ----------------------------------------------------------------------------------

    def _property(self, place: _Place, below: str, name: str) -> list[Failure]:
        place.evaluated.names.add(name)
        return self.failures(f"{place.pointer}/{below}", place.value[name], f"{place.at}/{escape(name)}")

    def _properties(self, place: _Place, keyword: str, schemas: dict[str, Any]) -> Iterator[Failure]:
        for name in schemas:
            if name in place.value:
                yield from self._property(place, f"properties/{escape(name)}", name)

    def _pattern_properties(self, place: _Place, keyword: str, schemas: dict[str, Any]) -> Iterator[Failure]:
        for pattern in schemas:
            for name in place.value:
                if self._name_matches(place, pattern, name):
                    yield from self._property(place, f"patternProperties/{escape(pattern)}", name)

    def _name_matches(self, place: _Place, pattern: str, name: str) -> bool:
        pointer = f"{place.pointer}/patternProperties/{escape(pattern)}"
        return matches_pattern(pointer, pattern, name, self._limit)

    def _additional_properties(self, place: _Place, keyword: str, schema: Any) -> Iterator[Failure]:
        named = place.keywords.get("properties", {})
        patterns = place.keywords.get("patternProperties", {})
        for name in place.value:
            if name not in named and not any(self._name_matches(place, each, name) for each in patterns):
                yield from self._property(place, "additionalProperties", name)

    def _unevaluated_properties(self, place: _Place, keyword: str, schema: Any) -> Iterator[Failure]:
        for name in place.value:
            if name not in place.evaluated.names:
                yield from self._property(place, "unevaluatedProperties", name)

    def _property_names(self, place: _Place, keyword: str, schema: Any) -> Iterator[Failure]:
        for name in place.value:
            yield from self.failures(f"{place.pointer}/propertyNames", name, f"{place.at}/{escape(name)}")

    def _required(self, place: _Place, keyword: str, names: list[str]) -> Iterator[Failure]:
        for name in names:
            if name not in place.value:
                yield from place.fail("required", f"The property {name!r} is missing")


def _shown(number: int | Decimal) -> str:
    return shortened(str(number), 40)


_NO_TYPE: frozenset[str] = frozenset()
_ANY = frozenset(["null", "boolean", "integer", "fraction", "string", "array", "object"])
_NUMBER = frozenset(["integer", "fraction"])
_STRING = frozenset(["string"])
_ARRAY = frozenset(["array"])
_OBJECT = frozenset(["object"])
_LAST = frozenset(["unevaluatedItems", "unevaluatedProperties"])
"""Keywords to check last, because they depend on the properties and items that all other keywords
evaluated."""

_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (operator.ge, "at least"),
    "maximum": (operator.le, "at most"),
    "exclusiveMinimum": (operator.gt, "above"),
    "exclusiveMaximum": (operator.lt, "below"),
}

_CHECKS: dict[str, tuple[frozenset[str], Check]] = {
    **dict.fromkeys(["$ref", "$dynamicRef", "$recursiveRef"], (_ANY, Validator._reference)),
    "type": (_ANY, Validator._type),
    **dict.fromkeys(["enum", "const"], (_ANY, Validator._equal)),
    "allOf": (_ANY, Validator._all_of),
    "anyOf": (_ANY, Validator._any_of),
    "oneOf": (_ANY, Validator._one_of),
    "not": (_ANY, Validator._not),
    "if": (_ANY, Validator._if),
    **dict.fromkeys(_BOUNDS, (_NUMBER, Validator._bound)),
    "multipleOf": (_NUMBER, Validator._multiple_of),
    **dict.fromkeys(["minLength", "maxLength"], (_STRING, Validator._count)),
    "pattern": (_STRING, Validator._pattern),
    "format": (_ANY, Validator._format),
    **dict.fromkeys(["prefixItems", "items", "additionalItems"], (_ARRAY, Validator._items)),
    **dict.fromkeys(["minItems", "maxItems"], (_ARRAY, Validator._count)),
    "uniqueItems": (_ARRAY, Validator._unique_items),
    "contains": (_ARRAY, Validator._contains),
    "unevaluatedItems": (_ARRAY, Validator._unevaluated_items),
    "properties": (_OBJECT, Validator._properties),
    "patternProperties": (_OBJECT, Validator._pattern_properties),
    "additionalProperties": (_OBJECT, Validator._additional_properties),
    "propertyNames": (_OBJECT, Validator._property_names),
    "required": (_OBJECT, Validator._required),
    **dict.fromkeys(["minProperties", "maxProperties"], (_OBJECT, Validator._count)),
    **dict.fromkeys(
        ["dependentRequired", "dependentSchemas", "dependencies"], (_OBJECT, Validator._dependent)
    ),
    "unevaluatedProperties": (_OBJECT, Validator._unevaluated_properties),
}
