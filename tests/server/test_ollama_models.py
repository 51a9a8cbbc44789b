"""Descriptions of the served model in Ollama's API, and the endpoints that manage models there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import httpx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from ramify import __version__
from ramify.model_info import ThinkingFormat
from tests.server.conftest import speak
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.test_ollama import refusal


def show(http: httpx.Client, **fields: Any) -> Any:
    return http.post("/api/show", json={"model": MODEL, **fields}).json()


def test_version(http: httpx.Client) -> None:
    found = http.get("/api/version").json()
    # Clients compare it as numbers with the least release that they need.
    assert [int(part) for part in found["version"].split(".")] >= [0, 6, 4]
    assert found["ramify"] == __version__


def test_facts_that_are_not_known_are_left_out(http: httpx.Client, frontend: FakeFrontend) -> None:
    (model,) = http.get("/api/tags").json()["models"]
    assert model == {"name": MODEL, "model": MODEL, "details": {"parent_model": ""}}
    (loaded,) = http.get("/api/ps").json()["models"]
    assert loaded == model | {"context_length": 4096, "size_vram": 0}
    assert show(http)["model_info"] == {"general.context_length": 4096}


def test_facts_from_a_folder_of_safetensors(
    http: httpx.Client, frontend: FakeFrontend, tmp_path: Path
) -> None:
    weights = {"a.weight": np.zeros((30, 50), np.float16), "a.bias": np.zeros(30, np.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    frontend.info = msgspec.structs.replace(frontend.info, path=str(tmp_path), fingerprint="f1")
    (model,) = http.get("/api/tags").json()["models"]
    assert (model["size"], model["digest"]) == (30 * 50 * 2 + 30 * 4, "f1")
    assert model["modified_at"].startswith("20")
    assert model["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "1.53K",
        "quantization_level": "F16",
    }
    assert "size" not in http.get("/api/ps").json()["models"][0]
    assert show(http)["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": 1530,
        "llama.context_length": 4096,
    }


def test_facts_from_a_gguf_file(http: httpx.Client, frontend: FakeFrontend, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(3)
    writer.add_context_length(99)
    writer.add_tokenizer_model("gpt2")
    writer.add_tensor("a.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    frontend.info = msgspec.structs.replace(frontend.info, path=str(path))
    details = http.get("/api/tags").json()["models"][0]["details"]
    assert (details["format"], details["family"], details["parameter_size"]) == ("gguf", "qwen2", "64")
    info = show(http)["model_info"]
    assert (info["qwen2.block_count"], info["general.parameter_count"]) == (3, 64)
    assert info["qwen2.context_length"] == 4096  # the server's
    assert not any(name.startswith("tokenizer.") for name in info)


def test_adapters_are_listed_beside_the_model(http: httpx.Client) -> None:
    http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/adapters/sql"})
    for path in ("/api/tags", "/api/ps"):
        models = http.get(path).json()["models"]
        assert [(one["model"], one["details"]["parent_model"]) for one in models] == [
            (MODEL, ""),
            ("sql", MODEL),
        ]
    assert show(http, model="sql")["details"] == {"parent_model": MODEL}


def test_names_and_sampling_defaults() -> None:
    frontend = FakeFrontend()
    defaults = {"temperature": 0.6, "repetition_penalty": 1.1}
    frontend.info = msgspec.structs.replace(frontend.info, sampling_defaults=defaults)
    with (
        LiveServer(frontend, served_model_name=("a", "b")) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert [one["model"] for one in http.get("/api/tags").json()["models"]] == ["a", "b"]
        assert show(http, model="b:latest")["parameters"] == "temperature 0.6\nrepeat_penalty 1.1"
        assert http.post("/api/pull", json={"model": "b"}).status_code == 200
        http.post("/api/generate", json={"model": "a", "prompt": "hi", "stream": False}).raise_for_status()
    assert frontend.requests[-1].sampling.temperature == 0.6


def test_abilities_and_the_template(http: httpx.Client, frontend: FakeFrontend) -> None:
    assert show(http)["capabilities"] == ["completion", "tools", "embedding"]
    speak(frontend, thinking=ThinkingFormat(), source="{{ tools }}")
    found = show(http, model=None, name=MODEL, verbose=True)
    assert found["capabilities"] == ["completion", "tools", "thinking", "embedding"]
    assert found["template"] == "{{ tools }}"
    speak(frontend, variables=("enable_thinking",), source="{{ messages }}")
    found = show(http)
    assert "thinking" in found["capabilities"]
    assert "tools" in found["template"].lower()  # LiteLLM looks for the word
    frontend.info = msgspec.structs.replace(frontend.info, chat_format=None, pooling="cls")
    found = show(http)
    assert (found["capabilities"], "template" in found) == (["completion"], False)


def test_pull_of_the_served_model(http: httpx.Client) -> None:
    for name in (MODEL, MODEL + ":latest", "default"):
        answer = http.post("/api/pull", json={"model": name, "stream": True})
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.text == '{"status":"success"}\n'
    assert "ramify pull MODEL" in refusal(http, "/api/pull", {"model": "llama3"})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("DELETE", "/api/delete"),
        ("GET", "/api/blobs/sha256:1"),
        ("HEAD", "/api/blobs/sha256:1"),
        ("POST", "/api/blobs/sha256:1"),
    ],
)
def test_other_endpoints_are_refused_by_name(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path, json={"model": MODEL})
    assert answer.status_code == 400
    if method != "HEAD":
        assert answer.json()["error"].startswith(f"{path} is not supported: this server fetches")


def test_unknown_paths_and_models(http: httpx.Client) -> None:
    assert refusal(http, "/api/nothing", {}, 404) == "There is no /api/nothing on this server."
    assert "There is no model 'x'" in refusal(http, "/api/show", {"model": "x"}, 404)
    assert "verbos" in refusal(http, "/api/show", {"model": MODEL, "verbos": True})
