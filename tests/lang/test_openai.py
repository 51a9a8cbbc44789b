"""Programs on OpenAI-compatible endpoints: whole messages, and nothing dropped."""

from __future__ import annotations

import json
import re
from typing import Literal

import pydantic
import pytest

import ramify as rm
from ramify.errors import InvalidRequest, NotFound, UnsupportedNode
from ramify.lang.backends.base import Backend
from tests.lang.remote import RawServer, ScriptedFrontend, answer, live_openai, raw_openai
from tests.server.fake_frontend import LiveServer


class Verdict(pydantic.BaseModel):
    score: int


@rm.function
def chat(s):
    s += rm.system("Be brief.") + rm.user("Hi")
    s += rm.assistant(rm.gen("hello", temperature=0.5, seed=3))
    s += rm.user("Score?") + rm.assistant(rm.gen("verdict", schema=Verdict))
    s += rm.user("Pick.") + rm.assistant(rm.select("pick", ["good", "bad"]))


SCRIPT = {
    r"Pick\..*assistant\n$": "bad",
    r"Score\?.*assistant\n$": '{"score": 4}',
    r"Hi.*assistant\n$": "Hello there.",
}
SCRIPT = {f"(?s){key}": value for key, value in SCRIPT.items()}


def test_a_wrong_base_url_of_our_own_server():
    with LiveServer(ScriptedFrontend(SCRIPT)) as server:
        bare = rm.OpenAI(server.frontend.info.name, base_url=server.url)
        native = rm.RuntimeEndpoint(server.url + "/v1/")
        remedies = (
            r"Did you mean /v1/\S+\? Add /v1 to base_url\.",
            r"Did you mean /get_model_info\? Leave /v1 out of base_url\.",
        )
        for backend, remedy in zip((bare, native), remedies, strict=True):
            for step in (rm.gen("x"), rm.gen("x", regex="a")):
                with pytest.raises(NotFound) as failed:
                    raise assistant(step).run(backend=backend).error().__cause__
                assert re.search(rf"on this server\. {remedy}$", str(failed.value))
            backend.close()


def test_options_of_json_reach_our_own_server():
    step = rm.gen("verdict", schema=Verdict, any_order=True, whitespace="compact", strict="validate")
    with live_openai({".": '{"score": 4}'}) as (backend, frontend):
        assistant(step).run(backend=backend).sync()
    sent = frontend.requests[0].constraint
    assert (sent.any_order, sent.whitespace, sent.strict) == (True, "compact", "validate")


def test_a_chat_on_our_own_server():
    with live_openai(SCRIPT) as (backend, frontend):
        assert isinstance(backend, Backend)
        state = chat.run(backend=backend, cache_scope="tenant")
    assert (state["hello"], state["verdict"], state["pick"]) == ("Hello there.", Verdict(score=4), "bad")
    first, second, third = frontend.requests
    assert [(turn.role, turn.content) for turn in second.chat] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello there."),
        ("user", "Score?"),
    ]
    assert (first.sampling.temperature, first.sampling.seed, first.sampling.max_tokens) == (0.5, 3, 128)
    assert [request.constraint and request.constraint.kind for request in frontend.requests] == [
        None,
        "json_schema",
        "choices",
    ]
    assert {request.scope for request in frontend.requests} == {"tenant"}
    assert third.sampling.temperature == 0.0
    assert state.messages()[-1] == {"role": "assistant", "content": "bad"}
    assert state.usage.completion_tokens > 0
    assert state.text().startswith("<|im_start|>system\nBe brief.")


