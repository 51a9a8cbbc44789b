"""Parses the tool options of a chat request: the tools, and which of them may or must be called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint, InvalidRequest, UnsupportedField
from ramify.messages import Enforcement, Preamble
from ramify.runtime.server.fields import Fields, decode
from ramify.runtime.server.params import FieldConstraint
from ramify.runtime.server.tables.openai import FUNCTION, TOOL
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.grammar import (
    FREE,
    Tool,
    calls_after_trigger,
    calls_or_answer,
    calls_or_content,
    naming_tools,
    preamble_of,
    tool_at,
)

MAX_TOOLS = 128
"""Maximum number of tools in a request, as in OpenAI's API."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_PARAMETERS = '{"type":"object","properties":{},"additionalProperties":false}'

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request. `callable` has the indices in `tools` of those that this turn may call."""

    tool_format: ToolFormat
    tools: tuple[Tool, ...]
    callable: tuple[int, ...]
    mode: Mode
    parallel: bool
    schema_field: str
    """Name of the field with a function's schema, within the tool: ``function.parameters``, …"""
    grammar_field: str = ""
    """Name of the field with the grammar of a free-text tool, within the tool."""

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools that the prompt describes; () if the model must not call any."""
        return () if self.mode == "none" else self.tools

    def constrained(
        self, found: FieldConstraint | None, *, thought: bool
    ) -> tuple[tuple[Preamble, ...], Constraint]:
        """The preambles and the constraint of a turn that may contain calls. `found` is the constraint on the
        content. `thought`: reasoning precedes the content."""
        tools = self._callable
        if self.tool_format.answer:
            required = self.mode == "required"
            content = FREE if found is None else _tag_format(*found)
            return (), calls_or_answer(
                self.tool_format,
                tools,
                thought=thought,
                content=None if required else content,
                words=not required,
            )
        if self.mode == "required" or found is None:
            preamble = preamble_of(self.tool_format, required=self.mode == "required")
            return (preamble,), calls_after_trigger(self.tool_format, tools, parallel=self.parallel)
        path, wanted = found
        if self.tool_format.control:
            raise UnsupportedField(
                f"This model marks calls by a control token, so {path} and tools with tool_choice auto"
                " cannot be combined.",
                field=path,
                remedy='Use tool_choice "required" or "none".',
            )
        content = _tag_format(path, wanted)
        return (), calls_or_content(self.tool_format, tools, parallel=self.parallel, content=content)

    def explain(self, error: InvalidConstraint) -> None:
        """If `error` is in a tool's schema, replace its field by the field of that tool in the request."""
        blamed = tool_at(error.pointer, self._callable)
        if blamed is not None:
            index, error.pointer = blamed
            inside = self.schema_field if self._callable[index].text is None else self.grammar_field
            error.field = f"tools[{self.callable[index]}].{inside}"

    def tell(self, enforcement: Enforcement) -> Enforcement:
        """`enforcement` with unenforced keywords located by tool: see `naming_tools`."""
        return naming_tools(enforcement, self._callable)

    @property
    def _callable(self) -> list[Tool]:
        return [self.tools[i] for i in self.callable]


class _Choice(NamedTuple):
    mode: Mode
    names: tuple[str, ...] | None = None
    """Names of the tools that may be called; None for all."""
    once: bool = False
    """Whether at most one call is allowed."""


def take_tools(fields: Fields, tool_format: ToolFormat, *, nested: bool) -> ToolUse | None:
    """Take the tools of the request; None if it has none.

    nested : the fields of a function are in an inner object ``function``, as in chat completions
    """
    items = fields.take_objects("tools")
    parallel: bool | None = fields.take("parallel_tool_calls", bool)
    choice: Any = fields.take("tool_choice", str | dict[str, msgspec.Raw])
    if not items:
        if isinstance(choice, dict) or choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools.", field="tool_choice")
        if parallel is not None and nested:  # the Responses API accepts it without tools
            raise InvalidRequest("parallel_tool_calls needs tools.", field="parallel_tool_calls")
        return None
    if len(items) > MAX_TOOLS:
        raise InvalidRequest(f"There are {len(items)} tools; at most {MAX_TOOLS} are taken.", field="tools")
    tools: list[Tool] = []
    for item in items:
        tools.append(_take_tool(item, nested, [tool.name for tool in tools]))
    names = [tool.name for tool in tools]
    chosen = _take_choice(choice, names, nested)
    return ToolUse(
        tool_format=tool_format,
        tools=tuple(tools),
        callable=tuple(i for i, name in enumerate(names) if chosen.names is None or name in chosen.names),
        mode=chosen.mode,
        parallel=parallel is not False and not chosen.once,
        schema_field="function.parameters" if nested else "parameters",
        grammar_field="custom.format.grammar.definition" if nested else "format.definition",
    )


