"""Parses the tools, the thinking and the output format of the Messages API."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from ramify.errors import InvalidRequest
from ramify.messages import ChatFormat, Preamble
from ramify.runtime.model.tokenizer.thinking_format import SWITCHES
from ramify.runtime.server.anthropic.cache import CacheMarks
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.output_format import take_json_format
from ramify.runtime.server.openai.reasoning import (
    END,
    START,
    ReasoningSwitch,
    ReasoningUse,
    take_effort,
    take_limit,
)
from ramify.runtime.server.openai.tools import MAX_TOOLS, NO_PARAMETERS, ToolUse, object_schema
from ramify.runtime.server.params import FieldConstraint, only_constraint
from ramify.runtime.server.tables.anthropic import OUTPUT_CONFIG, THINKING, TOOL, TOOL_CHOICE
from ramify.text import shortened
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.grammar import Tool

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_MODES: dict[str, Literal["auto", "required", "none"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


def take_tools(fields: Fields, tool_format: ToolFormat, marks: CacheMarks) -> ToolUse | None:
    """Take the tools of the request; None if it has none.

    Tools with a type of Anthropic's own, such as ``web_search_20250305``, are left out: this server does not
    run them, and has no description of them for the model.
    """
    tools: list[Tool] = []
    places: list[str] = []
    items = fields.take_objects("tools") or []
    if len(items) > MAX_TOOLS:
        raise InvalidRequest(f"There are {len(items)} tools; at most {MAX_TOOLS} are taken.", field="tools")
    for item in items:
        kind: str = item.take("type", str, "custom")
        if kind != "custom":
            item.leave_out(f"tools[{kind}]")
            continue
        tool = _take_tool(item, marks)
        if any(tool.name == other.name for other in tools):
            path = item.path("name")
            raise InvalidRequest(
                f"{path} is {shortened(repr(tool.name), 100)}, which another tool is called.", field=path
            )
        tools.append(tool)
        places.append(item.path("input_schema"))
    choice = fields.take_object("tool_choice")
    kind, name, single = "auto", None, False
    if choice is not None:
        kind = choice.need("type", Literal["auto", "any", "tool", "none"])
        name = choice.need("name") if kind == "tool" else None
        single = choice.take("disable_parallel_tool_use", bool, False)
        choice.finish(TOOL_CHOICE)
    names = [tool.name for tool in tools]
    if name is not None and name not in names:
        raise InvalidRequest(
            f"tool_choice.name is {shortened(repr(name), 100)}, which no tool that the model is offered is"
            " called.",
            field="tool_choice.name",
        )
    if not tools:
        if kind == "any":
            raise InvalidRequest("tool_choice needs tools.", field="tool_choice")
        return None
    return ToolUse(
        tool_format=tool_format,
        tools=tuple(tools),
        callable=tuple(range(len(tools))) if name is None else (names.index(name),),
        mode=_MODES[kind],
        parallel=not single and name is None,
        places=tuple(places),
    )


def _take_tool(item: Fields, marks: CacheMarks) -> Tool:
    name: str = item.take("name", str, "")
    if not _NAME.fullmatch(name):
        path, given = item.path("name"), shortened(repr(name), 100)
        raise InvalidRequest(
            f"{path} is {given}; it must be 1 to 128 letters, digits, underscores and dashes.", field=path
        )
    description: str = item.take("description", str, "")
    schema = item.take_text("input_schema")
    strict: bool = item.take("strict", bool, False)
    marks.take(item)
    item.finish(TOOL)
    parameters = NO_PARAMETERS if schema is None else object_schema(schema, item.path("input_schema"))
    return Tool(name=name, description=description, parameters=parameters, strict=strict)


def take_thinking(fields: Fields, chat_format: ChatFormat) -> ReasoningUse:
    """Take ``thinking``, and the effort in ``output_config``.

    Without either a model that can answer without thinking does so. Thinking and efforts have no effect on a
    model that does not think. Thinking cannot be disabled for one that always thinks.
    """
    switch = ReasoningSwitch(chat_format)
    variables: dict[str, Any] = {}
    config = fields.take_object("output_config")
    if config is not None:
        take_effort(config, "effort", chat_format, switch, variables)
    kind, limit = None, None
    thinking = fields.take_object("thinking")
    if thinking is not None:
        kind = thinking.need("type", Literal["enabled", "adaptive", "between_tools", "disabled"])
        if kind == "enabled":
            limit = take_limit(thinking, "budget_tokens")
        thinking.take("display", Literal["summarized", "omitted"])
        thinking.finish(THINKING)
    asked = kind not in (None, "disabled")
    marks = chat_format.thinking
    channels = marks is not None and marks.channels
    known = [name for name in SWITCHES if name in chat_format.variables]
    wanted: bool | None = None
    if switch.thinks:
        if asked or (kind is None and switch.wanted()):
            wanted = True
        elif not channels:
            wanted = not known  # a model without a switch thinks in any case
        elif kind == "disabled":
            wanted = False
    if (asked and not switch.thinks) or (kind == "disabled" and wanted):
        fields.ignore({"thinking": None})
    if wanted is not None:
        variables |= dict.fromkeys(known, wanted)
    start, end = (START, END) if marks is None else (marks.start, marks.end)
    preamble = Preamble(start=start, end=end, max_tokens=limit, apart=True, counted=True)
    return ReasoningUse(
        preamble=preamble if wanted else None,
        wanted=wanted,
        apart=True,
        shown=True,
        end=end if wanted or channels else None,
        template_kwargs=msgspec.json.encode(variables).decode() if variables else "",
    )


def take_format(fields: Fields) -> FieldConstraint | None:
    """Take the constraint in ``output_config.format``, or in ``output_format``, its earlier name."""
    found = [take_json_format(fields, "output_format")]
    config = fields.take_object("output_config")
    if config is not None:
        found.append(take_json_format(config, "format"))
        config.take("effort", str)  # by `take_thinking`
        config.finish(OUTPUT_CONFIG)
    return only_constraint([one for one in found if one is not None])
