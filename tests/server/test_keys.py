"""API keys: who may send what, how much, and that the names of one key reach nothing of another's."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.routing import Route

from ramify.batches import route as batches
from ramify.batches.runner import Places
from ramify.batches.store import fair_room
from ramify.cli.main import main
from ramify.errors import InvalidRequest, Overloaded
from ramify.loop import new_loop
from ramify.messages import Generate, TextChunk, Usage
from ramify.programs import route as programs
from ramify.runtime.config import ServerConfig
from ramify.runtime.server.app.app import create_app
from ramify.runtime.server.app.serve import bind, run_server
from ramify.runtime.server.keys.file import hash_of, new_key, read_keys
from ramify.runtime.server.keys.limits import Bucket
from ramify.runtime.server.keys.tenants import OPEN, Account, Caller, Keys, expected_tokens
from ramify.runtime.server.service import KEY
from ramify.sampling_params import SamplingParams
from tests.server.conftest import BODIES, COMPLETION, GENERATE, RESPONSE, refused
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer, raw_post
from tests.server.test_batches import client_of, ended, wait_for
from tests.server.test_programs import GRAPH

ALICE, BOB, ROOT = "rk-alice", "rk-bob", "rk-root"
PROGRAM: Any = {"graph": GRAPH, "arguments": {"topic": "tea"}}
PROMPT = "The tree has seven lines. " * 4


def write(path: Path, **tables: dict[str, Any]) -> Path:
    """A file of keys: each is rk-NAME."""
    lines = []
    for name, table in tables.items():
        lines += [f"[keys.{name}]", f'hash = "{hash_of("rk-" + name)}"']
        lines += [
            f"{field} = {str(value).lower() if value in (True, False) else repr(value)}"
            for field, value in table.items()
        ]
    path.write_text("\n".join(lines) + "\n")
    return path


BATCH_LINE = json.dumps(
    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": COMPLETION}
).encode()
HASHED = f"hash = '{hash_of('a')}'\n"


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("keys")
    keys = write(
        folder / "keys.toml",
        alice={},
        bob={"priority": -1, "max_priority": 2},
        root={"admin": True},
        team1={"scope": "team"},
        team2={"scope": "team"},
        scraper={"endpoints": ["/metrics"]},
        narrow={"models": ["other-*", "adapter"], "endpoints": ["/v1/*"]},
        one={"concurrent_requests": 1},
        storing={"requests_per_minute": 2},
        few={"requests_per_minute": 2, "tokens_per_minute": 100000},
        small={"tokens_per_minute": 60},
    )
    given = {"keys": str(keys), "batch_dir": str(folder / "batches"), "lora_loading": True}
    with LiveServer(FakeFrontend(), programs.router, batches.router, **given) as server:
        yield server


@pytest.fixture
def of(server: LiveServer) -> Iterator[Any]:
    """Function from a key to a client that sends it."""
    clients: dict[str, httpx.Client] = {}

    def client(key: str) -> httpx.Client:
        if key not in clients:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            clients[key] = httpx.Client(base_url=server.url, timeout=60, headers=headers)
        return clients[key]

    yield client
    for one in clients.values():
        one.close()


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hash = 3", "keys.a.hash: Expected `str`, got `int`"),
        (f"{HASHED}model = ['m']", "keys.a.model is unknown. Did you mean models?"),
        (f"{HASHED}requests_per_minute = 0", "keys.a.requests_per_minute: Expected `int` >= 1"),
        (f"{HASHED}priority = 3\nmax_priority = 2", "keys.a.max_priority is below priority, 3"),
        (f"{HASHED}priority = 300", "keys.a.priority is 300"),
        (f"{HASHED}[keys.b]\n{HASHED}", "keys.b.hash is that of keys.a"),
        ('hash = "secret"', "keys.a.hash must be sha256:"),
        (f"{HASHED}[keys.'a/b']\n{HASHED}", "keys.a/b is 'a/b'; it must be 1 to 64 letters"),
        (f"{HASHED}scope = '@b'", "keys.a.scope is '@b'"),
        (f"{HASHED}[key.a]", "key is unknown. A key is a table [keys.NAME]."),
        ("[keys.b", "(at end of document)"),
    ],
)
def test_an_error_in_the_file_names_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"[keys.a]\n{text}")
    with pytest.raises(InvalidRequest) as raised:
        read_keys(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert told in str(raised.value)
    path.write_text("")
    with pytest.raises(InvalidRequest, match="there must be 1 to 1000 tables"):
        read_keys(path)


def test_a_new_key_is_not_in_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "alice"]) == 0
    out, err = capsys.readouterr()
    key = err.split()[0]
    assert len(key) > 40
    assert key not in out
    (tmp_path / "keys.toml").write_text(out + new_key("bob.2")[1])
    keys = Keys(ServerConfig(keys=str(tmp_path / "keys.toml"), api_key="sesame"))
    for given, name in ((key, "alice"), ("sesame", "default")):
        account = keys.find([b"wrong", given.encode()])
        assert account is not None
        assert account.key.name == name
    assert keys.find([b"", b"wrong"]) is None
    assert keys.named("bob.2") is not None


def test_a_wrong_file_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--keys", str(tmp_path / "none.toml"), "--port", "0"]) == 2
    assert "none.toml cannot be read: No such file" in capsys.readouterr().err


def test_the_default_key_cannot_be_in_the_file_too(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", default={})
    with pytest.raises(InvalidRequest, match=r"keys.default is the key of --api-key"):
        Keys(ServerConfig(keys=str(path), api_key="sesame"))


def test_a_server_for_other_machines_needs_a_key() -> None:
    with pytest.raises(ValueError, match="--api-key, --keys"):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", keys="keys.toml").needs_key


def test_sighup_reads_the_file_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ramify.server")
    path = write(tmp_path / "keys.toml", alice={"requests_per_minute": 1})
    config = ServerConfig(keys=str(path), port=0, batch_gb=0)
    read = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(("The keys were read", "The keys stay")):
                read.set()

    async def serve() -> list[int]:
        listener, stopping, ready = bind("127.0.0.1", 0), asyncio.Event(), asyncio.Event()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(run_server(FakeFrontend(), config, listener, stopping, ready.set))
        await ready.wait()
        found = []
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def ask(key: str) -> None:
                headers = {"authorization": f"Bearer {key}"}
                found.append(
                    (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code
                )

            async def reload() -> None:
                read.clear()
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.to_thread(read.wait, 60)

            await ask(ALICE)
            await ask(ALICE)
            path.write_text("[keys.alice]\nhash = 1")
            await reload()
            await ask(ALICE)
            write(path, bob={}, alice={"requests_per_minute": 1})
            await reload()
            await ask(ALICE)
            await ask(BOB)
            write(path, bob={})
            await reload()
            await ask(ALICE)
        stopping.set()
        await serving
        return found

    handler = Told()
    logging.getLogger("ramify.server").addHandler(handler)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert runner.run(serve()) == [200, 429, 429, 429, 200, 401]
    finally:
        logging.getLogger("ramify.server").removeHandler(handler)
    (stay,) = [record.getMessage() for record in caplog.records if "stay" in record.getMessage()]
    assert stay == f"The keys stay as they are: {path}: keys.alice.hash: Expected `str`, got `int`."


@pytest.mark.parametrize("terminal", [False, True])
def test_sighup_without_a_file_of_keys(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """A service goes on, also while it drains; in a terminal, closing it ends the server as before."""
    config = ServerConfig(port=0, batch_gb=0)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    ignored = threading.Event()
    monkeypatch.setattr(logging.getLogger("ramify.server"), "warning", lambda *_: ignored.set())
    frontend = FakeFrontend()

    async def hang_up() -> None:
        ignored.clear()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.to_thread(ignored.wait, 60)

    async def serve() -> None:
        listener, stopping, ready = bind("127.0.0.1", 0), asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(run_server(frontend, config, listener, stopping, ready.set))
        await ready.wait()
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_DFL) is terminal
        if not terminal:
            await hang_up()
            frontend.drain = lambda _: hang_up()  # type: ignore[method-assign]
        stopping.set()
        await serving

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())
    assert ignored.is_set() is not terminal
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


# --- who may send what ----------------------------------------------------------------------------


def test_a_key_is_taken_as_a_bearer_token_and_as_x_api_key(server: LiveServer) -> None:
    for headers, status in (
        ({"authorization": f"Bearer {ALICE}"}, 200),
        ({"authorization": f"bearer {ALICE}"}, 200),
        ({"x-api-key": ALICE}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": ALICE}, 200),
        ({"authorization": ALICE}, 401),
        ({"authorization": f"Bearer {hash_of(ALICE)}"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ):
        assert httpx.get(server.url + "/v1/models", headers=headers).status_code == status
    assert httpx.get(server.url + "/health").status_code == 200


OPERATOR_ROUTES = {
    *("GET /", "GET /live", "GET /metrics", "GET /server_info", "GET /get_server_info"),
    *("GET /flush_cache", "POST /flush_cache", "POST /reset_prefix_cache"),
    *("GET /replicas", "POST /replicas", "POST /replicas/{name}/drain", "POST /replicas/{name}/restart"),
    *("POST /models/{name:path}/load", "POST /models/{name:path}/unload"),
    *("POST /load_lora_adapter", "POST /v1/load_lora_adapter"),
    *("POST /unload_lora_adapter", "POST /v1/unload_lora_adapter"),
    *("POST /api/pull", "POST /api/create", "POST /api/copy", "POST /api/push", "DELETE /api/delete"),
    *("POST /api/blobs/{digest}", "GET /api/blobs/{digest}"),
}
CLIENT_ROUTES = {
    *("GET /livez", "GET /readyz", "GET /health", "GET /health_generate"),
    *("GET /v1/models", "GET /v1/models/{model:path}", "GET /get_model_info", "GET /model_info"),
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings", "POST /v1/messages"),
    *("POST /v1/messages/count_tokens", "POST /generate", "PUT /generate", "POST /infill"),
    *("POST /v1/decisions", "POST /v1/systemone", "POST /v1/programs", "POST /v1/programs/{run}/results"),
    *("POST /v1/calls", "POST /abort_request", "POST /await_tools", "POST /end_program"),
    *("POST /v1/rerank", "POST /rerank", "POST /v2/rerank", "POST /v1/score", "POST /score"),
    *("POST /tokenize", "POST /v1/tokenize", "POST /detokenize", "POST /v1/detokenize"),
    *("GET /tokenizer_info", "GET /v1/tokenizer_info"),
    *("POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/embeddings", "POST /api/show"),
    *("GET /api/tags", "GET /api/ps", "GET /api/version"),
    *("POST /v1/responses", "GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}"),
    *("GET /v1/responses/{response_id}/input_items", "POST /v1/conversations"),
    *(f"{method} /v1/conversations/{{conversation_id}}" for method in ("GET", "POST", "DELETE")),
    *(f"{method} /v1/conversations/{{conversation_id}}/items" for method in ("GET", "POST")),
    *(f"{method} /v1/conversations/{{conversation_id}}/items/{{item_id}}" for method in ("GET", "DELETE")),
    *("POST /v1/files", "GET /v1/files", "GET /v1/files/{identity}", "GET /v1/files/{identity}/content"),
    *("DELETE /v1/files/{identity}", "POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{identity}"),
    *("POST /v1/batches/{identity}/cancel", "GET /cache", "DELETE /cache/{owner:path}"),
}


def test_each_route_is_for_any_key_or_for_operators(server: LiveServer, of: Any) -> None:
    opened: set[str] = set()
    closed: set[str] = set()
    app = create_app(FakeFrontend(), server.config, (programs.router, batches.router))
    for route in app.routes:
        assert isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}:
            path = re.sub(r"\{.*?\}", "x", route.path)
            told = of(ALICE).request(method, path, content=b"{}").text
            refused_path = f"The key 'alice' may not use {path}." in told
            (closed if refused_path else opened).add(f"{method} {route.path}")
    assert opened == CLIENT_ROUTES
    assert closed == OPERATOR_ROUTES
    for path in ("/metrics", "/live", "/", "/replicas", "/flush_cache"):
        error = refused(of(ALICE).get(path), 403)
        assert error["message"].startswith(f"The key 'alice' may not use {path}.")
        assert of(ROOT).get(path).status_code in (200, 404)
    password = httpx.BasicAuth("any", ROOT)
    assert httpx.get(server.url + "/live", auth=password).status_code == 200
    asked = httpx.get(server.url + "/live", auth=httpx.BasicAuth("any", ALICE))
    assert asked.status_code == 401, "the browser asks for another key, and shows this where it is given none"
    assert asked.headers["www-authenticate"].startswith("Basic ")
    assert "The key 'alice' may not use /live." in asked.text
    assert httpx.get(server.url + "/v1/models", auth=password).status_code == 401


def test_endpoints_of_a_key(of: Any) -> None:
    assert of("rk-scraper").get("/metrics").status_code == 200
    message = refused(of("rk-scraper").post("/v1/completions", json=COMPLETION), 403)["message"]
    assert message == "The key 'scraper' may not use /v1/completions. It may use /metrics."
    refused(of("rk-narrow").post("/generate", json=GENERATE), 403)
    lora = {"lora_name": "adapter", "lora_path": "/x"}
    refused(of("rk-narrow").post("/v1/load_lora_adapter", json=lora), 403)


@pytest.mark.parametrize("path", BODIES)
def test_models_of_a_key(of: Any, frontend: FakeFrontend, path: str) -> None:
    if path == "/generate":
        refused(of("rk-narrow").post(path, json=GENERATE), 403)
        return
    error = refused(of("rk-narrow").post(path, json=BODIES[path]), 403)
    assert (error["param"], error["code"]) == ("model", "not_allowed")
    assert (
        error["message"] == f"The key 'narrow' may not use the model '{MODEL}'. It may use other-*, adapter."
    )
    assert not frontend.requests


def test_models_are_listed_by_key(of: Any, frontend: FakeFrontend) -> None:
    lora = {"lora_name": "adapter", "lora_path": "/x"}
    assert of(ROOT).post("/load_lora_adapter", json=lora).status_code == 200

    def names(key: str) -> list[str]:
        return [card["id"] for card in of(key).get("/v1/models").json()["data"]]

    assert names(ALICE) == [MODEL, "adapter"]
    assert names("rk-narrow") == ["adapter"]
    refused(of("rk-narrow").get(f"/v1/models/{MODEL}"), 403)
    assert of("rk-narrow").get("/v1/models/adapter").status_code == 200
    told = refused(of("rk-narrow").post("/v1/completions", json=COMPLETION | {"model": "no"}), 404)["message"]
    assert MODEL not in told.replace("'default'", "")
    assert of("rk-narrow").post("/v1/completions", json=COMPLETION | {"model": "adapter"}).status_code == 200
    assert frontend.requests[-1].lora == "adapter"


def test_priorities_of_a_key(of: Any, frontend: FakeFrontend) -> None:
    for key, asked, given in (
        (ALICE, {}, 0),
        (BOB, {}, -1),
        (BOB, {"priority": 2}, 2),
        (ALICE, {"priority": -9}, -9),
    ):
        assert of(key).post("/v1/completions", json=COMPLETION | asked).status_code == 200
        assert frontend.requests[-1].priority == given
    error = refused(of(BOB).post("/v1/completions", json=COMPLETION | {"priority": 3}), 403)
    assert error["message"] == "The key 'bob' may not have the priority 3. It may have at most 2."
    refused(of(ALICE).post("/v1/completions", json=COMPLETION | {"service_tier": "priority"}), 403)
    sent = {"request": {"type": "Generate", "rid": "r", "prompt": ["hi"], "priority": 5, "key": "root"}}
    refused(of(ALICE).post("/v1/calls", json=sent), 403)


# --- limits ---------------------------------------------------------------------------------------


def test_a_bucket_fills_at_its_rate() -> None:
    now = [0.0]
    bucket = Bucket(600, lambda: now[0])
    bucket.take(500)
    assert bucket.wait_s(200) == pytest.approx(10.0)
    now[0] = 10.0
    assert bucket.wait_s(200) == 0.0
    bucket.take(300)
    assert bucket.left == -100
    assert bucket.wait_s(10_000) == pytest.approx(70.0), "a full bucket lets in what is larger than the limit"
    now[0] = 1000.0
    assert bucket.left == 600
    assert bucket.renewed(600) is bucket
    assert bucket.renewed(None) is None


def test_tokens_count_by_an_estimate_and_then_as_they_were(tmp_path: Path) -> None:
    now = [0.0]
    path = write(tmp_path / "keys.toml", small={"tokens_per_minute": 60, "requests_per_minute": 5})
    account = Keys(ServerConfig(keys=str(path)), lambda: now[0]).named("small")
    assert account is not None
    assert account.tokens is not None
    request = Generate(rid="r", prompt=("x" * 40, (1, 2, 3)), sampling=SamplingParams(max_tokens=17))
    assert expected_tokens(request) == 30
    caller = Caller(account)
    assert caller.begin(request) == 30
    with pytest.raises(Overloaded) as raised:
        Caller(account).begin(Generate(rid="s", prompt=("x" * 160,), sampling=SamplingParams(max_tokens=0)))
    assert (raised.value.retry_after, raised.value.field) == (10.0, "tokens_per_minute")
    assert "the request counts as 40 tokens, and 30 are left" in str(raised.value)
    caller.settle(30, 90)
    caller.end()
    assert (account.tokens.left, account.running) == (-30, 0)
    assert account.requests is not None
    assert account.requests.left == 4, "a refused request does not count"


def test_a_hang_up_before_the_first_token_costs_the_prompt(tmp_path: Path) -> None:
    frontend = FakeFrontend()
    frontend.hold_after = 0
    keys = str(write(tmp_path / "keys.toml", alice={"tokens_per_minute": 1000}))
    server = LiveServer(frontend, keys=keys)
    server.keys = Keys(server.config, lambda: 0.0)
    account = server.keys.named("alice")
    assert account is not None
    bucket = account.tokens
    assert bucket is not None
    body = json.dumps({"model": MODEL, "prompt": "x" * 100, "max_tokens": 2}).encode()
    head, _, rest = raw_post("/v1/completions", body).partition(b"\r\n")
    with server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + b"\r\nx-api-key: rk-alice\r\n" + rest)
            assert frontend.held.wait(60)
            assert bucket.left == 1000 - 27
        wait_for(lambda: bucket.left != 1000 - 27)
        assert bucket.left == 1000 - 25


def test_storing_counts_as_a_request(of: Any) -> None:
    storing = of("rk-storing")
    conversation = storing.post("/v1/conversations", json={}).json()["id"]
    item = {"items": [{"role": "user", "content": "hi"}]}
    assert storing.post(f"/v1/conversations/{conversation}/items", json=item).status_code == 200
    for path in ("/v1/conversations", f"/v1/conversations/{conversation}/items"):
        assert refused(storing.post(path, json=item), 429)["param"] == "requests_per_minute"
    assert len(storing.get(f"/v1/conversations/{conversation}/items").json()["data"]) == 1


def test_requests_a_minute_and_the_headers(of: Any) -> None:
    few = of("rk-few")
    first = few.post("/v1/completions", json=COMPLETION)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "100000"
    assert 29 < float(first.headers["x-ratelimit-reset-requests"].rstrip("s")) <= 30
    assert few.get("/v1/models").status_code == 200, "only requests that generate count"
    second = few.post("/v1/completions", json=COMPLETION | {"n": 4})
    assert second.status_code == 200, "the choices of a body are one request"
    with client_of(str(few.base_url), "rk-few") as client:
        with pytest.raises(
            openai.RateLimitError, match=r"The key 'few' has reached requests_per_minute, 2"
        ) as raised:
            client.completions.create(**COMPLETION, stream=True)
        assert 28 < int(raised.value.response.headers["retry-after"]) <= 30
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    third = few.post("/v1/messages", json=body)
    assert (third.status_code, third.json()["error"]["type"]) == (429, "rate_limit_error")
    assert third.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert third.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert "x-ratelimit-limit-requests" not in third.headers


def test_tokens_a_minute(of: Any) -> None:
    small = of("rk-small")
    assert small.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 90}).status_code == 200
    error = refused(small.post("/v1/completions", json=COMPLETION), 429)
    assert error["param"] == "tokens_per_minute"
    assert "and 0 are left" in error["message"]


def test_concurrent_requests(of: Any, frontend: FakeFrontend) -> None:
    frontend.hold_after = 0
    held = threading.Thread(target=of("rk-one").post, args=("/v1/completions",), kwargs={"json": COMPLETION})
    held.start()
    assert frontend.held.wait(60)
    error = refused(of("rk-one").post("/v1/completions", json=COMPLETION), 429)
    assert error["message"] == (
        "The key 'one' has reached concurrent_requests, 1: 1 requests run. Send it again in 1.0 s."
    )
    assert of("rk-one").post("/abort_request", json={"abort_all": True}).json()["aborted"] == 1
    held.join(60)
    frontend.hold_after = None
    assert of("rk-one").post("/v1/completions", json=COMPLETION).status_code == 200


def test_usage_by_key(of: Any) -> None:
    def metrics() -> dict[str, float]:
        lines = of(ROOT).get("/metrics").text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if re.match(r"ramify_key_\w+_total", line)]
        return {name: float(value) for name, _, value in pairs}

    before = metrics()
    sent = COMPLETION | {"prompt": PROMPT, "n": 2}
    assert of("rk-team1").post("/v1/completions", json=sent).status_code == 200
    refused(of("rk-small").post("/v1/completions", json=COMPLETION | {"prompt": "x" * 4000}), 429)
    after = metrics()
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)} == {
        'ramify_key_requests_total{key="team1"}': 1,
        'ramify_key_tokens_total{key="team1",kind="prompt"}': len(PROMPT),
        'ramify_key_tokens_total{key="team1",kind="cached"}': 0,
        'ramify_key_tokens_total{key="team1",kind="generation"}': 4,
        'ramify_key_refusals_total{key="small",limit="tokens_per_minute"}': 1,
    }


# --- what is private ------------------------------------------------------------------------------


def cached(client: httpx.Client, **fields: Any) -> int:
    body = client.post("/v1/completions", json=COMPLETION | {"prompt": PROMPT} | fields).json()
    tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_no_key_finds_the_prefixes_of_another(of: Any, frontend: FakeFrontend) -> None:
    frontend.flush_cache()
    assert cached(of(ALICE)) == 0
    assert cached(of(ALICE)) == len(PROMPT) - 1
    for salt in ("", "@alice", "@alice/", "alice", "alice/"):
        assert cached(of(BOB), cache_salt=salt) == 0
        assert cached(of("rk-team1"), cache_salt=salt) == 0
    assert cached(of("rk-team2")) == len(PROMPT) - 1, "keys of one scope find each other's"
    assert {one.key for one in frontend.requests} == {"alice", "bob", "team1", "team2"}
    for path, field in (
        ("/generate", "cache_scope"),
        ("/v1/calls", "scope"),
        ("/v1/programs", "cache_scope"),
    ):
        if path == "/v1/calls":
            sent: Any = {"request": {"type": "Generate", "rid": "r", "prompt": ["hi"], field: "@alice/"}}
        else:
            sent = (GENERATE if path == "/generate" else PROGRAM) | {field: "@alice/"}
        assert of(BOB).post(path, json=sent).status_code == 200
        assert frontend.requests[-1].scope == "@bob/@alice/"


def test_texts_are_tokenised_in_the_scope_of_the_key(of: Any, frontend: FakeFrontend) -> None:
    assert of(BOB).post("/tokenize", json={"prompt": PROMPT}).status_code == 200
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
    assert of(ALICE).post("/v1/messages/count_tokens", json=body).status_code == 200
    assert [one.scope for one in frontend.requests] == ["@bob/", "@alice/"]


def test_no_key_aborts_a_request_of_another(of: Any, frontend: FakeFrontend) -> None:
    frontend.hold_after = 0
    answers: list[httpx.Response] = []
    body = GENERATE | {"rid": "mine"}
    held = threading.Thread(target=lambda: answers.append(of(ALICE).post("/generate", json=body)))
    held.start()
    assert frontend.held.wait(60)
    for asked in ({"rid": "mine"}, {"rid": "alice/mine"}, {"rid": "alice"}, {"abort_all": True}):
        assert of(BOB).post("/abort_request", json=asked).json() == {"aborted": 0}
    assert (
        of(BOB)
        .post(
            "/v1/calls",
            json={"request": {"type": "Generate", "rid": "mine", "prompt": ["x"]}, "fingerprint": "no"},
        )
        .status_code
        == 400
    )
    assert list(frontend.running) == ["alice/mine"]
    assert of(ALICE).post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
    held.join(60)
    assert answers[0].json()["meta_info"]["id"] == "mine"


def test_an_operator_aborts_all(of: Any, frontend: FakeFrontend) -> None:
    frontend.hold_after = 0
    held = threading.Thread(target=of(ALICE).post, args=("/generate",), kwargs={"json": GENERATE})
    held.start()
    assert frontend.held.wait(60)
    assert of(ROOT).post("/abort_request", json={"abort_all": True}).json() == {"aborted": 1}
    held.join(60)


def test_programs_of_one_name_are_of_their_keys(of: Any, frontend: FakeFrontend) -> None:
    for key in (ALICE, BOB):
        hint = {"program": "p", "name": "n", "lease_s": 5}
        assert of(key).post("/generate", json=GENERATE | {"program": hint}).status_code == 200
        assert (
            of(key).post("/v1/completions", json=COMPLETION, headers={"x-ramify-program": "p"}).status_code
            == 200
        )
        assert of(key).post("/await_tools", json={"program": "p", "tools": ["t"]}).status_code == 200
        assert of(key).post("/end_program", json={"program": "p"}).status_code == 200
    hints = [one.hint.program for one in frontend.requests if one.hint is not None]
    assert hints == ["alice/p", "alice/p", "bob/p", "bob/p"]
    assert [program for program, _, _ in frontend.awaited] == ["alice/p", "bob/p"]
    assert frontend.ended_programs == ["alice/p", "bob/p"]


def test_results_for_a_program_of_another_key(of: Any) -> None:
    asked = {"tools": "t", "results": ["r"]}
    refused(of(BOB).post("/v1/programs/mine/results", json=asked), 404)


def test_stored_responses_and_conversations_are_of_their_key(of: Any, frontend: FakeFrontend) -> None:
    first = of("rk-team1").post("/v1/responses", json=RESPONSE | {"store": True}).json()
    path = f"/v1/responses/{first['id']}"
    conversation = of("rk-team1").post("/v1/conversations", json={}).json()["id"]
    for key in (BOB, "rk-team2", ROOT):
        for salt in ("", "team1/"):
            assert of(key).get(path, params={"cache_salt": salt}).status_code == 404
        assert of(key).delete(path).status_code == 404
        follow = of(key).post("/v1/responses", json=RESPONSE | {"previous_response_id": first["id"]})
        assert follow.json()["error"]["code"] == "previous_response_not_found"
        assert of(key).get(f"/v1/conversations/{conversation}").status_code == 404
    assert of("rk-team1").get(path).json()["id"] == first["id"]
    follow = of("rk-team1").post("/v1/responses", json=RESPONSE | {"previous_response_id": first["id"]})
    assert follow.status_code == 200
    programs = {one.hint.program for one in frontend.requests if one.hint is not None}
    assert programs == {f"team1/{first['id']}"}
    for one in (first["id"], follow.json()["id"]):
        assert of("rk-team1").delete(f"/v1/responses/{one}").status_code == 200
    assert frontend.ended_programs == [f"team1/{first['id']}"], "leases end with the last of the chain"


def test_batch_files_are_of_their_key(of: Any, server: LiveServer, frontend: FakeFrontend) -> None:
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": %s}'
    body = httpx.Response(200, json=COMPLETION).content
    with openai.OpenAI(base_url=server.url + "/v1", api_key=BOB, max_retries=0) as bob:
        file = bob.files.create(file=line % body, purpose="batch")
        batch = bob.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while bob.batches.retrieve(batch.id).status in ("validating", "in_progress", "finalizing"):
            pass
        assert bob.batches.retrieve(batch.id).request_counts.completed == 1
    assert (frontend.requests[-1].key, frontend.requests[-1].priority) == ("bob", -1)
    for key in (ALICE, ROOT):
        assert of(key).get(f"/v1/files/{batch.input_file_id}/content").status_code == 404
        assert of(key).get(f"/v1/batches/{batch.id}").status_code == 404
        assert of(key).post(f"/v1/batches/{batch.id}/cancel").status_code == 404
        assert of(key).get("/v1/files").json()["data"] == []


def test_a_batch_of_a_key_that_was_removed_waits_for_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key is removed while the server is down, and back after a SIGHUP."""
    given = {
        "keys": str(write(tmp_path / "keys.toml", alice={}, bob={})),
        "batch_dir": str(tmp_path / "files"),
    }
    frontend = FakeFrontend()
    frontend.hold_after = 0
    with LiveServer(frontend, batches.router, **given) as server, client_of(server.url, BOB) as bob:
        batch = start(bob, BATCH_LINE)
        assert frontend.held.wait(60)
    write(tmp_path / "keys.toml", alice={})
    with LiveServer(FakeFrontend(), batches.router, **given) as server, client_of(server.url, BOB) as bob:
        wait_for(lambda: f"{batch.id} waits: the API key" in caplog.text)
        write(tmp_path / "keys.toml", alice={}, bob={})
        server.call(server.keys.reload)
        found = ended(bob, batch.id)
    assert (found.status, found.request_counts.completed) == ("completed", 1)


