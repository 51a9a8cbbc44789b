"""Numbers and strings of one branch of a schema, as expressions."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING

from ramify.grammar.rules.expression import NOTHING, Expression, alt, seq, text
from ramify.grammar.schema.json_values import type_of
from ramify.grammar.schema.logic.assertions import Length, Matches, MultipleOf, Unlisted
from ramify.grammar.schema.logic.normal_form import Branch, bounds, counts
from ramify.grammar.schema.unenforceable import refuse
from ramify.grammar.schema.values import json_rules, json_text
from ramify.grammar.schema.values.decimal_language import (
    Step,
    all_spellings,
    decimals_automaton,
    with_fraction,
)
from ramify.grammar.schema.values.json_text import QUOTE, Bound, number_spelled
from ramify.grammar.schema.values.string_language import StringLanguage, as_rules
from ramify.grammar.schema.values.string_patterns import searched

if TYPE_CHECKING:
    from ramify.grammar.schema.compiler import SchemaGrammar

MAX_UNIT = 4000
MAX_LISTED = 2000
MAX_STATES = 20_000


def numbers(grammar: SchemaGrammar, branch: Branch) -> Expression:
    """The numbers of `branch`; only integers or only others where its types say so."""
    integers, fractions = "integer" in branch.types, "fraction" in branch.types
    lower, upper = bounds(branch)
    low = None if lower is None else Bound(lower.value, lower.inclusive)
    high = None if upper is None else Bound(upper.value, upper.inclusive)
    steps = _steps(branch)
    excluded = _excluded(branch)
    whole = any(step.wanted and step.places == 0 for step in steps)
    if integers and (not fractions or whole):
        return _integers(grammar, branch, low, high, steps, excluded)
    further: list[tuple[Expression, bool]] = []
    if not integers:
        further.append((with_fraction(), True))
    if excluded:
        further.append((alt(*map(all_spellings, excluded)), False))
    if low is None and high is None and not steps and not further:
        return grammar.rules.define(json_text.decimal_once()) if grammar.one_spelling else json_rules.NUMBER
    if grammar.one_spelling:
        further.append((json_text.decimal_once(), True))
    listed = _few(branch, low, high, steps)
    if listed is not None:
        kept = [value for value in listed if value not in excluded and (integers or value != int(value))]
        return _listed(grammar, kept)
    places = next((step.places for step in steps if step.wanted), None)
    expression = json_text.decimals(low, high, places)
    if expression != NOTHING and (further or any(not step.wanted or step.unit > 1 for step in steps)):
        return _read(grammar, branch, expression, further, steps)
    return grammar.found(expression, "no number lies between the bounds")


def _integers(
    grammar: SchemaGrammar,
    branch: Branch,
    low: Bound | None,
    high: Bound | None,
    steps: list[Step],
    excluded: list[int | Decimal],
) -> Expression:
    first = None if low is None else _first_integer(low)
    last = None if high is None else -_first_integer(high.negated())
    if first is not None and last is not None and first > last:
        return grammar.found(NOTHING, "no integer lies between the bounds")
    excluded = [value for value in excluded if value == int(value)]
    if first is None and last is None and not steps and not excluded:
        return json_rules.INTEGER
    listed = _few(
        branch,
        None if first is None else Bound(Decimal(first), True),
        None if last is None else Bound(Decimal(last), True),
        [*steps, Step(1, 0, True)],
    )
    if listed is not None and (steps or excluded):
        return _listed(grammar, [value for value in listed if value not in excluded])
    expression = json_text.integers(first, last)
    if not steps and not excluded:
        return grammar.found(expression, "no integer lies between the bounds")
    # Integers that are multiples of n/d in lowest terms are the multiples of n.
    steps = [_on_integers(step) for step in steps]
    further = [(alt(*(text(str(int(value))) for value in excluded)), False)] if excluded else []
    return _read(grammar, branch, expression, further, steps)


def _on_integers(step: Step) -> Step:
    return Step(step.unit // math.gcd(step.unit, 10**step.places), 0, step.wanted)


def _steps(branch: Branch) -> list[Step]:
    """What numbers are multiples of, in one; and what they are not."""
    facts = branch.of(MultipleOf)
    steps = [Step.of(fact.step, wanted=False) for fact in facts if not fact.wanted]
    wanted = [fact.step for fact in facts if fact.wanted]
    if wanted:
        places = max(Step.of(step, wanted=True).places for step in wanted)
        units = [int(step * 10**places) for step in wanted]
        steps.append(Step.of(Decimal(math.lcm(*units)) / 10**places, wanted=True))
    return steps


def _excluded(branch: Branch) -> list[int | Decimal]:
    values = [value.value for fact in branch.of(Unlisted) for value in fact.values]
    return [value for value in values if type_of(value) in ("integer", "fraction")]


def _few(
    branch: Branch, low: Bound | None, high: Bound | None, steps: list[Step]
) -> list[int | Decimal] | None:
    """The multiples between the bounds, where they are no more than `MAX_LISTED`."""
    wanted = [step for step in steps if step.wanted]
    if low is None or high is None or not wanted:
        return None
    scale = max(step.places for step in wanted)
    unit = math.lcm(*(step.unit * 10 ** (scale - step.places) for step in wanted))
    first = math.ceil(low.value * 10**scale / unit)
    last = math.floor(high.value * 10**scale / unit)
    if last - first > MAX_LISTED:
        return None
    facts = [fact for fact in branch.facts if "integer" in fact.kinds and not isinstance(fact, Unlisted)]
    values = (Decimal(n * unit) / 10**scale for n in range(first, last + 1))
    return [value for value in values if all(fact.holds(value, _no_test) for fact in facts)]


def _no_test(formula: object, value: object) -> bool:
    raise AssertionError("Facts about numbers have no parts.")


def _listed(grammar: SchemaGrammar, values: list[int | Decimal]) -> Expression:
    texts = [text(number_spelled(Decimal(value))) for value in values]
    return grammar.found(alt(*texts), "no number satisfies all keywords")


def _read(
    grammar: SchemaGrammar,
    branch: Branch,
    expression: Expression,
    further: list[tuple[Expression, bool]],
    steps: list[Step],
) -> Expression:
    pointer = next((fact.pointer for fact in branch.of(MultipleOf)), "")
    for step in steps:
        if step.unit > MAX_UNIT:
            refuse(
                pointer,
                f"multipleOf with more than {MAX_UNIT} remainders is not enforced",
                "Set both bounds.",
            )
    automaton = decimals_automaton(expression, further, steps, MAX_STATES)
    if automaton is None:
        refuse(pointer, "multipleOf is not enforced between these bounds", "Leave out the bounds.")
    found = as_rules(automaton, grammar.rules, lambda digits: digits, counted=False)
    return grammar.found(found, "no number satisfies all keywords")


def _first_integer(low: Bound) -> int:
    """The least integer above the lower bound."""
    floor = int(low.value.to_integral_value(rounding="ROUND_FLOOR"))
    return floor if floor == low.value and low.inclusive else floor + 1


# --- strings ------------------------------------------------------------------------------------


def strings(grammar: SchemaGrammar, branch: Branch, *, one_spelling: bool = False) -> Expression:
    """The strings of `branch` with their quotes; with `one_spelling`, each has one text."""
    one_spelling = one_spelling or grammar.one_spelling
    low, high = counts(branch, Length)
    if high is not None and high < low:
        return grammar.found(NOTHING, "minLength exceeds maxLength")
    language = language_of(branch)
    if language.unrestricted and (low, high) == (0, None) and not one_spelling:
        return json_rules.STRING
    if high is not None:
        high = min(high, max(low, LONGEST))
    if low > LONGEST:
        pointer = next(fact.pointer for fact in branch.of(Length) if fact.low)
        refuse(pointer, f"Strings of more than {LONGEST} characters are not written", "Ask for fewer.")
    body = language.expression(low, high, grammar.rules, one_spelling=one_spelling)
    if body == NOTHING:
        return grammar.found(NOTHING, "no string satisfies all keywords")
    return grammar.rules.define(seq(QUOTE, body, QUOTE))


LONGEST = 4096
"""Most characters of a string that has a maxLength: beyond it, counting takes too large a grammar."""


def language_of(branch: Branch) -> StringLanguage:
    """The strings that the facts of `branch` other than `Length` allow."""
    language = StringLanguage()
    for fact in branch.of(Matches):
        pattern = fact.written if fact.wanted and fact.written else fact.pattern
        expression = searched(fact.pointer, pattern).expression
        short = searched(fact.pointer, fact.counted).expression if fact.wanted and fact.counted else None
        language.add(fact.pointer, expression, wanted=fact.wanted, short=short)
    for fact in branch.of(Unlisted):
        language.exclude(value.value for value in fact.values if isinstance(value.value, str))
    return language


def keys(grammar: SchemaGrammar, branches: list[Branch], *, one_spelling: bool) -> Expression:
    """The strings of `branches`, as names of properties with their quotes."""
    options = []
    for branch in branches:
        if branch.values is not None:
            options += [text(json_text.spelled(value.value)) for value in branch.values]
        elif "string" in branch.types:
            options.append(strings(grammar, branch, one_spelling=one_spelling))
    return alt(*options)
