"""Expressions for the arrays of one disjunct.

``{"prefixItems": [A, B], "items": C, "minItems": 1, "maxItems": 4}`` becomes

    "[" A (", " B (", " C){0,2})? "]"

If ``contains`` counts items, there is one rule for each position and count. Unique items are in
`unique_arrays`.
"""

from __future__ import annotations

import itertools

from ramify.grammar.rules.expression import EMPTY, NOTHING, Call, Expression, alt, repeat, seq
from ramify.grammar.schema.document.unenforceable import refuse
from ramify.grammar.schema.logic.assertions import Contains, ItemCount, UniqueItems, within
from ramify.grammar.schema.logic.disjunct import Disjunct, counts
from ramify.grammar.schema.logic.formula import TRUE, Formula, conjunction, negation
from ramify.grammar.schema.values import json_rules
from ramify.grammar.schema.values.json_rules import enclosed
from ramify.grammar.schema.values.schema_grammar import SchemaGrammar
from ramify.grammar.schema.values.unique_arrays import unique_arrays

MAX_COUNTED = 1_000_000
"""Greatest minItems that is enforced. A maxItems may be greater."""
MAX_WRITTEN_OUT = 1000
"""Greatest minItems if items are unique, if contains counts them, or if the automaton cannot count further
(`Options.counted`). In these cases a greater maxItems is lowered to this number."""
MAX_STATES = 4000


