"""Ollama's API over a socket: chats, texts and embeddings, as the clients of Ollama send and read them."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from ramify.errors import EngineError, InvalidConstraint
from ramify.fill import Fill
from ramify.messages import ChatMessage, ToolCall
from ramify.model_info import ThinkingFormat
from tests.server.conftest import ONE, PARAMETERS, TWO, speak
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.test_tools import TIME, WEATHER, render_tools

USER: Any = {"role": "user", "content": "hi"}
CHAT: Any = {"model": MODEL, "messages": [USER], "options": {"num_predict": 4}, "stream": False}
GENERATE: Any = {"model": MODEL, "prompt": "hi", "options": {"num_predict": 4}, "stream": False}
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z")
MARKS = ThinkingFormat(start="<think>", end="</think>", on="<think>", off="<think></think>")


def lines(http: httpx.Client, path: str, body: Any) -> list[Any]:
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def refusal(http: httpx.Client, path: str, body: Any, status: int = 400) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    (key, message), *others = answer.json().items()
    assert (key, others) == ("error", [])
    return str(message)


def turns(http: httpx.Client, frontend: FakeFrontend, *messages: Any, **fields: Any) -> list[ChatMessage]:
    http.post("/api/chat", json=CHAT | {"messages": list(messages), **fields}).raise_for_status()
    return list(frontend.requests[-1].chat or ())


def test_a_chat_is_streamed_as_lines_unless_stream_is_false(
    http: httpx.Client, frontend: FakeFrontend
) -> None:
    whole = http.post("/api/chat", json=CHAT).json()
    *pieces, last = lines(http, "/api/chat", {**CHAT, "stream": None})
    assert TIMESTAMP.fullmatch(whole["created_at"])
    assert (whole["model"], whole["done"], whole["done_reason"]) == (MODEL, True, "length")
    assert whole["message"] == {"role": "assistant", "content": "<USE"}
    assert [piece["done"] for piece in pieces] == [False] * 4
    assert "".join(piece["message"]["content"] for piece in pieces) == "<USE"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last.keys() == whole.keys()
    assert [request.every_s > 0 for request in frontend.requests] == [True, False]


def test_the_figures_are_those_of_the_usage(http: httpx.Client, frontend: FakeFrontend) -> None:
    http.post("/api/chat", json=CHAT)
    answer = http.post("/api/chat", json=CHAT).json()
    prompt = len("<user>hi")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (prompt, 4)  # with the cached tokens
    assert answer["ramify"]["cached_tokens"] == prompt - 1
    assert answer["total_duration"] > 0
    assert answer["load_duration"] == 0
    assert answer.keys() >= {"prompt_eval_duration", "eval_duration"}


def test_options_under_ollamas_names(http: httpx.Client, frontend: FakeFrontend) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 7,
        "stop": ["x"],
        "num_predict": 3,
        "typical_p": 1.0,
        "mirostat": 0,
    }
    http.post("/api/generate", json=GENERATE | {"options": options}).raise_for_status()
    sampling = frontend.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 20, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, 0.5)
    assert (sampling.frequency_penalty, sampling.seed, sampling.stop) == (0.25, 7, ("x",))
    assert sampling.max_tokens == 3


@pytest.mark.parametrize("limit", [-1, -2])
def test_no_limit_and_no_seed(http: httpx.Client, frontend: FakeFrontend, limit: int) -> None:
    http.post("/api/chat", json=CHAT | {"options": {"num_predict": limit, "seed": -1}}).raise_for_status()
    sampling = frontend.requests[-1].sampling
    assert (sampling.max_tokens, sampling.seed) == (None, None)


def test_options_without_an_effect_are_named(http: httpx.Client, frontend: FakeFrontend) -> None:
    options = {"num_ctx": 2048, "num_thread": 4, "num_keep": 24, "repeat_last_n": 64, "mirostat_tau": 5.0}
    answer = http.post("/api/chat", json=CHAT | {"options": options, "keep_alive": "5m"})
    named = answer.headers["x-ramify-ignored"].split(", ")
    assert sorted(named) == sorted([*(f"options.{name}" for name in options), "keep_alive"])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"num_ctx": 5000}}, "options.num_ctx is 5000; this server's context has 4096 tokens"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"temperature": 1000}}, "options.temperature"),
        ({"options": {"temperatur": 1}}, "options.temperatur"),
        ({"format": "xml"}, 'format must be "json" or a JSON schema'),
        ({"format": 1}, "format"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"images": ["aGk="]}, "images"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"think": "very"}, "think"),
        ({"response_format": {}}, "response_format"),
        ({"keep_alive": 0, "prompt": "", "messages": []}, "keep_alive"),
        ({"keep_alive": "0s", "prompt": "", "messages": []}, "keep_alive"),
    ],
)
def test_refused_by_name(
    http: httpx.Client, frontend: FakeFrontend, fields: dict[str, Any], named: str
) -> None:
    speak(frontend)
    for path, body, other in (("/api/chat", CHAT, "prompt"), ("/api/generate", GENERATE, "messages")):
        changed = {name: value for name, value in (body | fields).items() if name != other}
        assert named in refusal(http, path, changed)
    assert frontend.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"system": "Be brief."}, "system"),
        ("/api/chat", {"messages": [USER | {"images": ["aGk="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"content": "hi"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("/api/generate", {"suffix": "x", "system": "Be brief."}, "system"),
        ("/api/generate", {"context": [1, 2]}, "context"),
        ("/api/generate", {"tools": [TIME]}, "tools"),
        ("/api/generate", {"raw": True, "system": "Be brief."}, "system"),
        ("/api/generate", {"raw": True, "think": True}, "think"),
        ("/api/generate", {"width": 1024}, "width"),
    ],
)
def test_refused_by_name_on_one_of_them(
    http: httpx.Client, frontend: FakeFrontend, path: str, fields: dict[str, Any], named: str
) -> None:
    speak(frontend, suffix={"user": "", "system": "", "assistant": ""})
    assert named in refusal(http, path, {"/api/chat": CHAT, "/api/generate": GENERATE}[path] | fields)


@pytest.mark.parametrize(
    ("name", "lora"),
    [(MODEL, ""), (MODEL + ":latest", ""), ("default", ""), ("default:latest", ""), ("sql", "sql")],
)
def test_names_of_the_model(http: httpx.Client, frontend: FakeFrontend, name: str, lora: str) -> None:
    http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/adapters/sql"})
    assert http.post("/api/chat", json=CHAT | {"model": name}).json()["model"] == name
    assert frontend.requests[-1].lora == lora
    assert "There is no model 'llama3:8b' here" in refusal(
        http, "/api/chat", CHAT | {"model": "llama3:8b"}, 404
    )


def test_a_prompt_is_a_chat_of_one_turn_unless_it_is_raw(http: httpx.Client, frontend: FakeFrontend) -> None:
    answer = http.post("/api/generate", json=GENERATE | {"system": "Be brief."}).json()
    assert frontend.requests[-1].chat == (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="hi"),
    )
    assert (answer["response"], answer["done"], "message" in answer) == ("<USE", True, False)
    raw = http.post("/api/generate", json=GENERATE | {"raw": True}).json()
    assert (frontend.requests[-1].chat, frontend.requests[-1].prompt) == (None, ("hi",))
    assert raw["response"] == "HI …"[:3]
    pieces = lines(http, "/api/generate", {**GENERATE, "stream": True})
    assert "".join(piece["response"] for piece in pieces) == "<USE"


def test_a_suffix_asks_for_the_middle(http: httpx.Client, frontend: FakeFrontend) -> None:
    answer = http.post("/api/generate", json=GENERATE | {"suffix": "there"})
    assert answer.json()["response"]
    request = frontend.requests[-1]
    assert (request.chat, request.prompt, request.fill) == (None, ("hi",), Fill("there"))
    assert http.post("/api/generate", json=GENERATE | {"prompt": "", "suffix": "x"}).json()["response"]


@pytest.mark.parametrize(
    ("path", "body"), [("/api/chat", {"messages": []}), ("/api/chat", {}), ("/api/generate", {"prompt": ""})]
)
def test_a_request_without_a_prompt_loads_the_model(
    http: httpx.Client, frontend: FakeFrontend, path: str, body: Any
) -> None:
    speak(frontend)
    answer = http.post(path, json={"model": MODEL, "keep_alive": -1, **body}).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert frontend.requests == []


def test_a_format_is_a_constraint(http: httpx.Client, frontend: FakeFrontend) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    answer = http.post("/api/chat", json=CHAT | {"format": schema, "options": {}}).json()
    assert answer["message"]["content"] == '{"b": 7, "a": "s"}'
    http.post("/api/generate", json=GENERATE | {"format": "json"}).raise_for_status()
    http.post("/api/generate", json=GENERATE | {"format": "", "raw": True}).raise_for_status()
    kinds = [request.constraint and request.constraint.kind for request in frontend.requests]
    assert kinds == ["json_schema", "json_object", None]
    frontend.fail_first = InvalidConstraint("It is never true.", field="json_schema", pointer="/not")
    assert refusal(http, "/api/chat", CHAT | {"format": schema}) == "At /not: It is never true."


def test_calls_are_given_whole(http: httpx.Client, frontend: FakeFrontend) -> None:
    render_tools(frontend, "hermes")
    body = {**CHAT, "tools": [WEATHER, TIME], "options": {}}
    frontend.script = ["Hm. " + TWO, "Hm. " + TWO, ONE[:-20]]
    whole = http.post("/api/chat", json=body).json()["message"]
    assert whole["content"] == "Hm. "
    functions = [
        {"index": 0, "name": "get_weather", "arguments": {"city": 'Bonn, "}é'}},
        {"index": 1, "name": "get_time", "arguments": {}},
    ]
    assert [call["function"] for call in whole["tool_calls"]] == functions
    pieces = lines(http, "/api/chat", {**body, "stream": True})
    called = [piece["message"]["tool_calls"] for piece in pieces if "tool_calls" in piece["message"]]
    assert [[call["function"] for call in calls] for calls in called] == [functions[:1], functions[1:]]
    assert pieces[-1]["done_reason"] == "stop"
    cut = http.post("/api/chat", json=body).json()["message"]
    assert "tool_calls" not in cut


def test_calls_and_results_of_earlier_turns(http: httpx.Client, frontend: FakeFrontend) -> None:
    """Results belong to calls by id, by name, or, as Ollama's own package drops ids, in order."""
    render_tools(frontend, "hermes", suffix={"user": "", "assistant": "", "tool": "", "system": ""})

    def call(name: str, **more: Any) -> Any:
        return {"function": {"name": name, "arguments": {"city": "Bonn"}, "index": 0}, **more}

    asked = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call("a"), call("b")]}
    after = {"role": "assistant", "tool_calls": [call("c", id="x", type="function", index=0), call("d")]}
    found = turns(
        http,
        frontend,
        USER,
        asked,
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a"},
        after,
        {"role": "tool", "content": "of c", "tool_call_id": "x"},
        {"role": "tool", "content": "of d", "name": "d"},
        tools=[WEATHER],
    )
    calls = [call for turn in found for call in turn.tool_calls]
    assert calls[0] == ToolCall(id="000000000", name="a", arguments='{"city":"Bonn"}')
    assert [call.id for call in calls] == ["000000000", "000000001", "x", "000000003"]
    assert found[1].reasoning == "Hm."
    results = [(turn.content, turn.name, turn.tool_call_id) for turn in found if turn.role == "tool"]
    assert results == [
        ("of b", "b", "000000001"),
        ("of a", "a", "000000000"),
        ("of c", "c", "x"),
        ("of d", "d", "000000003"),
    ]
    unknown = {"role": "tool", "content": "?", "tool_name": "z"}
    assert "messages[2].tool_name" in refusal(http, "/api/chat", CHAT | {"messages": [USER, asked, unknown]})
    text = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}
    named = "messages[0].tool_calls[0].function.arguments"
    assert named in refusal(http, "/api/chat", CHAT | {"messages": [text]})


