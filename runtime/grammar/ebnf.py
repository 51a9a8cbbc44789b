"""Expressions as grammars in the EBNF notation that XGrammar reads (that of llama.cpp's GBNF)."""

from __future__ import annotations

from collections.abc import Mapping

from ramify.errors import InvalidConstraint
from ramify.runtime.grammar.expression import (
    EMPTY,
    NOTHING,
    Alt,
    Call,
    Chars,
    Expression,
    Fresh,
    Repeat,
    Seq,
    Text,
    alt,
    nullable,
    repeat,
    seq,
)

ROOT = "root"

MAX_CHAIN = 256
"""Longest repetition of a choice that is written as a chain of rules. Each holds masks of its own."""


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


def write_grammar(rules: Mapping[str, Expression]) -> str:
    """The grammar of `rules`, which must be productive and hold one called ``root``."""
    written = _with_recursive_loops(rules)
    return "\n".join(f"{name} ::= {_write(written[name])}" for name in reachable(written))


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


def _with_recursive_loops(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """`rules` with repetitions of a choice as rules that call themselves, or the next of a chain.

    XGrammar takes 40 ms and more for a mask inside ``(a | b c)*``, and 0.03 ms inside
    ``r ::= "" | a r | b c r``, which is the same language.
    """
    loops: dict[tuple[Expression, int, int | None], Call] = {}
    bodies: dict[str, Expression] = {}

    def rewritten(expression: Expression) -> Expression:
        match expression:
            case Seq(parts):
                return seq(*map(rewritten, parts))
            case Alt(options):
                return alt(*map(rewritten, options))
            case Repeat(Alt() as item, low, high) if max(low, high or 0) <= MAX_CHAIN:
                return loop(rewritten(item), low, high)
            case Repeat(item, low, high):
                return repeat(rewritten(item), low, high)
        return expression

    def loop(item: Expression, low: int, high: int | None) -> Expression:
        if high == 0:
            return EMPTY
        call = loops.get((item, low, high))
        if call is None:
            call = loops[item, low, high] = Call(f"loop{len(loops)}")
            rest = call if low == 0 and high is None else loop(item, max(0, low - 1), high and high - 1)
            once = item.options if isinstance(item, Alt) else (item,)
            bodies[call.rule] = alt(EMPTY if low == 0 else NOTHING, *(seq(each, rest) for each in once))
        return call

    return {name: rewritten(body) for name, body in rules.items()} | bodies


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
    size = -1
    while len(found) > size:
        size = len(found)
        found |= {name for name, body in rules.items() if name not in found and nullable(body, found)}
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
    match expression:
        case Call(rule):
            return {rule: None}
        case Seq(parts) | Alt(parts):
            return {rule: None for part in parts for rule in calls_of(part)}
        case Repeat(item, _, _) | Fresh(item):
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
        case Fresh(item):
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
        case Fresh(item):
            pruned = _pruned(item, ending)
            return NOTHING if pruned == NOTHING else Fresh(pruned)
    return expression


def _write(expression: Expression) -> str:
    match expression:
        case Text(literal):
            return '"' + "".join(map(_literal_char, literal)) + '"'
        case Chars(ranges):
            return "[" + "".join(_span(low, high) for low, high in ranges) + "]"
        case Call(rule):
            return rule
        case Repeat(item, low, high):
            return _atom(item) + _count(low, high)
        case Fresh():
            raise InvalidConstraint("Texts that must differ cannot be told from what else may come there.")
        case Seq(parts):
            return " ".join(_atom(part) if isinstance(part, Alt) else _write(part) for part in parts) or '""'
        case Alt(options):
            written = [_write(option) for option in options if option != EMPTY]
            return " | ".join(written) if len(written) == len(options) else " | ".join(['""', *written])


def _atom(expression: Expression) -> str:
    written = _write(expression)
    return written if isinstance(expression, Text | Chars | Call) else f"({written})"


def _count(low: int, high: int | None) -> str:
    match (low, high):
        case (0, None):
            return "*"
        case (1, None):
            return "+"
        case (0, 1):
            return "?"
    return f"{{{low},{'' if high is None else high}}}"


def _literal_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if " " <= char <= "~" else _code_point(ord(char))


def _span(low: int, high: int) -> str:
    return _class_char(low) if low == high else f"{_class_char(low)}-{_class_char(high)}"


def _class_char(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else _code_point(point)


def _code_point(point: int) -> str:
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
