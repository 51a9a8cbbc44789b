"""Null means the same as a missing field, for every field that the server reads, at every depth."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import msgspec
import pytest

from ramify.messages import ThinkingFormat
from tests.server.conftest import speak
from tests.server.fake_frontend import MODEL, FakeFrontend

SCHEMA: Any = {"type": "object"}
FUNCTION: Any = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
ANSWERED: Any = {
    "role": "assistant",
    "content": [{"type": "text", "text": "x"}],
    "reasoning_content": "r",
    "name": "a",
}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LONG: Any = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": "hi", "name": "u"},
        ANSWERED | {"tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r", "name": "f"},
    ],
}
SAMPLING: Any = {
    "temperature": 0.5,
    "stop": ["."],
    "sampling_seed": 1,
    "n": 2,
    "logit_bias": {"1": 1},
    "max_new_tokens": 3,
}
BODIES: dict[str, tuple[str, Any]] = {
    "chat": (
        "/v1/chat/completions",
        LONG | {"max_completion_tokens": 3, "logprobs": True, "n": 2, "user": "u"},
    ),
    "tools": (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        },
    ),
    "stream": ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "reasoning": (
        "/v1/chat/completions",
        CHAT
        | {
            "reasoning": {"effort": "low", "summary": "auto", "max_tokens": 5, "exclude": True, "start": "<"},
            "chat_template_kwargs": {"tone": "dry"},
        },
    ),
    "schema": (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "description": "d",
                    "schema": SCHEMA,
                    "strict": False,
                    "whitespace": 1,
                },
            }
        },
    ),
    "structured outputs": ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": SCHEMA}}),
    "completion": ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}),
    "embedding": ("/v1/embeddings", {"model": MODEL, "input": "hi", "dimensions": 2}),
    "responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "t"}],
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "description": "d"}},
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "none",
            "reasoning": {"effort": "low"},
            "metadata": {"k": "v"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
    ),
    "generate": (
        "/generate",
        {
            "text": "hi",
            "sampling_params": SAMPLING,
            "constraint": {"kind": "regex", "source": "a+"},
            "program": {"program": "p", "calls_left": 1},
            "return_logprob": True,
        },
    ),
    "scored": ("/generate", {"text": "hi", "choices": {"texts": ["a", "b"]}, "preambles": []}),
    "tokenize": ("/tokenize", {"prompt": "hi", "add_special_tokens": False}),
    "tokenize chat": ("/tokenize", {"messages": LONG["messages"], "add_generation_prompt": False}),
    "detokenize": ("/detokenize", {"tokens": [65], "skip_special_tokens": False}),
    "abort": ("/abort_request", {"rid": "none", "abort_all": False}),
    "tools of programs": ("/await_tools", {"program": "p", "branch": "b", "tools": ["t"]}),
    "load": ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/x"}),
}
EXCEPTIONS = {"sampling_params.max_new_tokens"}
"""Fields in which null has a meaning of its own: as many tokens as fit into the context, as in SGLang."""
EMPTY = [
    ("reasoning", "reasoning", {}),
    ("reasoning", "reasoning", {"effort": None, "summary": None, "enabled": None, "max_tokens": None}),
    ("responses", "reasoning", {"summary": "auto"}),
    ("responses", "reasoning", {}),
    ("responses", "text", {"format": None, "verbosity": None}),
    ("responses", "metadata", {}),
    ("chat", "stream_options", {"include_usage": None}),
    ("chat", "stream_options", {}),
    ("chat", "chat_template_kwargs", {}),
    ("chat", "chat_template_kwargs", {"enable_thinking": None, "tone": None, "other": None}),
    ("chat", "structured_outputs", {}),
    ("chat", "structured_outputs", {"json": None, "regex": None, "choice": None}),
    ("chat", "logit_bias", {}),
    ("chat", "metadata", {}),
    ("generate", "sampling_params", {}),
]


@pytest.fixture
def thinker(frontend: FakeFrontend) -> FakeFrontend:
    return speak(
        frontend,
        suffix={"user": "", "assistant": "", "tool": "", "system": ""},
        variables=("enable_thinking", "reasoning_effort", "tone"),
        thinking=ThinkingFormat(),
    )


class Sender:
    """A client that reports what the server made of a body: the status, the error and the generations."""

    def __init__(self, http: httpx.Client, frontend: FakeFrontend) -> None:
        self.http = http
        self.frontend = frontend
        self.known: dict[str, Any] = {}

    def outcome(self, path: str, body: Any) -> Any:
        key = json.dumps(body, sort_keys=True)
        if key not in self.known:
            self.frontend.requests.clear()
            self.frontend.script = ["So."] * 4
            response = self.http.post(path, json=body)
            problem = response.json()["error"] if response.status_code >= 400 else None
            made = [msgspec.structs.replace(one, rid="", flow="") for one in self.frontend.requests]
            ignored = response.headers.get("x-ramify-ignored")
            self.known[key] = (response.status_code, problem, made, ignored)
        return self.known[key]


def objects(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """(path, object) of each object in a body. The paths are written as in errors."""
    if isinstance(value, list):
        return [found for i, each in enumerate(value) for found in objects(each, f"{path}[{i}]")]
    if not isinstance(value, dict):
        return []
    inner = [objects(each, f"{path}.{key}" if path else key) for key, each in value.items()]
    return [(path, value), *(found for each in inner for found in each)]


@pytest.mark.parametrize("name", BODIES)
def test_null_is_as_if_left_out(
    http: httpx.Client, thinker: FakeFrontend, taken: dict[str, tuple[set[str], set[str]]], name: str
) -> None:
    path, body = BODIES[name]
    sender = Sender(http, thinker)
    status, problem, _, _ = sender.outcome(path, body)
    assert (status, problem) == (200, None)
    checked = 0
    for place, _ in objects(body):
        for field in sorted(set().union(*taken.get(place, ()))):
            if f"{place}.{field}" in EXCEPTIONS:
                continue
            with_null, without = copy.deepcopy(body), copy.deepcopy(body)
            dict(objects(with_null))[place][field] = None
            dict(objects(without))[place].pop(field, None)
            assert sender.outcome(path, with_null) == sender.outcome(path, without), (place, field)
            checked += 1
    assert checked >= len(body)


@pytest.mark.parametrize(("name", "field", "value"), EMPTY)
def test_what_asks_for_nothing_is_as_if_left_out(
    http: httpx.Client, thinker: FakeFrontend, name: str, field: str, value: Any
) -> None:
    path, body = BODIES[name]
    sender = Sender(http, thinker)
    without = {key: each for key, each in body.items() if key != field}
    status, problem, made, _ = sender.outcome(path, without | {field: value})
    assert (status, problem, made) == sender.outcome(path, without)[:3]
    assert (status, problem) == (200, None)
