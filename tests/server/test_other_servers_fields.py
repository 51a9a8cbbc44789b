"""Fields that users of other servers send: taken with their meaning, ignored by name, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from ramify.messages import Finish
from ramify.model_info import ThinkingFormat
from tests.server.conftest import BODIES, CHAT, refused, speak
from tests.server.fake_frontend import FakeFrontend, LiveServer, events

OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
USER: Any = {"role": "user", "content": "hi"}
BEGUN: Any = CHAT | {"messages": [USER, {"role": "assistant", "content": "The answer is"}]}
HARMLESS: dict[str, Any] = {
    "client_metadata": {"x": "y"},
    "session_id": "s",
    "cache_prompt": True,
    "id_slot": 0,
    "usage": {"include": True},
    "provider": {"order": ["x"]},
    "_private": 1,
    "mirostat": 0,
    "tfs_z": 1.0,
    "typical_p": 1,
    "dynatemp_range": 0.0,
    "dry_multiplier": 0,
    "xtc_probability": 0.0,
    "top_a": 0,
    "repeat_last_n": -1,
    "num_ctx": 4096,
}
HARMFUL: dict[str, Any] = {
    "mirostat": 2,
    "tfs_z": 0.9,
    "typical_p": 0.9,
    "dynatemp_range": 0.5,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.1,
    "top_a": 0.1,
    "repeat_last_n": 64,
    "stop_regex": "a+",
    "num_ctx": 4097,
}


@pytest.mark.parametrize("path", OPENAI)
def test_harmless_fields_are_named(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=BODIES[path] | HARMLESS)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-ramify-ignored"].split(", ")) == HARMLESS.keys()


@pytest.mark.parametrize("path", OPENAI)
def test_harmful_values_are_refused_by_name(http: httpx.Client, path: str) -> None:
    error = refused(http.post(path, json=BODIES[path] | HARMFUL))
    assert {one["param"] for one in error["errors"]} == HARMFUL.keys()
    assert {one["code"] for one in error["errors"]} == {"unsupported_field"}


def test_a_context_that_is_too_long_is_refused_with_the_number(http: httpx.Client) -> None:
    error = refused(http.post("/v1/chat/completions", json=CHAT | {"num_ctx": 5000}))
    assert "num_ctx is 5000; this server's context has 4096 tokens." in error["message"]


def test_harmless_fields_inside_a_chat(http: httpx.Client, frontend: FakeFrontend) -> None:
    more = {"id": "m", "cache_control": {"type": "ephemeral"}, "__copilotMessageSource": "x"}
    more |= {"provider_specific_fields": {"a": 1}}
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}, "provider_specific_fields": {"a": 1}}
    body = CHAT | {
        "messages": [
            {
                **USER,
                **more,
                "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            },
            {"role": "assistant", "content": "y", "reasoning": "z", "tool_calls": [call], **more},
            {"role": "tool", "tool_call_id": "c", "content": "r", **more},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}],
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-ramify-ignored"].split(", ")) == {
        *(f"messages[].{name}" for name in more),
        "messages[].content[].cache_control",
        "messages[].tool_calls[].provider_specific_fields",
        "tools[].cache_control",
        "prediction",
        "verbosity",
    }
    (request,) = frontend.requests
    assert (request.chat or ())[1].reasoning == "z"


def test_private_fields_are_refused_under_strict_fields() -> None:
    with LiveServer(FakeFrontend(), strict_fields=True) as server:
        body = CHAT | {"messages": [USER | {"__copilotMessageSource": "x", "id": "m"}], "session_id": "s"}
        error = refused(httpx.post(server.url + "/v1/chat/completions", json=body))
        names = {"messages[0].__copilotMessageSource", "messages[0].id", "session_id"}
        assert {one["param"] for one in error["errors"]} == names


@pytest.mark.parametrize("path", OPENAI)
def test_a_repeat_penalty_is_a_repetition_penalty(
    http: httpx.Client, frontend: FakeFrontend, path: str
) -> None:
    assert http.post(path, json=BODIES[path] | {"repeat_penalty": 1.1}).status_code == 200
    assert frontend.requests[-1].sampling.repetition_penalty == 1.1
    both = BODIES[path] | {"repeat_penalty": 1.1, "repetition_penalty": 1.2}
    assert "mean the same" in refused(http.post(path, json=both))["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_limit(http: httpx.Client, frontend: FakeFrontend, path: str) -> None:
    assert http.post(path, json=BODIES[path] | {"max_tokens": -1}).status_code == 200
    assert frontend.requests[-1].sampling.max_tokens is None


def test_the_last_message_is_continued(http: httpx.Client, frontend: FakeFrontend) -> None:
    for prompted in ({}, {"add_generation_prompt": False}):
        body = BEGUN | {"continue_final_message": True} | prompted
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        variables = json.loads(frontend.requests[-1].template_kwargs)
        assert variables == {"add_generation_prompt": False, "continue_final_message": True}
    assert http.post("/v1/chat/completions", json=CHAT | {"add_generation_prompt": False}).status_code == 200
    assert json.loads(frontend.requests[-1].template_kwargs) == {"add_generation_prompt": False}
    assert http.post("/v1/chat/completions", json=CHAT | {"add_generation_prompt": True}).status_code == 200
    assert frontend.requests[-1].template_kwargs == ""


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (CHAT, "continue_final_message"),
        (BEGUN | {"add_generation_prompt": True}, "continue_final_message"),
        (BEGUN | {"reasoning": {"max_tokens": 5}}, "continue_final_message"),
        (BEGUN | {"regex": "a"}, "regex"),
    ],
)
def test_what_cannot_be_continued(http: httpx.Client, body: Any, field: str) -> None:
    error = refused(http.post("/v1/chat/completions", json=body | {"continue_final_message": True}))
    assert error["param"] == field


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stop_string_is_kept(
    http: httpx.Client, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    chunks = FakeFrontend._chunks

    async def stopped(self: FakeFrontend, request: Any) -> Any:
        async for chunk in chunks(self, request):
            if chunk.finish is not None:
                chunk = msgspec.structs.replace(chunk, finish=Finish(reason="stop", matched="END"))
            yield chunk

    monkeypatch.setattr(FakeFrontend, "_chunks", stopped)
    for kept in (False, True):
        frontend.script = ["So."]
        body = BODIES[path] | {"stop": "END", "include_stop_str_in_output": kept, "stream": stream}
        response = http.post(path, json=body | {"max_tokens": None})
        bodies = events(response) if stream else [response.json()]
        choices = [choice for one in bodies if isinstance(one, dict) for choice in one["choices"]]
        texts = [
            one.get("text") or (one.get("message") or one.get("delta") or {}).get("content")
            for one in choices
        ]
        assert "".join(filter(None, texts)) == ("So.END" if kept else "So.")
    error = refused(http.post(path, json=body | {"stop_token_ids": [5]}))
    assert error["param"] == "include_stop_str_in_output"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_every_event(http: httpx.Client, frontend: FakeFrontend, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = http.post(
        path, json=BODIES[path] | {"max_tokens": 5, "stream": True, "stream_options": options}
    )
    usages = [one["usage"] for one in events(response) if isinstance(one, dict)]
    counts = [one["completion_tokens"] for one in usages]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > counts[0]
    assert len({one["prompt_tokens"] for one in usages}) == 1
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in usages)
    alone = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    error = refused(http.post(path, json=BODIES[path] | alone))
    assert error["param"] == "stream_options.continuous_usage_stats"


NOT_GIVEN: list[Any] = [
    {},
    {"effort": None, "summary": None},
    {"summary": "auto"},
    {"summary": "detailed", "generate_summary": None, "context": "auto", "mode": "standard"},
    {"effort": None, "enabled": None, "max_tokens": None, "exclude": None, "start": None, "end": None},
]


@pytest.mark.parametrize("reasoning", NOT_GIVEN)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("thinks", [False, True])
def test_reasoning_that_asks_for_nothing_switches_nothing(
    http: httpx.Client, frontend: FakeFrontend, path: str, reasoning: Any, thinks: bool
) -> None:
    variables = ("enable_thinking", "reasoning_effort") if thinks else ()
    speak(frontend, variables=variables, thinking=ThinkingFormat() if thinks else None)
    made = []
    for body in (BODIES[path], BODIES[path] | {"reasoning": reasoning}):
        assert http.post(path, json=body).status_code == 200
        request = frontend.requests[-1]
        made.append(msgspec.structs.replace(request, rid="", flow=""))
    assert made[0] == made[1]
    assert (made[1].preambles, made[1].template_kwargs) == ((), "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_an_effort_on_a_model_that_reads_none(http: httpx.Client, frontend: FakeFrontend, path: str) -> None:
    body = BODIES[path] | {"reasoning": {"effort": "high"}}
    answer = http.post(path, json=body)
    assert answer.headers["x-ramify-ignored"] == "reasoning.effort"
    assert frontend.requests[-1].preambles == ()
    speak(frontend, variables=("enable_thinking",), thinking=ThinkingFormat())
    answer = http.post(path, json=body)
    assert "x-ramify-ignored" not in answer.headers
    assert json.loads(frontend.requests[-1].template_kwargs) == {"enable_thinking": True}
