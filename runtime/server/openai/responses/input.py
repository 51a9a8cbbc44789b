"""The turns of a conversation as the Responses API writes them: instructions, and items of input.

The reasoning, the message and the calls of one answer are items of their own there; here they are one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatFormat, ChatMessage, ToolCall
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.chat_turns import (
    take_arguments,
    take_content,
    take_given,
    take_result,
    take_role,
)

_TEXT_PARTS = ("input_text", "output_text")

_NEITHER = {"phase": "", "namespace": "", "caller": "", "async": ""}
"""Fields of items that OpenAI's own models write and read."""
_REMEDIES = {
    "item_reference": "Send the item itself: nothing is stored here.",
    "custom_tool_call": "Offer functions, whose calls are of type function_call.",
    "custom_tool_call_output": "Offer functions, whose results are of type function_call_output.",
}


def take_input(fields: Fields, chat_format: ChatFormat) -> tuple[ChatMessage, ...]:
    """The turns in ``instructions`` and ``input``."""
    turns = _TurnBuilder()
    instructions: str = fields.take("instructions", str, "")
    if instructions:
        turns.add(ChatMessage(role="system", content=instructions))
    text_or_items = fields.take("input", str | list[msgspec.Raw])
    if not text_or_items:
        raise InvalidRequest("input is missing or empty.", field="input")
    if isinstance(text_or_items, str):
        turns.add(ChatMessage(role="user", content=text_or_items))
    else:
        for item in fields.take_objects("input") or ():
            _take_item(item, turns, chat_format)
            item.take("id", str)
            item.take("status", Literal["in_progress", "completed", "incomplete"])
            item.refuse_rest(_NEITHER)
    return turns.close()


class _TurnBuilder:
    """Takes what items say, and makes turns of it."""

    def __init__(self) -> None:
        self._turns: list[ChatMessage] = []
        self._answer: ChatMessage | None = None
        """The assistant turn that more items may belong to."""

    @property
    def answer(self) -> ChatMessage:
        """What the next part of an answer belongs to."""
        return self._answer or ChatMessage(role="assistant", content="")

    def think(self, reasoning: str) -> None:
        if self._answer is not None:
            self.close()
        self._answer = ChatMessage(role="assistant", content="", reasoning=reasoning)

    def say(self, content: str) -> None:
        if self.answer.content or self.answer.tool_calls:
            self.close()
        self._answer = msgspec.structs.replace(self.answer, content=content)

    def call(self, call: ToolCall) -> None:
        self._answer = msgspec.structs.replace(self.answer, tool_calls=(*self.answer.tool_calls, call))

    def add(self, turn: ChatMessage) -> None:
        """A turn of somebody else."""
        self.close()
        self._turns.append(turn)

    def close(self) -> tuple[ChatMessage, ...]:
        """All turns so far; nothing more belongs to the last one."""
        if self._answer is not None:
            self._turns.append(self._answer)
            self._answer = None
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
                turns.say(content)
            else:
                turns.add(ChatMessage(role=role, content=content))
        case "reasoning":
            turns.think(_take_reasoning(item))
        case "function_call":
            call_id, name = take_given(item, "call_id"), take_given(item, "name")
            turns.call(ToolCall(id=call_id, name=name, arguments=take_arguments(item)))
        case "function_call_output":
            turns.add(take_result(item, turns.close(), "call_id", "output", _TEXT_PARTS))
        case _:
            path = item.path("type")
            known = "message, reasoning, function_call and function_call_output"
            raise UnsupportedField(
                f"{path} is {kind!r}; only {known} are supported.", field=path, remedy=_REMEDIES.get(kind)
            )


def _take_reasoning(item: Fields) -> str:
    """What an earlier turn thought: its text, as this server answers it."""
    summary: Sequence[Any] = item.take("summary", list[Any], ())
    encrypted: str = item.take("encrypted_content", str, "")
    for field, value in (("summary", summary), ("encrypted_content", encrypted)):
        if value:
            raise UnsupportedField(
                f"{item.path(field)} is not supported.",
                field=item.path(field),
                remedy="Send the reasoning itself as content, or leave the item out.",
            )
    return take_content(item, "content", ("reasoning_text",), required=False)
