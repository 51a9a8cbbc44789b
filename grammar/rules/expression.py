"""Expressions over characters, into which regular expressions, JSON schemas and other constraints are turned.

An expression is `Chars`, `Text`, `Seq`, `Alt`, `Repeat`, `Accepted` or, in a grammar, a `Call` of a rule, a
`UniqueItem`, a `MemberMark` or an `ObjectEnd`. Build them with `chars`, `text`, `seq`, `alt`, `repeat` and
`accepted`, which simplify: ``seq(text("a"), text("b"))`` is ``Text("ab")``. `EMPTY` matches the empty text
only, and `NOTHING` matches no text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

Ranges = tuple[tuple[int, int], ...]
"""Code points as sorted, disjoint, inclusive ranges without surrogates."""


class Term:
    """Base of the classes that `term` decorates: immutable, with a stored hash.

    Many dictionaries have terms as keys. If the hash were not stored, each look-up of a deep term would take
    time proportional to its size.
    """

    __slots__ = ("_hash",)
    _compared: ClassVar[Callable[[Term], object]]
    """A function that returns the fields by which terms are compared."""
    _hash: int

    def __post_init__(self) -> None:
        # Parts are made before the whole and store their hashes, so hashing never goes deeper than one level.
        kind = type(self)
        object.__setattr__(self, "_hash", hash((kind, kind._compared(self))))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        kind = type(self)
        if kind is not type(other) or self._hash != other._hash:
            return False
        return bool(kind._compared(self) == kind._compared(other))


T = TypeVar("T", bound=Term)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def term(cls: type[T]) -> type[T]:
    """Make a subclass of `Term` a frozen dataclass with slots, whose hash is computed once."""
    made: Any = dataclasses.dataclass(frozen=True, slots=True, eq=False)(cls)
    made._compared = attrgetter(*(field.name for field in dataclasses.fields(made) if field.compare))
    return cast(type[T], made)


@dataclasses.dataclass(frozen=True, eq=False)
class CharAutomaton:
    """A deterministic automaton over characters. From each of its states a final state can be reached.

    State 0 is the start; an automaton without states accepts nothing. `edges[s]` are (characters, next
    state), with disjoint sets of characters.
    """

    edges: Sequence[Sequence[tuple[Ranges, int]]]
    final: Sequence[bool]


class _Node(Term):
    """Base of expressions. `is_regular` is True if no part, at any depth, is a `Call`, `UniqueItem`,
    `MemberMark` or `ObjectEnd`; `has_unique_items` is True if some part is a `UniqueItem`."""

    __slots__ = ("has_unique_items", "is_regular")
    is_regular: bool
    has_unique_items: bool

    def __post_init__(self) -> None:
        kind = type(self)
        object.__setattr__(self, "_hash", hash((kind, kind._compared(self))))
        unique = kind is UniqueItem
        regular = not unique and kind is not Call and kind is not MemberMark and kind is not ObjectEnd
        for part in parts_of(self):
            if not part.is_regular:
                regular = False
                unique = unique or part.has_unique_items
        object.__setattr__(self, "is_regular", regular)
        object.__setattr__(self, "has_unique_items", unique)


@term
class Chars(_Node):
    """Any one character of the set `ranges`."""

    ranges: Ranges


@term
class Text(_Node):
    """Exactly the text `text`, which is not empty."""

    text: str


@term
class Seq(_Node):
    """The concatenation of `parts`."""

    parts: tuple[Expression, ...]


@term
class Alt(_Node):
    """Any one of `options`."""

    options: tuple[Expression, ...]


@term
class Repeat(_Node):
    """`item` repeated `low` to `high` times; `high` None means no limit."""

    item: Expression
    low: int
    high: int | None


@term
class Accepted(_Node):
    """A text that leads `automaton` from `state` to a final state."""

    automaton: CharAutomaton
    state: int


@term
class Call(_Node):
    """A text of the rule named `rule`."""

    rule: str


@term
class UniqueItem(_Node):
    """A non-empty text of `item` that differs from all texts that a `UniqueItem` has matched since the
    surrounding rule began.

    `item` may call rules with a `UniqueItem` of their own, within limits (`construction.unique_items`).
    """

    item: Expression


@term
class MemberMark(_Node):
    """A mark after the name of a member, in an object whose members come in any order. Matches the empty
    text.

    `object` is the number of the object (`ObjectEnd`); `member` is the number of the member, or `UNNAMED`. A
    named member may be read at most once in an object.
    """

    object: int
    member: int


UNNAMED = -1
"""`MemberMark.member` for all properties that the schema does not name."""


@term
class ObjectEnd(_Node):
    """A mark after the closing brace of an object whose members come in any order. Matches the empty text.

    `members` are the texts of the named members, by number; `required` has the numbers of the required ones;
    `others` are the texts of unnamed members. The object has `low` to `high` members in total. The rule of
    the object must end with this mark.
    """

    object: int
    members: tuple[Expression, ...]
    required: frozenset[int]
    others: tuple[Expression, ...]
    low: int
    high: int | None

    def can_end(self, ends: Callable[[Expression], bool]) -> bool:
        """Whether the object can have all required members, and at least `low` members. `ends` says whether
        the text of a member can be completed."""
        named = [ends(member) for member in self.members]
        enough = sum(named) >= self.low or any(map(ends, self.others))
        return enough and all(named[i] for i in self.required)


Expression = Chars | Text | Seq | Alt | Repeat | Accepted | Call | UniqueItem | MemberMark | ObjectEnd


def parts_of(expression: Expression | _Node) -> tuple[Expression, ...]:
    """The direct subexpressions of `expression`."""
    kind = type(expression)  # a match statement takes three times as long
    if kind is Seq:
        return expression.parts  # type: ignore[union-attr]
    if kind is Alt:
        return expression.options  # type: ignore[union-attr]
    if kind is ObjectEnd:
        return (*expression.members, *expression.others)  # type: ignore[union-attr]
    return (expression.item,) if kind is Repeat or kind is UniqueItem else ()  # type: ignore[union-attr]


EMPTY = Seq(())
NOTHING = Alt(())

_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
_ALL: Ranges = ((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST))


def normal_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """`ranges` sorted, merged, and without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    if any(low <= _SURROGATES[1] and high >= _SURROGATES[0] for low, high in merged):
        return intersection(tuple(merged), _ALL)
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All characters that are not in `ranges`, without surrogates."""
    gaps = []
    after = 0
    for low, high in ranges:
        if low > after:
            gaps.append((after, low - 1))
        after = high + 1
    if after <= _LAST:
        gaps.append((after, _LAST))
    return normal_ranges(gaps)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            found.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def chars(ranges: Iterable[tuple[int, int]]) -> Expression:
    """Any one character in `ranges`, which may overlap; `NOTHING` if there are no ranges."""
    normal = normal_ranges(ranges)
    return Chars(normal) if normal else NOTHING


def ranges_of(members: Iterable[str]) -> Ranges:
    """The set of the characters `members`."""
    return normal_ranges((ord(char), ord(char)) for char in members)


def chars_of(members: Iterable[str]) -> Expression:
    """Any one of the characters `members`."""
    return chars(ranges_of(members))


ANY_CHAR = Chars(complement(()))


def text(literal: str) -> Expression:
    return Text(literal) if literal else EMPTY


def seq(*parts: Expression) -> Expression:
    flat: list[Expression] = []
    for part in parts:
        if type(part) is Alt and not part.options:
            return NOTHING
        for piece in part.parts if type(part) is Seq else (part,):
            last = flat[-1] if flat else None
            if type(piece) is Text and type(last) is Text:
                flat[-1] = Text(last.text + piece.text)
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


def accepted(automaton: CharAutomaton, state: int = 0) -> Expression:
    """The texts that `automaton` accepts from `state` on."""
    if not automaton.edges:
        return NOTHING
    return Accepted(automaton, state) if automaton.edges[state] else EMPTY


def optional(item: Expression) -> Expression:
    return repeat(item, 0, 1)


def rebuilt(expression: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """`expression` with each direct subexpression replaced by the result of `change`, and simplified."""
    match expression:
        case Seq(parts):
            return seq(*map(change, parts))
        case Alt(options):
            return alt(*map(change, options))
        case Repeat(item, low, high):
            return repeat(change(item), low, high)
        case UniqueItem(item):
            changed = change(item)
            return NOTHING if changed == NOTHING else UniqueItem(changed)
        case ObjectEnd(number, members, required, others, low, high):
            end = ObjectEnd(
                number, tuple(map(change, members)), required, tuple(map(change, others)), low, high
            )
            return end if end.can_end(lambda text: text != NOTHING) else NOTHING
    return expression


def nullable(expression: Expression, rules: Collection[str] = ()) -> bool:
    """Whether `expression` matches the empty text. `rules` has the names of the rules that do."""
    return derivable(expression, rules, characters=False)


def derivable(expression: Expression, rules: Collection[str], *, characters: bool) -> bool:
    """Whether some text matches `expression`, provided that each of `rules` has a text and no other rule has
    any. Without `characters`, only the empty text counts."""
    kind = type(expression)  # a match statement takes three times as long
    if kind is Text or kind is Chars:
        return characters
    if kind is Seq:
        parts = expression.parts  # type: ignore[union-attr]
        return all(derivable(part, rules, characters=characters) for part in parts)
    if kind is Alt:
        options = expression.options  # type: ignore[union-attr]
        return any(derivable(option, rules, characters=characters) for option in options)
    match expression:
        case Call(rule):
            return rule in rules
        case Repeat(item, low, _):
            return low == 0 or derivable(item, rules, characters=characters)
        case Accepted(automaton, state):
            return characters or automaton.final[state]
        case UniqueItem(item):
            return derivable(item, rules, characters=characters)
        case MemberMark():
            return True
        case ObjectEnd():
            return not characters or expression.can_end(lambda text: derivable(text, rules, characters=True))
    return characters


def size(expression: Expression) -> int:
    """Number of characters of the expression if its repetitions are written out."""
    match expression:
        case Text(literal):
            return len(literal)
        case Seq(parts) | Alt(parts):
            return sum(map(size, parts))
        case Repeat(item, low, high):
            return size(item) * max(1, low if high is None else high)
        case Accepted(automaton):
            return len(automaton.edges)
        case UniqueItem(item):
            return size(item)
    return 1
