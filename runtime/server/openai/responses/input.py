"""Parses the instructions and input items of the Responses API.

In that API the reasoning, the message and the calls of an assistant turn are separate items. Here they become
one message.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatFormat, ChatMessage, ToolCall
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.chat_turns import (
    take_arguments,
    take_content,
    take_result,
    take_role,
)
from ramify.runtime.server.openai.responses.writer import unsealed
from ramify.runtime.server.tables.responses import ITEM

_TEXT_PARTS = ("input_text", "output_text")

_REMEDIES = {
    "item_reference": "Send the item itself: nothing is stored here.",
    "custom_tool_call": "Offer functions, whose calls are of type function_call.",
    "custom_tool_call_output": "Offer functions, whose results are of type function_call_output.",
}


def take_input(fields: Fields, chat_format: ChatFormat) -> tuple[ChatMessage, ...]:
    """Take the messages from ``instructions`` and ``input``."""
    turns = _TurnBuilder()
    instructions: str = fields.take("instructions", str, "")
    if instructions:
        turns.add_turn(ChatMessage(role="system", content=instructions))
    text_or_items = fields.take("input", str | list[msgspec.Raw])
    if not text_or_items:
        raise InvalidRequest("input is missing or empty.", field="input")
    if isinstance(text_or_items, str):
        turns.add_turn(ChatMessage(role="user", content=text_or_items))
    else:
        for item in fields.take_objects("input") or ():
            _take_item(item, turns, chat_format)
            item.take("id", str)
            item.take("status", Literal["in_progress", "completed", "incomplete"])
            item.finish(ITEM)
    return turns.finish()


class _TurnBuilder:
    def __init__(self) -> None:
        self._turns: list[ChatMessage] = []
        self._open: ChatMessage | None = None
        """The assistant message that the next item may be added to; None if there is none."""

    @property
    def assistant(self) -> ChatMessage:
        return self._open or ChatMessage(role="assistant", content="")

    def add_reasoning(self, reasoning: str) -> None:
        if self._open is not None:
            self.finish()
        self._open = ChatMessage(role="assistant", content="", reasoning=reasoning)

    def add_content(self, content: str) -> None:
        if self.assistant.content or self.assistant.tool_calls:
            self.finish()
        self._open = msgspec.structs.replace(self.assistant, content=content)

    def add_call(self, call: ToolCall) -> None:
        self._open = msgspec.structs.replace(self.assistant, tool_calls=(*self.assistant.tool_calls, call))

    def add_turn(self, turn: ChatMessage) -> None:
        self.finish()
        self._turns.append(turn)

    def finish(self) -> tuple[ChatMessage, ...]:
        """Close the open message. Returns all messages so far."""
        if self._open is not None:
            self._turns.append(self._open)
            self._open = None
        return tuple(self._turns)


def _take_item(item: Fields, turns: _TurnBuilder, chat_format: ChatFormat) -> None:
    kind: str = item.take("type", str, "message")
    match kind:
        case "message":
            role = take_role(item, chat_format)
            if role == "tool":
                path = item.path("role")
                raise UnsupportedField(
                    f"{path} is 'tool'.", field=path, remedy="Write an item of type function_call_output."
                )
            content = take_content(item, "content", _TEXT_PARTS)
            if role == "assistant":
                turns.add_content(content)
            else:
                turns.add_turn(ChatMessage(role=role, content=content))
        case "reasoning":
            turns.add_reasoning(_take_reasoning(item))
        case "function_call":
            call_id, name = item.need("call_id"), item.need("name")
            turns.add_call(ToolCall(id=call_id, name=name, arguments=take_arguments(item)))
        case "function_call_output":
            turns.add_turn(take_result(item, turns.finish(), "call_id", "output", _TEXT_PARTS))
        case _:
            path = item.path("type")
            known = "message, reasoning, function_call and function_call_output"
            raise UnsupportedField(
                f"{path} is {kind!r}; only {known} are supported.", field=path, remedy=_REMEDIES.get(kind)
            )


def _take_reasoning(item: Fields) -> str:
    """The text of a reasoning item: its content; without content, the text in its encrypted_content; without
    both, its summary."""
    content = take_content(item, "content", ("reasoning_text",), required=False)
    summary = take_content(item, "summary", ("summary_text",), required=False)
    sealed: str = item.take("encrypted_content", str, "")
    if not sealed:
        return content or summary
    reasoning = unsealed(sealed)
    if reasoning is None:
        raise InvalidRequest(
            f"{item.path('encrypted_content')} was not written by this server.",
            field=item.path("encrypted_content"),
            remedy="Send the reasoning as content, or leave the item out.",
        )
    return content or reasoning
