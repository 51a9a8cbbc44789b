"""Lines of the log as JSON, the id of each request, and no text of a prompt or an output unless asked for."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ramify.errors import WorkerDied
from ramify.logs import JsonLines, configure_logging, fields
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.runtime.processes.worker_process import Orders
from ramify.runtime.server.service import Service
from tests.server.conftest import BODIES, CHAT, COMPLETION, GENERATE
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.test_serve_process import SCRIPT

SECRET = "lighthouse"
"""A word of prompts that nothing else has."""


class Lines(logging.Handler):
    """Every record as the JSON line that the server would write."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines("frontend"))
        self.lines: list[dict[str, Any]] = []
        self.texts: list[str] = []
        """The same records as lines of text, with their tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        assert "\n" not in line
        self.lines.append(json.loads(line))
        self.texts.append(logging.Formatter().format(record))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def generations(lines: Lines) -> list[dict[str, Any]]:
    return [line for line in lines.lines if line["message"] == "generation"]


def test_a_request_is_one_line_with_its_fields(
    http: httpx.Client, frontend: FakeFrontend, lines: Lines
) -> None:
    headers = {"x-request-id": "mine-1", "x-title": "probe", "x-ramify-program": "p1"}
    http.post("/v1/chat/completions", json=CHAT | {"user": "alice"}, headers=headers)
    (line,) = generations(lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line.pop("rid").startswith("chatcmpl-")
    assert 0 <= line.pop("first_token_s") <= line.pop("total_s")
    prompt, cached = line.pop("prompt_tokens"), line.pop("cached_tokens")
    assert prompt > cached >= 0
    assert line == {
        "level": "info",
        "logger": "ramify.server",
        "process": "frontend",
        "message": "generation",
        "request_id": "mine-1",
        "program": "p1",
        "program_name": "probe",
        "client": "probe",
        "user": "alice",
        "model": MODEL,
        "endpoint": "/v1/chat/completions",
        "status": 200,
        "finish": "length",
        "output_tokens": 2,
    }


def test_refusals_and_failures_have_the_request_id(
    http: httpx.Client, frontend: FakeFrontend, lines: Lines
) -> None:
    refused = http.post("/v1/completions", json=COMPLETION | {"top_p": 7})
    frontend.fail_first = WorkerDied("The scheduler died.")
    failed = http.post("/v1/completions", json=COMPLETION)
    told = {line["request_id"]: line for line in lines.lines if line["logger"] == "ramify.server"}
    line = told[refused.headers["x-request-id"]]
    assert (line["status"], line["method"], line["path"]) == (400, "POST", "/v1/completions")
    assert line["message"].startswith("top_p is 7")
    of_failed = [
        line["status"] for line in lines.lines if line.get("request_id") == failed.headers["x-request-id"]
    ]
    assert of_failed == [503, 503]


@pytest.mark.parametrize(
    ("given", "kept"),
    [("mine-1", True), ("a" * 128, True), ("", False), ("a" * 129, False), ("a b", False), ('"x"', False)],
)
def test_the_response_names_the_request(http: httpx.Client, given: str, kept: bool) -> None:
    for path in ("/v1/models", "/v1/nothing", "/livez"):
        found = http.get(path, headers={"x-request-id": given}).headers["x-request-id"]
        assert (found == given) is kept
        assert re.fullmatch(r"[\w.:/+=@-]{1,128}", found)
    first, second = (http.get("/livez").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_ids_of_anthropics_api_are_the_same(http: httpx.Client) -> None:
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    headers = http.post("/v1/messages", json=body).headers
    assert headers["x-request-id"] == headers["request-id"]
    wrong = http.post("/v1/messages", json=body | {"top_p": 7}, headers={"x-request-id": "mine"})
    assert (
        wrong.json()["request_id"] == wrong.headers["request-id"] == wrong.headers["x-request-id"] == "mine"
    )


def test_a_refusal_of_the_key_names_the_request() -> None:
    with LiveServer(FakeFrontend(), api_key="k") as server:
        answer = httpx.get(server.url + "/v1/models", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")


def test_a_line_names_the_key(lines: Lines) -> None:
    with LiveServer(FakeFrontend(), api_key="s3cret") as server:
        headers = {"authorization": "Bearer s3cret"}
        answer = httpx.post(server.url + "/v1/completions", json=COMPLETION, headers=headers)
    assert answer.status_code == 200
    (line,) = generations(lines)
    assert line["key"] == "default"
    assert not [text for text in lines.texts if "s3cret" in text]


def test_an_unexpected_error_is_one_line_with_its_traceback(
    http: httpx.Client, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("1\n2")

    monkeypatch.setattr(Service, "check_count", broken)
    answer = http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 500
    (line,) = [line for line in lines.lines if "traceback" in line]
    assert line["traceback"].startswith("Traceback (most recent call last)")
    assert line["traceback"].endswith("ZeroDivisionError: 1\n2")
    assert (line["level"], line["request_id"]) == ("error", answer.headers["x-request-id"])


def hidden(path: str) -> list[Any]:
    """Bodies for `path` whose prompts have `SECRET`: right ones, and ones that fail in different places."""
    turn: dict[str, Any] = {"role": "user", "content": SECRET}
    body = (BODIES | OTHERS)[path]
    if path == "/v1/chat/completions":
        return [
            body | {"messages": [turn]},
            body | {"messages": [turn], "stream": True},
            body | {"messages": [turn], "top_p": 7},
            body | {"messages": [turn | {"role": "wizard"}]},
            body | {"messages": [turn | {"content": {SECRET: SECRET}}]},
            body | {"messages": [turn | {"content": [{"type": "image", "text": SECRET}]}]},
            body | {"messages": [turn, {"role": "tool", "content": SECRET}]},
            body | {"messages": [turn | {"content": SECRET * 1000}]},
            body | {"messages": SECRET},
            body | {"messages": [SECRET]},
        ]
    if path in ("/v1/messages", "/api/chat"):
        return [
            body | {"messages": [turn]},
            body | {"messages": [turn | {"content": 5}, turn]},
            body | {"messages": [turn], "system": {"a": SECRET}},
            body | {"messages": [turn | {"content": [{"type": "odd", "text": SECRET}]}]},
            body | {"messages": SECRET},
        ]
    field = {"/v1/responses": "input", "/generate": "text", "/infill": "input_prefix"}.get(path, "prompt")
    return [
        body | {field: SECRET},
        body | {field: SECRET, "stream": True},
        body | {field: SECRET * 1000},
        body | {field: {"a": SECRET}},
        body | {field: [[SECRET]]},
        body | {field: [SECRET, 5]},
        body | {field: SECRET, "unknown": 1},
    ]


OTHERS: dict[str, Any] = {
    "/v1/messages": {"model": MODEL, "max_tokens": 2},
    "/api/chat": {"model": MODEL, "options": {"num_predict": 2}},
    "/api/generate": {"model": MODEL, "options": {"num_predict": 2}},
    "/infill": {"input_suffix": "x", "n_predict": 2},
}


@pytest.mark.parametrize("path", [*BODIES, *OTHERS])
def test_no_log_line_has_the_text_of_a_prompt(
    path: str,
    http: httpx.Client,
    frontend: FakeFrontend,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for body in hidden(path):
        http.post(path, json=body)
    http.post(path, content=json.dumps(hidden(path)[0]).encode()[:-1])  # no JSON
    http.post(path, content=json.dumps(hidden(path)[0]).encode().replace(b"use", b"\xff"))  # no UTF-8
    frontend.fail_first = WorkerDied("The scheduler died.")
    http.post(path, json=hidden(path)[0])

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Service, "check_count", broken)
    http.post(path, json=hidden(path)[0])
    assert len(lines.lines) > 10
    found = [text for text in lines.texts if SECRET in text]
    assert found == []
    assert not [line for line in lines.lines if SECRET in json.dumps(line)]


def test_texts_are_logged_if_asked_for(lines: Lines) -> None:
    with LiveServer(FakeFrontend(), log_format="json", log_texts=True) as server:
        answer = httpx.post(server.url + "/v1/completions", json=COMPLETION | {"prompt": SECRET}).json()
    (line,) = generations(lines)
    (asked,) = json.loads(line["input_messages"])
    assert asked["parts"] == [{"type": "text", "content": SECRET}]
    (said,) = json.loads(line["output_messages"])
    assert said["parts"] == [{"type": "text", "content": answer["choices"][0]["text"]}]
    with pytest.raises(ValueError, match="give log_format json, or otel"):
        ServerConfig(log_texts=True)


def test_a_line_is_json_whatever_is_logged() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "a\n%s\ud800", ("é",), None)
    record.__dict__ |= fields(rid="r", none=None, empty="", zero=0, odd=object)
    line = JsonLines("p").format(record)
    found = json.loads(line)
    assert "\n" not in line
    assert found["message"] == "a\né?"
    assert (found["rid"], found["zero"]) == ("r", 0)
    assert not {"none", "empty"} & found.keys()


def test_no_text_of_a_client_looks_like_a_line_of_its_own(
    http: httpx.Client, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = "a\n2026-11-28 forged\x1b[31m"
    http.post("/generate", json=GENERATE | {"rid": forged})
    (line,) = [text for text in lines.texts if text.startswith("rid=")]
    assert line.startswith(r"rid=a\n2026-11-28 forged\x1b[31m endpoint=/generate ")
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging("info", "text", "p")
    (handler,) = root.handlers
    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s\u2028é", (forged,), None)
    first, *others = handler.format(record).split("\n")
    assert first.endswith("p INFO x: a")
    assert others == [r"  2026-11-28 forged\x1b[31m", "  é"]


def test_everything_on_standard_error_is_json() -> None:
    """Lines of uvicorn, warnings of Python, and the exception that ends the process."""
    script = SCRIPT.replace("drain_s=10", "log_format='json', log_level='info'")
    end = "import warnings; warnings.warn('odd')\nraise KeyError(status)\n"
    script = script.replace("sys.exit(serve(", "status = (serve(") + end
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("Serving"))
    process.terminate()
    _, err = process.communicate()
    found = [json.loads(line) for line in err.splitlines()]
    loggers = {line["logger"] for line in found}
    assert {"uvicorn.error", "py.warnings", "ramify"} <= loggers
    assert found[-1]["traceback"].endswith("KeyError: 0")


def test_the_processes_of_the_engine_log_in_the_same_form(tmp_path: Path) -> None:
    script = (
        "import logging; from ramify.runtime.processes.worker_process import take_orders\n"
        "take_orders('tokenizer')\n"
        "logging.getLogger('ramify').warning('a\\nb')\n"
        "raise KeyError(1)"
    )
    orders = Orders(
        sockets=str(tmp_path),
        config=EngineConfig(log_format="json"),
        tokenizer="",
        weights="",
        model_name=MODEL,
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        process.stdin.flush()
        first, second = map(json.loads, process.stderr)
    assert (first["process"], first["level"], first["message"]) == ("tokenizer", "warning", "a\nb")
    assert second["level"] == "critical"
    assert second["traceback"].endswith("KeyError: 1")
