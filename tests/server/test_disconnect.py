"""A disconnected client's generation stops. Of many clients at once, each gets its own answer."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from tests.server.conftest import BODIES
from tests.server.fake_frontend import FakeFrontend, LiveServer, raw_post


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 1], ids=["before the first token", "after it"])
def test_disconnect_closes_the_generation(
    server: LiveServer, frontend: FakeFrontend, path: str, stream: bool, hold_after: int
) -> None:
    frontend.hold_after = hold_after
    body = httpx.Request("POST", server.url + path, json=BODIES[path] | {"stream": stream})
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post(path, body.content))
        assert frontend.held.wait(60)
        assert not frontend.closed.is_set()
    assert frontend.closed.wait(60)
    assert not frontend.running


def test_disconnect_closes_every_choice(server: LiveServer, frontend: FakeFrontend) -> None:
    frontend.hold_after = 1
    body = httpx.Request("POST", server.url, json=BODIES["/v1/completions"] | {"n": 5}).content
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post("/v1/completions", body))
        assert frontend.held.wait(60)
    assert frontend.closed.wait(60)
    assert frontend.idle.wait(60)
    assert len(frontend.requests) == 5


def test_disconnect_in_the_middle_of_the_body(
    server: LiveServer, frontend: FakeFrontend, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post("/generate", b'{"text"', 100))
    assert http.post("/generate", json={"text": "hi"}).status_code == 200
    assert len(frontend.requests) == 1
    assert caplog.text == ""


async def test_many_clients_at_once(server: LiveServer, frontend: FakeFrontend) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        answers = await asyncio.gather(
            *(
                client.post(
                    "/generate", json={"text": f"number {i:04}", "sampling_params": {"max_new_tokens": 8}}
                )
                for i in range(64)
            )
        )
    assert [answer.json()["text"] for answer in answers] == [f"BER {i:04}" for i in range(64)]
    assert not frontend.running
