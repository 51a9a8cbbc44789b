"""Clients of a server with a fake frontend. Each test module has one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ramify.model_info import ChatFormat
from ramify.runtime.server.fields import Fields
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION: Any = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
RESPONSE: Any = {"model": MODEL, "input": "hi", "max_output_tokens": 2}
GENERATE: Any = {"text": "hi", "sampling_params": {"max_new_tokens": 2}}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/generate": GENERATE,
}
"""Endpoint that generates → a request body for two tokens."""
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn, \\"}\\u00e9"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
"""A call of get_weather, followed by a call of get_time."""


@pytest.fixture(scope="module")
def module_server() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), lora_loading=True) as server:
        yield server


@pytest.fixture
def server(module_server: LiveServer) -> LiveServer:
    module_server.frontend.reset()
    module_server.frontend.info = FakeFrontend().info
    return module_server


@pytest.fixture
def frontend(server: LiveServer) -> FakeFrontend:
    return server.frontend


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=60, verify=False, headers=headers) as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[set[str], set[str]]]:
    """Path of an object in a body → (fields that the server has read, fields that it refuses by name)."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    refuse_rest = Fields.refuse_rest

    def noting(fields: Fields, unsupported: Mapping[str, str] | None = None) -> None:
        place = fields.path("x").removesuffix("x").removesuffix(".")
        known, refused = found.setdefault(place, (set(), set()))
        known.update(fields.taken)
        refused.update(unsupported or ())
        refuse_rest(fields, unsupported)

    monkeypatch.setattr(Fields, "refuse_rest", noting)
    return found


def speak(frontend: FakeFrontend, **fields: Any) -> FakeFrontend:
    """Give the frontend's model a chat template with these fields of `ChatFormat`, until the test ends."""
    given = {"prefix": {}, "suffix": {"user": ""}, "exact": True} | fields
    frontend.info = msgspec.structs.replace(frontend.info, chat_format=ChatFormat(**given))
    return frontend


def refused(response: httpx.Response, status: int = 400) -> Any:
    """The error in an answer of this status, which has all fields and no traceback."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    return error
