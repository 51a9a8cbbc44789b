"""What stands between the braces of a JSON object: members and the commas between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ramify.grammar.rules.expression import EMPTY, NOTHING, Call, Expression, alt, optional, repeat, seq
from ramify.grammar.schema.unenforceable import refuse

if TYPE_CHECKING:
    from ramify.grammar.schema.compiler import SchemaGrammar

MAX_ORDERS = 1 << 12
"""Most sets of members that may be there so far, where they come in any order."""

Wanted = frozenset[int]


class Member(NamedTuple):
    text: Expression
    """Name, colon and value."""
    required: bool
    meets: tuple[tuple[Wanted, Expression], ...] = ()
    """Texts with which it is one or several of the wanted properties, by their numbers."""


class _State(NamedTuple):
    """Between two members. The number of members written matters up to a limit."""

    written: int
    wanted: Wanted


class MemberSequence:
    """`members` in order, the optional ones perhaps missing, then any number of `others`: `low` to `high`
    in all, and among them some that meet each of the `wanted` conditions."""

    def __init__(
        self,
        grammar: SchemaGrammar,
        members: list[Member],
        others: list[Member],
        wanted: int,
        low: int,
        high: int | None,
        pointer: str,
    ) -> None:
        self._rules = grammar.rules
        self._comma = grammar.marks.comma
        self._any_order = grammar.any_order
        self._pointer = pointer
        self._members = members
        self._others = others
        self._low = 0 if low <= sum(member.required for member in members) else low
        self._high = None if high is not None and not others and high >= len(members) else high
        self._wanted = frozenset(range(wanted))
        # Beyond this the number of members makes no difference any more.
        self._cap = max(1, self._low, 0 if self._high is None else self._high + 1)
        self._loops: dict[_State, Expression] = {}

    def content(self) -> tuple[Expression, bool]:
        """What stands there if it is not empty, and whether it may be empty."""
        start = _State(0, self._wanted)
        named = self._permuted() if self._any_order and len(self._members) > 1 else self._ordered()
        empty = self._may_end(start) and not any(member.required for member in self._members)
        return named, empty

    def _may_end(self, state: _State) -> bool:
        return not state.wanted and state.written >= self._low

    def _after(self, state: _State, met: Wanted) -> _State | None:
        """With one member more; None where that is one too many."""
        if self._high is not None and state.written >= self._high:
            return None
        return _State(min(state.written + 1, self._cap), state.wanted - met)

    def _texts(self, member: Member, state: _State) -> list[tuple[Wanted, Expression]]:
        meeting = [(met, text) for met, text in member.meets if met & state.wanted]
        return [(frozenset(), member.text), *meeting]

    def _steps(self, member: Member, state: _State) -> list[tuple[_State, Expression]]:
        """The states after `member`, and its text with the comma before it."""
        comma = self._comma if state.written else EMPTY
        found = []
        for met, text in self._texts(member, state):
            after = self._after(state, met)
            if after is not None:
                found.append((after, seq(comma, text)))
        return found

    # --- in order ---------------------------------------------------------------------------------

    def _ordered(self) -> Expression:
        """At least one member, in the order of `members`."""
        states = self._states()
        # left[s] is what follows in state s when the members from i on are left.
        left = {state: self._tail(state) for state in states}
        first = self._first(left)
        for member in reversed(self._members):
            left = {state: self._rules.define(following) for state, following in left.items()}
            before = {state: self._with(member, state, left) for state in states}
            start = _State(0, self._wanted)
            taken = alt(*(seq(text, left[after]) for after, text in self._steps(member, start)))
            first = taken if member.required else alt(taken, first)
            first = self._rules.define(first) if len(self._members) > 1 else first
            left = before
        return first

    def _states(self) -> list[_State]:
        wanted = [self._wanted]
        for chosen in wanted:
            for i in sorted(chosen):
                if chosen - {i} not in wanted:
                    wanted.append(chosen - {i})
        return [_State(written, chosen) for written in range(1, self._cap + 1) for chosen in wanted]

    def _with(self, member: Member, state: _State, left: dict[_State, Expression]) -> Expression:
        steps = self._steps(member, state)
        if member.required:
            return alt(*(seq(text, left[after]) for after, text in steps))
        if len(steps) == 1 and left[steps[0][0]] == left[state]:
            return seq(optional(steps[0][1]), left[state])
        return alt(*(seq(text, left[after]) for after, text in steps), left[state])

    def _first(self, left: dict[_State, Expression]) -> Expression:
        """The others, at least one, with nothing before them."""
        start = _State(0, self._wanted)
        options = []
        for other in self._others:
            for after, text in self._steps(other, start):
                options.append(seq(text, left[after]))
        return alt(*options)

    def _tail(self, state: _State) -> Expression:
        """Any number of others."""
        ending = EMPTY if self._may_end(state) else NOTHING
        if not self._others:
            return ending
        if not state.wanted:
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
        content = alt(*options(everything, _State(0, self._wanted)))
        for left, state in queue:
            done = self._may_end(state) and not any(self._members[i].required for i in left)
            self._rules.set(calls[left, state], alt(*options(left, state), *([EMPTY] if done else [])))
        return content
