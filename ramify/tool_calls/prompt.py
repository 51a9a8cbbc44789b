"""Renders tools, calls and results as plain text, for chat templates that render no tools."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ramify.messages import ChatMessage
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.grammar import Tool, described


def plain_turns(
    tool_format: ToolFormat, tools: Sequence[Tool], messages: Sequence[ChatMessage], *, system_role: bool
) -> tuple[ChatMessage, ...]:
    """`messages` as messages that contain only text, with instructions for the tools.

    The instructions are appended to the system message, which is added if there is none. If the template has
    no system role (`system_role` is False), the first user message begins with the instructions. The results
    of the calls of one turn become one user message.
    """
    turns: list[ChatMessage] = []
    results_open = False
    for message in messages:
        if message.role == "tool":
            text = message.content.join(tool_format.result)
            if results_open:
                text = turns.pop().content + "\n" + text
            turns.append(ChatMessage(role="user", content=text))
        else:
            content = message.content + _calls(tool_format, message)
            turns.append(msgspec.structs.replace(message, content=content, tool_calls=()))
        results_open = message.role == "tool"
    return tuple(_with_instructions(tool_format, tools, turns, system_role)) if tools else tuple(turns)


def _calls(tool_format: ToolFormat, message: ChatMessage) -> str:
    if not message.tool_calls:
        return ""
    before, between, after = tool_format.call
    written = [before + call.name + between + call.arguments + after for call in message.tool_calls]
    gap = "\n" if message.content else ""
    return gap + tool_format.begin + (tool_format.separator or "\n").join(written) + tool_format.end


def _with_instructions(
    tool_format: ToolFormat, tools: Sequence[Tool], turns: list[ChatMessage], system_role: bool
) -> list[ChatMessage]:
    described_tools = "\n".join(msgspec.json.encode(described(tool)["function"]).decode() for tool in tools)
    instructions = tool_format.instructions.replace("$tools", described_tools)
    role = "system" if system_role else "user"
    for i, turn in enumerate(turns):
        if turn.role == role and (i == 0 or role == "user"):
            # The caller's system message comes first: it describes the model's role.
            content = (
                f"{turn.content}\n\n{instructions}"
                if role == "system"
                else f"{instructions}\n\n{turn.content}"
            )
            return [*turns[:i], ChatMessage(role=role, content=content), *turns[i + 1 :]]
    return [ChatMessage(role=role, content=instructions), *turns]
