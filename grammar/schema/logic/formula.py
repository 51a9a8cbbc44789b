"""Formulas, which express what a schema asserts: assertions and subschemas under "and", "or" and "not".

A `Subschema` stands for the conjunction of its keywords. A subschema is expanded only when its content is
needed, so a schema that refers to itself has a finite formula. The formula of
``{"anyOf": [{"type": "null"}, {"$ref": "#"}]}`` is

    Or((Types({"null"}), Subschema("")))

"Not" is pushed down to assertions and subschemas, which know their own negations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ramify.grammar.rules.expression import Term, term

TYPES = ("null", "boolean", "integer", "fraction", "string", "array", "object")
"""The types of values. A number is an "integer" if it is whole, even if written as 1.0; else a "fraction"."""


class Assertion(Term):
    """A condition on values whose type is one of `kinds`; all other values satisfy it."""

    __slots__ = ()
    kinds: ClassVar[frozenset[str]] = frozenset(TYPES)

    def negation(self) -> Formula:
        raise NotImplementedError

    def holds(self, value: Any, test: Test) -> bool:
        """Whether `value`, whose type is one of `kinds`, satisfies the assertion. `test` decides formulas
        about parts of `value`."""
        raise NotImplementedError


@term
class And(Term):
    """The conjunction of `parts`."""

    parts: tuple[Formula, ...]


@term
class Or(Term):
    """The disjunction of `options`."""

    options: tuple[Formula, ...]


@term
class Subschema(Term):
    """The subschema at a JSON pointer or, if `positive` is False, its negation."""

    pointer: str
    positive: bool = True


Formula = Assertion | And | Or | Subschema
Test = Callable[[Formula, Any], bool]
"""A function that decides whether a value satisfies a formula."""

TRUE = And(())
FALSE = Or(())


def conjunction(*parts: Formula) -> Formula:
    """The conjunction of `parts`, flattened and without repetitions."""
    if len(parts) == 1:
        return parts[0]
    if FALSE in parts:
        return FALSE
    flat: list[Formula] = []
    for part in parts:
        if type(part) is And:
            flat += part.parts
        else:
            flat.append(part)
    pieces = tuple(dict.fromkeys(flat))
    return pieces[0] if len(pieces) == 1 else And(pieces)


def disjunction(*options: Formula) -> Formula:
    """The disjunction of `options`, flattened and without repetitions."""
    if len(options) == 1:
        return options[0]
    if TRUE in options:
        return TRUE
    flat: list[Formula] = []
    for option in options:
        if type(option) is Or:
            flat += option.options
        else:
            flat.append(option)
    pieces = tuple(dict.fromkeys(flat))
    return pieces[0] if len(pieces) == 1 else Or(pieces)


def negation(formula: Formula) -> Formula:
    """The negation of `formula`: exactly the values that do not satisfy `formula` satisfy it."""
    match formula:
        case And(parts):
            return disjunction(*map(negation, parts))
        case Or(options):
            return conjunction(*map(negation, options))
        case Subschema(pointer, positive):
            return Subschema(pointer, not positive)
        case Assertion():
            return formula.negation()
