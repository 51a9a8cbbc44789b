"""Health, metrics and the log."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx
import pytest

from ramify.errors import InvalidConstraint, WorkerDied
from ramify.kernels.weights.lora import MOST_SLOTS
from ramify.runtime.server.admin import health
from ramify.runtime.server.errors import log_error
from ramify.runtime.server.metrics import MOST_LORAS, Metrics
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer, events

COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 3}


def test_health_is_the_heartbeat(http: httpx.Client, frontend: FakeFrontend) -> None:
    assert http.get("/health").json() == {"status": "ok", "heartbeat_age_s": 0.25}
    frontend.healthy, frontend.heartbeat_age_s = False, 42.0
    response = http.get("/health")
    assert response.status_code == 503
    assert "42.0 s" in response.json()["error"]["message"]


def test_probes(http: httpx.Client, frontend: FakeFrontend) -> None:
    def statuses() -> tuple[int, int]:
        return http.get("/livez").status_code, http.get("/readyz").status_code

    assert statuses() == (200, 200)
    frontend.healthy = False  # the engine core restarts
    assert statuses() == (200, 503)
    frontend.gave_up = True
    assert statuses() == (503, 503)


def test_health_generate_runs_one_token(http: httpx.Client, frontend: FakeFrontend) -> None:
    assert http.get("/health_generate").status_code == 200
    assert [request.sampling.max_tokens for request in frontend.requests] == [1]


def test_health_generate_has_a_limit(
    http: httpx.Client, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "GENERATE_LIMIT_S", 0.01)
    frontend.hold_after = 0
    response = http.get("/health_generate")
    assert response.status_code == 503
    assert frontend.closed.is_set()


def test_health_generate_reports_a_failure(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.fail_first = WorkerDied("The scheduler died.")
    assert http.get("/health_generate").status_code == 503


def test_draining_refuses_new_generations(server: LiveServer, http: httpx.Client) -> None:
    with LiveServer(FakeFrontend()) as other, httpx.Client(base_url=other.url) as client:
        assert client.get("/health").status_code == 200
        other.frontend.hold_after = 1
        with client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as running:
            assert other.frontend.held.wait(60)
            other.stop()
            assert httpx.get(other.url + "/health").status_code == 503
            assert httpx.get(other.url + "/readyz").status_code == 503
            other.frontend.gave_up = True
            assert httpx.get(other.url + "/livez").status_code == 200
            refused = httpx.post(other.url + "/v1/completions", json=COMPLETION)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_closed"
            other.call(other.frontend.release.set)
            assert running.read().endswith(b"data: [DONE]\n\n")


def test_metrics() -> None:
    with LiveServer(FakeFrontend()) as server, httpx.Client(base_url=server.url) as client:
        server.frontend.blocked_s = 2.5
        client.post("/v1/completions", json=COMPLETION)
        client.post("/v1/completions", json=COMPLETION | {"temperature": -1})
        client.get("/v1/models/" + "x" * 50)
        client.get("/some/scanner/path")
        response = client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = set(response.text.splitlines())
        assert 'ramify_http_responses_total{endpoint="/v1/completions",status="200"} 1.0' in lines
        assert 'ramify_http_responses_total{endpoint="/v1/completions",status="400"} 1.0' in lines
        assert 'ramify_http_responses_total{endpoint="/v1/models/{model:path}",status="404"} 1.0' in lines
        assert 'ramify_http_responses_total{endpoint="other",status="404"} 1.0' in lines
        assert (
            'ramify_generations_total{endpoint="/v1/completions",finish="length",status="200"} 1.0' in lines
        )
        assert 'ramify_time_to_first_token_seconds_count{endpoint="/v1/completions"} 1.0' in lines
        assert 'ramify_inter_token_latency_seconds_count{endpoint="/v1/completions"} 2.0' in lines
        assert 'ramify_e2e_request_latency_seconds_count{endpoint="/v1/completions"} 1.0' in lines
        assert 'ramify_kv_pages{state="free"} 48.0' in lines
        assert "ramify_num_requests_waiting 0.0" in lines
        assert "ramify_event_loop_blocked_seconds_total 2.5" in lines
        assert "ramify_kv_cache_usage_perc 0.25" in lines
        assert 'ramify_cache_config_info{num_pages="64",page_size="16"} 1.0' in lines
        assert "ramify_lora_requests_info" not in response.text
        assert "ramify_cached_tokens_total 0.0" in lines
        assert "ramify_model_tokens_total 0.0" in lines
        assert 'ramify_spec_decode_num_draft_tokens_total{source="draft_model"} 0.0' in lines
        assert 'ramify_spec_decode_num_accepted_tokens_total{source="prompt_lookup"} 0.0' in lines
        assert "ramify_retracted_requests_total 0.0" in lines
        assert "ramify_evicted_kv_pages_total 0.0" in lines
        assert "ramify_scheduler_up 1.0" in lines


def test_gateways_read_which_adapters_there_are() -> None:
    metrics = Metrics()
    text = metrics.render(None, ["b", "a"]).decode()
    labels = 'max_lora="256",running_lora_adapters="a,b",waiting_lora_adapters=""'
    assert f"ramify_lora_requests_info{{{labels}}} " in text
    assert MOST_LORAS == MOST_SLOTS


def totals(http: httpx.Client) -> dict[str, int]:
    """Name of a count in the usage → its total in /metrics."""
    text = http.get("/metrics").text
    names = {
        "prompt_tokens": "prompt",
        "cached_tokens": "cached",
        "computed_tokens": "computed",
        "completion_tokens": "generation",
        "forced_tokens": "forced",
    }
    found = {}
    for name, ours in names.items():
        (value,) = re.findall(rf"^ramify_{ours}_tokens_total (.*)$", text, re.MULTILINE)
        found[name] = int(float(value))
    return found


def add_usage(sums: dict[str, int], usage: dict[str, Any]) -> None:
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    sums["prompt_tokens"] += prompt
    sums["cached_tokens"] += details["cached_tokens"]
    sums["computed_tokens"] += prompt - details["cached_tokens"]
    sums["completion_tokens"] += usage.get("completion_tokens", usage.get("output_tokens"))
    sums["forced_tokens"] += usage.get("ramify", usage)["forced_tokens"]


def test_metrics_are_the_sums_of_the_usages(http: httpx.Client) -> None:
    sums = totals(http)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"n": 3}),
        ("/v1/completions", COMPLETION | {"prompt": ["one", "another"], "n": 2}),
        ("/v1/completions", COMPLETION | {"stop": "L"}),
        ("/v1/responses", {"model": MODEL, "input": "hello there", "max_output_tokens": 4}),
    ):
        add_usage(sums, http.post(path, json=body).json()["usage"])
    shown = {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json=COMPLETION | {"n": 2} | shown) as response:
        add_usage(sums, events(response)[-2]["usage"])
    for answer in http.post("/generate", json={"text": ["a b", "a c"], "sampling_params": {"n": 2}}).json():
        add_usage(sums, answer["meta_info"])
    assert totals(http) == sums
    assert sums["cached_tokens"] > 0
    http.post("/v1/completions", json=COMPLETION | {"temperature": -1})
    assert totals(http) == sums


def test_metrics_when_the_scheduler_is_silent(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.stats_error = WorkerDied("The scheduler died.")
    response = http.get("/metrics")
    assert response.status_code == 200
    assert "ramify_scheduler_up 0.0" in response.text
    assert "ramify_kv_pages" not in response.text


def test_every_generation_is_one_log_line(
    http: httpx.Client, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ramify.server"):
        http.post("/v1/completions", json=COMPLETION | {"user": "alice"})
        frontend.fail_first = WorkerDied("The scheduler died.")
        http.post("/v1/completions", json=COMPLETION)
    finished, failed, refused = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        r"rid=cmpl-r\d+ endpoint=/v1/completions status=200 finish=length prompt=5 cached=0 output=3 "
        r"ttft=\d\.\d{3}s total=\d\.\d{3}s user='alice'",
        finished,
    )
    assert "status=503 finish=error" in failed
    assert refused == "status=503 client=127.0.0.1 POST /v1/completions: The scheduler died."


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/generate", b'{"text": "hi", "straem": 1}', 400, " /generate: straem is not a field"),
        ("POST", "/generate", b'{"text": 5}', 400, " /generate: text must be a string"),
        ("POST", "/generate", b'{"text": ["hi", ""]}', 400, " /generate: text[1] "),
        (
            "POST",
            "/v1/completions",
            b'{"model": "byte-model", "prompt": "\xff"}',
            400,
            " /v1/completions: prompt: it is not UTF-8.",
        ),
        (
            "POST",
            "/v1/completions",
            b'{"model": "byte-model", "prompt": "hi", "regex": "a", "ebnf": "b"}',
            400,
            "ebnf: regex and ebnf are both given",
        ),
        (
            "POST",
            "/v1/completions",
            rb'{"model": "byte-model", "prompt": "\ud83d"}',
            400,
            r"it has a half of a surrogate pair (\ud800 to \udfff), which is no character",
        ),
        ("POST", "/v1/chat/completions", b"{", 400, "The body: it is truncated JSON"),
        ("POST", "/v1/completions", b'{"model": "gpt-9"}', 404, "model: There is no model 'gpt-9' here."),
        ("GET", "/generate", b"", 405, "/generate does not take GET, but POST and PUT."),
        ("GET", "/a%0Ab", b"", 404, r"/a\nb: There is no /a"),
    ],
)
def test_every_refused_request_is_one_log_line(
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    body: bytes,
    status: int,
    said: str,
) -> None:
    assert http.request(method, path, content=body).status_code == status
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(f"status={status} client=127.0.0.1 ")
    assert said in line
    assert "\n" not in line


def test_a_field_behind_a_pointer_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    error = InvalidConstraint("regex: no.", field="regex", pointer="/items")
    log_error({"method": "POST", "path": "/generate"}, error.status, str(error), error.field)
    assert caplog.messages == ["status=400 client=- POST /generate: At /items: regex: no."]


def test_an_error_in_a_stream_is_a_log_line(
    http: httpx.Client, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.fail_after = (1, WorkerDied("The scheduler died."))
    http.post("/v1/completions", json=COMPLETION | {"stream": True})
    (record,) = caplog.records
    line = record.getMessage()
    assert line == "status=503 client=127.0.0.1 POST /v1/completions: The scheduler died."
