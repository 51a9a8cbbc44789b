"""Arrays whose items are all different or, under a negation, not all different.

If items have at most `MAX_VALUES` possible values, there is a rule for each set of values used so far.
Otherwise items are compared by their texts (`expression.UniqueItem`), so each value must have exactly one
text (`SchemaGrammar.canonical`).
"""

from __future__ import annotations

from typing import NamedTuple

from ramify.grammar.rules.expression import EMPTY, NOTHING, Call, Expression, UniqueItem, alt, repeat, seq
from ramify.grammar.schema.document.json_values import Value, type_of
from ramify.grammar.schema.document.unenforceable import NotCanonical, refuse
from ramify.grammar.schema.logic.assertions import Contains, Items, UniqueItems
from ramify.grammar.schema.logic.disjunct import Disjunct, bounds
from ramify.grammar.schema.logic.formula import Formula, conjunction
from ramify.grammar.schema.values.json_rules import enclosed
from ramify.grammar.schema.values.punctuation import value_text
from ramify.grammar.schema.values.schema_grammar import SchemaGrammar

MAX_VALUES = 9
"""Most possible values of items if there is one rule for each set of used values."""
MAX_PLACES = 40


class _State(NamedTuple):
    used: frozenset[Value]
    place: int
    repeated: bool
    counted: tuple[int, ...]


def unique_arrays(grammar: SchemaGrammar, disjunct: Disjunct, low: int, high: int | None) -> Expression:
    """The arrays of `disjunct`, which has a `UniqueItems` assertion, of `low` to `high` items."""
    pointer = disjunct.asserted(UniqueItems)[0].pointer
    signs = {unique.positive for unique in disjunct.asserted(UniqueItems)}
    if len(signs) > 1:
        return grammar.define(NOTHING, "items cannot be unique and not")
    arrays = _EnumeratedItems(grammar, disjunct, low, high, unique=signs == {True})
    if arrays.values is not None:
        return arrays.expression()
    if signs == {False}:
        refuse(
            pointer,
            f"That some items are equal is not enforced where they have more than {MAX_VALUES} values",
            "Leave the uniqueItems below not, if or oneOf out, or list the values of the items with enum.",
        )
    try:
        return _compared(grammar, disjunct, low, high)
    except NotCanonical as reason:
        refuse(
            pointer,
            f"uniqueItems is not enforced for {reason}",
            f'{reason.remedy}, or leave uniqueItems out; strict "validate" checks it afterwards.',
        )


_FLAT = "Ask for unique items in one of the two"


def _compared(grammar: SchemaGrammar, disjunct: Disjunct, low: int, high: int | None) -> Expression:
    """Arrays in which no two items have the same text. The rule of the array remembers the texts of its
    items.

    An array inside a unique item is refused if it can have few texts: the number of texts that are left then
    depends on the items used in it.
    """
    nested = grammar.canonical
    if nested and low > 1:
        raise NotCanonical("arrays of two or more different items within arrays of unique items", _FLAT)
    if any(assertion.low or assertion.high is not None for assertion in disjunct.asserted(Contains)):
        raise NotCanonical(
            "arrays with contains", "Leave out contains, which also comes of items below not, if or oneOf"
        )
    items: list[Items] = disjunct.asserted(Items)
    if any(assertion.prefix for assertion in items):
        raise NotCanonical("arrays whose first items have schemas of their own", "Leave out prefixItems")
    formula = conjunction(*(assertion.rest for assertion in items))
    item = grammar.canonical_value(formula)
    if item == NOTHING:
        return enclosed("[", NOTHING, "]", grammar.marks) if low == 0 else NOTHING
    most = _number_of_values(grammar, formula)
    if most is not None and nested and high is not None:
        raise NotCanonical("short arrays of listed values within arrays of unique items", _FLAT)
    if most is not None and not nested:
        high = most if high is None else min(high, most)
    if high is not None and high < low:
        return grammar.define(NOTHING, "there are not enough different items")
    if high == 0:
        return enclosed("[", NOTHING, "]", grammar.marks)
    following = seq(grammar.marks.comma, UniqueItem(item))
    filled = seq(UniqueItem(item), repeat(following, max(0, low - 1), None if high is None else high - 1))
    call = grammar.rules.reserve()
    grammar.rules.set_body(call, enclosed("[", filled, "]", grammar.marks, empty=low == 0))
    return call


def _number_of_values(grammar: SchemaGrammar, formula: Formula) -> int | None:
    """Number of values that satisfy `formula`; None unless enum or const lists them all."""
    values: set[Value] = set()
    for disjunct in grammar.normal_form.disjuncts_of(formula):
        if disjunct.values is None:
            return None
        values |= set(disjunct.values)
    return len(values)


