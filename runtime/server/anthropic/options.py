"""Parses the tools, the thinking and the output format of the Messages API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ramify.errors import InvalidRequest
from ramify.messages import Preamble
from ramify.model_info import ChatFormat
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
from ramify.runtime.server.openai.tools import (
    NO_PARAMETERS,
    Mode,
    OfferedTool,
    ToolChoice,
    ToolName,
    ToolUse,
    check_tools,
    known_tool,
    object_schema,
    take_name,
)
from ramify.runtime.server.params import FieldConstraint, only_constraint
from ramify.runtime.server.tables.anthropic import OUTPUT_CONFIG, THINKING, TOOL, TOOL_CHOICE
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.grammar import Tool

_MODES: dict[str, Mode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def take_tools(fields: Fields, tool_format: ToolFormat, marks: CacheMarks) -> ToolUse | None:
    """Take the tools of the request; None if it has none.

    Tools with a type of Anthropic's own, such as ``web_search_20250305``, are left out: this server does not
    run them, and has no description of them for the model.
    """
    offered: list[OfferedTool] = []
    for item in fields.take_objects("tools") or ():
        kind: str = item.take("type", str, "custom")
        if kind == "custom":
            offered.append(_take_tool(item, marks))
        else:
            item.leave_out(f"tools[{kind}]")
    check_tools(offered)
    choice = fields.take_object("tool_choice") or Fields({"type": msgspec.Raw(b'"auto"')}, "tool_choice")
    mode: str = choice.need("type", Literal["auto", "any", "tool", "none"])
    single: bool = choice.take("disable_parallel_tool_use", bool, False)
    chosen = ToolChoice(_MODES[mode])
    if mode == "tool":
        index = known_tool(ToolName(choice.need("name")), offered, choice.path("name"))
        chosen = ToolChoice("required", (index,), once=True)
    choice.finish(TOOL_CHOICE)
    if not offered:
        if mode == "any":
            raise InvalidRequest("tool_choice needs tools.", field="tool_choice")
        return None
    return chosen.use_of(tool_format, offered, parallel=not single)


def _take_tool(item: Fields, marks: CacheMarks) -> OfferedTool:
    name = take_name(item, most=128)
    description: str = item.take("description", str, "")
    schema = item.take_text("input_schema")
    strict: bool = item.take("strict", bool, False)
    marks.take(item)
    item.finish(TOOL)
    place = item.path("input_schema")
    parameters = NO_PARAMETERS if schema is None else object_schema(schema, place)
    tool = Tool(name=name, description=description, parameters=parameters, strict=strict)
    return OfferedTool(tool, ToolName(name), place, item.path("name"))


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
