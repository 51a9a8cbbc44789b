"""Parses a chat request: messages, tools, reasoning, and the constraint on the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ramify.errors import InvalidConstraint, InvalidRequest, UnsupportedField
from ramify.messages import (
    ChatMessage,
    Enforcement,
    Generate,
    Preamble,
)
from ramify.model_info import ChatFormat
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.chat_turns import take_messages
from ramify.runtime.server.openai.output_format import take_output_format
from ramify.runtime.server.openai.reasoning import ReasoningUse, channel_preambles, take_reasoning
from ramify.runtime.server.openai.tools import ToolUse, take_tools
from ramify.runtime.server.openai.turn_parser import TurnFormat
from ramify.runtime.server.params import FieldConstraint
from ramify.tool_calls.formats import FORMATS, ToolFormat
from ramify.tool_calls.grammar import texts_of, tools_json
from ramify.tool_calls.prompt import plain_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The field names and parsers of one API for chats, such as chat completions or the Responses API."""

    turns: str
    """Name of the field with the messages or items."""
    take_turns: Callable[[Fields, ChatFormat], tuple[ChatMessage, ...]]
    take_format: Callable[[Fields], FieldConstraint | None]
    """Function that takes the constraint on the answer; returns None if there is no constraint."""
    take_tools: Callable[[Fields, ToolFormat], ToolUse | None]
    """Function that takes the tools and their options; returns None if the request has none."""
    take_reasoning: Callable[[Fields, ChatFormat], ReasoningUse] = take_reasoning


CHAT_COMPLETIONS = Dialect(
    turns="messages",
    take_turns=take_messages,
    take_format=take_output_format,
    take_tools=partial(take_tools, nested=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A parsed chat request."""

    request: Generate
    """The request to the frontend that answers the chat."""
    turn_format: TurnFormat
    """The format for parsing the answer."""
    found: FieldConstraint | None
    tool_use: ToolUse | None

    def explain(self, error: InvalidConstraint) -> None:
        """Replace the field of `error` by the field in which the client sent the constraint or the tool."""
        if self.tool_use is not None:
            self.tool_use.explain(error)
        if self.found is not None and not (error.field or "").startswith("tools["):
            error.field = self.found[0]
            if self.request.constraint != self.found[1] and error.pointer:
                # In the grammar, the content is one of several alternatives.
                error.pointer = error.pointer.partition("/json_schema")[2]

    def tell(self, enforcement: Enforcement) -> Enforcement:
        """`enforcement` with unenforced keywords located by tool: see `naming_tools`."""
        return enforcement if self.tool_use is None else self.tool_use.tell(enforcement)


def take_chat(fields: Fields, chat_format: ChatFormat | None, dialect: Dialect, rid: str) -> Chat:
    """Take the chat from `fields`, as a request with the id `rid`. Raises `InvalidRequest` with the field."""
    if chat_format is None:
        raise InvalidRequest(
            "The model has no chat template.", field=dialect.turns, remedy="Use /v1/completions."
        )
    tool_format = FORMATS[chat_format.tool_format]
    messages = dialect.take_turns(fields, chat_format)
    use = dialect.take_tools(fields, tool_format)
    reasoning = dialect.take_reasoning(fields, chat_format)
    found = dialect.take_format(fields)
    preambles: tuple[Preamble, ...] = () if reasoning.preamble is None else (reasoning.preamble,)
    wanted = None if found is None else found[1]
    calls = use is not None and use.mode != "none"
    marks = chat_format.thinking
    channels = marks is not None and marks.channels
    if marks is not None and channels:
        resumed = calls and bool(tool_format.answer)
        whole = found is not None or not calls or use is None or use.mode == "required"
        bound = calls or found is not None
        preambles = channel_preambles(marks, reasoning, bound=bound, resumed=resumed, whole=whole)
    if use is not None and calls:
        before, wanted = use.constrained(found, thought=bool(preambles))
        preambles += before
    shown = () if use is None else use.shown
    if not tool_format.native and (shown or any(turn.tool_calls or turn.role == "tool" for turn in messages)):
        messages = plain_turns(tool_format, shown, messages, system_role=">system" in chat_format.prefix)
        shown = ()
    return Chat(
        request=Generate(
            rid=rid,
            chat=messages,
            tools=tools_json(shown) if shown else "",
            template_kwargs=reasoning.template_kwargs,
            preambles=preambles,
            constraint=wanted,
            cut_to_fit=True,
        ),
        turn_format=TurnFormat(
            reasoning_end=reasoning.end,
            channels=channels,
            show_reasoning=reasoning.shown,
            tools=tool_format if calls else None,
            texts=frozenset() if use is None else texts_of(use.tools),
        ),
        found=found,
        tool_use=use if calls else None,
    )


def take_beginning(fields: Fields, chat: Chat) -> Chat:
    """`chat` with the beginning of its answer that the request asks for, as in vLLM.

    With ``continue_final_message`` the answer goes on where the last message ends. With
    ``add_generation_prompt: false`` the prompt ends with the last message.
    """
    prompted: bool | None = fields.take("add_generation_prompt", bool)
    continued: bool = fields.take("continue_final_message", bool, False)
    field = fields.path("continue_final_message")
    if not continued:
        return chat if prompted is not False else without_generation_prompt(chat, continued=False)
    if prompted:
        raise InvalidRequest(
            f"{field} needs add_generation_prompt: false, as the answer has begun.", field=field
        )
    if not chat.request.chat or chat.request.chat[-1].role != "assistant":
        raise InvalidRequest(f"{field} needs messages that end with one of the role assistant.", field=field)
    if chat.found is not None:
        raise UnsupportedField(
            f"{chat.found[0]} holds for a whole answer, and {field} continues one.", field=chat.found[0]
        )
    if any(preamble.apart for preamble in chat.request.preambles):
        raise UnsupportedField(
            f"Reasoning comes before the answer, and {field} continues one.",
            field=field,
            remedy="Switch reasoning off.",
        )
    return without_generation_prompt(chat, continued=True)


def without_generation_prompt(chat: Chat, *, continued: bool) -> Chat:
    """`chat`, whose prompt ends with the last message. `continued`: the answer goes on with this message."""
    variables: dict[str, Any] = msgspec.json.decode(chat.request.template_kwargs or "{}")
    variables["add_generation_prompt"] = False
    if continued:
        variables["continue_final_message"] = True
    request = msgspec.structs.replace(
        chat.request,
        template_kwargs=msgspec.json.encode(variables).decode(),
        # Reasoning begins after the generation prompt.
        preambles=tuple(preamble for preamble in chat.request.preambles if not preamble.apart),
    )
    turn_format = dataclasses.replace(chat.turn_format, reasoning_end=None)
    return dataclasses.replace(chat, request=request, turn_format=turn_format)
