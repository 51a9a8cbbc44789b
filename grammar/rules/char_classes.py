"""Sets of characters in regular expressions: ``\\d``, ``\\w``, ``\\s``, Unicode categories, both cases."""

from __future__ import annotations

import sys
import unicodedata
from functools import cache

from ramify.grammar.rules.expression import Ranges, complement, normal_ranges

DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = normal_ranges(
    (ord(space), ord(space))
    for space in "\t\n\v\f\r \xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
CLASSES: dict[str, Ranges] = {
    "d": DIGIT,
    "w": WORD,
    "s": SPACE,
    "D": complement(DIGIT),
    "W": complement(WORD),
    "S": complement(SPACE),
}
"""The character classes of ECMA-262, by the letter of their escape."""


def both_cases(ranges: Ranges) -> Ranges:
    """The characters in `ranges`, and those that differ from one of them only in case."""
    inside = [(a, b) for a, b in _case_pairs() if _contains(ranges, a) or _contains(ranges, b)]
    return normal_ranges([*ranges, *((point, point) for pair in inside for point in pair)])


def _contains(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)


@cache
def _case_pairs() -> list[tuple[int, int]]:
    """All pairs of a character and its other case, where that is a single character."""
    pairs = []
    for point in range(sys.maxunicode + 1):
        for other in {chr(point).lower(), chr(point).upper()}:
            if len(other) == 1 and ord(other) != point:
                pairs.append((point, ord(other)))
    return pairs


@cache
def general_category(name: str) -> Ranges:
    """The characters of a Unicode general category ("L", "Lu", …); empty for an unknown one."""
    points = (
        point for point in range(sys.maxunicode + 1) if unicodedata.category(chr(point)).startswith(name)
    )
    return normal_ranges((point, point) for point in points) if 1 <= len(name) <= 2 else ()
