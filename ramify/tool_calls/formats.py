"""How models write tool calls: a table of formats, and which of them a conversation is written in.

A format is data. What constrains, reads and prompts for calls (`grammar`, `reader`, `prompt`) knows no
format by name.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The text of a turn's calls is

    ``begin + call[0] + name + call[1] + arguments + call[2] + separator + call[0] + … + end``.
    """

    name: str
    trigger: str
    """Where this stands in the output the calls begin: the first characters of ``begin + call[0]``."""
    call: tuple[str, str, str]
    """What stands before a call's name, between name and arguments (JSON), and after the arguments."""
    begin: str = ""
    separator: str | None = None
    """Between two calls of a turn; None: the format holds one call a turn."""
    end: str = ""
    control: bool = False
    """The trigger is a control token of the tokenizer: no grammar over text can write it."""
    id_prefix: str = "call_"
    id_length: int = 24
    """Of a call's id: letters and digits after the prefix."""
    instructions: str = ""
    """For templates without tools: what the model is told. ``$tools`` stands for the tools, one a line."""
    result: tuple[str, str] = ("", "")
    """For templates without tools: what stands around a tool's result in the user turn that brings it."""

    @property
    def native(self) -> bool:
        """The model's own template renders tools, calls and results."""
        return not self.instructions

    @property
    def opening(self) -> str:
        """What the first call's name comes after, from the trigger on."""
        return self.begin + self.call[0]

    def new_id(self) -> str:
        """A call's id."""
        return self.id_prefix + "".join(secrets.choice(_ALPHABET) for _ in range(self.id_length))


HERMES = ToolFormat(
    name="hermes",
    trigger="<tool_call>",
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    separator="\n",
)
"""Hermes 2 Pro and later, Qwen 2.5, Qwen 3."""

LLAMA3 = ToolFormat(
    name="llama3",
    trigger='{"name": "',
    call=('{"name": "', '", "parameters": ', "}"),
)
"""Llama 3.1, 3.2 and 3.3 with JSON calls. Their template renders one call a turn."""

MISTRAL = ToolFormat(
    name="mistral",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    call=('{"name": "', '", "arguments": ', "}"),
    separator=", ",
    end="]",
    control=True,
    id_prefix="",
    id_length=9,
)
"""Mistral with the Tekken tokenizer (Nemo, Ministral, Small 2409 and 2501)."""

MISTRAL_SPACED = ToolFormat(
    name="mistral-spaced",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS] [",
    call=('{"name": "', '", "arguments": ', "}"),
    separator=", ",
    end="]",
    control=True,
    id_prefix="",
    id_length=9,
)
"""Mistral with a SentencePiece tokenizer (7B v0.3, 8x22B, Large 2407)."""

GENERIC = ToolFormat(
    name="generic",
    trigger="<tool_call>",
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    separator="\n",
    instructions=(
        "You can call functions. Each is described by a line of JSON:\n$tools\n"
        "To call a function, write its name and its arguments as JSON between tags, like this:\n"
        '<tool_call>\n{"name": "example", "arguments": {"key": "value"}}\n</tool_call>\n'
        "Write nothing after a call. Its result comes in the next turn, between <tool_response> and "
        "</tool_response>."
    ),
    result=("<tool_response>\n", "\n</tool_response>"),
)
"""For chat templates that render no tools, or render them in a way that is none of the above."""

FORMATS: dict[str, ToolFormat] = {row.name: row for row in (HERMES, LLAMA3, MISTRAL, MISTRAL_SPACED, GENERIC)}


def format_in(conversation: str, name: str) -> ToolFormat:
    """The format in which a rendered `conversation` shows a call of `name`; `GENERIC` where in none."""
    for row in FORMATS.values():
        if row.native and row.opening + name + row.call[1] in conversation:
            return row
    return GENERIC
