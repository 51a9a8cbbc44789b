"""Members of a JSON object, and the commas between them.

For members a (required) and b (optional), and any number of others c, the rules are those of

    a (", " b)? (", " c)*

If the members are counted, or some member must meet a condition, there is a rule for each count and each set
of conditions that no member has met yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    UNNAMED,
    Expression,
    MemberMark,
    ObjectEnd,
    alt,
    optional,
    repeat,
    seq,
)
from ramify.grammar.schema.document.unenforceable import refuse
from ramify.grammar.schema.values.json_rules import any_number, by_states

if TYPE_CHECKING:
    from ramify.grammar.schema.values.schema_grammar import SchemaGrammar

MAX_ORDERS = 1 << 12
"""Most states of an object whose members come in any order, if some must meet a condition. There is about one
state for each set of members written so far."""

MAX_WAYS_COUNTED = 20_000
"""Most pairs of a state and a way to write the next member, over all members. A state is a number of members
written and a set of unmet conditions."""

Conditions = frozenset[int]
"""Numbers of conditions that some property must meet (`logic.clauses.AnyProperty`)."""


class Way(NamedTuple):
    """A way to write a property: texts that all meet the conditions `met`."""

    met: Conditions
    text: Expression
    """Name, colon and value."""


class Member(NamedTuple):
    """A property, or one kind of unnamed properties."""

    required: bool
    name: Expression
    """The name in its quotes."""
    value: Expression
    """The colon and the value."""
    ways: tuple[Way, ...]
    """Ways to write the property. The first has all its texts; the others have the texts that meet further
    conditions."""
    absent: Conditions = frozenset()
    """The conditions that are met if the property is absent."""

    @property
    def text(self) -> Expression:
        """Name, colon and value."""
        return self.ways[0].text


class _State(NamedTuple):
    """A state between two members: the number of members written, counted up to a limit, and the unmet
    conditions."""

    written: int
    unmet: Conditions


class MemberSequence:
    """The members of an object: `members` in order, of which the optional ones may be absent, then any number
    of `others`.

    The object has `low` to `high` members in total. Each of `conditions` must be met by the presence or
    absence of one of `members`, or by one of `others`. `pointer` is the pointer of a keyword for messages.
    With ``grammar.any_order``, all orders are allowed.
    """

    def __init__(
        self,
        grammar: SchemaGrammar,
        members: list[Member],
        others: list[Member],
        conditions: Conditions,
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
        # Greater numbers of members need not be told apart.
        self._cap = max(1, self._low, 0 if self._high is None else self._high + 1)
        self._loops: dict[_State, Expression] = {}

    def content(self) -> tuple[Expression, bool, Expression]:
        """The texts of one or more members; whether the object may have no members; and the mark that must
        follow the closing brace."""
        start = _State(0, self._conditions)
        empty = self._may_end_without(frozenset(range(len(self._members))), start)
        if not self._any_order or not self._members or len(self._members) + len(self._others) < 2:
            return self._ordered(), empty, EMPTY
        if self._conditions:
            return self._permuted(), empty, EMPTY
        named, end = self._in_any_order()
        return named, empty, end

    def _may_end(self, state: _State) -> bool:
        return not state.unmet and state.written >= self._low

    def _may_end_without(self, left: frozenset[int], state: _State) -> bool:
        """Whether the object may end if the members with the indices `left` are absent."""
        members = [self._members[i] for i in left]
        unmet = state.unmet.difference(*(member.absent for member in members))
        return self._may_end(state._replace(unmet=unmet)) and not any(member.required for member in members)

    def _after(self, state: _State, met: Conditions) -> _State | None:
        """The state after one more member, which meets the conditions `met`; None if that exceeds the maximum
        number of members."""
        if self._high is not None and state.written >= self._high:
            return None
        return _State(min(state.written + 1, self._cap), state.unmet - met)

    def _ways_after(self, member: Member, state: _State) -> list[tuple[_State, Expression]]:
        """The states after `member`, each with the texts of the member that lead to it."""
        # Ways that meet fewer conditions come first, because they have more texts.
        ways: dict[Conditions, Way] = {}
        for way in sorted(member.ways, key=lambda way: len(way.met)):
            ways.setdefault(way.met & state.unmet, way)
        steps = ((self._after(state, way.met), way.text) for way in ways.values())
        return [(after, text) for after, text in steps if after is not None]

    def _steps(self, member: Member, state: _State) -> list[tuple[_State, Expression]]:
        """`_ways_after` with a comma before each text, unless the member is the first of the object."""
        comma = self._comma if state.written else EMPTY
        return [(after, seq(comma, text)) for after, text in self._ways_after(member, state)]

    # --- in order ---------------------------------------------------------------------------------

    def _ordered(self) -> Expression:
        """One or more members in the order of `members`."""
        states = self._states()
        # Backwards: rest[s] is the text that may follow in state s, made of the members from i on.
        rest = {state: self._tail(state) if state.written else self._first(state) for state in states[-1]}
        for i in reversed(range(len(self._members))):
            rest = {state: self._rules.define(following) for state, following in rest.items()}
            rest = {state: self._with(self._members[i], state, rest) for state in states[i]}
        content = rest[_State(0, self._conditions)]
        return self._rules.define(content) if len(self._members) > 1 else content

    def _states(self) -> list[list[_State]]:
        """A list of the possible states before each member, then of those after all members. States with an
        unmet condition that no later member can meet are left out."""
        later = [frozenset[int]().union(*(way.met for other in self._others for way in other.ways))]
        for member in reversed(self._members):
            later.append(later[-1].union(member.absent, *(way.met for way in member.ways)))
        later.reverse()
        before = [_State(0, self._conditions)]
        found = [before]
        size = 0
        for member, possible in zip(self._members, later[1:], strict=True):
            after = dict.fromkeys(self._without(member, state) for state in before if not member.required)
            after |= dict.fromkeys(state for known in before for state, _ in self._ways_after(member, known))
            size += len(before) * len(member.ways)
            if size > MAX_WAYS_COUNTED:
                refuse(
                    self._pointer,
                    "Properties, their number and conditions on them multiply to more than "
                    f"{MAX_WAYS_COUNTED}",
                    "Lower minProperties and maxProperties or leave them out, or name properties that depend "
                    "on one another next to each other.",
                )
            before = [state for state in after if state.unmet <= possible]
            found.append(before)
        return found

    def _without(self, member: Member, state: _State) -> _State:
        return state._replace(unmet=state.unmet - member.absent)

    def _with(self, member: Member, state: _State, rest: dict[_State, Expression]) -> Expression:
        steps = [(rest[after], text) for after, text in self._steps(member, state) if after in rest]
        found = alt(*(seq(text, following) for following, text in steps))
        if member.required:
            return found
        skipped = rest.get(self._without(member, state), NOTHING)
        if len(steps) == 1 and state.written and steps[0][0] == skipped:
            return seq(optional(steps[0][1]), skipped)
        return alt(found, skipped)

    def _first(self, state: _State) -> Expression:
        """Texts of one or more of `others` at the beginning of an object."""
        steps = [step for other in self._others for step in self._steps(other, state)]
        return alt(*(seq(text, self._tail(after)) for after, text in steps))

    def _tail(self, state: _State) -> Expression:
        """Texts of the `others` that may follow the members written so far, up to the end of the object."""
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
            self._rules.set_body(call, alt(*options))
        return self._loops[state]

    # --- in any order -----------------------------------------------------------------------------

    def _in_any_order(self) -> tuple[Expression, Expression]:
        """Texts of one or more members, each of `members` at most once; and the mark that must follow the
        closing brace."""
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
        """Texts of one or more members, each of `members` at most once, in any order and with the others
        anywhere between them."""

        def steps(
            position: tuple[frozenset[int], _State],
        ) -> Iterator[tuple[Expression, tuple[frozenset[int], _State]]]:
            left, state = position
            for i in sorted(left):
                for after, text in self._ways_after(self._members[i], state):
                    yield text, (left - {i}, after)
            for other in self._others:
                for after, text in self._ways_after(other, state):
                    yield text, (left, after)

        def check_count(orders: int) -> None:
            if orders > MAX_ORDERS:
                refuse(
                    self._pointer,
                    f"any_order takes more than {MAX_ORDERS} orders for {len(self._members)} named "
                    "properties some of which must meet a condition",
                    "Leave any_order out, or name fewer properties in one object.",
                )

        return by_states(
            self._rules,
            self._grammar.marks,
            (frozenset(range(len(self._members))), _State(0, self._conditions)),
            steps,
            lambda position: self._may_end_without(*position),
            check_count,
        )


def _not_implied(conditions: Conditions, members: list[Member], others: list[Member]) -> Conditions:
    """The `conditions` that neither always hold nor follow from another one of them."""
    always: set[int] = set()
    meeting: list[Conditions] = []
    for member in (*members, *others):
        optional_sets = [] if member.required else [member.absent]
        always |= member.ways[0].met.intersection(*optional_sets)
        meeting += [*(way.met for way in member.ways), *optional_sets]
    kept = [condition for condition in sorted(conditions) if condition not in always]
    for condition in tuple(kept):
        if any(
            other != condition and all(condition in met for met in meeting if other in met) for other in kept
        ):
            kept.remove(condition)
    return frozenset(kept)
