"""The formats in which models write tool calls, and the recognition of the format that a chat template uses.

A format is only data. The modules that constrain, parse and prompt for calls (`grammar`, `parser`, `prompt`)
contain no special cases for formats.
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
    """The first characters of ``begin + call[0]``. Where this text occurs in the output, the calls begin."""
    call: tuple[str, str, str]
    """The texts of a call: before the name, between the name and the arguments (JSON), and after the
    arguments."""
    begin: str = ""
    separator: str | None = None
    """The text between two calls of a turn. None: a turn has at most one call."""
    end: str = ""
    control: bool = False
    """Whether the trigger is a special token of the tokenizer, which a grammar over text cannot produce."""
    resume: str = ""
    """The text between the end of the reasoning and the message that follows, which is a call or the
    content."""
    answer: str = ""
    """The text that begins the content, in formats where only the beginning tells a call from content; else
    empty."""
    also: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Alternatives to `call[0]`, and alternatives to `call[1]`."""
    words: tuple[str, str] | None = None
    """The texts around content before a call, in formats where this content is a message of its own. `resume`
    follows it."""
    shown: str = ""
    """`shown` and `between`: the texts before and after the name in past calls, if chat templates render
    calls in another way than the model writes them."""
    between: str = ""
    id_prefix: str = "call_"
    id_length: int = 24
    """Number of letters and digits after the prefix in the id of a call."""
    instructions: str = ""
    """Instructions for the model, for chat templates that render no tools. ``$tools`` is replaced by the
    tools, one in a line."""
    result: tuple[str, str] = ("", "")
    """The texts around a tool's result, which becomes a user turn; for chat templates that render no
    tools."""

    @property
    def native(self) -> bool:
        """Whether the chat template itself renders tools, calls and results."""
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
"""Llama 3.1, 3.2 and 3.3 with JSON calls. Their template renders one call in a turn."""

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
"""The format for chat templates that render no tools, or that render them in a format unknown to Ramify.
Calls are written as in Hermes."""

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
call comes after the channel's name, or before the channel. A call ends with the stop token ``<|call|>``, so a
turn has at most one call."""

FORMATS: dict[str, ToolFormat] = {
    row.name: row for row in (HERMES, LLAMA3, MISTRAL, MISTRAL_SPACED, HARMONY, GENERIC)
}


def format_in(conversation: str, name: str) -> ToolFormat:
    """The format in which a rendered `conversation` has a call of `name`; `GENERIC` if none of `FORMATS`
    fits."""
    for row in FORMATS.values():
        written = ((row.opening, row.call[1]), (row.shown, row.between))
        if row.native and any(before + name + after in conversation for before, after in written if before):
            return row
    return GENERIC
