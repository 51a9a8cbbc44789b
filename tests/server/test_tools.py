"""Tool calling over a socket: the requests to the model, and its calls in whole answers and streams."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ramify.errors import InvalidConstraint
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.engine.load import load_grammar
from ramify.messages import ChatMessage, Enforcement, Generate, Preamble, TextChunk, Unenforced
from ramify.runtime.server.openai.formatters import ChatFormatter
from ramify.runtime.server.openai.turn_parser import TurnFormat
from ramify.tool_calls.formats import FORMATS, GENERIC
from ramify.tool_calls.grammar import Tool, calls_after_trigger, naming_tools, tool_at
from tests.grammar.vocabularies import tiny
from tests.server.conftest import ONE, PARAMETERS, TWO, refused, speak
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer, events
from tests.server.responses_contract import check_response

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": PARAMETERS,
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
USER: Any = [{"role": "user", "content": "Weather?"}]
ASK: Any = {"model": MODEL, "messages": USER, "tools": [WEATHER, TIME]}


def render_tools(frontend: FakeFrontend, name: str, **fields: Any) -> None:
    """Give the frontend's model a chat template with the tool format `name`."""
    speak(frontend, prefix={">system": "", ">user": ""}, tool_format=name, **fields)


def tag_of(frontend: FakeFrontend) -> Any:
    wanted = frontend.requests[-1].constraint
    assert wanted is not None
    assert wanted.kind == "structural_tag"
    return json.loads(wanted.source)["format"]


