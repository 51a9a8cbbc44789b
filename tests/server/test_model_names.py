"""Names of the model for clients, and the sampling options that its files recommend."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gguf import GGUFWriter

from ramify.cli.flags import add_config_flags, given_fields
from ramify.runtime.config import ServerConfig
from ramify.runtime.model.loading.sampling_defaults import sampling_defaults_of
from ramify.sampling_params import SamplingParams
from tests.server.fake_frontend import FakeFrontend, LiveServer

MESSAGES = [{"role": "user", "content": "x"}]


def post(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=fields)


def test_all_names_are_the_model() -> None:
    names = ("org/mine", "mine", "gpt-4o")
    with LiveServer(FakeFrontend(), served_model_name=names) as server:
        listed = httpx.get(server.url + "/v1/models").json()["data"]
        assert [card["id"] for card in listed] == list(names)
        for name in (*names, "default"):
            answer = post(server, "/v1/chat/completions", model=name, messages=MESSAGES)
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            card = httpx.get(f"{server.url}/v1/models/{name}").json()
            assert card["id"] == (name if name in names else "org/mine")
        error = post(server, "/v1/chat/completions", model="other", messages=MESSAGES).json()["error"]
        assert "'mine', 'gpt-4o'" in error["message"]


def test_names_on_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, ServerConfig, {"served_model_name"})
    given = parser.parse_args(["--served-model-name", "a", "--served-model-name", "b"])
    assert ServerConfig(**given_fields(given, ServerConfig)).served_model_name == ("a", "b")
    assert ServerConfig(**given_fields(parser.parse_args([]), ServerConfig)).served_model_name == ()
    assert ServerConfig(served_model_name="a").served_model_name == ("a",)
    for wrong in (("a", "a"), ("",)):
        with pytest.raises(ValueError, match="names differ and are not empty"):
            ServerConfig(served_model_name=wrong)


RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def recommending() -> FakeFrontend:
    frontend = FakeFrontend()
    frontend.info = msgspec.structs.replace(frontend.info, sampling_defaults=RECOMMENDED)
    return frontend


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/api/generate": {"prompt": "x"},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_the_models_sampling_holds_where_a_request_has_none(path: str) -> None:
    frontend = recommending()
    with LiveServer(frontend) as server:
        assert post(server, path, model="default", **REQUESTS[path]).status_code == 200
        own = {"temperature": 0, "top_p": 0.5} if path[:2] == "/v" else {"options": {"temperature": 0}}
        assert post(server, path, model="default", **REQUESTS[path], **own).status_code == 200
    first, second = (request.sampling for request in frontend.requests)
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 0.95, 20)
    assert (second.temperature, second.top_k) == (0, 20)


@pytest.mark.parametrize(("path", "fields"), [("/generate", {"text": "x"}), *REQUESTS.items()])
def test_none_leaves_the_apis_own_defaults(path: str, fields: dict[str, Any]) -> None:
    """`/generate` keeps its documented defaults in any case."""
    frontend = recommending()
    choice = {} if path == "/generate" else {"sampling_defaults": "none"}
    with LiveServer(frontend, **choice) as server:
        body = fields if path == "/generate" else {"model": "default", **fields}
        assert httpx.post(server.url + path, json=body).status_code == 200
    (request,) = frontend.requests
    assert (request.sampling.temperature, request.sampling.top_k) == (1.0, 0)


def test_what_files_recommend(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults_of(tmp_path) == {}
    given = {
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 0,
        "min_p": "0.1",
        "repetition_penalty": None,
        "do_sample": False,
        "max_length": 20,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert sampling_defaults_of(tmp_path) == {"temperature": 0.7, "top_k": 0}
    assert "top_p = 0" in caplog.text
    (tmp_path / "generation_config.json").write_text("[")
    assert sampling_defaults_of(tmp_path) == {}


def test_what_a_gguf_file_recommends(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.add_int32("general.sampling.mirostat", 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert sampling_defaults_of(path) == {"temperature": 0.5, "top_k": 40, "repetition_penalty": 1.25}
    SamplingParams(**sampling_defaults_of(path)).check()
