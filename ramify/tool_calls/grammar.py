"""Tools, and the constraints on a model's calls of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from ramify.constraint import CONTROLS, NO_CONTROL, Constraint, structural_tag, with_controls
from ramify.messages import Enforcement, Preamble
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.text import PARAMETERS, TextFormat

FREE: dict[str, Any] = {"type": "any_text"}
"""The structural tag format of unconstrained content."""

_ARGUMENTS = re.compile(
    r"/elements/(\d+)(?:/content|/elements/2)(?:/json_schema|/elements/1/content(?:/(?:grammar|pattern))?)(.*)",
    re.DOTALL,
)
"""Matches a pointer into the parameters or the text format of a tool, in a constraint on calls. Groups: the
tool's index, and the pointer inside its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON text of an object schema.

    Without `strict`, keywords of the schema that cannot be enforced are ignored and reported
    (`Enforcement.unenforced`).
    """

    name: str
    parameters: str = PARAMETERS
    description: str = ""
    strict: bool = True
    text: TextFormat | None = None
    """The format of the input of a free-text tool, which has no other `parameters` than `PARAMETERS`. None
    for a function with JSON arguments."""


def texts_of(tools: Sequence[Tool]) -> frozenset[str]:
    """The names of the free-text tools."""
    return frozenset(tool.name for tool in tools if tool.text is not None)


def tools_json(tools: Sequence[Tool]) -> str:
    """The tools in the form that chat templates take: OpenAI's list, as JSON text."""
    return msgspec.json.encode([described(tool) for tool in tools]).decode()


def described(tool: Tool) -> dict[str, Any]:
    """The entry of a tool in OpenAI's list. Its schema is raw JSON."""
    function: dict[str, Any] = {"name": tool.name}
    description = tool.description if tool.text is None else tool.text.described(tool.description)
    if description:
        function["description"] = description
    return {"type": "function", "function": function | {"parameters": msgspec.Raw(tool.parameters.encode())}}


def preamble_of(tool_format: ToolFormat, *, required: bool) -> Preamble:
    """The preamble before the calls.

    With `required` it is only the trigger; else it is any text, which may end without a trigger.
    """
    if required:
        return Preamble(end=tool_format.trigger, max_tokens=0)
    return Preamble(end=tool_format.trigger, optional=True)


def calls_after_trigger(
    tool_format: ToolFormat, tools: Sequence[Tool], *, parallel: bool, most: int | None = None
) -> Constraint:
    """The constraint on the text after the trigger: one call of `tools`, or with `parallel` up to `most`
    calls (None: any number)."""
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
    """The constraint on a whole output: calls, or content in the structural tag format `content`."""
    calls = _calls(tool_format, tools, parallel, tool_format.opening, most)
    return _structural_tag({"type": "or", "elements": [calls, content]})


def calls_or_answer(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    *,
    thought: bool,
    content: dict[str, Any] | None,
    words: bool = False,
) -> Constraint:
    """The constraint on a whole output for a format with an `answer`: one call, or content if `content` is
    given.

    `thought`: whether the output follows the end of the reasoning. `words`: whether content may come before a
    call. If `content` is free text, such content may also come before the answer.
    """
    answer = None
    if content is not None:
        answer = _sequence(_text(with_controls(tool_format.answer)), content)
    call = _call(tool_format, tools)
    if words and tool_format.words is not None:
        begin, end = map(with_controls, tool_format.words)
        others = [one for one in (*map(with_controls, CONTROLS), NO_CONTROL) if one != end]
        said = {"type": "tag", "begin": begin, "content": FREE | {"excludes": others}, "end": end}
        before = {"type": "star", "content": _sequence(said, _text(with_controls(tool_format.resume)))}
        if answer is not None and content == FREE:
            call, answer = _sequence(before, {"type": "or", "elements": [call, answer]}), None
        else:
            call = _sequence(before, call)
    options = [call] if answer is None else [call, answer]
    start = [_text(with_controls(tool_format.resume))] if thought else []
    return _structural_tag(_sequence(*start, {"type": "or", "elements": options}))


def _call(tool_format: ToolFormat, tools: Sequence[Tool]) -> dict[str, Any]:
    """The structural tag format of one call, with all alternatives of the tool format."""
    opening, between, after = tool_format.call
    others_before, others_between = tool_format.also
    elements = [
        _sequence(
            _text(tool.name),
            _one_of(between, *others_between),
            _arguments_format(tool),
            *([_text(after)] if after else []),
        )
        for tool in tools
    ]
    return _sequence(_one_of(opening, *others_before), {"type": "or", "elements": elements})


def _one_of(*texts: str) -> dict[str, Any]:
    return {"type": "or", "elements": [_text(with_controls(one)) for one in texts]}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _arguments_format(tool: Tool) -> dict[str, Any]:
    """The structural tag format of the arguments of a call."""
    if tool.text is not None:
        return tool.text.arguments()
    form = {"type": "json_schema", "json_schema": msgspec.Raw(tool.parameters.encode())}
    return form if tool.strict else {**form, "strict": False}


def _calls(
    tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, opening: str, most: int | None
) -> dict[str, Any]:
    before, between, after = tool_format.call
    one = {
        "type": "or",
        "elements": [
            {
                "type": "tag",
                "begin": tool.name + between,
                "content": _arguments_format(tool),
                "end": after,
            }
            for tool in tools
        ],
    }
    elements: list[dict[str, Any]] = [_text(opening), one]
    if parallel and tool_format.separator is not None:
        more = _sequence(_text(tool_format.separator + before), one)
        if most is None:
            elements.append({"type": "star", "content": more})
        elif most > 1:
            elements.append({"type": "repeat", "content": more, "min": 0, "max": most - 1})
    if tool_format.end:
        elements.append(_text(tool_format.end))
    return _sequence(*elements)


def _structural_tag(structure: dict[str, Any]) -> Constraint:
    source = msgspec.json.encode({"type": "structural_tag", "format": structure}).decode()
    return structural_tag(source)


def tool_at(pointer: str | None, tools: Sequence[Tool]) -> tuple[int, str] | None:
    """Translate `pointer`, into the constraint on calls of `tools`, to (index of a tool, pointer into its
    parameters). None if `pointer` does not lead into a tool's parameters."""
    found = _ARGUMENTS.search(pointer or "")
    if found is None or int(found[1]) >= len(tools):
        return None
    return int(found[1]), found[2]


def naming_tools(enforcement: Enforcement, tools: Sequence[Tool]) -> Enforcement:
    """`enforcement` of a constraint on calls, with each unenforced keyword located by its tool: the tool's
    name, and a JSON pointer into the tool's parameters."""
    told = []
    for left in enforcement.unenforced:
        found = tool_at(left.schema, tools)
        told.append(left if found is None else replace(left, tool=tools[found[0]].name, schema=found[1]))
    # If several calls are allowed, the constraint contains the schema of a tool twice.
    return replace(enforcement, unenforced=tuple(dict.fromkeys(told)))
