"""The Responses API over a socket: input that reaches the model, and input that is refused by name."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import openai
import pytest

from ramify.messages import ChatMessage, ToolCall
from tests.server.conftest import refused
from tests.server.fake_frontend import MODEL, FakeFrontend
from tests.server.test_responses import ASK, EVERYTHING, REASONING, TIME, WEATHER
from tests.server.test_tools import render_tools

USER: Any = {"role": "user", "content": "Weather?"}
CALL: Any = {"type": "function_call", "call_id": "a", "name": "get_time", "arguments": "{}"}


def turns(client: openai.OpenAI, frontend: FakeFrontend, *items: Any, **options: Any) -> list[ChatMessage]:
    client.responses.create(model=MODEL, input=list(items), max_output_tokens=1, **options)
    return list(frontend.requests[-1].chat or ())


def test_messages(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    found = turns(
        client,
        frontend,
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c", "type": "message", "status": "completed"},
        instructions="Be brief.",
    )
    assert [(turn.role, turn.content) for turn in found] == [
        ("system", "Be brief."),
        ("system", "Be kind."),
        ("user", "aa"),
        ("assistant", "b"),
        ("user", "c"),
    ]


@pytest.mark.parametrize("how", ["as it came", "every field"])
def test_an_answer_goes_back_as_one_turn(client: openai.OpenAI, frontend: FakeFrontend, how: str) -> None:
    render_tools(frontend, "hermes")
    frontend.script = [EVERYTHING]
    answer = client.responses.create(
        **ASK, tools=[WEATHER, TIME], extra_body=REASONING, include=["message.output_text.logprobs"]
    )
    output: list[Any] = list(answer.output)
    if how == "every field":
        output = [item.model_dump(by_alias=True) for item in output]
    first, second = (item.call_id for item in answer.output if item.type == "function_call")
    results = [
        {"type": "function_call_output", "call_id": first, "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": second,
            "output": [{"type": "input_text", "text": "noon"}],
        },
    ]
    user, said, *told = turns(client, frontend, USER, *output, *results, tools=[WEATHER, TIME])
    assert user == ChatMessage(role="user", content="Weather?")
    assert (said.role, said.content, said.reasoning) == ("assistant", "Let me see …\n", "hm 日")
    assert said.tool_calls == (
        ToolCall(id=first, name="get_weather", arguments='{"city": "Bonn, \\"}\\u00e9"}'),
        ToolCall(id=second, name="get_time", arguments="{}"),
    )
    assert told == [
        ChatMessage(role="tool", content="rain", tool_call_id=first, name="get_weather"),
        ChatMessage(role="tool", content="noon", tool_call_id=second, name="get_time"),
    ]


@pytest.mark.parametrize(
    "kept",
    [{"encrypted_content"}, {"encrypted_content", "content"}, {"encrypted_content", "summary"}, {"content"}],
)
def test_reasoning_goes_back_sealed(client: openai.OpenAI, frontend: FakeFrontend, kept: set[str]) -> None:
    """Codex and LiteLLM ask for encrypted reasoning. They send it back without its text, which OpenAI never
    shows."""
    frontend.script = ["hm 日\n</think>Four."]
    answer = client.responses.create(
        **ASK, include=["reasoning.encrypted_content"], store=False, extra_body=REASONING
    )
    reasoning, message = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content[0].text == "hm 日\n"
    item = {
        "type": "reasoning",
        "id": reasoning.id,
        "summary": [{"type": "summary_text", "text": "It counts."}] if "summary" in kept else [],
        **{field: reasoning.to_dict()[field] for field in kept - {"summary"}},
    }
    _, said, _ = turns(client, frontend, USER, item, message, USER)
    assert (said.role, said.reasoning, said.content) == ("assistant", "hm 日\n", "Four.")


def test_a_summary_alone_is_the_reasoning(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    summary = [{"type": "summary_text", "text": "It "}, {"type": "summary_text", "text": "counts."}]
    _, said = turns(client, frontend, USER, {"type": "reasoning", "id": "rs", "summary": summary})
    assert said.reasoning == "It counts."


def test_answers_behind_each_other_stay_apart(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    render_tools(frontend, "hermes")
    thought: Any = {"type": "reasoning", "id": "r", "summary": [], "content": []}
    thought = thought | {"content": [{"type": "reasoning_text", "text": "hm"}]}
    found = turns(
        client,
        frontend,
        USER,
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        CALL,
        {"role": "assistant", "content": "c"},
        thought,
        thought | {"content": None},
        CALL | {"call_id": "d"},
    )
    assert [(turn.content, turn.reasoning, [call.id for call in turn.tool_calls]) for turn in found[1:]] == [
        ("a", "", []),
        ("b", "", ["a"]),
        ("c", "", []),
        ("", "hm", []),
        ("", "", ["d"]),
    ]


def test_a_model_without_tools_in_its_template(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    render_tools(frontend, "generic")
    output = {"type": "function_call_output", "call_id": "a", "output": "noon"}
    system, *rest = turns(client, frontend, USER, CALL, output, tools=[TIME], instructions="Be brief.")
    assert system.content.startswith("Be brief.\n\n")
    assert '{"name":"get_time","description":"Now.","parameters":' in system.content
    assert [turn.role for turn in rest] == ["user", "assistant", "user"]
    assert rest[2].content == "<tool_response>\nnoon\n</tool_response>"


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_no_prompt_is_truncated(http: httpx.Client, truncation: str) -> None:
    answer = http.post("/v1/responses", json=ASK | {"truncation": truncation})
    assert (answer.status_code, answer.json()["truncation"]) == (200, "disabled")
    assert answer.headers["x-ramify-ignored"] == "truncation"


def test_options_reach_the_model(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    client.responses.create(
        **ASK,
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        store=False,
        background=False,
        truncation="disabled",
        prompt_cache_key="one",
        stream_options={"include_obfuscation": False},
        stream=True,
        extra_body={"top_k": 3, "seed": 7, "stop": ["x"], "cache_salt": "mine", "max_tool_calls": None},
    ).close()
    request = frontend.requests[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (3, 7, ("x",))
    assert request.scope == "mine", "and not the prompt_cache_key, which keeps nobody apart"


def test_effort_is_told_to_the_template(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    render_tools(frontend, "hermes", variables=("enable_thinking", "reasoning_effort"))
    client.responses.create(**ASK, reasoning={"effort": "low"}, max_output_tokens=1)
    kwargs = msgspec.json.decode(frontend.requests[-1].template_kwargs)
    assert kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert frontend.requests[-1].preambles
    client.responses.create(**ASK, reasoning={"effort": "none"}, max_output_tokens=1)
    assert msgspec.json.decode(frontend.requests[-1].template_kwargs) == {"enable_thinking": False}
    assert not frontend.requests[-1].preambles


@pytest.mark.parametrize(
    ("change", "param", "remedy"),
    [
        ({"input": None}, "input", ""),
        ({"input": ""}, "input", ""),
        ({"input": []}, "input", ""),
        ({"input": 5}, "input", ""),
        ({"input": ["hi"]}, "input[0]", ""),
        ({"input": [USER, {"content": "hi"}]}, "input[1].role", ""),
        ({"input": [{"role": "user"}]}, "input[0].content", ""),
        ({"input": [{"role": "critic", "content": "hi"}]}, "input[0].role", ""),
        ({"input": [{"role": "tool", "content": "hi"}]}, "input[0].role", "function_call_output"),
        ({"input": [USER | {"phase": "other"}]}, "input[0].phase", ""),
        ({"input": [USER | {"tone": "dry"}]}, "input[0].tone", ""),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "Send the whole conversation"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "Send the whole conversation"),
        ({"previous_response_id": "resp_x", "conversation": "conv_x"}, "conversation", ""),
        ({"conversation": {"id": ""}}, "conversation.id", ""),
        ({"conversation": {"id": "conv_x", "name": "x"}}, "conversation.name", ""),
        ({"conversation": 5}, "conversation", ""),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type", "Only the server"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", ""),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
            "",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [{"type": "text", "text": "x"}]}]},
            "input[0].summary[0].type",
            "",
        ),
        ({"input": [CALL | {"call_id": None}]}, "input[0].call_id", ""),
        ({"input": [CALL | {"arguments": '{"a"'}]}, "input[0].arguments", ""),
        ({"input": [CALL | {"namespace": 5}]}, "input[0].namespace", ""),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "a"}]}, "input[1].output", ""),
        ({"instructions": 5}, "instructions", ""),
        ({"store": "yes"}, "store", ""),
        ({"truncation": "head"}, "truncation", "Leave it out"),
        ({"include": ["reasoning.encrypted_content", "x"]}, "include[1]", ""),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 2}, "top_logprobs", ""),
        ({"include": ["message.output_text.logprobs", "x"]}, "include[1]", ""),
        ({"top_logprobs": 2}, "top_logprobs", ""),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 99}, "top_logprobs", ""),
        ({"metadata": {"a": 1}}, "metadata[...]", ""),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", ""),
        ({"metadata": {"a": "x" * 513}}, "metadata", ""),
        ({"max_output_tokens": -1}, "max_output_tokens", ""),
        ({"temperature": "hot"}, "temperature", ""),
        ({"user": "a", "safety_identifier": "b"}, "safety_identifier", "give one"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "Leave it out"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", ""),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", ""),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}},
            "text.format.schema",
            "",
        ),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex", ""),
        ({"reasoning": {"effort": "none", "enabled": True}}, "reasoning.effort", ""),
        ({"reasoning": {"effort": "none", "summary": "long"}}, "reasoning.summary", "Leave it out"),
        ({"tools": [{"type": "telephone"}]}, "tools[0].type", "Offer it as a function"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", ""),
        (
            {"tools": [TIME, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "Offer a function",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", ""),
        ({"tools": [TIME, TIME]}, "tools[1].name", ""),
        ({"tools": [TIME | {"async": True}]}, "tools[0].async", ""),
        ({"tools": [TIME | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type", ""),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", ""),
        ({"tools": [TIME], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", ""),
        (
            {
                "tools": [TIME],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]},
            },
            "tool_choice.tools[0].name",
            "",
        ),
        ({"tool_choice": "required"}, "tool_choice", ""),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, change: dict[str, Any], param: str, remedy: str) -> None:
    error = refused(http.post("/v1/responses", json=ASK | change))
    assert error["param"] == param
    assert remedy in error["message"]


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.responses.create(model="gpt-9", input="hi")


def test_parallel_tool_calls_without_tools_is_taken(client: openai.OpenAI) -> None:
    """Clients of the Responses API always send the field. Chat completions refuse it without tools."""
    assert not client.responses.create(**ASK, parallel_tool_calls=False, tools=[]).parallel_tool_calls
