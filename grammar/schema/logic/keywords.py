"""The keywords of JSON Schema as formulas: draft 2020-12, and the older drafts where they differ.

``{"type": "object", "required": ["a"]}`` is ``And((Types({"object"}), Required("a")))``. The two keywords
that depend on what other keywords evaluated are in `unevaluated`.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from ramify.grammar.schema.document import formats
from ramify.grammar.schema.document.check import ANY_DRAFT, SchemaDocument, place
from ramify.grammar.schema.document.string_patterns import without_lookaheads
from ramify.grammar.schema.logic.assertions import (
    OBJECT,
    STRING,
    Contains,
    ItemCount,
    Items,
    Length,
    LowerBound,
    Matches,
    MultipleOf,
    Properties,
    PropertyCount,
    PropertyNames,
    Required,
    Types,
    UniqueItems,
    UpperBound,
    absent,
    in_enum,
)
from ramify.grammar.schema.logic.formula import (
    FALSE,
    TRUE,
    TYPES,
    Formula,
    Subschema,
    conjunction,
    disjunction,
    negation,
)
from ramify.grammar.schema.logic.unevaluated import Unevaluated
from ramify.json_text import escape

Shared = Callable[[Formula, Formula], frozenset[str]]
"""A function of two formulas. Returns the types of the values that may satisfy both, perhaps with further
types."""


class SchemaFormulas:
    """The formulas of the subschemas of `document`.

    `ignored` holds JSON pointers. A keyword at such a pointer is left out; a subschema at such a pointer is
    read without its `CHOICES`. A subschema with ignored keywords allows more values than it should. Under a
    negation it would then exclude valid values; `refuted` is True for the formulas of negated subschemas, in
    which a subschema with ignored keywords has no values at all, so that its negation excludes nothing.
    `shared` returns the types for which two options of a oneOf must exclude each other. Without `shared`,
    oneOf is read as anyOf, which allows more values.
    """

    def __init__(
        self,
        document: SchemaDocument,
        ignored: frozenset[str] = frozenset(),
        shared: Shared | None = None,
        *,
        refuted: bool = False,
    ) -> None:
        self.document = document
        self._ignored = ignored
        self._shared = shared
        self._refuted = refuted
        self._formulas: dict[str, Formula] = {}
        self._subschemas: dict[str, Formula] = {}

    def subschema(self, pointer: str) -> Formula:
        """The formula for the subschema at `pointer`, not expanded.

        A subschema without assertions becomes TRUE. A subschema that has only a ``$ref`` is replaced by its
        target.
        """
        known = self._subschemas.get(pointer)
        if known is None:
            known = self._subschemas[pointer] = self._subschema(pointer)
        return known

    def _subschema(self, pointer: str) -> Formula:
        for _ in range(100):
            schema = self.document.at(pointer)
            if isinstance(schema, bool):
                return TRUE if schema else FALSE
            pointer = self.document.canonical(self.document.entered(pointer))
            if self.left_out(pointer):
                break
            keywords = self.keywords(pointer)
            if not keywords:
                return TRUE
            if list(keywords) != ["$ref"]:
                break
            pointer = self.document.target(pointer)
        return Subschema(pointer)

    def keywords(self, pointer: str) -> dict[str, Any]:
        """The keywords of the subschema at `pointer` that assert something, without the ignored ones."""
        if not self._ignored:
            keywords = self.document.keywords(pointer)
            return {keyword: value for keyword, value in keywords.items() if keyword in HANDLERS}
        here = place(pointer)
        known = HANDLERS.keys() - CHOICES if here in self._ignored else HANDLERS.keys()
        return {
            keyword: value
            for keyword, value in self.document.keywords(pointer).items()
            if keyword in known and f"{here}/{keyword}" not in self._ignored
        }

    def left_out(self, pointer: str) -> frozenset[str]:
        """The keywords of the subschema at `pointer` that are ignored."""
        if not self._ignored:
            return frozenset()
        known = self.document.keywords(pointer).keys() & HANDLERS.keys()
        return frozenset(known - self.keywords(pointer).keys())

    def is_refuted(self, pointer: str) -> bool:
        """Whether the subschema at `pointer` has no values because of `refuted` and an ignored keyword."""
        return self._refuted and bool(self.left_out(pointer))

    def formula(self, pointer: str) -> Formula:
        """The conjunction of the formulas of all keywords at `pointer`."""
        if pointer not in self._formulas:
            self._formulas[pointer] = self._formula(pointer)
        return self._formulas[pointer]

    def _formula(self, pointer: str) -> Formula:
        schema = self.document.at(pointer)
        if isinstance(schema, bool):
            return TRUE if schema else FALSE
        if self.is_refuted(pointer):
            return FALSE
        keywords = self.keywords(pointer)
        if "unevaluatedProperties" in keywords or "unevaluatedItems" in keywords:
            return Unevaluated(self).formula(pointer)
        return conjunction(*(self.keyword(pointer, keywords, keyword) for keyword in keywords))

    def keyword(self, pointer: str, keywords: dict[str, Any], keyword: str) -> Formula:
        """Formula of one of the `keywords` at `pointer`."""
        return HANDLERS[keyword](self, f"{pointer}/{keyword}", keywords, keywords[keyword])

    # --- applicators to the value itself ----------------------------------------------------------

    def _ref(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        pointer, _, keyword = where.rpartition("/")
        return self.subschema(self.document.target(pointer, keyword))

    def _all_of(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return conjunction(*self._options(where, value))

    def _any_of(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return disjunction(*self._options(where, value))

    def _one_of(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return disjunction(*self.exclusive(where, value))

    def _options(self, where: str, value: list[Any]) -> list[Formula]:
        return [self.subschema(f"{where}/{i}") for i in range(len(value))]

    def exclusive(self, where: str, value: list[Any]) -> list[Formula]:
        """The options of a oneOf, each without the values that satisfy another option as well."""
        options = self._options(where, value)
        if self._shared is None:
            return options
        excluded: list[list[Formula]] = [[] for _ in options]
        for i, option in enumerate(options):
            for j in range(i):
                types = self._shared(option, options[j])
                excluded[i].append(_none_of(types, options[j]))
                excluded[j].append(_none_of(types, option))
        return [conjunction(option, *excluded[i]) for i, option in enumerate(options)]

    def _not(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return negation(self.subschema(where))

    def _if(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        pointer = where.rpartition("/")[0]
        condition = self.subschema(where)
        then, otherwise = (
            self.subschema(f"{pointer}/{name}") if name in keywords else TRUE for name in ("then", "else")
        )
        if then == otherwise:
            return then
        return disjunction(conjunction(condition, then), conjunction(negation(condition), otherwise))

    def _dependent(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        """The formula of dependentRequired, of dependentSchemas, or of dependencies, which combines the
        two."""
        parts = []
        for name, needed in value.items():
            if isinstance(needed, list):
                consequence = conjunction(*map(Required, needed))
            else:
                consequence = self.subschema(f"{where}/{escape(name)}")
            if consequence != TRUE:
                present = conjunction(Types(OBJECT), Required(name), consequence)
                parts.append(disjunction(absent(name), present))
        return conjunction(*parts)

    # --- assertions about any type, numbers and strings -------------------------------------------

    def _type(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        names = set(value if isinstance(value, list) else [value])
        if "number" in names:
            names = names - {"number"} | {"integer", "fraction"}
        if keywords.get("nullable") is True and self.document.draft(where.rpartition("/")[0]) == ANY_DRAFT:
            names.add("null")
        return Types(frozenset(names))

    def _enum(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return in_enum(value)

    def _const(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return in_enum([value])

    def _nothing(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        """The formula TRUE, for annotations and for keywords that the handler of another keyword reads."""
        return TRUE

    def _multiple(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return MultipleOf(Decimal(value), True, where)

    def _pattern(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return _matching(value, where)

    def _format(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        meaning = formats.meaning(value, where)
        if meaning is None:
            return TRUE
        if isinstance(meaning, formats.NumberFormat):
            return conjunction(LowerBound(meaning.low, True), UpperBound(meaning.high, True))
        return Matches(meaning.whole, True, where, meaning.written, meaning.counted)

    # --- arrays -----------------------------------------------------------------------------------

    def _items(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        pointer = where.rpartition("/")[0]
        # Up to draft 2019-09, items could be an array, with the meaning of today's prefixItems, and
        # additionalItems had the meaning of today's items.
        older = isinstance(keywords.get("items"), list)
        prefix, rest = ("items", "additionalItems") if older else ("prefixItems", "items")
        return Items(
            tuple(self._options(f"{pointer}/{prefix}", keywords.get(prefix, []))),
            self.subschema(f"{pointer}/{rest}") if rest in keywords else TRUE,
        )

    def _unique(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return UniqueItems(True, where) if value else TRUE

    def _contains(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        low = int(keywords.get("minContains", 1))
        high = keywords.get("maxContains")
        if high is None and low == 0:
            return TRUE
        return Contains(self.subschema(where), 0, low, None if high is None else int(high), where)

    # --- objects ----------------------------------------------------------------------------------

    def _properties(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        pointer = where.rpartition("/")[0]
        named = tuple(
            (name, self.subschema(f"{pointer}/properties/{escape(name)}"))
            for name in keywords.get("properties", {})
        )
        keyed = tuple(
            (self.key(pointer, pattern), self.subschema(f"{pointer}/patternProperties/{escape(pattern)}"))
            for pattern in keywords.get("patternProperties", {})
        )
        has_others = (
            "additionalProperties" in keywords and f"{place(pointer)}/patternProperties" not in self._ignored
        )
        return Properties(
            named, keyed, self.subschema(f"{pointer}/additionalProperties") if has_others else TRUE
        )

    def key(self, pointer: str, pattern: str) -> Formula:
        """The formula for the names that a pattern of patternProperties matches."""
        return conjunction(Types(STRING), _matching(pattern, f"{pointer}/patternProperties"))

    def _required(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        return conjunction(*map(Required, value))

    def _property_names(self, where: str, keywords: dict[str, Any], value: Any) -> Formula:
        key = self.subschema(where)
        return TRUE if key == TRUE else PropertyNames(conjunction(Types(STRING), key), where)


def _none_of(types: frozenset[str], formula: Formula) -> Formula:
    """The formula of all values except those that have one of `types` and satisfy `formula`."""
    others = frozenset(TYPES) - types
    if not types or not others:
        return negation(formula) if types else TRUE
    return disjunction(Types(others), conjunction(Types(types), negation(formula)))


def _matching(pattern: str, where: str) -> Formula:
    return conjunction(*(Matches(part, positive, where) for part, positive in without_lookaheads(pattern)))


Handler = Callable[[SchemaFormulas, str, dict[str, Any], Any], Formula]
"""A function that returns the formula of a keyword. Takes the `SchemaFormulas`, the keyword's pointer, all
keywords of the subschema, and the keyword's value."""


