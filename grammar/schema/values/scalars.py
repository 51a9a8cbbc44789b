"""Expressions for the numbers and strings of one disjunct.

``{"minimum": 8, "type": "integer"}`` becomes ``[8-9] | [1-9] [0-9]+``. A multipleOf needs an automaton that
reads the digits (`decimal_language`). If there are few multiples between two bounds, the multiples are
written out instead.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

from ramify.grammar.rules.derivative import minimal
from ramify.grammar.rules.expression import NOTHING, Expression, accepted, alt, seq, text
from ramify.grammar.schema.document.json_values import type_of
from ramify.grammar.schema.document.unenforceable import refuse
from ramify.grammar.schema.logic.assertions import Length, Matches, MultipleOf, NotInEnum
from ramify.grammar.schema.logic.disjunct import Disjunct, bounds, counts
from ramify.grammar.schema.values import json_rules, number_text
from ramify.grammar.schema.values.decimal_language import (
    MAX_REMAINDERS,
    Divisor,
    after_digits,
    all_spellings,
    decimals_automaton,
    with_fraction,
)
from ramify.grammar.schema.values.json_text import QUOTE, plain_number, spelled
from ramify.grammar.schema.values.number_text import Bound
from ramify.grammar.schema.values.string_language import strings_of

if TYPE_CHECKING:
    from ramify.grammar.schema.values.schema_grammar import SchemaGrammar

MAX_WRITTEN_OUT = 2000
MAX_STATES = 20_000
COUNTED_STATES = 250
"""Most states for counting digits and computing remainders together. With 2 remainders (even and odd
numbers), numbers may still have MOST_DIGITS digits."""
FEWEST_DIGITS = 18
"""Number of digits that are counted even if that takes more than COUNTED_STATES states, up to MAX_STATES."""


def numbers(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    """The numbers of `disjunct`: integers, fractions or both, as its types say."""
    integers, fractions = "integer" in disjunct.types, "fraction" in disjunct.types
    lower, upper = bounds(disjunct)
    low = None if lower is None else Bound(lower.value, lower.inclusive)
    high = None if upper is None else Bound(upper.value, upper.inclusive)
    divisors = _divisors(disjunct)
    excluded = _excluded(disjunct)
    whole = any(divisor.positive and divisor.places == 0 for divisor in divisors)
    if integers and (not fractions or whole):
        return _integers(grammar, disjunct, low, high, divisors, excluded)
    further: list[tuple[Expression, bool]] = []
    if not integers:
        further.append((with_fraction(), True))
    if excluded:
        further.append((alt(*map(all_spellings, excluded)), False))
    if low is None and high is None and not divisors and not further:
        once = number_text.decimal_once(number_text.MOST_DIGITS)
        return grammar.rules.define(once) if grammar.canonical else json_rules.NUMBER
    low, high = _limited(low, high, divisors)
    if grammar.canonical:
        further.append((number_text.decimal_once(), True))
    written_out = _few(disjunct, low, high, divisors)
    if written_out is not None:
        kept = [value for value in written_out if value not in excluded and (integers or value != int(value))]
        return _written_out(grammar, kept)
    places = next((divisor.places for divisor in divisors if divisor.positive), None)
    expression = number_text.decimals(low, high, places)
    if expression != NOTHING and (
        further or any(not divisor.positive or divisor.unit > 1 for divisor in divisors)
    ):
        return _read(grammar, disjunct, expression, further, divisors)
    return grammar.define(expression, "no number lies between the bounds")


def _integers(
    grammar: SchemaGrammar,
    disjunct: Disjunct,
    low: Bound | None,
    high: Bound | None,
    divisors: list[Divisor],
    excluded: list[int | Decimal],
) -> Expression:
    first = None if low is None else _first_integer(low)
    last = None if high is None else -_first_integer(high.negation())
    if first is not None and last is not None and first > last:
        return grammar.define(NOTHING, "no integer lies between the bounds")
    excluded = [value for value in excluded if value == int(value)]
    if first is None and last is None and not divisors and not excluded:
        return json_rules.INTEGER
    # With n/d in lowest terms, the integers that are multiples of n/d are the multiples of n.
    divisors = [_on_integers(divisor) for divisor in divisors]
    low, high = _limited(low, high, divisors)
    first, last = _first_integer(low), -_first_integer(high.negation())
    bounds_of_few = Bound(Decimal(first), True), Bound(Decimal(last), True)
    written_out = _few(disjunct, *bounds_of_few, [*divisors, Divisor(1, 0, True)])
    if written_out is not None and (divisors or excluded):
        return _written_out(grammar, [value for value in written_out if value not in excluded])
    expression = number_text.integers(first, last)
    if not divisors and not excluded:
        return grammar.define(expression, "no integer lies between the bounds")
    further = [(alt(*(text(str(int(value))) for value in excluded)), False)] if excluded else []
    return _read(grammar, disjunct, expression, further, divisors)


def _limited(low: Bound | None, high: Bound | None, divisors: list[Divisor]) -> tuple[Bound, Bound]:
    """The bounds, with a default in place of None: numbers have at most MOST_DIGITS digits before the point.
    If the schema names a number with at least that many digits, the limit is one digit more than the longest
    number named. If remainders take many states, the default allows fewer digits."""
    remainders = [len(after_digits(divisor.unit) or ()) for divisor in divisors]
    states = max(1, math.prod(remainders))
    possible = MAX_STATES // states + len(str(states)) - 2  # fewer states are reachable by the first digits
    digits = min(number_text.MOST_DIGITS, max(FEWEST_DIGITS, COUNTED_STATES // states), possible)
    named = [bound.value.adjusted() + 1 for bound in (low, high) if bound is not None]
    named += [len(str(divisor.unit)) - divisor.places for divisor in divisors]
    limit = Bound(Decimal(10) ** max(digits, *(length + 1 for length in named), 1), False)
    return low or limit.negation(), high or limit


def _on_integers(divisor: Divisor) -> Divisor:
    return Divisor(divisor.unit // math.gcd(divisor.unit, 10**divisor.places), 0, divisor.positive)


def _divisors(disjunct: Disjunct) -> list[Divisor]:
    """The negated divisors, followed by one divisor in place of all positive divisors: their least common
    multiple."""
    assertions = disjunct.asserted(MultipleOf)
    divisors = [Divisor.of_step(each.divisor, positive=False) for each in assertions if not each.positive]
    positive = [each.divisor for each in assertions if each.positive]
    if positive:
        places = max(Divisor.of_step(divisor, positive=True).places for divisor in positive)
        units = [int(divisor * 10**places) for divisor in positive]
        divisors.append(Divisor.of_step(Decimal(math.lcm(*units)).scaleb(-places), positive=True))
    return divisors


def _excluded(disjunct: Disjunct) -> list[int | Decimal]:
    values = [value.value for each in disjunct.asserted(NotInEnum) for value in each.values]
    return [value for value in values if type_of(value) in ("integer", "fraction")]


def _few(disjunct: Disjunct, low: Bound, high: Bound, divisors: list[Divisor]) -> list[int | Decimal] | None:
    """The multiples between the bounds; None if there is no positive divisor, or if there are more than
    `MAX_WRITTEN_OUT` multiples."""
    positive = [divisor for divisor in divisors if divisor.positive]
    if not positive:
        return None
    scale = max(divisor.places for divisor in positive)
    unit = math.lcm(*(divisor.unit * 10 ** (scale - divisor.places) for divisor in positive))
    first = math.ceil(Fraction(low.value) * 10**scale / unit)
    last = math.floor(Fraction(high.value) * 10**scale / unit)
    if last - first > MAX_WRITTEN_OUT:
        return None
    assertions = [
        each for each in disjunct.assertions if "integer" in each.kinds and not isinstance(each, NotInEnum)
    ]
    values = (Decimal(n * unit).scaleb(-scale) for n in range(first, last + 1))
    return [value for value in values if all(each.holds(value, _no_test) for each in assertions)]


def _no_test(formula: object, value: object) -> bool:
    raise AssertionError("Assertions about numbers have no parts.")


def _written_out(grammar: SchemaGrammar, values: list[int | Decimal]) -> Expression:
    texts = [text(plain_number(Decimal(value))) for value in values]
    return grammar.define(alt(*texts), "no number satisfies all keywords")


def _read(
    grammar: SchemaGrammar,
    disjunct: Disjunct,
    expression: Expression,
    further: list[tuple[Expression, bool]],
    divisors: list[Divisor],
) -> Expression:
    pointer = next((each.pointer for each in disjunct.asserted(MultipleOf)), "")
    for divisor in divisors:
        if after_digits(divisor.unit) is None:
            refuse(
                pointer,
                f"multipleOf with more than {MAX_REMAINDERS} remainders is not enforced",
                f"Set minimum and maximum so that at most {MAX_WRITTEN_OUT} multiples lie between them.",
            )
    automaton = decimals_automaton(expression, further, divisors, MAX_STATES)
    if automaton is None:
        refuse(
            pointer,
            f"multipleOf takes more than {MAX_STATES} states between these bounds",
            f"Leave out the bounds, or let at most {MAX_WRITTEN_OUT} multiples lie between them.",
        )
    return grammar.define(accepted(minimal(automaton)), "no number satisfies all keywords")


def _first_integer(low: Bound) -> int:
    """The least integer that satisfies the lower bound `low`."""
    floor = int(low.value.to_integral_value(rounding="ROUND_FLOOR"))
    return floor if floor == low.value and low.inclusive else floor + 1


# --- strings ------------------------------------------------------------------------------------


def strings(grammar: SchemaGrammar, disjunct: Disjunct, *, canonical: bool = False) -> Expression:
    """The strings of `disjunct` with their quotes. With `canonical`, each string has exactly one text."""
    canonical = canonical or grammar.canonical
    low, high = counts(disjunct, Length)
    if high is not None and high < low:
        return grammar.define(NOTHING, "minLength exceeds maxLength")
    matches = disjunct.asserted(Matches)
    values = (value.value for each in disjunct.asserted(NotInEnum) for value in each.values)
    excluded = [value for value in values if isinstance(value, str)]
    if not matches and not excluded and (low, high) == (0, None) and not canonical:
        return json_rules.STRING
    if high is not None and not grammar.counted:
        high = min(high, max(low, LONGEST))
    longest = LONGEST_COUNTED if grammar.counted else LONGEST
    if low > longest:
        pointer = next(each.pointer for each in disjunct.asserted(Length) if each.low)
        refuse(pointer, f"A minLength above {longest} is not enforced", f"Lower it to {longest}.")
    body = strings_of(matches, excluded, low, high, canonical=canonical)
    if body == NOTHING:
        return grammar.define(NOTHING, "no string satisfies all keywords")
    return grammar.rules.define(seq(QUOTE, body, QUOTE))


LONGEST = 4096
"""Greatest maxLength if the automaton cannot count further (`Options.counted`). A greater maxLength is
lowered to this number."""
LONGEST_COUNTED = 1_000_000
"""Greatest minLength that is enforced. A maxLength may be greater."""


def keys(grammar: SchemaGrammar, disjuncts: list[Disjunct], *, canonical: bool) -> Expression:
    """The strings of `disjuncts` as names of properties, with their quotes."""
    options = []
    for disjunct in disjuncts:
        if disjunct.values is not None:
            options += [text(spelled(value.value)) for value in disjunct.values]
        elif "string" in disjunct.types:
            options.append(strings(grammar, disjunct, canonical=canonical))
    return alt(*options)
