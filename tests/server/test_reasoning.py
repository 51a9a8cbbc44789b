"""Reasoning over a socket: the ways to ask for it, and its separation from the content."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ramify.messages import Preamble
from ramify.model_info import ThinkingFormat
from tests.server.conftest import refused, speak
from tests.server.fake_frontend import MODEL, FakeFrontend, events

USER: Any = [{"role": "user", "content": "hi"}]
ASK: Any = {"model": MODEL, "messages": USER}
ON: Any = {"reasoning": {"max_tokens": 1024}}
THINK = Preamble(start="<think>", end="</think>", max_tokens=1024, apart=True, counted=True)
"""The reasoning of a model that has no thinking of its own, with the default budget."""
TURN = "hm </th 日</think>\n\nFour."


@pytest.fixture
def thinker(frontend: FakeFrontend) -> FakeFrontend:
    """A model whose template reads enable_thinking, reasoning_effort and tone."""
    return speak(frontend, variables=("enable_thinking", "reasoning_effort", "tone"))


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**ASK, extra_body=fields).choices[0]


def test_reasoning_comes_apart(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = [TURN]
    message = ask(client, **ON).message
    assert message.reasoning_content == "hm </th 日"
    assert message.content == "\n\nFour."
    assert frontend.requests[-1].preambles == (THINK,)
    assert frontend.requests[-1].constraint is None


def thoughts(usage: Any) -> int | None:
    details = usage.completion_tokens_details
    return None if details is None else int(details.reasoning_tokens)


def test_tokens_of_the_reasoning_are_counted(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    """Each token of the fake model is one byte. The end mark counts as reasoning."""
    asked: Any = ON
    for script, answers in (([TURN], 1), (["hm"], 1), ([TURN, "日</think>b"], 2)):
        parts = [turn.partition("</think>") for turn in script]
        counted = sum(len(f"{thought}{end}".encode()) for thought, end, _ in parts)
        frontend.script = list(script)
        whole = client.chat.completions.create(**ASK, n=answers, extra_body=asked)
        assert thoughts(whole.usage) == counted
        frontend.script = list(script)
        *_, last = client.chat.completions.create(
            **ASK, n=answers, stream=True, stream_options={"include_usage": True}, extra_body=asked
        )
        assert thoughts(last.usage) == counted
    frontend.script = ["Four."]
    assert thoughts(client.chat.completions.create(**ASK).usage) is None


def test_a_stream_of_both(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = [TURN]
    body = ASK | ON | {"stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        *chunks, _ = events(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    kinds = [key for delta in deltas for key in delta if delta[key] and key != "role"]
    assert kinds == sorted(kinds, reverse=True), "the reasoning first"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm </th 日"
    assert "".join(delta.get("content", "") for delta in deltas) == "\n\nFour."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_cut_inside_the_reasoning(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = [TURN]
    choice = client.chat.completions.create(**ASK, max_tokens=6, extra_body=ON).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.reasoning_content == "hm </t"  # type: ignore[attr-defined]
    assert choice.message.content == ""


def test_the_constraint_is_about_the_answer(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = ["so</think>{}"]
    choice = ask(client, reasoning={"max_tokens": 9}, response_format={"type": "json_object"})
    assert (choice.message.reasoning_content, choice.message.content) == ("so", "{}")
    request = frontend.requests[-1]
    assert request.constraint is not None
    assert request.preambles == (msgspec.structs.replace(THINK, max_tokens=9),)


def test_reasoning_before_a_call(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    frontend.script = ['<tool_call>?</think>Ok <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>']
    choice = ask(client, **ON, tools=[tool])
    assert choice.message.reasoning_content == "<tool_call>?"
    assert choice.message.content == "Ok "
    assert choice.message.tool_calls[0].function.name == "f"
    assert [preamble.end for preamble in frontend.requests[-1].preambles] == ["</think>", "<tool_call>"]


@pytest.mark.parametrize(
    ("fields", "preamble"),
    [
        ({"reasoning": {"max_tokens": 5}}, {"max_tokens": 5}),
        ({"reasoning": {"start": "", "end": "Answer:"}}, {"start": "", "end": "Answer:"}),
        ({"thinking_token_budget": 7}, {"max_tokens": 7}),
        ({"thinking_budget": 0}, {"max_tokens": 0}),
        ({"enable_thinking": True}, None),
        ({"reasoning": {"enabled": True}}, None),
        ({"reasoning": {"enabled": True, "max_tokens": 5}}, {"max_tokens": 5}),
        ({"reasoning": {"enabled": True, "effort": "high"}}, None),
        ({"reasoning": {"enabled": False, "effort": "high", "max_tokens": 5}}, None),
        ({"separate_reasoning": True}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, None),
        ({}, None),
        ({"reasoning": None}, None),
        ({"reasoning": {}}, None),
        ({"reasoning": {"effort": None, "summary": None}}, None),
        ({"reasoning": {"summary": "auto"}}, None),
        ({"reasoning": {"exclude": True}}, None),
        ({"reasoning": {"enabled": None, "max_tokens": None, "start": None, "end": None}}, None),
        ({"reasoning": {"effort": "high"}}, None),
        ({"reasoning_effort": "high"}, None),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None),
        ({"reasoning": {"enabled": False}}, None),
        ({"enable_thinking": False}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"reasoning_effort": "none"}, None),
        ({"separate_reasoning": False}, None),
    ],
)
def test_how_it_is_asked_for(
    client: openai.OpenAI, frontend: FakeFrontend, fields: dict[str, Any], preamble: dict[str, Any] | None
) -> None:
    ask(client, max_tokens=1, **fields)
    wanted = () if preamble is None else (msgspec.structs.replace(THINK, **preamble),)
    assert frontend.requests[-1].preambles == wanted
    assert frontend.requests[-1].template_kwargs == ""


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"reasoning": {"max_tokens": 1}}, {"enable_thinking": True}),
        (
            {"reasoning": {"enabled": False, "effort": "low"}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
        ({"separate_reasoning": True}, {"enable_thinking": True}),
        ({"separate_reasoning": True, "enable_thinking": False}, {"enable_thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning": {"effort": "low"}}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"tone": "dry", "enable_thinking": None}}, {"tone": "dry"}),
        ({"chat_template_kwargs": {"tone": "dry"}}, {"tone": "dry"}),
        (
            {"chat_template_kwargs": {"tone": {"a": [1]}, "enable_thinking": True}},
            {"tone": {"a": [1]}, "enable_thinking": True},
        ),
    ],
)
def test_what_the_template_is_given(
    client: openai.OpenAI, thinker: FakeFrontend, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    ask(client, max_tokens=1, **fields)
    assert json.loads(thinker.requests[-1].template_kwargs) == variables


def test_the_marks_and_the_switch_are_those_of_the_template(
    client: openai.OpenAI, frontend: FakeFrontend
) -> None:
    marks = ThinkingFormat(start="[THINK]", end="[/THINK]", gap="")
    speak(frontend, variables=("thinking",), thinking=marks)
    for fields in (
        {"reasoning": {"enabled": True}},
        {"reasoning": {"effort": "low"}},
        {"chat_template_kwargs": {"thinking": True}},
    ):
        frontend.script = ["hm[/THINK]Four."]
        message = ask(client, **fields).message
        assert (message.reasoning_content, message.content) == ("hm", "Four.")
        assert frontend.requests[-1].preambles == (
            Preamble(start="[THINK]", end="[/THINK]", apart=True, counted=True),
        )
        assert json.loads(frontend.requests[-1].template_kwargs) == {"thinking": True}


def test_not_told_apart_or_not_shown(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    for fields in (
        {"reasoning": {"max_tokens": 1024, "exclude": True}},
        ON | {"include_reasoning": False},
    ):
        frontend.script = [TURN]
        message = ask(client, **fields).message
        assert message.content == "\n\nFour."
        assert not hasattr(message, "reasoning_content")
    frontend.script = [TURN]
    message = ask(client, **ON, separate_reasoning=False).message
    assert message.content == TURN
    assert frontend.requests[-1].preambles == (THINK,)


def test_reasoning_of_earlier_turns(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    turn = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    ask_again: Any = {"model": MODEL, "messages": [*USER, turn, *USER], "max_tokens": 1}
    client.chat.completions.create(**ask_again)
    assert (frontend.requests[-1].chat or ())[1].reasoning == "2 + 2"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"reasoning": {"end": ""}}, "reasoning.end"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"depth": 3}}, "reasoning.depth"),
        ({"reasoning": {"enabled": True}, "enable_thinking": False}, "reasoning.enabled"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning": {"max_tokens": 1}, "thinking_budget": 2}, "thinking_budget"),
        ({"stream_reasoning": False}, "stream_reasoning"),
        ({"chat_template_kwargs": {"tone": "dry"}}, "chat_template_kwargs.tone"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refused(http.post("/v1/chat/completions", json=ASK | fields))["param"] == param


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.effort, reasoning.summary"),
        (
            {"reasoning": {"generate_summary": "concise", "context": "auto"}},
            "generate_summary, reasoning.context",
        ),
        ({"reasoning": {"summary": None, "effort": None}}, None),
        ({"reasoning": {"effort": "none"}}, None),
    ],
)
def test_what_has_no_effect_on_a_model_that_does_not_think_is_named(
    http: httpx.Client, fields: dict[str, Any], named: str | None
) -> None:
    for path, body in (("/v1/chat/completions", ASK), ("/v1/responses", {"model": MODEL, "input": "hi"})):
        response = http.post(path, json=body | fields)
        assert response.status_code == 200, response.text
        ignored = response.headers.get("x-ramify-ignored")
        assert ignored is None if named is None else (ignored or "").endswith(named)
