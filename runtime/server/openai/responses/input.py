"""Parses the instructions and input items of the Responses API.

In that API the reasoning, the message and the calls of an assistant turn are separate items. Here they become
one message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, ToolCall
from ramify.model_info import ChatFormat
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.chat_turns import take_arguments, take_content, take_role
from ramify.runtime.server.openai.responses.store import Storage
from ramify.runtime.server.openai.responses.writer import unsealed
from ramify.runtime.server.openai.tools import ToolName
from ramify.runtime.server.tables.responses import INPUT_PART, ITEM
from ramify.text import quoted
from ramify.tool_calls.text import text_arguments

_TAKE_TEXT = partial(take_content, kinds=("input_text", "output_text", "text"))

_REMEDIES = {
    "compaction": "Only the server that wrote it can read it. Send the items that it stands for.",
}
_SERVER_CALLS = {
    "apply_patch_call": ("apply_patch", "operation"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
}
"""Type of an item → the name of the tool, and the field with its arguments. The model sees such a call as
the call of a function."""
_SERVER_RESULTS = {
    "apply_patch_call_output": "call_id",
    "local_shell_call_output": "id",
    "shell_call_output": "call_id",
}
"""Type of an item → the field with the id of its call."""
_LEFT_OUT = frozenset(
    {
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types of items that another server's tools have written. They are not in the prompt."""


def take_input(
    fields: Fields, chat_format: ChatFormat, storage: Storage | None = None
) -> tuple[ChatMessage, ...]:
    """Take the messages from ``instructions``, the stored items that `storage` has, and ``input``."""
    turns = TurnBuilder()
    instructions: str = fields.take("instructions", str, "")
    if instructions:
        turns.add_turn(ChatMessage(role="system", content=instructions))
    text_or_items = fields.take("input", str | list[msgspec.Raw])
    history = [] if storage is None else storage.history(fields)
    if not text_or_items and not history:
        raise InvalidRequest("input is missing or empty.", field="input")
    for item in history:
        _take_whole_item(item, turns, chat_format)
    if isinstance(text_or_items, str):
        turns.add_turn(ChatMessage(role="user", content=text_or_items))
    else:
        take_items(fields, "input", turns, chat_format, storage)
    if storage is not None:
        storage.additional_tools = turns.additional_tools
    if not (messages := turns.finish()):
        raise InvalidRequest("input has no item that is shown to the model.", field="input")
    return messages


def take_items(
    fields: Fields, field: str, turns: TurnBuilder, chat_format: ChatFormat, storage: Storage | None
) -> None:
    """Take the items in `field`, and add them to `turns`. References are resolved by `storage`."""
    for item in fields.take_objects(field) or ():
        _take_whole_item(item if storage is None else storage.resolved(item), turns, chat_format)


def _take_whole_item(item: Fields, turns: TurnBuilder, chat_format: ChatFormat) -> None:
    kind: str = item.take("type", str, "message")
    if kind in _LEFT_OUT:
        item.leave_out(f"input[{kind}]")
        return
    take_item(item, kind, turns, chat_format)
    item.finish(ITEM)


class TurnBuilder:
    """The messages of items, which are added in order.

    take_text : function that takes the text of an item from one of its fields
    """

    def __init__(self, take_text: Callable[[Fields, str], str] = _TAKE_TEXT) -> None:
        self.take_text = take_text
        self._turns: list[ChatMessage] = []
        self._open: ChatMessage | None = None
        """The assistant message that the next item may be added to, without its calls; None if there is
        none."""
        self._calls: list[ToolCall] = []
        """The calls of the open message."""
        self.called: dict[str, str] = {}
        """Id of each call so far → name of its tool."""
        self.additional_tools: list[list[Fields]] = []
        """The tools of each item of type additional_tools, which `take_response_tools` takes."""

    def add_reasoning(self, reasoning: str) -> None:
        self._close()
        if reasoning:
            self._open = ChatMessage(role="assistant", content="", reasoning=reasoning)

    def add_content(self, content: str) -> None:
        if self._assistant.content or self._calls:
            self._close()
        self._open = msgspec.structs.replace(self._assistant, content=content)

    def add_call(self, call: ToolCall) -> None:
        self._open = self._assistant
        self._calls.append(call)
        self.called[call.id] = call.name

    def add_result(self, call_id: str, name: str, content: str) -> None:
        """Add the result of a call. The call may be missing: agents that shorten a conversation drop
        calls."""
        name = name or self.called.get(call_id, "")
        self.add_turn(ChatMessage(role="tool", content=content, tool_call_id=call_id, name=name))

    def add_turn(self, turn: ChatMessage) -> None:
        self._close()
        self._turns.append(turn)

    def finish(self) -> tuple[ChatMessage, ...]:
        """Close the open message. Returns all messages."""
        self._close()
        return tuple(self._turns)

    @property
    def _assistant(self) -> ChatMessage:
        return self._open or ChatMessage(role="assistant", content="")

    def _close(self) -> None:
        if self._open is not None:
            self._turns.append(msgspec.structs.replace(self._open, tool_calls=tuple(self._calls)))
            self._open, self._calls = None, []


