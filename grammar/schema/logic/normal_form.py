"""Formulas in disjunctive normal form: a value satisfies a formula if and only if it satisfies some disjunct.

A disjunct is a conjunction of assertions, which contains no disjunction. Disjuncts are computed in three
steps, here for ``{"type": ["integer", "null"], "minimum": 8, "not": {"const": null}}``:

    formula     Types(integer, null) and LowerBound(8) and not the subschema "/not"
    expanded    Types(integer, null) and LowerBound(8) and NotInEnum(null)
    disjuncts   one: types integer and null, assertions LowerBound(8) and NotInEnum(null)

Disjuncts that no value satisfies are dropped while the options of a disjunction are distributed. This often
keeps the options of several disjunctions from multiplying.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.document.json_values import Value, type_of
from ramify.grammar.schema.document.unenforceable import Unenforceable, refuse
from ramify.grammar.schema.logic.assertions import (
    NUMBERS,
    OBJECT,
    InEnum,
    ItemCount,
    Length,
    NotInEnum,
    Properties,
    PropertyCount,
    Types,
)
from ramify.grammar.schema.logic.clauses import NEVER, AnyProperty, clauses
from ramify.grammar.schema.logic.disjunct import (
    Disjunct,
    counts,
    counts_possible,
    numbers_possible,
    with_exclusions_joined,
    with_values_joined,
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
    conjunction,
    negation,
)
from ramify.grammar.schema.logic.keywords import SchemaFormulas
from ramify.grammar.schema.logic.simplify import simplified

MAX_DISJUNCTS = 300
MAX_MULTIPLIED = 24
"""Number of disjuncts above which choices between single properties become clauses (`clauses`)."""
MAX_DEPTH = 4
"""Levels of nesting inside a value that are searched for a contradiction."""


class _Marks(NamedTuple):
    """Characteristics of a disjunct's values: their types, and the possible values of required properties.
    Contradictory characteristics show that two options of a oneOf exclude each other (`tells_from`)."""

    types: frozenset[str]
    properties: dict[str, frozenset[Value]]

    def tells_from(self, other: _Marks) -> bool:
        """Whether no value can have the characteristics of both."""
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

    `refuted` has the formulas of negated subschemas, by default those of `formulas`. `check` decides which
    disjuncts are contradictions, by default this object. Choices between single properties become clauses
    above `most_multiplied` disjuncts.
    """

    def __init__(
        self,
        formulas: SchemaFormulas,
        refuted: SchemaFormulas | None = None,
        check: NormalForm | None = None,
        most_multiplied: int = MAX_MULTIPLIED,
    ) -> None:
        self._formulas = formulas
        self._refuted = refuted or formulas
        self._check = check or self
        self._most_multiplied = most_multiplied
        self.has_clauses = False
        """Whether some choice became clauses."""
        self._choice_clauses: dict[Or, list[AnyProperty] | None] = {}
        self._disjuncts: dict[Formula, list[Disjunct]] = {}
        self._possible: dict[tuple[Formula, int], bool] = {}
        self._simplified = functools.cache(simplified)
        self._all_values = functools.cache(self._find_all_values)
        self._enumerated = functools.cache(self._find_enumerated)
        self._assertions = functools.cache(self._find_assertions)
        self._marks_of = functools.cache(self._find_marks)

    def disjuncts_of(self, formula: Formula) -> list[Disjunct]:
        """The disjuncts of `formula`, in the order of the schema.

        Raises `InvalidConstraint` for a $ref that leads back to itself, and `Unenforceable` for more than
        `MAX_DISJUNCTS` disjuncts.
        """
        found = self._disjuncts.get(formula)
        if found is None:
            found = self._disjuncts[formula] = self._expand([Disjunct()], formula, ())
        return found

    def _disjuncts_if_few(self, formula: Formula) -> list[Disjunct]:
        """The disjuncts of `formula`; if there are too many, the one disjunct of all values."""
        try:
            return self.disjuncts_of(formula)
        except Unenforceable:
            return [Disjunct()]

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

    def _expanded(self, subschema: Subschema) -> Formula:
        inner = self._formulas_of(subschema).formula(subschema.pointer)
        return inner if subschema.positive else negation(inner)

    def shared_types(self, a: Formula, b: Formula) -> frozenset[str]:
        """The types of values that may satisfy both `a` and `b`, as far as a search of `MAX_DEPTH` levels
        shows. If there are such types, the result also contains each type that is in no disjunct of `a`, or
        in no disjunct of `b`. A disjunct of listed values counts as having all types."""
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
        """The types of values that may satisfy `formula`, decided as in `possible`."""
        found: set[str] = set()
        for disjunct in self._disjuncts_if_few(formula):
            if disjunct.values is not None:
                found |= {type_of(value.value) for value in disjunct.values}
                continue
            for kind in disjunct.types - found:
                if self._is_possible(dataclasses.replace(disjunct, types=frozenset([kind])), MAX_DEPTH):
                    found.add(kind)
        return frozenset(found)

    def _find_marks(self, formula: Formula) -> list[_Marks]:
        return [
            _Marks(
                disjunct.types if disjunct.values is None else frozenset(TYPES),
                {
                    name: values
                    for name in disjunct.required
                    if (values := self._all_values(disjunct.property_formula(name, self.satisfies)))
                    is not None
                },
            )
            for disjunct in self._disjuncts_if_few(formula)
        ]

    def _find_all_values(self, formula: Formula) -> frozenset[Value] | None:
        """All values that satisfy `formula`, if all its disjuncts have `values`; else None."""
        values = [disjunct.values for disjunct in self._disjuncts_if_few(formula)]
        return None if None in values else frozenset(value for each in values for value in each or ())

    def possible(self, formula: Formula, depth: int) -> bool:
        """Whether some value may satisfy `formula`. False if each disjunct has a contradiction within `depth`
        levels."""
        if formula in (TRUE, FALSE):
            return formula == TRUE
        if depth == 0:
            return True
        key = (formula, depth)
        if key not in self._possible:
            self._possible[key] = True  # the answer if the formula contains itself
            disjuncts = self._disjuncts_if_few(formula)
            self._possible[key] = any(self._is_possible(disjunct, depth) for disjunct in disjuncts)
        return self._possible[key]

    # --- expansion --------------------------------------------------------------------------------

    def _expand(
        self, disjuncts: list[Disjunct], formula: Formula, path: tuple[Subschema, ...]
    ) -> list[Disjunct]:
        assertions: dict[Assertion, None] = {}
        choices: dict[Or, tuple[Subschema, ...]] = {}
        self._collect(formula, path, assertions, choices)
        for assertion in with_exclusions_joined(assertions):
            disjuncts = [
                joined for disjunct in disjuncts if (joined := self.joined(disjunct, assertion)) is not None
            ]
        ordered = sorted(choices.items(), key=lambda item: len(item[0].options))
        found = self._distributed(disjuncts, ordered, as_clauses=False)
        if found is None:
            self.has_clauses = True
            found = self._distributed(disjuncts, ordered, as_clauses=True)
            assert found is not None, "clauses do not multiply"
        return found

    def _distributed(
        self, disjuncts: list[Disjunct], choices: list[tuple[Or, tuple[Subschema, ...]]], *, as_clauses: bool
    ) -> list[Disjunct] | None:
        """The disjunctive normal form of `disjuncts` AND all `choices`: each disjunct combined with options
        of each choice.

        With `as_clauses`, a choice that multiplies the disjuncts becomes clauses if possible (`clauses`).
        Without `as_clauses`, returns None if such a choice leads to more than `most_multiplied` disjuncts.
        """
        for choice, path in choices:
            found = self._choose(disjuncts, choice, path)
            if found is None or 2 * len(found) >= 3 * len(disjuncts):
                conditions = self._clauses(disjuncts, choice, path)
                if conditions is not None and as_clauses:
                    found = self._under(disjuncts, choice, path, conditions)
                elif conditions is not None and (found is None or len(found) > self._most_multiplied):
                    return None
            if found is None:
                where = next((part.pointer for part in reversed(path)), "")
                refuse(
                    where,
                    f"The alternatives here multiply to more than {MAX_DISJUNCTS}",
                    "Use fewer anyOf, oneOf, not and if within one another, or tell the options of a oneOf "
                    "apart by a required property with a const of its own.",
                )
            disjuncts = found
        return disjuncts

    def _clauses(
        self, disjuncts: list[Disjunct], choice: Or, path: tuple[Subschema, ...]
    ) -> list[AnyProperty] | None:
        if not any("object" in disjunct.types and disjunct.values is None for disjunct in disjuncts):
            return None
        if choice not in self._choice_clauses:
            found = clauses(choice, self._expanded, path)
            where = path[-1].pointer if path else ""
            self._choice_clauses[choice] = found and [
                dataclasses.replace(each, pointer=where) for each in found
            ]
        return self._choice_clauses[choice]

    def _under(
        self,
        disjuncts: list[Disjunct],
        choice: Or,
        path: tuple[Subschema, ...],
        conditions: list[AnyProperty],
    ) -> list[Disjunct] | None:
        """The disjunctive normal form of `disjuncts` AND `choice`. For objects, `conditions` stand in for
        `choice`, so that the disjuncts of objects do not multiply."""
        objects: list[Disjunct] = []
        others: list[Disjunct] = []
        for disjunct in disjuncts:
            if disjunct.values is not None or "object" not in disjunct.types:
                others.append(disjunct)
                continue
            other = self.joined(disjunct, Types(frozenset(TYPES) - OBJECT))
            others += [other] if other is not None else []
            restricted: Disjunct | None = self.joined(disjunct, Types(OBJECT))
            for condition in conditions:
                restricted = restricted and self.joined(restricted, condition)
            objects += [restricted] if restricted is not None else []
        found = self._choose(others, choice, path) if others else []
        return None if found is None else objects + found

    def _collect(
        self,
        formula: Formula,
        path: tuple[Subschema, ...],
        assertions: dict[Assertion, None],
        choices: dict[Or, Any],
    ) -> None:
        """Add the conjuncts of `formula` to `assertions` and `choices`. `path` has the subschemas that are
        being expanded."""
        match formula:
            case And(parts):
                for part in parts:
                    self._collect(part, path, assertions, choices)
            case Or():
                simpler = self._simplified(formula)
                if isinstance(simpler, Or):
                    choices.setdefault(simpler, path)
                else:
                    self._collect(simpler, path, assertions, choices)
            case Subschema(pointer):
                if formula in path:
                    raise InvalidConstraint(
                        "This $ref leads back to itself.",
                        pointer=f"{pointer}/$ref",
                        remedy="Put a keyword about parts of the value, such as items, between them.",
                    )
                self._collect(self._expanded(formula), (*path, formula), assertions, choices)
            case Assertion():
                assertions[formula] = None

    def _choose(
        self, disjuncts: list[Disjunct], choice: Or, path: tuple[Subschema, ...]
    ) -> list[Disjunct] | None:
        """The disjunctive normal form of `disjuncts` AND `choice`: each disjunct combined with each option.
        None if there are more than `MAX_DISJUNCTS`."""
        found: dict[Disjunct, None] = {}
        for disjunct in disjuncts:
            options: dict[Disjunct, None] = {}
            for option in choice.options:
                options |= dict.fromkeys(self._expand([disjunct], option, path))
            if disjunct in options:
                options = {disjunct: None}  # one option always holds, so it includes all others
            found = with_values_joined(found | options)
            if len(found) > MAX_DISJUNCTS:
                found = dict.fromkeys(self._only_possible(found))
            if len(found) > MAX_DISJUNCTS:
                return None
        return list(found) if len(found) <= len(disjuncts) else self._only_possible(found)

    def _only_possible(self, disjuncts: Iterable[Disjunct]) -> list[Disjunct]:
        return [disjunct for disjunct in disjuncts if self._check._is_possible(disjunct, MAX_DEPTH)]

    def joined(self, disjunct: Disjunct, assertion: Assertion) -> Disjunct | None:
        """The conjunction of a disjunct and an assertion; None if they obviously contradict each other."""
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
        if assertion == NEVER:
            return None
        if disjunct.types == OBJECT and isinstance(assertion, Properties):
            decided = self._decided(disjunct, assertion)
            if decided is not None:
                return disjunct if decided else None
        return Disjunct(disjunct.types, (*disjunct.assertions, assertion))

    def _decided(self, disjunct: Disjunct, assertion: Properties) -> bool | None:
        """Whether `assertion` holds for all objects of `disjunct` (True) or for none (False), if the enum of
        a property shows this; else None. If 50 if/then depend on the value of one property, and this value is
        fixed, only one if/then remains."""
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

    def _find_enumerated(self, formula: Formula) -> frozenset[Value] | None:
        """The values that satisfy `formula`, if it is a conjunction of assertions with an enum among them;
        else None."""
        assertions = self._assertions(formula) or ()
        enums = [each.values for each in assertions if isinstance(each, InEnum)]
        shortest: tuple[Value, ...] | None = min(enums, key=len, default=None)
        return None if shortest is None else frozenset(self._satisfying_all(assertions, shortest))

    def _find_assertions(self, formula: Formula) -> tuple[Assertion, ...] | None:
        """The assertions whose conjunction `formula` is; None if `formula` contains a disjunction."""
        assertions: dict[Assertion, None] = {}
        choices: dict[Or, Any] = {}
        self._collect(formula, (), assertions, choices)
        return None if choices else tuple(with_exclusions_joined(assertions))

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
        if disjunct.types & NUMBERS and numbers_possible(disjunct):
            return True
        if "string" in disjunct.types and counts_possible(disjunct, Length):
            return True
        if "array" in disjunct.types and self._array_possible(disjunct, depth):
            return True
        return "object" in disjunct.types and self._object_possible(disjunct, depth)

    def _array_possible(self, disjunct: Disjunct, depth: int) -> bool:
        if not counts_possible(disjunct, ItemCount):
            return False
        low, _ = counts(disjunct, ItemCount)
        return all(
            self.possible(disjunct.item_formula(i), depth - 1)
            for i in range(min(low, disjunct.prefix_length + 1))
        )

    def _object_possible(self, disjunct: Disjunct, depth: int) -> bool:
        return counts_possible(disjunct, PropertyCount) and all(
            self.possible(disjunct.property_formula(name, self.satisfies), depth - 1)
            for name in disjunct.required
        )
