"""Keys on a server of several models, with fake frontends: which models each may use, see and unload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import CHAT, refused
from tests.server.test_keys import write
from tests.server.test_several_models import SIZES, _Server

Ask = Callable[..., httpx.Response]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    path = write(
        tmp_path_factory.mktemp("keys") / "keys.toml",
        alice={"models": ["a"]},
        poet={"models": ["b:ad"]},
        none={"models": ["x"]},
        root={"admin": True},
    )
    with _Server(keys=str(path), loras={"b:ad": "/x"}, lora_loading=True) as server:
        yield server


@pytest.fixture
def ask(server: _Server) -> Iterator[Ask]:
    """Function that sends a request with the key rk-NAME; all models are unloaded."""
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(key: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
            method = "GET" if body is None else "POST"
            return client.request(method, path, json=body, headers={"x-api-key": f"rk-{key}", **headers})

        for name in SIZES:
            ask("root", f"/models/{name}/unload", {})
        yield ask


def states(ask: Ask) -> dict[str, str]:
    found: dict[str, str] = ask("root", "/readyz").json()["models"]
    return found


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_only_operators_unload(ask: Ask, path: str) -> None:
    for name in "ab":
        ask("root", f"/models/{name}/load", {})
    for name, told in (("b", "may not use the model 'b'"), ("a", "may not unload the model 'a'")):
        answer = ask("alice", path, {"model": name, "keep_alive": 0})
        assert answer.status_code == 403
        assert told in answer.text
        assert ask("alice", f"/models/{name}/unload", {}).status_code == 403
    assert (states(ask)["a"], states(ask)["b"]) == ("ready", "ready")
    assert ask("root", path, {"model": "b", "keep_alive": 0}).json()["done_reason"] == "unload"
    assert states(ask)["b"] == "unloaded"


def test_a_second_name_opens_no_model(ask: Ask) -> None:
    for path in ("/tokenize", "/v1/completions", "/api/embed", "/generate"):
        body = {"model": "c", "name": "a", "prompt": "hi", "input": "hi", "text": "hi"}
        assert ask("alice", path, body).status_code == 403, path
    assert set(states(ask).values()) == {"unloaded"}
    assert ask("alice", "/tokenize", {"model": "a", "prompt": "hi"}).status_code == 200


def test_a_key_of_an_adapter_alone(ask: Ask) -> None:
    for _ in range(2):  # unloaded, and loaded
        assert ask("poet", "/v1/models/b:ad").status_code == 200
        assert ask("poet", "/v1/models/b:ad", **ANTHROPIC).status_code == 200
        assert ask("poet", "/api/show", {"model": "b:ad"}).status_code == 200
        assert ask("poet", "/v1/models/b").status_code == 403
        refused(ask("poet", "/v1/chat/completions", {**CHAT, "model": "b"}), 403)
        lora = {"lora_name": "b:ad", "lora_path": "/x"}
        assert ask("root", "/v1/load_lora_adapter", lora).status_code == 200
    assert ask("poet", "/v1/chat/completions", {**CHAT, "model": "b:ad"}).status_code == 200


def test_a_key_of_no_model(ask: Ask) -> None:
    assert ask("none", "/v1/models").json()["data"] == []
    listed = ask("none", "/v1/models", **ANTHROPIC).json()
    assert (listed["data"], listed["first_id"]) == ([], None)
    assert ask("none", "/api/tags").json()["models"] == []


def test_names_of_models_are_for_those_who_may_use_them(ask: Ask, server: _Server) -> None:
    for path in ("/readyz", "/health"):
        assert httpx.get(server.url + path).json()["models"] == {}
        assert ask("wrong", path).json()["models"] == {}
        assert ask("alice", path).json()["models"] == {"a": "unloaded"}
        assert [*ask("root", path).json()["models"]] == [*SIZES]
    for answer in (
        ask("alice", "/v1/models/hug"),
        ask("alice", "/tokenize", {"model": "hug", "prompt": "x"}),
    ):
        message = refused(answer, 404)["message"]
        assert message == "There is no model 'hug' here. Use one of 'a'."
    assert "Did you mean huge?" in refused(ask("root", "/v1/models/hug"), 404)["message"]
    assert refused(ask("none", "/v1/models/hug"), 404)["message"] == "There is no model 'hug' here."
    refused(ask("none", "/tokenize", {"prompt": "x"}), 403)  # the first model


def test_the_keep_alive_of_one_key_does_not_outlive_its_request(ask: Ask) -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    assert ask("alice", "/api/chat", {**body, "keep_alive": 0}).status_code == 200
    assert states(ask)["a"] == "ready", "only an operator's key shortens the time"
    assert ask("root", "/api/chat", {**body, "keep_alive": 0}).status_code == 200
    while states(ask)["a"] != "unloaded":
        pass
    assert ask("root", "/api/chat", body).status_code == 200
    card = ask("root", "/v1/models/a").json()
    assert (card["state"], card["keep_alive_s"], card["expires_in_s"]) == ("ready", None, None)
