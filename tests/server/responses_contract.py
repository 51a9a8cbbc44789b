"""Checks of a response and its events against OpenAI's own types and reference."""

from __future__ import annotations

from typing import Any, get_args

import pydantic
from openai.types.responses import Response, ResponseStreamEvent

EVENTS: dict[str, type[pydantic.BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}
BEYOND = {"ramify", "store", "max_tokens", "status"}
"""Fields that OpenAI's type of a response lacks. OpenAI's service also sends `store`, and the `status` of a
custom_tool_call. `max_tokens` is the requested budget of the reasoning."""
CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
BEYOND_EVENTS = BEYOND | {"bytes", "name"}
"""Fields that OpenAI's types of events lack: `bytes` of tokens, and `name` with a call's arguments."""


def check_response(data: Any) -> Response:
    """Assert that `data` is a response without unknown fields; returns it parsed."""
    response = Response.model_validate(data)
    assert _beyond(response) <= BEYOND
    return response


def check_events(events: list[Any]) -> Any:
    """Assert that `events`, a whole stream, are in order and add up; returns the last response."""
    for number, data in enumerate(events):
        assert data["sequence_number"] == number
        assert _beyond(EVENTS[data["type"]].model_validate(data)) <= BEYOND_EVENTS
    created, in_progress, *body, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    for begun in (created, in_progress):
        assert begun["response"]["status"] == "in_progress"
        assert begun["response"]["output"] == []
        assert begun["response"]["usage"] is None
    final = last["response"]
    assert last["type"] == f"response.{final['status']}"
    check_response(final)
    items: list[Any] = []
    while body:
        items.append(_take_item(body, len(items)))
    assert final["output"] == items
    assert all(begun["response"]["id"] == final["id"] for begun in (created, in_progress))
    return final


def _take_item(events: list[Any], index: int) -> Any:
    """Remove the events of item `index` from `events` and check them; returns the complete item."""
    added = events.pop(0)
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item = added["item"]
    assert item["status"] == "in_progress"
    if item["type"] in CALLS:
        field, kind = CALLS[item["type"]]
        assert item[field] == ""
        item[field], done = _take_deltas(events, kind, item["id"], index)
        assert done[field] == item[field]
        assert done.get("name") == (item["name"] if field == "arguments" else None)
    else:
        assert item["content"] == []
        part_added = events.pop(0)
        part = part_added["part"]
        assert part_added["type"] == "response.content_part.added"
        assert (part["text"], part.get("logprobs", [])) == ("", [])
        logprobs: list[Any] = []
        part["text"], done = _take_deltas(events, part["type"], item["id"], index, logprobs)
        assert done["text"] == part["text"]
        if part["type"] == "output_text":
            part["logprobs"] = logprobs
            assert done["logprobs"] == logprobs
        part_done = events.pop(0)
        assert (part_done["type"], part_done["part"]) == ("response.content_part.done", part)
        for event in (part_added, done, part_done):
            assert (event["item_id"], event["output_index"], event["content_index"]) == (item["id"], index, 0)
        item["content"] = [part]
    item_done = events.pop(0)
    assert (item_done["type"], item_done["output_index"]) == ("response.output_item.done", index)
    assert item_done["item"]["status"] in ("completed", "incomplete")
    closed = {
        field: item_done["item"][field]
        for field in ("status", "encrypted_content")
        if field in item_done["item"]
    }
    assert item_done["item"] == item | closed
    return item_done["item"]


def _take_deltas(
    events: list[Any], kind: str, item_id: str, index: int, logprobs: list[Any] | None = None
) -> tuple[str, Any]:
    text = ""
    while (event := events.pop(0))["type"] == f"response.{kind}.delta":
        assert (event["item_id"], event["output_index"]) == (item_id, index)
        text += event["delta"]
        if logprobs is not None:
            logprobs += event.get("logprobs", [])
    assert event["type"] == f"response.{kind}.done"
    assert (event["item_id"], event["output_index"]) == (item_id, index)
    return text, event


def _beyond(value: Any) -> set[str]:
    """Fields in `value` that the types of its objects do not define."""
    if isinstance(value, list):
        return set().union(*map(_beyond, value))
    if not isinstance(value, pydantic.BaseModel):
        return set()
    known = (getattr(value, name) for name in type(value).model_fields)
    return set(value.model_extra or ()).union(*map(_beyond, known))
