"""The Messages API over a socket, through Anthropic's own client: answers, streams, figures and errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from ramify.errors import EngineClosed, Overloaded, PromptTooLong, WorkerDied
from ramify.messages import (
    Finish,
    Preamble,
    TextChunk,
    Usage,
)
from ramify.model_info import ThinkingFormat
from ramify.runtime.server import sse
from ramify.runtime.server.anthropic.cache import CacheMarks
from ramify.runtime.server.anthropic.writer import MessageWriter
from ramify.runtime.server.openai.turn_parser import TurnFormat
from tests.server.conftest import ONE, PARAMETERS, TWO, speak
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer, events
from tests.server.messages_contract import check_events, check_message

PATH = "/v1/messages"
ASK: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "hello world"}]}
WEATHER: Any = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}
TIME: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
THINKING: Any = {"thinking": {"type": "enabled", "budget_tokens": 50}}
EVERYTHING = "hm 日</think>\n\nLet me see …\n" + TWO
MARK: Any = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def claude(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def thinker(frontend: FakeFrontend) -> FakeFrontend:
    """A model that thinks unless ``enable_thinking`` is false."""
    return speak(frontend, variables=("enable_thinking",), thinking=ThinkingFormat(start="<think>"))


def stream(http: httpx.Client, body: Any) -> list[Any]:
    with http.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def both(http: httpx.Client, frontend: FakeFrontend, script: str, body: Any) -> Any:
    """The message that answers `body`, which must be the same whole and streamed."""
    frontend.script = [script] * 2
    whole = http.post(PATH, json=body).json()
    check_message(whole)
    streamed = check_events(stream(http, body))
    told = [
        [block | {"id": ""} if "id" in block else block for block in one["content"]]
        for one in (whole, streamed)
    ]
    assert told[0] == told[1]
    assert whole["stop_reason"] == streamed["stop_reason"]
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"]
    return whole


def test_an_answer(claude: anthropic.Anthropic, frontend: FakeFrontend) -> None:
    frontend.script = ["Fine."]
    answer = claude.messages.create(**ASK, system="Be brief.", metadata={"user_id": "me"})
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Fine."}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.id == frontend.requests[-1].rid
    assert answer._request_id == answer.id.replace("msg", "req")
    assert frontend.requests[-1].sampling.max_tokens == 200


def test_a_stream(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = ["Fi"]
    told = stream(http, ASK)
    assert [event["type"] for event in told] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert told[0]["message"]["usage"]["input_tokens"] == len("<user>hello world")
    assert check_events(told)["content"] == [{"type": "text", "text": "Fi"}]


def test_events_carry_their_names(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = ["Fi"]
    with http.stream("POST", PATH, json=ASK | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    names, data = lines[::2], lines[1::2]
    assert [f"event: {json.loads(one.removeprefix('data: '))['type']}" for one in data] == names


def test_the_client_assembles_a_stream(claude: anthropic.Anthropic, thinker: FakeFrontend) -> None:
    thinker.script = [EVERYTHING]
    with claude.messages.stream(**ASK, **THINKING, tools=[WEATHER, TIME]) as events_of:
        answer = events_of.get_final_message()
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in answer.content if block.type == "tool_use"] == [
        {"city": 'Bonn, "}é'},
        {},
    ]


def test_thinking_text_and_calls(http: httpx.Client, thinker: FakeFrontend) -> None:
    answer = both(http, thinker, EVERYTHING, ASK | THINKING | {"tools": [WEATHER, TIME]})
    thought, text, first, second = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm 日")
    assert text == {"type": "text", "text": "\n\nLet me see …\n"}
    assert (first["name"], first["input"]) == ("get_weather", {"city": 'Bonn, "}é'})
    assert (second["name"], second["input"]) == ("get_time", {})
    assert answer["stop_reason"] == "tool_use"
    counted = len("hm 日</think>".encode())
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": counted}
    assert thinker.requests[-1].preambles[0] == Preamble(
        start="<think>", end="</think>", max_tokens=50, apart=True, counted=True
    )


def test_white_space_alone_is_no_block(http: httpx.Client, thinker: FakeFrontend) -> None:
    """Anthropic's API refuses such a block, so that a client could not send it back."""
    answer = both(http, thinker, "hm</think>\n\n" + ONE, ASK | THINKING | {"tools": [WEATHER]})
    assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"]
    assert both(http, thinker, "hm</think>\n", ASK | THINKING)["content"][-1]["type"] == "thinking"


