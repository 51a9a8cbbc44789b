"""Positions in a grammar (Glushkov 1961): what is read next there, and what has to follow it.

A position is what is read next (a set of characters, a text from some place on, or a call of a rule) and a
*continuation*: the list of expressions that follow it up to the end of the rule. In ``("ab" | [c-d]) "e"``
the first positions are ``ab`` and ``[c-d]``, both with the continuation ``"e"``. Positions and continuations
are numbered, equal ones alike, so that a set of numbers can be a state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import NamedTuple

from ramify.grammar.rules.expression import (
    EMPTY,
    Alt,
    Call,
    Chars,
    Expression,
    Ranges,
    Repeat,
    Seq,
    Text,
    UniqueText,
    alt,
    nullable,
    repeat,
    size,
)
from ramify.grammar.rules.rule_set import nullable_rules
from ramify.grammar.rules.utf8 import utf8_spans

END = 0
"""Number of the empty continuation, and of the position after it: the rule may end here."""

MARK = 1
"""A position where nothing is read: it marks the states that follow a `Fresh`."""

SHARED_COUNT = 4
SHARED_SIZE = 6
"""An option that is repeated so often and is so large is called, so that its states are there once."""

LINKED = 8
LINKING_RULES = 64
"""Where so many rules may be empty, sets of positions are linked from that size on, not copied: of thousands
of optional parts, each is followed by all those after it."""

JOINED_TEXT = 64
"""Ends of texts up to this length are the same position where they are equal."""

FACTORED = 3
FACTORED_LENGTH = 4
"""From so many texts of such a length on, what they have in common is read once."""

MAX_DEPTH = 10
"""Recursive rules are unfolded so deep in each other. Where that does not end, two of them are read at the
same time, and a stack for each would be needed."""

_ENDS = frozenset([END, MARK])

NON_ASCII = ((0x80, 0xD7FF), (0xE000, 0x10FFFF))


_UNFOLDED = Repeat(EMPTY, 0, 0)
"""The empty text, where a recursive rule that was unfolded has ended."""


class TooLarge(Exception):
    """The grammar has more states than are allowed, or infinitely many."""


class CharSet(NamedTuple):
    """The characters of a position: `ascii` a mask of 128 bits, `high` the ranges from U+0080 on, and
    `first` a mask of the 256 bytes that their UTF-8 begins with."""

    ascii: int
    high: Ranges
    first: int


class Position(NamedTuple):
    """What is read next: one of `chars`, `text` from index `at` on, and a call of `rule`. `after` is the
    number of the continuation. A position with `linked` stands for all the positions in it."""

    chars: CharSet | None
    text: str
    at: int
    rule: str
    after: int
    linked: frozenset[int] | None = None


@lru_cache(maxsize=8192)
def char_set(ranges: Ranges) -> CharSet:
    ascii_mask = 0
    first = 0
    high: list[tuple[int, int]] = []
    for low, last in ranges:
        if low < 0x80:
            ascii_mask |= (1 << (min(last, 0x7F) + 1)) - (1 << low)
        if last >= 0x80:
            high.append((max(low, 0x80), last))
            for spans in utf8_spans(*high[-1]):
                first |= (1 << (spans[0][1] + 1)) - (1 << spans[0][0])
    return CharSet(ascii_mask, tuple(high), first | ascii_mask)


def holds_fresh(expression: Expression) -> bool:
    """`expression` itself has a `Fresh`, not only a rule that it calls."""
    if expression.is_regular:
        return False
    match expression:
        case UniqueText():
            return True
        case Seq(parts) | Alt(parts):
            return any(map(holds_fresh, parts))
        case Repeat(item, _, _):
            return holds_fresh(item)
    return False


def first_byte(char: str) -> int:
    return char.encode()[0]


class Positions:
    """The positions of a grammar, found as they are asked for; `table` has them by number.

    Rules in `called` become calls, which need a stack; all others are read in their caller's place. Rules in
    `recursive` call themselves, directly or not.
    """

    def __init__(
        self, rules: Mapping[str, Expression], called: Collection[str], recursive: Collection[str] = ()
    ) -> None:
        self.rules = dict(rules)
        self._called = set(called)
        self.recursive = frozenset(recursive)
        self._nullable_rules = nullable_rules(rules)
        self._nullable: dict[Expression, bool] = {}
        self._continuations: list[tuple[Expression, int]] = [(EMPTY, END)]
        self._depth = [0]
        self._continuation_number: dict[tuple[Expression, int], int] = {}
        self._split_number: dict[frozenset[int], int] = {}
        self._closures: dict[int, frozenset[int]] = {END: frozenset([END])}
        self._closing: set[int] = set()
        self._linking = len(self._nullable_rules) >= LINKING_RULES
        self._link_number: dict[frozenset[int], int] = {}
        self.table: list[Position] = [Position(None, "", 0, "", END)] * 2
        self._position_number: dict[tuple[object, int, int], int] = {}
        self._first: dict[str, int] = {}
        self.fresh: dict[str, Expression] = {}
        """The rules that stand for the items of `Fresh`."""
        self._holders = {name for name, body in rules.items() if holds_fresh(body)}
        self._shared: dict[Expression, Expression] = {}

    def start(self, rule: str) -> frozenset[int]:
        """Where `rule` begins."""
        return self.closure(self._continuation(self.rules[rule], END))

    def unfolded(self, rule: str, after: int) -> frozenset[int]:
        """Where a text of `rule` that is not empty begins, read in its caller's place."""
        if rule in self.fresh or rule in self._holders:
            raise TooLarge
        if rule in self.recursive:
            before = self._depth[after]
            after = self._continuation(_UNFOLDED, after)
            self._depth[after] = before + 1
            if before >= MAX_DEPTH:
                raise TooLarge
        found: set[int] = set()
        self._collect(self.rules[rule], after, found)
        return frozenset(found)

    def is_called_always(self, rule: str) -> bool:
        """It calls itself, or it has to do with texts that must differ."""
        return rule in self.recursive or rule in self.fresh or rule in self._holders

    def closure(self, continuation: int) -> frozenset[int]:
        """Where `continuation` begins."""
        known = self._closures.get(continuation)
        if known is not None:
            return known
        self._closing.add(continuation)
        found: set[int] = set()
        here = continuation
        while True:
            expression, after = self._continuations[here]
            self._collect(expression, after, found)
            if not self._is_nullable(expression):
                break
            if after in self._closures:
                found |= self.linked(self._closures[after])
                break
            here = after
        self._closing.discard(continuation)
        closed = self._closures[continuation] = self._factored(found)
        return closed

    def linked(self, found: frozenset[int]) -> frozenset[int]:
        """`found`, or one position for them all where they are many."""
        if not self._linking or len(found) < LINKED:
            return found
        number = self._link_number.get(found)
        if number is None:
            number = self._link_number[found] = len(self.table)
            self.table.append(Position(None, "", 0, "", END, found))
        return frozenset([number]) | (found & _ENDS)

    def union(self, sets: Collection[frozenset[int]]) -> frozenset[int]:
        if len(sets) == 1:
            (only,) = sets
            return only
        return self._factored(set().union(*sets))

    def _factored(self, found: set[int]) -> frozenset[int]:
        """`found` with what texts have in common at their beginning as one text, but for a last character."""
        if len(found) < FACTORED:
            return frozenset(found)
        alike: dict[str, list[int]] = {}
        for number in found:
            position = self.table[number]
            if len(position.text) - position.at >= FACTORED_LENGTH:
                alike.setdefault(position.text[position.at], []).append(number)
        for numbers in alike.values():
            if len(numbers) >= FACTORED:
                texts = {number: self.table[number].text[self.table[number].at :] for number in numbers}
                length = _common_length(min(texts.values()), max(texts.values()))
                length = min(length, *(len(text) - 1 for text in texts.values()))
                if length > 1:
                    found.difference_update(numbers)
                    common = texts[numbers[0]][:length]
                    found.add(self._text(common, 0, self._split_continuation(texts, length)))
        return frozenset(found)

    def _split_continuation(self, texts: dict[int, str], at: int) -> int:
        """The continuation that begins with all the texts from `at` on, by their positions."""
        rest = {self._text(literal[at:], 0, self.table[number].after) for number, literal in texts.items()}
        key = frozenset(rest)
        number = self._split_number.get(key)
        if number is None:
            number = self._split_number[key] = len(self._continuations)
            self._continuations.append((EMPTY, END))
            self._depth.append(max(self._depth[self.table[position].after] for position in key))
            self._closures[number] = self._factored(rest)
        return number

    def after_char(self, number: int) -> frozenset[int]:
        """The positions after a character of position `number`, which is no call."""
        position = self.table[number]
        if position.at + 1 < len(position.text):
            return frozenset((self._text(position.text, position.at + 1, position.after),))
        return self.linked(self.closure(position.after))

    def first(self, rule: str) -> int:
        """A mask of the bytes that texts of `rule` begin with."""
        if rule not in self._first:
            self._find_first(rule)
        return self._first[rule]

    def _find_first(self, rule: str) -> None:
        # All rules that can come first, then their masks until nothing changes.
        parts: dict[str, tuple[int, set[str]]] = {}
        queue = [rule]
        for name in queue:
            if name not in parts:
                parts[name] = self._first_parts(self.rules[name])
                queue += parts[name][1]
        masks = {name: self._first.get(name, own) for name, (own, _) in parts.items()}
        changed = True
        while changed:
            changed = False
            for name, (_, others) in parts.items():
                mask = masks[name]
                for other in others:
                    mask |= masks[other]
                if mask != masks[name]:
                    masks[name] = mask
                    changed = True
        self._first.update(masks)

    def _first_parts(self, expression: Expression) -> tuple[int, set[str]]:
        """The first bytes that `expression` has itself, and the rules that it may begin with."""
        mask = 0
        rules: set[str] = set()
        stack = [expression]
        while stack:
            match stack.pop():
                case Chars(ranges):
                    mask |= char_set(ranges).first
                case Text(literal):
                    mask |= 1 << first_byte(literal[0])
                case Alt(options):
                    stack += options
                case Repeat(item, _, _) | UniqueText(item):
                    stack.append(item)
                case Call(rule):
                    rules.add(rule)
                case Seq(parts):
                    for part in parts:
                        stack.append(part)
                        if not self._is_nullable(part):
                            break
        return mask, rules

    def _is_nullable(self, expression: Expression) -> bool:
        kind = type(expression)
        if kind is Text or kind is Chars:
            return False
        known = self._nullable.get(expression)
        if known is None:
            known = self._nullable[expression] = nullable(expression, self._nullable_rules)
        return known

    def _continuation(self, expression: Expression, after: int) -> int:
        key = (expression, after)
        number = self._continuation_number.get(key)
        if number is None:
            number = self._continuation_number[key] = len(self._continuations)
            self._continuations.append(key)
            self._depth.append(self._depth[after])
        return number

    def _collect(self, expression: Expression, after: int, found: set[int]) -> None:
        """Add where texts of `expression` that are not empty begin, if `after` comes after them."""
        stack = [(expression, after)]
        seen: set[tuple[str, int]] = set()
        while stack:
            expression, after = stack.pop()
            kind = type(expression)
            if kind is Text:
                found.add(self._text(expression.text, 0, after))  # type: ignore[union-attr]
            elif kind is Seq:
                self._collect_sequence(expression.parts, after, stack)  # type: ignore[union-attr]
            elif kind is Alt:
                stack += [(option, after) for option in expression.options]  # type: ignore[union-attr]
            elif kind is Chars:
                found.add(self._chars(expression.ranges, after))  # type: ignore[union-attr]
            elif kind is Call:
                rule = expression.rule  # type: ignore[union-attr]
                if rule in self._called:
                    found.add(self._call(rule, after))
                elif (rule, after) not in seen:
                    seen.add((rule, after))
                    whole = self._continuation(expression, after) if self._linking else END
                    if not self._linking or whole in self._closing:
                        stack.append((self.rules[rule], after))
                    else:
                        found |= self.linked(self.closure(whole))
            elif kind is UniqueText:
                found.add(self._call(self._fresh_rule(expression.item), after))  # type: ignore[union-attr]
            elif kind is Repeat:
                item, low, high = expression.item, expression.low, expression.high  # type: ignore[union-attr]
                rest = repeat(item, max(0, low - 1), None if high is None else high - 1)
                if max(low, high or 0) >= SHARED_COUNT:
                    item = self._shared_item(item)
                stack.append((item, after if rest == EMPTY else self._continuation(rest, after)))

    def _collect_sequence(
        self, parts: tuple[Expression, ...], after: int, stack: list[tuple[Expression, int]]
    ) -> None:
        # The parts that may come first are those up to the first one that is not nullable.
        last = 0
        while last < len(parts) and self._is_nullable(parts[last]):
            last += 1
        for i in reversed(range(len(parts))):
            if i <= last:
                stack.append((parts[i], after))
            after = self._continuation(parts[i], after)

    def _shared_item(self, item: Expression) -> Expression:
        """`item` with its large options called."""
        known = self._shared.get(item)
        if known is None:
            options = item.options if isinstance(item, Alt) else (item,)
            if isinstance(item, Call) and item.rule not in self._called and size(self.rules[item.rule]) > 1:
                large: list[Expression] = [item]
            else:
                large = [o for o in options if not isinstance(o, Chars | Call) and not holds_fresh(o)]
            known = item
            if sum(map(self._size, large)) >= SHARED_SIZE:
                small = [option for option in options if option not in large]
                known = alt(*small, self._define(alt(*large)))
            self._shared[item] = known
        return known

    def _size(self, expression: Expression) -> int:
        return size(self.rules[expression.rule] if isinstance(expression, Call) else expression)

    def _define(self, body: Expression) -> Call:
        call = Call(f"shared {len(self.rules)}")
        self.rules[call.rule] = body
        self._called.add(call.rule)
        if self._is_nullable(body):
            self._nullable_rules.add(call.rule)
        return call

    def _fresh_rule(self, item: Expression) -> str:
        name = f"fresh {hash(item):x}"
        while self.fresh.setdefault(name, item) != item:
            name += "'"
        if name not in self.rules:
            if self._is_nullable(item):
                raise TooLarge
            self.rules[name] = item
            self._called.add(name)
        return name

    def _text(self, literal: str, at: int, after: int) -> int:
        if at and len(literal) - at <= JOINED_TEXT:
            literal, at = literal[at:], 0
        key = (literal, at, after)
        number = self._position_number.get(key)
        if number is None:
            number = self._position_number[key] = len(self.table)
            self.table.append(Position(None, literal, at, "", after))
        return number

    def _chars(self, ranges: Ranges, after: int) -> int:
        key = (ranges, -1, after)
        number = self._position_number.get(key)
        if number is None:
            number = self._position_number[key] = len(self.table)
            self.table.append(Position(char_set(ranges), "", 0, "", after))
        return number

    def _call(self, rule: str, after: int) -> int:
        key = (rule, -2, after)
        number = self._position_number.get(key)
        if number is None:
            number = self._position_number[key] = len(self.table)
            self.table.append(Position(None, "", 0, rule, after))
        return number


def _common_length(a: str, b: str) -> int:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