def _bound(kind: type[LowerBound | UpperBound], exclusive: str) -> Handler:
    """The handler of minimum or maximum. In draft-04 the keyword `exclusive` is a boolean that makes the
    bound exclusive."""
    return lambda formulas, where, keywords, value: kind(Decimal(value), keywords.get(exclusive) is not True)


def _exclusive_bound(kind: type[LowerBound | UpperBound]) -> Handler:
    return lambda formulas, where, keywords, value: (
        TRUE if isinstance(value, bool) else kind(Decimal(value), False)
    )


def _at_least(kind: type[Length | ItemCount | PropertyCount]) -> Handler:
    return lambda formulas, where, keywords, value: kind(int(value), None, where) if value else TRUE


def _at_most(kind: type[Length | ItemCount | PropertyCount]) -> Handler:
    return lambda formulas, where, keywords, value: kind(0, int(value), where)


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(["$ref", "$dynamicRef", "$recursiveRef"], SchemaFormulas._ref),
    "type": SchemaFormulas._type,
    "enum": SchemaFormulas._enum,
    "const": SchemaFormulas._const,
    "minimum": _bound(LowerBound, "exclusiveMinimum"),
    "maximum": _bound(UpperBound, "exclusiveMaximum"),
    "exclusiveMinimum": _exclusive_bound(LowerBound),
    "exclusiveMaximum": _exclusive_bound(UpperBound),
    "multipleOf": SchemaFormulas._multiple,
    "minLength": _at_least(Length),
    "maxLength": _at_most(Length),
    "pattern": SchemaFormulas._pattern,
    "format": SchemaFormulas._format,
    **dict.fromkeys(["prefixItems", "items", "additionalItems"], SchemaFormulas._items),
    "minItems": _at_least(ItemCount),
    "maxItems": _at_most(ItemCount),
    "uniqueItems": SchemaFormulas._unique,
    "contains": SchemaFormulas._contains,
    **dict.fromkeys(["properties", "patternProperties", "additionalProperties"], SchemaFormulas._properties),
    "required": SchemaFormulas._required,
    "minProperties": _at_least(PropertyCount),
    "maxProperties": _at_most(PropertyCount),
    "propertyNames": SchemaFormulas._property_names,
    **dict.fromkeys(["dependentRequired", "dependentSchemas", "dependencies"], SchemaFormulas._dependent),
    "allOf": SchemaFormulas._all_of,
    "anyOf": SchemaFormulas._any_of,
    "oneOf": SchemaFormulas._one_of,
    "not": SchemaFormulas._not,
    "if": SchemaFormulas._if,
    **dict.fromkeys(["nullable", "minContains", "maxContains", "then", "else"], SchemaFormulas._nothing),
    **dict.fromkeys(["unevaluatedProperties", "unevaluatedItems"], SchemaFormulas._nothing),
}

CHOICES = frozenset(["anyOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies"])
"""Keywords that become disjunctions."""
