"""All wrong fields of a body are named by one answer, and no right one."""

from __future__ import annotations

import copy
import re
from typing import Any

import httpx
import pytest

from ramify.runtime.server.parsing import MAX_PARSED_BYTES, MAX_PARSES
from ramify.runtime.server.tables import ENDPOINTS
from tests.server.conftest import CHAT, COMPLETION, GENERATE, RESPONSE, refused, speak
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.sample_bodies import BODIES, objects

USER: Any = {"role": "user", "content": "hi"}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WRONG: list[tuple[str, Any, list[str]]] = [
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x", "a": 1}, {"role": "user", "content": 5}, USER],
            "top_p": 7,
            "stop": [1],
            "functions": [1],
            "tools": [{"type": "function", "function": {"name": "f", "b": 1, "strict": 3}}],
            "c": 1,
        },
        [
            "messages[0].a",
            "messages[1].content",
            "tools[0].function.strict",
            "tools[0].function.b",
            "stop[0]",
            "top_p",
            "functions",
            "c",
        ],
    ),
    ("/v1/chat/completions", {"a": 1, "messages": 5}, ["messages", "a"]),
    ("/v1/chat/completions", {"model": "other", "messages": [], "n": "x"}, ["model", "messages", "n"]),
    (
        "/v1/chat/completions",
        CHAT | {"messages": [{"content": "x"}, {"role": "user", "content": "x", "a": 1}]},
        ["messages[0].role", "messages[1].a"],
    ),
    # Fields that need a wrong field are right.
    ("/v1/chat/completions", CHAT | {"logprobs": "x", "top_logprobs": 2, "b": 1}, ["logprobs", "b"]),
    (
        "/v1/chat/completions",
        CHAT | {"stream": "x", "stream_options": {"include_usage": True}, "b": 1},
        ["stream", "b"],
    ),
    ("/v1/chat/completions", CHAT | {"tools": 5, "tool_choice": "required", "b": 1}, ["tools", "b"]),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL | {"id": 5}]},
                {"role": "tool", "content": "x", "tool_call_id": "c"},
            ]
        },
        ["messages[1].tool_calls[0].id"],
    ),
    (
        "/v1/chat/completions",
        CHAT
        | {"messages": [USER, {"role": "assistant", "content": 5}], "continue_final_message": True, "b": 1},
        ["messages[1].content", "b"],
    ),
    (
        "/v1/completions",
        COMPLETION | {"prompt": 5, "tools": [{}], "best_of": 2},
        ["prompt", "best_of", "tools"],
    ),
    (
        "/v1/responses",
        RESPONSE | {"input": [USER | {"a": 1}, USER | {"content": 5}], "include": ["x"], "n": 2, "b": 1},
        ["input[0].a", "input[1].content", "include[0]", "n", "b"],
    ),
    ("/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": "x", "b": 1}, ["dimensions", "b"]),
    ("/tokenize", {"messages": 5, "a": 1}, ["messages", "a"]),
    ("/detokenize", {"tokens": "x", "a": 1}, ["tokens", "a"]),
    (
        "/generate",
        GENERATE | {"text": None, "input_ids": "x", "sampling_params": {"a": 1, "top_p": 7}, "b": 1},
        ["input_ids", "sampling_params.top_p", "sampling_params.a", "b"],
    ),
    ("/abort_request", {"rid": 5, "a": 1}, ["rid", "a"]),
    ("/load_lora_adapter", {"lora_name": 5, "a": 1}, ["lora_name", "a", "lora_path"]),
    ("/unload_lora_adapter", {"lora_name": 5, "a": 1}, ["lora_name", "a"]),
    ("/await_tools", {"program": 5, "tools": 5, "a": 1}, ["program", "tools", "a"]),
    ("/end_program", {"program": 5, "a": 1}, ["program", "a"]),
]


@pytest.mark.parametrize(("path", "body", "names"), WRONG)
def test_all_wrong_fields_are_named(http: httpx.Client, path: str, body: Any, names: list[str]) -> None:
    error = refused(http.post(path, json=body), 404 if body.get("model") == "other" else 400)
    assert [error["param"], *(one["param"] for one in error.get("errors", [])[1:])] == names
    if len(names) > 1:
        assert error["message"].endswith(f" Also wrong: {', '.join(names[1:])}.")
        first = error["errors"][0]
        assert {key: first[key] for key in ("param", "code", "type")} == {
            key: error[key] for key in ("param", "code", "type")
        }
        assert error["message"].startswith(first["message"])
        for one in error["errors"]:
            assert one["message"]
            assert "Also wrong" not in one["message"]


def test_nothing_runs_while_wrong_fields_are_sought(http: httpx.Client, frontend: FakeFrontend) -> None:
    refused(http.post("/v1/chat/completions", json=CHAT | {"a": 1, "b": 1}))
    assert not frontend.requests
    assert http.get("/health").status_code == 200


def test_the_number_of_parses_and_their_size_are_bounded(http: httpx.Client) -> None:
    many = {f"x{number}": 1 for number in range(100)}
    error = refused(http.post("/v1/chat/completions", json=CHAT | many))
    assert len(error["errors"]) == MAX_PARSES + 1
    large = CHAT | {"messages": [USER | {"content": "x" * MAX_PARSED_BYTES}], "a": 1, "b": 1}
    assert "errors" not in refused(http.post("/v1/chat/completions", json=large))


def test_strict_fields_names_all_ignored_ones() -> None:
    with LiveServer(FakeFrontend(), strict_fields=True) as server:
        body = CHAT | {"store": False, "metadata": {"a": "b"}, "c": 1}
        error = refused(httpx.post(server.url + "/v1/chat/completions", json=body))
        assert {one["param"] for one in error["errors"]} == {"store", "metadata", "c"}


@pytest.mark.parametrize("name", BODIES)
def test_unknown_fields_anywhere_are_named(http: httpx.Client, frontend: FakeFrontend, name: str) -> None:
    speak(frontend, suffix={"user": "", "assistant": "", "tool": ""}, variables=("tone", "reasoning_effort"))
    path, body = BODIES[name]
    endpoint = next((one for one in ENDPOINTS if one.path == path), None)
    if endpoint is None or path.startswith(("/api/", "/v1/messages", "/v1/programs", "/v1/systemone")):
        return  # their errors have no `param`, or the test's server has no such route
    places = {"", *(table.path for table in endpoint.inner)}
    changed = copy.deepcopy(body)
    known = [at for at, _ in objects(changed) if re.sub(r"\[\d+\]", "[]", at) in places]
    for at in known:
        dict(objects(changed))[at]["unknown"] = 1
    error = refused(http.post(path, json=changed))
    found = {one["param"] for one in error.get("errors", [error])}
    assert found == {f"{at}.unknown" if at else "unknown" for at in known}
