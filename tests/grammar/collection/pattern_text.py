"""Texts that match a regular expression, by the parse tree of Python's own `re`: no code of the grammars."""

from __future__ import annotations

import re
from collections.abc import Iterable
from random import Random
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_PRINTABLE = [chr(code) for code in range(0x20, 0x7F)] + ["é", "日"]
_CLASSES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}


def matching(pattern: str, random: Random) -> str:
    """A text in which `re.search` most often finds `pattern`; "a" for a pattern that `re` does not know.

    Assertions other than ^ and $ are not followed.
    """
    try:
        return _written(parser.parse(pattern), random, {})
    except re.error:
        return "a"


def _written(parsed: Iterable[Any], random: Random, groups: dict[int, str]) -> str:
    return "".join(_part(code, argument, random, groups) for code, argument in parsed)


def _part(code: Any, argument: Any, random: Random, groups: dict[int, str]) -> str:
    if code is op.LITERAL:
        return chr(argument)
    if code is op.NOT_LITERAL:
        return random.choice([c for c in _PRINTABLE if c != chr(argument)])
    if code is op.ANY:
        return random.choice(_PRINTABLE)
    if code is op.IN:
        return _from_class(argument, random)
    if code is op.BRANCH:
        return _written(random.choice(argument[1]), random, groups)
    if code in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        low, high, item = argument
        count = random.randint(low, min(high, low + 3))
        return "".join(_written(item, random, groups) for _ in range(count))
    if code is op.SUBPATTERN:
        number, _, _, item = argument
        groups[number] = _written(item, random, groups)
        return groups[number]
    if code is op.ATOMIC_GROUP:
        return _written(argument, random, groups)
    if code is op.GROUPREF:
        return groups.get(argument, "")
    return ""  # ^, $ and other assertions take no text


def _from_class(items: list[Any], random: Random) -> str:
    if items[0][0] is op.NEGATE:
        return random.choice([c for c in _PRINTABLE if not _is_in(c, items[1:])] or ["\n"])
    code, argument = random.choice(items)
    if code is op.LITERAL:
        # . matches \r and not \n: many \r make `re` try 2**n ways through (.|[\r\n])*
        return "\n" if argument == 13 else chr(argument)
    if code is op.RANGE:
        low, high = argument
        return chr(random.randint(low, min(high, max(low, 0x7E))))
    return random.choice([c for c in _PRINTABLE if _is_in(c, [(code, argument)])] or ["\n"])


def _is_in(char: str, items: list[Any]) -> bool:
    for code, argument in items:
        if code is op.LITERAL and chr(argument) == char:
            return True
        if code is op.RANGE and argument[0] <= ord(char) <= argument[1]:
            return True
        if code is op.CATEGORY and re.match(_CLASSES[argument], char, re.ASCII):
            return True
    return False
