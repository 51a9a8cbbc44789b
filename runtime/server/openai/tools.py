"""Parses the tool options of a chat request: the tools, and which of them may or must be called.

The Responses API has kinds of tools of its own: see `responses.tools`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from ramify import constraint
from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint, InvalidRequest, UnsupportedField
from ramify.messages import Enforcement, Preamble
from ramify.runtime.server.fields import Fields, decode
from ramify.runtime.server.params import FieldConstraint, make_constraint
from ramify.runtime.server.tables.openai import FUNCTION, TOOL
from ramify.text import quoted
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
from ramify.tool_calls.text import TextFormat

MAX_TOOLS = 128
"""Maximum number of tools in a request, as in OpenAI's API. The grammar of 300 small tools has more states
than may be compiled, and their descriptions are 19,000 tokens."""

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
NO_PARAMETERS = '{"type":"object","properties":{},"additionalProperties":false}'

Mode = Literal["none", "auto", "required"]


class ToolName(NamedTuple):
    """The name of a tool, as the client writes it."""

    name: str
    namespace: str | None = None

    @property
    def shown(self) -> str:
        """The name by which the model knows the tool."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class OfferedTool(NamedTuple):
    """A tool of a request."""

    tool: Tool
    name: ToolName
    place: str
    """Full name of the field with its schema or grammar, such as ``tools[0].parameters``."""
    path: str
    """Full name of the field with its name, such as ``tools[0].name``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request. `callable` has the indices in `tools` of those that this turn may call."""

    tool_format: ToolFormat
    tools: tuple[Tool, ...]
    callable: tuple[int, ...]
    mode: Mode
    parallel: bool
    places: tuple[str, ...]
    """Full name of the field with the schema or grammar of each tool, such as ``tools[0].parameters``."""
    names: Mapping[str, ToolName] = field(default_factory=dict)
    """Name by which the model knows a tool → the client's name, for tools in a namespace."""

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
            error.field = self.places[self.callable[index]]

    def tell(self, enforcement: Enforcement) -> Enforcement:
        """`enforcement` with unenforced keywords located by tool: see `naming_tools`."""
        return naming_tools(enforcement, self._callable)

    @property
    def _callable(self) -> list[Tool]:
        return [self.tools[i] for i in self.callable]


class ToolChoice(NamedTuple):
    """The tools that a turn may or must call."""

    mode: Mode
    callable: tuple[int, ...] | None = None
    """Indices of the tools that may be called; None for all."""
    once: bool = False
    """Whether at most one call is allowed."""

    def use_of(self, tool_format: ToolFormat, offered: Sequence[OfferedTool], *, parallel: bool) -> ToolUse:
        return ToolUse(
            tool_format=tool_format,
            tools=tuple(one.tool for one in offered),
            callable=tuple(range(len(offered))) if self.callable is None else self.callable,
            mode=self.mode,
            parallel=parallel and not self.once,
            places=tuple(one.place for one in offered),
            names={one.tool.name: one.name for one in offered if one.name.namespace is not None},
        )


def take_tools(fields: Fields, tool_format: ToolFormat, *, nested: bool) -> ToolUse | None:
    """Take the tools of the request; None if it has none.

    nested : the fields of a function are in an inner object ``function``, as in chat completions
    """
    items = fields.take_objects("tools")
    return use_of(fields, tool_format, [take_tool(item, nested) for item in items or ()], nested=nested)


def use_of(
    fields: Fields, tool_format: ToolFormat, offered: Sequence[OfferedTool], *, nested: bool
) -> ToolUse | None:
    """Take the options beside the tools `offered`; returns None if there are none."""
    parallel: bool | None = fields.take("parallel_tool_calls", bool)
    choice: Any = fields.take("tool_choice", str | dict[str, msgspec.Raw])
    if not offered:
        if isinstance(choice, dict) or choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools.", field="tool_choice")
        if parallel is not None and nested:  # the Responses API accepts it without tools
            raise InvalidRequest("parallel_tool_calls needs tools.", field="parallel_tool_calls")
        return None
    check_tools(offered)
    chosen = _take_choice(fields, choice, offered, nested)
    return chosen.use_of(tool_format, offered, parallel=parallel is not False)


def check_tools(offered: Sequence[OfferedTool]) -> None:
    """Raise `InvalidRequest` for too many tools, and for two of the same name."""
    if len(offered) > MAX_TOOLS:
        raise InvalidRequest(f"There are {len(offered)} tools; at most {MAX_TOOLS} are taken.", field="tools")
    shown: set[str] = set()
    for one in offered:
        if one.tool.name in shown:
            raise InvalidRequest(
                f"{one.path} is {one.tool.name!r}, which another tool is called.", field=one.path
            )
        shown.add(one.tool.name)


def take_tool(item: Fields, nested: bool, namespace: str | None = None) -> OfferedTool:
    """Take one tool, which may be in a `namespace` of the Responses API."""
    kind: str = item.take("type", str, "function")  # clients that only have functions may leave it out
    if kind not in ("function", "custom"):
        raise UnsupportedField(
            f"{item.path('type')} is {quoted(kind)}; only functions and custom tools are supported.",
            field=item.path("type"),
            remedy="Offer it as a function, and call it yourself.",
        )
    inner = item.take_object(kind) if nested else item
    if inner is None:
        raise InvalidRequest(f"{item.path(kind)} is missing.", field=item.path(kind))
    name = ToolName(take_name(inner), namespace)
    description: str = inner.take("description", str, "")
    if kind == "custom":
        text, place = _take_text_format(inner, nested)
        tool = Tool(name=name.shown, description=description, text=text)
    else:
        place = inner.path("parameters")
        parameters = inner.take_text("parameters")
        tool = Tool(
            name=name.shown,
            description=description,
            parameters=NO_PARAMETERS if parameters is None else object_schema(parameters, place),
            # The defaults of the APIs: best effort in chat completions, strict in responses.
            strict=inner.take("strict", bool, not nested),
        )
    inner.finish(FUNCTION)
    if nested:
        item.finish(TOOL)
    return OfferedTool(tool, name, place, inner.path("name"))


