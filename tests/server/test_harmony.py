"""gpt-oss's channels over a socket: reasoning, calls and content, in whole answers and streams."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest

from ramify.model_info import ThinkingFormat
from ramify.runtime.server.openai.turn_parser import (
    TurnEvent,
    TurnFormat,
    parse_turn,
)
from ramify.tool_calls.channels import ChannelParser
from ramify.tool_calls.formats import HARMONY
from ramify.tool_calls.parser import Arguments, CallBegins, Content, Reasoning
from tests.model.harmony import marks_in
from tests.server.conftest import speak
from tests.server.fake_frontend import MODEL, FakeFrontend, events

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
RESUME = "<|end|><|start|>assistant"
THOUGHT = f"{ANALYSIS}2 + 2 日.{RESUME}"
ANSWERED = f"{THOUGHT}{FINAL}Four."
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": "<|"}'
CALLED = f"{THOUGHT}<|channel|>commentary<|message|>I add.{RESUME}{CALL}"
RECIPIENT_FIRST = f"{THOUGHT} to=functions.add<|channel|>commentary json<|message|>" + '{"a": "<|"}<|call|>'
USER: Any = [{"role": "user", "content": "2 + 2?"}]
ASK: Any = {"model": MODEL, "messages": USER}
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
}
TOOLS: Any = [{"type": "function", "function": ADD}]


@pytest.fixture
def harmony(frontend: FakeFrontend) -> FakeFrontend:
    thinking = ThinkingFormat(
        start=ANALYSIS,
        end="<|end|>",
        gap=f"<|start|>assistant{FINAL}",
        default=FINAL,
        on=ANALYSIS,
        off=FINAL,
        past=FINAL,
        channels=True,
        kept="user",
    )
    return speak(frontend, tool_format="harmony", variables=("reasoning_effort",), thinking=thinking)


def ends(frontend: FakeFrontend) -> list[tuple[str, int | None]]:
    return [(one.end, one.max_tokens) for one in frontend.requests[-1].preambles]


def merged(parts: list[TurnEvent]) -> list[TurnEvent]:
    """`parts` with consecutive events of one kind merged."""
    found: list[Any] = []
    for part in parts:
        if found and type(found[-1]) is type(part):
            part = dataclasses.replace(part, text=found.pop().text + part.text)  # type: ignore[call-arg,union-attr]
        found.append(part)
    return found


WANTED = {
    ANSWERED: [Reasoning("2 + 2 日."), Content("Four.")],
    ANSWERED + "<|return|>": [Reasoning("2 + 2 日."), Content("Four.")],
    CALLED: [Reasoning("2 + 2 日."), Content("I add."), CallBegins(0, "add"), Arguments(0, '{"a": "<|"}')],
    RECIPIENT_FIRST: [Reasoning("2 + 2 日."), CallBegins(0, "add"), Arguments(0, '{"a": "<|"}')],
    f"{FINAL}a < b <|x|> c": [Content("a < b <|x|> c")],
    ANALYSIS + "Hm": [Reasoning("Hm")],
    "<|channel|>ana": [],
}


@pytest.mark.parametrize("text", WANTED)
def test_any_cut_gives_the_same(text: str) -> None:
    for size in (1, 3, 7, len(text)):
        parser = ChannelParser(calls=True)
        parts: list[TurnEvent] = []
        for at in range(0, len(text), size):
            places = [place - at for place in marks_in(text) if at <= place < at + size]
            parts += parser.push(text[at : at + size], places)
        assert merged([*parts, *parser.close()]) == WANTED[text]
        assert parser.called == any(isinstance(part, CallBegins) for part in parts)


def test_where_reasoning_is_hidden_or_not_apart() -> None:
    hidden = TurnFormat(reasoning_end="<|end|>", channels=True, show_reasoning=False)
    marks = marks_in(ANSWERED)
    assert parse_turn(hidden, ANSWERED, marks).content == "Four."
    assert parse_turn(hidden, ANSWERED, marks).reasoning == ""
    assert parse_turn(TurnFormat(channels=True), ANSWERED, marks).content == "2 + 2 日.Four."
    calls = TurnFormat(reasoning_end="<|end|>", channels=True, tools=HARMONY)
    cut = parse_turn(calls, CALLED[:-3], marks_in(CALLED))
    assert cut.calls
    assert not cut.called


def test_without_a_word_about_reasoning_it_comes_apart(client: openai.OpenAI, harmony: FakeFrontend) -> None:
    harmony.script = [ANSWERED]
    reply = client.chat.completions.create(**ASK)
    message: Any = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("2 + 2 日.", "Four.")
    assert harmony.requests[-1].preambles == ()
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    counted = len((THOUGHT + FINAL).encode())
    assert reply.usage.completion_tokens_details.reasoning_tokens == counted


def test_a_stream(http: httpx.Client, harmony: FakeFrontend) -> None:
    harmony.script = [ANSWERED]
    with http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as response:
        *chunks, _ = events(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "2 + 2 日."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Four."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_calls(client: openai.OpenAI, harmony: FakeFrontend) -> None:
    harmony.script = [CALLED]
    (choice,) = client.chat.completions.create(**ASK, tools=TOOLS).choices
    message: Any = choice.message
    assert (message.reasoning_content, message.content) == ("2 + 2 日.", "I add.")
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": "<|"}')
    assert choice.finish_reason == "tool_calls"


def test_choice_and_format_are_about_the_final_channel(client: openai.OpenAI, harmony: FakeFrontend) -> None:
    """The grammar begins after the thoughts. The text between them is forced, or is part of the grammar."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    harmony.script = [THOUGHT + FINAL + '{"n": 4}'] * 9
    client.chat.completions.create(**ASK, response_format=wanted)
    assert ends(harmony) == [(ANALYSIS, 0), ("<|end|>", None), (f"<|start|>assistant{FINAL}", 0)]
    constraint = harmony.requests[-1].constraint
    assert constraint is not None
    assert json.loads(constraint.source) == schema

    for options, elements in (
        ({"tools": TOOLS}, 1),
        ({"tools": TOOLS, "response_format": wanted}, 2),
        ({"tools": TOOLS, "tool_choice": "required"}, 1),
    ):
        client.chat.completions.create(**ASK, **options)  # type: ignore[call-overload]
        assert ends(harmony) == [(ANALYSIS, 0), ("<|end|>", None)]
        constraint = harmony.requests[-1].constraint
        assert constraint is not None
        start, options_of = json.loads(constraint.source)["format"]["elements"]
        assert "assistant" in start["value"]
        assert "<|" not in constraint.source, "control tokens are no text"
        assert len(options_of["elements"]) == elements


