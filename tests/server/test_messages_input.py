"""The Messages API: blocks, tools and thinking of a request, and the chats that they become."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ramify.messages import (
    ChatMessage,
    Generate,
    Preamble,
    ToolCall,
)
from ramify.model_info import ThinkingFormat
from ramify.runtime.server.anthropic.turns import BILLING
from ramify.runtime.server.openai.responses.writer import sealed
from tests.server.conftest import PARAMETERS, speak
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

PATH = "/v1/messages"
USER: Any = {"role": "user", "content": "Weather?"}
ASK: Any = {"model": MODEL, "max_tokens": 9, "messages": [USER]}
WEATHER: Any = {"name": "get_weather", "input_schema": PARAMETERS}
TIME: Any = {"name": "get_time", "type": "custom", "input_schema": {"type": "object"}, "strict": True}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CALL: Any = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Bonn"}}
MARK: Any = {"cache_control": {"type": "ephemeral"}}
EVERYWHERE = {">system": "", ">user": "", "user>system": "", "assistant>system": ""}
"""Prefixes of a chat template that writes system turns anywhere."""
FIRST_ONLY = {">system": "", ">user": ""}


def send(http: httpx.Client, frontend: FakeFrontend, **fields: Any) -> Generate:
    """The request to the model for a body with these fields."""
    answer = http.post(PATH, json=ASK | fields)
    assert answer.status_code == 200, answer.text
    return frontend.requests[-1]


def turns(http: httpx.Client, frontend: FakeFrontend, *messages: Any, **fields: Any) -> list[tuple[str, str]]:
    """(role, content) of each turn."""
    request = send(http, frontend, messages=list(messages), **fields)
    return [(turn.role, turn.content) for turn in request.chat or ()]


def refusal(http: httpx.Client, **fields: Any) -> str:
    answer = http.post(PATH, json=ASK | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    return str(answer.json()["error"]["message"])


def text(*lines: str) -> list[Any]:
    return [{"type": "text", "text": line} for line in lines]


def user(*blocks: Any) -> Any:
    return {"role": "user", "content": list(blocks)}


def said(*blocks: Any) -> Any:
    return {"role": "assistant", "content": list(blocks)}


def result(**fields: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": "c1", **fields}


def test_system_blocks_without_the_billing_line(http: httpx.Client, frontend: FakeFrontend) -> None:
    speak(frontend, prefix=FIRST_ONLY)
    line = f"{BILLING} cc_version=2.1.197.571; cc_entrypoint=sdk-cli;"
    assert turns(http, frontend, USER, system="One.") == [("system", "One."), ("user", "Weather?")]
    assert turns(http, frontend, USER, system=text(line, "One.", "Two."))[0] == ("system", "One.\nTwo.")
    assert turns(http, frontend, USER, system=text(line)) == [("user", "Weather?")]


def test_a_system_message_in_the_middle(http: httpx.Client, frontend: FakeFrontend) -> None:
    middle = {"role": "system", "content": "Now in French."}
    begun = [("system", "One."), ("user", "Weather?"), ("assistant", "Rain.")]
    speak(frontend, prefix=EVERYWHERE)
    assert turns(http, frontend, USER, said(*text("Rain.")), middle, USER, system="One.") == [
        *begun,
        ("system", "Now in French."),
        ("user", "Weather?"),
    ]
    # In a template that shows no system turn there, the text is a user's.
    speak(frontend, prefix=FIRST_ONLY)
    assert turns(http, frontend, USER, said(*text("Rain.")), middle, USER, system="One.") == [
        *begun,
        ("user", "Now in French.\n\nWeather?"),
    ]
    speak(frontend, prefix={">user": ""})
    assert turns(http, frontend, USER, system="One.") == [("user", "One.\n\nWeather?")]


@pytest.mark.parametrize("prefix", [EVERYWHERE, FIRST_ONLY])
def test_a_system_message_before_the_first_answer_belongs_to_the_system_prompt(
    http: httpx.Client, frontend: FakeFrontend, prefix: dict[str, str]
) -> None:
    middle = {"role": "system", "content": "Now in French."}
    speak(frontend, prefix=prefix)
    prompt = [("system", "One.\n\nNow in French."), ("user", "Weather?")]
    assert turns(http, frontend, USER, middle, system="One.") == prompt
    assert turns(http, frontend, middle, USER, system="One.") == prompt


def test_successive_messages_of_a_role_are_one_turn(http: httpx.Client, frontend: FakeFrontend) -> None:
    assert turns(
        http, frontend, USER, said(*text("A", "B")), said(*text("C")), USER, user(*text("x", "y"))
    ) == [
        ("user", "Weather?"),
        ("assistant", "ABC"),
        ("user", "Weather?\n\nx\ny"),
    ]


def test_calls_and_results(http: httpx.Client, frontend: FakeFrontend) -> None:
    speak(frontend, prefix=FIRST_ONLY, tool_format="hermes")
    other = CALL | {"id": "c2", "name": "get_time", "input": {}, "caller": {"type": "direct"}}
    answered = user(
        *text("And now?"),
        result(content="Sunny."),
        {"type": "tool_result", "tool_use_id": "c2", "content": text("12", "00"), "is_error": True},
    )
    request = send(
        http,
        frontend,
        tools=[WEATHER, TIME],
        messages=[USER, said(*text("Let me see."), CALL, other), answered],
    )
    assert request.chat == (
        ChatMessage(role="user", content="Weather?"),
        ChatMessage(
            role="assistant",
            content="Let me see.",
            tool_calls=(
                ToolCall(id="c1", name="get_weather", arguments='{"city":"Bonn"}'),
                ToolCall(id="c2", name="get_time", arguments="{}"),
            ),
        ),
        ChatMessage(role="tool", content="Sunny.", tool_call_id="c1", name="get_weather"),
        ChatMessage(role="tool", content="Error: 12\n00", tool_call_id="c2", name="get_time"),
        ChatMessage(role="user", content="And now?"),
    )
    assert send(http, frontend, messages=[USER, said(CALL), user(result())]).chat[-1].content == ""  # type: ignore[index]


def test_thinking_comes_back(http: httpx.Client, frontend: FakeFrontend) -> None:
    def reasoning(**block: Any) -> str:
        request = send(http, frontend, messages=[USER, said({"type": "thinking", **block}, *text("A")), USER])
        assert request.chat is not None
        return request.chat[1].reasoning

    assert reasoning(thinking="hm", signature="EqQBCkYIBxgC") == "hm"
    assert reasoning(thinking="", signature=sealed("hm 日")) == "hm 日"
    assert reasoning(thinking="", signature="EqQBCkYIBxgC") == ""
    redacted = said({"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3"}, *text("A"))
    answer = http.post(PATH, json=ASK | {"messages": [USER, redacted, USER]})
    assert answer.headers["x-ramify-ignored"] == "messages[].content[].data"


def test_marks_may_be_anywhere(http: httpx.Client, frontend: FakeFrontend) -> None:
    speak(frontend, prefix=FIRST_ONLY, tool_format="hermes")
    block = text("x")[0]
    for fields in (
        MARK,
        {"system": [block | MARK]},
        {"tools": [WEATHER | MARK]},
        {"messages": [user(block | MARK)]},
        {"messages": [USER, said(CALL | MARK), user(result(content="x"))]},
        {"messages": [USER, said(CALL), user(result(content="x") | MARK)]},
        {"messages": [USER, said(CALL), user(result(content=[block | MARK]))]},
    ):
        usage = http.post(PATH, json=ASK | {"cache_salt": str(fields)} | fields).json()["usage"]
        assert usage["cache_creation_input_tokens"] == frontend_prompt(frontend)
        assert usage["input_tokens"] == 0
        hint = frontend.requests[-1].hint
        assert hint is not None
        assert hint.lease_s == 300
    assert send(http, frontend).hint is None
    hour = send(http, frontend, cache_control={"type": "ephemeral", "ttl": "1h"}).hint
    assert hour is not None
    assert hour.lease_s == 3600
    assert "cache_control.ttl" in refusal(http, cache_control={"type": "ephemeral", "ttl": "9h"})


def frontend_prompt(frontend: FakeFrontend) -> int:
    """Tokens of the last prompt of the fake model: its bytes."""
    return sum(len(f"<{turn.role}>{turn.content}") for turn in frontend.requests[-1].chat or ())


@pytest.mark.parametrize(
    ("choice", "called", "parallel"),
    [
        ({"type": "auto"}, ["get_weather", "get_time"], True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["get_weather", "get_time"], False),
        ({"type": "any"}, ["get_weather", "get_time"], True),
        ({"type": "tool", "name": "get_time"}, ["get_time"], False),
        ({"type": "none"}, None, None),
    ],
)
def test_tools_and_their_choice(
    http: httpx.Client, frontend: FakeFrontend, choice: Any, called: list[str] | None, parallel: bool | None
) -> None:
    speak(frontend, prefix=FIRST_ONLY, tool_format="hermes")
    extras = {"eager_input_streaming": True, "description": "The weather."} | MARK
    request = send(http, frontend, tools=[WEATHER | extras, TIME], tool_choice=choice)
    if called is None:
        assert (request.tools, request.constraint) == ("", None)
        return
    functions = [tool["function"] for tool in json.loads(request.tools)]
    assert functions[0] == {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": PARAMETERS,
    }
    assert request.constraint is not None
    elements = json.loads(request.constraint.source)["format"]["elements"]
    assert request.preambles[0].optional == (choice["type"] == "auto")
    assert [one["begin"].partition('"')[0] for one in elements[1]["elements"]] == called
    assert ([one["type"] for one in elements].count("star") == 1) == parallel


def test_server_tools_are_left_out_and_named(http: httpx.Client, frontend: FakeFrontend) -> None:
    speak(frontend, prefix=FIRST_ONLY, tool_format="hermes")
    answer = http.post(PATH, json=ASK | {"tools": [SEARCH, WEATHER]})
    assert answer.headers["x-ramify-ignored"] == "tools[web_search_20250305]"
    assert [tool["function"]["name"] for tool in json.loads(frontend.requests[-1].tools)] == ["get_weather"]
    assert send(http, frontend, tools=[SEARCH]).tools == ""
    assert "'web_search'" in refusal(http, tools=[SEARCH], tool_choice={"type": "tool", "name": "web_search"})


def test_the_field_of_a_wrong_schema(http: httpx.Client, frontend: FakeFrontend) -> None:
    speak(frontend, prefix=FIRST_ONLY, tool_format="hermes")
    wrong = WEATHER | {"name": "wrong", "input_schema": {"type": "array"}}
    assert "tools[1].input_schema.type" in refusal(http, tools=[SEARCH, wrong])


def thinks(frontend: FakeFrontend, **fields: Any) -> None:
    speak(frontend, prefix=FIRST_ONLY, thinking=ThinkingFormat(), **fields)


ON: Any = {"type": "enabled", "budget_tokens": 32000}


@pytest.mark.parametrize(
    ("fields", "switch", "limit"),
    [
        ({}, False, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": ON}, True, 32000),  # max_tokens is less, as Qwen Code sends it
        ({"thinking": {"type": "adaptive"}}, True, None),
        ({"output_config": {"effort": "high"}}, True, None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, False, None),
    ],
)
def test_thinking(http: httpx.Client, frontend: FakeFrontend, fields: Any, switch: bool, limit: Any) -> None:
    thinks(frontend, variables=("enable_thinking",))
    request = send(http, frontend, **fields)
    assert json.loads(request.template_kwargs) == {"enable_thinking": switch}
    thought = Preamble(start="<think>\n", end="</think>", max_tokens=limit, apart=True, counted=True)
    assert request.preambles == ((thought,) if switch else ())


def test_a_model_that_always_thinks(http: httpx.Client, frontend: FakeFrontend) -> None:
    thinks(frontend)
    assert len(send(http, frontend).preambles) == 1
    answer = http.post(PATH, json=ASK | {"thinking": {"type": "disabled"}})
    assert len(frontend.requests[-1].preambles) == 1
    assert answer.headers["x-ramify-ignored"] == "thinking"


def test_a_model_that_does_not_think(http: httpx.Client, frontend: FakeFrontend) -> None:
    answer = http.post(PATH, json=ASK | {"thinking": ON, "output_config": {"effort": "low"}})
    assert (frontend.requests[-1].preambles, frontend.requests[-1].template_kwargs) == ((), "")
    assert answer.headers["x-ramify-ignored"] == "output_config.effort, thinking"
    assert send(http, frontend, thinking={"type": "disabled"}).preambles == ()


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_format(http: httpx.Client, frontend: FakeFrontend, place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}}
    request = send(http, frontend, **{place: {"format": form} if place == "output_config" else form})
    assert request.constraint is not None
    assert json.loads(request.constraint.source) == form["schema"]
    wrong = form | {"schema": None}
    message = refusal(http, **{place: {"format": wrong} if place == "output_config" else wrong})
    assert message.startswith(f"{place}{'.format' if place == 'output_config' else ''}.schema")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages is missing or empty."),
        ({"messages": [user()]}, "messages has no text."),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].type is 'image'"),
        (
            {"messages": [user({"type": "document", "source": {}})]},
            "messages[0].content[0].type is 'document'",
        ),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text is missing."),
        ({"messages": [USER, said(CALL)]}, "messages[1].content: "),
        ({"messages": [USER, said(*text(""))]}, "messages[1].content: "),
        ({"messages": [user(result(content="x"))]}, "messages[0].content[0].tool_use_id is 'c1'"),
        (
            {"messages": [USER, said(CALL), user(result(content=[{"type": "image"}]))]},
            "messages[2].content[0].content[0].type is 'image'",
        ),
        ({"messages": [USER, said(CALL | {"input": 5}), USER]}, "messages[1].content[0].input"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name is 'get_weather'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools."),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"no_such_field": 1}, "no_such_field is not a field of this request."),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, frontend: FakeFrontend, fields: Any, named: str) -> None:
    assert named in refusal(http, **fields)


def test_sampling_options(http: httpx.Client, frontend: FakeFrontend) -> None:
    request = send(http, frontend, temperature=0.3, top_p=0.9, top_k=5, stop_sequences=["x"], priority=2)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.3, 0.9, 5, ("x",))
    assert request.priority == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management is"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management is"),
        (
            {"tools": [{"name": "f", "input_schema": {}, "input_examples": [{"q": "x"}]}]},
            "tools[0].input_examples",
        ),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"max_tokens": -1}, "Give a number"),
    ],
)
def test_what_would_change_the_answer_is_refused(http: httpx.Client, fields: Any, named: str) -> None:
    answer = http.post(PATH, json=ASK | fields)
    assert answer.status_code == 400
    assert named in answer.text


def test_strict_fields() -> None:
    with LiveServer(FakeFrontend(), strict_fields=True) as server:
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + PATH, json=ASK | {"diagnostics": {"x": 1}}, headers=headers)
        assert answer.status_code == 400
        assert "diagnostics has no effect" in answer.text
        answer = httpx.post(server.url + PATH, json=ASK | {"tools": [SEARCH]}, headers=headers)
        assert answer.status_code == 400
        assert "tools[0] has no effect" in answer.text
