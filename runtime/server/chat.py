"""A chat request, understood: its messages, its tools, its reasoning, and the constraint on its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint, InvalidRequest, UnsupportedField
from ramify.messages import ChatFormat, ChatMessage, Preamble, ToolCall
from ramify.runtime.server.fields import Fields, decode
from ramify.runtime.server.output_format import Found, take_output_format
from ramify.runtime.server.reasoning import take_reasoning
from ramify.runtime.server.tools import ToolUse, take_tools
from ramify.runtime.server.turn import TurnForm
from ramify.tool_calls.formats import FORMATS
from ramify.tool_calls.grammar import tools_json
from ramify.tool_calls.prompt import plain_turns

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_UNSUPPORTED_MESSAGE = {
    "name": "",
    "function_call": "Use tool_calls.",
    "refusal": "",
    "audio": "",
    "annotations": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a chat request is about. `tools` and `template_kwargs` are JSON text for the chat template."""

    messages: tuple[ChatMessage, ...]
    tools: str
    template_kwargs: str
    preambles: tuple[Preamble, ...]
    constraint: Constraint | None
    form: TurnForm
    """How to read the answer."""
    found: Found | None
    tool_use: ToolUse | None

    def explain(self, error: InvalidConstraint) -> None:
        """Let an error in the constraint name the field that the client wrote it in."""
        if self.tool_use is not None:
            self.tool_use.explain(error)
        if self.found is not None and not (error.field or "").startswith("tools["):
            error.field = self.found[0]
            if self.constraint != self.found[1] and error.pointer:
                # In one grammar with the calls: the content is the second alternative.
                error.pointer = error.pointer.removeprefix("/format/elements/1/json_schema")


def take_chat(fields: Fields, chat_format: ChatFormat | None) -> Chat:
    """The chat in `fields`; raises `InvalidRequest` that names the field."""
    if chat_format is None:
        raise InvalidRequest(
            "The model has no chat template.", field="messages", remedy="Use /v1/completions."
        )
    form = FORMATS[chat_format.tool_format]
    messages = _take_messages(fields, chat_format)
    use = take_tools(fields, form)
    reasoning = take_reasoning(fields, chat_format)
    found = take_output_format(fields)
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
        form=TurnForm(
            reasoning_end=reasoning.preamble.end if reasoning.preamble and reasoning.apart else None,
            show_reasoning=reasoning.shown,
            tools=form if calls else None,
        ),
        found=found,
        tool_use=use if calls else None,
    )


def _take_messages(fields: Fields, chat_format: ChatFormat) -> tuple[ChatMessage, ...]:
    items = fields.take_objects("messages")
    if not items:
        raise InvalidRequest("messages is missing or empty.", field="messages")
    messages: list[ChatMessage] = []
    for item in items:
        role: str = item.take("role", str, "")
        path = item.path("role")
        if not role:
            raise InvalidRequest(f"{path} is missing.", field=path)
        if role not in _ROLES and role not in chat_format.suffix:
            known = ", ".join(sorted(_ROLES.keys() | chat_format.suffix.keys()))
            raise UnsupportedField(f"{path} is {role!r}; this model knows {known}.", field=path)
        match role:
            case "assistant":
                message = _take_answer(item)
            case "tool":
                message = _take_result(item, messages)
            case _:
                message = ChatMessage(role=_ROLES.get(role, role), content=_take_content(item))
        item.refuse_rest(_UNSUPPORTED_MESSAGE)
        messages.append(message)
    return tuple(messages)


def _take_answer(item: Fields) -> ChatMessage:
    """An assistant turn: content, calls, or both."""
    calls = tuple(map(_take_call, item.take_objects("tool_calls") or ()))
    reasoning: str = item.take("reasoning_content", str, "")
    content = _take_content(item, required=not calls)
    return ChatMessage(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def _take_call(item: Fields) -> ToolCall:
    kind: str | None = item.take("type", str, "function")
    if kind != "function":
        raise UnsupportedField(
            f"{item.path('type')} is {kind!r}; only functions are supported.", field=item.path("type")
        )
    call_id: str = item.take("id", str, "")
    function = item.take_object("function")
    name: str = "" if function is None else function.take("name", str, "")
    if function is None or not name or not call_id:
        missing = item.path("id") if not call_id else item.path("function.name")
        raise InvalidRequest(f"{missing} is missing.", field=missing)
    arguments: str = function.take("arguments", str, "{}")
    path = function.path("arguments")
    decode(msgspec.Raw(arguments.encode()), dict[str, Any], path)
    function.refuse_rest()
    item.take("index", int)  # what a client puts together from a stream has it
    item.refuse_rest()
    return ToolCall(id=call_id, name=name, arguments=arguments)


def _take_result(item: Fields, before: Sequence[ChatMessage]) -> ChatMessage:
    """A tool turn: the result of a call of the assistant turn before it."""
    path = item.path("tool_call_id")
    call_id: str = item.take("tool_call_id", str, "")
    if not call_id:
        raise InvalidRequest(f"{path} is missing.", field=path)
    called = {call.id: call.name for message in before for call in message.tool_calls}
    if call_id not in called:
        raise InvalidRequest(f"{path} is {call_id!r}, which no call before it has as its id.", field=path)
    name: str = item.take("name", str, called[call_id])
    return ChatMessage(role="tool", content=_take_content(item), tool_call_id=call_id, name=name)


def _take_content(message: Fields, *, required: bool = True) -> str:
    path = message.path("content")
    value: str | list[msgspec.Raw] | None = message.take("content", str | list[msgspec.Raw])
    if value is None:
        if required:
            raise InvalidRequest(f"{path} is missing.", field=path)
        return ""
    if isinstance(value, str):
        return value
    texts = []
    for part in message.take_objects("content") or []:
        kind: str | None = part.take("type", str)
        if kind != "text":
            raise UnsupportedField(
                f"{part.path('type')} is {kind!r}; only text parts are supported.", field=part.path("type")
            )
        text: str | None = part.take("text", str)
        if text is None:
            raise InvalidRequest(f"{part.path('text')} is missing.", field=part.path("text"))
        part.refuse_rest()
        texts.append(text)
    return "".join(texts)
