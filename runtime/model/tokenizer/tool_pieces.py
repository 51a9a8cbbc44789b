"""Splits a chat template's way of writing tools and results into pieces, by probing the template.

Example: a template that lists the tools behind the system message. It is rendered with one tool (T1) and with
two (T1, T2); S and U are the contents of the system and the user message.

    one tool    <|im_start|>system\\n S \\n\\n# Tools\\n T1 \\nEnd <|im_end|>\\n<|im_start|>user\\n U …
    two tools   <|im_start|>system\\n S \\n\\n# Tools\\n T1 \\n T2 \\nEnd <|im_end|>\\n<|im_start|>user\\n U …
    start       <|im_start|>system\\n   before S
    before      \\n\\n# Tools\\n         between S and T1
    between     \\n                    between T1 and T2
    after       \\nEnd                 up to the text that `ChatFormat` has between system and user

T1 and T2 are found in the output as JSON, indented by 4, by 2 or not at all. The pieces are used only if,
composed, they equal the template's output on whole conversations with tools, calls and results. A template
has no pieces if it moves the tools to a later turn, or writes calls with text that no model writes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.model_info import ChatFormat, ToolPieces
from ramify.tool_calls.formats import FORMATS, ToolFormat

INDENTS = (None, 4, 2)
"""Values of ``indent`` with which templates print JSON."""

Message = dict[str, Any]


def probe_tool(name: str, description: str) -> Message:
    properties = {"key": {"type": "integer", "description": "A key."}}
    parameters = {"type": "object", "properties": properties, "required": ["key"]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def probe_call(name: str, key: int, number: int = 0) -> Message:
    """A call of a `probe_tool`; `number` tells the calls of a conversation apart."""
    id = f"a1b2c3d4{number}"  # Mistral's templates insist on nine characters
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {"key": key}}}


def probe_result(call: Message, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}


_TOOLS = [probe_tool(f"probe_{number}", "Say “hello” & <wave>.") for number in (1, 2)]
_SYSTEM, _USER = "systemword", "userword"
_RESULTS = ("plain", '{"a": "quoted"}', "two\nlines é")


def tool_pieces(tokenizer: Any, chat: ChatFormat) -> ToolPieces | None:
    """The pieces of `tokenizer.chat_template` for tools, which complete those of `chat`; None if exact pieces
    are not found."""
    tool_format = FORMATS[chat.tool_format]
    between_turns = chat.suffix.get("system", "") + chat.prefix.get("system>user", "\0")
    opening = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    one, two = (render(tokenizer, opening, _TOOLS[:count], generation=False) for count in (1, 2))
    if not tool_format.native or one is None or two is None:
        return None
    before, found, rest = one.partition(_SYSTEM)
    around, found_user, _ = rest.partition(_USER)
    two_around = two.partition(_SYSTEM)[2].partition(_USER)[0]
    if not found or not found_user:
        return None
    for place, indent in itertools.product(("system", "user"), INDENTS):
        if place == "system" and around.endswith(between_turns):
            described, both = (text.removesuffix(between_turns) for text in (around, two_around))
        elif place == "user" and around.startswith(between_turns):
            described, both = (text.removeprefix(between_turns) for text in (around, two_around))
        else:
            continue
        first, second = (written(tool, indent) for tool in _TOOLS)
        lead, shown, after = described.partition(first)
        between = both[len(lead) + len(first) :].partition(second)[0]
        pieces = ToolPieces(
            start=before,
            place=place,  # type: ignore[arg-type]
            before=lead,
            between=between,
            after=after,
            indent=indent,
            quoted=_is_quoted(chat),
        )
        if shown and _is_exact(tokenizer, chat, pieces, tool_format):
            return pieces
    return None


def written(tool: Any, indent: int | None) -> str:
    """A tool as the ``tojson`` filter of transformers prints it."""
    return json.dumps(tool, ensure_ascii=False, indent=indent)


def _is_quoted(chat: ChatFormat) -> bool:
    return chat.prefix.get("assistant>tool", "").endswith('"') and chat.suffix.get("tool", "").startswith('"')


def _is_exact(tokenizer: Any, chat: ChatFormat, pieces: ToolPieces, tool_format: ToolFormat) -> bool:
    counts = (1, 2) if tool_format.separator is not None else (1,)
    for tools, calls in itertools.product((1, 2), counts):
        messages = _conversation(calls)
        for end in range(2, len(messages) + 1):
            if messages[end - 1]["role"] not in ("user", "tool") or (
                end < len(messages) and messages[end]["role"] == "tool"
            ):
                continue  # the assistant does not answer here
            part = messages[:end]
            composed = _compose(chat, pieces, tool_format, _TOOLS[:tools], part)
            if composed is None or composed != render(tokenizer, part, _TOOLS[:tools], generation=True):
                return False
    return True


def _conversation(calls: int) -> list[Message]:
    """A conversation with two rounds: `calls` calls, their results, an answer, and another user message."""
    messages: list[Message] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Go."},
    ]
    for turn in range(2):
        numbers = range(calls * turn, calls * (turn + 1))
        made = [probe_call(f"probe_{place + 1}", turn, number) for place, number in enumerate(numbers)]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        for call, text in zip(made, _RESULTS[turn:], strict=False):
            messages.append(probe_result(call, text))
        messages.append({"role": "assistant", "content": "So."})
        messages.append({"role": "user", "content": f"And {turn}?"})
    return messages


def _compose(
    chat: ChatFormat,
    pieces: ToolPieces,
    tool_format: ToolFormat,
    tools: Sequence[Any],
    messages: Sequence[dict[str, Any]],
) -> str | None:
    """The conversation composed of the pieces, as a program appends it, up to the assistant's answer."""
    description = (
        pieces.before + pieces.between.join(written(tool, pieces.indent) for tool in tools) + pieces.after
    )
    text, previous = "", ""
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        key = f"{previous}>{role}"
        if key not in chat.prefix or role not in chat.suffix:
            return None
        text += pieces.start if index == 0 else chat.prefix[key]
        if role == "tool" and pieces.quoted:
            content = json.dumps(content, ensure_ascii=False)[1:-1]
        if index == 0 and pieces.place == "system":
            content += description
        elif index == 1 and pieces.place == "user":
            content = description + content
        text += content + _calls(tool_format, message.get("tool_calls", ())) + chat.suffix[role]
        previous = role
    key = f"{previous}>assistant"
    return text + chat.prefix[key] if key in chat.prefix else None


def _calls(tool_format: ToolFormat, calls: Sequence[dict[str, Any]]) -> str:
    if not calls:
        return ""
    opening, middle, end = tool_format.call
    functions = [call["function"] for call in calls]
    made = [opening + one["name"] + middle + json.dumps(one["arguments"]) + end for one in functions]
    return tool_format.begin + (tool_format.separator or "").join(made) + tool_format.end


def render(
    tokenizer: Any,
    messages: Sequence[Any],
    tools: Sequence[Any] | None,
    *,
    generation: bool,
    **variables: Any,
) -> str | None:
    """`messages` and `tools` as the chat template renders them, given `variables`; None if the template
    raises."""
    try:
        text: str = tokenizer.apply_chat_template(
            msgspec.to_builtins(messages),  # copies: a template may change its arguments
            tools=msgspec.to_builtins(tools),
            tokenize=False,
            add_generation_prompt=generation,
            **variables,
        )
    except Exception:  # a template is a program: it may raise anything
        return None
    return text
