"""Tools, calls and results as plain turns, for chat templates that render no tools."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ramify.messages import ChatMessage
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.grammar import Tool, described


def plain_turns(
    form: ToolFormat, tools: Sequence[Tool], messages: Sequence[ChatMessage], *, system_role: bool
) -> tuple[ChatMessage, ...]:
    """`messages` as turns of text alone, with the tools described in the first one.

    `system_role`: the template takes a system turn; else the description begins the first user turn.
    Results of the calls of one turn come as one user turn.
    """
    turns: list[ChatMessage] = []
    results_open = False
    for message in messages:
        if message.role == "tool":
            text = message.content.join(form.result)
            if results_open:
                text = turns.pop().content + "\n" + text
            turns.append(ChatMessage(role="user", content=text))
        else:
            content = message.content + _calls(form, message)
            turns.append(msgspec.structs.replace(message, content=content, tool_calls=()))
        results_open = message.role == "tool"
    return tuple(_with_instructions(form, tools, turns, system_role)) if tools else tuple(turns)


def _calls(form: ToolFormat, message: ChatMessage) -> str:
    if not message.tool_calls:
        return ""
    before, between, after = form.call
    written = [before + call.name + between + call.arguments + after for call in message.tool_calls]
    gap = "\n" if message.content else ""
    return gap + form.begin + (form.separator or "\n").join(written) + form.end


def _with_instructions(
    form: ToolFormat, tools: Sequence[Tool], turns: list[ChatMessage], system_role: bool
) -> list[ChatMessage]:
    listed = "\n".join(msgspec.json.encode(described(tool)["function"]).decode() for tool in tools)
    told = form.instructions.replace("$tools", listed)
    role = "system" if system_role else "user"
    for i, turn in enumerate(turns):
        if turn.role == role and (i == 0 or role == "user"):
            # What the caller says comes first: it says who the model is.
            content = f"{turn.content}\n\n{told}" if role == "system" else f"{told}\n\n{turn.content}"
            return [*turns[:i], ChatMessage(role=role, content=content), *turns[i + 1 :]]
    return [ChatMessage(role=role, content=told), *turns]
