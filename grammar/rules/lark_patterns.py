"""Patterns and terminals of Lark's notation, as llguidance reads them: the dialect of Rust's regex."""

from __future__ import annotations

from functools import cached_property

from ramify.grammar.rules.char_classes import DIGIT, character_property
from ramify.grammar.rules.expression import Expression, Ranges, complement, normal_ranges
from ramify.grammar.rules.regex_syntax import Parser, full_match

_FLOAT = r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": "[+-]?" + _FLOAT,
    "NUMBER": f"{_FLOAT}|[0-9]+",
    "SIGNED_NUMBER": f"[+-]?({_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"(\\.|[^"\\\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}


def common_terminal(name: str) -> Expression | None:
    """The terminal `name` of Lark's module ``common``; None if there is none."""
    return lark_pattern(_COMMON[name]) if name in _COMMON else None


def lark_pattern(pattern: str) -> Expression:
    """The texts that match `pattern`. Raises `InvalidConstraint` with the position of unsupported syntax."""
    return full_match(pattern, _RustPattern)


class _RustPattern(Parser):
    """The classes \\d, \\w and \\s are Unicode's, and a dot is anything but a line feed. Syntax that other
    dialects read otherwise is refused: lazy repetition, which ends a token early, and sets within sets."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern)
        self._dot = complement(((0x0A, 0x0A),))

    @cached_property
    def CLASSES(self) -> dict[str, Ranges]:  # type: ignore[override]
        digit = character_property("Nd") or DIGIT
        names = ("Alphabetic", "M", "Nd", "Pc", "Join_Control")
        word = normal_ranges(span for name in names for span in character_property(name))
        found = {"d": digit, "w": word, "s": character_property("White_Space")}
        return found | {name.upper(): complement(ranges) for name, ranges in found.items()}

    def _lazy(self) -> None:
        if self._peek() == "?":
            self._refuse("A lazy repetition", syntax=False)

    def _escape(self) -> Expression:
        if self._peek() in ("<", ">"):
            self._refuse(f"A word boundary (\\{self._peek()})", syntax=False)
        return super()._escape()

    def _member(self) -> Ranges:
        if self._peek() == "[" or self._pattern[self._at : self._at + 2] in ("&&", "--", "~~"):
            self._refuse("An operator or a set in a set", syntax=False)
        return super()._member()
