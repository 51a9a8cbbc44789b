"""Expressions for the arrays of one disjunct.

``{"prefixItems": [A, B], "items": C, "minItems": 1, "maxItems": 4}`` becomes

    "[" A (", " B (", " C){0,2})? "]"

If ``contains`` counts items, there is one rule for each position and count. If items must differ and have at
most `MAX_VALUES` possible values, there is one rule for each set of values used so far. Other unique items
are compared by their texts (`expression.UniqueItem`), so each value must have exactly one text
(`SchemaGrammar.canonical`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ramify.grammar.rules.expression import EMPTY, NOTHING, Expression, UniqueItem, alt, repeat, seq
from ramify.grammar.schema.document.json_values import Value, type_of
from ramify.grammar.schema.document.unenforceable import NotCanonical, refuse
from ramify.grammar.schema.logic.assertions import Contains, ItemCount, Items, UniqueItems, within
from ramify.grammar.schema.logic.disjunct import Disjunct, bounds, counts
from ramify.grammar.schema.logic.formula import TRUE, Formula, conjunction, negation
from ramify.grammar.schema.values import json_rules
from ramify.grammar.schema.values.json_rules import by_states, enclosed, value_text

if TYPE_CHECKING:
    from ramify.grammar.schema.values.schema_grammar import SchemaGrammar

MAX_COUNTED = 1_000_000
"""Greatest minItems that is enforced. A maxItems may be greater."""
MAX_WRITTEN_OUT = 1000
"""Greatest minItems if items are unique, if contains counts them, or if the automaton cannot count further
(`Options.counted`). In these cases a greater maxItems is lowered to this number."""
MAX_STATES = 4000
"""Most states for counting items with contains."""
MAX_VALUES = 9
"""Most possible values of items if there is one rule for each set of used values."""
MAX_PLACES = 40


def arrays(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    """The arrays of `disjunct`."""
    low, high = counts(disjunct, ItemCount)
    if high is not None and high < low:
        return grammar.define(NOTHING, "minItems exceeds maxItems")
    unique = any(not each.positive or high is None or high > 1 for each in disjunct.asserted(UniqueItems))
    containing = bool(disjunct.asserted(Contains))
    written_out = unique or containing or not grammar.counted
    if high is not None and written_out:
        high = min(high, MAX_WRITTEN_OUT)
    most = MAX_WRITTEN_OUT if written_out else MAX_COUNTED
    if low > most:
        pointer = next(count.pointer for count in disjunct.asserted(ItemCount) if count.low)
        more = ", or leave out uniqueItems, contains and any_order" if written_out else ""
        refuse(pointer, f"A minItems above {most} is not enforced here", f"Lower it to {most}{more}.")
    if unique:
        return _unique(grammar, disjunct, low, high)
    if containing:
        return _containing(grammar, disjunct, low, high)
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


def _counts_hold(counted: Sequence[int], contains: Sequence[Contains]) -> bool:
    return all(within(n, each.low, each.high) for n, each in zip(counted, contains, strict=True))


def _containing(grammar: SchemaGrammar, disjunct: Disjunct, low: int, high: int | None) -> Expression:
    """Arrays in which the items that satisfy a `Contains` are counted. A state is the number of items so far,
    and for each `Contains` the number of items that satisfied it. Numbers are counted only as far as greater
    ones make a difference.

    Each item is counted as satisfying a `Contains` or as not satisfying it. If a `Contains` has only a
    minimum, the items counted as not satisfying it may have any value. If it has only a maximum, the items
    counted as satisfying it may have any value. This allows the same arrays with fewer rules.
    """
    contains = disjunct.asserted(Contains)
    length = max([disjunct.prefix_length, *(each.begin for each in contains)])
    most_items = max(length, low if high is None else high, 1)

    def steps(state: tuple[int, tuple[int, ...]]) -> Iterator[tuple[Expression, tuple[int, tuple[int, ...]]]]:
        items, counted = state
        if items == high:
            return
        for chosen in itertools.product(*(_ways_to_count(each, items) for each in contains)):
            after = tuple(
                min(n + more, each.cap) for n, (more, _), each in zip(counted, chosen, contains, strict=True)
            )
            if all(within(n, 0, each.high) for n, each in zip(after, contains, strict=True)):
                formulas = (formula for _, formula in chosen)
                value = grammar.value(conjunction(disjunct.item_formula(items), *formulas))
                if value != NOTHING:
                    yield value, (min(items + 1, most_items), after)

    def check_count(states: int) -> None:
        if states == MAX_STATES:
            refuse(
                contains[0].pointer,
                f"Counting contains and the items takes more than {MAX_STATES} states",
                "Lower minContains, maxContains, minItems and maxItems, whose numbers are multiplied.",
            )

    def may_end(state: tuple[int, tuple[int, ...]]) -> bool:
        return state[0] >= low and _counts_hold(state[1], contains)

    start = (0, (0,) * len(contains))
    filled = by_states(grammar.rules, grammar.marks, start, steps, may_end, check_count)
    found = enclosed("[", filled, "]", grammar.marks, empty=may_end(start))
    return grammar.define(found, "contains cannot hold")


def _ways_to_count(contains: Contains, i: int) -> list[tuple[int, Formula]]:
    """Ways in which `contains` may count item `i`: pairs of 1 or 0, and the formula that the item must then
    satisfy."""
    if i < contains.begin:
        return [(0, TRUE)]
    if contains.high is None:
        return [(1, contains.item), (0, TRUE)]
    if contains.low == 0:
        return [(1, TRUE), (0, negation(contains.item))]
    return [(1, contains.item), (0, negation(contains.item))]


# --- unique items -------------------------------------------------------------------------------------


def _unique(grammar: SchemaGrammar, disjunct: Disjunct, low: int, high: int | None) -> Expression:
    """The arrays of `disjunct`, which has a `UniqueItems` assertion, of `low` to `high` items: all different
    or, under a negation, not all different."""
    pointer = disjunct.asserted(UniqueItems)[0].pointer
    signs = {unique.positive for unique in disjunct.asserted(UniqueItems)}
    if len(signs) > 1:
        return grammar.define(NOTHING, "items cannot be unique and not")
    listed = _listed(grammar, disjunct, low, high, unique=signs == {True})
    if listed is not None:
        return listed
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
    if disjunct.asserted(Contains):
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


class _Used(NamedTuple):
    """The state of an array of listed values: the values used so far, the number of items, whether some value
    was repeated, and for each `Contains` the number of items that satisfied it."""

    values: frozenset[Value]
    place: int
    repeated: bool
    counted: tuple[int, ...]


def _listed(
    grammar: SchemaGrammar, disjunct: Disjunct, low: int, high: int | None, *, unique: bool
) -> Expression | None:
    """Arrays of items with few possible values. None if there are more than `MAX_VALUES`."""
    contains = disjunct.asserted(Contains)
    last = max([disjunct.prefix_length, *(each.begin for each in contains), low, high or 0])
    if unique:
        last = min(last, MAX_VALUES + 1)
    if last > MAX_PLACES:
        return None
    by_place: list[tuple[Value, ...]] = []  # all later places have the values of the last
    for place in range(last + 1 if high is None else min(last + 1, high)):
        formula = disjunct.item_formula(place)
        found = by_place[-1] if place > disjunct.prefix_length else _few_values(grammar, formula)
        if found is None:
            return None
        by_place.append(found)
    if len({value for found in by_place for value in found}) > MAX_VALUES:
        return None
    satisfies = grammar.normal_form.satisfies

    def steps(state: _Used) -> Iterator[tuple[Expression, _Used]]:
        if high is not None and state.place >= high:
            return
        for value in by_place[min(state.place, len(by_place) - 1)]:
            repeated = value in state.values
            if repeated and unique:
                continue
            counted = tuple(
                min(n + (state.place >= each.begin and satisfies(each.item, value.value)), each.cap)
                for n, each in zip(state.counted, contains, strict=True)
            )
            place = min(state.place + 1, max(last, 1))
            after = _Used(state.values | {value}, place, state.repeated or repeated, counted)
            yield value_text(value.value, grammar.marks), after

    def may_end(state: _Used) -> bool:
        enough = state.place >= low and (unique or state.repeated)
        return enough and _counts_hold(state.counted, contains)

    start = _Used(frozenset(), 0, False, (0,) * len(contains))
    filled = grammar.rules.define(by_states(grammar.rules, grammar.marks, start, steps, may_end))
    return enclosed("[", filled, "]", grammar.marks, empty=may_end(start))


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
