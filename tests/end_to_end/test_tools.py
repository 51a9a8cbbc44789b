"""Tools, reasoning and every kind of constraint on the default model, through OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.end_to_end.served import serve
from tests.server.responses_contract import check_events, check_response

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(240)]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "description": "The time of day."}}
LOOKING_AHEAD: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "(?=x)"}}}},
}
USER: Any = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
ASK: Any = {"model": "default", "messages": USER, "temperature": 0, "max_tokens": 80}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serve("--dtype", "float32") as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    tools = [WEATHER, TIME]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(**ASK, tools=tools, tool_choice=named)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "celsius"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 60
    messages = [
        *USER,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"},
    ]
    # The prompt with the call and its result goes on from the one before: its pages are found again.
    after = client.chat.completions.create(**ASK | {"messages": messages, "max_tokens": 8}, tools=tools)
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) >= answer.usage.prompt_tokens - 8


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: Annotated[int, Field(ge=-50, le=50)]


def test_the_responses_api(client: openai.OpenAI) -> None:
    """A call, its result, and an answer that is an instance of a model; whole and streamed."""
    ask: Any = {"model": "default", "temperature": 0, "max_output_tokens": 80}
    tools: Any = [{"type": "function", **WEATHER["function"]}]
    conversation: list[Any] = list(USER)
    calling = client.responses.create(
        **ask, input=conversation, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    check_response(calling.model_dump(exclude_unset=True, by_alias=True))
    (call,) = calling.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris", "unit": "celsius"}
    conversation += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    answer = client.responses.parse(
        **ask, input=conversation, tools=tools, tool_choice="none", text_format=Weather
    )
    assert answer.status == "completed"
    assert answer.output_parsed is not None
    form: Any = {"type": "json_schema", "name": "weather", "schema": Weather.model_json_schema()}
    stream = client.responses.create(
        **ask,
        input=conversation,
        text={"format": form},
        stream=True,
        extra_body={"reasoning": {"max_tokens": 6}},
    )
    final = check_events([event.model_dump(exclude_unset=True, by_alias=True) for event in stream])
    thought, said = final["output"]
    assert thought["content"][0]["text"]
    Weather.model_validate_json(said["content"][0]["text"])
    # Up to its limit, and the end mark: </ think >
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == 6 + 3
    again = client.responses.create(**ask | {"max_output_tokens": 1}, input=conversation)
    assert again.usage is not None
    # The last token of a prompt is always computed.
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    options: Any = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**ASK, **options).choices[0].message.tool_calls or []
    with client.chat.completions.stream(**ASK, **options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    streamed = final.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in streamed] == [
        (c.function.name, c.function.arguments) for c in whole
    ]


@pytest.mark.parametrize("budget", [28, 31, 34, 40, 60])
def test_calls_are_whole_within_any_budget(client: openai.OpenAI, budget: int) -> None:
    """Sampled hot, several at a time: whatever comes out before the budget ends is made of whole calls."""
    hot: Any = ASK | {"temperature": 1.5, "max_tokens": budget, "seed": budget}
    answer = client.chat.completions.create(**hot, tools=[WEATHER, TIME], tool_choice="required", n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_weather":
                jsonschema.validate(arguments, WEATHER["function"]["parameters"])
            else:
                assert (call.function.name, arguments) == ("get_time", {})


def test_a_budget_that_no_call_fits_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**ASK | {"max_tokens": 10}, tools=[WEATHER], tool_choice="required")
    assert error.value.param == "max_tokens"


def test_auto_may_answer_in_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**ASK, tools=[WEATHER]).choices[0]
    assert choice.finish_reason in ("stop", "length", "tool_calls")
    assert bool(choice.message.tool_calls) == (choice.finish_reason == "tool_calls")
    assert "<tool_call>" not in (choice.message.content or "")


@pytest.mark.parametrize("own", [{"max_tokens": 0}, {"max_tokens": 5}, {"end": "</think>"}])
def test_reasoning_then_json(client: openai.OpenAI, own: dict[str, Any]) -> None:
    """Reasoning stops at its limit, and leaves room for the answer where it has none."""
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    answer = client.chat.completions.create(
        **ASK | {"max_tokens": 40},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        extra_body={"reasoning": own},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), schema)
    reasoning = choice.message.reasoning_content  # type: ignore[attr-defined]
    assert bool(reasoning) == (own != {"max_tokens": 0})
    assert "</think>" not in reasoning


def test_reasoning_then_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**ASK, extra_body={"reasoning": {"max_tokens": 6}}).choices[0]
    assert choice.message.reasoning_content  # type: ignore[attr-defined]
    assert choice.message.content


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "regex", "regex": "[a-f]{2}-[0-9]"}, "[a-f]{2}-[0-9]"),
        ({"type": "ebnf", "ebnf": 'root ::= "<" root ">" | [0-9]{2}'}, r"<*\d\d>*"),
        ({"type": "lark", "lark": 'start: "It is " /[0-9]{2}/ " degrees."'}, r"It is \d\d degrees\."),
        ({"type": "choice", "choice": ["sun", "rain"]}, "sun|rain"),
        (
            {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<n>",
                    "content": {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 10}},
                    "end": "</n>",
                },
            },
            r"<n>\d\d+</n>",
        ),
    ],
    ids=lambda form: form.get("type") if isinstance(form, dict) else None,
)
def test_every_kind_of_format(client: openai.OpenAI, form: Any, pattern: str) -> None:

    choice = client.chat.completions.create(**ASK | {"max_tokens": 24}, response_format=form).choices[0]
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, choice.message.content or "")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"tools": [LOOKING_AHEAD | {"function": LOOKING_AHEAD["function"] | {"strict": True}}]},
            "tools[0].function.parameters",
            "lookahead",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
            "response_format.json_schema.schema",
            "strin",
        ),
        (
            {"response_format": {"type": "lark", "lark": 'start: "a'}},
            "response_format.lark",
            "line 1, column",
        ),
        ({"ebnf": 'root ::= "a" |\n  b'}, "ebnf", "line 2, column 3"),
        ({"guided_regex": r"(a)\1"}, "guided_regex", "backreference"),
    ],
)
def test_what_is_refused_names_field_and_place(
    client: openai.OpenAI, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**ASK, extra_body=fields)
    assert error.value.param == param
    assert said in str(error.value)
