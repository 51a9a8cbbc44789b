"""Parses the system prompt and the messages of the Messages API.

A message has blocks: text, thinking, calls, and results of calls. The blocks of an assistant become one turn
of the chat template. Those of a user become one turn for each result, then one for the text. Successive
messages of one role are one turn, as the API defines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, ToolCall
from ramify.model_info import ChatFormat
from ramify.runtime.server.anthropic.cache import CacheMarks
from ramify.runtime.server.fields import Fields, decode
from ramify.runtime.server.openai.responses.writer import unsealed
from ramify.runtime.server.tables.anthropic import BLOCK, MESSAGE, TEXT
from ramify.text import quoted

BILLING = "x-anthropic-billing-header:"
"""Beginning of a system block that Claude Code writes for the biller. Its text differs between sessions, so
that in the prompt it would cost the cache of everything behind it."""

_REMEDIES = {
    "image": "This server takes text.",
    "document": "Send its text as a block of text.",
    "search_result": "Send its text as a block of text.",
    "server_tool_use": "Leave out the calls of tools that a server has run, and their results.",
    "tool_reference": "Offer the tool itself.",
}


def take_turns(fields: Fields, chat_format: ChatFormat, marks: CacheMarks) -> tuple[ChatMessage, ...]:
    """Take the turns from ``system`` and ``messages``. If the last is an assistant's, the answer continues
    it."""
    turns = _Turns(chat_format)
    marks.take(fields)
    system = [text for text in _take_texts(fields, "system", marks) if not text.startswith(BILLING)]
    if any(system):
        turns.add_system("\n".join(system))
    items = fields.take_objects("messages")
    if not items:
        raise InvalidRequest("messages is missing or empty.", field="messages")
    roles: list[str] = [item.need("role") for item in items]
    answered = roles.index("assistant") if "assistant" in roles else len(roles)
    # Claude Code sends the same system message behind the first message of each session. As a part of the
    # system prompt it is found in the cache.
    for item, role in zip(items[:answered], roles, strict=False):
        if role == "system":
            turns.add_system("\n".join(_take_texts(item, "content", marks)))
    for place, (item, role) in enumerate(zip(items, roles, strict=True)):
        match role:
            case "system" if place < answered:
                pass
            case "user":
                _take_user(item, turns, marks)
            case "assistant":
                turns.add(_take_assistant(item, marks))
            case "system":
                turns.add_system("\n".join(_take_texts(item, "content", marks)))
            case _:
                path = item.path("role")
                raise UnsupportedField(
                    f"{path} is {quoted(role)}; it must be user, assistant or system.",
                    field=path,
                )
        item.finish(MESSAGE)
    if not (messages := turns.finish()):
        raise InvalidRequest("messages has no text.", field="messages")
    last = messages[-1]
    if last.role == "assistant" and (last.tool_calls or not last.content):
        what = "calls without results" if last.tool_calls else "no text"
        raise InvalidRequest(
            f"The last message is an assistant's with {what}, which no answer can continue.",
            field=items[-1].path("content"),
        )
    return messages


class _Turns:
    def __init__(self, chat_format: ChatFormat) -> None:
        self._parts: list[list[ChatMessage]] = []
        """The parts of each turn."""
        self._called: dict[str, str] = {}
        """Id of each call so far → name of its tool."""
        self._places = chat_format.prefix.keys()

    def add(self, turn: ChatMessage) -> None:
        """Add a turn, or append it to the last one if both have the same role. A result is always a turn."""
        self._called.update((call.id, call.name) for call in turn.tool_calls)
        if turn.role == "tool" or turn.role != self._last_role:
            self._parts.append([])
        self._parts[-1].append(turn)

    def add_system(self, text: str) -> None:
        """Add a system turn. Where the chat template shows none, the text becomes a user's."""
        before = self._last_role
        place = f"{'user' if before == 'tool' else before}>system"
        role = "system" if before == "system" or place in self._places else "user"
        self.add(ChatMessage(role=role, content=text))

    def name_of(self, call_id: str) -> str | None:
        """The name of the tool that the call `call_id` has called; None if there is no such call."""
        return self._called.get(call_id)

    def finish(self) -> tuple[ChatMessage, ...]:
        return tuple(map(_joined, self._parts))

    @property
    def _last_role(self) -> str:
        return self._parts[-1][0].role if self._parts else ""


