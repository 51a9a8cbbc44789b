"""Positions in a grammar (Glushkov 1961): what is read next, and what follows it.

A position is what is read next (a set of characters, a text from some index on, or a call of a rule) and a
*continuation*: the expressions that follow up to the end of the rule. Positions and continuations are
numbered, equal ones alike, so that a set of numbers can be a state (`states`). In ``("ab" | [c-d]) "e"``:

    first positions    1: "ab" from 0, then "e"    2: [c-d], then "e"
    after "a"          3: "ab" from 1, then "e"
    after "b" or c     4: "e" from 0, then the end
    after "e"          END
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ramify.grammar.automaton.char_sets import CharSet, char_set, first_byte
from ramify.grammar.automaton.counted import Counting
from ramify.grammar.rules.expression import (
    EMPTY,
    Accepted,
    Alt,
    Call,
    CharAutomaton,
    Chars,
    Expression,
    Ranges,
    Repeat,
    Seq,
    Text,
    UniqueItem,
    accepted,
    alt,
    nullable,
    repeat,
    size,
)
from ramify.grammar.rules.rule_set import nullable_rules

END = 0
"""Number of the empty continuation and of its position: the rule may end here."""

MARK = 1
"""A position that reads nothing: it marks the states after a `UniqueItem`."""

SHARED_COUNT = 4
SHARED_SIZE = 6
"""An option of SHARED_SIZE characters repeated SHARED_COUNT times is called: its states exist once."""

LINKED = 8
LINKING_RULES = 64
"""In grammars with LINKING_RULES rules that may be empty, sets of LINKED positions or more are linked instead
of copied: in a sequence of thousands of optional parts, each part is followed by all later ones."""

JOINED_TEXT = 64
"""Equal ends of texts, up to this length, are the same position."""

FACTORED, FACTORED_LENGTH = 3, 4
"""FACTORED or more texts of FACTORED_LENGTH or more characters that begin alike share their first states."""

MAX_DEPTH = 10
"""Levels of recursive rules that are inlined in each other. If that is not enough, two of them are read at
the same time, and each needs a stack of its own."""

_ENDS = frozenset([END, MARK])
_INLINED = Repeat(EMPTY, 0, 0)
"""The empty text, where an inlined recursive rule has ended."""


class TooLarge(Exception):
    """The grammar has more states than are allowed, or infinitely many."""


class NotCounted(TooLarge):
    """A long repetition is read beside something that begins alike, so its rules (`counted`) cannot be
    called."""


class Position(NamedTuple):
    """What is read next: one of `chars`, `text` from index `at` on, or a call of `rule`. `after` is the
    number of the continuation. A position with `linked` stands for all positions in that set."""

    chars: CharSet | None
    text: str
    at: int
    rule: str
    after: int
    linked: frozenset[int] | None = None


def has_unique_items(expression: Expression) -> bool:
    """`expression` itself contains a `UniqueItem`; rules that it calls do not count."""
    if expression.is_regular:
        return False
    match expression:
        case UniqueItem():
            return True
        case Seq(parts) | Alt(parts):
            return any(map(has_unique_items, parts))
        case Repeat(item, _, _):
            return has_unique_items(item)
    return False


class Positions:
    """The positions of a grammar, computed on demand; `table` has them by number.

    Rules in `called` become calls, which need a stack; all others are inlined. Rules in `recursive` call
    themselves, directly or not. With `counting`, long repetitions become rules, which are called (`counted`).
    """

    def __init__(
        self,
        rules: Mapping[str, Expression],
        called: Collection[str],
        recursive: Collection[str] = (),
        counting: bool = False,
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
        self.item_rules: dict[str, Expression] = {}
        """By name, the rules made of the items of `UniqueItem`."""
        self._array_rules = {name for name, body in rules.items() if has_unique_items(body)}
        self._shared: dict[Expression, Expression] = {}
        self._counting = counting
        self.counting = Counting(self._define)

    def start(self, rule: str) -> frozenset[int]:
        """The positions where `rule` begins."""
        return self.closure(self._continuation(self.rules[rule], END))

    def inlined(self, rule: str, after: int) -> frozenset[int]:
        """The positions where a text of `rule`, not an empty one, begins when the rule is inlined.

        Raises `TooLarge` for rules with unique items, and beyond `MAX_DEPTH` levels of recursion, and
        `NotCounted` for the rules of long repetitions.
        """
        if rule in self.counting.called:
            raise NotCounted
        if rule in self.item_rules or rule in self._array_rules:
            raise TooLarge
        if rule in self.recursive:
            before = self._depth[after]
            after = self._continuation(_INLINED, after)
            self._depth[after] = before + 1
            if before >= MAX_DEPTH:
                raise TooLarge
        found: set[int] = set()
        self._collect(self.rules[rule], after, found)
        return frozenset(found)

    def is_called_always(self, rule: str) -> bool:
        """`rule` is recursive, has unique items, or is the rule of such an item."""
        return rule in self.recursive or rule in self.item_rules or rule in self._array_rules

    def closure(self, continuation: int) -> frozenset[int]:
        """The positions where `continuation` begins, END among them if it may be empty."""
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
        """`found`, or one position that links to all of them where they are many."""
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
        """`found`, with the common beginning of similar texts as one text; each keeps a last character of its
        own."""
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
                alike_up_to = zip(min(texts.values()), max(texts.values()), strict=False)
                length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], alike_up_to))
                length = min(length, *(len(text) - 1 for text in texts.values()))
                if length > 1:
                    found.difference_update(numbers)
                    common = texts[numbers[0]][:length]
                    found.add(self._text(common, 0, self._split_continuation(texts, length)))
        return frozenset(found)

    def _split_continuation(self, texts: dict[int, str], at: int) -> int:
        """The continuation that begins with any of `texts`, which are by position, from index `at` on."""
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
        """The positions after one character at position `number`, which must not be a call."""
        position = self.table[number]
        if position.at + 1 < len(position.text):
            return frozenset((self._text(position.text, position.at + 1, position.after),))
        return self.linked(self.closure(position.after))

    def first(self, rule: str) -> int:
        """The first bytes of the texts of `rule`, as a mask of 256 bits."""
        if rule in self._first:
            return self._first[rule]
        # A fixed point over all rules that `rule` can begin with.
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
        return self._first[rule]

    def _first_parts(self, expression: Expression) -> tuple[int, set[str]]:
        """The first bytes of `expression` itself, and the rules that it may begin with."""
        mask = 0
        rules: set[str] = set()
        stack = [expression]
        while stack:
            match stack.pop():
                case Chars(ranges):
                    mask |= char_set(ranges).first
                case Text(literal):
                    mask |= 1 << first_byte(literal[0])
                case Accepted(automaton, state):
                    stack += [Chars(ranges) for ranges, _ in automaton.edges[state]]
                case Alt(options):
                    stack += options
                case Repeat(item, _, _) | UniqueItem(item):
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
        """Add to `found` the positions where texts of `expression`, not the empty one, begin before
        `after`."""
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
            elif kind is Accepted:
                automaton: CharAutomaton = expression.automaton  # type: ignore[union-attr]
                for ranges, state in automaton.edges[expression.state]:  # type: ignore[union-attr]
                    rest = accepted(automaton, state)
                    follows = after if rest == EMPTY else self._continuation(rest, after)
                    found.add(self._chars(ranges, follows))
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
            elif kind is UniqueItem:
                found.add(self._call(self._item_rule(expression.item), after))  # type: ignore[union-attr]
            elif kind is Repeat:
                counted = self.counting.rewritten(expression) if self._counting else None  # type: ignore[arg-type]
                if counted is not None:
                    stack.append((counted, after))
                    continue
                item, low, high = expression.item, expression.low, expression.high  # type: ignore[union-attr]
                rest = repeat(item, max(0, low - 1), None if high is None else high - 1)
                if max(low, high or 0) >= SHARED_COUNT:
                    item = self._shared_item(item)
                stack.append((item, after if rest == EMPTY else self._continuation(rest, after)))

    def _collect_sequence(
        self, parts: tuple[Expression, ...], after: int, stack: list[tuple[Expression, int]]
    ) -> None:
        # Only the parts up to the first one that is not nullable can come first.
        last = 0
        while last < len(parts) and self._is_nullable(parts[last]):
            last += 1
        for i in reversed(range(len(parts))):
            if i <= last:
                stack.append((parts[i], after))
            after = self._continuation(parts[i], after)

    def _shared_item(self, item: Expression) -> Expression:
        """`item` with its large options as calls of one shared rule."""
        known = self._shared.get(item)
        if known is None:
            options = item.options if isinstance(item, Alt) else (item,)
            if isinstance(item, Call) and item.rule not in self._called and size(self.rules[item.rule]) > 1:
                large: list[Expression] = [item]
            else:
                large = [o for o in options if not isinstance(o, Chars | Call) and not has_unique_items(o)]
            known = item
            bodies = [self.rules[o.rule] if isinstance(o, Call) else o for o in large]
            if sum(map(size, bodies)) >= SHARED_SIZE:
                small = [option for option in options if option not in large]
                known = alt(*small, self._define(alt(*large)))
            self._shared[item] = known
        return known

    def _define(self, body: Expression) -> Call:
        call = Call(f"shared {len(self.rules)}")
        self.rules[call.rule] = body
        self._called.add(call.rule)
        if self._is_nullable(body):
            self._nullable_rules.add(call.rule)
        return call

    def _item_rule(self, item: Expression) -> str:
        name = f"unique item {hash(item):x}"
        while self.item_rules.setdefault(name, item) != item:
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
        return self._numbered((literal, at, after), Position(None, literal, at, "", after))

    def _chars(self, ranges: Ranges, after: int) -> int:
        return self._numbered((ranges, -1, after), Position(char_set(ranges), "", 0, "", after))

    def _call(self, rule: str, after: int) -> int:
        return self._numbered((rule, -2, after), Position(None, "", 0, rule, after))

    def _numbered(self, key: tuple[object, int, int], position: Position) -> int:
        number = self._position_number.get(key)
        if number is None:
            number = self._position_number[key] = len(self.table)
            self.table.append(position)
        return number
