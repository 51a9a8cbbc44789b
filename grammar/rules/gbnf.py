"""A parser that turns GBNF, the EBNF notation of llama.cpp, into rules. Errors name line and column.

    root  ::= "[" (item ("," item)*)? "]"     # alternatives: a | b; repetition: * + ? {2} {2,} {2,5}
    item  ::= [a-z]+ | [^\\x00-\\x1f"\\u4e00] | .

A rule extends to the next ``name ::=``. Names are letters, digits, ``_``, ``-`` and ``.``.
"""

from __future__ import annotations

import re
from typing import NoReturn

from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import (
    ANY_CHAR,
    Call,
    Expression,
    alt,
    chars,
    complement,
    normal_ranges,
    repeat,
    seq,
    text,
)
from ramify.grammar.rules.rule_set import ROOT, endless_rule, productive

_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_DEFINES = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*(?:\s|#[^\n]*)*::=")
_COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = dict(zip("abefnrtv0", "\a\b\x1b\f\n\r\t\v\0", strict=True)) | {c: c for c in "\\\"'[]-^?/.$"}


def grammar_rules(source: str) -> dict[str, Expression]:
    """The rules of `source` by name, without rules that ``root`` does not need, or that no text satisfies.

    The rules may be left-recursive. Raises `InvalidConstraint` with line and column.
    """
    return _Parser(source).parse()


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._called: dict[str, int] = {}

    def parse(self) -> dict[str, Expression]:
        bodies: dict[str, Expression] = {}
        self._skip()
        while self._at < len(self._source):
            at = self._at
            name = self._name()
            if name is None or not self._take("::="):
                self._fail('a rule such as name ::= "text" is expected', at)
            if name in bodies:
                self._fail(f"the rule {name!r} is defined twice", at)
            bodies[name] = self._alternatives()
            if self._at < len(self._source) and not _DEFINES.match(self._source, self._at):
                self._fail(f"{self._source[self._at]!r} is not expected here")
        for name, at in self._called.items():
            if name not in bodies:
                self._fail(f"the rule {name!r} is not defined", at)
        if ROOT not in bodies:
            raise InvalidConstraint(
                'The grammar has no rule "root".',
                field="ebnf",
                remedy="Give the rule that it begins with that name: root ::= …",
            )
        rules = productive(bodies)
        if not rules:
            name, _ = endless_rule(bodies) or (ROOT, True)
            raise InvalidConstraint(
                f"No text satisfies the grammar: its rule {name!r} never ends.",
                field="ebnf",
                remedy="Give it an alternative that ends.",
            )
        return rules

    def _alternatives(self) -> Expression:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return alt(*options)

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (item := self._item()) is not None:
            parts.append(self._repeated(item))
        return seq(*parts)

    def _item(self) -> Expression | None:
        start = self._at
        if self._source.startswith("(?", start):
            self._fail("lookarounds are not supported")
        if self._take("("):
            inner = self._alternatives()
            if not self._take(")"):
                self._fail("this parenthesis is not closed", start)
            return inner
        if self._take(".", spaces=False):
            self._skip()
            return ANY_CHAR
        match self._source[start : start + 1]:
            case '"':
                return self._literal()
            case "[":
                return self._char_class()
            case "'":
                self._fail("a literal is written in double quotes")
        if _DEFINES.match(self._source, start):
            return None  # the next rule
        name = self._name()
        if name is None:
            return None
        self._called.setdefault(name, start)
        return Call(name)

    def _repeated(self, item: Expression) -> Expression:
        while True:
            if self._take("*"):
                item = repeat(item, 0, None)
            elif self._take("+"):
                item = repeat(item, 1, None)
            elif self._take("?"):
                item = repeat(item, 0, 1)
            elif self._source.startswith("{", self._at):
                item = repeat(item, *self._counts())
            else:
                return item

    def _counts(self) -> tuple[int, int | None]:
        found = _COUNT.match(self._source, self._at)
        if found is None or not (found[1] or found[3]):
            self._fail("a repetition is written {2}, {2,}, {,5} or {2,5}")
        low = int(found[1] or 0)
        high = int(found[3]) if found[3] else None if found[2] else low
        if high is not None and high < low:
            self._fail(f"the repetition's most, {high}, is less than its least, {low}")
        self._at = found.end()
        self._skip()
        return low, high

    def _literal(self) -> Expression:
        start = self._at
        self._at += 1
        written = ""
        while self._peek('"', start, "string") != '"':
            written += self._char()
        self._at += 1
        self._skip()
        return text(written)

    def _char_class(self) -> Expression:
        start = self._at
        self._at += 1
        negated = self._take("^", spaces=False)
        ranges: list[tuple[int, int]] = []
        while self._peek("]", start, "character class") != "]":
            at = self._at
            low = high = ord(self._char())
            if self._source.startswith("-", self._at) and not self._source.startswith("-]", self._at):
                self._at += 1
                self._peek("]", start, "character class")
                high = ord(self._char())
            if high < low:
                self._fail("the range ends before it begins", at)
            ranges.append((low, high))
        self._at += 1
        self._skip()
        if not ranges and not negated:
            self._fail("this character class is empty", start)
        return chars(complement(normal_ranges(ranges)) if negated else ranges)

    def _char(self) -> str:
        start = self._at
        char = self._source[start]
        self._at += 1
        if char != "\\":
            return char
        kind = self._source[self._at : self._at + 1]
        self._at += 1
        if kind in _HEX:
            digits = self._source[self._at : self._at + _HEX[kind]]
            self._at += _HEX[kind]
            if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) < _HEX[kind]:
                self._fail(f"\\{kind} is followed by {_HEX[kind]} hexadecimal digits", start)
            point = int(digits, 16)
            if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
                self._fail(f"there is no character {point:#x}", start)
            return chr(point)
        if kind not in _ESCAPES or not kind:
            self._fail(f"the escape \\{kind} is not known", start)
        return _ESCAPES[kind]

    # --- positions --------------------------------------------------------------------------------

    def _name(self) -> str | None:
        found = _NAME.match(self._source, self._at)
        if found is None:
            return None
        self._at = found.end()
        self._skip()
        return found[0]

    def _take(self, expected: str, *, spaces: bool = True) -> bool:
        if not self._source.startswith(expected, self._at):
            return False
        self._at += len(expected)
        if spaces:
            self._skip()
        return True

    def _peek(self, closing: str, start: int, what: str) -> str:
        char = self._source[self._at : self._at + 1]
        if not char or char == "\n":
            self._fail(f"this {what} is not closed by {closing}", start)
        return char

    def _skip(self) -> None:
        found = _SPACE.match(self._source, self._at)
        assert found is not None
        self._at = found.end()

    def _fail(self, why: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line = self._source.count("\n", 0, at) + 1
        column = at - self._source.rfind("\n", 0, at)
        raise InvalidConstraint(f"The grammar, line {line}, column {column}: {why}.", field="ebnf")
