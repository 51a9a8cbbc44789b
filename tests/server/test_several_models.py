"""A server of several models, with fake frontends: each request is answered by the model that it names."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import ollama
import openai
import pytest

import ramify as rm
from ramify.batches import route as batches
from ramify.cli import serve
from ramify.cli.flags import given_fields
from ramify.cli.main import command_parser
from ramify.engine_messages import GetCache
from ramify.errors import InvalidRequest, NotFound
from ramify.model_info import KvRoom
from ramify.programs import route as programs
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.models.memory import Need
from ramify.runtime.models.pool import ModelPool
from ramify.runtime.server.models import Models, models_of
from tests.server.conftest import CHAT, GENERATE, refused
from tests.server.fake_frontend import FakeFrontend, LiveServer, events
from tests.server.test_cache import Holding
from tests.server.test_keys import write

GIB = 2**30
SIZES = {"a": 3 * GIB, "b": 3 * GIB, "c": 3 * GIB, "huge": 90 * GIB}
MEMORY = 7 * GIB
USER = [{"role": "user", "content": "hi"}]


class _Frontend(Holding):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = config
        name = config.model
        room = KvRoom(
            tokens=4096, kept_tokens=4096, bytes_per_token=1, bound="option", text="4,096 tokens", remedy=""
        )
        self.info = msgspec.structs.replace(
            self.info, name=name, path=f"/models/{name}", fingerprint=f"print-{name}", kv_room=room
        )
        self.pids: dict[str, int] = {}
        self.stopped = threading.Event()

    async def start(self) -> None: ...

    async def aclose(self) -> None:
        self.stopped.set()


class _Server(LiveServer):
    """A server of the models in `SIZES`, of which two at a time fit into the memory."""

    def __init__(self, **config: Any) -> None:
        self.made: dict[str, list[_Frontend]] = {name: [] for name in SIZES}
        self.pool: ModelPool
        super().__init__(Holding(), programs.router, batches.router, models=[*SIZES][1:], **config)

    async def _serve(self) -> None:
        self.pool = ModelPool(
            self.config,
            {name: name for name in SIZES},
            make=self._make,
            free=lambda needed, _: MEMORY - needed,
            need=lambda config, _: Need(SIZES[config.model], 0, 0, context_length=4096),
        )
        self.frontend = cast(Any, Models(self.pool, self.config))
        self.frontend.release = threading.Event()
        self.frontend.draining = threading.Event()
        await super()._serve()

    def _make(self, config: EngineConfig, _: Any) -> Frontend:
        self.made[config.model].append(_Frontend(config))
        return cast(Frontend, self.made[config.model][-1])

    def current(self, name: str) -> _Frontend:
        return self.made[name][-1]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    folder = tmp_path_factory.mktemp("batches")
    with _Server(batch_dir=str(folder), lora_loading=True) as server:
        yield server


@pytest.fixture
def http(several: _Server) -> Iterator[httpx.Client]:
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=several.url, timeout=60, headers=headers) as client:
        for name in SIZES:
            client.post(f"/models/{name}/unload")
        yield client


def states(http: httpx.Client) -> dict[str, str]:
    cards = http.get("/v1/models").json()["data"]
    return {one["id"]: one["state"] for one in cards if one["parent"] is None}


def ready(http: httpx.Client) -> set[str]:
    return {name for name, state in states(http).items() if state == "ready"}


BODIES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/api/chat", {"messages": USER, "stream": False}),
    ("/api/generate", {"prompt": "hi", "stream": False}),
    ("/api/embed", {"input": "hi"}),
    ("/generate", GENERATE),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}),
    ("/tokenize", {"prompt": "hi"}),
    ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ("/v1/score", {"text_1": "x", "text_2": "y"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_every_dialect_gets_the_model_by_name(
    several: _Server, http: httpx.Client, path: str, body: Any
) -> None:
    answer = http.post(path, json={**body, "model": "b"})
    assert answer.status_code == 200, answer.text
    assert ready(http) == {"b"}
    asked = several.current("b")
    assert asked.requests or asked.calls
    wrong = http.post(path, json={**body, "model": "bb"})
    assert wrong.status_code == 404
    assert "There is no model 'bb' here" in wrong.text
    assert ready(http) == {"b"}


def test_a_name_is_suggested_and_a_request_without_one_gets_the_first_model(
    several: _Server, http: httpx.Client
) -> None:
    error = refused(http.post("/v1/chat/completions", json={**CHAT, "model": "hug"}), 404)
    assert "Did you mean huge?" in error["message"]
    assert ready(http) == set()
    for path, body in BODIES:
        assert http.post(path, json={**body, "model": None}).status_code == 200, path
        assert ready(http) == {"a"}
        assert http.post(path, json={**body, "model": "a:latest"}).status_code == 200, path
    assert http.get("/get_model_info", params={"model": "b"}).json()["served_model_name"] == "b"
    assert http.get("/get_model_info").json()["served_model_name"] == "a"


def test_a_program_and_a_call_get_their_model(several: _Server, http: httpx.Client) -> None:
    graph = {"nodes": [{"type": "text", "text": "hi"}]}
    answer = http.post("/v1/programs", json={"graph": graph, "model": "b"})
    assert answer.status_code in (200, 400), answer.text
    assert ready(http) == {"b"}
    request = {"type": "Generate", "rid": "r-1", "prompt": ["hi"], "sampling": {"max_tokens": 1}}
    body = {"request": request, "model": "c"}
    for fingerprint, status in (("print-c", 200), ("print-b", 400)):
        answer = http.post("/v1/calls", json=body | {"fingerprint": fingerprint})
        assert answer.status_code == status, answer.text
    assert [one.rid for one in several.current("c").requests] == ["r-1"]


@rm.function
def two_models(s: rm.ProgramState) -> None:
    s += "hi" + rm.gen("x", max_tokens=2) + "and?" + rm.gen("y", max_tokens=2, model="b")


@pytest.mark.parametrize("program", [two_models, two_models.compile()], ids=["calls", "graph"])
def test_the_steps_of_a_program_go_to_the_models_that_they_name(
    several: _Server, http: httpx.Client, program: Any
) -> None:
    endpoint = rm.RuntimeEndpoint(several.url, model="c")
    with contextlib.closing(endpoint):
        state = program.run(backend=endpoint)
    assert state.error() is None
    assert set(state.usage_by_model) == {"c", "b"}
    assert [len(several.current(name).requests) for name in ("c", "b")] == [1, 1]
    assert several.current("b").requests[0].prompt == (f"hi{state['x']}and?",)


def test_a_graph_whose_models_do_not_fit_side_by_side_swaps_them(
    several: _Server, http: httpx.Client
) -> None:
    nodes = [
        {"kind": "gen", "name": name, "options": {"max_tokens": 2}, "model": name} for name in ("a", "b", "c")
    ]
    graph = {"nodes": [{"kind": "text", "parts": ["hi"]}, *nodes]}
    answer = http.post("/v1/programs", json={"graph": graph, "model": "a"})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()["rows"][0]["variables"]) == {"a", "b", "c"}
    nodes[0]["model"] = "hug"
    error = refused(http.post("/v1/programs", json={"graph": graph}), 404)
    assert "Did you mean huge?" in error["message"]


def test_a_program_ends_beside_an_unload_of_its_model(several: _Server, http: httpx.Client) -> None:
    http.post("/models/a/load")
    several.current("a").hold_after = 1
    steps = [{"kind": "gen", "name": name, "options": {"max_tokens": 2}} for name in ("x", "y")]
    graph = {"nodes": [{"kind": "text", "parts": ["hi"]}, *steps]}
    with ThreadPoolExecutor(2) as threads:
        program = threads.submit(http.post, "/v1/programs", json={"graph": graph, "model": "a"})
        assert several.current("a").held.wait(20)
        unload = threads.submit(http.post, "/models/a/unload")
        while not several.pool._models["a"].closed:
            pass
        several.call(several.current("a").release.set)
        assert program.result(20).json()["rows"][0]["variables"].keys() == {"x", "y"}
        assert unload.result(20).status_code == 200
    assert ready(http) == set()


def test_an_adapters_name_is_no_models(several: _Server, http: httpx.Client) -> None:
    step = {"kind": "gen", "name": "x", "options": {"max_tokens": 2}, "model": "b:poet"}
    graph = {"nodes": [{"kind": "text", "parts": ["hi"]}, step]}
    refused(http.post("/v1/programs", json={"graph": graph}), 404)


def test_the_lists_of_models_load_nothing(http: httpx.Client, several: _Server) -> None:
    http.post("/models/b/load")
    for path in ("/v1/models", "/v1/models/c", "/api/tags", "/api/ps", "/metrics", "/health", "/", "/live"):
        assert http.get(path).status_code == 200, path
    http.post("/api/show", json={"model": "c"})
    assert ready(http) == {"b"}
    cards = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
    assert [*cards] == [*SIZES]
    assert (cards["b"]["state"], cards["c"]["state"]) == ("ready", "unloaded")
    assert (cards["c"]["size"], cards["c"]["max_model_len"]) == (3 * GIB, 4096)
    assert [one["name"] for one in http.get("/api/tags").json()["models"]] == [*SIZES]
    assert [one["name"] for one in http.get("/api/ps").json()["models"]] == ["b"]
    assert http.get("/readyz").json()["models"] == {
        "a": "unloaded", "b": "ready", "c": "unloaded", "huge": "unloaded",
    }  # fmt: skip
    anthropic = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [one["id"] for one in anthropic["data"]] == [*SIZES]


def test_the_least_recently_used_model_makes_room_and_a_huge_one_is_refused_with_the_numbers(
    several: _Server, http: httpx.Client
) -> None:
    for name in ("a", "b", "a", "c"):
        assert http.post("/v1/chat/completions", json={**CHAT, "model": name}).status_code == 200
    assert ready(http) == {"a", "c"}
    assert several.current("b").stopped.is_set()
    error = refused(http.post("/v1/chat/completions", json={**CHAT, "model": "huge"}), 503)
    assert error["code"] == "model_does_not_fit"
    assert "needs 90.00 GiB" in error["message"]
    assert "1.00 GiB are free, and unloading would free 6.00 GiB" in error["message"]
    assert ready(http) == {"a", "c"}


def test_a_stream_keeps_its_model_and_a_request_that_does_not_fit_waits_for_its_end(
    several: _Server, http: httpx.Client
) -> None:
    http.post("/models/a/load")
    http.post("/models/b/load")
    for name in ("a", "b"):
        several.current(name).hold_after = 1
    waiter = threading.Thread(target=lambda: http.post("/models/c/load"))
    with (
        http.stream("POST", "/generate", json=GENERATE | {"model": "a", "stream": True}) as first,
        http.stream("POST", "/generate", json=GENERATE | {"model": "b", "stream": True}) as second,
    ):
        assert all(several.current(name).held.wait(20) for name in ("a", "b"))
        waiter.start()
        while states(http)["c"] != "loading":
            pass
        assert ready(http) == {"a", "b"}
        several.call(several.current("b").release.set)
        assert events(second)[-1] == "[DONE]"
        waiter.join(20)
        assert ready(http) == {"a", "c"}  # the stream of the older one goes on
        several.call(several.current("a").release.set)
        assert events(first)[-1] == "[DONE]"


def test_a_client_that_hangs_up_while_it_waits_asks_for_nothing_more(
    several: _Server, http: httpx.Client
) -> None:
    several_held = "ab"
    for name in several_held:
        http.post(f"/models/{name}/load")
        several.current(name).hold_after = 1
    with (
        http.stream("POST", "/generate", json=GENERATE | {"model": "a", "stream": True}),
        http.stream("POST", "/generate", json=GENERATE | {"model": "b", "stream": True}),
    ):
        assert all(several.current(name).held.wait(20) for name in several_held)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(several.url + "/generate", json=GENERATE | {"model": "c"}, timeout=0.3)
        while states(http)["c"] != "unloaded":
            pass
        assert ready(http) == {"a", "b"}
        for name in several_held:
            several.call(several.current(name).release.set)


def test_keep_alive_of_ollamas_package(several: _Server, http: httpx.Client) -> None:
    client = ollama.Client(host=several.url)
    client.chat("a", USER, keep_alive="10m")
    running = client.ps().models
    assert [one.model for one in running] == ["a"]
    assert running[0].expires_at is not None
    answer = client.generate("b", keep_alive=-1)
    assert answer.done_reason == "load"
    assert answer.load_duration
    assert answer.load_duration == answer.total_duration
    assert {one.model for one in client.ps().models} == {"a", "b"}
    for name in ("a", "c"):  # c was not loaded, and is not for this
        assert client.generate(name, keep_alive=0).done_reason == "unload"
    assert [one.model for one in client.ps().models] == ["b"]
    client.embed("b", "text", keep_alive=0)  # after this request
    client._client.close()
    while ready(http):
        pass
    wrong = http.post("/api/chat", json={"model": "a", "messages": USER, "keep_alive": "soon"})
    assert wrong.status_code == 400
    assert "keep_alive is 'soon'" in wrong.text


def test_load_and_unload_by_name(http: httpx.Client) -> None:
    answer = http.post("/models/b/load", json={"keep_alive": "5m"}).json()
    assert (answer["name"], answer["state"], answer["keep_alive_s"]) == ("b", "ready", 300.0)
    assert (answer["resident"], answer["kv_tokens"]) == (0, 4096)
    assert http.post("/models/b/unload").json()["state"] == "unloaded"
    assert refused(http.post("/models/x/load"), 404)["code"] == "not_found"
    assert "keep_alive" in refused(http.post("/models/b/load", json={"keep_alive": "x"}))["message"]


def test_adapters_belong_to_their_model(several: _Server, http: httpx.Client) -> None:
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "b:poet", "lora_path": "/x"})
    assert answer.status_code == 200, answer.text
    assert ready(http) == {"b"}
    for name in ("poet", "b:poet"):
        assert http.post("/v1/chat/completions", json={**CHAT, "model": name}).status_code == 200
        assert several.current("b").requests[-1].lora == "poet"
    refused(http.post("/v1/chat/completions", json={**CHAT, "model": "a:poet"}), 404)
    assert "poet" in [one["id"] for one in http.get("/v1/models").json()["data"]]
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).status_code == 200
    assert several.current("b").loras.loaded == {}


def test_metrics_have_the_model_as_a_label(several: _Server, http: httpx.Client) -> None:
    for name in ("a", "b", "a"):
        http.post("/v1/chat/completions", json={**CHAT, "model": name})
    text = http.get("/metrics").text
    assert 'ramify_model_state{model="a",state="ready"} 1.0' in text
    assert 'ramify_scheduler_up{model="a"} 1.0' in text
    counted = [line for line in text.splitlines() if line.startswith("ramify_generation_tokens_total{")]
    assert {line.partition('"')[2].partition('"')[0] for line in counted} >= {"a", "b"}
    assert 'ramify_http_responses_total{endpoint="/v1/chat/completions",status="200"}' in text
    assert text.count("# TYPE ramify_generations_total counter") <= 1
    http.post("/models/a/unload")
    text = http.get("/metrics").text
    assert 'ramify_model_state{model="a",state="unloaded"} 1.0' in text
    assert 'ramify_scheduler_up{model="a"}' not in text  # no alarm of a scheduler that is down
    assert 'ramify_generation_tokens_total{model="a"}' in text  # counters outlive the model


def test_the_dashboard_shows_one_model_and_the_states_of_all(several: _Server, http: httpx.Client) -> None:
    for name in ("b", "c"):
        assert http.post("/v1/chat/completions", json={**CHAT, "model": name}).status_code == 200
    first = http.get("/live").json()
    shown = http.get("/live", params={"model": "c"}).json()
    assert (first["model"], shown["model"]) == ("b", "c")
    assert first["models"] == {"a": "unloaded", "b": "ready", "c": "ready", "huge": "unloaded"}
    looks = several.current("c").looks
    assert looks >= 1
    assert {program["name"] for program in shown["programs"]} >= {"/v1/chat/completions"}


def test_what_belongs_to_no_model_reaches_all(several: _Server, http: httpx.Client) -> None:
    for name in ("a", "b"):
        http.post(f"/models/{name}/load")
    assert http.post("/end_program", json={"program": "p"}).status_code == 200
    assert http.post("/flush_cache").status_code == 200
    assert http.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}
    assert [several.current(name).ended_programs for name in "ab"] == [["p"], ["p"]]
    assert "no replicas" in refused(http.get("/replicas"))["message"]


def test_keys_of_a_server_of_several_models(tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys.toml", ada={"models": ["b", "poet"]}, bob={"models": ["c"]}, root={"admin": True}
    )
    options: Any = {"served_model_name": ("a", "alias"), "lora_loading": True}
    with _Server(keys=str(path), **options) as server, httpx.Client(timeout=60) as client:

        def ask(key: str, path: str, body: Any = None) -> httpx.Response:
            method, headers = "GET" if body is None else "POST", {"x-api-key": f"rk-{key}"}
            return client.request(method, server.url + path, headers=headers, json=body)

        def listed(key: str) -> dict[str, list[str]]:
            cards = {
                "/v1/models": ("data", "id"),
                "/api/tags": ("models", "name"),
                "/api/ps": ("models", "name"),
            }
            return {
                path: [one[name].removesuffix(":latest") for one in ask(key, path).json()[field]]
                for path, (field, name) in cards.items()
            }

        # Models that are not loaded are listed as well, each for the keys that may use it.
        assert listed("ada") == {"/v1/models": ["b"], "/api/tags": ["b"], "/api/ps": []}
        assert listed("root")["/v1/models"] == [*SIZES]
        for refusal in (
            ask("ada", "/v1/chat/completions", {**CHAT, "model": "c"}),
            ask("ada", "/v1/models/c"),
        ):
            assert refused(refusal, 403)["message"].startswith("The key 'ada' may not use the model 'c'.")
        # No other field opens a model, none is loaded on the way, and no error names it.
        for body in ({"model": "c", "name": "b"}, {"model": "alias"}, {"model": "c:poet"}, {}):
            assert ask("ada", "/v1/chat/completions", {**CHAT, "model": "a"} | body).status_code == 403
        told = refused(ask("ada", "/v1/chat/completions", {**CHAT, "model": "hug"}), 404)["message"]
        assert told == "There is no model 'hug' here. Use one of 'b'."
        assert ask("ada", "/v1/models/hug").json()["error"]["message"] == told
        assert not any(server.made.values())

        # Operators load and unload, and see what each model holds; others see their own models alone.
        for action in ("load", "unload"):
            refused(ask("ada", f"/models/b/{action}", {}), 403)
            assert ask("root", f"/models/b/{action}", {}).status_code == 200
        for key, model in (("ada", "b"), ("bob", "c")):
            assert ask(key, "/v1/chat/completions", {**CHAT, "model": model}).status_code == 200
        assert {one.scope for name in "bc" for one in server.current(name).requests} == {"@ada/", "@bob/"}
        held = {
            key: [one["model"] for one in ask(key, "/cache").json()["models"]]
            for key in ("ada", "bob", "root")
        }
        assert held == {"ada": ["b"], "bob": ["c"], "root": ["b", "c"]}
        looks = [one.owners for one in server.current("b").calls if isinstance(one, GetCache)]
        assert looks == ["ada/", ""]

        # An adapter is a model of its own name.
        lora = {"lora_name": "b:poet", "lora_path": "/x"}
        assert ask("root", "/v1/load_lora_adapter", lora).status_code == 200
        for name in ("poet", "b:poet"):
            assert ask("ada", "/v1/chat/completions", {**CHAT, "model": name}).status_code == 200
            refused(ask("bob", "/v1/chat/completions", {**CHAT, "model": name}), 403)


def test_a_batch_of_several_models(several: _Server, http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=several.url + "/v1", api_key="x")
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "model": name}}
        for name in ("a", "b", "c")
    ]
    content = b"\n".join(map(msgspec.json.encode, lines))
    file = client.files.create(file=("x.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired"):
        pass
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 0)
    client.close()


DEEP = b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("wrong", [b"{", b"[]", b'{"model": 5}', b"", DEEP, b'{"model": "\\ud800"}'])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/api/chat", "/api/show", "/api/pull", "/models/a/load"]
)
def test_a_body_that_names_no_model_loads_no_other(http: httpx.Client, path: str, wrong: bytes) -> None:
    answer = http.post(path, content=wrong)
    assert answer.status_code in (200, 400, 404, 422), answer.text
    assert answer.status_code >= 400 or path == "/models/a/load"
    assert ready(http) <= {"a"}


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_an_unknown_field_is_refused_before_a_load(http: httpx.Client, path: str, body: Any) -> None:
    answer = http.post(path, json={**body, "model": "b", "temperatur": 1})
    assert answer.status_code == 400
    assert "temperatur is not a field of this request" in answer.text
    assert ready(http) == set()


def test_one_model_that_is_always_loaded_is_not_unloaded() -> None:
    with LiveServer(FakeFrontend()) as server:
        answer = httpx.post(server.url + "/models/byte-model/unload")
        assert "always loaded" in refused(answer)["message"]


def test_models_that_the_command_line_names(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.gguf", "two.gguf")]
    for path in paths:
        path.touch()
    one, two = map(str, paths)

    def names(**options: Any) -> tuple[str, ...]:
        return models_of(ServerConfig(**options), None).names

    def given(*arguments: str) -> dict[str, Any]:
        options = command_parser("serve").parse_args(arguments)
        return serve.with_first_of_folder(given_fields(options, ServerConfig))

    folder = ("--models-dir", str(tmp_path))
    assert names(**given(one, f"b={two}")) == ("one", "b")
    assert names(**given(f"a={one}", two, "--models", f"c={two}")) == ("a", "two", "c")
    assert names(**given(*folder)) == ("one", "two")
    assert names(**given(*folder, f"x={two}")) == ("x", "one", "two")
    assert given("--model", one) == given(one) == {"model": one}
    assert given(f"a={one}") == {"model": one, "served_model_name": ["a"]}
    with pytest.raises(InvalidRequest, match="whose name 'one' is that of"):
        names(model=one, models=[f"one={two}"])
    with pytest.raises(NotFound, match="There is no file or folder"):
        names(model=one, models=[str(tmp_path / "missing.gguf")])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicas": 2, "models": ["x"]}, "replicas is 2"),
        ({"replicas": 2, "keep_alive": "5m"}, "replicas is 2"),
        ({"draft_model": "y", "models": ["x"]}, "draft_model is 'y' and there are several models"),
        ({"kv_events": "tcp://127.0.0.1:1", "models_dir": "."}, "kv_events"),
        ({"models_memory_gb": 0.0}, "models_memory_gb is 0.0"),
    ],
)
def test_options_that_cannot_hold_for_several_models(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ServerConfig(**options)
