"""The rules of a grammar: how they are made, which are of use, and which of them call each other."""

from __future__ import annotations

from collections.abc import Mapping

from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    Alt,
    Call,
    Expression,
    Repeat,
    Seq,
    Text,
    UniqueItem,
    alt,
    nullable,
    repeat,
    seq,
)

ROOT = "root"


class Rules:
    """The rules of a grammar while it is made."""

    def __init__(self) -> None:
        self.bodies: dict[str, Expression] = {}
        self._by_body: dict[Expression, Call] = {}

    def define(self, body: Expression) -> Expression:
        """A rule for `body`, the same for all that are equal; `body` itself where it is as short."""
        if isinstance(body, Call | Text) or body in (EMPTY, NOTHING):
            return body
        if body not in self._by_body:
            call = self.reserve()
            self._by_body[body] = call
            self.bodies[call.rule] = body
        return self._by_body[body]

    def reserve(self) -> Call:
        """A rule whose body is `set` later: it may call itself."""
        call = Call(f"r{len(self.bodies)}")
        self.bodies[call.rule] = NOTHING
        return call

    def set(self, call: Call, body: Expression) -> None:
        self.bodies[call.rule] = body


def reachable(rules: Mapping[str, Expression]) -> dict[str, None]:
    """The rules that ``root`` needs, itself first."""
    found = {ROOT: None}
    queue = [ROOT]
    for name in queue:
        for called in calls_of(rules[name]):
            if called not in found:
                found[called] = None
                queue.append(called)
    return found


def productive(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """`rules` without what can never be completed: a rule that always calls itself again, and all
    that depends on it. Empty if that is the case of ``root``."""
    ending: set[str] = set()
    order = list(rules)
    size = -1
    while len(ending) > size:
        size = len(ending)
        order.reverse()  # a chain of rules takes one pass in one of the two directions
        for name in order:
            if name not in ending and _can_end(rules[name], ending):
                ending.add(name)
    if ROOT not in ending:
        return {}
    pruned = rules
    if len(ending) < len(rules):
        pruned = {name: _pruned(rules[name], ending) for name in rules if name in ending}
    return {name: pruned[name] for name in reachable(pruned)}


def nullable_rules(rules: Mapping[str, Expression]) -> set[str]:
    """The rules that the empty text satisfies."""
    found: set[str] = set()
    order = list(rules)
    size = -1
    while len(found) > size:
        size = len(found)
        order.reverse()  # a chain of rules takes one pass in one of the two directions
        for name in order:
            if name not in found and nullable(rules[name], found):
                found.add(name)
    return found


def components(rules: Mapping[str, Expression]) -> dict[str, str]:
    """For every rule a name that it shares with those that it calls and that call it (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    component: dict[str, str] = {}
    for start in rules:
        if start in number:
            continue
        work = [(start, iter(calls_of(rules[start])))]
        number[start] = lowest[start] = len(number)
        path.append(start)
        while work:
            name, calls = work[-1]
            for called in calls:
                if called not in number:
                    number[called] = lowest[called] = len(number)
                    path.append(called)
                    work.append((called, iter(calls_of(rules[called]))))
                    break
                if called not in component:
                    lowest[name] = min(lowest[name], number[called])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[name])
                if lowest[name] == number[name]:
                    while name not in component:
                        component[path.pop()] = name
    return component


def calls_of(expression: Expression) -> dict[str, None]:
    """The rules that `expression` calls."""
    if expression.is_regular:
        return {}
    match expression:
        case Call(rule):
            return {rule: None}
        case Seq(parts) | Alt(parts):
            return {rule: None for part in parts for rule in calls_of(part)}
        case Repeat(item, _, _) | UniqueItem(item):
            return calls_of(item)
    return {}


def _can_end(expression: Expression, ending: set[str]) -> bool:
    match expression:
        case Call(rule):
            return rule in ending
        case Seq(parts):
            return all(_can_end(part, ending) for part in parts)
        case Alt(options):
            return any(_can_end(option, ending) for option in options)
        case Repeat(item, low, _):
            return low == 0 or _can_end(item, ending)
        case UniqueItem(item):
            return _can_end(item, ending)
    return True


def _pruned(expression: Expression, ending: set[str]) -> Expression:
    match expression:
        case Call(rule):
            return expression if rule in ending else NOTHING
        case Seq(parts):
            return seq(*(_pruned(part, ending) for part in parts))
        case Alt(options):
            return alt(*(_pruned(option, ending) for option in options))
        case Repeat(item, low, high):
            return repeat(_pruned(item, ending), low, high)
        case UniqueItem(item):
            pruned = _pruned(item, ending)
            return NOTHING if pruned == NOTHING else UniqueItem(pruned)
    return expression
