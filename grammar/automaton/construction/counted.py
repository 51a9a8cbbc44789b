"""Long repetitions as rules that count with the stack: some 300 states instead of one for each count.

With blocks of 4 characters, and 2 blocks of one level in a block of the next, ``x{2,13}`` is

    x{2,2} more?        more ::= x{1,4}{1,2} (x{1,3})?        since 13 - 2 = 11 = 4 * 2 + 3

Each ``{1,n}`` that contains another repetition is a rule. Such a rule is read *greedily*: it repeats as long
as another x comes, up to n times. If the rule ends after fewer repetitions, the next character does not begin
an x, so no later part reads an x either. The automaton therefore stays deterministic if no character that
begins an x can also continue an x or follow the whole repetition. `subset_construction` checks this at the
end of a rule (`_conflicts`).
"""

from __future__ import annotations

from collections.abc import Callable

from ramify.grammar.rules.derivative import Product, explore
from ramify.grammar.rules.expression import (
    EMPTY,
    Call,
    Expression,
    Repeat,
    Text,
    intersection,
    optional,
    parts_of,
    repeat,
    seq,
)

BLOCK = 256
"""Characters in a block of the first level. Runs (`runs`) end at the end of a block, where computing a mask
takes longer."""
ITEMS = 64
"""Items in a block of the first level, if the items call rules."""
BLOCKS = 16
"""Number of blocks that make up one block of the next level."""
SHORT = 2 * min(BLOCK, ITEMS)
"""Repetitions up to this are never rewritten."""

MAX_ITEM_STATES = 64


class Counting:
    """The rules of long repetitions. `define` adds a rule to the grammar and returns a call of it."""

    def __init__(self, define: Callable[[Expression], Call]) -> None:
        self._define = define
        self._upto: dict[tuple[Expression, int, int], Expression] = {}
        self._exact: dict[tuple[Expression, int], Expression] = {}
        self._items: dict[Expression, Expression | None] = {}
        self.greedy: dict[str, Expression] = {}
        """Rules that are read greedily, by name, and the expression that each repeats."""
        self.called: set[str] = set()
        """Rules made here, which cannot be inlined."""

    def rewritten(self, expression: Repeat) -> Expression | None:
        """Replace `expression` by rules that count. Returns None if the repetition is short, or its item has
        no clear end (`_has_clear_end`)."""
        low, high = expression.low, expression.high
        regular = expression.item.is_regular
        block = BLOCK if regular else ITEMS
        if max(low, high or 0) <= 2 * block:
            return None
        item = self._item(expression.item)
        if item is None:
            return None
        if high is None:
            return seq(self._exactly(item, low, block), repeat(item, 0, None))
        return seq(self._exactly(item, low, block), self._at_most(item, high - low, block))

    def _item(self, item: Expression) -> Expression | None:
        if item not in self._items:
            if not item.is_regular:
                # `subset_construction` checks calls of this rule like all others: a character that could
                # continue an item may not begin another item.
                call = self._define(item)
                self.called.add(call.rule)
                self._items[item] = call
            else:
                self._items[item] = item if _has_clear_end(item) else None
        return self._items[item]

    def _exactly(self, item: Expression, count: int, block: int) -> Expression:
        parts = []
        for level, digit in enumerate(_digits(count, block)):
            parts.append(repeat(self._whole(item, level, block), digit, digit))
        return seq(*parts)

    def _whole(self, item: Expression, level: int, block: int) -> Expression:
        """A full block of `level`. A block of level 0 is one item."""
        if level == 0:
            return item
        known = self._exact.get((item, level))
        if known is None:
            below, count = self._whole(item, level - 1, block), block if level == 1 else BLOCKS
            call = self._define(repeat(below, count, count))
            self.called.add(call.rule)
            known = self._exact[item, level] = call
        return known

    def _at_most(self, item: Expression, count: int, block: int) -> Expression:
        if count <= block:
            return repeat(item, 0, count)
        found: Expression = EMPTY
        for level, digit in enumerate(_digits(count, block)):
            if digit:
                found = optional(seq(self._some(item, level, digit, block), found))
        return found

    def _some(self, item: Expression, level: int, count: int, block: int) -> Expression:
        """One item or more, at most as many as `count` blocks of `level` hold."""
        key = (item, level, count)
        if key not in self._upto:
            unit = item if level == 0 else self._some(item, level - 1, block if level == 1 else BLOCKS, block)
            if level and count == 1:
                return unit
            call = self._define(repeat(unit, 1, count))
            self.called.add(call.rule)
            self.greedy[call.rule] = item
            self._upto[key] = call
        return self._upto[key]


def _digits(count: int, block: int) -> list[int]:
    """Number of blocks of each level that together hold `count` items, the lowest level first."""
    count, units = divmod(count, block)
    digits = [units]
    while count:
        count, digit = divmod(count, BLOCKS)
        digits.append(digit)
    return digits


def _has_clear_end(item: Expression) -> bool:
    """Whether no complete text of `item` can be continued with a character that begins an item. `item` calls
    no rules."""
    product = Product([(item, True)])
    automaton = explore(product.start, product.steps, product.final, MAX_ITEM_STATES)
    if automaton is None or not automaton.edges or automaton.final[0]:
        return False
    return not any(
        intersection(going_on, beginning)
        for state, final in enumerate(automaton.final)
        if final
        for going_on, _ in automaton.edges[state]
        for beginning, _ in automaton.edges[0]
    )


def longest_repetition(expression: Expression) -> int:
    """The greatest bound of a repetition in `expression`; 0 if nothing is repeated."""
    longest = max(expression.low, expression.high or 0) if isinstance(expression, Repeat) else 0
    for part in parts_of(expression):
        if type(part) is not Text and type(part) is not Call:
            longest = max(longest, longest_repetition(part))
    return longest
