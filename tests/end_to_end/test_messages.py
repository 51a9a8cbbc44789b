"""The Messages API on the default model, through Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.end_to_end.served import serve
from tests.server.messages_contract import check_message

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(240)]

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
USER: Any = {"role": "user", "content": "What is the weather in Paris, in celsius?"}
ASK: Any = {"model": "default", "max_tokens": 80, "messages": [USER], "temperature": 0}
CITY: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer"}},
    "required": ["name", "inhabitants"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def claude() -> Iterator[anthropic.Anthropic]:
    with (
        serve("--dtype", "float32") as served,
        anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def prompt_tokens(usage: Any) -> int:
    created, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    return int(usage.input_tokens + created + read)


def ask(claude: anthropic.Anthropic, **fields: Any) -> Any:
    """The message for `fields`, which is the same whole and streamed, and counted as it is used."""
    body = ASK | fields
    # The client's types lack the sampling options, which are in the extra body.
    body["extra_body"] = {"temperature": body.pop("temperature")}
    whole = claude.messages.create(**body)
    check_message(whole.to_dict())
    with claude.messages.stream(**body) as stream:
        for event in stream:
            if event.type == "message_start":
                begun = event.message.usage
        streamed = stream.get_final_message()
    told = [[block.to_dict() | {"id": ""} for block in one.content] for one in (whole, streamed)]
    assert told[0] == told[1]
    counted = claude.messages.count_tokens(
        **{
            name: body[name]
            for name in ("model", "messages", "system", "tools", "tool_choice")
            if name in body
        }
    )
    for usage in (whole.usage, begun, streamed.usage):
        assert prompt_tokens(usage) == counted.input_tokens
    assert streamed.usage.cache_read_input_tokens >= counted.input_tokens - 4
    return whole


def test_a_call_and_its_result(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, tools=[WEATHER], tool_choice={"type": "any"}, system="Use tools.")
    *_, call = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input["unit"] in ("celsius", "fahrenheit")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    turns = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    again = ask(claude, messages=turns, tools=[WEATHER], system="Use tools.")
    assert again.stop_reason in ("end_turn", "max_tokens", "tool_use")
    assert again.usage.cache_read_input_tokens >= 0.95 * prompt_tokens(answer.usage)


def test_a_schema(claude: anthropic.Anthropic) -> None:
    form = {"type": "json_schema", "schema": CITY}
    answer = ask(claude, output_config={"format": form})
    city = json.loads(answer.content[0].text)
    assert isinstance(city["name"], str)
    assert isinstance(city["inhabitants"], int)


def test_a_prefilled_answer_goes_on_exactly(claude: anthropic.Anthropic) -> None:
    whole = ask(claude).content[0].text
    for cut in (4, 9, 10):  # within a token, before a space, and behind one
        turns = [USER, {"role": "assistant", "content": whole[:cut]}]
        answer = whole[:cut] + ask(claude, messages=turns).content[0].text
        assert answer[:60] == whole[:60]


def test_a_limit_beyond_the_context_is_cut(claude: anthropic.Anthropic) -> None:
    """Claude Code asks for 32,000 tokens of any model."""
    body = ASK | {"max_tokens": 32000, "stop_sequences": ["e"], "extra_body": {"temperature": 0}}
    del body["temperature"]
    with claude.messages.stream(**body) as stream:
        answer = stream.get_final_message()
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "e")
    assert claude.messages.create(model="default", max_tokens=0, messages=[USER]).content == []


def test_a_prompt_over_the_context(claude: anthropic.Anthropic) -> None:
    text = "The tram stops at the old bridge, and nobody gets off. " * 700
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8191 maximum"):
        claude.messages.create(model="default", max_tokens=5, messages=[{"role": "user", "content": text}])
