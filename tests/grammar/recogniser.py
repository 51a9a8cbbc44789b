"""Recogniser of a grammar's texts, by trying all derivations: slow, and independent of the engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from ramify.grammar.rules.expression import (
    Accepted,
    Alt,
    Call,
    Chars,
    Expression,
    Repeat,
    Seq,
    Text,
    UniqueItem,
    accepted,
    seq,
)
from ramify.grammar.rules.rule_set import ROOT

Ends = frozenset[int]


class Recogniser:
    """A recogniser for rules of schemas, which are not left-recursive."""

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules = rules
        self._array_rules = {name for name, body in rules.items() if body.has_unique_items}

    def accepts(self, text: str) -> bool:
        self._text = text
        self._known: dict[tuple[Expression, int], Ends] = {}
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 100_000))
        try:
            return len(text) in self._ends(Call(ROOT), 0)
        finally:
            sys.setrecursionlimit(limit)

    def _ends(self, expression: Expression, begin: int) -> Ends:
        match expression:
            case Text(literal):
                return frozenset([begin + len(literal)]) if self._text.startswith(literal, begin) else NONE
            case Chars(ranges):
                if begin == len(self._text):
                    return NONE
                point = ord(self._text[begin])
                return frozenset([begin + 1]) if any(a <= point <= b for a, b in ranges) else NONE
        key = (expression, begin)
        if key not in self._known:
            self._known[key] = frozenset(self._more_ends(expression, begin))
        return self._known[key]

    def _more_ends(self, expression: Expression, begin: int) -> Iterator[int] | Ends:
        match expression:
            case Call(rule) if rule in self._array_rules:
                return (end for end, _ in self._ends_with_unique_items(self._rules[rule], begin, frozenset()))
            case Call(rule):
                return self._ends(self._rules[rule], begin)
            case Alt(options):
                return (end for option in options for end in self._ends(option, begin))
            case Seq(parts):
                ends: Ends = frozenset([begin])
                for part in parts:
                    ends = frozenset(after for end in ends for after in self._ends(part, end))
                return ends
            case Accepted(automaton, state):
                here: Ends = frozenset([begin]) if automaton.final[state] else NONE
                steps = ((ranges, accepted(automaton, after)) for ranges, after in automaton.edges[state])
                return here.union(*(self._ends(seq(Chars(ranges), rest), begin) for ranges, rest in steps))
            case Repeat(item, low, high):
                return self._repeated(item, low, high, begin)
        raise TypeError(expression)

    def _ends_with_unique_items(
        self, expression: Expression, begin: int, read: frozenset[str]
    ) -> set[tuple[int, frozenset[str]]]:
        """The ends, each with the unique items that were read on the way there."""
        match expression:
            case UniqueItem(item):
                texts = ((end, self._text[begin:end]) for end in self._ends(item, begin))
                return {(end, read | {text}) for end, text in texts if text not in read}
            case Alt(options):
                return {
                    found for option in options for found in self._ends_with_unique_items(option, begin, read)
                }
            case Seq(parts):
                found = {(begin, read)}
                for part in parts:
                    found = {
                        after
                        for end, known in found
                        for after in self._ends_with_unique_items(part, end, known)
                    }
                return found
            case Repeat(item, low, high):
                found, ends, count = set(), {(begin, read)}, 0
                while ends and (high is None or count <= high):
                    if count >= low:
                        found |= ends
                    ends = {
                        after
                        for end, known in ends
                        for after in self._ends_with_unique_items(item, end, known)
                    }
                    count += 1
                return found
        return {(end, read) for end in self._ends(expression, begin)}

    def _repeated(self, item: Expression, low: int, high: int | None, begin: int) -> Ends:
        found: set[int] = set()
        ends: Ends = frozenset([begin])
        count = 0
        while ends and (high is None or count <= high):
            if count >= low:
                if ends <= found:
                    break
                found |= ends
            ends = frozenset(after for end in ends for after in self._ends(item, end))
            count += 1
        return frozenset(found)


NONE: Ends = frozenset()
