"""Elimination of left recursion (Paull 1961; Aho, Lam, Sethi and Ullman, "Compilers", algorithm 4.19).

    a ::= a x | y               becomes  a ::= y x*
    a ::= b x | y; b ::= a z    first replaces a in b: b ::= (b x | y) z, which becomes  b ::= y z (x z)*

A nullable expression may hide left recursion: ``a ::= b? a x`` begins with a call of a if b is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    Alt,
    Call,
    Expression,
    Repeat,
    Seq,
    alt,
    nullable,
    parts_of,
    repeat,
    seq,
)
from ramify.grammar.rules.rule_set import components, nullable_rules, productive

MAX_ROUNDS = 4
"""Most rounds of elimination. Each nullable rule in front of a left-recursive call may require one more
round."""

MAX_PARTS = 20_000
"""Most parts of a rule's body. Replacing calls by bodies can make a body exponentially large."""


def without_left_recursion(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """Eliminate left recursion from `rules`, which must be productive (`rule_set.productive`). Returns rules
    of the same language.

    Raises `InvalidConstraint` beyond `MAX_ROUNDS` or `MAX_PARTS`.
    """
    found = dict(rules)
    groups = _groups(found)
    for _ in range(MAX_ROUNDS):
        if not groups:
            break
        found = productive(_Elimination(found).without(groups))
        groups = _groups(found)
    if groups:
        raise InvalidConstraint(
            f"The rule {groups[0][0]!r} begins with itself in too many ways.",
            remedy="Write what it repeats with * or +.",
        )
    return found


def _groups(rules: Mapping[str, Expression]) -> list[list[str]]:
    """The left-recursive rules, in groups: rules that begin with calls of each other are in one group."""
    empty = nullable_rules(rules)
    leads = {name: _leading(body, empty) for name, body in rules.items()}
    component = components({name: alt(*map(Call, sorted(called))) for name, called in leads.items()})
    members: dict[str, list[str]] = {}
    for name in rules:
        members.setdefault(component[name], []).append(name)
    return [names for names in members.values() if len(names) > 1 or names[0] in leads[names[0]]]


def _leading(expression: Expression, empty: set[str]) -> set[str]:
    """The rules whose calls may begin `expression`. Parts that match the empty text may come before the call;
    `empty` has the nullable rules."""
    match expression:
        case Call(rule):
            return {rule}
        case Alt(options):
            return {rule for option in options for rule in _leading(option, empty)}
        case Repeat(item, _, _):
            return _leading(item, empty)
        case Seq(parts):
            found: set[str] = set()
            for part in parts:
                found |= _leading(part, empty)
                if not nullable(part, empty):
                    break
            return found
    return set()


class _Elimination:
    def __init__(self, rules: dict[str, Expression]) -> None:
        self._rules = rules
        self._empty = nullable_rules(rules)

    def without(self, groups: list[list[str]]) -> dict[str, Expression]:
        for names in groups:
            for i, name in enumerate(names):
                body = self._rules[name]
                for earlier in names[:i]:
                    after, rest = self._split(body, earlier)
                    if after != NOTHING:
                        body = alt(seq(self._rules[earlier], after), rest)
                        if _parts(body) > MAX_PARTS:
                            raise InvalidConstraint(
                                f"The rule {name!r} begins with itself in too many ways.",
                                remedy="Write what it repeats with * or +.",
                            )
                after, rest = self._split(body, name)
                if after != NOTHING:
                    body = seq(rest, repeat(self._not_empty(after), 0, None))
                self._rules[name] = body
        return self._rules

    def _split(self, expression: Expression, name: str) -> tuple[Expression, Expression]:
        """Split the texts of `expression` by whether they begin with a call of the rule `name`. Returns an
        expression for the texts after that call, and an expression for all other texts."""
        match expression:
            case Call(rule) if rule == name:
                return EMPTY, NOTHING
            case Alt(options):
                pairs = [self._split(option, name) for option in options]
                return alt(*(after for after, _ in pairs)), alt(*(rest for _, rest in pairs))
            case Seq(parts) if parts:
                return self._split_sequence(parts[0], seq(*parts[1:]), name)
            case Repeat(item, low, high) if name in _leading(item, self._empty):
                if nullable(item, self._empty):
                    item, low = self._not_empty(item), 0
                others = repeat(item, max(0, low - 1), None if high is None else high - 1)
                after, rest = self._split_sequence(item, others, name)
                return after, alt(EMPTY, rest) if low == 0 else rest
        return NOTHING, expression

    def _split_sequence(
        self, first: Expression, others: Expression, name: str
    ) -> tuple[Expression, Expression]:
        after, rest = self._split(first, name)
        if not nullable(first, self._empty):
            return seq(after, others), seq(rest, others)
        late_after, late_rest = self._split(others, name)
        return alt(seq(after, others), late_after), alt(seq(self._not_empty(rest), others), late_rest)

    def _not_empty(self, expression: Expression) -> Expression:
        if not nullable(expression, self._empty):
            return expression
        match expression:
            case Alt(options):
                return alt(*map(self._not_empty, options))
            case Seq(parts) if parts:
                first, others = parts[0], seq(*parts[1:])
                found = seq(self._not_empty(first), others)
                return alt(found, self._not_empty(others)) if nullable(first, self._empty) else found
            case Repeat(item, low, high):
                if nullable(item, self._empty):
                    return repeat(self._not_empty(item), 1, high)
                return repeat(item, max(1, low), high)
            case Call(rule):
                name = f"{rule}, not empty"
                if name not in self._rules:
                    self._rules[name] = NOTHING
                    self._rules[name] = self._not_empty(self._rules[rule])
                return Call(name)
        return NOTHING


def _parts(expression: Expression) -> int:
    """Number of nodes of the tree of `expression`."""
    return 1 + sum(map(_parts, parts_of(expression)))
