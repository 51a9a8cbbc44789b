"""Expressions over characters: what regular expressions and JSON schemas are turned into.

An expression is `Chars`, `Text`, `Seq`, `Alt`, `Repeat` or, in a grammar, a `Call` of a rule or `Fresh`.
Build them with `chars`, `text`, `seq`, `alt` and `repeat`, which simplify. `EMPTY` is the empty text and
`NOTHING` the expression that no text matches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

Ranges = tuple[tuple[int, int], ...]
"""Code points as sorted, disjoint, inclusive ranges without surrogates."""


class _Node:
    """Remembers its hash: expressions are keys all the time, and hashing a deep one costs its size. And
    whether it is regular: no rule is called in it, and it has no `Fresh`."""

    __slots__ = ("_hash", "is_regular")
    __match_args__: tuple[str, ...] = ()
    _hash: int
    is_regular: bool

    def __post_init__(self) -> None:
        fields = (getattr(self, name) for name in self.__match_args__)
        object.__setattr__(self, "_hash", hash((type(self), *fields)))
        match self:
            case Seq(parts) | Alt(parts):
                regular = all(part.is_regular for part in parts)
            case Repeat(item, _, _):
                regular = item.is_regular
            case _:
                regular = isinstance(self, Chars | Text)
        object.__setattr__(self, "is_regular", regular)

    def __hash__(self) -> int:
        return self._hash


@dataclasses.dataclass(frozen=True, slots=True)
class Chars(_Node):
    """One character out of a set."""

    __hash__ = _Node.__hash__
    ranges: Ranges


@dataclasses.dataclass(frozen=True, slots=True)
class Text(_Node):
    """Exactly this text, not empty."""

    __hash__ = _Node.__hash__
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Seq(_Node):
    __hash__ = _Node.__hash__
    parts: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Alt(_Node):
    __hash__ = _Node.__hash__
    options: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat(_Node):
    """`low` to `high` times; None: any number of times."""

    __hash__ = _Node.__hash__
    item: Expression
    low: int
    high: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Call(_Node):
    """The rule of this name."""

    __hash__ = _Node.__hash__
    rule: str


@dataclasses.dataclass(frozen=True, slots=True)
class UniqueItem(_Node):
    """A text of `item`, not empty, that no earlier `Fresh` of the same rule has read since the rule was
    begun; `item` calls no rule that has a `Fresh` itself."""

    __hash__ = _Node.__hash__
    item: Expression


Expression = Chars | Text | Seq | Alt | Repeat | Call | UniqueItem

EMPTY = Seq(())
NOTHING = Alt(())

_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF


def normal_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, merged, and without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(piece for span in merged for piece in _without_surrogates(*span))


def _without_surrogates(low: int, high: int) -> list[tuple[int, int]]:
    pieces = [(low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)]
    return [(first, last) for first, last in pieces if first <= last]


def complement(ranges: Ranges) -> Ranges:
    gaps = []
    after = 0
    for low, high in normal_ranges(ranges):
        if low > after:
            gaps.append((after, low - 1))
        after = high + 1
    if after <= _LAST:
        gaps.append((after, _LAST))
    return normal_ranges(gaps)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    return complement(normal_ranges(complement(a) + complement(b)))


def chars(ranges: Iterable[tuple[int, int]]) -> Expression:
    normal = normal_ranges(ranges)
    return Chars(normal) if normal else NOTHING


ANY_CHAR = Chars(complement(()))


def text(literal: str) -> Expression:
    return Text(literal) if literal else EMPTY


def seq(*parts: Expression) -> Expression:
    flat: list[Expression] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        for piece in part.parts if isinstance(part, Seq) else (part,):
            if flat and isinstance(piece, Text) and isinstance(flat[-1], Text):
                flat[-1] = Text(flat[-1].text + piece.text)
            else:
                flat.append(piece)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(*options: Expression) -> Expression:
    flat: dict[Expression, None] = {}
    ranges: list[tuple[int, int]] = []
    for option in options:
        for piece in option.options if isinstance(option, Alt) else (option,):
            if isinstance(piece, Chars):
                ranges += piece.ranges
            else:
                flat[piece] = None
    pieces = list(flat)
    if ranges:
        pieces.insert(0, Chars(normal_ranges(ranges)))
    return pieces[0] if len(pieces) == 1 else Alt(tuple(pieces))


def repeat(item: Expression, low: int, high: int | None) -> Expression:
    if item == NOTHING:
        return EMPTY if low == 0 else NOTHING
    if item == EMPTY or high == 0:
        return EMPTY
    if (low, high) == (1, 1):
        return item
    return Repeat(item, low, high)


def optional(item: Expression) -> Expression:
    return repeat(item, 0, 1)


def nullable(expression: Expression, rules: Collection[str] = ()) -> bool:
    """The empty text matches; it matches those of the `rules` called that are given."""
    match expression:
        case Seq(parts):
            return all(nullable(part, rules) for part in parts)
        case Alt(options):
            return any(nullable(option, rules) for option in options)
        case Repeat(item, low, _):
            return low == 0 or nullable(item, rules)
        case Call(rule):
            return rule in rules
        case UniqueItem(item):
            return nullable(item, rules)
    return False


def size(expression: Expression) -> int:
    """Characters of the expression with its repetitions written out."""
    match expression:
        case Text(literal):
            return len(literal)
        case Seq(parts) | Alt(parts):
            return sum(map(size, parts))
        case Repeat(item, low, high):
            return size(item) * max(1, low if high is None else high)
        case UniqueItem(item):
            return size(item)
    return 1