def test_budgets_effort_and_no_thoughts(client: openai.OpenAI, harmony: FakeFrontend) -> None:
    def ask(**fields: Any) -> Any:
        harmony.script = [f"{FINAL}Four."]
        return client.chat.completions.create(**ASK, extra_body=fields).choices[0].message

    ask(thinking_budget=7)
    assert ends(harmony) == [(ANALYSIS, 0), ("<|end|>", 7), (f"<|start|>assistant{FINAL}", 0)]
    message = ask(reasoning_effort="none")
    assert ends(harmony) == [(FINAL, 0)]
    assert (message.content, message.reasoning_content) == ("Four.", "")
    ask(reasoning_effort="high")
    assert ends(harmony) == []
    assert harmony.requests[-1].template_kwargs == '{"reasoning_effort":"high"}'
    ask(reasoning_effort="none", tools=TOOLS)
    assert ends(harmony) == []
    constraint = harmony.requests[-1].constraint
    assert constraint is not None
    (options,) = json.loads(constraint.source)["format"]["elements"]
    assert options["type"] == "or", "no text between the thoughts and the answer"


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_a_response(http: httpx.Client, harmony: FakeFrontend, stream: bool) -> None:
    harmony.script = [CALLED]
    body = {"model": MODEL, "input": "2 + 2?", "tools": [{"type": "function", **ADD}], "stream": stream}
    if stream:
        with http.stream("POST", "/v1/responses", json=body) as response:
            reply = list(events(response))[-1]["response"]
    else:
        reply = http.post("/v1/responses", json=body).json()
    thought, said, call = reply["output"]
    assert thought["content"][0]["text"] == "2 + 2 日."
    assert said["content"][0]["text"] == "I add."
    assert (call["name"], call["arguments"], call["status"]) == ("add", '{"a": "<|"}', "completed")
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > len("2 + 2 日.")
