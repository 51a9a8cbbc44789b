"""A stop string beside a constraint reaches the compiler, and its refusal names the client's field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ramify.errors import InvalidRequest
from tests.server.fake_frontend import FakeFrontend

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}
CHAT = {"model": "default", "messages": [{"role": "user", "content": "x"}]}
CALLED = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
REGEX = {"response_format": {"type": "regex", "regex": "[a-z]+"}}
CASES: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        "stop",
    ),
    ("/v1/chat/completions", CHAT | CALLED | {"tool_choice": "required"}, "stop"),
    ("/v1/completions", {"model": "default", "prompt": "x"} | REGEX, "stop"),
    ("/v1/responses", {"model": "default", "input": "x", "text": {"format": FORM | {"name": "n"}}}, "stop"),
    ("/v1/messages", CHAT | {"max_tokens": 9, "output_config": {"format": FORM}}, "stop_sequences"),
    ("/generate", {"text": "x", "sampling_params": {"regex": "[a-z]+"}}, "sampling_params.stop"),
    ("/api/chat", CHAT | {"format": SCHEMA, "stream": False}, "options.stop"),
    ("/api/generate", {"model": "default", "prompt": "x", "format": SCHEMA, "stream": False}, "options.stop"),
]


@pytest.mark.parametrize(
    ("path", "body", "field"), CASES, ids=[f"{path} {i}" for i, (path, *_) in enumerate(CASES)]
)
def test_the_field_of_the_client_is_named(
    http: httpx.Client, frontend: FakeFrontend, path: str, body: dict[str, Any], field: str
) -> None:
    inside, _, name = field.rpartition(".")
    stops = {name: ["END"]}
    given = body | ({inside: body.get(inside, {}) | stops} if inside else stops)
    seen = []
    generate = frontend.generate

    def watching(request: Any) -> Any:
        seen.append(request)
        return generate(request)

    frontend.generate = watching  # type: ignore[method-assign]
    frontend.fail_first = InvalidRequest("The stop string 'END' may occur.", field="stop")
    response = http.post(path, json=given)
    assert response.status_code == 400, response.text
    assert seen[0].sampling.stop == ("END",)
    assert seen[0].constraint is not None
    error = response.json()["error"]
    told = error if isinstance(error, str) else str(error.get("param") or error["message"])
    assert field in told or "The stop string 'END' may occur." in told