def test_batch_files_of_api_key_keep_their_owner() -> None:
    """As before there were files of keys: folders of batch files outlive a server's version."""
    account = Keys(ServerConfig(api_key="sesame")).named("default")
    assert account is not None
    assert account.owner == hashlib.blake2b(b"sesame", digest_size=16).hexdigest()


def test_lines_that_wait_for_a_limit_keep_no_place_and_no_turn(tmp_path: Path) -> None:
    """Alice's batches are all that may be computed at a time, with more lines than there are places."""
    keys = write(tmp_path / "keys.toml", alice={"requests_per_minute": 1}, bob={}, root={"admin": True})
    given = {"keys": str(keys), "batch_dir": str(tmp_path / "files")}
    lines = [json.loads(BATCH_LINE) | {"custom_id": str(number)} for number in range(45)]
    text = "\n".join(map(json.dumps, lines)).encode()
    with (
        LiveServer(FakeFrontend(), batches.router, **given) as server,
        client_of(server.url, ALICE) as alice,
        client_of(server.url, BOB) as bob,
    ):

        def refusals() -> int:
            told = httpx.get(server.url + "/metrics", headers={"x-api-key": ROOT}).text
            found = re.search(r'^ramify_key_refusals_total{key="alice",.*} (\d+)', told, re.MULTILINE)
            return 0 if found is None else int(found[1])

        for _ in range(4):
            start(alice, text)
        wait_for(lambda: refusals() >= 160)
        assert ended(bob, start(bob, BATCH_LINE).id).request_counts.completed == 1