def test_tools_are_called_in_json():
    class Where(pydantic.BaseModel):
        city: str

    @rm.tool
    def weather(where: Where) -> str:
        """Tell the weather."""
        return f"rain in {where.city}"

    def clock() -> str:
        return "noon"

    @rm.function
    def agent(s):
        s += rm.system("Help.", tools=[weather, clock]) + rm.user("Weather and time?")
        s.call_tools([weather, clock], "calls", max_calls=2, errors="raise")
        s += rm.assistant(rm.gen("answer"))
        s.call_tools([weather, clock], "none", required=False)

    made = [
        {"name": "weather", "arguments": {"where": {"city": "Delft"}}},
        {"name": "clock", "arguments": {}},
    ]
    script = [json.dumps({"calls": made}), "Wet.", json.dumps({"text": "No more.", "calls": []})]
    with live_openai(script) as (backend, frontend):
        state = agent.run(backend=backend)
    assert [call.result for call in state["calls"]] == ["rain in Delft", "noon"]
    assert state["calls"][0].arguments == {"where": Where(city="Delft")}
    assert (state["none"], state["none"].text) == ([], "No more.")
    first, second, _ = frontend.requests
    assert first.constraint.kind == "json_schema"
    assert "$defs/weather.Where" in first.constraint.source
    assert second.chat[-1].content == (
        "<tool_response>\nrain in Delft\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    assert '{"calls": [{"name": "example"' in first.chat[0].content


def test_streams_and_logprobs():
    step = rm.gen("hello", return_logprob=True, top_logprobs_num=1)
    with live_openai(["Hello there."]) as (backend, _):
        state = assistant(step).run(backend=backend, stream=True)
        assert list(state.text_iter("hello")) == ["Hello", " there", "."]
    rows = state.get_meta_info("hello")["output_token_logprobs"]
    assert [row[2] for row in rows][:3] == ["Hello", " there", "."]


def test_completions_take_plain_text():
    @rm.function
    def plain(s):
        s += "Hi, I am the assistant\n" + rm.gen("hello", stop="there") + "!" + rm.gen("more", regex=".*")

    script = {"assistant\n$": "Hello there.", "!$": "more"}
    with live_openai(script, is_chat_model=False) as (backend, frontend):
        assert plain.run(backend=backend).text() == "Hi, I am the assistant\nHello !more"
        assert frontend.requests[-1].constraint.kind == "regex"
        assert "has no chat template" in str(assistant(rm.gen("hello")).run(backend=backend).error())


def events(*chunks):
    lines = [b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n" for chunk in chunks]
    return answer(b"".join([*lines, b"data: [DONE]\n\n"]), kind="text/event-stream")


def delta(text, finish=None):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


FOREIGN_MODELS = answer(b'{"data": [{"id": "m", "owned_by": "someone"}]}')
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}


def foreign(*chunks, **options):
    """A client with `options`, and a foreign server that answers every chat with `chunks`."""
    return raw_openai(lambda path: FOREIGN_MODELS if path.endswith("/models") else events(*chunks), **options)


def assistant(step):
    @rm.function
    def program(s):
        s += rm.user("Q") + rm.assistant(step)

    return program


def test_the_body_on_a_foreign_endpoint():
    with foreign(delta("Hel"), delta("lo"), delta(None, "length"), USAGE) as (backend, server):
        step = rm.gen("x", max_tokens=5, stop="!", top_p=0.5, presence_penalty=1.0, logit_bias={5: 1.0})
        state = assistant(step).run(backend=backend)
        assert state["x"] == "Hello"
        assert state.usage.cached_tokens == 4
        assert state.get_meta_info("x")["finish_reason"] == {"type": "length", "length": 2}
        assert server.bodies == [
            {
                "model": "m",
                "stream": True,
                "stream_options": {"include_usage": True},
                "messages": [{"role": "user", "content": "Q"}],
                "max_tokens": 5,
                "stop": ["!"],
                "top_p": 0.5,
                "presence_penalty": 1.0,
                "logit_bias": {"5": 1.0},
            }
        ]


CLOSED_VERDICT = {**Verdict.model_json_schema(), "additionalProperties": False}


@pytest.mark.parametrize("strict", [True, False])
def test_schemas_become_response_formats(strict):
    with foreign(delta('{"score": 1}', "stop"), USAGE) as (backend, server):
        step = rm.gen("x", schema=Verdict, strict=strict)
        assert assistant(step).run(backend=backend)["x"] == Verdict(score=1)
        assert server.bodies[0]["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": CLOSED_VERDICT, "strict": strict},
        }


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: rm.gen("x", regex="a"), "constraint of kind regex"),
        (lambda: rm.gen("x", ebnf='root ::= "a"'), "constraint of kind ebnf"),
        (lambda: rm.gen("x", structural_tag={}), "constraint of kind structural_tag"),
        (lambda: rm.gen("x", schema=Literal["a", "b"]), r"OpenAI\(json_choices=True\)"),
        (lambda: rm.gen("x", schema=int), "constraint of kind regex"),
        (lambda: rm.gen("x", schema=dict, any_order=True), "no any_order"),
        (lambda: rm.gen("x", schema=dict, strict="validate"), "no strict"),
        (lambda: rm.select("x", ["a", "b"]), "constraint of kind choices"),
        (lambda: rm.select("x", ["a"], choices_method=rm.greedy_token_selection), "cannot score choices"),
        (lambda: rm.gen("x", top_k=5), "no top_k"),
        (lambda: rm.gen("x", ignore_eos=True), r"OpenAI\(extensions=True\)"),
        (lambda: rm.gen("x", max_tokens=0), "cannot score a prompt"),
        (lambda: rm.gen("x", return_logprob=True, logprob_start_len=0), "cannot score a prompt"),
        (lambda: "Sure: " + rm.gen("x"), "takes whole messages only"),
    ],
)
def test_what_a_foreign_endpoint_cannot_do_is_refused_and_not_sent(step, message):
    with foreign(delta("a", "stop")) as (backend, server):
        state = assistant(step()).run(backend=backend)
        with pytest.raises(UnsupportedNode, match=message) as refused:
            state["x"]
        assert refused.value.line.startswith(__file__)
        assert server.bodies == []