def _take_text_format(tool: Fields, nested: bool) -> tuple[TextFormat, str]:
    """(the format of a custom tool's input, the full name of the field with its grammar).

    nested : the fields of a grammar are in an inner object ``grammar``, as in chat completions
    """
    form = tool.take_object("format") or Fields({}, tool.path("format"))
    kind: str = form.take("type", str, "text")
    if kind == "text":
        form.refuse_rest()
        return TextFormat(), form.path("type")
    if kind != "grammar":
        path = form.path("type")
        raise UnsupportedField(f"{path} is {quoted(kind)}; it must be text or grammar.", field=path)
    grammar = form.take_object("grammar") or Fields({}, form.path("grammar")) if nested else form
    syntax: Literal["lark", "regex"] | None = grammar.take("syntax", Literal["lark", "regex"])
    if syntax is None:
        raise InvalidRequest(f"{grammar.path('syntax')} is missing.", field=grammar.path("syntax"))
    make = constraint.lark if syntax == "lark" else constraint.regex
    place = grammar.path("definition")
    wanted = make_constraint(place, make, grammar.need("definition"))
    grammar.refuse_rest()
    form.refuse_rest()
    return TextFormat(wanted), place


def take_name(tool: Fields, most: int = 64) -> str:
    """The name of a tool or a namespace, of at most `most` characters."""
    name: str = tool.take("name", str, "")
    if len(name) > most or not _NAME.fullmatch(name):
        path = tool.path("name")
        raise InvalidRequest(
            f"{path} is {quoted(name)}; it must be 1 to {most} letters, digits, underscores and dashes.",
            field=path,
        )
    return name


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


def _take_choice(fields: Fields, choice: Any, offered: Sequence[OfferedTool], nested: bool) -> ToolChoice:
    match choice:
        case None | "auto":
            return ToolChoice("auto")
        case "none" | "required":
            return ToolChoice(choice)
        case str():
            raise InvalidRequest(
                f"tool_choice is {quoted(choice)}; it must be none, auto, required, or name a function.",
                field="tool_choice",
            )
    one = fields.take_object("tool_choice") or Fields({}, "tool_choice")
    kind: str = one.take("type", str, "function")
    if kind == "allowed_tools":
        return _take_allowed(_inner(one, kind, nested), offered, nested)
    if kind not in ("function", "custom"):
        path = one.path("type")
        known = "function, custom or allowed_tools"
        raise UnsupportedField(f"{path} is {quoted(kind)}; it must be {known}.", field=path)
    return ToolChoice("required", (_known_tool(_inner(one, kind, nested), offered, nested),), once=True)


def _take_allowed(allowed: Fields, offered: Sequence[OfferedTool], nested: bool) -> ToolChoice:
    mode: Literal["auto", "required"] | None = allowed.take("mode", Literal["auto", "required"])
    entries = allowed.take_objects("tools")
    if mode is None or not entries:
        path = allowed.path("mode" if mode is None else "tools")
        raise InvalidRequest(f"{path} is missing.", field=path)
    chosen: set[int] = set()
    for entry in entries:
        kind: str = entry.take("type", Literal["function", "custom", "namespace"], "function")
        if kind == "namespace":
            chosen.update(_tools_in(entry, offered))
        else:
            chosen.add(_known_tool(_inner(entry, kind, nested), offered, nested))
    allowed.refuse_rest()
    return ToolChoice(mode, tuple(sorted(chosen)))


def _inner(fields: Fields, field: str, nested: bool) -> Fields:
    """The fields of a function: with `nested`, the inner object `field`; otherwise `fields` itself."""
    if not nested:
        return fields
    inner = fields.take_object(field) or Fields({}, fields.path(field))
    fields.refuse_rest()
    return inner


def _known_tool(function: Fields, offered: Sequence[OfferedTool], nested: bool) -> int:
    """The index of the tool that `function` names."""
    name: str = function.take("name", str, "")
    namespace: str | None = None if nested else function.take("namespace", str)
    function.refuse_rest()
    return known_tool(ToolName(name, namespace), offered, function.path("name"))


def known_tool(wanted: ToolName, offered: Sequence[OfferedTool], path: str) -> int:
    """The index of the tool `wanted`, which the field `path` names. A name alone may also stand for a tool in
    a namespace."""
    name, namespace = wanted
    found = [i for i, one in enumerate(offered) if one.name == wanted]
    if not found and namespace is None:
        found = [i for i, one in enumerate(offered) if one.name.name == name]
    if len(found) > 1:
        raise InvalidRequest(
            f"{path} is {quoted(name)}, which is in several namespaces.",
            field=path,
            remedy="Add its namespace.",
        )
    if not found:
        raise InvalidRequest(f"{path} is {quoted(name)}, which no tool is called.", field=path)
    return found[0]


def _tools_in(entry: Fields, offered: Sequence[OfferedTool]) -> list[int]:
    """The indices of the tools in the namespace that `entry` names."""
    name: str = entry.take("name", str, "")
    entry.refuse_rest()
    found = [i for i, one in enumerate(offered) if one.name.namespace == name]
    if not found:
        path = entry.path("name")
        raise InvalidRequest(f"{path} is {quoted(name)}, which no namespace is called.", field=path)
    return found


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
