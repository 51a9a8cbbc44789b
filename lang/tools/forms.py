"""Forms of tool calls: the texts of tools, calls and results for a model.

`TaggedCalls` writes calls in a format of `ramify.tool_calls`. `JsonCalls` writes one JSON object ``{"calls":
[{"name": …, "arguments": …}]}``, for endpoints that take only messages, and no constraints other than JSON
schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ramify.constraint import Constraint, closed_object, json_schema
from ramify.errors import UnsupportedNode
from ramify.json_text import read_json
from ramify.lang.tools.tool import Tool
from ramify.messages import ChatMessage
from ramify.messages import ToolCall as WrittenCall
from ramify.model_info import ToolPieces
from ramify.tool_calls.formats import GENERIC, ToolFormat
from ramify.tool_calls.grammar import calls_after_trigger, calls_or_content
from ramify.tool_calls.parser import Arguments, CallBegins, CallParser, Content
from ramify.tool_calls.prompt import plain_turns

Tools = Sequence[Tool[..., Any]]
WrittenCalls = list[tuple[str, str]]
"""The calls of an output in order: (name, arguments as JSON text)."""


@dataclass(frozen=True)
class TaggedCalls:
    """Calls in the format `form` of `ramify.tool_calls`. A turn of calls begins with `opening`, which is part
    of the prompt."""

    form: ToolFormat = GENERIC

    def instructions(self, tools: Tools) -> str:
        """The text that describes the tools to the model and tells how to call them."""
        turns = plain_turns(self.form, [tool.described for tool in tools], (), system_role=True)
        return turns[0].content

    def opening(self, required: bool) -> str:
        return self.form.trigger if required else ""

    def write(self, content: str, calls: WrittenCalls) -> str:
        """The text of a turn with the words `content` and the `calls`, including the opening."""
        called = tuple(WrittenCall(id="", name=name, arguments=arguments) for name, arguments in calls)
        turn = ChatMessage(role="assistant", content=content, tool_calls=called)
        return plain_turns(self.form, (), (turn,), system_role=True)[0].content

    def constraint(self, tools: Tools, required: bool, most: int) -> Constraint:
        """The constraint on the output after the opening: at most `most` calls of the tools, and at least one
        if `required`."""
        described = [tool.described for tool in tools]
        parallel = most > 1
        if required:
            return calls_after_trigger(self.form, described, parallel=parallel, most=most)
        if self.form.control:
            raise UnsupportedNode(
                f"A turn in the format {self.form.name} begins with a control token, so that it cannot be "
                "left to the model whether to call.",
                field="required",
                remedy="Use required=True, and a select before it.",
            )
        words = {"type": "any_text", "excludes": [self.form.trigger]}
        return calls_or_content(self.form, described, parallel=parallel, content=words, most=most)

    def read(self, text: str) -> tuple[str, WrittenCalls]:
        """The words and the calls in `text`, a turn that begins with the opening. Raises ValueError if a call
        is cut off."""
        reader = self.reader()
        content, calls = reader.push(text)
        return (content + reader.close()).strip(), calls

    def reader(self) -> TaggedReader:
        return TaggedReader(self.form)


class TaggedReader:
    """Reads a turn of `TaggedCalls` piece by piece."""

    def __init__(self, form: ToolFormat) -> None:
        self._parser = CallParser(form)
        self._calls: list[tuple[str, str]] = []
        self._returned = 0

    @property
    def begun(self) -> bool:
        """Whether a call has begun."""
        return self._parser.inside or self._parser.calls > 0

    def push(self, text: str) -> tuple[str, WrittenCalls]:
        """The words, and the calls that have become complete, with the next piece `text`."""
        content = self._take(self._parser.push(text))
        first, self._returned = self._returned, self._parser.ended
        return content, self._calls[first : self._parser.ended]

    def close(self) -> str:
        """The words that were held back. Raises ValueError if a call is cut off."""
        if self._parser.inside:
            raise ValueError(
                "The output ended inside a call; raise max_tokens, or leave out the stop string."
            )
        return self._take(self._parser.close())

    def _take(self, parts: Sequence[Content | CallBegins | Arguments]) -> str:
        content = ""
        for part in parts:
            if isinstance(part, Content):
                content += part.text
            elif isinstance(part, CallBegins):
                self._calls.append((part.name, ""))
            else:
                name, arguments = self._calls[part.index]
                self._calls[part.index] = (name, arguments + part.text)
        return content


def _facts(tool: Tool[..., Any]) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def native_instructions(pieces: ToolPieces, tools: Tools) -> str:
    """The descriptions of the tools as the model's chat template writes them. `pieces` are the texts of the
    template."""
    listed = [
        json.dumps({"type": "function", "function": _facts(tool)}, ensure_ascii=False, indent=pieces.indent)
        for tool in tools
    ]
    return pieces.before + pieces.between.join(listed) + pieces.after


@dataclass(frozen=True)
class JsonCalls:
    """Calls as one JSON object, with the methods of `TaggedCalls`."""

    def instructions(self, tools: Tools) -> str:
        listed = "\n".join(json.dumps(_facts(tool), ensure_ascii=False) for tool in tools)
        return (
            f"You can call functions. Each is described by a line of JSON:\n{listed}\n"
            'To call functions, answer with JSON like {"calls": [{"name": "example", "arguments": '
            '{"key": "value"}}]}. Their results come in the next turn.'
        )

    def opening(self, required: bool) -> str:
        return ""

    def write(self, content: str, calls: WrittenCalls) -> str:
        words = {"text": content} if content else {}
        listed = [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls]
        return json.dumps({**words, "calls": listed}, ensure_ascii=False)

    def constraint(self, tools: Tools, required: bool, most: int) -> Constraint:
        definitions: dict[str, Any] = {}
        calls = {
            "type": "array",
            "items": {"anyOf": [_call_schema(tool, definitions) for tool in tools]},
            "minItems": int(required),
            "maxItems": most,
        }
        properties = {"calls": calls} if required else {"text": {"type": "string"}, "calls": calls}
        schema = closed_object(properties)
        return json_schema(schema | {"$defs": definitions} if definitions else schema)

    def reader(self) -> WholeReader:
        return WholeReader()

    def read(self, text: str) -> tuple[str, WrittenCalls]:
        found = read_json(text)
        try:
            calls = [(one["name"], json.dumps(one["arguments"])) for one in found["calls"]]
            return str(found.get("text", "")), calls
        except (TypeError, KeyError, AttributeError):
            raise ValueError(
                f"The endpoint did not keep to the form of calls; it answered {text!r}."
            ) from None


class WholeReader:
    """The reader of `JsonCalls`, which are read when the turn is complete."""

    begun = True

    def push(self, text: str) -> tuple[str, WrittenCalls]:
        return "", []


def _call_schema(tool: Tool[..., Any], definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = _rerooted(tool.parameters, tool.name)
    own = {f"{tool.name}.{name}": one for name, one in parameters.pop("$defs", {}).items()}
    if re.search(rf'"#/\$defs/{tool.name}["/]', json.dumps([parameters, own])):
        own[tool.name] = parameters
        parameters = {"$ref": f"#/$defs/{tool.name}"}
    definitions |= own
    return closed_object({"name": {"const": tool.name}, "arguments": parameters})


def _rerooted(schema: Any, tool: str) -> Any:
    """A copy of `schema`, the parameters of `tool`, that can be a part of a larger schema. ``#/$defs/NAME``
    becomes ``#/$defs/tool.NAME``. Other references into `schema` become references into ``#/$defs/tool``, a
    definition that is the whole of `schema`."""
    if isinstance(schema, list):
        return [_rerooted(one, tool) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _rerooted(value, tool) for key, value in schema.items()}
    if isinstance(reference := changed.get("$ref"), str) and reference.startswith("#"):
        shared = reference.startswith("#/$defs/")
        changed["$ref"] = f"#/$defs/{tool}" + (f".{reference[8:]}" if shared else reference[1:])
    return changed
