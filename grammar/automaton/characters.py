"""Kinds of characters: many states can read every character of a kind (see `construction.runs`)."""

from __future__ import annotations

from ramify.grammar.rules.expression import Ranges, complement

PLAIN: Ranges = complement(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x85, 0x85), (0x2028, 0x2029)))
"""Plain characters: they need no escape in JSON strings, and the dot of a regular expression matches them."""

NOT_PLAIN = frozenset(
    chr(point) for point in range(0x3000) if not any(low <= point <= high for low, high in PLAIN)
)

KINDS = ("plain", "alphanumeric", "lower case")
"""Kinds of characters, each a subset of the one before: plain characters (`PLAIN`), ASCII letters
and digits, lower-case ASCII letters."""


def kind_lengths(text: bytes) -> tuple[int, int, int]:
    """Number of characters of `text`, once for each of `KINDS`; 255 if some character is not of that kind, or
    if there are more than 254."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return 255, 255, 255
    if not NOT_PLAIN.isdisjoint(characters):
        return 255, 255, 255
    length = min(255, len(characters))
    if not characters.isascii() or not characters.isalnum():
        return length, 255, 255
    return length, length, length if characters.isalpha() and characters.islower() else 255