def test_an_omitted_thought_comes_back_by_its_signature(http: httpx.Client, thinker: FakeFrontend) -> None:
    asked = THINKING["thinking"] | {"display": "omitted"}
    answer = both(http, thinker, "hm 日</think>Four.", ASK | {"thinking": asked})
    assert answer["content"][0]["thinking"] == ""
    said = {"role": "assistant", "content": answer["content"]}
    http.post(PATH, json=ASK | {"messages": [*ASK["messages"], said, *ASK["messages"]]})
    assert [(turn.content, turn.reasoning) for turn in thinker.requests[-1].chat or ()][1] == (
        "Four.",
        "hm 日",
    )


def test_a_call_that_is_cut(http: httpx.Client, frontend: FakeFrontend) -> None:
    body = ASK | {"tools": [WEATHER], "max_tokens": len(ONE) - 25}
    frontend.script = [ONE] * 2
    whole = http.post(PATH, json=body).json()
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({}, "max_tokens")
    told = stream(http, body)
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas).startswith('{"city": "Bonn')


def test_why_a_message_ends(http: httpx.Client, frontend: FakeFrontend) -> None:
    def ended(**fields: Any) -> tuple[str, str | None]:
        answer = http.post(PATH, json=ASK | fields).json()
        return answer["stop_reason"], answer["stop_sequence"]

    assert ended(max_tokens=3) == ("max_tokens", None)
    assert ended(max_tokens=0) == ("max_tokens", None)
    assert ended(stop_sequences=["X", "RL"]) == ("stop_sequence", "RL")
    assert frontend.requests[-1].sampling.stop == ("X", "RL")
    assert ended(tools=[WEATHER], tool_choice={"type": "none"}, max_tokens=1) == ("max_tokens", None)
    assert ended(max_tokens=600) == ("max_tokens", None)
    frontend.script = ["Fine."]
    assert ended() == ("end_turn", None)


def test_the_context_ends_a_message(http: httpx.Client, frontend: FakeFrontend) -> None:
    """A limit beyond the context is cut, so that the answer may end before it."""
    for limit, reason in ((5, "max_tokens"), (6, "model_context_window_exceeded")):
        told = MessageWriter({"content": []}, TurnFormat(), CacheMarks(), limit, omitted=False)
        last = TextChunk(rid="r", usage=Usage(completion_tokens=5), finish=Finish(reason="length"))
        told.push(last)
        assert told.message["stop_reason"] == reason
    frontend.script = ["Fine."]
    assert http.post(PATH, json=ASK | {"max_tokens": 10**9}).status_code == 200
    assert frontend.requests[-1].cut_to_fit


@pytest.mark.parametrize("mark", [MARK, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}])
def test_figures_of_the_cache(http: httpx.Client, frontend: FakeFrontend, mark: Any) -> None:
    ttl = mark["cache_control"].get("ttl", "5m")
    body = ASK | {"cache_salt": f"figures {ttl}", "max_tokens": 2}
    prompt = len("<user>hello world")

    def counted(asked: Any) -> tuple[int, int, int]:
        usage = http.post(PATH, json=asked).json()["usage"]
        created = usage["cache_creation_input_tokens"]
        other = {"5m": "1h", "1h": "5m"}[ttl]
        assert usage["cache_creation"] == {
            f"ephemeral_{ttl}_input_tokens": created,
            f"ephemeral_{other}_input_tokens": 0,
        }
        return usage["input_tokens"], created, usage["cache_read_input_tokens"]

    marked = body | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello world"} | mark]}]
    }
    assert counted(marked) == (0, prompt, 0)
    assert counted(marked) == (0, 1, prompt - 1)
    assert counted(body) == (1, 0, prompt - 1)


def test_tokens_are_counted_as_they_are_used(claude: anthropic.Anthropic, thinker: FakeFrontend) -> None:
    prompt: Any = {name: ASK[name] for name in ("model", "messages")} | THINKING
    prompt |= {"system": "Be brief.", "tools": [WEATHER]}
    counted = claude.messages.count_tokens(**prompt)
    asked = thinker.requests[-1]
    answer = claude.messages.create(**prompt, max_tokens=5)
    assert counted.input_tokens == answer.usage.input_tokens
    sent = thinker.requests[-1]
    assert (sent.chat, sent.tools, sent.template_kwargs) == (asked.chat, asked.tools, asked.template_kwargs)
    assert sent.preambles == asked.preambles


