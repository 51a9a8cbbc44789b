"""Does a JSON value satisfy a schema, and if not, where and why? JSON Schema draft 2020-12 and older forms.

Written from the specification, keyword by keyword, and not from the formulas that grammars are made of:
each checks the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from ramify.grammar.schema.check import UNSAID, SchemaDocument, escape
from ramify.grammar.schema.deep_recursion import deep_recursion
from ramify.grammar.schema.json_values import type_of, value_of
from ramify.grammar.schema.logic.assertions import is_multiple
from ramify.grammar.schema.unenforceable import Unenforceable
from ramify.grammar.schema.values import formats
from ramify.grammar.schema.values.string_patterns import is_regex, matches_pattern, matches_searched


class Failure(NamedTuple):
    """A keyword that a value does not satisfy."""

    instance: str
    """JSON pointer of the part of the value."""
    schema: str
    """JSON pointer of the keyword."""
    message: str

    def __str__(self) -> str:
        return f"At {self.instance or 'the whole value'}: {self.message} ({self.schema})."


def validate(schema: Any, value: Any) -> list[Failure]:
    """What of `schema` the JSON value does not satisfy; empty for a valid one.

    Both are as `json.loads` or `json_text.parse_json` give them; floats are taken for the decimals that
    they are written as. Raises `InvalidConstraint` for what is no schema, and for a pattern that takes too
    long to match.
    """
    with deep_recursion():
        return Instances(SchemaDocument(as_decimals(schema))).failures("", as_decimals(value))


def as_decimals(value: Any) -> Any:
    """A JSON value with the decimals that its floats are written as."""
    match value:
        case float():
            return Decimal(repr(value))
        case dict():
            return {name: as_decimals(item) for name, item in value.items()}
        case list() | tuple():
            return [as_decimals(item) for item in value]
    return value


class _Seen:
    """The properties and items that some keyword has looked at."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.items: set[int] = set()

    def add(self, other: _Seen) -> None:
        self.names |= other.names
        self.items |= other.items


class _Place(NamedTuple):
    """Where the work is: the subschema, the value, its pointer, and what has been looked at."""

    pointer: str
    said: dict[str, Any]
    value: Any
    at: str
    seen: _Seen


Check = Callable[["Instances", _Place, Any], "Iterator[Failure] | Iterable[Failure]"]