@pytest.mark.parametrize("think", [None, True, False, "high"])
def test_a_model_that_thinks_does_so_unless_think_is_false(
    http: httpx.Client, frontend: FakeFrontend, think: bool | str | None
) -> None:
    speak(frontend, thinking=MARKS, variables=("enable_thinking",))
    frontend.script = ["Hm.</think>Yes." if think is not False else "Yes."] * 2
    fields = {} if think is None else {"think": think}
    answer = http.post("/api/chat", json=CHAT | fields | {"options": {}})
    message = answer.json()["message"]
    assert message == {
        "role": "assistant",
        "content": "Yes.",
        **({} if think is False else {"thinking": "Hm."}),
    }
    assert "x-ramify-ignored" not in answer.headers
    kwargs = json.loads(frontend.requests[-1].template_kwargs)
    assert kwargs == {"enable_thinking": think is not False}
    pieces = lines(http, "/api/generate", {**GENERATE, **fields, "options": {}, "stream": True})
    assert "".join(piece.get("thinking", "") for piece in pieces) == message.get("thinking", "")
    assert "".join(piece["response"] for piece in pieces) == "Yes."


@pytest.mark.parametrize("think", [True, "low"])
def test_think_has_no_effect_on_a_model_that_does_not(
    http: httpx.Client, frontend: FakeFrontend, think: bool | str
) -> None:
    answer = http.post("/api/chat", json=CHAT | {"think": think})
    assert answer.headers["x-ramify-ignored"] == "think"
    assert frontend.requests[-1].preambles == ()
    assert "x-ramify-ignored" not in http.post("/api/chat", json=CHAT).headers