def arrays(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    """The arrays of `disjunct`."""
    low, high = counts(disjunct, ItemCount)
    if high is not None and high < low:
        return grammar.define(NOTHING, "minItems exceeds maxItems")
    unique = any(not each.positive or high is None or high > 1 for each in disjunct.asserted(UniqueItems))
    containing = any(contains.restricts for contains in disjunct.asserted(Contains))
    written_out = unique or containing or not grammar.counted
    if high is not None and written_out:
        high = min(high, MAX_WRITTEN_OUT)
    most = MAX_WRITTEN_OUT if written_out else MAX_COUNTED
    if low > most:
        pointer = next(count.pointer for count in disjunct.asserted(ItemCount) if count.low)
        more = ", or leave out uniqueItems, contains and any_order" if written_out else ""
        refuse(pointer, f"A minItems above {most} is not enforced here", f"Lower it to {most}{more}.")
    if unique:
        return unique_arrays(grammar, disjunct, low, high)
    if containing:
        return _ContainsArrays(grammar, disjunct, low, high).expression()
    length = disjunct.prefix_length
    formulas = [disjunct.item_formula(i) for i in range(length + 1)]
    if (low, high, formulas) == (0, None, [TRUE]) and not grammar.canonical:
        return json_rules.ARRAY
    prefix = [grammar.value(formula) for formula in formulas[:length] if high is None or high > 0]
    rest = grammar.value(formulas[length]) if high is None or high > length else NOTHING
    return _sequence(grammar, prefix, rest, low, high)


def _sequence(
    grammar: SchemaGrammar, prefix: list[Expression], rest: Expression, low: int, high: int | None
) -> Expression:
    """The arrays that have the items of `prefix`, then any number of items `rest`, and `low` to `high` items
    in total."""
    comma = grammar.marks.comma
    length = len(prefix)
    if NOTHING in prefix or rest == NOTHING:
        # The first item that has no value cannot occur, nor can any later item.
        length = prefix.index(NOTHING) if NOTHING in prefix else length
        high = length if high is None else min(high, length)
    if high is not None and high < low:
        return grammar.define(NOTHING, "the array can have no more items")
    if high is not None:
        length = min(length, high)
    if high == 0:
        return enclosed("[", NOTHING, "]", grammar.marks)
    more = None if high is None else high - length
    tail = repeat(seq(comma, rest), max(0, low - length), more) if more != 0 else EMPTY
    # Backwards: `tail` is the text that may follow item i - 1. It contains the required items at least.
    for i in reversed(range(1, length)):
        following = seq(comma, prefix[i], tail)
        tail = grammar.rules.define(following if i < low else alt(following, EMPTY))
    if length:
        filled = seq(prefix[0], tail)
    else:
        filled = seq(rest, repeat(seq(comma, rest), max(0, low - 1), None if high is None else high - 1))
    return grammar.rules.define(enclosed("[", filled, "]", grammar.marks, empty=low == 0))


_State = tuple[int, tuple[int, ...]]
"""The number of items so far, and for each `Contains` the number of items that satisfied it. Numbers are
counted only as far as greater ones make a difference."""


class _ContainsArrays:
    """Arrays in which the items that satisfy a `Contains` are counted, with one rule for each state.

    Each item is counted as satisfying a `Contains` or as not satisfying it. If a `Contains` has only a
    minimum, the items counted as not satisfying it may have any value. If it has only a maximum, the items
    counted as satisfying it may have any value. This allows the same arrays with fewer rules.
    """

    def __init__(self, grammar: SchemaGrammar, disjunct: Disjunct, low: int, high: int | None) -> None:
        self._grammar = grammar
        self._disjunct = disjunct
        self._contains = [contains for contains in disjunct.asserted(Contains) if contains.restricts]
        self._low = low
        self._high = high
        length = max([disjunct.prefix_length] + [contains.begin for contains in self._contains])
        self._most_items = max(length, low if high is None else high, 1)
        self._calls: dict[_State, Call] = {}
        self._queue: list[_State] = []

    def expression(self) -> Expression:
        start = (0, (0,) * len(self._contains))
        self._call(start)
        for state in self._queue:
            self._grammar.rules.set_body(self._calls[state], alt(*self._options(*state)))
        filled = alt(*self._steps(*start))
        empty = self._may_end(*start)
        expression = enclosed("[", filled, "]", self._grammar.marks, empty=empty)
        return self._grammar.define(
            expression if filled != NOTHING or empty else NOTHING, "contains cannot hold"
        )

    def _call(self, state: _State) -> Call:
        if state not in self._calls:
            if len(self._calls) == MAX_STATES:
                pointer = self._contains[0].pointer
                refuse(
                    pointer,
                    f"Counting contains and the items takes more than {MAX_STATES} states",
                    "Lower minContains, maxContains, minItems and maxItems, whose numbers are multiplied.",
                )
            self._calls[state] = self._grammar.rules.reserve()
            self._queue.append(state)
        return self._calls[state]

    def _may_end(self, items: int, counted: tuple[int, ...]) -> bool:
        return items >= self._low and all(
            within(n, contains.low, contains.high)
            for n, contains in zip(counted, self._contains, strict=True)
        )

    def _options(self, items: int, counted: tuple[int, ...]) -> list[Expression]:
        ending = [EMPTY] if self._may_end(items, counted) else []
        comma = self._grammar.marks.comma if items else EMPTY
        return [*(seq(comma, step) for step in self._steps(items, counted)), *ending]

    def _steps(self, items: int, counted: tuple[int, ...]) -> list[Expression]:
        """Texts of the next item and of everything after it, one expression for each way to count the
        item."""
        if self._high is not None and items == self._high:
            return []
        ways = [self._ways_to_count(contains, items) for contains in self._contains]
        found = []
        for chosen in itertools.product(*ways):
            after = tuple(
                min(n + more, contains.cap)
                for n, (more, _), contains in zip(counted, chosen, self._contains, strict=True)
            )
            if not all(within(n, 0, c.high) for n, c in zip(after, self._contains, strict=True)):
                continue
            item = conjunction(self._disjunct.item_formula(items), *(formula for _, formula in chosen))
            value = self._grammar.value(item)
            if value != NOTHING:
                found.append(seq(value, self._call((min(items + 1, self._most_items), after))))
        return found

    def _ways_to_count(self, contains: Contains, i: int) -> list[tuple[int, Formula]]:
        """Ways in which `contains` may count item `i`: pairs of 1 or 0, and the formula that the item must
        then satisfy."""
        if i < contains.begin:
            return [(0, TRUE)]
        if contains.high is None:
            return [(1, contains.item), (0, TRUE)]
        if contains.low == 0:
            return [(1, TRUE), (0, negation(contains.item))]
        return [(1, contains.item), (0, negation(contains.item))]