async def test_a_free_place_goes_to_the_owner_that_holds_fewest() -> None:
    places, order = Places(2), list[str]()
    going = asyncio.Event()

    async def take(owner: str) -> None:
        async with places.place(owner):
            order.append(owner)
            await going.wait()

    tasks = [asyncio.create_task(take(owner)) for owner in ("alice", "alice", "alice", "alice", "bob")]
    await asyncio.sleep(0)
    assert order == ["alice", "alice"]
    tasks[2].cancel()
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    await asyncio.sleep(0)
    assert order == ["alice", "alice", "bob"]
    going.set()
    await asyncio.wait(tasks)
    assert order == ["alice", "alice", "bob", "alice"]
    async with places.place("bob"), places.place("bob"):
        order.append("both are free")


def test_a_key_leaves_room_for_files_of_others(tmp_path: Path) -> None:
    given = {
        "keys": str(write(tmp_path / "keys.toml", alice={}, bob={})),
        "batch_dir": str(tmp_path / "files"),
        "batch_gb": 8000 / 2**30,
    }
    content = BATCH_LINE + b" " * 800
    with (
        LiveServer(FakeFrontend(), batches.router, **given) as server,
        client_of(server.url, ALICE) as alice,
        client_of(server.url, BOB) as bob,
    ):
        for _ in range(3):
            alice.files.create(file=content, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="3 are of this key") as raised:
            alice.files.create(file=content, purpose="batch")
        assert raised.value.status_code == 507
        bob.files.create(file=content, purpose="batch")


