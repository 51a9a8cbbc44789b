"""A disjunct: a conjunction of assertions, which contains no disjunction (`normal_form`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TypeVar

from ramify.grammar.schema.document.json_values import Value
from ramify.grammar.schema.logic.assertions import (
    ItemCount,
    Items,
    Length,
    LowerBound,
    NotInEnum,
    Properties,
    PropertyCount,
    Required,
    UpperBound,
)
from ramify.grammar.schema.logic.clauses import AnyProperty
from ramify.grammar.schema.logic.formula import TRUE, TYPES, Assertion, Formula, Test, conjunction

AnyAssertion = TypeVar("AnyAssertion", bound=Assertion)


@dataclasses.dataclass(frozen=True)
class Disjunct:
    """A set of JSON values: `values` if they are given, otherwise the values of `types` for which all
    `assertions` hold.

    The assertions are in the order of the schema. Assertions about types that are not in `types` are left
    out.
    """

    types: frozenset[str] = frozenset(TYPES)
    assertions: tuple[Assertion, ...] = ()
    values: tuple[Value, ...] | None = None

    def asserted(self, kind: type[AnyAssertion]) -> list[AnyAssertion]:
        """The assertions of the class `kind`."""
        return [assertion for assertion in self.assertions if isinstance(assertion, kind)]

    def item_formula(self, i: int) -> Formula:
        """Formula of item `i` of an array."""
        return conjunction(*(assertion.at(i) for assertion in self.asserted(Items)))

    @property
    def prefix_length(self) -> int:
        """Number of first items with schemas of their own; all later items satisfy the same formula."""
        return max((len(assertion.prefix) for assertion in self.asserted(Items)), default=0)

    def property_formula(self, name: str, test: Test) -> Formula:
        """Formula of the property `name` of an object."""
        general, naming = self._about_properties
        return conjunction(*(each.formula_of(name, test) for each in naming.get(name, general)))

    @functools.cached_property
    def _about_properties(self) -> tuple[list[Properties], dict[str, list[Properties]]]:
        """The `Properties` that restrict also properties without a name in them; and, by name, those that
        restrict the property."""
        general: list[Properties] = []
        naming: dict[str, list[Properties]] = {}
        for each in self.asserted(Properties):
            if each.keyed or each.others != TRUE:
                for known in naming.values():
                    known.append(each)
                naming |= {name: [*general, each] for name in each.by_name if name not in naming}
                general.append(each)
            else:
                for name in each.by_name:
                    naming.setdefault(name, general.copy()).append(each)
        return general, naming

    @functools.cached_property
    def named_properties(self) -> dict[str, None]:
        """The names of properties in the order of the schema: first those that have schemas, then those in
        clauses, then those that are only required."""
        in_clauses = {name: None for clause in self.asserted(AnyProperty) for name, _, _ in clause.named}
        named = {name: None for known in self.asserted(Properties) for name, _ in known.named}
        return named | in_clauses | self.required

    @functools.cached_property
    def required(self) -> dict[str, None]:
        return {assertion.name: None for assertion in self.asserted(Required)}


def with_exclusions_joined(assertions: Iterable[Assertion]) -> list[Assertion]:
    """`assertions` with all `NotInEnum` merged into one, at the place of the first."""
    excluded = dict.fromkeys(
        value for assertion in assertions if isinstance(assertion, NotInEnum) for value in assertion.values
    )
    joined = NotInEnum(tuple(excluded))
    return list(
        dict.fromkeys(joined if isinstance(assertion, NotInEnum) else assertion for assertion in assertions)
    )


def with_values_joined(disjuncts: dict[Disjunct, None]) -> dict[Disjunct, None]:
    """`disjuncts` with all those that have `values` merged into one."""
    enums = [disjunct for disjunct in disjuncts if disjunct.values is not None]
    if len(enums) < 2:
        return disjuncts
    values = dict.fromkeys(value for disjunct in enums for value in disjunct.values or ())
    joined = Disjunct(values=tuple(values))
    found: dict[Disjunct, None] = {}
    for disjunct in disjuncts:
        found[disjunct if disjunct.values is None else joined] = None
    return found


def numbers_possible(disjunct: Disjunct) -> bool:
    low, high = bounds(disjunct)
    if low is None or high is None or low.value < high.value:
        return True
    return low.value == high.value and low.inclusive and high.inclusive


def bounds(disjunct: Disjunct) -> tuple[LowerBound | None, UpperBound | None]:
    """The strictest lower bound and the strictest upper bound on numbers; None for a bound that the disjunct
    does not have."""
    low = max(
        disjunct.asserted(LowerBound),
        key=lambda bound: (bound.value, not bound.inclusive),
        default=None,
    )
    high = min(disjunct.asserted(UpperBound), key=lambda bound: (bound.value, bound.inclusive), default=None)
    return low, high


def counts(disjunct: Disjunct, kind: type[Length | ItemCount | PropertyCount]) -> tuple[int, int | None]:
    """The least and the greatest number of characters, items or properties; None means no limit."""
    assertions = disjunct.asserted(kind)
    low = max((assertion.low for assertion in assertions), default=0)
    return low, min((assertion.high for assertion in assertions if assertion.high is not None), default=None)


def counts_possible(disjunct: Disjunct, kind: type[Length | ItemCount | PropertyCount]) -> bool:
    low, high = counts(disjunct, kind)
    return high is None or low <= high
