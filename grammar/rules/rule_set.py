"""The rules of a grammar: making them, dropping useless ones, and finding recursion among them."""

from __future__ import annotations

from collections.abc import Mapping

from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    Call,
    Expression,
    Text,
    derivable,
    parts_of,
    rebuilt,
)

ROOT = "root"


class Rules:
    """The rules of a grammar under construction. This class chooses their names."""

    def __init__(self) -> None:
        self.bodies: dict[str, Expression] = {}
        self._by_body: dict[Expression, Call] = {}

    def define(self, body: Expression) -> Expression:
        """Add a rule whose body is `body`, and return a call of it. Equal bodies share one rule.

        A body that is as short as a call (a call, a text, `EMPTY` or `NOTHING`) gets no rule and is returned
        itself.
        """
        if isinstance(body, Call | Text) or body in (EMPTY, NOTHING):
            return body
        if body not in self._by_body:
            call = self.reserve()
            self._by_body[body] = call
            self.bodies[call.rule] = body
        return self._by_body[body]

    def reserve(self) -> Call:
        """Add a rule without a body, and return a call of it. `set_body` sets the body later, so that the
        rule can be recursive."""
        call = Call(f"r{len(self.bodies)}")
        self.bodies[call.rule] = NOTHING
        return call

    def set_body(self, call: Call, body: Expression) -> None:
        self.bodies[call.rule] = body


def reachable(rules: Mapping[str, Expression], start: str = ROOT) -> dict[str, None]:
    """The rules that `start` calls directly or indirectly, in breadth-first order from `start` itself."""
    found = {start: None}
    queue = [start]
    for name in queue:
        for called in calls_of(rules[name]):
            if called not in found:
                found[called] = None
                queue.append(called)
    return found


def productive(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """The rules that ``root`` needs, without the alternatives that no finite text satisfies. An alternative
    is dropped if it calls a rule that no finite text satisfies, such as one that always calls itself again.
    The result is empty if no finite text satisfies ``root``."""
    ending = derivable_rules(rules, characters=True)
    if ROOT not in ending:
        return {}
    if len(ending) < len(rules):
        rules = {name: _pruned(rules[name], ending) for name in rules if name in ending}
    return {name: rules[name] for name in reachable(rules)}


def endless_rule(rules: Mapping[str, Expression], start: str = ROOT) -> tuple[str, bool] | None:
    """Find a rule that `start` needs, directly or indirectly, and that no finite text satisfies. Returns its
    name, and whether the rule calls itself, directly or indirectly; None if there is no such rule."""
    ending = derivable_rules(rules, characters=True)
    endless = [name for name in reachable(rules, start) if name not in ending]
    name, passed = endless[0] if endless else "", set[str]()
    while name and name not in passed:
        passed.add(name)
        called = next((one for one in calls_of(rules[name]) if one in endless), None)
        if called is None:
            return name, False
        name = called
    return (name, True) if name else None


def nullable_rules(rules: Mapping[str, Expression]) -> set[str]:
    """The rules that the empty text satisfies."""
    return derivable_rules(rules, characters=False)


def derivable_rules(rules: Mapping[str, Expression], *, characters: bool) -> set[str]:
    """The rules whose bodies are `derivable`: the least fixed point over recursive rules."""
    found: set[str] = set()
    order = list(rules)
    size = -1
    while len(found) > size:
        size = len(found)
        order.reverse()  # in one of the two directions, one pass follows a whole chain of calls
        for name in order:
            if name not in found and derivable(rules[name], found, characters=characters):
                found.add(name)
    return found


def components(rules: Mapping[str, Expression]) -> dict[str, str]:
    """The name of each rule's strongly connected component in the graph of calls (Tarjan 1972).

    Two rules have the same component if each calls the other, directly or indirectly.
    """
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
    """The names of the rules that `expression` calls, in order."""
    found: dict[str, None] = {}
    _add_calls(expression, found)
    return found


def _add_calls(expression: Expression, found: dict[str, None]) -> None:
    if type(expression) is Call:
        found[expression.rule] = None
    elif not expression.is_regular:
        for part in parts_of(expression):
            _add_calls(part, found)


def _pruned(expression: Expression, kept: set[str]) -> Expression:
    """`expression` with `NOTHING` in place of each call of a rule that is not in `kept`."""
    if isinstance(expression, Call):
        return expression if expression.rule in kept else NOTHING
    return rebuilt(expression, lambda part: _pruned(part, kept))