def test_keys_that_take_what_they_can_have_equal_parts(tmp_path: Path) -> None:
    keys = Keys(ServerConfig(keys=str(write(tmp_path / "keys.toml", alice={}, bob={}))))

    def may_take(account: Account, taken: Counter[str]) -> bool:
        context = contextvars.copy_context()
        context.run(KEY.set, Caller(account))
        return context.run(fair_room, taken, 1, 90)

    accounts = [keys.named("alice"), keys.named("bob")]
    taken = Counter[str]()
    for account in [*accounts, *accounts] * 90:
        assert account is not None
        taken[account.owner] += may_take(account, taken)
    assert set(taken.values()) <= {30, 31}
    assert may_take(OPEN, Counter({"": 89}))
    assert not may_take(OPEN, Counter({"": 90}))


def start(client: openai.OpenAI, lines: bytes) -> Any:
    """Upload `lines`, and create a batch of completions with them."""
    file = client.files.create(file=lines, purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def test_a_chunk_does_not_name_the_programs_of_other_keys(tmp_path: Path) -> None:
    account = Keys(ServerConfig(keys=str(write(tmp_path / "k", alice={})))).named("alice")
    assert account is not None
    caller = Caller(account)

    def told(taker: str) -> str:
        chunk = caller.shown(TextChunk(rid="alice/r", usage=Usage(evicted_by=taker)), "r")
        assert chunk.rid == "r"
        assert chunk.usage is not None
        return chunk.usage.evicted_by

    assert told("judge alice/p 1") == "judge p 1"
    assert told("alice/r2~3") == "r2~3"
    assert told("judge bob/p") == "another key"
    assert told("flush") == "flush"


def test_without_keys_names_stay(http: httpx.Client) -> None:
    frontend = FakeFrontend()
    with LiveServer(frontend, api_key="sesame") as server:
        headers = {"authorization": "Bearer sesame"}
        sent = COMPLETION | {"cache_salt": "s", "priority": 100}
        assert httpx.post(server.url + "/v1/completions", json=sent, headers=headers).status_code == 200
    (request,) = frontend.requests
    assert (request.rid.partition("-")[0], request.scope, request.key) == ("cmpl", "s", "")
