"""Parses the messages of chat completions. The Responses API shares the functions for parts of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, ToolCall
from ramify.model_info import ChatFormat
from ramify.runtime.server.fields import Fields, decode
from ramify.runtime.server.tables.openai import CALL, CALL_FUNCTION, MESSAGE, PART
from ramify.text import quoted
from ramify.tool_calls.text import text_arguments

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text",)


def take_messages(fields: Fields, chat_format: ChatFormat) -> tuple[ChatMessage, ...]:
    """Take the messages from the field ``messages``."""
    items = fields.take_objects("messages")
    if not items:
        raise InvalidRequest("messages is missing or empty.", field="messages")
    messages: list[ChatMessage] = []
    called: dict[str, str] = {}
    for item in items:
        match role := take_role(item, chat_format):
            case "assistant":
                message = _take_assistant(item)
                called.update((call.id, call.name) for call in message.tool_calls)
            case "tool":
                message = _take_result(item, called)
            case _:
                message = ChatMessage(role=role, content=take_content(item, "content", _TEXT_PARTS))
        item.finish(MESSAGE)
        messages.append(message)
    return tuple(messages)


def take_role(item: Fields, chat_format: ChatFormat) -> str:
    """The role of a message, under its name in chat templates."""
    role: str = item.need("role")
    if role not in _ROLES and role not in chat_format.suffix:
        path = item.path("role")
        known = ", ".join(sorted(_ROLES.keys() | chat_format.suffix.keys()))
        raise UnsupportedField(f"{path} is {role!r}; this model knows {known}.", field=path)
    return _ROLES.get(role, role)


def take_content(item: Fields, field: str, kinds: Sequence[str], *, required: bool = True) -> str:
    """The text in `field`: a string, or a list of text parts whose types are in `kinds`."""
    path = item.path(field)
    value: str | list[msgspec.Raw] | None = item.take(field, str | list[msgspec.Raw])
    if value is None:
        if required:
            raise InvalidRequest(f"{path} is missing.", field=path)
        return ""
    if isinstance(value, str):
        return value
    texts = []
    for part in item.take_objects(field) or []:
        kind: str | None = part.take("type", str)
        if kind not in kinds:
            raise UnsupportedField(
                f"{part.path('type')} is {kind!r}; only {' and '.join(kinds)} parts are supported.",
                field=part.path("type"),
            )
        text: str | None = part.take("text", str)
        if text is None:
            raise InvalidRequest(f"{part.path('text')} is missing.", field=part.path("text"))
        if kind == "output_text":
            part.take("logprobs", list[Any])  # a client may send back an item as it received it
        part.finish(PART)
        texts.append(text)
    return "".join(texts)


def take_arguments(function: Fields) -> str:
    """The arguments of a call: JSON text of an object. Some clients write "" for a call without arguments."""
    arguments: str = function.take("arguments", str, "").strip() or "{}"
    decode(msgspec.Raw(arguments.encode()), dict[str, Any], function.path("arguments"))
    return arguments


def _take_assistant(item: Fields) -> ChatMessage:
    calls = tuple(map(_take_call, item.take_objects("tool_calls") or ()))
    # OpenRouter and newer servers call the reasoning by its shorter name.
    given = [item.take(field, str) for field in ("reasoning_content", "reasoning")]
    reasoning = next(filter(None, given), "")
    content = take_content(item, "content", _TEXT_PARTS, required=not calls)
    return ChatMessage(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def _take_result(item: Fields, called: Mapping[str, str]) -> ChatMessage:
    """The tool message in `item`. `called` maps the id of each call before it to the name of its tool."""
    call_id = item.need("tool_call_id")
    if call_id not in called and not item.body.left_out:  # the call itself may be left out
        path = item.path("tool_call_id")
        raise InvalidRequest(
            f"{path} is {quoted(call_id)}, which no call before it has as its id.", field=path
        )
    name: str = item.take("name", str, called.get(call_id, ""))
    content = take_content(item, "content", _TEXT_PARTS)
    return ChatMessage(role="tool", content=content, tool_call_id=call_id, name=name)


def _take_call(item: Fields) -> ToolCall:
    kind: str | None = item.take("type", str, "function")
    if kind not in ("function", "custom"):
        raise UnsupportedField(
            f"{item.path('type')} is {kind!r}; only functions and custom tools are supported.",
            field=item.path("type"),
        )
    call_id = item.need("id")
    inner = item.take_object(kind) or Fields({}, item.path(kind))
    custom = kind == "custom"
    arguments = text_arguments(inner.take("input", str, "")) if custom else take_arguments(inner)
    call = ToolCall(id=call_id, name=inner.need("name"), arguments=arguments)
    inner.finish(CALL_FUNCTION)
    item.finish(CALL)
    return call
