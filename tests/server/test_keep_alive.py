"""Streams that have nothing to send yet are kept open."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from ramify.errors import WorkerDied
from ramify.runtime.server import sse
from tests.server.conftest import BODIES, RESPONSE
from tests.server.fake_frontend import FakeFrontend, LiveServer, events, raw_post

COMMENT = ": keep-alive"


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SILENCE_S", 0.01)


@contextmanager
def streaming(http: httpx.Client, path: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that are not empty."""
    with http.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
        assert response.status_code == 200
        yield (line for line in response.iter_lines() if line)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("hold_after", [0, 1], ids=["before the first token", "after it"])
def test_a_silent_stream_has_comments(
    server: LiveServer, frontend: FakeFrontend, http: httpx.Client, path: str, hold_after: int
) -> None:
    frontend.hold_after = hold_after
    with streaming(http, path) as lines:
        told = 0
        while told < 3:
            told += next(lines) == COMMENT
        assert frontend.held.is_set()
        server.call(frontend.release.set)
        *_, last = lines
    assert last == "data: [DONE]" or '"type":"response.incomplete"' in last


@pytest.mark.parametrize("path", BODIES)
def test_an_error_after_a_comment_is_an_event(
    server: LiveServer, frontend: FakeFrontend, http: httpx.Client, path: str
) -> None:
    frontend.hold_after, frontend.fail_after = 0, (1, WorkerDied("The scheduler died."))
    with streaming(http, path) as lines:
        assert next(lines) == COMMENT
        server.call(frontend.release.set)
        *_, last = lines
    assert "The scheduler died." in last


def test_the_openai_client_skips_what_keeps_a_stream_open(
    server: LiveServer, frontend: FakeFrontend, client: openai.OpenAI
) -> None:
    frontend.hold_after, frontend.script = 0, ["HI"]
    with client.responses.stream(**RESPONSE | {"max_output_tokens": 9}) as stream:
        kinds: list[str] = []
        for one in stream:
            kinds.append(one.type)
            if kinds.count("response.in_progress") == 3:
                server.call(frontend.release.set)
        assert stream.get_final_response().output_text == "HI"
    assert kinds[0] == "response.created"
    assert kinds.count("response.created") == kinds.count("response.completed") == 1


def test_the_events_of_a_response_stay_numbered(
    server: LiveServer, frontend: FakeFrontend, http: httpx.Client
) -> None:
    frontend.hold_after = 1
    with http.stream("POST", "/v1/responses", json=RESPONSE | {"stream": True}) as response:
        assert frontend.held.wait(60)
        server.call(frontend.release.set)
        numbers = [one["sequence_number"] for one in events(response)]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("path", BODIES)
def test_the_log_tells_what_an_abandoned_stream_cost(
    server: LiveServer, frontend: FakeFrontend, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ramify.server")
    frontend.hold_after = 1
    body = httpx.Request("POST", server.url, json=BODIES[path] | {"stream": True}).content
    before = totals(server)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post(path, body))
        assert frontend.held.wait(60)
    assert frontend.idle.wait(60)
    after = totals(server)  # it is answered by the same loop, after the line has been logged
    (line,) = [record.getMessage() for record in caplog.records if "finish=abort" in record.getMessage()]
    prompt = len("<user>hi") if path in ("/v1/chat/completions", "/v1/responses") else len("hi")
    assert f"prompt={prompt} " in line
    assert "output=1 " in line
    assert after["prompt"] - before["prompt"] == prompt
    assert after["generation"] - before["generation"] == 1


def test_a_cost_that_is_unknown_is_not_logged_as_zero(
    server: LiveServer, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    """The client leaves before the first chunk, which tells the tokens of the prompt."""
    caplog.set_level(logging.INFO, "ramify.server")
    frontend.hold_after = 0
    body = httpx.Request("POST", server.url, json=BODIES["/generate"] | {"stream": True}).content
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post("/generate", body))
        assert frontend.held.wait(10)
    assert frontend.idle.wait(10)
    totals(server)  # it is answered by the same loop, after the line has been logged
    (line,) = [record.getMessage() for record in caplog.records if "finish=abort" in record.getMessage()]
    assert "prompt=- cached=- output=0 ttft=-" in line


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health"])
def test_head_is_answered(http: httpx.Client, path: str) -> None:
    answer = http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def totals(server: LiveServer) -> dict[str, Any]:
    text = httpx.get(server.url + "/metrics").text
    names = ("prompt", "generation")
    found = {name: f"ramify_{name}_tokens_total " for name in names}
    return {
        name: float(line.removeprefix(start))
        for name, start in found.items()
        for line in text.splitlines()
        if line.startswith(start)
    }