def take_item(item: Fields, kind: str, turns: TurnBuilder, chat_format: ChatFormat) -> None:
    """Take an item of the type `kind`, and add it to `turns`."""
    item.take("id", str)
    item.take("status", Literal["in_progress", "completed", "incomplete", "failed"])
    match kind:
        case "message":
            role = take_role(item, chat_format)
            if role == "tool":
                path = item.path("role")
                raise UnsupportedField(
                    f"{path} is 'tool'.", field=path, remedy="Write an item of type function_call_output."
                )
            content = turns.take_text(item, "content")
            if role == "assistant":
                turns.add_content(content)
            else:
                turns.add_turn(ChatMessage(role=role, content=content))
        case "reasoning":
            turns.add_reasoning(_take_reasoning(item))
        case "function_call":
            call_id, name = item.need("call_id"), _take_name(item, item.need("name"))
            turns.add_call(ToolCall(id=call_id, name=name, arguments=take_arguments(item)))
        case "custom_tool_call":
            call_id, name = item.need("call_id"), _take_name(item, item.need("name"))
            arguments = text_arguments(item.take("input", str, ""))
            turns.add_call(ToolCall(id=call_id, name=name, arguments=arguments))
        case "function_call_output" | "custom_tool_call_output":
            call_id, name = item.take("call_id", str, ""), _take_name(item, item.take("name", str, ""))
            turns.add_result(call_id, name, turns.take_text(item, "output"))
        case "agent_message":
            turns.add_turn(_take_agent_message(item))
        case "additional_tools":
            item.take("role", Literal["developer"])
            turns.additional_tools.append(item.take_objects("tools") or [])
        case _ if kind in _SERVER_CALLS:
            name, field = _SERVER_CALLS[kind]
            call_id = item.need("call_id")
            item.take_object(field)
            turns.add_call(ToolCall(id=call_id, name=name, arguments=item.take_text(field) or "{}"))
        case _ if kind in _SERVER_RESULTS:
            call_id = item.need(_SERVER_RESULTS[kind])
            turns.add_result(call_id, "", item.take_json("output") or "")
        case _:
            path = item.path("type")
            known = "message, reasoning, function_call, custom_tool_call and their outputs"
            raise UnsupportedField(
                f"{path} is {quoted(kind)}; only {known} are supported.",
                field=path,
                remedy=_REMEDIES.get(kind),
            )


def _take_name(item: Fields, name: str) -> str:
    """The name by which the model knows the tool `name` of a call; "" if `name` is empty."""
    namespace: str | None = item.take("namespace", str)
    return ToolName(name, namespace or None).shown if name else ""


def _take_agent_message(item: Fields) -> ChatMessage:
    """The message of another agent of the client, which becomes a user turn."""
    author, recipient = item.take("author", str, ""), item.take("recipient", str, "")
    texts = []
    for part in item.take_objects("content") or ():
        if part.take("type", str) != "encrypted_content":
            texts.append(part.take("text", str, ""))
        part.finish(INPUT_PART)
    return ChatMessage(role="user", content=f"[{author} to {recipient}]\n" + "".join(texts))


def _take_reasoning(item: Fields) -> str:
    """The text of a reasoning item: its content; without content, the text in its encrypted_content; without
    both, its summary. The encrypted_content of another server is ignored: a client may change its server in
    the middle of a conversation."""
    content = take_content(item, "content", ("reasoning_text", "text"), required=False)
    summary = take_content(item, "summary", ("summary_text",), required=False)
    encrypted: str = item.take("encrypted_content", str, "")
    reasoning = unsealed(encrypted) if encrypted else None
    if encrypted and reasoning is None:
        item.ignore({"encrypted_content": None})
    return content or reasoning or summary
