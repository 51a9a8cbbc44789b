"""The assertions that formulas about JSON values are made of. Each is about values of one or a few types.

``"minimum": 8`` is ``LowerBound(Decimal(8), inclusive=True)``: a number satisfies this assertion if it is at
least 8; any value of another type satisfies it. Its negation is
``And((Types(NUMBERS), UpperBound(Decimal(8), inclusive=False)))``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, ClassVar

from ramify.grammar.rules.expression import term
from ramify.grammar.schema.document.json_values import Value, is_multiple, type_of
from ramify.grammar.schema.document.string_patterns import matches_regular
from ramify.grammar.schema.logic.formula import (
    FALSE,
    TRUE,
    TYPES,
    Assertion,
    Formula,
    Test,
    conjunction,
    disjunction,
    negation,
)

NUMBERS = frozenset(["integer", "fraction"])
SCALARS = frozenset(["null", "boolean", "integer", "fraction", "string"])
STRING = frozenset(["string"])
ARRAY = frozenset(["array"])
OBJECT = frozenset(["object"])

_note = dataclasses.field(default="", compare=False)
"""A JSON pointer for messages. Assertions that differ only in this pointer are equal."""


@term
class Types(Assertion):
    """The type of the value is one of `types`."""

    types: frozenset[str]

    def negation(self) -> Formula:
        return Types(frozenset(TYPES) - self.types)

    def holds(self, value: Any, test: Test) -> bool:
        return type_of(value) in self.types


@term
class InEnum(Assertion):
    """The value is one of `values`: enum and const."""

    values: tuple[Value, ...]

    def negation(self) -> Formula:
        scalars = tuple(value for value in self.values if not isinstance(value.value, list | dict))
        containers = (value.value for value in self.values if isinstance(value.value, list | dict))
        other_scalars = NotInEnum(scalars) if scalars else TRUE
        return conjunction(other_scalars, *(negation(equal_to(value)) for value in containers))

    def holds(self, value: Any, test: Test) -> bool:
        return Value(value) in self.values


@term
class NotInEnum(Assertion):
    """The value is none of `values`, which contain neither arrays nor objects."""

    values: tuple[Value, ...]
    kinds: ClassVar[frozenset[str]] = SCALARS

    def negation(self) -> Formula:
        return InEnum(self.values)

    def holds(self, value: Any, test: Test) -> bool:
        return Value(value) not in self.values


def in_enum(values: Iterable[Any]) -> Formula:
    """The formula "is one of `values`". Values are compared as JSON values: 1 equals 1.0, but not true."""
    return InEnum(tuple(dict.fromkeys(map(Value, values))))


def equal_to(value: Any) -> Formula:
    """The formula "equals `value`". For an array or object, it consists of assertions about the parts."""
    match value:
        case list():
            items = tuple(map(equal_to, value))
            return conjunction(Types(ARRAY), ItemCount(len(value), len(value)), Items(items, FALSE))
        case dict():
            named = tuple((name, equal_to(item)) for name, item in value.items())
            return conjunction(Types(OBJECT), *map(Required, value), Properties(named, (), FALSE))
    return in_enum([value])


class _OfKinds(Assertion):
    """An assertion whose negation holds for values of its `kinds` only."""

    __slots__ = ()

    def negation(self) -> Formula:
        return conjunction(Types(self.kinds), self._opposite())

    def _opposite(self) -> Formula:
        """The negation of this assertion for values of its `kinds`."""
        raise NotImplementedError


@term
class _Counted(_OfKinds):
    """The value has `low` to `high` characters, items or properties; `high` None means no limit."""

    low: int
    high: int | None
    pointer: str = _note

    def _opposite(self) -> Formula:
        fewer = [type(self)(0, self.low - 1, self.pointer)] if self.low else []
        more = [] if self.high is None else [type(self)(self.high + 1, None, self.pointer)]
        return disjunction(*fewer, *more)

    def holds(self, value: Any, test: Test) -> bool:
        return within(len(value), self.low, self.high)


def within(count: int, low: int, high: int | None) -> bool:
    """Whether `low` <= `count` <= `high`; `high` None means no limit."""
    return low <= count and (high is None or count <= high)


# --- numbers ------------------------------------------------------------------------------------


@term
class LowerBound(_OfKinds):
    """minimum and exclusiveMinimum: the number is at least `value` or, if `inclusive` is False, greater than
    `value`."""

    value: Decimal
    inclusive: bool
    kinds: ClassVar[frozenset[str]] = NUMBERS

    def _opposite(self) -> Formula:
        return UpperBound(self.value, not self.inclusive)

    def holds(self, value: Any, test: Test) -> bool:
        return bool(value >= self.value if self.inclusive else value > self.value)


@term
class UpperBound(_OfKinds):
    """maximum and exclusiveMaximum: the number is at most `value` or, if `inclusive` is False, less than
    `value`."""

    value: Decimal
    inclusive: bool
    kinds: ClassVar[frozenset[str]] = NUMBERS

    def _opposite(self) -> Formula:
        return LowerBound(self.value, not self.inclusive)

    def holds(self, value: Any, test: Test) -> bool:
        return bool(value <= self.value if self.inclusive else value < self.value)


@term
class MultipleOf(_OfKinds):
    """The number is a multiple of `divisor` or, if `positive` is False, is not a multiple."""

    divisor: Decimal
    positive: bool
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = NUMBERS

    def _opposite(self) -> Formula:
        return MultipleOf(self.divisor, not self.positive, self.pointer)

    def holds(self, value: Any, test: Test) -> bool:
        return is_multiple(value, self.divisor) == self.positive


# --- strings ------------------------------------------------------------------------------------


@term
class Length(_Counted):
    """minLength and maxLength: `low` to `high` characters."""

    kinds: ClassVar[frozenset[str]] = STRING


@term
class Matches(_OfKinds):
    """`pattern` matches somewhere in the string or, if `positive` is False, nowhere. A format has two more
    patterns, which match subsets of its strings (`formats.StringFormat`): a grammar writes the strings of
    `written`, or those of `counted` if their characters must be counted. "" stands for a missing pattern."""

    pattern: str
    positive: bool
    pointer: str = _note
    written: str = dataclasses.field(default="", compare=False)
    counted: str = dataclasses.field(default="", compare=False)
    kinds: ClassVar[frozenset[str]] = STRING

    def _opposite(self) -> Formula:
        return Matches(self.pattern, not self.positive, self.pointer)

    def holds(self, value: Any, test: Test) -> bool:
        return matches_regular(self.pointer, self.pattern, value) == self.positive


# --- arrays -------------------------------------------------------------------------------------


@term
class ItemCount(_Counted):
    """minItems and maxItems: `low` to `high` items."""

    kinds: ClassVar[frozenset[str]] = ARRAY


@term
class Items(_OfKinds):
    """prefixItems and items: the first items satisfy the formulas of `prefix`, one formula each. All later
    items satisfy `rest`."""

    prefix: tuple[Formula, ...]
    rest: Formula
    kinds: ClassVar[frozenset[str]] = ARRAY

    def at(self, i: int) -> Formula:
        """Formula of item `i`, counted from 0."""
        return self.prefix[i] if i < len(self.prefix) else self.rest

    def _opposite(self) -> Formula:
        options: list[Formula] = [
            conjunction(Types(ARRAY), ItemCount(i + 1, None), Items((TRUE,) * i + (negation(item),), TRUE))
            for i, item in enumerate(self.prefix)
            if item != TRUE
        ]
        if self.rest != TRUE:
            options.append(
                conjunction(Types(ARRAY), Contains(negation(self.rest), len(self.prefix), 1, None))
            )
        return disjunction(*options)

    def holds(self, value: Any, test: Test) -> bool:
        return all(test(self.at(i), item) for i, item in enumerate(value))


@term
class Contains(_OfKinds):
    """contains, minContains, maxContains: from item `begin` on, `low` to `high` items satisfy `item`. `low`
    is above 0, or `high` is not None."""

    item: Formula
    begin: int
    low: int
    high: int | None
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = ARRAY

    @property
    def cap(self) -> int:
        """The greatest count that must be told apart; greater counts have the same effect."""
        return self.low if self.high is None else self.high + 1

    def _opposite(self) -> Formula:
        options: list[Formula] = []
        if self.low:
            options.append(Contains(self.item, self.begin, 0, self.low - 1, self.pointer))
        if self.high is not None:
            options.append(Contains(self.item, self.begin, self.high + 1, None, self.pointer))
        return disjunction(*options)

    def holds(self, value: Any, test: Test) -> bool:
        return within(sum(test(self.item, item) for item in value[self.begin :]), self.low, self.high)


@term
class UniqueItems(_OfKinds):
    """No two items are equal or, if `positive` is False, some two are."""

    positive: bool
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = ARRAY

    def _opposite(self) -> Formula:
        return UniqueItems(not self.positive, self.pointer)

    def holds(self, value: Any, test: Test) -> bool:
        return (len(set(map(Value, value))) == len(value)) == self.positive


# --- objects ------------------------------------------------------------------------------------


@term
class Properties(_OfKinds):
    """properties, patternProperties and additionalProperties: formulas for the values of properties.

    `named` has pairs of a name and a formula for its value, `keyed` pairs of a formula for names and a
    formula for values. If several pairs apply to a property, its value satisfies all their formulas. If none
    applies, its value satisfies `others`.
    """

    named: tuple[tuple[str, Formula], ...]
    keyed: tuple[tuple[Formula, Formula], ...]
    others: Formula
    by_name: dict[str, Formula] = dataclasses.field(init=False, compare=False, repr=False)
    kinds: ClassVar[frozenset[str]] = OBJECT

    def __post_init__(self) -> None:
        _OfKinds.__post_init__(self)  # slots make another class, which super() would not know
        object.__setattr__(self, "by_name", dict(self.named))

    def formula_of(self, name: str, test: Test) -> Formula:
        """The formula for the value of the property `name`. `test` decides whether `name` satisfies a key."""
        found = [self.by_name[name]] if name in self.by_name else []
        found += [value for key, value in self.keyed if test(key, name)]
        return conjunction(*found) if found else self.others

    def _opposite(self) -> Formula:
        options: list[Formula] = []
        for name, value in self.named:
            if value != TRUE:
                present = Properties(((name, negation(value)),), (), TRUE)
                options.append(conjunction(Required(name), present))
        options += [HasProperty(key, negation(value)) for key, value in self.keyed if value != TRUE]
        if self.others != TRUE:
            not_named = NotInEnum(tuple(Value(name) for name, _ in self.named)) if self.named else TRUE
            other_names = conjunction(not_named, *(negation(key) for key, _ in self.keyed))
            options.append(HasProperty(other_names, negation(self.others)))
        return disjunction(*options)

    def holds(self, value: Any, test: Test) -> bool:
        return all(test(self.formula_of(name, test), item) for name, item in value.items())


@term
class Required(_OfKinds):
    """The object has the property `name`."""

    name: str
    kinds: ClassVar[frozenset[str]] = OBJECT

    def _opposite(self) -> Formula:
        return absent(self.name)

    def holds(self, value: Any, test: Test) -> bool:
        return self.name in value


def absent(name: str) -> Formula:
    """The assertion that an object does not have the property `name`."""
    return Properties(((name, FALSE),), (), TRUE)


@term
class PropertyCount(_Counted):
    """minProperties and maxProperties: `low` to `high` properties."""

    kinds: ClassVar[frozenset[str]] = OBJECT


@term
class PropertyNames(_OfKinds):
    """The names of all properties satisfy `key`."""

    key: Formula
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = OBJECT

    def _opposite(self) -> Formula:
        return HasProperty(negation(self.key), TRUE, self.pointer)

    def holds(self, value: Any, test: Test) -> bool:
        return all(test(self.key, name) for name in value)


@term
class HasProperty(_OfKinds):
    """Some property has a name that satisfies `key` and a value that satisfies `value`."""

    key: Formula
    value: Formula
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = OBJECT

    def _opposite(self) -> Formula:
        return Properties((), ((self.key, negation(self.value)),), TRUE)

    def holds(self, value: Any, test: Test) -> bool:
        return any(test(self.key, name) and test(self.value, item) for name, item in value.items())
