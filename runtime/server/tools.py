"""What a chat request says of tools: which there are, which must or may be called, and how."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint, InvalidRequest, UnsupportedField
from ramify.messages import Preamble
from ramify.runtime.server.fields import Fields, decode
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.grammar import (
    Tool,
    blamed_tool,
    calls_after_trigger,
    calls_or_content,
    preamble_of,
)

MAX_TOOLS = 128
"""As OpenAI's API has it."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS = '{"type":"object","properties":{},"additionalProperties":false}'

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request. `callable` are those that this turn may call, by their index in `tools`."""

    form: ToolFormat
    tools: tuple[Tool, ...]
    callable: tuple[int, ...]
    mode: Mode
    parallel: bool

    @property
    def shown(self) -> tuple[Tool, ...]:
        """What the model is told of: nothing where it must not call."""
        return () if self.mode == "none" else self.tools

    def constrained(self, found: tuple[str, Constraint] | None) -> tuple[tuple[Preamble, ...], Constraint]:
        """The preamble and the constraint of a turn that may call; `found` is the constraint on content."""
        tools = [self.tools[i] for i in self.callable]
        if self.mode == "required" or found is None:
            preamble = preamble_of(self.form, required=self.mode == "required")
            return (preamble,), calls_after_trigger(self.form, tools, parallel=self.parallel)
        path, wanted = found
        if self.form.control:
            raise UnsupportedField(
                f"This model marks calls by a control token, so {path} and tools with tool_choice auto"
                " cannot be combined.",
                field=path,
                remedy='Use tool_choice "required" or "none".',
            )
        content = _tag_format(path, wanted)
        return (), calls_or_content(self.form, tools, parallel=self.parallel, content=content)

    def explain(self, error: InvalidConstraint) -> None:
        """Let an error in a tool's schema name the tool's field."""
        blamed = blamed_tool(error, [self.tools[i] for i in self.callable])
        if blamed is not None:
            index, error.pointer = blamed
            error.field = f"tools[{self.callable[index]}].function.parameters"


def take_tools(fields: Fields, form: ToolFormat) -> ToolUse | None:
    """What the request says of tools; None where it has none."""
    items = fields.take_objects("tools")
    parallel: bool | None = fields.take("parallel_tool_calls", bool)
    choice: Any = fields.take("tool_choice", str | dict[str, msgspec.Raw])
    if not items:
        if isinstance(choice, dict) or choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools.", field="tool_choice")
        if parallel is not None:
            raise InvalidRequest("parallel_tool_calls needs tools.", field="parallel_tool_calls")
        return None
    if len(items) > MAX_TOOLS:
        raise InvalidRequest(f"There are {len(items)} tools; at most {MAX_TOOLS} are taken.", field="tools")
    tools = tuple(_take_tool(item) for item in items)
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            path = f"tools[{i}].function.name"
            raise InvalidRequest(f"{path} is {name!r}, which another tool is called.", field=path)
    mode, chosen = _take_choice(choice, names)
    named = isinstance(choice, dict) and "function" in choice
    return ToolUse(
        form=form,
        tools=tools,
        callable=tuple(i for i, name in enumerate(names) if chosen is None or name in chosen),
        mode=mode,
        parallel=parallel is not False and not named,
    )


def _take_tool(item: Fields) -> Tool:
    kind: str | None = item.take("type", str)
    if kind != "function":
        raise UnsupportedField(
            f"{item.path('type')} is {kind!r}; only functions are supported.", field=item.path("type")
        )
    function = item.take_object("function")
    if function is None:
        raise InvalidRequest(f"{item.path('function')} is missing.", field=item.path("function"))
    name: str = function.take("name", str, "")
    path = function.path("name")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path} is {name!r}; it must be 1 to 64 letters, digits, underscores and dashes.", field=path
        )
    description: str = function.take("description", str, "")
    parameters = function.take_text("parameters")
    function.take("strict", bool)  # arguments always satisfy their schema
    function.refuse_rest()
    item.refuse_rest()
    return Tool(
        name=name,
        description=description,
        parameters=_NO_PARAMETERS if parameters is None else _object_schema(parameters, function),
    )


def _object_schema(parameters: str, function: Fields) -> str:
    """`parameters`, which says or is made to say that arguments are an object."""
    path = function.path("parameters")
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


def _take_choice(choice: Any, names: Sequence[str]) -> tuple[Mode, tuple[str, ...] | None]:
    """The mode, and the names that may be called; None: all."""
    match choice:
        case None | "auto":
            return "auto", None
        case "none" | "required":
            return choice, None
        case str():
            raise InvalidRequest(
                f"tool_choice is {choice!r}; it must be none, auto, required, or name a function.",
                field="tool_choice",
            )
    one = Fields(choice, "tool_choice")
    kind: str | None = one.take("type", str)
    match kind:
        case "function":
            function = one.take_object("function") or Fields({}, one.path("function"))
            name = _known_name(function, names)
            one.refuse_rest()
            return "required", (name,)
        case "allowed_tools":
            allowed = one.take_object("allowed_tools") or Fields({}, one.path("allowed_tools"))
            one.refuse_rest()
            return _take_allowed(allowed, names)
    path = one.path("type")
    raise UnsupportedField(f"{path} is {kind!r}; it must be function or allowed_tools.", field=path)


def _take_allowed(allowed: Fields, names: Sequence[str]) -> tuple[Mode, tuple[str, ...]]:
    mode: Literal["auto", "required"] | None = allowed.take("mode", Literal["auto", "required"])
    entries = allowed.take_objects("tools")
    if mode is None or not entries:
        path = allowed.path("mode" if mode is None else "tools")
        raise InvalidRequest(f"{path} is missing.", field=path)
    chosen = []
    for entry in entries:
        entry.take("type", Literal["function"])
        chosen.append(_known_name(entry.take_object("function") or Fields({}, entry.path("function")), names))
        entry.refuse_rest()
    allowed.refuse_rest()
    return mode, tuple(chosen)


def _known_name(function: Fields, names: Sequence[str]) -> str:
    name: str = function.take("name", str, "")
    function.refuse_rest()
    if name not in names:
        path = function.path("name")
        raise InvalidRequest(f"{path} is {name!r}, which no tool is called.", field=path)
    return name


def _tag_format(path: str, wanted: Constraint) -> dict[str, Any]:
    """A constraint on content as a structural tag format."""
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
