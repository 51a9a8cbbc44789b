"""Free-text tools: one string ``input`` instead of a JSON object of arguments.

The model writes ``{"input": "…"}``, and the string inside follows the tool's own format. Clients send and
receive the decoded text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint

BEGIN, END = '{"input": "', '"}'
"""The texts of a call's arguments before and after the escaped input."""

PARAMETERS = (
    '{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],'
    '"additionalProperties":false}'
)
"""The JSON schema that the prompt shows for a free-text tool."""

_SYNTAX = {"lark": "this Lark grammar", "ebnf": "this GBNF grammar", "regex": "this regular expression"}

_WHOLE = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
"""The beginning of a JSON string's inside, without an incomplete escape and without the closing quote."""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The format of a tool's input. `constraint`, of kind lark, regex or ebnf, holds while the input is
    sampled; None allows any text. Raises `InvalidConstraint` for another kind."""

    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.constraint is not None and self.constraint.kind not in _SYNTAX:
            raise InvalidConstraint(
                f"A tool's input cannot follow a {self.constraint.kind}; it may follow lark, ebnf or regex.",
                field=self.constraint.kind,
            )

    def described(self, description: str) -> str:
        """`description` of a tool, completed by the grammar of its input."""
        if self.constraint is None:
            return description
        gap = "\n\n" if description else ""
        return (
            f"{description}{gap}The input follows {_SYNTAX[self.constraint.kind]}:\n{self.constraint.source}"
        )

    def arguments(self) -> dict[str, Any]:
        """The structural tag format of a call's arguments."""
        found = self.constraint
        content: dict[str, Any] = {"type": "any_text"}
        if found is not None and found.kind == "regex":
            content = {"type": "regex", "pattern": found.source}
        elif found is not None:
            content = {"type": "grammar" if found.kind == "ebnf" else "lark", "grammar": found.source}
        texts = ({"type": "const_string", "value": value} for value in (BEGIN, END))
        return {
            "type": "sequence",
            "elements": [next(texts), {"type": "json_string", "content": content}, next(texts)],
        }


def text_arguments(text: str) -> str:
    """The arguments of a call with the input `text`, as the model writes them."""
    return BEGIN + json.dumps(text, ensure_ascii=False)[1:-1] + END


class InputReader:
    """A reader that takes the arguments of a call piece by piece, and returns the decoded input."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        """The input that is now certain, after the pieces before."""
        self._held += text
        if not self._begun:
            if len(self._held) < len(BEGIN):
                return ""
            self._begun, self._held = True, self._held[len(BEGIN) :]
        found = _WHOLE.match(self._held)
        assert found is not None
        self._held = self._held[found.end() :]
        decoded: str = msgspec.json.decode(f'"{found[0]}"', type=str)
        return decoded