class _EnumeratedItems:
    """Arrays of items with few possible values: one rule for each set of values used so far."""

    def __init__(
        self, grammar: SchemaGrammar, disjunct: Disjunct, low: int, high: int | None, *, unique: bool
    ) -> None:
        self._grammar = grammar
        self._unique = unique
        self._low = low
        self._high = high
        self._items: list[Items] = disjunct.asserted(Items)
        self._contained: list[Contains] = disjunct.asserted(Contains)
        self._known = max(
            [len(assertion.prefix) for assertion in self._items]
            + [assertion.begin for assertion in self._contained]
            + [low, 0 if high is None else high]
        )
        if unique:
            self._known = min(self._known, MAX_VALUES + 1)
        self._at: dict[int, tuple[Value, ...]] = {}
        self.values = self._values() if self._known <= MAX_PLACES else None
        self._calls: dict[_State, Call] = {}

    def _values(self) -> frozenset[Value] | None:
        """The values that items may have; None if there are more than `MAX_VALUES`."""
        known = max((len(assertion.prefix) for assertion in self._items), default=0)
        values: set[Value] = set()
        for place in range(self._known + 1):
            if self._high is not None and place >= self._high:
                break
            formula = conjunction(*(assertion.at(place) for assertion in self._items))
            found = self._at.get(place - 1) if place > known else _few_values(self._grammar, formula)
            if found is None:
                return None
            self._at[place] = found
            values |= set(found)
        return frozenset(values) if len(values) <= MAX_VALUES else None

    def expression(self) -> Expression:
        start = _State(frozenset(), 0, False, (0,) * len(self._contained))
        queue = [start]
        self._calls[start] = self._grammar.rules.reserve()
        for state in queue:
            options = self._options(state, queue)
            comma = self._grammar.marks.comma if state.place else EMPTY
            ending = [EMPTY] if self._may_end(state) and state != start else []
            self._grammar.rules.set_body(self._calls[state], alt(*(seq(comma, o) for o in options), *ending))
        filled = self._calls[start]
        return enclosed("[", filled, "]", self._grammar.marks, empty=self._may_end(start))

    def _options(self, state: _State, queue: list[_State]) -> list[Expression]:
        if self._high is not None and state.place >= self._high:
            return []
        options = []
        for value in self._at[min(state.place, self._known)]:
            repeated = value in state.used
            if repeated and self._unique:
                continue
            counted = tuple(
                min(
                    n + self._counts(assertion, value, state.place),
                    assertion.low if assertion.high is None else assertion.high + 1,
                )
                for n, assertion in zip(state.counted, self._contained, strict=True)
            )
            place = min(state.place + 1, max(self._known, 1))
            after = _State(state.used | {value}, place, state.repeated or repeated, counted)
            if after not in self._calls:
                self._calls[after] = self._grammar.rules.reserve()
                queue.append(after)
            options.append(seq(value_text(value.value, self._grammar.marks), self._calls[after]))
        return options

    def _counts(self, assertion: Contains, value: Value, place: int) -> bool:
        return place >= assertion.begin and self._grammar.normal_form.satisfies(assertion.item, value.value)

    def _may_end(self, state: _State) -> bool:
        if state.place < self._low or (not self._unique and not state.repeated):
            return False
        return all(
            n >= assertion.low and (assertion.high is None or n <= assertion.high)
            for n, assertion in zip(state.counted, self._contained, strict=True)
        )


def _few_values(grammar: SchemaGrammar, formula: Formula) -> tuple[Value, ...] | None:
    """The values that satisfy `formula`, in the order of the schema; None if there are more than
    `MAX_VALUES`."""
    found: dict[Value, None] = {}
    for disjunct in grammar.normal_form.disjuncts_of(formula):
        if disjunct.values is not None:
            found |= dict.fromkeys(disjunct.values)
            continue
        if not disjunct.types <= {"null", "boolean", "integer"}:
            return None
        candidates: list[bool | int | None] = [None, True, False]
        if "integer" in disjunct.types:
            low, high = bounds(disjunct)
            if low is None or high is None or high.value - low.value > MAX_VALUES:
                return None
            candidates += range(int(low.value) - 1, int(high.value) + 2)
        for candidate in candidates:
            kind = type_of(candidate)
            assertions = (assertion for assertion in disjunct.assertions if kind in assertion.kinds)
            if kind in disjunct.types and all(
                assertion.holds(candidate, grammar.normal_form.satisfies) for assertion in assertions
            ):
                found[Value(candidate)] = None
    return tuple(found) if len(found) <= MAX_VALUES else None
