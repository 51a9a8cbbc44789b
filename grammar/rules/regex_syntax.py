"""A parser of regular expressions, in the common subset of Python's `re` and ECMA-262, into expressions.

Supported are literals, classes, groups (plain, named, non-capturing), alternation, greedy and lazy
repetition, anchors, the escapes ``\\d \\w \\s \\D \\W \\S \\t \\n \\r \\f \\v \\0 \\xhh \\uhhhh \\u{h…}
\\cX`` and ``\\p{…}`` with general categories, and a leading ``(?i)`` or ``(?s)``. Where the two dialects
differ, classes are those of ECMA-262 (``\\d`` and ``\\w`` are ASCII), ``.`` matches no line end, and ``$``
matches at the end of the text only. Lookarounds, backreferences, word boundaries and all other syntax are
refused with an error that names them.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from ramify.errors import InvalidConstraint
from ramify.grammar.rules.char_classes import CLASSES, LINE_END, both_cases, character_property
from ramify.grammar.rules.expression import (
    ANY_CHAR,
    EMPTY,
    Alt,
    Call,
    Expression,
    Ranges,
    Repeat,
    Seq,
    alt,
    chars,
    complement,
    normal_ranges,
    nullable,
    parts_of,
    repeat,
    seq,
)

MAX_NESTING = 200
MAX_REPEAT = 100_000
MAX_ANCHORED_FORMS = 64

_CONTROL = {"t": 0x09, "n": 0x0A, "r": 0x0D, "f": 0x0C, "v": 0x0B, "a": 0x07}
_GROUP_NAMES = {
    "?=": "A lookahead",
    "?!": "A negative lookahead",
    "?<=": "A lookbehind",
    "?<!": "A negative lookbehind",
    "?>": "An atomic group",
    "?(": "A conditional group",
    "?P=": "A backreference",
    "?#": "A comment",
}

# Anchors inside a parsed expression. No rule has such a name.
_START, _END = Call("^"), Call("$")


def full_match(pattern: str, dialect: type[Parser] | None = None) -> Expression:
    """The texts that match `pattern` as a whole, which is written in `dialect` (None: the common subset).

    Raises `InvalidConstraint` with the position of the unsupported syntax. The error's `remedy` is None if
    the pattern is not valid in either dialect.
    """
    return alt(*(body for _, body, _ in _anchored((dialect or Parser)(pattern).parse())))


def search(pattern: str) -> Expression:
    """The texts in which `pattern` matches somewhere, as for JSON Schema's ``pattern``. Raises as
    `full_match` does."""
    around = repeat(ANY_CHAR, 0, None)
    return alt(
        *(
            seq(EMPTY if start else around, body, EMPTY if end else around)
            for start, body, end in _anchored(Parser(pattern).parse())
        )
    )


def _anchored(expression: Expression) -> list[tuple[bool, Expression, bool]]:
    """The alternatives of `expression` as (starts with ^, body without anchors, ends with $)."""
    forms: list[tuple[bool, Expression, bool]]
    match expression:
        case Call():
            return [(expression == _START, EMPTY, expression == _END)]
        case Alt(options):
            if not _has_anchor(expression):
                return [(False, expression, False)]
            forms = [form for option in options for form in _anchored(option)]
        case Seq(parts):
            forms = [(False, EMPTY, False)]
            for part in parts:
                forms = [
                    joined
                    for left in forms
                    for right in _anchored(part)
                    if (joined := _join(left, right)) is not None
                ]
        case Repeat(item, low, high) if _has_anchor(item):
            if high != 1:
                raise InvalidConstraint("An anchor (^ or $) inside a repetition is not supported.")
            forms = _anchored(item) + ([(False, EMPTY, False)] if low == 0 else [])
        case _:
            return [(False, expression, False)]
    if len(forms) > MAX_ANCHORED_FORMS:
        raise InvalidConstraint("The pattern has too many alternatives with anchors (^ or $).")
    return forms


def _join(
    left: tuple[bool, Expression, bool], right: tuple[bool, Expression, bool]
) -> tuple[bool, Expression, bool] | None:
    """The concatenation of `left` and `right`; None if an anchor between them cannot match."""
    (start, before, left_end), (right_start, after, end) = left, right
    if left_end:
        if not nullable(after):
            return None
        after = EMPTY
    if right_start:
        if not nullable(before):
            return None
        before = EMPTY
    return start or right_start, seq(before, after), left_end or end


def _has_anchor(expression: Expression) -> bool:
    return isinstance(expression, Call) or any(map(_has_anchor, parts_of(expression)))


class Parser:
    """A parser of one pattern. Dialects override it (`lark_patterns`)."""

    CLASSES = CLASSES

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._ignore_case = False
        self._dot = complement(LINE_END)

    def parse(self) -> Expression:
        if self._pattern.startswith("(?"):
            self._flags()
        expression = self._alternatives()
        if self._at < len(self._pattern):
            self._refuse("A closing parenthesis without an opening one")
        return expression

    def _refuse(self, what: str, *, syntax: bool = True) -> NoReturn:
        verb = "is not valid" if syntax else "is not supported"
        raise InvalidConstraint(
            f"{what} {verb} (position {self._at} of the pattern).",
            remedy=None if syntax else "Write the pattern without it.",
        )

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._pattern[at] if at < len(self._pattern) else ""

    def _take(self, expected: str) -> bool:
        if self._pattern.startswith(expected, self._at):
            self._at += len(expected)
            return True
        return False

    def _flags(self) -> None:
        end = self._pattern.find(")")
        flags = self._pattern[2:end] if end > 0 else ""
        if not flags or not flags.isalpha():
            return
        if unknown := sorted(set(flags) - set("isu")):
            self._refuse(f"The flag (?{unknown[0]})", syntax=False)
        self._ignore_case = "i" in flags
        if "s" in flags:
            self._dot = ANY_CHAR.ranges
        self._at = end + 1

    def _alternatives(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._refuse(f"Nesting deeper than {MAX_NESTING} groups", syntax=False)
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return alt(*options)

    def _sequence(self) -> Expression:
        parts = []
        while self._at < len(self._pattern) and self._peek() not in "|)":
            parts.append(self._repeated(self._atom()))
        return seq(*parts)

    def _repeated(self, atom: Expression) -> Expression:
        bounds = self._quantifier()
        if bounds is None:
            return atom
        low, high = bounds
        if atom in (_START, _END):
            self._refuse("A repeated anchor")
        if high is not None and low > high:
            self._refuse(f"The repetition {{{low},{high}}}")
        if max(low, high or 0) > MAX_REPEAT:
            self._refuse(f"More than {MAX_REPEAT} repetitions", syntax=False)
        self._lazy()
        if self._peek() == "+":
            self._refuse("A possessive quantifier", syntax=False)
        if self._quantifier() is not None:
            self._refuse("A repetition of a repetition")
        return repeat(atom, low, high)

    def _lazy(self) -> None:
        self._take("?")  # lazy repetition matches the same texts

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if self._peek() != "{":
            return None
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not (_is_number(low) or (low == "" and comma and high)) or not (high == "" or _is_number(high)):
            return None  # in both dialects, a brace without a valid count is a literal
        self._at = end + 1
        first = int(low[:9] or 0)
        return first, (int(high[:9]) if high else None if comma else first)

    def _atom(self) -> Expression:
        char = self._peek()
        if char in "*+?":
            self._refuse(f"A repetition ({char}) of nothing")
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return self._set()
            case ".":
                return chars(self._dot)
            case "^":
                return _START
            case "$":
                return _END
            case "\\":
                return self._escape()
        return self._chars(((ord(char), ord(char)),))

    def _group(self) -> Expression:
        if self._peek() == "?":
            for sign in sorted(_GROUP_NAMES, key=len, reverse=True):
                if self._pattern.startswith(sign, self._at):
                    self._refuse(_GROUP_NAMES[sign], syntax=False)
            if not self._take("?:") and not self._name():
                self._refuse(f"The group ({self._pattern[self._at : self._at + 3]}", syntax=False)
        body = self._alternatives()
        if not self._take(")"):
            self._refuse("A group without its closing parenthesis")
        return body

    def _name(self) -> bool:
        for opening in ("?P<", "?<"):
            if self._take(opening):
                end = self._pattern.find(">", self._at)
                if end < 0 or not self._pattern[self._at : end].isidentifier():
                    self._refuse("This group name")
                self._at = end + 1
                return True
        return False

    def _escape(self) -> Expression:
        char = self._peek()
        if char in ("b", "B"):
            self._refuse(f"A word boundary (\\{char})", syntax=False)
        if (char.isdecimal() and char != "0") or char == "k":
            self._refuse(f"A backreference (\\{char})", syntax=False)
        if char in ("A", "Z", "z"):
            self._at += 1
            return _START if char == "A" else _END
        return self._chars(self._escaped())

    def _escaped(self) -> Ranges:
        """Parse an escape after its backslash. Returns its characters."""
        char = self._peek()
        self._at += 1
        if char in self.CLASSES:
            return self.CLASSES[char]
        if char in ("p", "P"):
            return self._property(negated=char == "P")
        point = self._escaped_point(char)
        return ((point, point),)

    def _escaped_point(self, char: str) -> int:
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "0" and not self._peek().isdecimal():
            return 0
        if char == "x":
            return self._hex(2)
        if char == "U":
            return self._hex(8)
        if char == "u":
            if self._peek() == "{":
                end = self._pattern.find("}", self._at)
                if end < 0:
                    self._refuse("An escape without its closing brace")
                self._at += 1
                point = self._hex(end - self._at)
                self._at += 1
                return point
            point = self._hex(4, surrogates=True)
            if 0xD800 <= point < 0xDC00 and self._take("\\u"):
                point = 0x10000 + ((point - 0xD800) << 10) + (self._hex(4, surrogates=True) - 0xDC00)
            if 0xD800 <= point < 0xE000 or not 0 <= point <= sys.maxunicode:
                self._refuse("Half of a surrogate pair")
            return point
        if char == "c" and self._peek().isascii() and self._peek().isalpha():
            self._at += 1
            return ord(self._pattern[self._at - 1]) & 31
        if not char or (char.isascii() and char.isalnum()):
            self._refuse(f"The escape \\{char}")
        return ord(char)

    def _hex(self, digits: int, *, surrogates: bool = False) -> int:
        written = self._pattern[self._at : self._at + digits]
        try:
            point = int(written, 16) if len(written) == digits and written.isalnum() else -1
        except ValueError:
            point = -1
        if not 0 <= point <= sys.maxunicode or (0xD800 <= point < 0xE000 and not surrogates):
            self._refuse(f"The code point {written!r}")
        self._at += digits
        return point

    def _property(self, *, negated: bool) -> Ranges:
        end = self._pattern.find("}", self._at)
        if self._peek() != "{" or end < 0:
            self._refuse("A \\p without {…}")
        name = self._pattern[self._at + 1 : end]
        ranges = character_property(name)
        if not ranges:
            self._refuse(f"The character property {name!r}", syntax=False)
        self._at = end + 1
        return complement(ranges) if negated else ranges

    def _set(self) -> Expression:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        # The dialects differ: in Python a ] right after the bracket is a member, in ECMA-262 it closes an
        # empty set.
        if self._peek() == "]":
            self._refuse("A set that is empty, or begins with ],")
        while not self._take("]"):
            if self._at >= len(self._pattern):
                self._refuse("A set without its closing bracket")
            low = self._member()
            if self._peek() == "-" and self._peek(1) not in ("]", ""):
                self._at += 1
                high = self._member()
                if not (_is_single(low) and _is_single(high)) or low[0][0] > high[0][0]:
                    self._refuse("This range in a set")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        normal = self._cased(normal_ranges(ranges))
        return chars(complement(normal) if negated else normal)

    def _member(self) -> Ranges:
        char = self._peek()
        self._at += 1
        if char == "[" and self._peek() == ":":
            self._refuse("A POSIX class ([:…:])", syntax=False)
        if char != "\\":
            return ((ord(char), ord(char)),)
        if self._take("b"):
            return ((8, 8),)
        return self._escaped()

    def _chars(self, ranges: Ranges) -> Expression:
        return chars(self._cased(ranges))

    def _cased(self, ranges: Ranges) -> Ranges:
        return both_cases(ranges) if self._ignore_case else ranges


def _is_number(digits: str) -> bool:
    return digits.isascii() and digits.isdecimal()


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
