"""Formulas in disjunctive normal form: a value satisfies a formula if and only if it satisfies some disjunct.

A disjunct is a conjunction of assertions without a choice left in it. Arriving at them takes three steps,
here for ``{"type": ["integer", "null"], "minimum": 8, "not": {"const": null}}``:

    formula     Types(integer, null) and LowerBound(8) and not the subschema "/not"
    expanded    Types(integer, null) and LowerBound(8) and NotInEnum(null)
    disjuncts   one: types integer and null, assertions LowerBound(8) and NotInEnum(null)

Disjuncts that no value satisfies are dropped while the options of a disjunction are distributed, so that
those of several disjunctions do not multiply.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.json_values import Value, type_of
from ramify.grammar.schema.logic.assertions import (
    NUMBERS,
    OBJECT,
    InEnum,
    ItemCount,
    Items,
    Length,
    LowerBound,
    NotInEnum,
    Properties,
    PropertyCount,
    Required,
    Types,
    UpperBound,
)
from ramify.grammar.schema.logic.formula import (
    FALSE,
    TRUE,
    TYPES,
    And,
    Assertion,
    Formula,
    Or,
    Subschema,
    Test,
    conjunction,
    negation,
)
from ramify.grammar.schema.logic.keywords import SchemaFormulas
from ramify.grammar.schema.logic.simplify import simplified
from ramify.grammar.schema.unenforceable import Unenforceable, refuse

AnyAssertion = TypeVar("AnyAssertion", bound=Assertion)

MAX_DISJUNCTS = 300
MAX_DEPTH = 4
"""How many levels below a value are searched for a contradiction."""


@dataclasses.dataclass(frozen=True)
class Disjunct:
    """The values of `types` for which all `assertions` hold or, where `values` is given, exactly those
    values.

    The assertions are in the order of the schema; those about other types are left out.
    """

    types: frozenset[str] = frozenset(TYPES)
    assertions: tuple[Assertion, ...] = ()
    values: tuple[Value, ...] | None = None

    def of(self, kind: type[AnyAssertion]) -> list[AnyAssertion]:
        """The assertions of one class."""
        return [assertion for assertion in self.assertions if isinstance(assertion, kind)]

    def item_formula(self, i: int) -> Formula:
        """What item `i` of an array satisfies."""
        return conjunction(*(assertion.at(i) for assertion in self.of(Items)))

    @property
    def prefix_length(self) -> int:
        """The items before this one have schemas of their own; all later ones satisfy the same formula."""
        return max((len(assertion.prefix) for assertion in self.of(Items)), default=0)

    def property_formula(self, name: str, test: Test) -> Formula:
        """What the property `name` of an object satisfies."""
        return conjunction(*(assertion.of(name, test) for assertion in self.of(Properties)))

    @functools.cached_property
    def named_properties(self) -> dict[str, None]:
        """The names that the schema has, in its order, then those that are only required."""
        return {name: None for known in self.of(Properties) for name, _ in known.named} | self.required

    @functools.cached_property
    def required(self) -> dict[str, None]:
        return {assertion.name: None for assertion in self.of(Required)}


class _Marks(NamedTuple):
    """What tells the values of most options apart: their types, and the values of required properties."""

    types: frozenset[str]
    properties: dict[str, frozenset[Value]]

    def tells_from(self, other: _Marks) -> bool:
        """Whether no value has both marks."""
        shared = self.types & other.types
        return not shared or (
            shared == OBJECT
            and any(
                name in other.properties and values.isdisjoint(other.properties[name])
                for name, values in self.properties.items()
            )
        )


class NormalForm:
    """The disjunctive normal forms of formulas whose subschemas are in `formulas`.

    `refuted` gives the formulas of negated subschemas, where those differ. `check` decides which disjuncts
    are contradictions; it defaults to this object.
    """

    def __init__(
        self, formulas: SchemaFormulas, refuted: SchemaFormulas | None = None, check: NormalForm | None = None
    ) -> None:
        self._formulas = formulas
        self._refuted = refuted or formulas
        self._check = check or self
        self._of: dict[Formula, list[Disjunct]] = {}
        self._simpler: dict[Or, Formula] = {}
        self._values: dict[Formula, frozenset[Value] | None] = {}
        self._enums: dict[Formula, frozenset[Value] | None] = {}
        self._conjunctions: dict[Formula, tuple[Assertion, ...] | None] = {}
        self._marks: dict[Formula, list[_Marks]] = {}
        self._possible: dict[tuple[Formula, int], bool] = {}

    def of(self, formula: Formula) -> list[Disjunct]:
        """The disjuncts of `formula`, in the order of the schema.

        Raises `InvalidConstraint` for a $ref that leads back to itself, and `Unenforceable` for more than
        `MAX_DISJUNCTS` disjuncts.
        """
        found = self._of.get(formula)
        if found is None:
            found = self._of[formula] = self._expand([Disjunct()], formula, ())
        return found

    def satisfies(self, formula: Formula, value: Any) -> bool:
        """Whether `value` satisfies `formula`."""
        match formula:
            case And(parts):
                return all(self.satisfies(part, value) for part in parts)
            case Or(options):
                return any(self.satisfies(option, value) for option in options)
            case Subschema(pointer, positive):
                return self.satisfies(self._formulas_of(formula).formula(pointer), value) == positive
        return type_of(value) not in formula.kinds or formula.holds(value, self.satisfies)

    def _formulas_of(self, subschema: Subschema) -> SchemaFormulas:
        return self._formulas if subschema.positive else self._refuted

    def shared_types(self, a: Formula, b: Formula) -> frozenset[str]:
        """The types of values that may satisfy both, as far as is seen within `MAX_DEPTH` levels.

        Types of which no value satisfies one of the two are among them, unless there are no others.
        """
        left, right = self._all_values(a), self._all_values(b)
        if left is not None and right is not None and left.isdisjoint(right):
            return frozenset()  # a oneOf of 500 constants compares 125,000 pairs
        marks = self._marks_of(a), self._marks_of(b)
        if all(one.tells_from(other) for one, other in itertools.product(*marks)):
            return frozenset()
        shared = self._types_possible(conjunction(a, b))
        of_a, of_b = (frozenset[str]().union(*(mark.types for mark in each)) for each in marks)
        return shared | (frozenset(TYPES) - (of_a & of_b)) if shared else shared

    def _types_possible(self, formula: Formula) -> frozenset[str]:
        """The types of values that may satisfy `formula`: see `possible`."""
        try:
            disjuncts = self.of(formula)
        except Unenforceable:
            return frozenset(TYPES)
        found: set[str] = set()
        for disjunct in disjuncts:
            if disjunct.values is not None:
                found |= {type_of(value.value) for value in disjunct.values}
                continue
            for kind in disjunct.types - found:
                if self._is_possible(dataclasses.replace(disjunct, types=frozenset([kind])), MAX_DEPTH):
                    found.add(kind)
        return frozenset(found)

    def _marks_of(self, formula: Formula) -> list[_Marks]:
        if formula not in self._marks:
            try:
                disjuncts = self.of(formula)
            except Unenforceable:
                disjuncts = [Disjunct()]
            self._marks[formula] = [
                _Marks(
                    disjunct.types if disjunct.values is None else frozenset(TYPES),
                    {
                        name: values
                        for name in disjunct.required
                        if (values := self._all_values(disjunct.property_formula(name, self.satisfies)))
                        is not None
                    },
                )
                for disjunct in disjuncts
            ]
        return self._marks[formula]

    def _all_values(self, formula: Formula) -> frozenset[Value] | None:
        """The values of `formula`; None unless all its disjuncts have `values`."""
        if formula not in self._values:
            try:
                values = [disjunct.values for disjunct in self.of(formula)]
            except Unenforceable:
                values = [None]
            known = [value for each in values for value in each or ()]
            self._values[formula] = None if None in values else frozenset(known)
        return self._values[formula]

    def possible(self, formula: Formula, depth: int) -> bool:
        """Whether some value may satisfy `formula`: False where a contradiction is within `depth` levels."""
        if formula in (TRUE, FALSE):
            return formula == TRUE
        if depth == 0:
            return True
        key = (formula, depth)
        if key not in self._possible:
            self._possible[key] = True  # the answer where the formula contains itself
            try:
                disjuncts = self.of(formula)
            except Unenforceable:
                disjuncts = [Disjunct()]
            self._possible[key] = any(self._is_possible(disjunct, depth) for disjunct in disjuncts)
        return self._possible[key]

    # --- expansion --------------------------------------------------------------------------------

    def _expand(
        self, disjuncts: list[Disjunct], formula: Formula, path: tuple[Subschema, ...]
    ) -> list[Disjunct]:
        assertions: dict[Assertion, None] = {}
        choices: dict[Or, tuple[Subschema, ...]] = {}
        self._collect(formula, path, assertions, choices)
        for assertion in _with_exclusions_joined(assertions):
            disjuncts = [
                joined for disjunct in disjuncts if (joined := self.joined(disjunct, assertion)) is not None
            ]
        for choice, inner in sorted(choices.items(), key=lambda item: len(item[0].options)):
            disjuncts = self._choose(disjuncts, choice, inner)
        return disjuncts

    def _collect(
        self,
        formula: Formula,
        path: tuple[Subschema, ...],
        assertions: dict[Assertion, None],
        choices: dict[Or, Any],
    ) -> None:
        """Add the conjuncts of `formula` to `assertions` and `choices`; `path` has the subschemas around."""
        match formula:
            case And(parts):
                for part in parts:
                    self._collect(part, path, assertions, choices)
            case Or():
                simpler = self._simpler.get(formula)
                if simpler is None:
                    simpler = self._simpler[formula] = simplified(formula)
                if isinstance(simpler, Or):
                    choices.setdefault(simpler, path)
                else:
                    self._collect(simpler, path, assertions, choices)
            case Subschema(pointer, positive):
                if formula in path:
                    raise InvalidConstraint("This $ref leads back to itself.", pointer=f"{pointer}/$ref")
                inner = self._formulas_of(formula).formula(pointer)
                self._collect(inner if positive else negation(inner), (*path, formula), assertions, choices)
            case Assertion():
                assertions[formula] = None

    def _choose(self, disjuncts: list[Disjunct], choice: Or, path: tuple[Subschema, ...]) -> list[Disjunct]:
        found: dict[Disjunct, None] = {}
        for disjunct in disjuncts:
            options: dict[Disjunct, None] = {}
            for option in choice.options:
                options |= dict.fromkeys(self._expand([disjunct], option, path))
            if disjunct in options:
                options = {disjunct: None}  # the option that always holds includes the others
            found = _with_values_joined(found | options)
            if len(found) > MAX_DISJUNCTS:
                found = dict.fromkeys(self._only_possible(found))
            if len(found) > MAX_DISJUNCTS:
                where = next((part.pointer for part in reversed(path)), "")
                refuse(
                    where,
                    f"The alternatives here multiply to more than {MAX_DISJUNCTS}",
                    "Use fewer anyOf, oneOf and not within one another.",
                )
        return list(found) if len(found) <= len(disjuncts) else self._only_possible(found)

    def _only_possible(self, disjuncts: Iterable[Disjunct]) -> list[Disjunct]:
        return [disjunct for disjunct in disjuncts if self._check._is_possible(disjunct, MAX_DEPTH)]

    def joined(self, disjunct: Disjunct, assertion: Assertion) -> Disjunct | None:
        """The conjunction of a disjunct and an assertion; None where no value satisfies it."""
        if disjunct.values is not None:
            values = tuple(self._satisfying(assertion, disjunct.values))
            return Disjunct(disjunct.types, disjunct.assertions, values) if values else None
        match assertion:
            case Types(types):
                left = disjunct.types & types
                if left == disjunct.types:
                    return disjunct
                assertions = tuple(known for known in disjunct.assertions if known.kinds & left)
                return Disjunct(left, assertions) if left else None
            case InEnum(values):
                joined: Disjunct | None = Disjunct(
                    values=tuple(value for value in values if type_of(value.value) in disjunct.types)
                )
                for known in disjunct.assertions:
                    joined = self.joined(joined, known) if joined is not None else None
                return joined if joined is not None and joined.values else None
        if not assertion.kinds & disjunct.types or assertion in disjunct.assertions:
            return disjunct
        if disjunct.types == OBJECT and isinstance(assertion, Properties):
            decided = self._decided(disjunct, assertion)
            if decided is not None:
                return disjunct if decided else None
        return Disjunct(disjunct.types, (*disjunct.assertions, assertion))

    def _decided(self, disjunct: Disjunct, assertion: Properties) -> bool | None:
        """Whether `assertion` holds for all objects of `disjunct`, or for none, as is seen from the enum of a
        property; else None.

        Of 50 if/then that depend on one property, only the one for its value is left.
        """
        match assertion:
            case Properties(((name, formula),), (), others) if others == TRUE:
                if name not in disjunct.named_properties:
                    return None
                known = self._enumerated(disjunct.property_formula(name, self.satisfies))
                assertions = self._assertions(formula)
                if known is None or assertions is None:
                    return None
                left = self._satisfying_all(assertions, known)
                if len(left) == len(known):
                    return True
                if not left and name in disjunct.required:
                    return False
        return None

    def _enumerated(self, formula: Formula) -> frozenset[Value] | None:
        """The values of `formula`; None where it is no conjunction of assertions with an enum among them."""
        if formula not in self._enums:
            assertions = self._assertions(formula) or ()
            enums = [each.values for each in assertions if isinstance(each, InEnum)]
            self._enums[formula] = (
                frozenset(self._satisfying_all(assertions, min(enums, key=len))) if enums else None
            )
        return self._enums[formula]

    def _assertions(self, formula: Formula) -> tuple[Assertion, ...] | None:
        """The assertions that `formula` is a conjunction of; None if there is a disjunction among them."""
        if formula not in self._conjunctions:
            assertions: dict[Assertion, None] = {}
            choices: dict[Or, Any] = {}
            self._collect(formula, (), assertions, choices)
            self._conjunctions[formula] = None if choices else tuple(_with_exclusions_joined(assertions))
        return self._conjunctions[formula]

    def _satisfying_all(self, assertions: Iterable[Assertion], values: Iterable[Value]) -> tuple[Value, ...]:
        for assertion in assertions:
            values = tuple(self._satisfying(assertion, values))
        return tuple(values)

    def _satisfying(self, assertion: Assertion, values: Iterable[Value]) -> Iterable[Value]:
        if isinstance(assertion, InEnum | NotInEnum):
            among = frozenset(assertion.values)
            return (value for value in values if (value in among) == isinstance(assertion, InEnum))
        return (
            value
            for value in values
            if type_of(value.value) not in assertion.kinds or assertion.holds(value.value, self.satisfies)
        )

    # --- possibility ------------------------------------------------------------------------------

    def _is_possible(self, disjunct: Disjunct, depth: int) -> bool:
        if disjunct.values is not None or disjunct.types & {"null", "boolean"}:
            return True
        if disjunct.types & NUMBERS and _numbers_possible(disjunct):
            return True
        if "string" in disjunct.types and _counts_possible(disjunct, Length):
            return True
        if "array" in disjunct.types and self._array_possible(disjunct, depth):
            return True
        return "object" in disjunct.types and self._object_possible(disjunct, depth)

    def _array_possible(self, disjunct: Disjunct, depth: int) -> bool:
        if not _counts_possible(disjunct, ItemCount):
            return False
        low, _ = counts(disjunct, ItemCount)
        return all(
            self.possible(disjunct.item_formula(i), depth - 1)
            for i in range(min(low, disjunct.prefix_length + 1))
        )

    def _object_possible(self, disjunct: Disjunct, depth: int) -> bool:
        return _counts_possible(disjunct, PropertyCount) and all(
            self.possible(disjunct.property_formula(name, self.satisfies), depth - 1)
            for name in disjunct.required
        )


def _with_exclusions_joined(assertions: Iterable[Assertion]) -> list[Assertion]:
    """All `NotInEnum` as one, in the place of the first."""
    excluded = dict.fromkeys(
        value for assertion in assertions if isinstance(assertion, NotInEnum) for value in assertion.values
    )
    joined = NotInEnum(tuple(excluded))
    return list(
        dict.fromkeys(joined if isinstance(assertion, NotInEnum) else assertion for assertion in assertions)
    )


def _with_values_joined(disjuncts: dict[Disjunct, None]) -> dict[Disjunct, None]:
    """All disjuncts with `values` as one."""
    enums = [disjunct for disjunct in disjuncts if disjunct.values is not None]
    if len(enums) < 2:
        return disjuncts
    values = dict.fromkeys(value for disjunct in enums for value in disjunct.values or ())
    joined = Disjunct(values=tuple(values))
    found: dict[Disjunct, None] = {}
    for disjunct in disjuncts:
        found[disjunct if disjunct.values is None else joined] = None
    return found


def _numbers_possible(disjunct: Disjunct) -> bool:
    low, high = bounds(disjunct)
    if low is None or high is None or low.value < high.value:
        return True
    return low.value == high.value and low.inclusive and high.inclusive


def bounds(disjunct: Disjunct) -> tuple[LowerBound | None, UpperBound | None]:
    """The strictest lower and upper bound on numbers."""
    low = max(
        disjunct.of(LowerBound),
        key=lambda bound: (bound.value, not bound.inclusive),
        default=None,
    )
    high = min(disjunct.of(UpperBound), key=lambda bound: (bound.value, bound.inclusive), default=None)
    return low, high


def counts(disjunct: Disjunct, kind: type[Length | ItemCount | PropertyCount]) -> tuple[int, int | None]:
    """The least and the most characters, items or properties; None: no limit."""
    assertions = disjunct.of(kind)
    low = max((assertion.low for assertion in assertions), default=0)
    return low, min((assertion.high for assertion in assertions if assertion.high is not None), default=None)


def _counts_possible(disjunct: Disjunct, kind: type[Length | ItemCount | PropertyCount]) -> bool:
    low, high = counts(disjunct, kind)
    return high is None or low <= high
