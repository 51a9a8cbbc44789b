"""The API key."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), api_key="sesame") as server:
        yield server


@pytest.mark.parametrize(
    "header", [None, "sesame", "Bearer", "Bearer wrong", "Basic sesame", "Bearer sesam\xe9"]
)
def test_refused(locked: LiveServer, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = httpx.post(locked.url + "/generate", json={"text": "hi"}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "unauthorized"
    assert response.headers["www-authenticate"] == "Bearer"
    assert locked.frontend.requests == []


def test_accepted(locked: LiveServer) -> None:
    with openai.OpenAI(base_url=locked.url + "/v1", api_key="sesame") as client:
        assert client.completions.create(model=MODEL, prompt="hi", max_tokens=2).choices[0].text == "HI"
    locked.frontend.reset()


def test_health_is_open_and_the_key_is_not_shown(locked: LiveServer) -> None:
    for path in ("/health", "/livez", "/readyz"):
        assert httpx.get(locked.url + path).status_code == 200
    assert httpx.get(locked.url + "/metrics").status_code == 401
    info = httpx.get(locked.url + "/server_info", headers={"authorization": "Bearer sesame"})
    assert info.status_code == 200
    assert "sesame" not in info.text


def test_metrics_can_be_open() -> None:
    with LiveServer(FakeFrontend(), api_key="sesame", open_metrics=True) as server:
        assert httpx.get(server.url + "/metrics").status_code == 200
        assert httpx.get(server.url + "/server_info").status_code == 401