def test_calls_in_one_piece(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = ["Let me see.\n" + TWO]
    answer = client.chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    first, second = choice.message.tool_calls or []
    assert (first.type, second.type) == ("function", "function")
    assert first.id.startswith("call_")
    assert first.id != second.id
    assert first.function.name == "get_weather"
    assert json.loads(first.function.arguments) == {"city": 'Bonn, "}é'}
    assert (second.function.name, second.function.arguments) == ("get_time", "{}")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(("Let me see.\n" + TWO).encode())


def test_content_is_null_beside_calls_alone(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = [ONE]
    message = client.chat.completions.create(**ASK).choices[0].message
    assert message.content is None
    assert len(message.tool_calls or []) == 1


def test_no_call_is_plain_content(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = ["It rains <tool_cal"]
    choice = client.chat.completions.create(**ASK).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == "It rains <tool_cal"
    assert choice.message.tool_calls is None


def test_calls_in_a_stream(http: httpx.Client, frontend: FakeFrontend) -> None:
    """Each call begins with id, index and name; pieces of its arguments follow."""
    frontend.script = ["Hm. " + TWO]
    with http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as response:
        *chunks, done = events(response)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hm. "
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in starts] == [
        (0, "function", {"arguments": "", "name": "get_weather"}),
        (1, "function", {"arguments": "", "name": "get_time"}),
    ]
    pieces = [call for call in calls if "id" not in call]
    assert all(
        call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in pieces
    )
    joined = ["".join(c["function"]["arguments"] for c in pieces if c["index"] == i) for i in (0, 1)]
    assert joined == ['{"city": "Bonn, \\"}\\u00e9"}', "{}"]
    assert len(pieces) > 10, "as they come"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "tool_calls"
    ]


def test_the_clients_own_accumulation(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = [TWO]
    with client.chat.completions.stream(**ASK) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
        ("get_weather", '{"city": "Bonn, \\"}\\u00e9"}'),
        ("get_time", "{}"),
    ]


def test_several_choices(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = [ONE, "no call", TWO]
    stream = client.chat.completions.create(**ASK, n=3, stream=True)
    names: dict[int, list[str]] = {0: [], 1: [], 2: []}
    finishes = {}
    for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(names[choice.index])
                    assert call.function is not None
                    names[choice.index].append(call.function.name or "")
            finishes[choice.index] = choice.finish_reason
    assert sorted(names.values()) == [[], ["get_weather"], ["get_weather", "get_time"]]
    assert sorted(map(str, finishes.values())) == ["stop", "tool_calls", "tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_inside_a_call_is_a_length(client: openai.OpenAI, frontend: FakeFrontend, stream: bool) -> None:
    """An answer that max_tokens cuts has the names and arguments so far, and nothing else."""
    whole = '{"city": "Bonn, \\"}\\u00e9"}'
    for length in range(1, len(ONE)):
        frontend.script = [ONE]
        if stream:
            chunks = list(client.chat.completions.create(**ASK, max_tokens=length, stream=True))
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            arguments = "".join(c.function.arguments or "" for c in calls if c.function)
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            finish = chunks[-1].choices[0].finish_reason
        else:
            choice = client.chat.completions.create(**ASK, max_tokens=length).choices[0]
            arguments = "".join(call.function.arguments for call in choice.message.tool_calls or [])
            content, finish = choice.message.content or "", choice.finish_reason
        assert finish == "length"
        assert whole.startswith(arguments)
        assert "<tool_call>".startswith(content)


# --- what is asked of the model -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.answer])
def test_auto_is_free_text_up_to_the_trigger(
    client: openai.OpenAI, frontend: FakeFrontend, name: str
) -> None:
    render_tools(frontend, name)
    form = FORMATS[name]
    before, between, after = form.call
    frontend.script = [f"Well. {form.begin}{before}get_time{between}{{}}{after}{form.end}"]
    choice = client.chat.completions.create(**ASK).choices[0]
    assert choice.message.content == "Well. "
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_time", "{}")
    assert len(call.id) == len(form.id_prefix) + form.id_length
    request = frontend.requests[-1]
    assert request.preambles == (Preamble(end=form.trigger, optional=True),)
    opening, calls, *rest = tag_of(frontend)["elements"]
    assert form.trigger + opening["value"] == form.opening
    assert [tag["begin"] for tag in calls["elements"]] == ["get_weather" + between, "get_time" + between]
    assert calls["elements"][0]["content"]["json_schema"] == WEATHER["function"]["parameters"]
    assert any(part["type"] == "star" for part in rest) == (form.separator is not None)
    if form.native:
        assert json.loads(request.tools)[0]["function"]["parameters"] == WEATHER["function"]["parameters"]
        assert request.chat == (ChatMessage(role="user", content="Weather?"),)
    else:
        assert request.tools == ""
        assert request.chat is not None
        assert "The weather of a city." in request.chat[0].content


def asked(endpoint: str, **fields: Any) -> dict[str, Any]:
    """A body with the tools WEATHER and TIME. `tool_choice` has the form of the Responses API."""
    if endpoint == "/v1/responses":
        tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
        return {"model": MODEL, "input": "Weather?", "tools": tools, **fields}
    match fields.get("tool_choice"):
        case {"type": "function", "name": name}:
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": tools}:
            inner = [{"type": "function", "function": {"name": tool["name"]}} for tool in tools]
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": inner}}
    return ASK | fields


ENDPOINTS = ("/v1/chat/completions", "/v1/responses")
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("change", "names", "optional", "parallel"),
    [
        ({}, ["get_weather", "get_time"], True, True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ["get_weather", "get_time"], True, False),
        ({"tool_choice": "required"}, ["get_weather", "get_time"], False, True),
        ({"tool_choice": {"type": "function", "name": "get_time"}}, ["get_time"], False, False),
        ({"tool_choice": ALLOWED}, ["get_time"], False, True),
    ],
)
def test_what_may_be_called(
    http: httpx.Client,
    frontend: FakeFrontend,
    endpoint: str,
    change: dict[str, Any],
    names: list[str],
    optional: bool,
    parallel: bool,
) -> None:
    frontend.script = [ONE]
    answer = http.post(endpoint, json=asked(endpoint, **change)).raise_for_status().json()
    if endpoint == "/v1/responses":
        check_response(answer)
        assert answer["parallel_tool_calls"] == change.get("parallel_tool_calls", True)
    _, calls, *rest = tag_of(frontend)["elements"]
    assert [tag["begin"].partition('"')[0] for tag in calls["elements"]] == names
    schemas = {"get_weather": PARAMETERS, "get_time": NO_PARAMETERS}
    assert [tag["content"]["json_schema"] for tag in calls["elements"]] == [schemas[name] for name in names]
    assert bool(rest) == parallel
    (preamble,) = frontend.requests[-1].preambles
    assert (preamble.optional, preamble.max_tokens) == (optional, None if optional else 0)


def test_none_shows_no_tools(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = [ONE]
    choice = client.chat.completions.create(**ASK, tool_choice="none").choices[0]
    assert choice.message.content == ONE, "text, whatever it looks like"
    assert choice.finish_reason == "stop"
    request = frontend.requests[-1]
    assert (request.tools, request.preambles, request.constraint) == ("", (), None)
    assert request.chat == (ChatMessage(role="user", content="Weather?"),)


def test_a_schema_without_a_type_is_made_an_object(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"$ref": "#/$defs/a", "$defs": {"a": {"maximum": 1.50}}}},
    }
    client.chat.completions.create(model=MODEL, messages=USER, tools=[tool], max_tokens=1)
    wanted = frontend.requests[-1].constraint
    assert wanted is not None
    assert '{"type":"object","$ref":"#/$defs/a",' in wanted.source


def test_results_go_back(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    """A client sends back the assistant's message as received, and the results of its calls."""
    render_tools(frontend, "generic")
    frontend.script = [TWO]
    message = client.chat.completions.create(**ASK).choices[0].message
    first, second = message.tool_calls or []
    results: Any = [
        message.model_dump(exclude_none=True) | {"reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": first.id, "content": "rain"},
        {"role": "tool", "tool_call_id": second.id, "content": [{"type": "text", "text": "noon"}]},
    ]
    client.chat.completions.create(**ASK | {"messages": USER + results, "max_tokens": 1})
    plain = frontend.requests[-1].chat or ()
    assert [turn.role for turn in plain] == ["system", "user", "assistant", "user"]
    assert (plain[2].content, plain[2].reasoning, plain[2].tool_calls) == (TWO, "hm", ())
    assert plain[3].content == (
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    render_tools(frontend, "hermes")
    client.chat.completions.create(**ASK | {"messages": USER + results, "max_tokens": 1})
    native = frontend.requests[-1].chat or ()
    assert [turn.role for turn in native] == ["user", "assistant", "tool", "tool"]
    assert [call.name for call in native[1].tool_calls] == ["get_weather", "get_time"]
    assert [(turn.tool_call_id, turn.name) for turn in native[2:]] == [
        (first.id, "get_weather"),
        (second.id, "get_time"),
    ]


def test_the_generic_description_joins_the_system_turn(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    render_tools(frontend, "generic")
    system: Any = [{"role": "system", "content": "Be brief."}]
    client.chat.completions.create(**ASK | {"messages": system + USER, "max_tokens": 1})
    first, second = frontend.requests[-1].chat or ()
    assert first.content.startswith("Be brief.\n\n")
    assert '{"name":"get_weather","description":"The weather of a city.","parameters":{' in first.content
    assert second.content == "Weather?"


def test_content_or_calls(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    """With tools and a response_format, the answer is a call, or content in that format."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    frontend.script = ['{"a": 1}', ONE]
    choice = client.chat.completions.create(**ASK, response_format=form).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == ('{"a": 1}', None)
    calls, content = tag_of(frontend)["elements"]
    assert content == {"type": "json_schema", "json_schema": schema}
    assert calls["elements"][0]["value"] == '<tool_call>\n{"name": "'
    assert frontend.requests[-1].preambles == ()
    assert client.chat.completions.create(**ASK, response_format=form).choices[0].message.tool_calls


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name"),
        ({"tools": [TIME] * 129}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "code": "x"}}]}, "tools[0].function.code"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.custom.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a": '}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"response_format": {"type": "lark", "lark": 'start: "a"'}}, "response_format.lark"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert refused(http.post("/v1/chat/completions", json=ASK | change))["param"] == param


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_schema_names_its_tool(
    http: httpx.Client, frontend: FakeFrontend, endpoint: str, stream: bool
) -> None:
    frontend.fail_first = InvalidConstraint(
        "The keyword not is not supported.",
        field="structural_tag",
        pointer="/format/elements/1/elements/1/content/json_schema/properties/a/not",
        remedy="Say what is allowed instead.",
    )
    response = http.post(endpoint, json=asked(endpoint, stream=stream))
    assert response.status_code == 400
    error = response.json()["error"]
    inside = ".function" if "chat" in endpoint else ""
    assert (error["param"], error["pointer"]) == (f"tools[1]{inside}.parameters", "/properties/a/not")
    assert error["remedy"] == "Say what is allowed instead."


def test_a_control_token_cannot_be_one_of_two_alternatives(
    http: httpx.Client, frontend: FakeFrontend
) -> None:
    render_tools(frontend, "mistral")
    wanted = {"response_format": {"type": "json_object"}}
    response = http.post("/v1/chat/completions", json=ASK | wanted)
    assert response.json()["error"]["param"] == "response_format.type"
    frontend.script = ['[TOOL_CALLS][{"name": "get_time", "arguments": {}}]']
    response = http.post("/v1/chat/completions", json=ASK | wanted | {"tool_choice": "required"})
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_time"


def test_a_tool_without_a_type_is_a_function(http: httpx.Client, frontend: FakeFrontend) -> None:
    function = {"name": "get_time", "description": "The time."}
    chosen: Any = {"function": {"name": "get_time"}}
    made = []
    for tool, choice in ((TIME, {"type": "function", **chosen}), ({"type": None, **chosen}, chosen)):
        tool = {**tool, "function": function}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
        response = http.post("/v1/chat/completions", json=body | {"tool_choice": choice, "max_tokens": 1})
        assert response.status_code == 200, response.text
        made.append(msgspec.structs.replace(frontend.requests[-1], rid="", flow=""))
    assert made[0] == made[1]


@pytest.mark.parametrize("arguments", ["", " ", "{}", None])
def test_a_call_without_arguments_in_a_history(
    http: httpx.Client, frontend: FakeFrontend, arguments: str | None
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]
    response = http.post("/v1/responses", json={"model": MODEL, "input": [messages[0], *items]})
    assert response.status_code == 200, response.text


# --- strict ---

WORD = {
    "type": "object",
    "properties": {"word": {"type": "string", "pattern": r"\bfoo\b"}},
    "required": ["word"],
}
LEFT_OUT = Enforcement(
    unenforced=(
        Unenforced(
            schema="/format/elements/1/elements/1/content/json_schema/properties/word/pattern", message="No."
        ),
    )
)


def named(strict: bool | None, parameters: Any = WORD) -> dict[str, Any]:
    return {"name": "say", "parameters": parameters} | ({} if strict is None else {"strict": strict})


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("strict", [None, False, True])
def test_strict_is_what_the_apis_make_of_it(
    http: httpx.Client, frontend: FakeFrontend, endpoint: str, strict: bool | None
) -> None:
    chat = "chat" in endpoint
    tool = {"type": "function"} | ({"function": named(strict)} if chat else named(strict))
    frontend.script = [ONE]
    assert http.post(endpoint, json=asked(endpoint) | {"tools": [tool]}).status_code == 200
    (form,) = tag_of(frontend)["elements"][1]["elements"]
    assert form["content"].get("strict", True) == (not chat if strict is None else strict)


class Telling(FakeFrontend):
    """A frontend whose first chunk reports keywords that the grammar does not enforce."""

    async def generate(self, request: Generate) -> AsyncGenerator[TextChunk, None]:
        told: Enforcement | None = LEFT_OUT
        async for chunk in super().generate(request):
            yield msgspec.structs.replace(chunk, enforcement=told)
            told = None


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_out_is_told_with_the_tool(stream: bool) -> None:
    tools = [WEATHER, {"type": "function", "function": named(False)}]
    with LiveServer(Telling()) as server:
        server.frontend.script = [ONE]
        response = httpx.post(server.url + ENDPOINTS[0], json=ASK | {"tools": tools, "stream": stream})
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response) if chunk != "[DONE]"]
    else:
        choices = response.json()["choices"]
    found = [choice["ramify"] for choice in choices if "ramify" in choice]
    told = {"schema": "/properties/word/pattern", "message": "No.", "tool": "say"}
    assert found == [{"unenforced": [told]}]


def test_what_is_left_out_is_told_in_the_first_event() -> None:
    """The enforcement is reported once, even if the text of one chunk becomes several events."""
    form = TurnFormat(reasoning_end=None, channels=False, show_reasoning=True, tools=FORMATS["hermes"])
    text = '<tool_call>\n{"name": "say", "arguments": {"word'
    chunk = TextChunk(rid="r", text=text, enforcement=LEFT_OUT)
    first, *others = ChatFormatter({}, False, form).stream_choices(0, chunk)
    assert others
    assert first["delta"]["role"] == "assistant"
    assert first["ramify"]
    assert not any("ramify" in one for one in others)


def test_best_effort_leaves_out_what_cannot_be_enforced() -> None:
    tools = [
        Tool(name="other", parameters='{"type":"object","properties":{},"additionalProperties":false}'),
        Tool(name="say", parameters=json.dumps(WORD), strict=False),
    ]
    compiled = compile_constraint(calls_after_trigger(GENERIC, tools, parallel=True), tiny())
    (left,) = naming_tools(compiled.enforcement, tools).unenforced
    assert (left.tool, left.schema) == ("say", "/properties/word/pattern")
    assert "word boundary" in left.message
    held = load_grammar(*compiled, tiny()).matcher()
    opening = GENERIC.opening.removeprefix(GENERIC.trigger)
    assert held.accept_bytes((opening + 'say", "arguments": {"word": "bar"}}\n</tool_call>').encode())
    assert held.complete
    strict = [tools[0], dataclasses.replace(tools[1], strict=True)]
    with pytest.raises(InvalidConstraint) as error:
        compile_constraint(calls_after_trigger(GENERIC, strict, parallel=False), tiny())
    assert tool_at(error.value.pointer, strict) == (1, "/properties/word/pattern")
