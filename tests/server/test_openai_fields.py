"""Every field of the request types in OpenAI's own package is accepted, or refused by name."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import openai.types.chat as chat
import openai.types.responses as responses
import pytest
from openai.types import EmbeddingCreateParams, completion_create_params, shared_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_param
from openai.types.shared_params.response_format_json_schema import JSONSchema

from tests.server.fake_frontend import MODEL, FakeFrontend

USER: Any = {"role": "user", "content": "hi"}
CALL: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
CALLING: Any = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}],
}
CHAT: Any = {"model": MODEL, "messages": [USER]}
COMPLETION: Any = {"model": MODEL, "prompt": "hi"}
RESPONSE: Any = {"model": MODEL, "input": "hi"}


def said(item: Any) -> dict[str, Any]:
    return CHAT | {"messages": [USER, item]}


def given(*items: Any) -> dict[str, Any]:
    return RESPONSE | {"input": list(items)}


def schema(options: Any) -> dict[str, Any]:
    return CHAT | {"response_format": {"type": "json_schema", "json_schema": options}}


PLACES: list[tuple[str, Any, Any, Any]] = [
    ("/v1/chat/completions", chat_params.CompletionCreateParamsStreaming, CHAT, lambda x: x),
    ("/v1/completions", completion_create_params.CompletionCreateParamsStreaming, COMPLETION, lambda x: x),
    ("/v1/embeddings", EmbeddingCreateParams, {"model": MODEL, "input": "hi"}, lambda x: x),
    ("/v1/responses", response_create_params.ResponseCreateParamsStreaming, RESPONSE, lambda x: x),
    (
        "/v1/chat/completions",
        chat.ChatCompletionStreamOptionsParam,
        {},
        lambda x: CHAT | {"stream": True, "stream_options": x},
    ),
    ("/v1/chat/completions", JSONSchema, {"name": "n", "schema": {}}, schema),
    (
        "/v1/chat/completions",
        shared_params.FunctionDefinition,
        {"name": "f"},
        lambda x: CHAT | {"tools": [{"type": "function", "function": x}]},
    ),
    (
        "/v1/chat/completions",
        chat.ChatCompletionFunctionToolParam,
        {"type": "function", "function": {"name": "f"}},
        lambda x: CHAT | {"tools": [x]},
    ),
    ("/v1/chat/completions", chat.ChatCompletionUserMessageParam, USER, said),
    ("/v1/chat/completions", chat.ChatCompletionSystemMessageParam, USER | {"role": "system"}, said),
    ("/v1/chat/completions", chat.ChatCompletionDeveloperMessageParam, USER | {"role": "developer"}, said),
    ("/v1/chat/completions", chat.ChatCompletionAssistantMessageParam, CALLING | {"content": "x"}, said),
    (
        "/v1/chat/completions",
        chat.ChatCompletionMessageFunctionToolCallParam,
        CALLING["tool_calls"][0],
        lambda x: said(CALLING | {"tool_calls": [x]}),
    ),
    (
        "/v1/chat/completions",
        chat.ChatCompletionToolMessageParam,
        {"role": "tool", "tool_call_id": "c", "content": "x"},
        lambda x: CHAT | {"messages": [USER, CALLING, x]},
    ),
    (
        "/v1/chat/completions",
        chat.ChatCompletionContentPartTextParam,
        {"type": "text", "text": "x"},
        lambda x: said(USER | {"content": [x]}),
    ),
    ("/v1/responses", shared_params.Reasoning, {}, lambda x: RESPONSE | {"reasoning": x}),
    ("/v1/responses", responses.ResponseTextConfigParam, {}, lambda x: RESPONSE | {"text": x}),
    (
        "/v1/responses",
        responses.ResponseFormatTextJSONSchemaConfigParam,
        {"type": "json_schema", "name": "n", "schema": {}},
        lambda x: RESPONSE | {"text": {"format": x}},
    ),
    (
        "/v1/responses",
        responses.FunctionToolParam,
        {"type": "function", "name": "f"},
        lambda x: RESPONSE | {"tools": [x]},
    ),
    (
        "/v1/responses",
        response_create_params.StreamOptions,
        {},
        lambda x: RESPONSE | {"stream": True, "stream_options": x},
    ),
    ("/v1/responses", responses.EasyInputMessageParam, USER, given),
    ("/v1/responses", response_input_param.Message, USER, given),
    (
        "/v1/responses",
        responses.ResponseOutputMessageParam,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        lambda x: given(USER, x),
    ),
    (
        "/v1/responses",
        responses.ResponseInputTextParam,
        {"type": "input_text", "text": "x"},
        lambda x: given(USER | {"content": [x]}),
    ),
    (
        "/v1/responses",
        responses.ResponseOutputTextParam,
        {"type": "output_text", "text": "x"},
        lambda x: given(USER, {"role": "assistant", "content": [x]}),
    ),
    ("/v1/responses", responses.ResponseFunctionToolCallParam, CALL, lambda x: given(USER, x)),
    (
        "/v1/responses",
        response_input_param.FunctionCallOutput,
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        lambda x: given(USER, CALL, x),
    ),
    (
        "/v1/responses",
        responses.ResponseReasoningItemParam,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        lambda x: given(USER, x),
    ),
]


def samples(kind: Any) -> Iterator[Any]:
    """Sample values of a type hint, the most unusual one last. A sample object has one field."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        yield None
    elif origin is typing.Literal:
        yield from (inside[0], inside[-1])
    elif (
        origin in (typing.Union, getattr(typing, "Union", None)) or str(origin) == "<class 'types.UnionType'>"
    ):
        for each in inside:
            yield from samples(each)
    elif origin in (dict,):
        yield {"key": "value"}
    elif origin is not None and issubclass(origin, Iterable):
        yield [next(samples(inside[0]))]
    elif typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        name = next(iter(hints), None)
        yield {} if name is None else {name: next(samples(hints[name]), "x")}
    else:
        yield {bool: True, int: 1, float: 0.5}.get(kind, "x")


ROWS = [
    pytest.param(path, base, place, field, kind, id=f"{path} {params.__name__}.{field}")
    for path, params, base, place in PLACES
    for field, kind in typing.get_type_hints(params).items()
]


@pytest.mark.parametrize(("path", "base", "place", "field", "kind"), ROWS)
def test_a_field_of_openais_is_known(
    http: httpx.Client, frontend: FakeFrontend, path: str, base: Any, place: Any, field: str, kind: Any
) -> None:
    for value in samples(kind):
        frontend.script = ["So."] * 4
        response = http.post(path, json=place(base | {field: value}))
        if response.status_code == 200:
            continue
        error = response.json()["error"]
        assert response.status_code in (400, 404), error
        assert "is not a field" not in error["message"], error
        assert field in (error["param"] or "") or field == "type", error
