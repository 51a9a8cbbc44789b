"""A bad request gets an error that names the fault, and disturbs no other request."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ramify.errors import Overloaded, PromptTooLong, WorkerDied
from ramify.runtime.server.body import MAX_BODY_BYTES
from ramify.runtime.server.tables import ENDPOINTS
from ramify.runtime.server.tables.rows import Endpoint
from tests.server.conftest import BODIES, CHAT, COMPLETION, GENERATE, RESPONSE, refused
from tests.server.fake_frontend import FakeFrontend, LiveServer, events


@pytest.fixture(autouse=True)
def still_serving(http: httpx.Client, frontend: FakeFrontend) -> Any:
    """Assert after each test that the server answers a good request, and that nothing is left running."""
    yield
    frontend.fail_first = frontend.fail_after = None
    assert http.post("/generate", json=GENERATE).status_code == 200
    assert not frontend.running


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_an_unsupported_field_that_asks_for_nothing(http: httpx.Client, endpoint: Endpoint) -> None:
    for field in endpoint.whole.refused if endpoint.path in BODIES else ():
        assert http.post(endpoint.path, json=BODIES[endpoint.path] | {field: None}).status_code == 200


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("options", None),
        ("tokens", None),
        ("max_token", "max_tokens"),
        ("reasoning_efort", "reasoning_effort"),
    ],
)
def test_a_hint_only_where_a_name_is_close(http: httpx.Client, field: str, hint: str | None) -> None:
    error = refused(http.post("/v1/chat/completions", json=CHAT | {field: 1}))
    assert error.get("remedy") == (hint and f"Did you mean {hint}?")


@pytest.mark.parametrize(
    ("path", "field", "remedy"),
    [
        ("/v1/responses", "max_output_tokens", "Leave it out for as many as fit"),
        ("/generate", "sampling_params", "Give null for as many as fit"),
    ],
)
def test_no_limit_is_not_spelled_with_a_number(
    http: httpx.Client, path: str, field: str, remedy: str
) -> None:
    value: Any = {"max_new_tokens": -1} if field == "sampling_params" else -1
    error = refused(http.post(path, json=BODIES[path] | {field: value}))
    assert error["param"].startswith(field)
    least = "0" if path == "/generate" else "1"
    assert f"is -1; it must be {least} or more." in error["message"]
    assert remedy in error["remedy"]


@pytest.mark.parametrize("path", BODIES)
def test_unknown_field_with_a_guess(http: httpx.Client, path: str) -> None:
    error = refused(http.post(path, json=BODIES[path] | {"straem": True}))
    assert error["param"] == "straem"
    assert error["message"].endswith("Did you mean stream?")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "critic", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "hi", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"store": True}, "store"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": -3}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_all": True}}, "stream_options.include_all"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"regex": ""}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_bad_chat_field(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = refused(http.post("/v1/chat/completions", json=CHAT | change))
    assert error["param"] == param
    assert param.split(".")[-1] in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["hi", ""]}, "prompt[1]"),
        ({"prompt": ["hi", 5]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 257]}, "prompt"),
        ({"prompt": [[1], [999]]}, "prompt[1]"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_completion_field(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert refused(http.post("/v1/completions", json=COMPLETION | change))["param"] == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"text": None}, "text"),
        ({"text": ""}, "text"),
        ({"text": [1, 2]}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"input_ids": [1]}, "input_ids"),
        ({"text": None, "input_ids": "a"}, "input_ids"),
        ({"text": None, "input_ids": [1, 300]}, "input_ids"),
        ({"text": None, "prompt_segments": []}, "prompt_segments"),
        ({"text": None, "prompt_segments": ["a", [300]]}, "prompt_segments"),
        ({"text": None, "prompt_segments": [5]}, "prompt_segments[0]"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
        ({"sampling_params": {"tempature": 1}}, "sampling_params.tempature"),
        ({"sampling_params": []}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_k": -2}]}, "sampling_params[1].top_k"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"return_logprob": [True, True]}, "return_logprob"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"top_logprobs_num": 2}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"constraint": {"kind": "yaml", "source": "x"}}, "constraint.kind"),
        ({"constraint": {"source": "x"}}, "constraint.kind"),
        ({"constraint": {"kind": "regex"}}, "constraint.source"),
        ({"constraint": {"kind": "regex", "source": "a", "x": 1}}, "constraint.x"),
        ({"constraint": {"kind": "regex", "source": "a"}, "sampling_params": {"ebnf": "b"}}, "constraint"),
        ({"program": {}}, "program.program"),
        ({"program": {"program": "p", "lease_s": -1}}, "program.lease_s"),
        ({"program": {"program": "p", "calls_left": -1}}, "program.calls_left"),
        ({"program": {"program": "p", "next_use": "later"}}, "program.next_use"),
    ],
)
def test_bad_native_field(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert refused(http.post("/generate", json=GENERATE | change))["param"] == param


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body(http: httpx.Client, path: str, body: bytes) -> None:
    message = refused(http.post(path, content=body))["message"]
    assert message == "The body: it is empty; send a JSON object."


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/responses", {}, "input"),
        ("/v1/completions", {}, "prompt"),
        ("/generate", {}, "text"),
        ("/generate", {"text": None, "input_ids": [5]}, "input_ids"),
        ("/generate", {"text": None, "prompt_segments": ["x"]}, "prompt_segments"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_named_as_the_client_named_it(
    http: httpx.Client, frontend: FakeFrontend, path: str, change: dict[str, Any], field: str, stream: bool
) -> None:
    frontend.fail_first = PromptTooLong("The prompt has 9 tokens.", field="prompt")
    answer = http.post(path, json=BODIES[path] | change | {"stream": stream})
    if path == "/v1/responses" and stream:  # Codex reads the code in an event alone
        created, _, failed = events(answer)
        assert (created["type"], failed["type"]) == ("response.created", "response.failed")
        error = failed["response"]["error"]
    else:
        error = refused(answer)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("/v1/chat/completions", {}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": None, "max_completion_tokens": 5}, "max_completion_tokens"),
        ("/v1/responses", {}, "max_output_tokens"),
        ("/v1/completions", {}, "max_tokens"),
        ("/generate", {}, "sampling_params.max_new_tokens"),
    ],
)
def test_so_is_a_budget(
    http: httpx.Client, frontend: FakeFrontend, path: str, change: dict[str, Any], field: str
) -> None:
    frontend.fail_first = PromptTooLong("They exceed the limit.", field="max_tokens")
    assert refused(http.post(path, json=BODIES[path] | change))["param"] == field


IGNORED: dict[str, Any] = {
    "prompt_cache_options": {"mode": "explicit"},
    "metadata": {"run": "7"},
    "store": False,
}
IGNORED_NAMES = {"prompt_cache_options.mode", "metadata", "store"}


@pytest.mark.parametrize("stream", [False, True])
def test_fields_without_effect_are_named(
    frontend: FakeFrontend, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    named = [
        {"role": "user", "content": "hi", "name": "ann", "__source": "user"},
        {"role": "user", "content": "you", "name": "bo"},
    ]
    with LiveServer(FakeFrontend()) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(2):
            chat = CHAT | IGNORED | {"messages": named, "modalities": ["text"], "stream": stream}
            answer = client.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200
            names = {"messages[].name", "messages[].__source", "modalities", *IGNORED_NAMES}
            assert set(answer.headers["x-ramify-ignored"].split(", ")) == names
        answer = client.post("/v1/completions", json=COMPLETION | IGNORED | {"stream": stream})
        assert set(answer.headers["x-ramify-ignored"].split(", ")) == IGNORED_NAMES
        # The Responses API repeats the metadata, and stores nothing, as store: false asks.
        answer = client.post("/v1/responses", json=RESPONSE | IGNORED | {"stream": stream})
        assert set(answer.headers["x-ramify-ignored"].split(", ")) == IGNORED_NAMES - {"metadata", "store"}
        for empty in ({"metadata": None}, {"metadata": {}}, {"store": None}, {"user": "ann"}):
            assert "x-ramify-ignored" not in client.post("/v1/completions", json=COMPLETION | empty).headers
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == sorted(f"{name} is taken and has no effect." for name in names)


def test_fields_without_effect_can_be_refused(frontend: FakeFrontend) -> None:
    with LiveServer(FakeFrontend(), strict_fields=True) as server:
        for field, value in IGNORED.items():
            error = refused(httpx.post(server.url + "/v1/chat/completions", json=CHAT | {field: value}))
            assert error["param"] in IGNORED_NAMES
            assert error["param"].startswith(field)
            assert error["code"] == "unsupported_field"
            assert "--strict-fields" in error["remedy"]
        assert httpx.post(server.url + "/v1/chat/completions", json=CHAT).status_code == 200
        assert server.frontend.requests[1:] == []


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b'"text"',
        b"5",
        b"null",
        b'{"model": }',
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"model": "\xff"}',
        b'{"\xff": 1}',
        b'{"messages": "\\ud800"}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_garbage(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body))


def test_invalid_utf8_inside_a_prompt(http: httpx.Client) -> None:
    body = json.dumps(COMPLETION).encode().replace(b"hi", b"h\xffi")
    assert refused(http.post("/v1/completions", content=body))["param"] == "prompt"


def test_body_too_large(http: httpx.Client) -> None:
    error = refused(http.post("/generate", content=b" " * (MAX_BODY_BYTES + 1)), 413)
    assert error["code"] == "body_too_large"


def test_body_too_large_without_a_length(http: httpx.Client) -> None:
    parts = (b" " * (1 << 20) for _ in range(MAX_BODY_BYTES // (1 << 20) + 1))
    refused(http.post("/generate", content=parts), 413)


def test_ten_megabyte_schema(http: httpx.Client) -> None:
    schema = {"type": "string", "description": "x" * 10_000_000}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    error = refused(http.post("/v1/chat/completions", json=CHAT | {"response_format": form}))
    assert (error["param"], error["code"]) == ("response_format.json_schema.schema", "invalid_constraint")


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/generate", {"text": ["a"] * 3000}),
        ("/generate", {"text": ["a"] * 30, "sampling_params": {"n": 100}}),
        ("/v1/completions", {"prompt": ["a"] * 30, "n": 100}),
    ],
)
def test_more_generations_than_the_queue_holds(http: httpx.Client, path: str, change: dict[str, Any]) -> None:
    assert "3000 generations" in refused(http.post(path, json=BODIES[path] | change))["message"]


def test_unknown_model(http: httpx.Client) -> None:
    error = refused(http.post("/v1/chat/completions", json=CHAT | {"model": "gpt-9"}), 404)
    assert (error["param"], error["code"]) == ("model", "not_found")


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")]
)
def test_no_chat_template(http: httpx.Client, frontend: FakeFrontend, path: str, field: str) -> None:
    frontend.info = msgspec.structs.replace(frontend.info, chat_format=None)
    assert refused(http.post(path, json=BODIES[path]))["param"] == field


@pytest.mark.parametrize("path", ["/encode", "/classify", "/start_profile", "/v1/reranks", "/docs"])
def test_no_such_route(http: httpx.Client, path: str) -> None:
    assert path in refused(http.post(path, json={}), 404)["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/metrics", "/metrics"),
        ("/wp-login.php", None),
    ],
)
def test_a_route_like_it_is_named(http: httpx.Client, path: str, meant: str | None) -> None:
    said = refused(http.get(path), 404)["message"]
    hint = f" Did you mean {meant}?" if meant else ""
    assert said == f"There is no {path} on this server.{hint}"


def test_all_methods_of_a_route_are_named(http: httpx.Client) -> None:
    answer = http.put("/v1/responses/x")
    assert refused(answer, 405)["message"] == "/v1/responses/x does not take PUT, but GET and DELETE."
    assert answer.headers["allow"] == "GET, DELETE"


def test_wrong_method(http: httpx.Client) -> None:
    response = http.get("/generate")
    assert "GET" in refused(response, 405)["message"]
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_their_status(
    http: httpx.Client, frontend: FakeFrontend, path: str, stream: bool
) -> None:
    body = BODIES[path] | {"stream": stream}
    frontend.fail_first = Overloaded("The queue is full.", retry_after=1.2)
    response = http.post(path, json=body)
    assert refused(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "2"
    frontend.fail_first = PromptTooLong("Too long.", field="prompt")
    if path != "/v1/responses" or not stream:  # the stream of a response has it as an event
        assert refused(http.post(path, json=body))["code"] == "context_length_exceeded"
    frontend.fail_first = WorkerDied("The scheduler died.")
    assert refused(http.post(path, json=body), 503)["type"] == "server_error"


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/responses"])
def test_an_error_in_a_stream_ends_it(http: httpx.Client, frontend: FakeFrontend, path: str) -> None:
    frontend.fail_after = (1, WorkerDied("The scheduler died."))
    with http.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
        assert response.status_code == 200
        *_, last = events(response)
    assert last["error"]["code"] == "worker_died"


def test_the_openai_client_raises_a_stream_error(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.fail_after = (1, WorkerDied("The scheduler died."))
    with pytest.raises(openai.APIError, match="scheduler died"):
        list(client.chat.completions.create(**CHAT, stream=True))


def test_one_failed_choice_fails_the_request(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.fail_after = (1, WorkerDied("The scheduler died."))
    refused(http.post("/v1/chat/completions", json=CHAT | {"n": 4}), 503)
    assert not frontend.running


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_a_500_without_its_traceback(
    http: httpx.Client, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    frontend.fail_first = KeyError("secret detail")
    with caplog.at_level(logging.ERROR):
        response = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert "secret detail" not in response.text
    assert refused(response, 500)["type"] == "server_error"
    assert "secret detail" in caplog.text


def test_a_bug_in_a_stream(
    http: httpx.Client, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.fail_after = (1, KeyError("secret detail"))
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        *_, last = events(response)
    assert last["error"]["code"] == "engine_error"
    assert "secret detail" not in json.dumps(last)
    assert "secret detail" in caplog.text


def test_an_aborted_request_is_an_error_to_openai(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.hold_after = 1
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(http.post("/v1/chat/completions", json=CHAT)))
    thread.start()
    assert frontend.held.wait(60)
    assert httpx.post(http.base_url.join("/abort_request"), json={"abort_all": True}).status_code == 200
    thread.join(60)
    assert refused(answers[0], 499)["code"] == "cancelled"
    frontend.reset()


def test_an_aborted_stream_ends_in_an_error(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.hold_after = 1
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        assert frontend.held.wait(60)
        http.post("/abort_request", json={"abort_all": True})
        *_, last = events(response)
    assert last["error"]["code"] == "cancelled"
    frontend.hold_after = None
