"""unevaluatedProperties and unevaluatedItems, for the parts that no adjacent keyword has evaluated.

The evaluated parts depend on the options that a value satisfies. So a schema is split into cases; each has a
formula, and the parts that are evaluated if the formula holds. For

    {"anyOf": [{"properties": {"a": A}}, {"properties": {"b": B}}], "unevaluatedProperties": false}

the cases are "the first option" with a evaluated, "the second option" with b evaluated, and "both options"
with a and b evaluated. In each case unevaluatedProperties applies to all other properties, and the schema is
the disjunction of its cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from ramify.grammar.schema.document.unenforceable import refuse
from ramify.grammar.schema.logic.assertions import OBJECT, Items, Properties, Required, Types, absent
from ramify.grammar.schema.logic.formula import FALSE, TRUE, Formula, conjunction, disjunction, negation
from ramify.json_text import escape

if TYPE_CHECKING:
    from ramify.grammar.schema.logic.keywords import SchemaFormulas

MAX_CASES = 128
MAX_ANY_OF = 6

_IN_PLACE = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""Applicators that apply to the value itself. The parts that their subschemas evaluate count as evaluated by
the schema."""

_ABOUT_PROPERTIES = frozenset(
    ["properties", "patternProperties", "additionalProperties", "unevaluatedProperties", *_IN_PLACE]
)
_ABOUT_ITEMS = frozenset(
    ["prefixItems", "items", "additionalItems", "contains", "unevaluatedItems", *_IN_PLACE]
)
"""Keywords that, if they are ignored, count as having evaluated all items (or all properties, for
`_ABOUT_PROPERTIES`)."""


class Evaluated(NamedTuple):
    """The properties and items of a value that are evaluated."""

    names: tuple[str, ...] = ()
    keys: tuple[Formula, ...] = ()
    """Properties whose names satisfy one of these formulas are evaluated."""
    all_names: bool = False
    items: int | None = 0
    """Number of items, from the first, that are evaluated; None if all are."""
    contained: tuple[Formula, ...] = ()
    """Items that satisfy one of these formulas are evaluated."""

    def union(self, other: Evaluated) -> Evaluated:
        """The properties and items that at least one of the two evaluates."""
        return Evaluated(
            tuple(dict.fromkeys(self.names + other.names)),
            tuple(dict.fromkeys(self.keys + other.keys)),
            self.all_names or other.all_names,
            None if self.items is None or other.items is None else max(self.items, other.items),
            tuple(dict.fromkeys(self.contained + other.contained)),
        )


Case = tuple[Formula, Evaluated]
"""A case: a formula, and the parts that are evaluated in values that satisfy the formula."""

NOTHING_EVALUATED = Evaluated()
_ANY_VALUE: list[Case] = [(TRUE, NOTHING_EVALUATED)]


