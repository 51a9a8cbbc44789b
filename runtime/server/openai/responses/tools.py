"""Parses the tools of the Responses API: functions, namespaces of functions, and tools that a server runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.tools import OfferedTool, ToolName, ToolUse, take_name, take_tool, use_of
from ramify.runtime.server.tables.responses import RESPONSES_TOOL
from ramify.tool_calls.formats import ToolFormat

HOSTED = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Types of tools that OpenAI's server runs, or whose calls only OpenAI's models write. They are left out."""


def take_response_tools(
    fields: Fields, tool_format: ToolFormat, additional: Sequence[Sequence[Fields]] = ()
) -> ToolUse | None:
    """Take the tools of the request, and the `additional` ones: those of each item of type additional_tools.
    None if there are none.

    A tool of such an item takes the place of an earlier one with the same name.
    """
    offered: dict[ToolName, list[OfferedTool]] = {}
    for tools in (fields.take_objects("tools") or [], *additional):
        added: dict[ToolName, list[OfferedTool]] = {}
        for one in itertools.chain.from_iterable(map(_take_tools, tools)):
            added.setdefault(one.name, []).append(one)
        for name in added:
            offered.pop(name, None)
        offered |= added
    _refuse_hosted_choice(fields)
    return use_of(fields, tool_format, list(itertools.chain(*offered.values())), nested=False)


def _take_tools(item: Fields) -> Iterator[OfferedTool]:
    """Take an entry of ``tools``. Returns no tool for one that OpenAI's server runs."""
    kind: str = item.take("type", str, "function")
    if kind in HOSTED:
        item.leave_out(f"tools[{kind}]")
    elif kind == "namespace":
        yield from _take_namespace(item)
    else:
        yield take_tool(item, nested=False)


def _take_namespace(item: Fields) -> Iterator[OfferedTool]:
    name = take_name(item)
    # Chat templates know no namespaces: the description stands before that of the first tool.
    description: str = item.take("description", str, "")
    tools = item.take_objects("tools")
    if not tools:
        raise InvalidRequest(f"{item.path('tools')} is missing or empty.", field=item.path("tools"))
    for index, inner in enumerate(tools):
        one = take_tool(inner, nested=False, namespace=name)
        if index == 0 and description:
            text = f"Tools of {name}: {description}\n\n{one.tool.description}".rstrip()
            one = one._replace(tool=replace(one.tool, description=text))
        yield one
    item.finish(RESPONSES_TOOL)


def _refuse_hosted_choice(fields: Fields) -> None:
    """Raise `UnsupportedField` if tool_choice demands a tool that is left out."""
    text = fields.take_text("tool_choice") or ""
    if not text.lstrip().startswith("{"):
        return
    choice = fields.take_object("tool_choice")
    assert choice is not None
    for one in (choice, *(choice.take_objects("tools") or ())):
        kind: str = one.take("type", str, "")
        if kind in HOSTED:
            path = one.path("type")
            raise UnsupportedField(
                f"{path} is {kind!r}, a tool that this server does not have.",
                field=path,
                remedy="Offer a function, and call it yourself.",
            )
