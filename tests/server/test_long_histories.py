"""Histories of thousands of calls and results are parsed in a time that grows with their number alone."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from ramify.errors import InvalidRequest
from ramify.model_info import ChatFormat
from ramify.runtime.server.anthropic.cache import CacheMarks
from ramify.runtime.server.anthropic.turns import take_turns
from ramify.runtime.server.fields import MAX_OBJECTS, Fields
from ramify.runtime.server.ollama import messages as ollama
from ramify.runtime.server.openai.chat_turns import take_messages
from ramify.runtime.server.openai.responses.input import take_input
from ramify.runtime.server.openai.responses.store import Item, Storage
from ramify.runtime.server.openai.responses.tools import take_response_tools
from ramify.tool_calls.formats import FORMATS

USER: Any = {"role": "user", "content": "hi"}
FORMAT = ChatFormat(prefix={}, suffix={}, exact=True)


def chat(count: int, *, at_once: bool) -> Any:
    calls = [{"id": f"c{n}", "function": {"name": "f", "arguments": "{}"}} for n in range(count)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(count)]
    if at_once:
        return {"messages": [USER, {"role": "assistant", "tool_calls": calls}, *results]}
    turns = ({"role": "assistant", "tool_calls": [call]} for call in calls)
    return {"messages": [one for pair in zip(turns, results, strict=True) for one in pair]}


def responses(count: int, *, at_once: bool) -> Any:
    calls = [
        {"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"} for n in range(count)
    ]
    results = [{"type": "function_call_output", "call_id": f"c{n}", "output": "x"} for n in range(count)]
    if at_once:
        return {"input": [*calls, *results]}
    return {"input": [one for pair in zip(calls, results, strict=True) for one in pair]}


def anthropic(count: int, *, at_once: bool) -> Any:
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": {}} for n in range(count)]
    results = [{"type": "tool_result", "tool_use_id": f"c{n}", "content": "x"} for n in range(count)]
    if at_once:
        said, told = {"role": "assistant", "content": calls}, {"role": "user", "content": results}
        return {"messages": [USER, said, told]}
    first = [{"role": "assistant", "content": [call]} for call in calls]
    return {"messages": [USER, *first, *({"role": "user", "content": [one]} for one in results)]}


def one_role(count: int, *, at_once: bool) -> Any:
    """Many messages of a long text, which become one turn."""
    return {"messages": [{"role": "user", "content": "x" * 4000 * (2 if at_once else 1)}] * count}


def of_ollama(count: int, *, at_once: bool) -> Any:
    """Results that name the last calls first."""
    body = chat(count, at_once=True)
    *first, said = body["messages"][:2]
    for call in said["tool_calls"]:
        call["function"]["arguments"] = {}
    named = "tool_call_id" if at_once else "tool_name"
    if not at_once:
        for n, call in enumerate(said["tool_calls"]):
            call["function"]["name"] = f"c{n}"
    results = [{"role": "tool", "content": "x", named: f"c{n}"} for n in reversed(range(count))]
    return {"messages": [*first, said, *results]}


def additional_tools(count: int, *, at_once: bool) -> Any:
    tools = [[{"name": f"f{n}"}] for n in range(count)]
    if at_once:
        tools = [[tool for one in tools for tool in one]]
    return {"input": [{"type": "additional_tools", "tools": one} for one in tools]}


def tools_of(fields: Fields, _: ChatFormat) -> None:
    additional = [item.take_objects("tools") or [] for item in fields.take_objects("input") or []]
    with pytest.raises(InvalidRequest, match="tools; at most"):
        take_response_tools(fields, FORMATS["hermes"], additional)


def private(count: int, *, at_once: bool) -> Any:
    """Fields without an effect, of one object or of many."""
    if at_once:
        return {f"_{n}": 1 for n in range(count)}
    return {"messages": [USER | {f"__{n}": 1} for n in range(count)]}


def private_fields(fields: Fields, chat_format: ChatFormat) -> None:
    if fields.given("messages"):
        take_messages(fields, chat_format)
    fields.refuse_rest()


PARSERS: dict[str, tuple[Callable[..., Any], Callable[[Fields, ChatFormat], object]]] = {
    "chat": (chat, take_messages),
    "responses": (responses, take_input),
    "anthropic": (anthropic, lambda fields, form: take_turns(fields, form, CacheMarks())),
    "one role": (one_role, lambda fields, form: take_turns(fields, form, CacheMarks())),
    "ollama": (of_ollama, ollama.take_messages),
    "additional tools": (additional_tools, tools_of),
    "private": (private, private_fields),
}


def seconds(parse: Callable[[Fields, ChatFormat], object], body: bytes) -> float:
    """The least processor time of three tries."""
    times = []
    for _ in range(3):
        fields = Fields.parse(body)
        started = time.thread_time()
        parse(fields, FORMAT)
        times.append(time.thread_time() - started)
    return min(times)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", PARSERS)
def test_eight_times_the_history_takes_about_eight_times_as_long(name: str, at_once: bool) -> None:
    make, parse = PARSERS[name]
    short, long = (json.dumps(make(count, at_once=at_once)).encode() for count in (400, 3200))
    # With work for each pair of items it was 19 to 150 times.
    assert seconds(parse, long) < 16 * seconds(parse, short)


def test_a_stored_chain_is_bounded() -> None:
    items = [Item(f"i{n}", b'{"role": "user", "content": "x"}') for n in range(MAX_OBJECTS + 1)]
    storage = Storage(store=None, scope="", keep=False, named_by="conversation", before=tuple(items))
    with pytest.raises(InvalidRequest, match="conversation has 10001 items; at most 10000") as error:
        take_input(Fields.parse(b"{}"), FORMAT, storage)
    assert error.value.field == "conversation"
    storage = dataclasses.replace(storage, before=storage.before[1:])
    assert len(take_input(Fields.parse(b"{}"), FORMAT, storage)) == MAX_OBJECTS
