"""A disconnected client's generation stops. Of many clients at once, each gets its own answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ramify.runtime.server.errors import ClientGone
from ramify.runtime.server.sse import while_connected
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


async def disconnect() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def broken() -> dict[str, str]:
    raise OSError("broken receive")


def result() -> str:
    return "swallowed"


def failure() -> str:
    raise ValueError("another error")


@pytest.mark.parametrize(("receive", "raised"), [(disconnect, ClientGone), (broken, OSError)])
@pytest.mark.parametrize("end", [None, result, failure])
async def test_work_for_a_client_that_is_gone_ends_in_one_way(
    receive: Callable[[], Any], raised: type[Exception], end: Callable[[], str] | None
) -> None:
    async def work() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if end is None:
                raise
        assert end is not None
        return end()

    with pytest.raises(raised):
        await while_connected(receive, work())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "later timeouts of the task judge by this count"


async def test_the_caller_s_own_cancellation_is_not_taken_for_the_client_s() -> None:
    waiting = asyncio.Event()

    async def receive() -> dict[str, str]:
        await waiting.wait()
        task.cancel()
        return {"type": "http.disconnect"}

    async def work() -> None:
        waiting.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(while_connected(receive, work()))
    with pytest.raises(asyncio.CancelledError):
        await task
