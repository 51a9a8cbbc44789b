"""The state of a request for decisions, which all of its questions are about."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ramify.decisions import decider
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, Generate
from ramify.model_info import ChatFormat
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.responses.input import TurnBuilder, take_item
from ramify.runtime.server.tables.decisions import INPUT_ITEM, INPUT_PART
from ramify.runtime.server.tables.rows import FieldTable
from ramify.text import quoted
from ramify.tool_calls.formats import FORMATS
from ramify.tool_calls.prompt import plain_turns

MAX_JSON_LEVELS, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 256 << 10
"""Limits of JSON in a state or a question: nested objects and arrays; values, these included; bytes of
compact UTF-8. All three are OpenAI's."""

_ITEMS = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    }
)
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal"})
_IMAGES = frozenset({"input_image", "image_url", "image"})


def text_state(text: str, rid: str, chat_format: ChatFormat | None) -> Generate:
    """A request with the id `rid` whose state is `text`: a user turn, or if the model has no chat template, a
    plain prompt."""
    if chat_format is None:
        return Generate(rid=rid, prompt=(text,))
    return Generate(rid=rid, chat=(ChatMessage(role="user", content=text),))


def take_input(
    fields: Fields, rid: str, chat_format: ChatFormat | None, trained_layout: str = ""
) -> Generate:
    """Take the state from ``input``, a text or items, as a request with the id `rid`.

    trained_layout : as in `json_line`
    """
    given: str | list[msgspec.Raw] | None = fields.take("input", str | list[msgspec.Raw])
    if not given:
        raise InvalidRequest("input is missing or empty.", field="input")
    if isinstance(given, str):
        return text_state(given, rid, chat_format)
    if chat_format is None:
        raise InvalidRequest("The model has no chat template.", field="input", remedy="Give input as a text.")
    turns = TurnBuilder(lambda item, field: take_parts(item, field, INPUT_PART, trained_layout))
    for item in fields.take_objects("input") or ():
        _take_item(item, turns, chat_format)
    messages = turns.finish()
    tool_format = FORMATS[chat_format.tool_format]
    if not tool_format.native and any(turn.tool_calls or turn.role == "tool" for turn in messages):
        messages = plain_turns(tool_format, (), messages, system_role=">system" in chat_format.prefix)
    return Generate(rid=rid, chat=messages)


def _take_item(item: Fields, turns: TurnBuilder, chat_format: ChatFormat) -> None:
    kind: str = item.take("type", str, "message")
    if kind not in _ITEMS:
        path = item.path("type")
        raise UnsupportedField(
            f"{path} is {quoted(kind)}; only {', '.join(sorted(_ITEMS))} are supported.", field=path
        )
    if kind.endswith("_output"):
        call_id = item.need("call_id")
        if call_id not in turns.called and not item.body.left_out:  # the call itself may be left out
            path = item.path("call_id")
            raise InvalidRequest(
                f"{path} is {quoted(call_id)}, which no call before it has as its id.", field=path
            )
    take_item(item, kind, turns, chat_format)
    item.finish(INPUT_ITEM)


def take_parts(fields: Fields, field: str, table: FieldTable, trained_layout: str = "") -> str:
    """The text in `field`: a string, or a list of parts with the fields of `table`. A part of JSON has lines
    of its own. Raises `InvalidRequest` if `field` is missing, and `UnsupportedField` for an image.

    trained_layout : as in `json_line`
    """
    path = fields.path(field)
    value: str | list[msgspec.Raw] | None = fields.take(field, str | list[msgspec.Raw])
    if value is None:
        raise InvalidRequest(f"{path} is missing.", field=path)
    if isinstance(value, str):
        return value
    text, line = "", False
    for part in fields.take_objects(field) or ():
        new, own_line = _take_part(part, table, trained_layout)
        part.finish(table)
        if text and (line or own_line) and not text.endswith("\n"):
            text += "\n"
        text, line = text + new, own_line
    return text


def _take_part(part: Fields, table: FieldTable, trained_layout: str) -> tuple[str, bool]:
    """(the text of a part, whether it is JSON)."""
    kind: str = part.need("type")
    if kind == "input_json":
        value = part.need("data", list[dict[str, Any]] | dict[str, Any])
        _check_size(value, part.path("data"))
        return json_line(value, trained_layout), True
    field = "refusal" if kind == "refusal" else "text"
    if kind in _TEXTS and field in table.names("taken"):
        text: str | None = part.take(field, str)
        if text is None:
            raise InvalidRequest(f"{part.path(field)} is missing.", field=part.path(field))
        return text, False
    path = part.path("type")
    if kind in _IMAGES:
        raise UnsupportedField(
            f"{path} is {quoted(kind)}; images are not supported.",
            field=path,
            remedy="Describe the image in a part of the type input_text.",
        )
    raise UnsupportedField(
        f"{path} is {quoted(kind)}; only input_text, input_json, output_text and refusal are supported.",
        field=path,
    )


def json_line(value: Any, trained_layout: str = "") -> str:
    """`value`, an object or array from JSON, as the text that the model is shown: one line of JSON, with a
    space after each comma and colon, and the keys in the order of the body.

    trained_layout : for a state, the layout that it is written for: deciders have their own form of JSON
    """
    if trained_layout.startswith("decider-"):
        return decider.state_text(value)
    return json.dumps(value, ensure_ascii=False)


def _check_size(value: Any, path: str) -> None:
    """Raise `InvalidRequest`, naming `path`, for JSON over OpenAI's limits."""
    levels = values = 0
    layer = [value]
    while layer and levels <= MAX_JSON_LEVELS and values <= MAX_JSON_VALUES:
        values += len(layer)
        containers = [one for one in layer if isinstance(one, dict | list)]
        levels += bool(containers)
        layer = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
    if levels > MAX_JSON_LEVELS:
        problem = f"is nested in more than {MAX_JSON_LEVELS} levels"
    elif values > MAX_JSON_VALUES:
        problem = f"has more than {MAX_JSON_VALUES} values"
    elif len(msgspec.json.encode(value)) > MAX_JSON_BYTES:
        problem = f"has more than {MAX_JSON_BYTES} bytes of compact JSON"
    else:
        return
    raise InvalidRequest(f"{path} {problem}.", field=path, remedy="Leave out what no question is about.")
