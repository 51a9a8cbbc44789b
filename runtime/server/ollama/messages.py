"""Parses chats of Ollama's API: messages or a prompt, the format of the answer, and whether to think."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any, Literal

import msgspec

from ramify import constraint
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, ToolCall
from ramify.model_info import ChatFormat
from ramify.runtime.server.fields import Fields, decode
from ramify.runtime.server.openai.chat import Dialect
from ramify.runtime.server.openai.chat_turns import take_content, take_role
from ramify.runtime.server.openai.reasoning import ReasoningUse, take_reasoning
from ramify.runtime.server.openai.tools import ToolUse, take_tools
from ramify.runtime.server.params import FieldConstraint, make_constraint
from ramify.runtime.server.tables import ollama as tables
from ramify.text import quoted
from ramify.tool_calls.formats import ToolFormat

Think = bool | Literal["low", "medium", "high"]


def take_messages(fields: Fields, chat_format: ChatFormat) -> tuple[ChatMessage, ...]:
    """Take the messages from the field ``messages``."""
    messages: list[ChatMessage] = []
    open_calls = _OpenCalls()
    calls = 0
    for item in fields.take_objects("messages") or ():
        role = take_role(item, chat_format)
        content = take_content(item, "content", ("text",), required=False)
        match role:
            case "assistant":
                made = tuple(
                    _take_call(call, calls + index)
                    for index, call in enumerate(item.take_objects("tool_calls") or ())
                )
                calls += len(made)
                for call in made:
                    open_calls.add(call)
                reasoning: str = item.take("thinking", str, "")
                message = ChatMessage(role=role, content=content, tool_calls=made, reasoning=reasoning)
            case "tool":
                call = _take_answered(item, open_calls)
                message = ChatMessage(role=role, content=content, tool_call_id=call.id, name=call.name)
            case _:
                message = ChatMessage(role=role, content=content)
        item.finish(tables.MESSAGE)
        messages.append(message)
    return tuple(messages)


def take_prompt(fields: Fields, chat_format: ChatFormat) -> tuple[ChatMessage, ...]:
    """Take the messages from the fields ``system`` and ``prompt``."""
    system: str = fields.take("system", str, "")
    user = ChatMessage(role="user", content=fields.take("prompt", str, ""))
    return (ChatMessage(role="system", content=system), user) if system else (user,)


def take_format(fields: Fields) -> FieldConstraint | None:
    """Take the constraint in ``format``: "json" or a JSON schema; None if there is none."""
    text = fields.take_text("format")
    path = fields.path("format")
    match None if text is None else decode(msgspec.Raw(text.encode()), Any, path):
        case None | "":
            return None
        case "json":
            return path, constraint.json_object()
        case dict():
            return path, make_constraint(path, constraint.json_schema, text)
    raise InvalidRequest(f'{path} must be "json" or a JSON schema.', field=path)


def take_functions(fields: Fields, tool_format: ToolFormat) -> ToolUse | None:
    """Take the tools of the request; None if it has none. This API has no custom tools: the arguments of its
    calls are objects."""
    for item in fields.take_objects("tools") or ():
        kind: str = item.take("type", str, "function")
        if kind != "function":
            path = item.path("type")
            raise UnsupportedField(f"{path} is {quoted(kind)}; only functions are supported.", field=path)
    return take_tools(fields, tool_format, nested=True)


def take_think(fields: Fields, chat_format: ChatFormat) -> ReasoningUse:
    """Take ``think``. A model that can think does so unless it is false, as on Ollama."""
    think: Think = fields.take("think", Think, True)
    field = "enable_thinking" if isinstance(think, bool) else "reasoning_effort"
    inner = Fields({field: msgspec.Raw(msgspec.json.encode(think))})
    use = take_reasoning(inner, chat_format)
    if inner.ignored and fields.given("think"):
        fields.ignore({"think": None})
    return use


CHAT = Dialect(
    turns="messages",
    take_turns=take_messages,
    take_format=take_format,
    take_tools=take_functions,
    take_reasoning=take_think,
)
GENERATE = Dialect(
    turns="prompt",
    take_turns=take_prompt,
    take_format=take_format,
    take_tools=lambda fields, tool_format: None,
    take_reasoning=take_think,
)


def _take_call(item: Fields, number: int) -> ToolCall:
    """The call in `item`. A call without an id gets one of its `number` in the conversation, so that the
    prompt of the next request begins alike. Templates of Mistral's models demand ids of nine characters."""
    call_id: str = item.take("id", str) or f"{number:09}"
    function = item.take_object("function") or Fields({}, item.path("function"), item.body)
    name = function.need("name")
    arguments = function.take_text("arguments") or "{}"
    decode(msgspec.Raw(arguments.encode()), dict[str, Any], function.path("arguments"))
    function.finish(tables.CALL_FUNCTION)
    item.take("type", Literal["function"])
    item.finish(tables.CALL)
    return ToolCall(id=call_id, name=name, arguments=arguments)


class _OpenCalls:
    """The calls without a result so far."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str, str], deque[tuple[int, ToolCall]]] = defaultdict(deque)
        """(id or "", name or "") → the calls with these, numbered. Answered ones may still be there."""
        self._open: set[int] = set()
        self._count = 0

    def add(self, call: ToolCall) -> None:
        self._open.add(self._count)
        for key in itertools.product((call.id, ""), (call.name, "")):
            self._queues[key].append((self._count, call))
        self._count += 1

    def take(self, call_id: str, name: str) -> ToolCall | None:
        """The first open call with this id and name ("" for any), which is open no more; None if there is
        none."""
        queue = self._queues.get((call_id, name))
        while queue:
            number, call = queue.popleft()
            if number in self._open:
                self._open.remove(number)
                return call
        return None


def _take_answered(item: Fields, open_calls: _OpenCalls) -> ToolCall:
    """The call whose result is in `item`, taken out of `open_calls`.

    It is named by ``tool_call_id`` or ``tool_name``. Without both it is the first one: Ollama's own client
    drops the ids.
    """
    given = {field: item.take(field, str, "") for field in ("tool_call_id", "tool_name", "name")}
    call = open_calls.take(given["tool_call_id"], given["tool_name"] or given["name"])
    if call is None:
        path = item.path(next((field for field, value in given.items() if value), "role"))
        raise InvalidRequest(f"{path}: no call before it waits for this result.", field=path)
    return call