class Unevaluated:
    """Formulas of subschemas that have unevaluatedProperties or unevaluatedItems."""

    def __init__(self, formulas: SchemaFormulas) -> None:
        self._formulas = formulas

    def formula(self, pointer: str) -> Formula:
        """The conjunction of all keywords at `pointer`, unevaluatedProperties and unevaluatedItems
        included."""
        return disjunction(*(formula for formula, _ in self._cases(pointer, ())))

    def _cases(self, pointer: str, path: tuple[str, ...]) -> list[Case]:
        """The cases of the subschema at `pointer`. `path` has the pointers of the subschemas that are being
        expanded."""
        schema = self._formulas.document.at(pointer)
        if isinstance(schema, bool):
            return _ANY_VALUE if schema else []
        pointer = self._formulas.document.entered(pointer)
        if self._formulas.is_refuted(pointer):
            return []
        if pointer in path:
            refuse(
                pointer,
                "Unevaluated properties or items of a schema that leads back to itself are not enforced",
                "Set additionalProperties or items to false in each schema instead.",
            )
        path = (*path, pointer)
        keywords = self._formulas.keywords(pointer)
        plain = [
            self._formulas.keyword(pointer, keywords, name) for name in keywords if name not in _IN_PLACE
        ]
        cases: list[Case] = [(conjunction(*plain), self._own(pointer, keywords))]
        for keyword in keywords:
            if keyword in _IN_PLACE:
                applied = self._applied(f"{pointer}/{keyword}", keywords, keyword, path)
                cases = _product(cases, applied, pointer)
        if "unevaluatedProperties" in keywords or "unevaluatedItems" in keywords:
            cases = [self._rest(pointer, keywords, case) for case in cases]
        return cases

    def _own(self, pointer: str, keywords: dict[str, Any]) -> Evaluated:
        """The properties and items that are evaluated by keywords about properties and items themselves, such
        as properties."""
        older = isinstance(keywords.get("items"), list)
        prefix, rest = ("items", "additionalItems") if older else ("prefixItems", "items")
        contained: tuple[Formula, ...] = ()
        if "contains" in keywords and self._formulas.document.draft(pointer) != 8:
            contained = (self._formulas.subschema(f"{pointer}/contains"),)
        left_out = self._formulas.left_out(pointer)
        all_items = rest in keywords or not left_out.isdisjoint(_ABOUT_ITEMS)
        return Evaluated(
            tuple(keywords.get("properties", ())),
            tuple(self._formulas.key(pointer, pattern) for pattern in keywords.get("patternProperties", ())),
            "additionalProperties" in keywords or not left_out.isdisjoint(_ABOUT_PROPERTIES),
            None if all_items else len(keywords.get(prefix, ())),
            contained,
        )

    def _applied(
        self, where: str, keywords: dict[str, Any], keyword: str, path: tuple[str, ...]
    ) -> list[Case]:
        """The cases of `keyword`, one of `_IN_PLACE`."""
        value = keywords[keyword]
        match keyword:
            case "allOf":
                return _all_of([self._cases(f"{where}/{i}", path) for i in range(len(value))], where)
            case "anyOf":
                return self._any_of(where, value, path)
            case "oneOf":
                return [
                    (conjunction(formula, exclusive), evaluated)
                    for i, exclusive in enumerate(self._formulas.exclusive(where, value))
                    for formula, evaluated in self._cases(f"{where}/{i}", path)
                ]
            case "if":
                return self._if(where, keywords, path)
            case "dependentSchemas":
                return _all_of([self._dependent(where, name, path) for name in value], where)
        target = self._formulas.document.target(where.rpartition("/")[0], keyword)
        return self._cases(target, path)

    def _dependent(self, where: str, name: str, path: tuple[str, ...]) -> list[Case]:
        present = conjunction(Types(OBJECT), Required(name))
        met = self._cases(f"{where}/{escape(name)}", path)
        without: Case = (absent(name), NOTHING_EVALUATED)
        return [without, *((conjunction(present, formula), evaluated) for formula, evaluated in met)]

    def _any_of(self, where: str, value: list[Any], path: tuple[str, ...]) -> list[Case]:
        options = [self._cases(f"{where}/{i}", path) for i in range(len(value))]
        if all(evaluated == NOTHING_EVALUATED for option in options for _, evaluated in option):
            any_option = disjunction(*(formula for option in options for formula, _ in option))
            return [(any_option, NOTHING_EVALUATED)]
        if len(options) > MAX_ANY_OF:
            refuse(
                where,
                f"anyOf with more than {MAX_ANY_OF} options beside unevaluated… is not enforced",
                "Write oneOf where no two options hold at once, or name their properties beside anyOf.",
            )
        found: list[Case] = []
        for size in range(1, len(options) + 1):
            for chosen in itertools.combinations(options, size):
                found += _all_of(chosen, where)
        return _limited(found, where)

    def _if(self, where: str, keywords: dict[str, Any], path: tuple[str, ...]) -> list[Case]:
        pointer = where.rpartition("/")[0]
        then, otherwise = (
            self._cases(f"{pointer}/{name}", path) if name in keywords else _ANY_VALUE
            for name in ("then", "else")
        )
        failing: list[Case] = [(negation(self._formulas.subschema(where)), NOTHING_EVALUATED)]
        return _product(self._cases(where, path), then, where) + _product(failing, otherwise, where)

    def _rest(self, pointer: str, keywords: dict[str, Any], case: Case) -> Case:
        """The case with unevaluatedProperties and unevaluatedItems added to its formula. All properties or
        items are then evaluated."""
        formula, evaluated = case
        if "unevaluatedProperties" in keywords:
            others = self._formulas.subschema(f"{pointer}/unevaluatedProperties")
            if not evaluated.all_names and others != TRUE:
                named = tuple((name, TRUE) for name in evaluated.names)
                keyed = tuple((key, TRUE) for key in evaluated.keys)
                formula = conjunction(formula, Properties(named, keyed, others))
            evaluated = evaluated._replace(all_names=True)
        if "unevaluatedItems" in keywords:
            others = self._formulas.subschema(f"{pointer}/unevaluatedItems")
            if evaluated.items is not None and others != TRUE:
                rest = disjunction(*evaluated.contained, others)
                formula = conjunction(formula, Items((TRUE,) * evaluated.items, rest))
            evaluated = evaluated._replace(items=None)
        return formula, evaluated


def _all_of(parts: Iterable[list[Case]], where: str) -> list[Case]:
    return reduce(lambda left, right: _product(left, right, where), parts, _ANY_VALUE)


def _product(left: list[Case], right: list[Case], where: str) -> list[Case]:
    """The cases of the conjunction of two schemas with the cases `left` and `right`."""
    pairs = itertools.product(left, right)
    return _limited([(conjunction(a, b), known.union(more)) for (a, known), (b, more) in pairs], where)


def _limited(cases: list[Case], where: str) -> list[Case]:
    """`cases`, with those that evaluate the same parts merged. Raises `Unenforceable` for more than
    `MAX_CASES`."""
    joined: dict[Evaluated, list[Formula]] = {}
    for formula, evaluated in cases:
        if formula != FALSE:
            joined.setdefault(evaluated, []).append(formula)
    if len(joined) > MAX_CASES:
        refuse(
            where,
            f"More than {MAX_CASES} cases beside unevaluated… are not enforced",
            "Write fewer options of anyOf, oneOf and if beside it, or name their properties beside them.",
        )
    return [(disjunction(*formulas), evaluated) for evaluated, formulas in joined.items()]