class Instances:
    """Validates against the subschemas of one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document

    def failures(self, pointer: str, value: Any, at: str = "", seen: _Seen | None = None) -> list[Failure]:
        """Raises `InvalidConstraint` for a pattern that is not valid, or takes too long."""
        schema = self._document.at(pointer)
        if isinstance(schema, bool):
            return [] if schema else [Failure(at, pointer, "No value is allowed here")]
        inner = _Seen()
        place = _Place(pointer, self._document.keywords(pointer), value, at, inner)
        kind = type_of(value)
        found: list[Failure] = []
        for keyword in sorted(place.said, key=_LAST.__contains__):
            kinds, check = _CHECKS.get(keyword, (_NO_TYPE, _nothing))
            if kind in kinds:
                found += check(self, place, place.said[keyword])
        if seen is not None and not found:
            seen.add(inner)
        return found

    def _valid(self, pointer: str, value: Any) -> bool:
        return not self.failures(pointer, value)

    # --- logic ------------------------------------------------------------------------------------

    def _all(self, place: _Place, wanted: list[Any]) -> Iterator[Failure]:
        for i in range(len(wanted)):
            yield from self.failures(f"{place.pointer}/allOf/{i}", place.value, place.at, place.seen)

    def _met(self, place: _Place, keyword: str, count: int) -> list[list[Failure]]:
        return [
            self.failures(f"{place.pointer}/{keyword}/{i}", place.value, place.at, place.seen)
            for i in range(count)
        ]

    def _any(self, place: _Place, wanted: list[Any]) -> list[Failure]:
        found = self._met(place, "anyOf", len(wanted))
        if not all(found):
            return []
        if len(found) == 1:
            return found[0]
        return [_fail(place, "anyOf", f"None of the {len(found)} options holds")]

    def _one(self, place: _Place, wanted: list[Any]) -> list[Failure]:
        found = self._met(place, "oneOf", len(wanted))
        holding = [str(i) for i, failures in enumerate(found) if not failures]
        if len(holding) == 1:
            return []
        if not holding:
            return [_fail(place, "oneOf", f"None of the {len(found)} options holds")]
        return [_fail(place, "oneOf", f"The options {' and '.join(holding)} all hold")]

    def _not(self, place: _Place, wanted: Any) -> list[Failure]:
        if not self._valid(f"{place.pointer}/not", place.value):
            return []
        return [_fail(place, "not", "The value is what it must not be")]

    def _if(self, place: _Place, wanted: Any) -> list[Failure]:
        holds = not self.failures(f"{place.pointer}/if", place.value, place.at, place.seen)
        branch = "then" if holds else "else"
        if branch not in place.said:
            return []
        return self.failures(f"{place.pointer}/{branch}", place.value, place.at, place.seen)

    # --- any type, numbers, strings ---------------------------------------------------------------

    def _type(self, place: _Place, wanted: Any) -> list[Failure]:
        names = wanted if isinstance(wanted, list) else [wanted]
        kind = type_of(place.value)
        if kind in names or (kind in ("integer", "fraction") and "number" in names):
            return []
        if kind == "null" and place.said.get("nullable") is True and self._document.draft == UNSAID:
            return []
        shown = "number" if kind == "fraction" else kind
        return [_fail(place, "type", f"This is of type {shown}, not {' or '.join(names)}")]

    def _pattern(self, place: _Place, wanted: str) -> list[Failure]:
        if matches_pattern(f"{place.pointer}/pattern", wanted, place.value):
            return []
        return [_fail(place, "pattern", f"The text does not match {wanted}")]

    def _format(self, place: _Place, wanted: str) -> list[Failure]:
        try:
            meaning = formats.meaning(wanted, f"{place.pointer}/format")
        except Unenforceable:
            return []
        if isinstance(meaning, formats.Texts) and isinstance(place.value, str):
            holds = matches_searched(f"{place.pointer}/format", meaning.whole, place.value)
            holds = holds and not (wanted == "regex" and not is_regex(place.value))
        elif isinstance(meaning, formats.Range) and type_of(place.value) in _NUMBER:
            holds = meaning.low <= place.value <= meaning.high
        else:
            return []
        return [] if holds else [_fail(place, "format", f"The value is no {wanted}")]

    # --- arrays -----------------------------------------------------------------------------------

    def _each(self, place: _Place, keyword: str, indices: Iterable[int], *, own: bool) -> Iterator[Failure]:
        """Items against a schema each (`own`), or all against one."""
        for i in indices:
            pointer = f"{place.pointer}/{keyword}/{i}" if own else f"{place.pointer}/{keyword}"
            yield from self.failures(pointer, place.value[i], f"{place.at}/{i}")
            place.seen.items.add(i)

    def _prefix(self, place: _Place, wanted: list[Any]) -> Iterator[Failure]:
        if not isinstance(place.said.get("items"), list):
            yield from self._each(place, "prefixItems", range(min(len(wanted), len(place.value))), own=True)

    def _items(self, place: _Place, wanted: Any) -> Iterator[Failure]:
        if isinstance(wanted, list):
            yield from self._each(place, "items", range(min(len(wanted), len(place.value))), own=True)
        else:
            begin = len(place.said.get("prefixItems", ()))
            yield from self._each(place, "items", range(begin, len(place.value)), own=False)

    def _additional_items(self, place: _Place, wanted: Any) -> Iterator[Failure]:
        first = place.said.get("items")
        if isinstance(first, list):
            yield from self._each(place, "additionalItems", range(len(first), len(place.value)), own=False)

    def _contains(self, place: _Place, wanted: Any) -> Iterator[Failure]:
        pointer = f"{place.pointer}/contains"
        found = [i for i, item in enumerate(place.value) if self._valid(pointer, item)]
        if self._document.draft != 8:
            place.seen.items |= set(found)
        low, high = place.said.get("minContains", 1), place.said.get("maxContains")
        if len(found) < low:
            yield _fail(place, "contains", f"{len(found)} items satisfy it, and {low} must")
        if high is not None and len(found) > high:
            yield _fail(place, "maxContains", f"{len(found)} items satisfy contains, and {high} may")

    def _unique(self, place: _Place, wanted: bool) -> Iterator[Failure]:
        if wanted and len(set(map(value_of, place.value))) < len(place.value):
            yield _fail(place, "uniqueItems", "Two items are equal")

    def _unevaluated_items(self, place: _Place, wanted: Any) -> Iterator[Failure]:
        left = [i for i in range(len(place.value)) if i not in place.seen.items]
        yield from self._each(place, "unevaluatedItems", left, own=False)

    # --- objects ----------------------------------------------------------------------------------

    def _members(self, place: _Place, below: str, names: Iterable[str]) -> Iterator[Failure]:
        for name in names:
            yield from self.failures(
                f"{place.pointer}/{below}", place.value[name], f"{place.at}/{escape(name)}"
            )
            place.seen.names.add(name)

    def _properties(self, place: _Place, wanted: dict[str, Any]) -> Iterator[Failure]:
        for name in wanted:
            if name in place.value:
                yield from self._members(place, f"properties/{escape(name)}", [name])

    def _pattern_properties(self, place: _Place, wanted: dict[str, Any]) -> Iterator[Failure]:
        for pattern in wanted:
            matching = [name for name in place.value if self._name_matches(place, pattern, name)]
            yield from self._members(place, f"patternProperties/{escape(pattern)}", matching)

    def _name_matches(self, place: _Place, pattern: str, name: str) -> bool:
        return matches_pattern(f"{place.pointer}/patternProperties/{escape(pattern)}", pattern, name)

    def _additional_properties(self, place: _Place, wanted: Any) -> Iterator[Failure]:
        named = place.said.get("properties", {})
        patterns = place.said.get("patternProperties", {})
        left = [
            name
            for name in place.value
            if name not in named and not any(self._name_matches(place, pattern, name) for pattern in patterns)
        ]
        yield from self._members(place, "additionalProperties", left)

    def _unevaluated_properties(self, place: _Place, wanted: Any) -> Iterator[Failure]:
        left = [name for name in place.value if name not in place.seen.names]
        yield from self._members(place, "unevaluatedProperties", left)

    def _property_names(self, place: _Place, wanted: Any) -> Iterator[Failure]:
        for name in place.value:
            yield from self.failures(f"{place.pointer}/propertyNames", name, f"{place.at}/{escape(name)}")

    def _required(self, place: _Place, wanted: list[str]) -> Iterator[Failure]:
        for name in wanted:
            if name not in place.value:
                yield _fail(place, "required", f"The property {name!r} is missing")

    def _dependent_required(self, place: _Place, wanted: dict[str, list[str]]) -> Iterator[Failure]:
        for name, needed in wanted.items():
            for other in needed if name in place.value else ():
                if other not in place.value:
                    message = f"{name!r} is there, and {other!r} is missing"
                    yield _fail(place, f"dependentRequired/{escape(name)}", message)

    def _dependent_schemas(self, place: _Place, wanted: dict[str, Any]) -> Iterator[Failure]:
        for name in wanted:
            if name in place.value:
                pointer = f"{place.pointer}/dependentSchemas/{escape(name)}"
                yield from self.failures(pointer, place.value, place.at, place.seen)

    def _dependencies(self, place: _Place, wanted: dict[str, Any]) -> Iterator[Failure]:
        for name, needed in wanted.items():
            if isinstance(needed, list):
                yield from self._dependent_required(place, {name: needed})
            elif name in place.value:
                pointer = f"{place.pointer}/dependencies/{escape(name)}"
                yield from self.failures(pointer, place.value, place.at)


def _fail(place: _Place, keyword: str, message: str) -> Failure:
    return Failure(place.at, f"{place.pointer}/{keyword}", message)


def _refer(keyword: str) -> Check:
    def check(self: Instances, place: _Place, wanted: Any) -> list[Failure]:
        target = self._document.target(place.pointer, keyword)
        return self.failures(target, place.value, place.at, place.seen)

    return check


def _listed(keyword: str) -> Check:
    def check(self: Instances, place: _Place, wanted: Any) -> list[Failure]:
        values = wanted if keyword == "enum" else [wanted]
        if value_of(place.value) in set(map(value_of, values)):
            return []
        return [_fail(place, keyword, "This is not the value, or none of those, that are allowed")]

    return check


def _compare(keyword: str, holds: Callable[[Any, Any], bool], words: str) -> Check:
    def check(self: Instances, place: _Place, wanted: Any) -> list[Failure]:
        if isinstance(wanted, bool):  # draft-04: says how minimum or maximum is meant
            bound = place.said.get("minimum" if keyword == "exclusiveMinimum" else "maximum")
            if not wanted or bound is None or place.value != bound:
                return []
        elif holds(place.value, wanted):
            return []
        return [_fail(place, keyword, f"{place.value} is not {words} {wanted}")]

    return check


def _count(keyword: str, holds: Callable[[int, int], bool], what: str) -> Check:
    def check(self: Instances, place: _Place, wanted: Any) -> list[Failure]:
        if holds(len(place.value), int(wanted)):
            return []
        return [_fail(place, keyword, f"There are {len(place.value)} {what}, and {keyword} is {wanted}")]

    return check


def _nothing(self: Instances, place: _Place, wanted: Any) -> list[Failure]:
    return []


def _multiple(self: Instances, place: _Place, wanted: Any) -> list[Failure]:
    if is_multiple(place.value, Decimal(wanted)):
        return []
    return [_fail(place, "multipleOf", f"{place.value} is no multiple of {wanted}")]


_NO_TYPE: frozenset[str] = frozenset()
_ANY = frozenset(["null", "boolean", "integer", "fraction", "string", "array", "object"])
_NUMBER = frozenset(["integer", "fraction"])
_STRING = frozenset(["string"])
_ARRAY = frozenset(["array"])
_OBJECT = frozenset(["object"])
_LAST = frozenset(["unevaluatedItems", "unevaluatedProperties"])

_CHECKS: dict[str, tuple[frozenset[str], Check]] = {
    "$ref": (_ANY, _refer("$ref")),
    "$dynamicRef": (_ANY, _refer("$dynamicRef")),
    "$recursiveRef": (_ANY, _refer("$recursiveRef")),
    "type": (_ANY, Instances._type),
    "enum": (_ANY, _listed("enum")),
    "const": (_ANY, _listed("const")),
    "allOf": (_ANY, Instances._all),
    "anyOf": (_ANY, Instances._any),
    "oneOf": (_ANY, Instances._one),
    "not": (_ANY, Instances._not),
    "if": (_ANY, Instances._if),
    "minimum": (_NUMBER, _compare("minimum", operator.ge, "at least")),
    "maximum": (_NUMBER, _compare("maximum", operator.le, "at most")),
    "exclusiveMinimum": (_NUMBER, _compare("exclusiveMinimum", operator.gt, "above")),
    "exclusiveMaximum": (_NUMBER, _compare("exclusiveMaximum", operator.lt, "below")),
    "multipleOf": (_NUMBER, _multiple),
    "minLength": (_STRING, _count("minLength", operator.ge, "characters")),
    "maxLength": (_STRING, _count("maxLength", operator.le, "characters")),
    "pattern": (_STRING, Instances._pattern),
    "format": (_ANY, Instances._format),
    "prefixItems": (_ARRAY, Instances._prefix),
    "items": (_ARRAY, Instances._items),
    "additionalItems": (_ARRAY, Instances._additional_items),
    "minItems": (_ARRAY, _count("minItems", operator.ge, "items")),
    "maxItems": (_ARRAY, _count("maxItems", operator.le, "items")),
    "uniqueItems": (_ARRAY, Instances._unique),
    "contains": (_ARRAY, Instances._contains),
    "unevaluatedItems": (_ARRAY, Instances._unevaluated_items),
    "properties": (_OBJECT, Instances._properties),
    "patternProperties": (_OBJECT, Instances._pattern_properties),
    "additionalProperties": (_OBJECT, Instances._additional_properties),
    "propertyNames": (_OBJECT, Instances._property_names),
    "required": (_OBJECT, Instances._required),
    "minProperties": (_OBJECT, _count("minProperties", operator.ge, "properties")),
    "maxProperties": (_OBJECT, _count("maxProperties", operator.le, "properties")),
    "dependentRequired": (_OBJECT, Instances._dependent_required),
    "dependentSchemas": (_OBJECT, Instances._dependent_schemas),
    "dependencies": (_OBJECT, Instances._dependencies),
    "unevaluatedProperties": (_OBJECT, Instances._unevaluated_properties),
}
