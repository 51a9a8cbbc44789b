"""LoRA adapters over HTTP: loading, listing, and the ways to name one."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_an_adapter_is_loaded_listed_and_unloaded(
    http: httpx.Client, client: openai.OpenAI, prefix: str
) -> None:
    body = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    loaded = http.post(f"{prefix}/load_lora_adapter", json=body)
    assert loaded.json() == {"success": True, "loaded_adapters": {"sql": "/adapters/sql"}}
    cards = [(card.id, card.parent, card.root) for card in client.models.list()]  # type: ignore[attr-defined]
    assert cards == [(MODEL, None, "/models/byte-model"), ("sql", MODEL, "/adapters/sql")]
    assert client.models.retrieve("sql").id == "sql"
    assert http.get("/model_info").json()["loras"]["sql"]["path"] == "/adapters/sql"
    http.post(f"{prefix}/unload_lora_adapter", json={"lora_name": "sql"}).raise_for_status()
    assert [card.id for card in client.models.list()] == [MODEL]
    again = http.post(f"{prefix}/unload_lora_adapter", json={"lora_name": "sql"})
    assert again.status_code == 404
    assert again.json()["error"]["param"] == "lora_name"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("load", {"lora_name": "sql", "lora_pth": "p"}, "Did you mean lora_path?"),
        ("unload", {"lora_nmae": "sql"}, "Did you mean lora_name?"),
        ("load", {"lora_name": "sql"}, "lora_path is missing"),
    ],
)
def test_misspelt_and_missing_fields(
    http: httpx.Client, path: str, body: dict[str, str], message: str
) -> None:
    answer = http.post(f"/v1/{path}_lora_adapter", json=body)
    assert answer.status_code == 400
    assert message in answer.text


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/unload_lora_adapter"])
def test_without_the_flag_requests_load_nothing(path: str) -> None:
    with LiveServer(FakeFrontend()) as server:
        answer = httpx.post(server.url + path, json={"lora_name": "sql", "lora_path": "/etc"})
    assert answer.status_code == 403
    assert "--lora-loading" in answer.text
    assert not server.frontend.loras.loaded


def test_requests_name_adapters(http: httpx.Client, client: openai.OpenAI, frontend: FakeFrontend) -> None:
    http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "p"})
    for model in (MODEL, "sql", f"{MODEL}:sql", "default:sql"):
        answer = client.completions.create(model=model, prompt="Q", max_tokens=1)
        assert answer.model == model
    client.chat.completions.create(model="sql", messages=[{"role": "user", "content": "Q"}], max_tokens=1)
    client.responses.create(model="sql", input="Q", store=False)
    client.embeddings.create(model="sql", input="Q")
    http.post("/generate", json={"text": ["a", "b"], "lora_path": ["sql", None]})
    named = [request.lora for request in frontend.requests]
    assert named == ["", "sql", "sql", "sql", "sql", "sql", "sql", "sql", ""]


@pytest.mark.parametrize("model", ["other", f"{MODEL}:other", "other:sql"])
def test_an_unknown_adapter_is_refused_with_the_list(
    http: httpx.Client, client: openai.OpenAI, model: str
) -> None:
    http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "p"})
    with pytest.raises(openai.NotFoundError, match="sql") as caught:
        client.completions.create(model=model, prompt="Q")
    assert caught.value.param == "model"
