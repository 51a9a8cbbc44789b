"""The Responses API over a socket, through OpenAI's own client: answers and streams."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import ANY

import httpx
import openai
import pytest
from pydantic import BaseModel

from ramify.errors import Overloaded, WorkerDied
from ramify.messages import Generate, Preamble, TextChunk
from ramify.runtime.processes.detokenizer import joined
from tests.server.conftest import ONE, PARAMETERS, TWO
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer, events
from tests.server.responses_contract import check_events, check_response

WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
TIME: Any = {
    "type": "function",
    "name": "get_time",
    "description": "Now.",
    "parameters": None,
    "strict": None,
}
ASK: Any = {"model": MODEL, "input": "hello world"}
EVERYTHING = "hm 日</think>Let me see …\n" + TWO
REASONING: Any = {"reasoning": {"max_tokens": 50}}


def stream(http: httpx.Client, body: Any) -> list[Any]:
    with http.stream("POST", "/v1/responses", json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def parts(output: list[Any]) -> list[tuple[str, str, str]]:
    """(type, text, status) of each item. The text of a call is its name and arguments."""
    return [
        (
            item["type"],
            item["name"] + item["arguments"]
            if item["type"] == "function_call"
            else item["content"][0]["text"],
            item["status"],
        )
        for item in output
    ]


def test_an_answer(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    answer = client.responses.create(
        **ASK, instructions="Be brief.", max_output_tokens=40, metadata={"a": "b"}, user="me", temperature=0.5
    )
    check_response(answer.model_dump(exclude_unset=True, by_alias=True))
    assert answer.output_text.startswith("LO WORLD")
    assert answer.id == frontend.requests[-1].rid
    assert (answer.metadata, answer.user, answer.instructions) == ({"a": "b"}, "me", "Be brief.")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 1.0, 40)
    assert (answer.status, answer.incomplete_details) == (
        "incomplete",
        openai.types.responses.response.IncompleteDetails(reason="max_output_tokens"),
    )
    assert [(turn.role, turn.content) for turn in frontend.requests[-1].chat or ()] == [
        ("system", "Be brief."),
        ("user", "hello world"),
    ]
    assert frontend.requests[-1].sampling.max_tokens == 40


def test_usage_says_what_was_cached(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    options = ASK | {"max_output_tokens": 8, "extra_body": {"cache_salt": "usage"}}
    first, again = (client.responses.create(**options).usage for _ in range(2))
    assert first is not None
    assert again is not None
    assert (first.input_tokens, first.output_tokens, first.total_tokens) == (17, 8, 25)
    details = [(usage.input_tokens_details.cached_tokens, usage.input_tokens) for usage in (first, again)]
    assert details == [(0, 17), (16, 17)]
    assert again.input_tokens_details.cache_write_tokens == 1
    assert frontend.requests[-1].scope == "usage"


def test_a_stream(http: httpx.Client) -> None:
    told = stream(http, ASK | {"max_output_tokens": 8})
    assert [event["type"] for event in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 8,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    final = check_events(told)
    assert parts(final["output"]) == [("message", "LO WORLD", "incomplete")]
    assert final["usage"]["output_tokens"] == 8


def test_events_carry_their_names(http: httpx.Client) -> None:
    with http.stream(
        "POST", "/v1/responses", json=ASK | {"max_output_tokens": 1, "stream": True}
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    names, data = lines[::2], lines[1::2]
    assert [f"event: {json.loads(one.removeprefix('data: '))['type']}" for one in data] == names
    assert not any("[DONE]" in line for line in lines)


def test_reasoning_a_message_and_calls(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = [EVERYTHING] * 2
    body = ASK | {"tools": [WEATHER, TIME]} | REASONING
    final = check_events(stream(http, body))
    assert final["status"] == "completed"
    assert parts(final["output"]) == [
        ("reasoning", "hm 日", "completed"),
        ("message", "Let me see …\n", "completed"),
        ("function_call", 'get_weather{"city": "Bonn, \\"}\\u00e9"}', "completed"),
        ("function_call", "get_time{}", "completed"),
    ]
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == len("hm 日</think>".encode())
    ids = [item["id"] for item in final["output"]]
    assert len(set(ids)) == 4
    assert [name.partition("_")[0] for name in ids] == ["rs", "msg", "fc", "fc"]
    calls = [item["call_id"] for item in final["output"][2:]]
    assert calls[0] != calls[1]
    whole = http.post("/v1/responses", json=body).json()
    check_response(whole)
    assert parts(whole["output"]) == parts(final["output"])
    assert whole["usage"]["output_tokens_details"] == final["usage"]["output_tokens_details"]
    reasoning, calling = frontend.requests[-1].preambles
    assert reasoning == Preamble(start="<think>", end="</think>", max_tokens=50, apart=True, counted=True)
    assert calling.optional


def test_a_call_is_told_as_finished_when_it_is(http: httpx.Client, frontend: FakeFrontend) -> None:
    """The event for the end of a call comes at once, so that a client can run it while the model goes on."""
    frontend.script = [TWO]
    kinds = [event["type"] for event in stream(http, ASK | {"tools": [WEATHER, TIME]})]
    done, added = (
        [at for at, kind in enumerate(kinds) if kind == f"response.output_item.{what}"]
        for what in ("done", "added")
    )
    assert added[0] < done[0] < added[1] < done[1]


def test_cut_anywhere(http: httpx.Client, frontend: FakeFrontend) -> None:
    """A cut answer has each item as far as it was generated, whole and streamed alike, and nothing else."""
    body = ASK | {"tools": [WEATHER, TIME]} | REASONING
    for length in range(1, len(EVERYTHING), 3):
        frontend.script = [EVERYTHING] * 2
        final = check_events(stream(http, body | {"max_output_tokens": length}))
        whole = http.post("/v1/responses", json=body | {"max_output_tokens": length}).json()
        check_response(whole)
        assert parts(final["output"]) == parts(whole["output"])
        for answer in (final, whole):
            assert answer["status"] == "incomplete"
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert all(item["status"] == "completed" for item in answer["output"][:-1])
        assert "tool_call>" not in json.dumps(final["output"])


class Together(FakeFrontend):
    """A frontend that joins `size` chunks at a time into one."""

    size = 1

    async def generate(self, request: Generate) -> AsyncGenerator[TextChunk, None]:
        chunks = [chunk async for chunk in super().generate(request)]
        for at in range(0, len(chunks), self.size):
            yield joined(chunks[at : at + self.size])


def test_however_many_tokens_come_at_once() -> None:
    body = ASK | REASONING | {"tools": [WEATHER, TIME], "include": ["message.output_text.logprobs"]}
    found = []
    with LiveServer(Together()) as server, httpx.Client(base_url=server.url) as http:
        for size in (1, 2, 7, 50, 1000):
            server.frontend.size = size  # type: ignore[attr-defined]
            server.frontend.script = [EVERYTHING]
            found.append(check_events(stream(http, body)))
    one_by_one = found[0]
    for final in found[1:]:
        assert parts(final["output"]) == parts(one_by_one["output"])
        assert final["output"][1]["content"] == one_by_one["output"][1]["content"]
        assert final["usage"] == one_by_one["usage"] | {"input_tokens_details": ANY, "ramify": ANY}


def test_sealed_reasoning_comes_with_the_closed_item(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = ["hm</think>Four."] * 2
    sent = stream(http, ASK | REASONING | {"include": ["reasoning.encrypted_content"]})
    final = check_events(sent)
    item = final["output"][0]
    assert item["encrypted_content"].startswith("ramify1.")
    assert "hm" not in item["encrypted_content"]
    (done,) = [
        event["item"]
        for event in sent
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "reasoning"
    ]
    assert done == item
    plain = check_events(stream(http, ASK | REASONING))
    assert "encrypted_content" not in plain["output"][0]


def test_reasoning_that_is_not_shown_is_counted(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = [EVERYTHING]
    answer = http.post("/v1/responses", json=ASK | {"reasoning": {"max_tokens": 9, "exclude": True}}).json()
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("hm 日</think>".encode())


def test_an_empty_answer_is_an_empty_message(
    client: openai.OpenAI, http: httpx.Client, frontend: FakeFrontend
) -> None:
    frontend.script = ["", ""]
    assert parts(check_events(stream(http, ASK))["output"]) == [("message", "", "completed")]
    assert client.responses.create(**ASK).output_text == ""


# --- constraints --------------------------------------------------------------------------------------


class Pair(BaseModel):
    zeta: int
    alpha: str


def test_parse(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    answer = client.responses.parse(**ASK, text_format=Pair)
    assert answer.output_parsed == Pair(zeta=7, alpha="s")
    assert answer.status == "completed"
    wanted = frontend.requests[-1].constraint
    assert wanted is not None
    assert (wanted.kind, wanted.strict) == ("json_schema", True)
    assert json.loads(wanted.source)["required"] == ["zeta", "alpha"]


def test_the_clients_own_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASK, text_format=Pair) as told:
        text = "".join(event.delta for event in told if event.type == "response.output_text.delta")
        assert told.get_final_response().output_parsed == Pair(zeta=7, alpha="s")
    assert Pair.model_validate_json(text) == Pair(zeta=7, alpha="s")


def test_parse_calls(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    class Weather(BaseModel):
        city: str

    frontend.script = [ONE] * 2
    tool: Any = openai.pydantic_function_tool(Weather, name="get_weather")["function"]
    tools: Any = [{"type": "function", **tool}]
    answer: Any = client.responses.parse(**ASK, tools=tools)
    assert answer.output[0].parsed_arguments == {"city": 'Bonn, "}é'}
    with client.responses.stream(**ASK, tools=tools) as told:
        final: Any = told.get_final_response()
    assert final.output[0].parsed_arguments == {"city": 'Bonn, "}é'}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "json_object", "{}"),
        ({"text": {"format": {"type": "regex", "regex": "a+"}}}, "regex", "<regex>"),
        ({"text": {"format": {"type": "choice", "choice": ["yes", "no"]}}}, "choices", "yes"),
        ({"guided_choice": ["yes", "no"]}, "choices", "yes"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "<regex>"),
    ],
)
def test_formats(http: httpx.Client, frontend: FakeFrontend, fields: Any, kind: str, text: str) -> None:
    answer = http.post("/v1/responses", json=ASK | fields).json()
    assert parts(answer["output"]) == [("message", text, "completed")]
    assert answer["text"] == fields.get("text", {"format": {"type": "text"}})
    wanted = frontend.requests[-1].constraint
    assert wanted is not None
    assert wanted.kind == kind


def test_what_was_only_checked_is_told(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"zeta": {"type": "integer"}}, "maxProperties": 0}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": "validate"}
    body = ASK | {"text": {"format": form}}
    (violation,) = http.post("/v1/responses", json=body).json()["ramify"]["violations"]
    assert violation["schema"] == "/maxProperties"
    assert stream(http, body)[-1]["response"]["ramify"]["violations"] == [violation]


# --- log-probabilities --------------------------------------------------------------------------------


def test_logprobs(client: openai.OpenAI) -> None:
    answer: Any = client.responses.create(
        **ASK, max_output_tokens=2, include=["message.output_text.logprobs"], top_logprobs=2
    )
    check_response(answer.model_dump(exclude_unset=True, by_alias=True))
    first, second = answer.output[0].content[0].logprobs
    assert (first.token, second.token) == ("L", "O")
    assert (first.logprob, first.bytes) == (-(ord("L") % 8) - 0.5, [ord("L")])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.25), ("b", -0.5)]
    assert answer.top_logprobs == 2


def test_logprobs_are_those_of_the_message(http: httpx.Client, frontend: FakeFrontend) -> None:
    """Log-probabilities cover only the message: no reasoning, no call, and no beginning of a call's tag."""
    frontend.script = [EVERYTHING] * 2 + ["It rains <tool_cal"]
    body = ASK | REASONING | {"tools": [WEATHER, TIME], "include": ["message.output_text.logprobs"]}
    final = check_events(stream(http, body))
    content = final["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in content["logprobs"]) == (
        r"Let me see bytes:\xe2bytes:\x80bytes:\xa6" + "\n"
    )
    assert [entry["bytes"] for entry in content["logprobs"][-4:]] == [[0xE2], [0x80], [0xA6], [ord("\n")]]
    assert http.post("/v1/responses", json=body).json()["output"][1]["content"][0] == content
    del body["reasoning"]
    content = check_events(stream(http, body))["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in content["logprobs"]) == content["text"] == "It rains <tool_cal"


# --- failures -----------------------------------------------------------------------------------------


def test_an_error_in_a_stream_fails_the_response(
    client: openai.OpenAI, http: httpx.Client, frontend: FakeFrontend
) -> None:
    frontend.fail_after = (2, WorkerDied("The scheduler died.", remedy="Send it again."))
    *_, last = stream(http, ASK)
    assert last["type"] == "response.failed"
    check_response(last["response"])
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "The scheduler died. Send it again.",
        "type": "server_error",
        "param": None,
    }
    assert parts(last["response"]["output"]) == [("message", "LO", "incomplete")]
    *_, event = client.responses.create(**ASK, stream=True)
    assert event.type == "response.failed"


def test_a_bug_in_a_stream_fails_the_response(
    http: httpx.Client, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.fail_after = (1, KeyError("secret detail"))
    *_, last = stream(http, ASK)
    assert last["type"] == "response.failed"
    assert "secret detail" not in json.dumps(last)
    assert "secret detail" in caplog.text


def test_an_error_after_tokens_has_its_status_where_nothing_was_sent(
    http: httpx.Client, frontend: FakeFrontend
) -> None:
    frontend.fail_after = (2, Overloaded("Full."))
    response = http.post("/v1/responses", json=ASK)
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_an_abort_fails_the_stream(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.hold_after = 1
    with http.stream("POST", "/v1/responses", json=ASK | {"stream": True}) as response:
        assert frontend.held.wait(60)
        http.post("/abort_request", json={"abort_all": True})
        *_, last = events(response)
    assert last["response"]["error"]["message"] == "The request was aborted."
    frontend.hold_after = None