@pytest.mark.parametrize("write", [lambda s: "text", lambda s: rm.user("a") + "text"])
def test_text_outside_of_turns_is_refused(write):
    @rm.function
    def program(s):
        s += write(s)

    with pytest.raises(UnsupportedNode, match="this text is in none: 'text'"):
        raise program.run(backend=rm.OpenAI("m", base_url="http://127.0.0.1:1")).error()


def test_joining_branches_and_scopes_are_refused():
    @rm.function
    def join(s):
        s.fork(2).join("concate_and_append")

    with foreign(delta("a", "stop")) as (backend, _):
        with pytest.raises(UnsupportedNode, match="cannot be joined"):
            raise join.run(backend=backend).error()
        state = assistant(rm.gen("x")).run(backend=backend, cache_scope="tenant")
        with pytest.raises(UnsupportedNode, match="no cache scopes"):
            state["x"]


def test_choices_as_json_when_asked_for():
    with foreign(delta('{"choice"'), delta(': "b"}', "stop"), USAGE, json_choices=True) as (backend, server):
        assert assistant(rm.select("x", ["a", "b"])).run(backend=backend)["x"] == "b"
        schema = server.bodies[0]["response_format"]["json_schema"]["schema"]
        assert schema["properties"] == {"choice": {"enum": ["a", "b"]}}
    with foreign(delta("b", "stop"), json_choices=True) as (backend, _):
        state = assistant(rm.select("x", ["a", "b"])).run(backend=backend)
        with pytest.raises(rm.ProgramError, match="did not keep to the choices"):
            state["x"]


def test_extensions_when_told_that_they_are_there():
    with foreign(delta("a", "stop"), extensions=True) as (backend, server):
        assert assistant(rm.gen("x", top_k=5, schema=Literal["a", "b"])).run(backend=backend)["x"] == "a"
        assert server.bodies[0]["top_k"] == 5
        assert server.bodies[0]["guided_choice"] == ["a", "b"]


def test_an_unknown_form_of_thinking_is_refused():
    with pytest.raises(InvalidRequest, match="it must be one of effort, reasoning, template") as refused:
        rm.OpenAI("gpt", thinking="efort")
    assert (refused.value.field, refused.value.remedy) == ("thinking", "Did you mean effort?")


def test_settings_from_the_environment(monkeypatch):
    with RawServer(lambda path: events(delta("a", "stop"))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
        backend = rm.OpenAI("m")
        assert assistant(rm.gen("x")).run(backend=backend)["x"] == "a"
        backend.close()
    assert server.heads[0].startswith("POST /v1/chat/completions HTTP/1.1")
    assert "authorization: Bearer from-environment" in server.heads[0]
