"""Rules of a Lark grammar that no text satisfies.

llguidance accepts ``start: "x" start`` and then forces x without end. With the two rules
``start: "x" | "y" b`` and ``b: "z" b``, the output never ends once y is chosen. This module parses the rules
only as far as needed to find such rules: literals, patterns and terminals count as texts, and llguidance's
additions to Lark's notation (parameters, conditions, JSON schemas) are skipped. The grammar must be one that
llguidance accepts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from ramify.grammar.rules import rule_set
from ramify.grammar.rules.expression import EMPTY, NOTHING, Call, Expression, alt, repeat, seq
from ramify.grammar.rules.lark_words import lark_words
from ramify.grammar.rules.rule_set import calls_of

START = "start"

_MAY_BE_EMPTY = re.compile(r"\[\^")
"""The beginning of a negated character class. Only a pattern with a negated class can have an empty
language."""


class Endless(NamedTuple):
    """A rule that no text satisfies, the line of its definition, and whether it calls itself."""

    rule: str
    line: int
    recursive: bool


def endless_rule(grammar: str, matches_nothing: Callable[[str], bool]) -> Endless | None:
    """Find a rule that ``start`` needs, directly or indirectly, and that no text satisfies. Returns None if
    there is none. `matches_nothing` takes the source of a grammar with a ``start`` rule, and returns whether
    no text matches. It is called for patterns, and for terminals with the operators & and ~."""
    rules, begins = _Reader(grammar, matches_nothing).read()
    found = rule_set.endless_rule(rules, START)
    if found is None:
        return None
    rule, recursive = found
    return Endless(rule, grammar.count("\n", 0, begins[rule]) + 1, recursive)


class _Reader:
    def __init__(self, grammar: str, matches_nothing: Callable[[str], bool]) -> None:
        self._grammar = grammar
        self._tokens = lark_words(grammar)
        self._matches_nothing = matches_nothing
        self._at = 0
        self._operators = False

    def read(self) -> tuple[dict[str, Expression], dict[str, int]]:
        """The rules, and the position at which each begins, both by name. Names without a definition, such as
        imported ones, count as texts."""
        rules: dict[str, Expression] = {}
        begins: dict[str, int] = {}
        composed: list[str] = []
        terminals = ""
        while self._at + 1 < len(self._tokens):
            self._at += 1
            begin = self._tokens[self._at].at
            self._take("%override")
            kind, name, _ = self._tokens[self._at]
            if kind == "name":
                while not self._take(":"):
                    self._at += 1
                name = name.lstrip("!?")
                begins[name] = begin
                self._operators = False
                rules[name] = self._alternatives()
                composed += [name] if self._operators else []
            while not self._line_ends():
                self._at += 1
            if name == "%import" or (kind == "name" and name.isupper()):
                terminals += self._grammar[begin : self._tokens[self._at].at] + "\n"
        for name in composed:
            rules[name] = self._pattern(f"{name}\n{terminals}")
        called = {name for body in rules.values() for name in calls_of(body)}
        return dict.fromkeys(called, EMPTY) | rules, begins

    def _pattern(self, pattern: str) -> Expression:
        return NOTHING if self._matches_nothing(f"{START}: {pattern}") else EMPTY

    # --- expressions ----------------------------------------------------------------------------------

    def _alternatives(self) -> Expression:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return alt(*options)

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while self._peek() not in (")", "]", "}", "|") and not self._line_ends():
            if self._take("->"):
                self._at += 1
            elif self._take("%if"):
                while self._peek() != "|" and not self._line_ends():
                    self._at += 1
            elif self._peek() in ("&", "~"):
                self._operators = True
                self._at += 1
            else:
                parts.append(self._repeated(self._item()))
        return seq(*parts)

    def _item(self) -> Expression:
        token = self._tokens[self._at]
        self._at += 1
        match token.kind, token.text:
            case "sign", "(":
                return self._closed(self._alternatives())
            case "sign", "[":
                return repeat(self._closed(self._alternatives()), 0, 1)
            case "pattern", pattern if _MAY_BE_EMPTY.search(pattern):
                return self._pattern(pattern)
            case "name", name:
                if self._take("::"):
                    self._at += 1
                    self._skip_parentheses()
                return Call(name)
        return EMPTY

    def _closed(self, inner: Expression) -> Expression:
        self._at += 1
        return inner

    def _skip_parentheses(self) -> None:
        depth = 0
        while self._peek() == "(" or depth:
            depth += {"(": 1, ")": -1}.get(self._peek(), 0)
            self._at += 1

    def _repeated(self, item: Expression) -> Expression:
        if self._peek() in ("*", "?"):
            self._at += 1
            return repeat(item, 0, 1)
        if self._take("+") or self._peek() not in ("{", "~"):
            return item
        least = self._tokens[self._at + 1]
        if self._take("{"):
            while not self._take("}"):
                self._at += 1
        elif least.kind == "number":
            self._at += 2
            self._at += 2 if self._peek() == ".." else 0
        else:
            return item  # the operator ~ of the next item
        return repeat(item, 0, 1) if least.text in (",", "0") else item

    # --- tokens ---------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._tokens[self._at].text

    def _take(self, text: str) -> bool:
        found = self._peek() == text
        self._at += found
        return found

    def _line_ends(self) -> bool:
        """Whether a line ends here and the next line does not begin with "|". If the next line does, the line
        end is skipped, and the rule continues."""
        if self._tokens[self._at].kind != "line":
            return False
        following = self._tokens[self._at + 1 : self._at + 2]
        if following and following[0].text == "|":
            self._at += 1
            return False
        return True