def _joined(parts: Sequence[ChatMessage]) -> ChatMessage:
    """The turn of which `parts` are the parts."""
    between = "" if parts[0].role == "assistant" else "\n\n"
    return msgspec.structs.replace(
        parts[0],
        content=between.join(part.content for part in parts if part.content),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


def _take_user(item: Fields, turns: _Turns, marks: CacheMarks) -> None:
    texts: list[str] = []
    for block, kind in _take_blocks(item, "content"):
        match kind:
            case "text":
                texts.append(_take_text(block, marks))
            case "tool_result":
                turns.add(_take_result(block, turns, marks))
            case _:
                raise _unsupported(block, kind, ("text", "tool_result"))
    if texts:
        turns.add(ChatMessage(role="user", content="\n".join(texts)))


def _take_result(block: Fields, turns: _Turns, marks: CacheMarks) -> ChatMessage:
    call_id: str = block.need("tool_use_id")
    name = turns.name_of(call_id)
    if name is None and not block.body.left_out:  # the call itself may be left out
        path = block.path("tool_use_id")
        raise InvalidRequest(
            f"{path} is {quoted(call_id)}, which no tool_use block before it has as its id.",
            field=path,
        )
    content = "\n".join(_take_texts(block, "content", marks))
    if block.take("is_error", bool, False):
        content = f"Error: {content}"
    marks.take(block)
    block.finish(BLOCK)
    return ChatMessage(role="tool", content=content, tool_call_id=call_id, name=name or "")


def _take_assistant(item: Fields, marks: CacheMarks) -> ChatMessage:
    content = reasoning = ""
    calls: list[ToolCall] = []
    for block, kind in _take_blocks(item, "content"):
        match kind:
            case "text":
                content += _take_text(block, marks)
            case "thinking":
                reasoning += _take_thinking(block)
            case "redacted_thinking":
                block.finish(BLOCK)  # only the server that wrote its data can read it
            case "tool_use":
                calls.append(_take_call(block, marks))
            case _:
                raise _unsupported(block, kind, ("text", "thinking", "redacted_thinking", "tool_use"))
    return ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))


def _take_thinking(block: Fields) -> str:
    """The text of a thinking block. A block whose text was omitted has it in its signature, if this server
    wrote that. Signatures of other servers have no effect."""
    text: str = block.take("thinking", str, "")
    signature: str = block.take("signature", str, "")
    block.finish(BLOCK)
    return text or unsealed(signature) or ""


def _take_call(block: Fields, marks: CacheMarks) -> ToolCall:
    call_id, name = block.need("id"), block.need("name")
    arguments = block.take_text("input") or "{}"
    decode(msgspec.Raw(arguments.encode()), dict[str, Any], block.path("input"))
    marks.take(block)
    block.finish(BLOCK)
    return ToolCall(id=call_id, name=name, arguments=arguments)


def _take_texts(item: Fields, field: str, marks: CacheMarks) -> list[str]:
    """The texts in `field`: a string, or blocks of text."""
    texts = []
    for block, kind in _take_blocks(item, field):
        if kind != "text":
            raise _unsupported(block, kind, ("text",))
        texts.append(_take_text(block, marks))
    return texts


def _take_blocks(item: Fields, field: str) -> list[tuple[Fields, str]]:
    """The blocks in `field`, each with its type. A string is one block of text."""
    value: str | list[msgspec.Raw] | None = item.take(field, str | list[msgspec.Raw])
    if isinstance(value, str):
        text = {"text": msgspec.Raw(msgspec.json.encode(value))}
        return [(Fields(text, f"{item.path(field)}[0]", item.body), "text")]
    return [(block, block.need("type")) for block in item.take_objects(field) or ()]


def _take_text(block: Fields, marks: CacheMarks) -> str:
    text: str | None = block.take("text", str)
    if text is None:
        raise InvalidRequest(f"{block.path('text')} is missing.", field=block.path("text"))
    marks.take(block)
    block.finish(TEXT)
    return text


def _unsupported(block: Fields, kind: str, known: Sequence[str]) -> UnsupportedField:
    path = block.path("type")
    return UnsupportedField(
        f"{path} is {quoted(kind)}; only {', '.join(known)} blocks are taken here.",
        field=path,
        remedy=_REMEDIES.get(kind),
    )
