"""Strings under several conditions at once, such as two patterns and a length, as grammar rules.

The conditions become one automaton over characters, the product of their automata. A single pattern stays an
expression, since its repetitions take fewer states than unrolled in an automaton. A format also becomes an
automaton, which is made once for each process (`compile.policy.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ramify.grammar.rules.derivative import Derivatives, Product, explore, minimal
from ramify.grammar.rules.expression import (
    ANY_CHAR,
    NOTHING,
    Alt,
    CharAutomaton,
    Chars,
    Expression,
    Ranges,
    Repeat,
    Seq,
    Text,
    accepted,
    alt,
    complement,
    nullable,
    ranges_of,
    repeat,
    text,
)
from ramify.grammar.schema.document.string_patterns import search_pattern
from ramify.grammar.schema.document.unenforceable import refuse
from ramify.grammar.schema.logic.assertions import Matches
from ramify.grammar.schema.values.json_text import escaped, escaped_automaton, free_character

MAX_STATES = 6000
"""Most states of the automaton of one string. Each state becomes a rule of the grammar."""

MAX_MINIMISED = 1000
"""Most states of an automaton that is minimised."""
MAX_SHORT_LENGTH = 250
MIN_LOWERED_LENGTH = 60
"""Least number to which a maxLength is lowered if counting up to that maxLength takes too many states."""


class _Condition(NamedTuple):
    """The condition that a string matches `expression` or, if `positive` is False, does not match it."""

    expression: Expression
    positive: bool
    is_format: bool = False
    short: Expression | None = None
    """An expression with fewer states, whose matches of up to `MAX_SHORT_LENGTH` characters match
    `expression`."""


def _condition(match: Matches) -> _Condition:
    is_format = match.positive and bool(match.written)
    whole = search_pattern(match.pointer, match.written if is_format else match.pattern).expression
    if not match.positive or not match.counted:
        return _Condition(whole, match.positive, is_format)
    short = search_pattern(match.pointer, match.counted).expression
    return _Condition(whole, match.positive, is_format, short)


def strings_of(
    matches: Sequence[Matches], excluded: Iterable[str], low: int, high: int | None, *, canonical: bool
) -> Expression:
    """The strings of `low` to `high` characters that satisfy all `matches` and are not `excluded`, as JSON
    text between quotes.

    With `canonical` no character has two spellings. Raises `Unenforceable` beyond `MAX_STATES` states.
    """
    others = dict.fromkeys(excluded)
    if not matches and others and (low, high) == (0, None):
        return others_than(tuple(sorted(others)), canonical)
    conditions = dict.fromkeys(map(_condition, matches))
    found = _strings(tuple(conditions), tuple(others), low, high)
    if found is None:
        refuse(
            matches[0].pointer if matches else "",
            f"The conditions on this string take more than {MAX_STATES} states together",
            "Leave out one of pattern, format and maxLength, or use fewer and smaller repetitions in the "
            "pattern: its states are multiplied by the maxLength.",
        )
    return found


@lru_cache(maxsize=256)
def _strings(
    conditions: tuple[_Condition, ...], excluded: tuple[str, ...], low: int, high: int | None
) -> Expression | None:
    """The expression of `strings_of`; None beyond `MAX_STATES` states."""
    if not excluded:
        if not conditions:
            return escaped(repeat(ANY_CHAR, low, high))
        if len(conditions) == 1 and conditions[0].positive:
            counted = _counted(conditions[0].expression, low, high)
            if counted is not None and not conditions[0].is_format:
                return escaped(counted)
            if counted == conditions[0].expression:
                low, high = 0, None
    else:
        conditions = (*conditions, _Condition(alt(*map(text, excluded)), False))
    automaton = _automaton(conditions, low, high)
    return None if automaton is None else accepted(escaped_automaton(automaton))


@lru_cache(maxsize=256)
def others_than(strings: tuple[str, ...], canonical: bool) -> Expression:
    """All strings but `strings`, as JSON text between quotes.

    The automaton follows the prefix tree of `strings`, and allows anything after the first character that
    leaves the tree. For "to" and "ten" it allows "", "t" and "te", and every string that leaves the tree,
    such as "a", "tx" or "tens". With `canonical`, each character has one spelling; else the characters after
    the tree may have any escapes.
    """
    tree: list[dict[str, int]] = [{}]
    ends = set()
    for string in strings:
        node = 0
        for char in string:
            node = tree[node].setdefault(char, len(tree))
            if node == len(tree):
                tree.append({})
        ends.add(node)
    anything = len(tree)
    edges: list[list[tuple[Ranges, int]]] = []
    for below in tree:
        row: list[tuple[Ranges, int]] = [(((ord(char), ord(char)),), child) for char, child in below.items()]
        edges.append([*row, (_outside(frozenset(below)), anything)])
    edges.append([(ANY_CHAR.ranges, anything)] if canonical else [])
    found = escaped_automaton(CharAutomaton(edges, [node not in ends for node in range(len(edges))]))
    return accepted(found if canonical else _continued(found, _free_characters()))


@lru_cache(maxsize=2048)
def _outside(letters: frozenset[str]) -> Ranges:
    return complement(ranges_of(letters))


@lru_cache(maxsize=1)
def _free_characters() -> CharAutomaton:
    product = Product([(repeat(free_character(), 0, None), True)])
    found = explore(product.start, product.steps, product.final)
    assert found is not None
    return minimal(found)


def _continued(first: CharAutomaton, then: CharAutomaton) -> CharAutomaton:
    """The concatenation of `first` and `then`: the only state of `first` without edges becomes the start of
    `then`."""
    joint = next(state for state, row in enumerate(first.edges) if not row)
    number = [joint, *range(len(first.edges), len(first.edges) + len(then.edges) - 1)]
    rows = [[(ranges, number[after]) for ranges, after in row] for row in then.edges]
    edges = [*first.edges[:joint], rows[0], *first.edges[joint + 1 :], *rows[1:]]
    return CharAutomaton(edges, [*first.final, *then.final[1:]])


def combinations(expressions: list[Expression], most_states: int) -> set[frozenset[int]] | None:
    """The sets of indices of `expressions` for which some string matches exactly the expressions in the set.

    None if finding the sets takes more than `most_states` states.
    """
    derivatives = Derivatives({})
    everything = repeat(ANY_CHAR, 0, None)
    start = tuple(frozenset([part]) for part in [everything, *expressions])
    seen = {start}
    queue = [start]
    found = set()
    for residuals in queue:
        found.add(frozenset(i for i, left in enumerate(residuals[1:]) if any(map(nullable, left))))
        for _, after in derivatives.product_transitions(residuals):
            if after not in seen:
                if len(seen) == most_states:
                    return None
                seen.add(after)
                queue.append(after)
    return found


def _counted(expression: Expression, low: int, high: int | None) -> Expression | None:
    """`expression` restricted to `low` to `high` characters; None if that requires an automaton."""
    shortest, longest = _lengths(expression)
    if low <= shortest and (high is None or (longest is not None and longest <= high)):
        return expression
    if isinstance(expression, Repeat) and isinstance(expression.item, Chars):
        least = max(low, expression.low)
        most = min((bound for bound in (high, expression.high) if bound is not None), default=None)
        return repeat(expression.item, least, most) if most is None or least <= most else NOTHING
    return None


@lru_cache(maxsize=4096)
def _lengths(expression: Expression) -> tuple[int, int | None]:
    """The least and the greatest number of characters of a match; None means no limit."""
    match expression:
        case Text(literal):
            return len(literal), len(literal)
        case Seq(parts):
            pairs = [_lengths(part) for part in parts]
            longest = [most for _, most in pairs if most is not None]
            return sum(least for least, _ in pairs), sum(longest) if len(longest) == len(pairs) else None
        case Alt(options):
            pairs = [_lengths(option) for option in options]
            longest = [most for _, most in pairs if most is not None]
            least = min((least for least, _ in pairs), default=0)
            return least, max(longest, default=0) if len(longest) == len(pairs) else None
        case Repeat(item, low, high):
            least, most = _lengths(item)
            return least * low, None if most is None or high is None else most * high
    return 1, 1


def _automaton(conditions: Sequence[_Condition], low: int, high: int | None) -> CharAutomaton | None:
    """The automaton of the strings of `low` to `high` characters; None beyond `MAX_STATES` states.

    If counting takes too many states, `high` is lowered: to `MAX_SHORT_LENGTH` if the `short` expressions are
    used, else to the greatest number that fits.
    """
    positive = tuple(condition.positive for condition in conditions)
    free = uncounted(tuple(condition.expression for condition in conditions), positive)
    if (low, high) == (0, None) or free is None:
        return free
    counted = _counted_states(free, low, high)
    if counted is None and low <= MAX_SHORT_LENGTH and any(condition.short for condition in conditions):
        shorter = tuple(condition.short or condition.expression for condition in conditions)
        free = uncounted(shorter, positive) or free
        high = MAX_SHORT_LENGTH if high is None else min(high, MAX_SHORT_LENGTH)
        counted = _counted_states(free, low, high)
    if counted is None and high is not None:
        fitting = _fitting(free, high)
        if max(low, MIN_LOWERED_LENGTH) <= fitting < high:
            counted = _counted_states(free, low, fitting)
    return counted


def _fitting(free: CharAutomaton, high: int) -> int:
    """The greatest number of characters, at most `high`, for which `MAX_STATES` states certainly suffice."""
    places = {0}
    states = 0
    for count in range(high):
        states += len(places)
        places = {after for place in places for _, after in free.edges[place]}
        if states + len(places) > MAX_STATES:
            return count
    return high


@lru_cache(maxsize=512)
def uncounted(expressions: tuple[Expression, ...], positive: tuple[bool, ...]) -> CharAutomaton | None:
    parts = list(zip(expressions, positive, strict=True))
    if not any(positive):
        # The product needs a transition for every character, also for those that no expression can read.
        parts.append((repeat(ANY_CHAR, 0, None), True))
    product = Product(parts)
    found = explore(product.start, product.steps, product.final, MAX_STATES)
    return minimal(found) if found is not None and len(found.edges) <= MAX_MINIMISED else found


def _counted_states(free: CharAutomaton, low: int, high: int | None) -> CharAutomaton | None:
    """`free` restricted to `low` to `high` characters; None beyond `MAX_STATES` states.

    A state consists of a state of `free` and the number of characters read. The number is dropped as soon as
    it no longer matters: the shortest text that may follow is long enough, and the longest is short enough.
    """
    if not free.edges:
        return free
    shortest, longest = _ways_to_end(free)

    def counted(place: int, count: int) -> tuple[int, int] | None:
        """The state for the state `place` of `free` after `count` characters; None if no string of an allowed
        length can follow."""
        most, least = longest[place], shortest[place]
        if (high is not None and count + least > high) or (most is not None and count + most < low):
            return None
        if (high is None or (most is not None and count + most <= high)) and count + least >= low:
            return (place, _UNCOUNTED)
        return (place, min(count, low) if high is None else count)

    def steps(state: tuple[int, int]) -> list[tuple[Ranges, tuple[int, int]]]:
        place, count = state
        if count == _UNCOUNTED:
            return [(ranges, (after, count)) for ranges, after in free.edges[place]]
        following = ((ranges, counted(after, count + 1)) for ranges, after in free.edges[place])
        return [(ranges, after) for ranges, after in following if after is not None]

    def final(state: tuple[int, int]) -> bool:
        return free.final[state[0]] and (state[1] == _UNCOUNTED or state[1] >= low)

    start = counted(0, 0)
    return CharAutomaton([], []) if start is None else explore(start, steps, final, MAX_STATES)


_UNCOUNTED = -1


def _ways_to_end(automaton: CharAutomaton) -> tuple[list[int], list[int | None]]:
    """The least and the greatest number of characters from each state to a final state; None means no
    limit."""
    sources: list[set[int]] = [set() for _ in automaton.edges]
    left = []
    for state, row in enumerate(automaton.edges):
        targets = {after for _, after in row}
        left.append(len(targets))
        for after in targets:
            sources[after].add(state)
    shortest = [-1] * len(sources)
    queue = [state for state, ends in enumerate(automaton.final) if ends]
    for state in queue:
        shortest[state] = 0
    for state in queue:
        for source in sources[state]:
            if shortest[source] < 0:
                shortest[source] = shortest[state] + 1
                queue.append(source)
    longest: list[int | None] = [None] * len(sources)
    queue = [state for state, count in enumerate(left) if not count]
    for state in queue:  # a state from which a cycle can be reached is never in the queue
        longest[state] = max((1 + (longest[after] or 0) for _, after in automaton.edges[state]), default=0)
        for source in sources[state]:
            left[source] -= 1
            if not left[source]:
                queue.append(source)
    return shortest, longest
