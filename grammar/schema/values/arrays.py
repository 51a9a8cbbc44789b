"""Arrays of one branch of a schema, as expressions."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ramify.grammar.rules.expression import EMPTY, NOTHING, Call, Expression, alt, repeat, seq
from ramify.grammar.schema.logic.assertions import Contains, Count, Items, Unique
from ramify.grammar.schema.logic.formula import TRUE, Formula, both, negated
from ramify.grammar.schema.logic.normal_form import Branch, counts
from ramify.grammar.schema.unenforceable import refuse
from ramify.grammar.schema.values import json_rules
from ramify.grammar.schema.values.json_rules import enclosed
from ramify.grammar.schema.values.unique_arrays import unique_arrays

if TYPE_CHECKING:
    from ramify.grammar.schema.compiler import SchemaGrammar

MAX_COUNTED = 1000
"""Most items that are counted; an array whose maxItems is above it has at most so many."""
MAX_STATES = 4000


def arrays(grammar: SchemaGrammar, branch: Branch) -> Expression:
    """The arrays of `branch`."""
    low, high = counts(branch, Count)
    if high is not None and high < low:
        return grammar.found(NOTHING, "minItems exceeds maxItems")
    if low > MAX_COUNTED:
        pointer = next(fact.pointer for fact in branch.of(Count) if fact.low)
        refuse(pointer, f"More than {MAX_COUNTED} items are not counted", "Ask for fewer.")
    if high is not None:
        high = min(high, MAX_COUNTED)
    items: list[Items] = branch.of(Items)
    contained = [fact for fact in branch.of(Contains) if fact.low or fact.high is not None]
    unique = any(not fact.wanted or high is None or high > 1 for fact in branch.of(Unique))
    if unique:
        return unique_arrays(grammar, branch, low, high)
    if contained:
        return _Counted(grammar, items, contained, low, high).expression()
    known = max((len(fact.prefix) for fact in items), default=0)
    goals = [both(*(fact.at(i) for fact in items)) for i in range(known + 1)]
    if (low, high, goals) == (0, None, [TRUE]) and not grammar.one_spelling:
        return json_rules.ARRAY
    places = [grammar.value(goal) for goal in goals[:known] if high is None or high > 0]
    rest = grammar.value(goals[known]) if high is None or high > known else NOTHING
    return _sequence(grammar, places, rest, low, high)


def _sequence(
    grammar: SchemaGrammar, places: list[Expression], rest: Expression, low: int, high: int | None
) -> Expression:
    """`places`, one item each, then any number of `rest`: `low` to `high` in all."""
    comma = grammar.marks.comma
    known = len(places)
    if NOTHING in places:
        known = places.index(NOTHING)
        high = known if high is None else min(high, known)
    elif rest == NOTHING:
        high = known if high is None else min(high, known)
    if high is not None and high < low:
        return grammar.found(NOTHING, "the array can have no more items")
    if high is not None:
        known = min(known, high)
    if high == 0:
        return enclosed("[", NOTHING, "]", grammar.marks)
    more = None if high is None else high - known
    tail = repeat(seq(comma, rest), max(0, low - known), more) if more != 0 else EMPTY
    # From the back: after item i - 1, items i and on follow, the required ones at least.
    for i in reversed(range(1, known)):
        following = seq(comma, places[i], tail)
        tail = following if i < low else alt(following, EMPTY)
        tail = grammar.rules.define(tail)
    if known:
        filled = seq(places[0], tail)
    else:
        filled = seq(rest, repeat(seq(comma, rest), max(0, low - 1), None if high is None else high - 1))
    return grammar.rules.define(enclosed("[", filled, "]", grammar.marks, empty=low == 0))


class _Counted:
    """Arrays in which items of some kinds are counted (`Contains`): one rule for each place and counts.

    An item that is counted without a limit may also pass as one that is not, and where there is only a
    limit, one that is not counted may pass as one that is: the arrays are the same.
    """

    def __init__(
        self,
        grammar: SchemaGrammar,
        items: list[Items],
        contained: list[Contains],
        low: int,
        high: int | None,
    ) -> None:
        self._grammar = grammar
        self._items = items
        self._contained = contained
        self._low = low
        self._high = high
        self._caps = [fact.low if fact.high is None else fact.high + 1 for fact in contained]
        known = max([len(fact.prefix) for fact in items] + [fact.begin for fact in contained], default=0)
        self._known = max(known, low if high is None else high, 1)
        self._calls: dict[tuple[int, tuple[int, ...]], Call] = {}
        self._queue: list[tuple[int, tuple[int, ...]]] = []

    def expression(self) -> Expression:
        start = (0, (0,) * len(self._contained))
        self._call(start)
        for state in self._queue:
            self._grammar.rules.set(self._calls[state], alt(*self._options(*state)))
        filled = alt(*self._steps(*start))
        empty = self._may_end(*start)
        expression = enclosed("[", filled, "]", self._grammar.marks, empty=empty)
        return self._grammar.found(
            expression if filled != NOTHING or empty else NOTHING, "contains cannot hold"
        )

    def _call(self, state: tuple[int, tuple[int, ...]]) -> Call:
        if state not in self._calls:
            if len(self._calls) == MAX_STATES:
                refuse(
                    self._contained[0].pointer,
                    "contains is not enforced with these counts",
                    "Use smaller ones.",
                )
            self._calls[state] = self._grammar.rules.reserve()
            self._queue.append(state)
        return self._calls[state]

    def _may_end(self, place: int, counted: tuple[int, ...]) -> bool:
        return place >= self._low and all(
            n >= fact.low and (fact.high is None or n <= fact.high)
            for n, fact in zip(counted, self._contained, strict=True)
        )

    def _options(self, place: int, counted: tuple[int, ...]) -> list[Expression]:
        ending = [EMPTY] if self._may_end(place, counted) else []
        comma = self._grammar.marks.comma if place else EMPTY
        return [*(seq(comma, step) for step in self._steps(place, counted)), *ending]

    def _steps(self, place: int, counted: tuple[int, ...]) -> list[Expression]:
        """One item more, and what follows it."""
        if self._high is not None and place == self._high:
            return []
        base = [fact.at(place) for fact in self._items]
        kinds = [self._kinds(fact, place) for fact in self._contained]
        found = []
        for chosen in itertools.product(*kinds):
            after = tuple(
                min(n + more, cap) for n, (more, _), cap in zip(counted, chosen, self._caps, strict=True)
            )
            if any(
                fact.high is not None and n > fact.high
                for n, fact in zip(after, self._contained, strict=True)
            ):
                continue
            item = self._grammar.value(both(*base, *(goal for _, goal in chosen)))
            if item != NOTHING:
                found.append(seq(item, self._call((min(place + 1, self._known), after))))
        return found

    def _kinds(self, fact: Contains, place: int) -> list[tuple[int, Formula]]:
        """How an item may count: by how much, and what it then satisfies."""
        if place < fact.begin:
            return [(0, TRUE)]
        if fact.high is None:
            return [(1, fact.item), (0, TRUE)]
        if fact.low == 0:
            return [(1, TRUE), (0, negated(fact.item))]
        return [(1, fact.item), (0, negated(fact.item))]
