"""Choices between conditions on single properties, in conjunctive normal form.

"Not both a and b", for each of twelve pairs of properties, has 4,096 disjuncts. As clauses there are only
twelve. The clause of a pair is met if one of its two properties is absent:

    AnyProperty((("a", FALSE, True), ("b", FALSE, True)))

The states of the object's grammar record the clauses that no property has met yet (`values.object_members`).
If the properties of each clause are close to each other, few clauses are unmet at any one time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from ramify.grammar.rules.expression import term
from ramify.grammar.schema.logic.assertions import OBJECT, HasProperty, Properties, Required, Types
from ramify.grammar.schema.logic.formula import (
    FALSE,
    TRUE,
    And,
    Assertion,
    Formula,
    Or,
    Subschema,
    Test,
    disjunction,
)

MAX_CLAUSES = 64
"""Most clauses of one choice."""

Named = tuple[str, Formula, bool]
"""A condition on a property: its name, a formula for its value if it is present, and whether it may be
absent."""


@term
class AnyProperty(Assertion):
    """A condition on objects: at least one of the conditions `named` holds for its property, or the assertion
    `other` holds (None: there is no such alternative)."""

    named: tuple[Named, ...]
    other: HasProperty | None
    pointer: str = dataclasses.field(default="", compare=False)
    """Pointer of the subschema that contains the choice, for messages."""
    kinds: ClassVar[frozenset[str]] = OBJECT

    def holds(self, value: Any, test: Test) -> bool:
        return any(
            test(formula, value[name]) if name in value else absent for name, formula, absent in self.named
        ) or (self.other is not None and self.other.holds(value, test))

    def by(self, name: str, test: Test) -> Formula:
        """The formula that the value of the property `name` must satisfy to meet the condition."""
        options = [formula for known, formula, _ in self.named if known == name]
        if self.other is not None and test(self.other.key, name):
            options.append(self.other.value)
        return disjunction(*options)

    def by_absence(self, name: str) -> bool:
        """Whether the absence of the property `name` meets the condition."""
        return any(absent for known, _, absent in self.named if known == name)

    def union(self, other: AnyProperty) -> AnyProperty | None:
        """The disjunction of two conditions; None if both have an `other` and these differ."""
        if self.other is not None and other.other not in (None, self.other):
            return None
        found = {name: (formula, absent) for name, formula, absent in self.named}
        for name, formula, absent in other.named:
            known, before = found.get(name, (FALSE, False))
            found[name] = (disjunction(known, formula), before or absent)
        named = tuple((name, formula, absent) for name, (formula, absent) in found.items())
        return AnyProperty(named, self.other or other.other)

    @property
    def trivial(self) -> bool:
        """Whether the condition obviously holds for all objects."""
        return any(formula == TRUE and absent for _, formula, absent in self.named)


NEVER = AnyProperty((), None)
"""The condition that no object meets."""


def clauses(
    formula: Formula, expanded: Callable[[Subschema], Formula], path: tuple[Subschema, ...] = ()
) -> list[AnyProperty] | None:
    """Conditions whose conjunction is what `formula` asserts about objects. None if `formula` is about more
    than single properties, or would need more than `MAX_CLAUSES` conditions. `expanded` returns the formula
    of a subschema."""
    match formula:
        case Types(types):
            return [] if "object" in types else [NEVER]
        case Required(name):
            return [AnyProperty(((name, TRUE, False),), None)]
        case HasProperty():
            return [AnyProperty((), formula)]
        case Properties(named, (), others) if others == TRUE:
            return [AnyProperty(((name, value, True),), None) for name, value in named if value != TRUE]
        case Subschema():
            return None if formula in path else clauses(expanded(formula), expanded, (*path, formula))
        case And(parts):
            found = [clauses(part, expanded, path) for part in parts]
            return None if None in found else _few(clause for each in found for clause in each or ())
        case Or(options):
            all_of = [NEVER]
            for option in options:
                conditions = clauses(option, expanded, path)
                if conditions is None:
                    return None
                united = [one.union(other) for one, other in itertools.product(all_of, conditions)]
                some = None if None in united else _few(clause for clause in united if clause is not None)
                if some is None:
                    return None
                all_of = some
            return all_of
    return None if "object" in formula.kinds else []


def _few(conditions: Iterable[AnyProperty]) -> list[AnyProperty] | None:
    found = list(dict.fromkeys(condition for condition in conditions if not condition.trivial))
    return found if len(found) <= MAX_CLAUSES else None
