"""Priority on every endpoint, under the names that clients know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ramify.messages import Generate
from ramify.priority import BATCH, MOST
from ramify.programs import route as program_route
from ramify.sampling_params import SamplingParams
from tests.server.conftest import BODIES as GENERATING
from tests.server.conftest import CHAT, COMPLETION, GENERATE
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.test_programs import GRAPH, gen, graph

CALL = msgspec.to_builtins(
    {"request": Generate(rid="r", prompt=("hi",), sampling=SamplingParams(max_tokens=2))}
)
BODIES = GENERATING | {
    "/v1/completions": COMPLETION | {"prompt": ["hi", "you"], "n": 2},
    "/generate": GENERATE | {"text": ["hi", "you"]},
    "/v1/programs": {"graph": GRAPH, "arguments": {"topic": "tea"}},
    "/v1/calls": CALL,
}


@pytest.fixture(scope="module")
def module_server() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), program_route.router) as server:
        yield server


def with_priority(path: str, priority: Any) -> Any:
    body = BODIES[path]
    if path == "/v1/calls":
        return {"request": {**body["request"], "priority": priority}}
    return {**body, "priority": priority}


@pytest.mark.parametrize("path", BODIES)
def test_a_priority_arrives(http: httpx.Client, frontend: FakeFrontend, path: str) -> None:
    for body, expected in ((BODIES[path], 0), (with_priority(path, -7), -7)):
        frontend.requests.clear()
        assert http.post(path, json=body).status_code == 200
        assert {request.priority for request in frontend.requests} == {expected}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("wrong", [MOST + 1, -MOST - 1, 0.5, "high"])
def test_refused(http: httpx.Client, path: str, wrong: Any) -> None:
    answer = http.post(path, json=with_priority(path, wrong))
    assert answer.status_code == 400
    assert "priority" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tier", "priority", "named"),
    [("auto", 0, "default"), ("default", 0, "default"), ("flex", BATCH, "flex"), ("priority", 1, "priority")],
)
def test_a_service_tier_is_a_priority(
    client: openai.OpenAI, frontend: FakeFrontend, tier: Any, priority: int, named: str
) -> None:
    frontend.requests.clear()
    asked: list[Any] = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model=MODEL, messages=asked, service_tier=tier, max_tokens=2)
    response = client.responses.create(model=MODEL, input="hi", service_tier=tier, max_output_tokens=2)
    stream = client.chat.completions.create(
        model=MODEL, messages=asked, service_tier=tier, max_tokens=2, stream=True
    )
    assert [chat.service_tier, response.service_tier] == [named, named]
    assert {chunk.service_tier for chunk in stream} == {named}
    assert [request.priority for request in frontend.requests] == [priority] * 3


def test_a_priority_goes_before_a_service_tier(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.requests.clear()
    body = {**CHAT, "service_tier": "flex", "priority": 4}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert [request.priority for request in frontend.requests] == [4]
    assert http.post("/v1/chat/completions", json={**CHAT, "service_tier": "scale"}).status_code == 400


def test_without_a_service_tier_the_answer_names_none(http: httpx.Client) -> None:
    assert "service_tier" not in http.post("/v1/chat/completions", json=CHAT).json()


def test_a_node_has_a_priority_of_its_own(http: httpx.Client, frontend: FakeFrontend) -> None:
    body = graph(gen("a", priority=3), gen("b"))
    frontend.requests.clear()
    assert http.post("/v1/programs", json={**body, "priority": -2}).status_code == 200
    assert [request.priority for request in frontend.requests] == [3, -2]
    wrong = http.post("/v1/programs", json=graph(gen("a", priority=101)))
    assert wrong.status_code == 400
    assert "nodes[0].priority" in wrong.text
