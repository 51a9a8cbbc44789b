"""A chat request, understood: its messages, its tools, its reasoning, and the constraint on its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint, InvalidRequest
from ramify.messages import ChatFormat, ChatMessage, Generate, Preamble
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.chat_turns import take_messages
from ramify.runtime.server.openai.output_format import Found, take_output_format
from ramify.runtime.server.openai.reasoning import take_reasoning
from ramify.runtime.server.openai.tools import ToolUse, take_tools
from ramify.runtime.server.openai.turn_parser import TurnFormat
from ramify.tool_calls.formats import FORMATS
from ramify.tool_calls.grammar import tools_json
from ramify.tool_calls.prompt import plain_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How an API writes a chat."""

    turns: str
    """The field that the turns are in."""
    take_turns: Callable[[Fields, ChatFormat], tuple[ChatMessage, ...]]
    take_format: Callable[[Fields], Found | None]
    """Takes the constraint on the answer."""
    nested_tools: bool
    """What is said of a function lies in an object of its own, ``function``."""


CHAT_COMPLETIONS = Dialect(
    turns="messages", take_turns=take_messages, take_format=take_output_format, nested_tools=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a chat request is about. `tools` and `template_kwargs` are JSON text for the chat template."""

    messages: tuple[ChatMessage, ...]
    tools: str
    template_kwargs: str
    preambles: tuple[Preamble, ...]
    constraint: Constraint | None
    form: TurnFormat
    """How to read the answer."""
    found: Found | None
    tool_use: ToolUse | None

    def asked(self, rid: str) -> Generate:
        """The generation that answers the chat."""
        return Generate(
            rid=rid,
            chat=self.messages,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
            preambles=self.preambles,
            constraint=self.constraint,
        )

    def explain(self, error: InvalidConstraint) -> None:
        """Let an error in the constraint name the field that the client wrote it in."""
        if self.tool_use is not None:
            self.tool_use.explain(error)
        if self.found is not None and not (error.field or "").startswith("tools["):
            error.field = self.found[0]
            if self.constraint != self.found[1] and error.pointer:
                # In one grammar with the calls: the content is the second alternative.
                error.pointer = error.pointer.removeprefix("/format/elements/1/json_schema")


def take_chat(fields: Fields, chat_format: ChatFormat | None, dialect: Dialect) -> Chat:
    """The chat in `fields`; raises `InvalidRequest` that names the field."""
    if chat_format is None:
        raise InvalidRequest(
            "The model has no chat template.", field=dialect.turns, remedy="Use /v1/completions."
        )
    form = FORMATS[chat_format.tool_format]
    messages = dialect.take_turns(fields, chat_format)
    use = take_tools(fields, form, nested=dialect.nested_tools)
    reasoning = take_reasoning(fields, chat_format)
    found = dialect.take_format(fields)
    preambles: tuple[Preamble, ...] = () if reasoning.preamble is None else (reasoning.preamble,)
    wanted = None if found is None else found[1]
    calls = use is not None and use.mode != "none"
    if use is not None and calls:
        before, wanted = use.constrained(found)
        preambles += before
    shown = () if use is None else use.shown
    if not form.native and (shown or any(turn.tool_calls or turn.role == "tool" for turn in messages)):
        messages = plain_turns(form, shown, messages, system_role=">system" in chat_format.prefix)
        shown = ()
    return Chat(
        messages=messages,
        tools=tools_json(shown) if shown else "",
        template_kwargs=reasoning.template_kwargs,
        preambles=preambles,
        constraint=wanted,
        form=TurnFormat(
            reasoning_end=reasoning.preamble.end if reasoning.preamble and reasoning.apart else None,
            show_reasoning=reasoning.shown,
            tools=form if calls else None,
        ),
        found=found,
        tool_use=use if calls else None,
    )
