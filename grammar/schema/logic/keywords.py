"""The keywords of JSON Schema as formulas: draft 2020-12, and the older drafts where they differ.

`unevaluated.py` has the two keywords that depend on their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from ramify.grammar.schema.check import UNSAID, SchemaDocument, escape
from ramify.grammar.schema.logic.assertions import (
    OBJECT,
    STRING,
    Above,
    Below,
    Contains,
    Count,
    Items,
    Length,
    Matches,
    Members,
    MultipleOf,
    Names,
    Required,
    Size,
    Types,
    Unique,
    absent,
    listed,
)
from ramify.grammar.schema.logic.formula import (
    FALSE,
    TRUE,
    Formula,
    Sub,
    all_negated,
    both,
    either,
    negated,
)
from ramify.grammar.schema.logic.unevaluated import Unevaluated
from ramify.grammar.schema.values import formats
from ramify.grammar.schema.values.string_patterns import without_lookaheads

Distinct = Callable[[Formula, Formula], bool]
"""No value satisfies both formulas; False where that cannot be told."""


class Keywords:
    """What the subschemas of a document say, as formulas.

    `ignored` are the pointers of keywords that are left out, and of subschemas whose `CHOICES` are.
    `distinct` says which options of a oneOf need not exclude one another; without it oneOf is read as
    anyOf, which allows more.
    """

    def __init__(
        self,
        document: SchemaDocument,
        ignored: frozenset[str] = frozenset(),
        distinct: Distinct | None = None,
    ) -> None:
        self.document = document
        self._ignored = ignored
        self._distinct = distinct
        self._formulas: dict[str, Formula] = {}

    def sub(self, pointer: str) -> Formula:
        """The subschema at `pointer`; what says nothing, or leads elsewhere, is seen through."""
        for _ in range(100):
            schema = self.document.at(pointer)
            if isinstance(schema, bool):
                return TRUE if schema else FALSE
            pointer = self.document.canonical(pointer)
            keywords = self.said(pointer)
            if not keywords:
                return TRUE
            if list(keywords) != ["$ref"]:
                break
            pointer = self.document.target(pointer)
        return Sub(pointer)

    def said(self, pointer: str) -> dict[str, Any]:
        """The keywords of the schema at `pointer` that say something about values."""
        known = HANDLERS.keys() - CHOICES if pointer in self._ignored else HANDLERS.keys()
        return {
            keyword: value
            for keyword, value in self.document.keywords(pointer).items()
            if keyword in known and f"{pointer}/{keyword}" not in self._ignored
        }

    def formula(self, pointer: str) -> Formula:
        """What the keywords at `pointer` say together."""
        found = self._formulas.get(pointer)
        if found is None:
            found = self._formulas[pointer] = self._formula(pointer)
        return found

    def _formula(self, pointer: str) -> Formula:
        schema = self.document.at(pointer)
        if isinstance(schema, bool):
            return TRUE if schema else FALSE
        said = self.said(pointer)
        if "unevaluatedProperties" in said or "unevaluatedItems" in said:
            return Unevaluated(self).formula(pointer)
        return both(*(self.keyword(pointer, said, keyword) for keyword in said))

    def keyword(self, pointer: str, said: dict[str, Any], keyword: str) -> Formula:
        return HANDLERS[keyword](self, f"{pointer}/{keyword}", said, said[keyword])

    # --- logic ------------------------------------------------------------------------------------

    def _ref(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        pointer, _, keyword = where.rpartition("/")
        return self.sub(self.document.target(pointer, keyword))

    def _all(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return both(*self.options(where, value))

    def _any(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return either(*self.options(where, value))

    def _one(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return either(*self.exclusive(where, value))

    def options(self, where: str, value: list[Any]) -> list[Formula]:
        return [self.sub(f"{where}/{i}") for i in range(len(value))]

    def exclusive(self, where: str, value: list[Any]) -> list[Formula]:
        """The options of a oneOf, each without the values that satisfy another as well."""
        options = self.options(where, value)
        if self._distinct is None:
            return options
        rivals: list[list[Formula]] = [[] for _ in options]
        for i, option in enumerate(options):
            for j in range(i):
                if not self._distinct(option, options[j]):
                    rivals[i].append(options[j])
                    rivals[j].append(option)
        return [both(option, all_negated(rivals[i])) for i, option in enumerate(options)]

    def _not(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return negated(self.sub(where))

    def _if(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        condition = self.sub(where)
        then, otherwise = self.branch_of_if(where, said, "then"), self.branch_of_if(where, said, "else")
        if then == otherwise:
            return then
        return either(both(condition, then), both(negated(condition), otherwise))

    def branch_of_if(self, where: str, said: dict[str, Any], keyword: str) -> Formula:
        pointer = where.removesuffix("if") + keyword
        return self.sub(pointer) if keyword in said else TRUE

    def _dependent_required(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return both(*(_when_there(name, map(Required, needed)) for name, needed in value.items() if needed))

    def _dependent_schemas(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return both(*(_when_there(name, [self.sub(f"{where}/{escape(name)}")]) for name in value))

    def _dependencies(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        parts = []
        for name, needed in value.items():
            if isinstance(needed, list):
                parts.append(self._dependent_required(where, said, {name: needed}))
            else:
                parts.append(self._dependent_schemas(where, said, {name: needed}))
        return both(*parts)

    # --- any type ---------------------------------------------------------------------------------

    def _type(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        names = set(value if isinstance(value, list) else [value])
        if "number" in names:
            names = names - {"number"} | {"integer", "fraction"}
        if said.get("nullable") is True and self.document.draft == UNSAID:
            names.add("null")
        return Types(frozenset(names))

    def _enum(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return listed(value)

    def _const(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return listed([value])

    def _nothing(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return TRUE

    # --- numbers and strings ----------------------------------------------------------------------

    def _minimum(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Above(Decimal(value), said.get("exclusiveMinimum") is not True)

    def _maximum(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Below(Decimal(value), said.get("exclusiveMaximum") is not True)

    def _exclusive_minimum(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return TRUE if isinstance(value, bool) else Above(Decimal(value), False)

    def _exclusive_maximum(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return TRUE if isinstance(value, bool) else Below(Decimal(value), False)

    def _multiple(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return MultipleOf(Decimal(value), True, where)

    def _min_length(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Length(int(value), None, where) if value else TRUE

    def _max_length(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Length(0, int(value), where)

    def _pattern(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return _matching(value, where)

    def _format(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        meaning = formats.meaning(value, where)
        if meaning is None:
            return TRUE
        if isinstance(meaning, formats.Range):
            return both(Above(meaning.low, True), Below(meaning.high, True))
        return Matches(meaning.whole, True, where, meaning.written, meaning.counted)

    # --- arrays -----------------------------------------------------------------------------------

    def _items(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        pointer = where.rpartition("/")[0]
        prefix: list[Formula] = []
        rest: Formula = TRUE
        if isinstance(said.get("items"), list):
            prefix = self.options(f"{pointer}/items", said["items"])
            if "additionalItems" in said:
                rest = self.sub(f"{pointer}/additionalItems")
        else:
            prefix = self.options(f"{pointer}/prefixItems", said.get("prefixItems", []))
            if "items" in said:
                rest = self.sub(f"{pointer}/items")
        return Items(tuple(prefix), rest)

    def _min_items(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Count(int(value), None, where) if value else TRUE

    def _max_items(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Count(0, int(value), where)

    def _unique(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Unique(True, where) if value else TRUE

    def _contains(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        low = int(said.get("minContains", 1))
        high = said.get("maxContains")
        if high is None and low == 0:
            return TRUE
        return Contains(self.sub(where), 0, low, None if high is None else int(high), where)

    # --- objects ----------------------------------------------------------------------------------

    def _members(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        pointer = where.rpartition("/")[0]
        named = tuple(
            (name, self.sub(f"{pointer}/properties/{escape(name)}")) for name in said.get("properties", {})
        )
        keyed = tuple(
            (self.key(pointer, pattern), self.sub(f"{pointer}/patternProperties/{escape(pattern)}"))
            for pattern in said.get("patternProperties", {})
        )
        others = self.sub(f"{pointer}/additionalProperties") if "additionalProperties" in said else TRUE
        return Members(named, keyed, others)

    def key(self, pointer: str, pattern: str) -> Formula:
        return both(Types(STRING), _matching(pattern, f"{pointer}/patternProperties"))

    def _required(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return both(*map(Required, value))

    def _min_properties(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Size(int(value), None, where) if value else TRUE

    def _max_properties(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        return Size(0, int(value), where)

    def _property_names(self, where: str, said: dict[str, Any], value: Any) -> Formula:
        key = self.sub(where)
        return TRUE if key == TRUE else Names(both(Types(STRING), key), where)


def _matching(pattern: str, where: str) -> Formula:
    return both(*(Matches(part, wanted, where) for part, wanted in without_lookaheads(pattern)))


def _when_there(name: str, parts: Any) -> Formula:
    """Objects that have the property satisfy all `parts`."""
    formula = both(*parts)
    return TRUE if formula == TRUE else either(absent(name), both(Types(OBJECT), Required(name), formula))


Handler = Callable[[Keywords, str, dict[str, Any], Any], Formula]

HANDLERS: dict[str, Handler] = {
    "$ref": Keywords._ref,
    "$dynamicRef": Keywords._ref,
    "$recursiveRef": Keywords._ref,
    "type": Keywords._type,
    "enum": Keywords._enum,
    "const": Keywords._const,
    "nullable": Keywords._nothing,
    "minimum": Keywords._minimum,
    "maximum": Keywords._maximum,
    "exclusiveMinimum": Keywords._exclusive_minimum,
    "exclusiveMaximum": Keywords._exclusive_maximum,
    "multipleOf": Keywords._multiple,
    "minLength": Keywords._min_length,
    "maxLength": Keywords._max_length,
    "pattern": Keywords._pattern,
    "format": Keywords._format,
    "prefixItems": Keywords._items,
    "items": Keywords._items,
    "additionalItems": Keywords._items,
    "minItems": Keywords._min_items,
    "maxItems": Keywords._max_items,
    "uniqueItems": Keywords._unique,
    "contains": Keywords._contains,
    "minContains": Keywords._nothing,
    "maxContains": Keywords._nothing,
    "properties": Keywords._members,
    "patternProperties": Keywords._members,
    "additionalProperties": Keywords._members,
    "required": Keywords._required,
    "minProperties": Keywords._min_properties,
    "maxProperties": Keywords._max_properties,
    "propertyNames": Keywords._property_names,
    "dependentRequired": Keywords._dependent_required,
    "dependentSchemas": Keywords._dependent_schemas,
    "dependencies": Keywords._dependencies,
    "allOf": Keywords._all,
    "anyOf": Keywords._any,
    "oneOf": Keywords._one,
    "not": Keywords._not,
    "if": Keywords._if,
    "then": Keywords._nothing,
    "else": Keywords._nothing,
    "unevaluatedProperties": Keywords._nothing,
    "unevaluatedItems": Keywords._nothing,
}

CHOICES = frozenset(["anyOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies"])
"""Keywords that leave several ways to satisfy them."""