def test_a_prefilled_answer_is_continued(claude: anthropic.Anthropic, thinker: FakeFrontend) -> None:
    turns: Any = [*ASK["messages"], {"role": "assistant", "content": "It is "}]
    thinker.script = ["Four."]
    answer = claude.messages.create(**ASK | {"messages": turns}, tools=[WEATHER])
    assert answer.content[0].to_dict() == {"type": "text", "text": "Four."}
    sent = thinker.requests[-1]
    assert json.loads(sent.template_kwargs).items() >= {
        ("add_generation_prompt", False),
        ("continue_final_message", True),
    }
    assert [preamble.start for preamble in sent.preambles] == [""]
    for fields in (THINKING, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}):
        with pytest.raises(anthropic.BadRequestError, match="cannot be continued"):
            claude.messages.create(**ASK | {"messages": turns} | fields)


@pytest.mark.parametrize(
    ("error", "status", "kind", "raised"),
    [
        (Overloaded("Full.", retry_after=3), 429, "rate_limit_error", anthropic.RateLimitError),
        (EngineClosed("Closed."), 503, "overloaded_error", anthropic.InternalServerError),
        (WorkerDied("It died."), 503, "overloaded_error", anthropic.InternalServerError),
        (RuntimeError("?"), 500, "api_error", anthropic.InternalServerError),
    ],
)
def test_errors_of_the_engine(
    claude: anthropic.Anthropic, frontend: FakeFrontend, error: Exception, status: int, kind: str, raised: Any
) -> None:
    frontend.fail_first = error
    with pytest.raises(raised) as caught:
        claude.messages.create(**ASK)
    assert caught.value.status_code == status
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.request_id == caught.value.body["request_id"]
    assert caught.value.request_id.startswith("req_")


def test_an_error_in_a_stream_is_an_event(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.fail_after = (2, WorkerDied("It died."))
    *_, last = stream(http, ASK)
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "It died."}}


def test_a_silent_stream_has_pings(
    server: LiveServer, claude: anthropic.Anthropic, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "SILENCE_S", 0.01)
    frontend.hold_after, frontend.script = 0, ["Fine."]
    with claude.messages.with_streaming_response.create(**ASK, stream=True) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(3):
            assert (next(lines), next(lines)) == ("event: ping", 'data: {"type":"ping"}')
        server.call(frontend.release.set)
        assert next(lines) == "event: message_start"
    frontend.release = asyncio.Event()
    frontend.held.clear()
    frontend.script = ["Fine."]
    with claude.messages.stream(**ASK) as stream_of:
        assert frontend.held.wait(60)
        server.call(frontend.release.set)
        assert stream_of.get_final_text() == "Fine."


def test_a_prompt_that_is_too_long(claude: anthropic.Anthropic, frontend: FakeFrontend) -> None:
    """Claude Code compacts the conversation if an error matches its expression."""
    frontend.fail_first = PromptTooLong("It is.", field="prompt", lengths=(9000, 0, 8192))
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**ASK)
    assert re.search(r"prompt is too long[^0-9]*9000\s*tokens?\s*>\s*8191", str(caught.value))
    frontend.fail_first = PromptTooLong("It has 10 characters.", field="prompt")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: It has 10 characters\."):
        claude.messages.create(**ASK)


def test_errors_of_the_request(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model: other is not served here"):
        claude.messages.create(**ASK | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is missing"):
        claude.post(PATH, body={**ASK, "max_tokens": None}, cast_to=object)
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers is not supported"):
        claude.messages.create(**ASK, extra_body={"mcp_servers": [{"type": "url"}]})


def test_errors_of_models_have_the_form_of_the_api_that_is_named(http: httpx.Client) -> None:
    answer = http.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert answer.json()["request_id"] == answer.headers["request-id"]
    assert http.get("/v1/models/other").json()["error"]["param"] == "model"


def test_fields_and_headers_of_claude_code(http: httpx.Client) -> None:
    body = ASK | {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "service_tier": "auto",
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,no-such-thing-2099"}
    answer = http.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert answer.status_code == 200
    assert set(answer.headers["x-ramify-ignored"].split(", ")) == {
        "context_management",
        "output_config.effort",
        "thinking",
    }


def test_models(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    listed = claude.models.list(limit=5)
    assert [(model.id, model.type, model.lifecycle) for model in listed] == [(MODEL, "model", "active")]
    assert (listed.has_more, listed.first_id, listed.last_id) == (False, MODEL, MODEL)
    assert not listed.data[0].model_extra
    assert claude.models.retrieve("default").id == MODEL
    assert http.get("/v1/models").json()["object"] == "list"
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("other")


def test_the_key_may_be_anthropics_header() -> None:
    with LiveServer(FakeFrontend(), api_key="secret") as server:
        with anthropic.Anthropic(base_url=server.url, api_key="secret") as claude:
            assert claude.messages.create(**ASK).role == "assistant"
        with (
            anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0) as claude,
            pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
        ):
            claude.messages.create(**ASK)
