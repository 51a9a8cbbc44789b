"""What is between the braces of a JSON object: members, and the commas between them.

For members a (required) and b (optional), and any number of others c, the rules are those of

    a (", " b)? (", " c)*

Where the members are counted, or some must satisfy a condition, there is a rule for each count and each set
of conditions that no member satisfies yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    UNNAMED,
    Call,
    Expression,
    MemberMark,
    ObjectEnd,
    alt,
    optional,
    repeat,
    seq,
)
from ramify.grammar.schema.unenforceable import refuse
from ramify.grammar.schema.values.json_rules import any_number

if TYPE_CHECKING:
    from ramify.grammar.schema.compiler import SchemaGrammar

MAX_ORDERS = 1 << 12
"""Most states, one for each set of members written so far, where they come in any order."""

MAX_WAYS_COUNTED = 20_000
"""Most ways to write all properties, times the numbers of properties written that are told apart, times the
sets of conditions that may be unmet."""

Conditions = frozenset[int]
"""Existential conditions (`HasProperty`), by their numbers."""


class Way(NamedTuple):
    """Texts of a property, all of which satisfy the conditions `met`."""

    met: Conditions
    text: Expression
    """Name, colon and value."""


class Member(NamedTuple):
    """A property, or one kind of unnamed properties."""

    required: bool
    name: Expression
    """In its quotes."""
    value: Expression
    """The colon and the value."""
    ways: tuple[Way, ...]
    """The ways to write it: the first one has all its texts, the others satisfy more conditions."""

    @property
    def text(self) -> Expression:
        """Name, colon and value."""
        return self.ways[0].text


class _State(NamedTuple):
    """Between two members: how many are written, counted up to a limit, and which conditions are unmet."""

    written: int
    unmet: Conditions


class MemberSequence:
    """`members` in order, the optional ones possibly absent, then any number of `others`.

    There are `low` to `high` of both together, and each of the conditions 0 to `conditions` - 1 is satisfied
    by one. `pointer` is that of the keyword to name in messages. With ``grammar.any_order`` all orders are
    allowed.
    """

    def __init__(
        self,
        grammar: SchemaGrammar,
        members: list[Member],
        others: list[Member],
        conditions: int,
        low: int,
        high: int | None,
        pointer: str,
    ) -> None:
        self._grammar = grammar
        self._rules = grammar.rules
        self._comma = grammar.marks.comma
        self._any_order = grammar.any_order
        self._pointer = pointer
        self._members = members
        self._others = others
        self._low = 0 if low <= sum(member.required for member in members) else low
        self._high = None if high is not None and not others and high >= len(members) else high
        self._conditions = _not_implied(conditions, members, others)
        # Members beyond this number make no difference.
        self._cap = max(1, self._low, 0 if self._high is None else self._high + 1)
        self._unmet = self._reachable()
        self._loops: dict[_State, Expression] = {}

    def content(self) -> tuple[Expression, bool, Expression]:
        """What is between the braces if anything is, whether they may be empty, and what must stand behind
        the closing one."""
        start = _State(0, self._conditions)
        empty = self._may_end(start) and not any(member.required for member in self._members)
        if not self._any_order or not self._members or len(self._members) + len(self._others) < 2:
            return self._ordered(), empty, EMPTY
        if self._conditions:
            return self._permuted(), empty, EMPTY
        named, end = self._in_any_order()
        return named, empty, end

    def _reachable(self) -> list[Conditions]:
        """The sets of conditions that may be unmet after some members."""
        met = {way.met & self._conditions for member in (*self._members, *self._others) for way in member.ways}
        found = {self._conditions: None}
        queue = [self._conditions]
        for unmet in queue:
            for conditions in met:
                if unmet - conditions not in found:
                    found[unmet - conditions] = None
                    queue.append(unmet - conditions)
        return queue

    def _may_end(self, state: _State) -> bool:
        return not state.unmet and state.written >= self._low

    def _after(self, state: _State, met: Conditions) -> _State | None:
        """The state after one more member; None where that exceeds the limit."""
        if self._high is not None and state.written >= self._high:
            return None
        return _State(min(state.written + 1, self._cap), state.unmet - met)

    def _steps(self, member: Member, state: _State) -> list[tuple[_State, Expression]]:
        """The states after `member`, and its text with the comma before it."""
        comma = self._comma if state.written else EMPTY
        # The fewer conditions a way meets, the more texts it has.
        ways: dict[Conditions, Way] = {}
        for way in sorted(member.ways, key=lambda way: len(way.met)):
            ways.setdefault(way.met & state.unmet, way)
        found = []
        for way in ways.values():
            after = self._after(state, way.met)
            if after is not None:
                found.append((after, seq(comma, way.text)))
        return found

    # --- in order ---------------------------------------------------------------------------------

    def _ordered(self) -> Expression:
        """At least one member, in the order of `members`."""
        states = self._states()
        if len(states) * sum(len(member.ways) for member in (*self._members, *self._others)) > MAX_WAYS_COUNTED:
            refuse(
                self._pointer,
                f"The properties, those that are counted, and the conditions on them multiply to more than "
                f"{MAX_WAYS_COUNTED}",
                "Lower minProperties and maxProperties or leave them out, or name fewer properties.",
            )
        # From the back: rest[s] is what may follow in state s when the members from here on remain.
        rest = {state: self._tail(state) for state in states}
        first = self._first(rest)
        for member in reversed(self._members):
            rest = {state: self._rules.define(following) for state, following in rest.items()}
            before = {state: self._with(member, state, rest) for state in states}
            start = _State(0, self._conditions)
            taken = alt(*(seq(text, rest[after]) for after, text in self._steps(member, start)))
            first = taken if member.required else alt(taken, first)
            first = self._rules.define(first) if len(self._members) > 1 else first
            rest = before
        return first

    def _states(self) -> list[_State]:
        return [_State(written, unmet) for written in range(1, self._cap + 1) for unmet in self._unmet]

    def _with(self, member: Member, state: _State, rest: dict[_State, Expression]) -> Expression:
        steps = self._steps(member, state)
        if member.required:
            return alt(*(seq(text, rest[after]) for after, text in steps))
        if len(steps) == 1 and rest[steps[0][0]] == rest[state]:
            return seq(optional(steps[0][1]), rest[state])
        return alt(*(seq(text, rest[after]) for after, text in steps), rest[state])

    def _first(self, rest: dict[_State, Expression]) -> Expression:
        """One or more of the others, and no member before them."""
        start = _State(0, self._conditions)
        return alt(
            *(seq(text, rest[after]) for other in self._others for after, text in self._steps(other, start))
        )

    def _tail(self, state: _State) -> Expression:
        """Any number of others."""
        ending = EMPTY if self._may_end(state) else NOTHING
        if not self._others:
            return ending
        if not state.unmet:
            most = None if self._high is None else self._high - state.written
            if most is not None and most < 0:
                return NOTHING
            any_other = alt(*(other.text for other in self._others))
            return repeat(seq(self._comma, any_other), max(0, self._low - state.written), most)
        if state not in self._loops:
            call = self._rules.reserve()
            self._loops[state] = call
            options = [
                seq(text, self._tail(after))
                for other in self._others
                for after, text in self._steps(other, state)
            ]
            self._rules.set(call, alt(*options))
        return self._loops[state]

    # --- in any order -----------------------------------------------------------------------------

    def _in_any_order(self) -> tuple[Expression, Expression]:
        """At least one member, each of `members` at most once, and what must stand behind the closing
        brace."""
        required = frozenset(i for i, member in enumerate(self._members) if member.required)
        if self._high is not None and (self._high == 0 or self._high < len(required)):
            return NOTHING, EMPTY
        named, others = (
            tuple(member.text for member in members) for members in (self._members, self._others)
        )
        content = (named, required, others, self._low, self._high)
        number = self._grammar.objects.setdefault(content, len(self._grammar.objects))
        marks = [*range(len(named)), *([UNNAMED] * len(others))]
        member = alt(
            *(
                seq(each.name, MemberMark(number, mark), each.value)
                for each, mark in zip((*self._members, *self._others), marks, strict=True)
            )
        )
        return any_number(member, self._grammar.marks), ObjectEnd(number, *content)

    def _permuted(self) -> Expression:
        """At least one member; each of `members` at most once, anywhere among the others."""
        calls: dict[tuple[frozenset[int], _State], Call] = {}
        queue: list[tuple[frozenset[int], _State]] = []

        def call(left: frozenset[int], state: _State) -> Call:
            if (left, state) not in calls:
                if len(calls) == MAX_ORDERS:
                    refuse(
                        self._pointer,
                        f"any_order is not enforced for {len(self._members)} named properties",
                        "Leave any_order out, or name fewer properties in one object.",
                    )
                calls[left, state] = self._rules.reserve()
                queue.append((left, state))
            return calls[left, state]

        def options(left: frozenset[int], state: _State) -> list[Expression]:
            found = []
            for i in sorted(left):
                for after, text in self._steps(self._members[i], state):
                    found.append(seq(text, call(left - {i}, after)))
            for other in self._others:
                for after, text in self._steps(other, state):
                    found.append(seq(text, call(left, after)))
            return found

        everything = frozenset(range(len(self._members)))
        content = alt(*options(everything, _State(0, self._conditions)))
        for left, state in queue:
            done = self._may_end(state) and not any(self._members[i].required for i in left)
            self._rules.set(calls[left, state], alt(*options(left, state), *([EMPTY] if done else [])))
        return content


def _not_implied(count: int, members: list[Member], others: list[Member]) -> Conditions:
    """The conditions 0 to `count` - 1 without those that hold wherever the other ones do."""
    always = frozenset[int]().union(*(member.ways[0].met for member in members if member.required))
    kept = [condition for condition in range(count) if condition not in always]
    meeting = [way.met for member in (*members, *others) for way in member.ways]
    for condition in tuple(kept):
        if any(
            other != condition and all(condition in met for met in meeting if other in met) for other in kept
        ):
            kept.remove(condition)
    return frozenset(kept)
