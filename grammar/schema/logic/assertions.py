"""The facts that formulas about JSON values are made of: what one keyword asks of one type of value.

``"minimum": 8`` is ``Above(Decimal(8), inclusive=True)``: numbers are at least 8, and any other value will
do. A fact knows its negation, so formulas need no "not".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, ClassVar

from ramify.grammar.schema.json_values import Value, type_of, value_of
from ramify.grammar.schema.logic.formula import (
    FALSE,
    TRUE,
    TYPES,
    Fact,
    Formula,
    Node,
    Test,
    both,
    either,
    negated,
)
from ramify.grammar.schema.values.string_patterns import matches_searched

NUMBERS = frozenset(["integer", "fraction"])
SCALARS = frozenset(["null", "boolean", "integer", "fraction", "string"])
STRING = frozenset(["string"])
ARRAY = frozenset(["array"])
OBJECT = frozenset(["object"])

_note = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Types(Fact):
    """The value is of one of these types."""

    __hash__ = Node.__hash__
    types: frozenset[str]

    def negated(self) -> Formula:
        return Types(frozenset(TYPES) - self.types)

    def holds(self, value: Any, test: Test) -> bool:
        return type_of(value) in self.types


@dataclasses.dataclass(frozen=True, slots=True)
class Listed(Fact):
    """The value is one of these."""

    __hash__ = Node.__hash__
    values: tuple[Value, ...]

    def negated(self) -> Formula:
        scalars = tuple(value for value in self.values if not isinstance(value.value, list | dict))
        containers = (value.value for value in self.values if isinstance(value.value, list | dict))
        unlisted = Unlisted(scalars) if scalars else TRUE
        return both(unlisted, *(negated(written_out(value)) for value in containers))

    def holds(self, value: Any, test: Test) -> bool:
        return value_of(value) in self.values


@dataclasses.dataclass(frozen=True, slots=True)
class Unlisted(Fact):
    """The value is none of these, among which are no arrays and no objects."""

    __hash__ = Node.__hash__
    values: tuple[Value, ...]
    kinds: ClassVar[frozenset[str]] = SCALARS

    def negated(self) -> Formula:
        return Listed(self.values)

    def holds(self, value: Any, test: Test) -> bool:
        return value_of(value) not in self.values


def written_out(value: Any) -> Formula:
    """Equality with an array or object as facts about its parts; with anything else, the value listed."""
    match value:
        case list():
            items = tuple(map(written_out, value))
            return both(Types(ARRAY), Count(len(value), len(value)), Items(items, FALSE))
        case dict():
            named = tuple((name, written_out(item)) for name, item in value.items())
            return both(Types(OBJECT), *map(Required, value), Members(named, (), FALSE))
    return Listed((value_of(value),))


# --- numbers ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Above(Fact):
    """At least `value`, or more than it."""

    __hash__ = Node.__hash__
    value: Decimal
    inclusive: bool
    kinds: ClassVar[frozenset[str]] = NUMBERS

    def negated(self) -> Formula:
        return both(Types(NUMBERS), Below(self.value, not self.inclusive))

    def holds(self, value: Any, test: Test) -> bool:
        return bool(value >= self.value if self.inclusive else value > self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class Below(Fact):
    """At most `value`, or less than it."""

    __hash__ = Node.__hash__
    value: Decimal
    inclusive: bool
    kinds: ClassVar[frozenset[str]] = NUMBERS

    def negated(self) -> Formula:
        return both(Types(NUMBERS), Above(self.value, not self.inclusive))

    def holds(self, value: Any, test: Test) -> bool:
        return bool(value <= self.value if self.inclusive else value < self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class MultipleOf(Fact):
    """A multiple of `step`, or none."""

    __hash__ = Node.__hash__
    step: Decimal
    wanted: bool
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = NUMBERS

    def negated(self) -> Formula:
        return both(Types(NUMBERS), MultipleOf(self.step, not self.wanted, self.pointer))

    def holds(self, value: Any, test: Test) -> bool:
        return is_multiple(value, self.step) == self.wanted


def is_multiple(value: int | Decimal, step: Decimal) -> bool:
    n, d = Decimal(value).as_integer_ratio()
    unit, scale = step.as_integer_ratio()
    return n * scale % (d * unit) == 0


# --- strings ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Length(Fact):
    """`low` to `high` characters."""

    __hash__ = Node.__hash__
    low: int
    high: int | None
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = STRING

    def negated(self) -> Formula:
        return both(Types(STRING), _outside(Length, self.low, self.high, self.pointer))

    def holds(self, value: Any, test: Test) -> bool:
        return _within(len(value), self.low, self.high)


@dataclasses.dataclass(frozen=True, slots=True)
class Matches(Fact):
    """`pattern` matches somewhere in the string, or nowhere.

    `written` and `counted` match less: what is written for it, and where characters must be counted.
    """

    __hash__ = Node.__hash__
    pattern: str
    wanted: bool
    pointer: str = _note
    written: str = dataclasses.field(default="", compare=False)
    counted: str = dataclasses.field(default="", compare=False)
    kinds: ClassVar[frozenset[str]] = STRING

    def negated(self) -> Formula:
        return both(Types(STRING), Matches(self.pattern, not self.wanted, self.pointer))

    def holds(self, value: Any, test: Test) -> bool:
        return matches_searched(self.pointer, self.pattern, value) == self.wanted


# --- arrays -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Count(Fact):
    """`low` to `high` items."""

    __hash__ = Node.__hash__
    low: int
    high: int | None
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = ARRAY

    def negated(self) -> Formula:
        return both(Types(ARRAY), _outside(Count, self.low, self.high, self.pointer))

    def holds(self, value: Any, test: Test) -> bool:
        return _within(len(value), self.low, self.high)


@dataclasses.dataclass(frozen=True, slots=True)
class Items(Fact):
    """The first items satisfy `prefix`, one each, and those after them `rest`."""

    __hash__ = Node.__hash__
    prefix: tuple[Formula, ...]
    rest: Formula
    kinds: ClassVar[frozenset[str]] = ARRAY

    def at(self, i: int) -> Formula:
        return self.prefix[i] if i < len(self.prefix) else self.rest

    def negated(self) -> Formula:
        options: list[Formula] = [
            both(Types(ARRAY), Count(i + 1, None), Items((TRUE,) * i + (negated(item),), TRUE))
            for i, item in enumerate(self.prefix)
            if item != TRUE
        ]
        if self.rest != TRUE:
            options.append(both(Types(ARRAY), Contains(negated(self.rest), len(self.prefix), 1, None)))
        return either(*options)

    def holds(self, value: Any, test: Test) -> bool:
        return all(test(self.at(i), item) for i, item in enumerate(value))


@dataclasses.dataclass(frozen=True, slots=True)
class Contains(Fact):
    """Of the items from number `begin` on, `low` to `high` satisfy `item`."""

    __hash__ = Node.__hash__
    item: Formula
    begin: int
    low: int
    high: int | None
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = ARRAY

    def negated(self) -> Formula:
        options: list[Formula] = []
        if self.low:
            options.append(Contains(self.item, self.begin, 0, self.low - 1, self.pointer))
        if self.high is not None:
            options.append(Contains(self.item, self.begin, self.high + 1, None, self.pointer))
        return both(Types(ARRAY), either(*options))

    def holds(self, value: Any, test: Test) -> bool:
        found = sum(test(self.item, item) for item in value[self.begin :])
        return _within(found, self.low, self.high)


@dataclasses.dataclass(frozen=True, slots=True)
class Unique(Fact):
    """No two items are equal; or some are."""

    __hash__ = Node.__hash__
    wanted: bool
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = ARRAY

    def negated(self) -> Formula:
        return both(Types(ARRAY), Unique(not self.wanted, self.pointer))

    def holds(self, value: Any, test: Test) -> bool:
        return (len(set(map(value_of, value))) == len(value)) == self.wanted


# --- objects ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Members(Fact):
    """Values by their names: those `named`; those whose name satisfies a key of `keyed`, which may be
    named as well; and all `others`."""

    __hash__ = Node.__hash__
    named: tuple[tuple[str, Formula], ...]
    keyed: tuple[tuple[Formula, Formula], ...]
    others: Formula
    kinds: ClassVar[frozenset[str]] = OBJECT

    def of(self, name: str, test: Test) -> Formula:
        """What the value of `name` must satisfy."""
        found = [value for known, value in self.named if known == name]
        found += [value for key, value in self.keyed if test(key, name)]
        return both(*found) if found else self.others

    @property
    def unnamed(self) -> Formula:
        """The names that are neither named nor keyed, as a formula about strings."""
        listed = Unlisted(tuple(value_of(name) for name, _ in self.named)) if self.named else TRUE
        return both(listed, *(negated(key) for key, _ in self.keyed))

    def negated(self) -> Formula:
        options: list[Formula] = []
        for name, value in self.named:
            if value != TRUE:
                options.append(both(Required(name), Members(((name, negated(value)),), (), TRUE)))
        options += [Has(key, negated(value)) for key, value in self.keyed if value != TRUE]
        if self.others != TRUE:
            options.append(Has(self.unnamed, negated(self.others)))
        return both(Types(OBJECT), either(*options))

    def holds(self, value: Any, test: Test) -> bool:
        return all(test(self.of(name, test), item) for name, item in value.items())


@dataclasses.dataclass(frozen=True, slots=True)
class Required(Fact):
    """The property is there."""

    __hash__ = Node.__hash__
    name: str
    kinds: ClassVar[frozenset[str]] = OBJECT

    def negated(self) -> Formula:
        return both(Types(OBJECT), absent(self.name))

    def holds(self, value: Any, test: Test) -> bool:
        return self.name in value


def absent(name: str) -> Formula:
    """No object has the property."""
    return Members(((name, FALSE),), (), TRUE)


@dataclasses.dataclass(frozen=True, slots=True)
class Size(Fact):
    """`low` to `high` properties."""

    __hash__ = Node.__hash__
    low: int
    high: int | None
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = OBJECT

    def negated(self) -> Formula:
        return both(Types(OBJECT), _outside(Size, self.low, self.high, self.pointer))

    def holds(self, value: Any, test: Test) -> bool:
        return _within(len(value), self.low, self.high)


@dataclasses.dataclass(frozen=True, slots=True)
class Names(Fact):
    """All names satisfy `key`."""

    __hash__ = Node.__hash__
    key: Formula
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = OBJECT

    def negated(self) -> Formula:
        return both(Types(OBJECT), Has(negated(self.key), TRUE, self.pointer))

    def holds(self, value: Any, test: Test) -> bool:
        return all(test(self.key, name) for name in value)


@dataclasses.dataclass(frozen=True, slots=True)
class Has(Fact):
    """Some property has a name that satisfies `key` and a value that satisfies `value`."""

    __hash__ = Node.__hash__
    key: Formula
    value: Formula
    pointer: str = _note
    kinds: ClassVar[frozenset[str]] = OBJECT

    def negated(self) -> Formula:
        return both(Types(OBJECT), Members((), ((self.key, negated(self.value)),), TRUE))

    def holds(self, value: Any, test: Test) -> bool:
        return any(test(self.key, name) and test(self.value, item) for name, item in value.items())


def _within(count: int, low: int, high: int | None) -> bool:
    return low <= count and (high is None or count <= high)


def _outside(kind: type[Length | Count | Size], low: int, high: int | None, pointer: str) -> Formula:
    options: list[Formula] = [kind(0, low - 1, pointer)] if low else []
    if high is not None:
        options.append(kind(high + 1, None, pointer))
    return either(*options)


def listed(values: Iterable[Any]) -> Formula:
    """One of `values`, which are compared as JSON values are: 1 is 1.0 and not true."""
    return Listed(tuple(dict.fromkeys(map(value_of, values))))