def test_logprobs(http: httpx.Client, frontend: FakeFrontend) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    whole = http.post("/api/chat", json=body).json()
    assert [entry["token"] for entry in whole["logprobs"]] == list("<USE")
    assert whole["logprobs"][0]["top_logprobs"][0]["token"] == "a"
    pieces = lines(http, "/api/chat", {**body, "stream": True})
    assert [entry for piece in pieces for entry in piece.get("logprobs", ())] == whole["logprobs"]


def test_an_error_after_the_first_line_is_a_line(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.fail_after = (2, EngineError("It broke."))
    *pieces, last = lines(http, "/api/chat", {**CHAT, "stream": True})
    assert [piece["done"] for piece in pieces] == [False, False]
    assert last == {"error": "It broke."}
    frontend.fail_after = (0, EngineError("It broke."))
    assert refusal(http, "/api/chat", {**CHAT, "stream": True}, 500) == "It broke."


def test_embeddings(http: httpx.Client, frontend: FakeFrontend) -> None:
    body = {
        "model": MODEL,
        "truncate": True,
        "keep_alive": "5m",
        "options": {"temperature": 0.5, "num_ctx": 9},
    }
    answer = http.post("/api/embed", json=body | {"input": ["abcd", "b"], "dimensions": 2})
    found = answer.json()
    assert [len(vector) for vector in found["embeddings"]] == [2, 2]
    assert sum(number**2 for number in found["embeddings"][0]) == pytest.approx(1)
    assert (found["model"], found["prompt_eval_count"]) == (MODEL, 5)
    ignored = {"options.num_ctx", "options.temperature", "keep_alive", "truncate"}
    assert set(answer.headers["x-ramify-ignored"].split(", ")) == ignored
    assert len(http.post("/api/embed", json=body | {"input": "abc"}).json()["embeddings"]) == 1
    old = http.post("/api/embeddings", json={"model": MODEL, "prompt": "abc"}).json()
    assert old == {"embedding": [3, *b"abc"]}
    assert "input is empty" in refusal(http, "/api/embed", {"model": MODEL, "input": ""})
    assert "prompt: expected `str`" in refusal(http, "/api/embeddings", {"model": MODEL, "prompt": ["a"]})
    assert "options.temprature" in refusal(
        http, "/api/embed", {"model": MODEL, "input": "a", "options": {"temprature": 1}}
    )


def test_strict_fields() -> None:
    with (
        LiveServer(FakeFrontend(), strict_fields=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert "keep_alive has no effect" in refusal(http, "/api/chat", CHAT | {"keep_alive": "5m"})
        assert http.post("/api/chat", json=CHAT).status_code == 200


def test_a_body_needs_a_type_unless_no_page_sent_it(server: LiveServer, frontend: FakeFrontend) -> None:
    """LiteLLM sends none. `curl -d` sends that of a form, which a page could send too."""
    body = json.dumps(CHAT).encode()
    page = {"origin": server.url, "sec-fetch-site": "same-origin"}
    form = {"content-type": "application/x-www-form-urlencoded"}
    with httpx.Client(base_url=server.url, timeout=60) as bare:
        assert bare.post("/api/chat", content=body).status_code == 200
        for path, headers in (
            ("/api/chat", form),
            ("/api/chat", page),
            ("/api/chat", {"sec-fetch-site": "none"}),
            ("/v1/chat/completions", {}),
        ):
            answer = bare.post(path, content=body, headers=headers)
            assert answer.status_code == 415
            assert "content-type: application/json" in answer.text


def test_schemas_of_tools_are_named(http: httpx.Client, frontend: FakeFrontend) -> None:
    render_tools(frontend, "hermes")
    wrong = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS | {"type": "array"}}}
    assert "tools[0].function.parameters.type" in refusal(http, "/api/chat", CHAT | {"tools": [wrong]})


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_are_refused_by_name(http: httpx.Client, frontend: FakeFrontend, stream: bool) -> None:
    render_tools(frontend, "hermes")
    frontend.script = ['<tool_call>\n{"name": "p", "arguments": {"input": "x"}}\n</tool_call>']
    tools = [WEATHER, {"type": "custom", "custom": {"name": "p"}}]
    message = refusal(http, "/api/chat", CHAT | {"tools": tools, "stream": stream})
    assert message.startswith("tools[1].type is 'custom'; only functions are supported")
    assert not frontend.requests
