"""The formats in which models write tool calls, and which of them a chat template uses.

A format is data. The modules that constrain, parse and prompt for calls (`grammar`, `parser`, `prompt`)
contain no special case for any format.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, replace

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls: the texts around the calls of a turn.

    ``begin + call[0] + name + call[1] + arguments + call[2] + separator + call[0] + … + end``
    """

    name: str
    trigger: str
    """The first characters of ``begin + call[0]``. Calls begin where the output contains this text."""
    call: tuple[str, str, str]
    """The texts before a call's name, between the name and the arguments (JSON), and after the arguments."""
    begin: str = ""
    separator: str | None = None
    """The text between two calls of a turn. None: a turn has at most one call."""
    end: str = ""
    control: bool = False
    """The trigger is a special token of the tokenizer, which a grammar over text cannot produce."""
    resume: str = ""
    """The text between the end of the reasoning and a call or the content: a message of its own."""
    answer: str = ""
    """The text that begins the content, if calls and content are told apart by how they begin."""
    also: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Other texts, in place of those of `call`, before a call's name, and between it and the arguments."""
    words: tuple[str, str] | None = None
    """The texts around content before a call, if that is a message of its own; `resume` follows."""
    shown: str = ""
    """The texts around the name in past calls, where templates do not write them as the model does: `shown`,
    the name, `between`."""
    between: str = ""
    id_prefix: str = "call_"
    id_length: int = 24
    """Letters and digits in a call's id after the prefix."""
    instructions: str = ""
    """Instructions for the model, for templates without tools. ``$tools`` is replaced by the tools, one a
    line."""
    result: tuple[str, str] = ("", "")
    """The texts around a tool's result, which is sent as a user turn; for templates without tools."""

    @property
    def native(self) -> bool:
        """The chat template itself renders tools, calls and results."""
        return not self.instructions

    @property
    def opening(self) -> str:
        """The text from the trigger to the first call's name."""
        return self.begin + self.call[0]

    def new_id(self) -> str:
        """A new id for a call."""
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

MISTRAL_SPACED = replace(MISTRAL, name="mistral-spaced", begin="[TOOL_CALLS] [")
"""Mistral with a SentencePiece tokenizer (7B v0.3, 8x22B, Large 2407)."""

GENERIC = replace(
    HERMES,
    name="generic",
    instructions=(
        "You can call functions. Each is described by a line of JSON:\n$tools\n"
        "To call a function, write its name and its arguments as JSON between tags, like this:\n"
        '<tool_call>\n{"name": "example", "arguments": {"key": "value"}}\n</tool_call>\n'
        "Write nothing after a call. Its result comes in the next turn, between <tool_response> and "
        "</tool_response>."
    ),
    result=("<tool_response>\n", "\n</tool_response>"),
)
"""The format for chat templates that render no tools, or render them in another format: calls as Hermes
writes them."""

HARMONY = ToolFormat(
    name="harmony",
    trigger="<|channel|>commentary to=functions.",
    call=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
    control=True,
    resume="<|start|>assistant",
    answer="<|channel|>final<|message|>",
    also=(
        (" to=functions.",),
        ("<|channel|>commentary json<|message|>", "<|channel|>commentary <|constrain|>json<|message|>"),
    ),
    words=("<|channel|>commentary<|message|>", "<|end|>"),
    shown="<|start|>assistant to=functions.",
    between="<|channel|>commentary json<|message|>",
)
"""gpt-oss (https://cookbook.openai.com/articles/openai-harmony): messages in channels. The recipient of a
call stands behind the channel's name, or before the channel. A call ends with the stop token ``<|call|>``, so
a turn has one."""

FORMATS: dict[str, ToolFormat] = {
    row.name: row for row in (HERMES, LLAMA3, MISTRAL, MISTRAL_SPACED, HARMONY, GENERIC)
}


def format_in(conversation: str, name: str) -> ToolFormat:
    """The format of the call of `name` in a rendered `conversation`; `GENERIC` if it is in none of the
    others."""
    for row in FORMATS.values():
        written = ((row.opening, row.call[1]), (row.shown, row.between))
        if row.native and any(before + name + after in conversation for before, after in written if before):
            return row
    return GENERIC
