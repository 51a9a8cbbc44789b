"""Sets of characters in regular expressions: ``\\d``, ``\\w``, ``\\s``, Unicode properties, both cases."""

from __future__ import annotations

import sys
from array import array
from functools import cache

from ramify.grammar.rules.expression import Ranges, complement, normal_ranges, ranges_of

DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ranges_of(
    "\t\n\v\f\r \xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
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
    """All pairs of a character and its other case. Characters whose other case has several characters are
    left out."""
    pairs = []
    for point in range(sys.maxunicode + 1):
        for other in {chr(point).lower(), chr(point).upper()}:
            if len(other) == 1 and ord(other) != point:
                pairs.append((point, ord(other)))
    return pairs


@cache
def character_property(name: str) -> Ranges:
    r"""The characters of ``\p{name}`` by the tables of the `regex` package; empty for an unknown name.

    Known are general categories ("L", "Letter", "gc=Lu"), scripts ("Script=Greek", "sc=Grek", "scx=Grek") and
    binary properties ("Alphabetic", "ASCII", "Emoji"). See UTS 18, section 1.2.
    """
    import regex

    if not all(char.isascii() and (char.isalnum() or char in "_= -") for char in name):
        return ()
    try:
        runs = regex.finditer(rf"\p{{{name}}}+", _all_characters())
    except regex.error:
        return ()
    return normal_ranges((_point(run.start()), _point(run.end() - 1)) for run in runs)


@cache
def _all_characters() -> str:
    """A string of all characters in the order of their code points, without surrogates."""
    points = array("I", [*range(_SURROGATES.start), *range(_SURROGATES.stop, sys.maxunicode + 1)])
    return points.tobytes().decode(f"utf-32-{sys.byteorder[0]}e")


_SURROGATES = range(0xD800, 0xE000)


def _point(place: int) -> int:
    """The code point of the character at index `place` of `_all_characters`."""
    return place if place < _SURROGATES.start else place + len(_SURROGATES)
