"""Tools, and the constraint on a model's calls of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from ramify.constraint import Constraint, structural_tag, with_controls
from ramify.messages import Enforcement, Preamble
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.parser import common_start

_CONTENT = "/json_schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON text of an object schema.

    Without `strict`, keywords of it that cannot be enforced are left out and told (`Enforcement.unenforced`).
    """

    name: str
    parameters: str
    description: str = ""
    strict: bool = True


def tools_json(tools: Sequence[Tool]) -> str:
    """The tools as chat templates take them: JSON text of OpenAI's list."""
    return msgspec.json.encode([described(tool) for tool in tools]).decode()


def described(tool: Tool) -> dict[str, Any]:
    """One entry of OpenAI's list of tools; its schema is raw JSON."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": msgspec.Raw(tool.parameters.encode())}}


def preamble_of(tool_format: ToolFormat, *, required: bool) -> Preamble:
    """The text before the calls: with `required` only their trigger, else any text, with or without a
    trigger."""
    if required:
        return Preamble(end=tool_format.trigger, max_tokens=0)
    return Preamble(end=tool_format.trigger, optional=True)


def calls_after_trigger(
    tool_format: ToolFormat, tools: Sequence[Tool], *, parallel: bool, most: int | None = None
) -> Constraint:
    """The constraint on the text after the trigger: one call of `tools`, or with `parallel` up to `most`."""
    return _structural_tag(
        _calls(tool_format, tools, parallel, tool_format.opening.removeprefix(tool_format.trigger), most)
    )


def calls_or_content(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    *,
    parallel: bool,
    content: dict[str, Any],
    most: int | None = None,
) -> Constraint:
    """The constraint on a whole output: calls, or the structural tag format `content`."""
    calls = _calls(tool_format, tools, parallel, tool_format.opening, most)
    return _structural_tag({"type": "or", "elements": [calls, content]})


def calls_or_answer(
    tool_format: ToolFormat, tools: Sequence[Tool], *, thought: bool, content: dict[str, Any] | None
) -> Constraint:
    """As `calls_or_content`, for a format with an `answer`: one call, or where `content` is given that.

    `thought`: the text follows the end of the reasoning.
    """
    opening, answer = tool_format.opening, tool_format.answer
    common = common_start((opening, answer)) if content is not None else ""
    call = _calls(tool_format, tools, False, with_controls(opening.removeprefix(common)), None)
    options = [call]
    if content is not None:
        begin = {"type": "const_string", "value": with_controls(answer.removeprefix(common))}
        options.append({"type": "sequence", "elements": [begin, content]})
    before = with_controls((tool_format.resume if thought else "") + common)
    start = [{"type": "const_string", "value": before}] if before else []
    return _structural_tag({"type": "sequence", "elements": [*start, {"type": "or", "elements": options}]})


def _calls(
    tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, opening: str, most: int | None
) -> dict[str, Any]:
    before, between, after = tool_format.call
    one = {
        "type": "or",
        "elements": [
            {
                "type": "tag",
                "begin": tool.name + with_controls(between),
                "content": {"type": "json_schema", "json_schema": msgspec.Raw(tool.parameters.encode())}
                | ({} if tool.strict else {"strict": False}),
                "end": after,
            }
            for tool in tools
        ],
    }
    elements: list[dict[str, Any]] = [{"type": "const_string", "value": opening}, one]
    if parallel and tool_format.separator is not None:
        another = [{"type": "const_string", "value": tool_format.separator + before}, one]
        more: dict[str, Any] = {"type": "sequence", "elements": another}
        if most is None:
            elements.append({"type": "star", "content": more})
        elif most > 1:
            elements.append({"type": "repeat", "content": more, "min": 0, "max": most - 1})
    if tool_format.end:
        elements.append({"type": "const_string", "value": tool_format.end})
    return {"type": "sequence", "elements": elements}


def _structural_tag(structure: dict[str, Any]) -> Constraint:
    source = msgspec.json.encode({"type": "structural_tag", "format": structure}).decode()
    return structural_tag(source)


def tool_at(pointer: str | None, tools: Sequence[Tool]) -> tuple[int, str] | None:
    """(index of a tool, pointer into its parameters) of a `pointer` into the constraint on calls of `tools`;
    None where it leads to no tool's parameters."""
    before, found, inside = (pointer or "").partition(f"/content{_CONTENT}")
    if not found:
        return None
    index = before.rpartition("/")[2]
    return (int(index), inside) if index.isdigit() and int(index) < len(tools) else None


def naming_tools(enforcement: Enforcement, tools: Sequence[Tool]) -> Enforcement:
    """`enforcement` of a constraint on calls, with the tool's name and the pointer into its parameters in
    what is left out."""
    told = []
    for left in enforcement.unenforced:
        found = tool_at(left.schema, tools)
        told.append(
            left if found is None else replace(left, tool=tools[found[0]].name, schema=found[1])
        )
    return replace(enforcement, unenforced=tuple(told))
