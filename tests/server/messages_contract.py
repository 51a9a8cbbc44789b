"""Checks of a message and its events against Anthropic's own types."""

from __future__ import annotations

import json
from typing import Any, get_args

import pydantic
from anthropic.types import Message, RawMessageStreamEvent

EVENTS: dict[str, type[pydantic.BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(RawMessageStreamEvent)[0])
}
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block → the type of its deltas, and their field."""


def check_message(data: Any) -> Message:
    """Assert that `data` is a whole message without unknown fields; returns it parsed."""
    message = Message.model_validate(data)
    assert _beyond(message) <= {"ramify"}
    assert message.stop_reason is not None
    return message


def check_events(events: list[Any]) -> Any:
    """Assert that `events`, a whole stream, are in order and add up; returns the message that they make."""
    for data in events:
        assert _beyond(EVENTS[data["type"]].model_validate(data)) <= {"ramify"}
    start, *body, last, stop = events
    assert (start["type"], last["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert [message["usage"][name] for name in counts] == [last["usage"][name] for name in counts]
    while body:
        message["content"].append(_take_block(body, len(message["content"])))
    message["usage"] |= last["usage"]
    message |= last["delta"] | {name: last[name] for name in ("ramify",) if name in last}
    check_message(message)
    return message


def _take_block(events: list[Any], index: int) -> Any:
    """Remove the events of block `index` from `events` and check them; returns the whole block."""
    begun = events.pop(0)
    assert (begun["type"], begun["index"]) == ("content_block_start", index)
    block = begun["content_block"]
    kind, field = DELTAS[block["type"]]
    text = ""
    while (data := events.pop(0))["type"] == "content_block_delta":
        assert data["index"] == index
        if data["delta"]["type"] == "signature_delta":
            assert block["type"] == "thinking"
            assert events[0]["type"] == "content_block_stop"
            block["signature"] = data["delta"]["signature"]
            continue
        assert data["delta"]["type"] == kind
        text += data["delta"][field]
    assert data == {"type": "content_block_stop", "index": index}
    if block["type"] == "tool_use":
        assert block["input"] == {}
        block["input"] = json.loads(text)
    else:
        assert block[field] == ""
        block[field] = text
    return block


def _beyond(value: Any) -> set[str]:
    """Fields in `value` that the types of its objects do not define."""
    if isinstance(value, list):
        return set().union(*map(_beyond, value))
    if not isinstance(value, pydantic.BaseModel):
        return set()
    known = (getattr(value, name) for name in type(value).model_fields)
    return set(value.model_extra or ()).union(*map(_beyond, known))
