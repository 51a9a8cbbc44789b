"""Sets of characters as bit masks: which ASCII characters they contain, and which bytes their UTF-8 begins
with."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ramify.grammar.rules.expression import Ranges, complement
from ramify.grammar.rules.utf8 import utf8_spans

PLAIN: Ranges = complement(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x85, 0x85), (0x2028, 0x2029)))
"""Plain characters: they need no escape in JSON strings, and the dot of a regular expression matches them."""

NON_ASCII: Ranges = ((0x80, 0xD7FF), (0xE000, 0x10FFFF))


class CharSet(NamedTuple):
    """`ascii`: mask of 128 bits. `high`: the ranges from U+0080 on. `first`: mask of the 256 first bytes."""

    ascii: int
    high: Ranges
    first: int


@lru_cache(maxsize=8192)
def char_set(ranges: Ranges) -> CharSet:
    ascii_mask = 0
    first = 0
    high: list[tuple[int, int]] = []
    for low, last in ranges:
        if low < 0x80:
            ascii_mask |= (1 << (min(last, 0x7F) + 1)) - (1 << low)
        if last >= 0x80:
            high.append((max(low, 0x80), last))
            for spans in utf8_spans(*high[-1]):
                first |= (1 << (spans[0][1] + 1)) - (1 << spans[0][0])
    return CharSet(ascii_mask, tuple(high), first | ascii_mask)


def first_byte(char: str) -> int:
    return char.encode()[0]
