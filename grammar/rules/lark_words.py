"""The words of a grammar in Lark's notation: names, literals, patterns, signs and line ends."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_WORD = re.compile(
    r"""(?P<blank>[ \t\r]+|(?:\#|//)[^\n]*)
    | (?P<literal>"(?:\\.|[^"\\\n])*"i?)
    | (?P<pattern>/(?:\\.|[^/\\])+/[imslux]*)
    | (?P<json>%(?:json|regex|llguidance)\b)
    | (?P<statement>%[a-z]+)
    | (?P<name>[!?]*_?[A-Za-z][\w-]*)
    | (?P<number>[+-]?[0-9]+)
    | (?P<line>\n\s*)
    | (?P<sign>->|\.\.|::|[^\n])""",
    re.VERBOSE,
)


class LarkWord(NamedTuple):
    kind: str
    text: str
    at: int
    """Its first character's index in the grammar."""


def lark_words(grammar: str) -> list[LarkWord]:
    """The words of `grammar` between two line ends, without comments. Raises `ValueError` if a JSON value
    after %json, %regex or %llguidance is invalid."""
    found = [LarkWord("line", "\n", 0)]
    at = 0
    while at < len(grammar):
        match = _WORD.match(grammar, at)
        assert match is not None
        assert match.lastgroup is not None
        end = match.end()
        if match.lastgroup == "json":
            end = len(grammar) - len(grammar[end:].lstrip())
            end = json.JSONDecoder(strict=False).raw_decode(grammar, end)[1]
        if match.lastgroup != "blank":
            found.append(LarkWord(match.lastgroup, match[0], at))
        at = end
    return [*found, LarkWord("line", "\n", at)]
