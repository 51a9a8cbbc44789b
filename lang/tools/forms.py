"""How tools, their calls and their results are written for one model: as tagged text, or as a JSON object.

Tagged text is that of `ramify.tool_calls`. One JSON object ``{"calls": [{"name": …, "arguments": …}]}`` is
for endpoints that take whole messages and no other constraint than a JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ramify.constraint import Constraint, json_schema
from ramify.errors import UnsupportedNode
from ramify.lang.tools.tool import Tool
from ramify.messages import ToolPieces
from ramify.tool_calls.formats import GENERIC, ToolFormat
from ramify.tool_calls.grammar import calls_after_trigger, calls_or_content
from ramify.tool_calls.parser import Arguments, CallBegins, CallParser, Content
from ramify.tool_calls.prompt import plain_turns

Tools = Sequence[Tool[..., Any]]
Asked = list[tuple[str, str]]
"""Calls as the model wrote them: name, and arguments as JSON text."""


class CallForm(Protocol):
    """The texts and the constraint of a turn of calls."""

    def instructions(self, tools: Tools) -> str:
        """What the model is told of the tools."""
        ...

    def opening(self, required: bool) -> str:
        """What the turn begins with before the model writes."""
        ...

    def constraint(self, tools: Tools, required: bool, most: int) -> Constraint:
        """What the model may write after the opening."""
        ...

    def read(self, text: str) -> tuple[str, Asked]:
        """The words and the calls of a turn, opening included; raises ValueError where a call is cut off."""
        ...

    def result(self, text: str) -> str:
        """A result as it is shown in the turn that brings the results, which are lines of it."""
        ...


@dataclass(frozen=True)
class Tagged:
    """Calls as text of a format of `ramify.tool_calls`."""

    form: ToolFormat = GENERIC

    def instructions(self, tools: Tools) -> str:
        told = plain_turns(self.form, [tool.described for tool in tools], (), system_role=True)
        return told[0].content

    def opening(self, required: bool) -> str:
        return self.form.trigger if required else ""

    def constraint(self, tools: Tools, required: bool, most: int) -> Constraint:
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

    def read(self, text: str) -> tuple[str, Asked]:
        reader = CallParser(self.form)
        words: list[str] = []
        asked: list[tuple[str, list[str]]] = []
        for part in (*reader.push(text), *reader.close()):
            if isinstance(part, Content):
                words.append(part.text)
            elif isinstance(part, CallBegins):
                asked.append((part.name, []))
            elif isinstance(part, Arguments):
                asked[part.index][1].append(part.text)
        if reader.inside:
            raise ValueError("The output ended inside a call; raise max_tokens.")
        return "".join(words).strip(), [(name, "".join(parts)) for name, parts in asked]

    def result(self, text: str) -> str:
        return text.join(self.form.result or GENERIC.result)


def native_instructions(pieces: ToolPieces, tools: Tools) -> str:
    """What the model is told of the tools, as its own template says it."""
    listed = [
        json.dumps(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            },
            ensure_ascii=False,
            indent=pieces.indent,
        )
        for tool in tools
    ]
    return pieces.before + pieces.between.join(listed) + pieces.after


@dataclass(frozen=True)
class Whole:
    """Calls as one JSON object."""

    def instructions(self, tools: Tools) -> str:
        listed = "\n".join(
            json.dumps(
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
                ensure_ascii=False,
            )
            for tool in tools
        )
        return (
            f"You can call functions. Each is described by a line of JSON:\n{listed}\n"
            'To call functions, answer with JSON like {"calls": [{"name": "example", "arguments": '
            '{"key": "value"}}]}. Their results come in the next turn.'
        )

    def opening(self, required: bool) -> str:
        return ""

    def constraint(self, tools: Tools, required: bool, most: int) -> Constraint:
        definitions: dict[str, Any] = {}
        calls = {
            "type": "array",
            "items": {"anyOf": [_call_schema(tool, definitions) for tool in tools]},
            "minItems": int(required),
            "maxItems": most,
        }
        properties = {"calls": calls} if required else {"text": {"type": "string"}, "calls": calls}
        schema = _closed(properties)
        return json_schema(schema | {"$defs": definitions} if definitions else schema)

    def read(self, text: str) -> tuple[str, Asked]:
        found = json.loads(text)
        try:
            calls = [(one["name"], json.dumps(one["arguments"])) for one in found["calls"]]
            return str(found.get("text", "")), calls
        except (TypeError, KeyError, AttributeError):
            raise ValueError(
                f"The endpoint did not keep to the form of calls; it answered {text!r}."
            ) from None

    def result(self, text: str) -> str:
        return text.join(GENERIC.result)


def _call_schema(tool: Tool[..., Any], definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = _rerooted(tool.parameters, tool.name)
    for name, definition in parameters.pop("$defs", {}).items():
        definitions[f"{tool.name}.{name}"] = definition
    return _closed({"name": {"const": tool.name}, "arguments": parameters})


def _rerooted(schema: Any, tool: str) -> Any:
    """`schema` with its references into ``$defs`` pointing at the definitions of `tool`."""
    if isinstance(schema, list):
        return [_rerooted(one, tool) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _rerooted(value, tool) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str):
        moved["$ref"] = reference.replace("#/$defs/", f"#/$defs/{tool}.", 1)
    return moved


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
