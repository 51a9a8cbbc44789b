"""What a schema says of a value, as a formula: facts and subschemas under and, or, and not.

Facts are in `facts`. A subschema stands for what its keywords say together; it is looked up where
it is needed, so that formulas of schemas that refer to themselves are finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

TYPES = ("null", "boolean", "integer", "fraction", "string", "array", "object")
"""The kinds of values. A number is an "integer" if it has no fraction, however it is written."""


class Node:
    """Remembers its hash: formulas are keys all the time, and hashing a deep one costs its size."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            fields = dataclasses.fields(self)  # type: ignore[arg-type]
            found = hash((type(self), *(getattr(self, field.name) for field in fields if field.compare)))
            object.__setattr__(self, "_hash", found)
            return found


class Fact(Node):
    """A condition on values of some `kinds`; all other values satisfy it."""

    __slots__ = ()
    kinds: ClassVar[frozenset[str]] = frozenset(TYPES)

    def negated(self) -> Formula:
        raise NotImplementedError

    def holds(self, value: Any, test: Test) -> bool:
        """For a `value` of one of the `kinds`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class And(Node):
    __hash__ = Node.__hash__
    parts: tuple[Formula, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Or(Node):
    __hash__ = Node.__hash__
    options: tuple[Formula, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sub(Node):
    """The subschema at a JSON pointer, or what it does not allow."""

    __hash__ = Node.__hash__
    pointer: str
    wanted: bool = True


Formula = Fact | And | Or | Sub
Test = Callable[[Formula, Any], bool]

TRUE = And(())
FALSE = Or(())


def both(*parts: Formula) -> Formula:
    """The conjunction, flat and without repetitions."""
    flat: dict[Formula, None] = {}
    for part in parts:
        if part == FALSE:
            return FALSE
        for piece in part.parts if isinstance(part, And) else (part,):
            flat[piece] = None
    pieces = tuple(flat)
    return pieces[0] if len(pieces) == 1 else And(pieces)


def either(*options: Formula) -> Formula:
    """The disjunction, flat and without repetitions."""
    flat: dict[Formula, None] = {}
    for option in options:
        if option == TRUE:
            return TRUE
        for piece in option.options if isinstance(option, Or) else (option,):
            flat[piece] = None
    pieces = tuple(flat)
    return pieces[0] if len(pieces) == 1 else Or(pieces)


def negated(formula: Formula) -> Formula:
    match formula:
        case And(parts):
            return either(*map(negated, parts))
        case Or(options):
            return both(*map(negated, options))
        case Sub(pointer, wanted):
            return Sub(pointer, not wanted)
        case Fact():
            return formula.negated()


def all_negated(formulas: Iterable[Formula]) -> Formula:
    return both(*map(negated, formulas))