def _take_tool(item: Fields, nested: bool, taken: Sequence[str]) -> Tool:
    """Take one tool. `taken` has the names of the earlier tools."""
    kind: str = item.take("type", str, "function")  # clients that only have functions may leave it out
    if kind != "function":
        raise UnsupportedField(
            f"{item.path('type')} is {kind!r}; only functions are supported.",
            field=item.path("type"),
            remedy="Offer it as a function, and call it yourself.",
        )
    function = item.take_object("function") if nested else item
    if function is None:
        raise InvalidRequest(f"{item.path('function')} is missing.", field=item.path("function"))
    name: str = function.take("name", str, "")
    path = function.path("name")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path} is {name!r}; it must be 1 to 64 letters, digits, underscores and dashes.", field=path
        )
    if name in taken:
        raise InvalidRequest(f"{path} is {name!r}, which another tool is called.", field=path)
    description: str = function.take("description", str, "")
    parameters = function.take_text("parameters")
    # The defaults of the APIs: best effort in chat completions, strict in responses.
    strict: bool = function.take("strict", bool, not nested)
    function.finish(FUNCTION)
    if nested:
        item.finish(TOOL)
    return Tool(
        name=name,
        description=description,
        parameters=NO_PARAMETERS
        if parameters is None
        else object_schema(parameters, function.path("parameters")),
        strict=strict,
    )


def object_schema(parameters: str, path: str) -> str:
    """`parameters`, the JSON text in the field `path`, with ``"type": "object"`` if no type is given. Raises
    `InvalidRequest` for another type."""
    members: dict[str, msgspec.Raw] = decode(msgspec.Raw(parameters.encode()), dict[str, msgspec.Raw], path)
    if "type" not in members:
        members = {"type": msgspec.Raw(b'"object"'), **members}
        return msgspec.json.encode(members).decode()
    if decode(members["type"], Any, path) != "object":
        raise InvalidRequest(
            f"{path}.type must be object: arguments are one.",
            field=f"{path}.type",
            remedy="Make the value a property of an object.",
        )
    return parameters


def _take_choice(choice: Any, names: Sequence[str], nested: bool) -> _Choice:
    match choice:
        case None | "auto":
            return _Choice("auto")
        case "none" | "required":
            return _Choice(choice)
        case str():
            raise InvalidRequest(
                f"tool_choice is {choice!r}; it must be none, auto, required, or name a function.",
                field="tool_choice",
            )
    one = Fields(choice, "tool_choice")
    kind: str = one.take("type", str, "function")
    if kind not in ("function", "allowed_tools"):
        path = one.path("type")
        raise UnsupportedField(f"{path} is {kind!r}; it must be function or allowed_tools.", field=path)
    inner = _inner(one, kind, nested)
    if kind == "function":
        return _Choice("required", (_known_name(inner, names),), once=True)
    return _take_allowed(inner, names, nested)


def _take_allowed(allowed: Fields, names: Sequence[str], nested: bool) -> _Choice:
    mode: Literal["auto", "required"] | None = allowed.take("mode", Literal["auto", "required"])
    entries = allowed.take_objects("tools")
    if mode is None or not entries:
        path = allowed.path("mode" if mode is None else "tools")
        raise InvalidRequest(f"{path} is missing.", field=path)
    chosen = []
    for entry in entries:
        entry.take("type", Literal["function"])
        chosen.append(_known_name(_inner(entry, "function", nested), names))
    allowed.refuse_rest()
    return _Choice(mode, tuple(chosen))


def _inner(fields: Fields, field: str, nested: bool) -> Fields:
    """The fields of a function: with `nested`, the inner object `field`; otherwise `fields` itself."""
    if not nested:
        return fields
    inner = fields.take_object(field) or Fields({}, fields.path(field))
    fields.refuse_rest()
    return inner


def _known_name(function: Fields, names: Sequence[str]) -> str:
    name: str = function.take("name", str, "")
    function.refuse_rest()
    if name not in names:
        path = function.path("name")
        raise InvalidRequest(f"{path} is {name!r}, which no tool is called.", field=path)
    return name


def _tag_format(path: str, wanted: Constraint) -> dict[str, Any]:
    """The constraint `wanted` on the content, as the format of a structural tag."""
    if wanted != Constraint(kind=wanted.kind, source=wanted.source):
        raise UnsupportedField(
            f"The options beside {path} cannot be combined with tools.",
            field=path,
            remedy='Leave them out, or use tool_choice "none".',
        )
    match wanted.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": msgspec.Raw(wanted.source.encode())}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": wanted.source}
        case "ebnf":
            return {"type": "grammar", "grammar": wanted.source}
        case "choices":
            options = [
                {"type": "const_string", "value": option} for option in msgspec.json.decode(wanted.source)
            ]
            return {"type": "or", "elements": options}
    raise UnsupportedField(
        f"{path} cannot be combined with tools while calls are optional.",
        field=path,
        remedy='Use tool_choice "required" or "none".',
    )
