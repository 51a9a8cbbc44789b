"""Ranges of characters as sequences of byte ranges in UTF-8 (RFC 3629).

U+0080 to U+07FF is one sequence: (0xC2 to 0xDF, 0x80 to 0xBF). U+007F to U+0080 takes two: (0x7F) and (0xC2,
0x80).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from ramify.grammar.rules.expression import Ranges

Spans = tuple[tuple[int, int], ...]
"""The inclusive range of each byte of a character's UTF-8."""

_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


def disjoint(
    following: dict[tuple[int, int], list[tuple[Spans, int]]],
) -> dict[tuple[int, int], list[tuple[Spans, int]]]:
    """`following` with disjoint ranges of first bytes as keys. If any ranges overlap, all are divided into
    single bytes."""
    spans = sorted(following)
    if all(before[1] < after[0] for before, after in itertools.pairwise(spans)):
        return following
    by_byte: dict[tuple[int, int], list[tuple[Spans, int]]] = {}
    for (low, high), rest in following.items():
        for byte in range(low, high + 1):
            by_byte.setdefault((byte, byte), []).extend(rest)
    return by_byte


@lru_cache(maxsize=4096)
def spans_of(ranges: Ranges) -> tuple[Spans, ...]:
    """The UTF-8 of a set of characters, as sequences of byte ranges."""
    return tuple(spans for low, high in ranges for spans in utf8_spans(low, high))


def utf8_spans(low: int, high: int) -> Iterator[Spans]:
    """The UTF-8 of the code points `low` to `high`, as sequences of byte ranges."""
    for last in _LAST_OF_LENGTH:
        if low <= last < high:
            yield from utf8_spans(low, last)
            low = last + 1
    first, final = chr(low).encode(), chr(high).encode()
    for i in range(1, len(first)):
        # Split if the last i bytes do not take all values of their range.
        block = 1 << (6 * i)
        if low // block != high // block:
            if low % block:
                yield from utf8_spans(low, low | (block - 1))
                yield from utf8_spans((low | (block - 1)) + 1, high)
                return
            if high % block != block - 1:
                yield from utf8_spans(low, (high & ~(block - 1)) - 1)
                yield from utf8_spans(high & ~(block - 1), high)
                return
    yield tuple(zip(first, final, strict=True))
