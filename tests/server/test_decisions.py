"""POST /v1/decisions, as the openai package calls it."""

from __future__ import annotations

import datetime
import json
import logging
import math
import threading
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ramify.decisions import answers
from ramify.decisions.answers import Answer
from ramify.errors import InvalidRequest
from ramify.messages import ChatMessage
from ramify.questions import MAX_OPTIONS, MAX_QUESTIONS, Calibration, Option, Temperature
from ramify.runtime.server.decisions import ask as decisions_ask
from ramify.runtime.server.decisions.state import MAX_JSON_BYTES, MAX_JSON_LEVELS, MAX_JSON_VALUES
from tests.server.conftest import refused, speak
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

URGENT: Any = {"type": "predicate", "name": "urgent", "instructions": "Is it urgent?"}
TEAM: Any = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "billing", "description": "money"}, {"value": "returns"}, {"value": True}],
}
ANGER: Any = {
    "type": "score",
    "name": "anger",
    "instructions": "How angry?",
    "levels": [{"label": "calm"}, {"label": "cross", "description": "some"}, {"label": "furious"}],
}
BODY: Any = {"model": MODEL, "input": "My order is broken.", "questions": [URGENT, TEAM, ANGER]}


def ask(http: httpx.Client, **fields: Any) -> Any:
    response = http.post("/v1/decisions", json=BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def softmax(*logs: float) -> list[float]:
    weights = [math.exp(log) for log in logs]
    return [weight / sum(weights) for weight in weights]


def test_the_package_reads_all_answers(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    found = client.decisions.create(model=MODEL, input=BODY["input"], questions=BODY["questions"])
    urgent, team, anger = found.answers
    assert urgent.type == "predicate"
    assert team.type == "choice"
    assert anger.type == "score"
    assert (urgent.name, team.name, anger.name) == ("urgent", None, "anger")
    assert 0 < urgent.probability < 1
    assert [each.value for each in team.probabilities] == ["billing", "returns", True]
    best = max(team.probabilities, key=lambda each: each.probability)
    assert team.choice is best.value or team.choice == best.value
    assert sum(each.probability for each in team.probabilities) == pytest.approx(1)
    assert [(each.label, each.value) for each in anger.probabilities] == [
        ("calm", 0),
        ("cross", 1),
        ("furious", 2),
    ]
    assert anger.score == pytest.approx(sum(each.value * each.probability for each in anger.probabilities))
    assert found.model == MODEL
    # The extra fields.
    assert urgent.model_extra is not None
    assert urgent.model_extra["layout"] == "verbatim-1"
    assert urgent.model_extra["temperature"] == 1.0
    assert 0 < urgent.model_extra["option_mass"] < 1
    usage = found.usage
    (request,) = frontend.requests
    assert request.decide is not None
    assert request.sampling.max_tokens == 0
    assert usage.input_tokens > len("<user>" + BODY["input"])
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert usage.total_tokens == usage.input_tokens
    details = usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens
    again = client.decisions.create(model=MODEL, input=BODY["input"], questions=BODY["questions"])
    assert again.usage.input_tokens_details.cached_tokens > details.cached_tokens
    assert again.answers == found.answers


def test_one_message_carries_all_questions(http: httpx.Client, frontend: FakeFrontend) -> None:
    ask(http)
    (request,) = frontend.requests
    assert request.chat == (ChatMessage(role="user", content=BODY["input"]),)
    assert request.decide is not None
    assert [question.kind for question in request.decide.questions] == ["predicate", "choice", "score"]
    assert request.decide.questions[1].options == (
        Option(name="billing", description="money"),
        Option(name="returns"),
        Option(name="true"),
    )
    # Names never reach the model.
    assert b"urgent" not in msgspec.json.encode(request.decide).replace(b"Is it urgent?", b"")


def test_a_bool_and_a_text_differ(http: httpx.Client, frontend: FakeFrontend) -> None:
    choices = [{"value": value} for value in (True, "true", '"true"', False, "no")]
    found = ask(http, questions=[TEAM | {"choices": choices}])
    (request,) = frontend.requests
    assert request.decide is not None
    names = [option.name for option in request.decide.questions[0].options]
    assert names == ["true", '"true"', r'"\"true\""', "false", '"no"']
    shown = found["answers"][0]["probabilities"]
    assert [(type(each["value"]), each["value"]) for each in shown] == [
        (type(choice["value"]), choice["value"]) for choice in choices
    ]


def test_a_model_without_a_chat_template(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.info = msgspec.structs.replace(frontend.info, chat_format=None)
    ask(http)
    assert frontend.requests[0].prompt == (BODY["input"],)
    assert frontend.requests[0].chat is None
    message = {"role": "user", "content": "x"}
    error = refused(http.post("/v1/decisions", json=BODY | {"input": [message]}))
    assert error["param"] == "input"


def test_items_become_turns(http: httpx.Client, frontend: FakeFrontend) -> None:
    speak(frontend, suffix={"user": "", "assistant": "", "system": "", "tool": ""}, tool_format="hermes")
    items = [
        {"type": "message", "role": "developer", "content": "Be strict."},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Order:", "prompt_cache_breakpoint": {"mode": "explicit"}},
                {"type": "input_json", "data": {"id": 7, "é": [None, True, 1.5]}},
                {"type": "input_text", "text": "See "},
                {"type": "input_text", "text": "above."},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "namespace": "n", "input": "raw"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "s"},
    ]
    ask(http, input=items)
    chat = frontend.requests[0].chat
    assert chat is not None
    assert [turn.role for turn in chat] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert chat[1].content == 'Order:\n{"id": 7, "é": [null, true, 1.5]}\nSee above.'
    assert chat[2].content == "ab"
    assert chat[2].tool_calls[0].arguments == '{"x": 1}'
    assert (chat[3].content, chat[3].name) == ("r", "f")
    assert (chat[5].content, chat[5].name) == ("s", "n__g")


def test_calls_where_the_template_has_none(http: httpx.Client, frontend: FakeFrontend) -> None:
    """The template renders no calls, so they are written as text."""
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ]
    ask(http, input=items)
    chat = frontend.requests[0].chat
    assert chat is not None
    assert [turn.role for turn in chat] == ["user", "assistant", "user"]
    assert "look" in chat[1].content
    assert "found" in chat[2].content


def test_instructions_of_parts(http: httpx.Client, frontend: FakeFrontend) -> None:
    parts = [{"type": "input_text", "text": "Is this true?"}, {"type": "input_json", "data": {"a": 1}}]
    ask(http, questions=[URGENT | {"instructions": parts}])
    assert frontend.requests[0].decide is not None
    assert frontend.requests[0].decide.questions[0].instructions == 'Is this true?\n{"a": 1}'


def test_own_fields_reach_the_engine(http: httpx.Client, frontend: FakeFrontend) -> None:
    found = ask(
        http, layout="labels", end="turn", permutations=3, return_prompt_ids=True, priority=4, cache_salt="s"
    )
    (request,) = frontend.requests
    decide = request.decide
    assert decide is not None
    assert (decide.layout, decide.end, decide.permutations, decide.prompt_ids) == ("labels", "turn", 3, True)
    assert (request.priority, request.scope) == (4, "s")
    assert bytes(found["prompt_ids"]).decode() == f"<user>{BODY['input']}"
    assert bytes(found["answers"][0]["prompt_ids"][0]).decode().startswith("Is it urgent?")
    assert {answer["layout"] for answer in found["answers"]} == {"labels-1"}
    assert "prompt_ids" not in ask(http)
    assert "prompt_ids" not in ask(http)["answers"][0]


def test_pmi_divides_by_the_answers_to_an_empty_state(http: httpx.Client, frontend: FakeFrontend) -> None:
    plain = ask(http)
    frontend.requests.clear()
    found = ask(http, normalise="pmi")
    here, empty = frontend.requests
    assert empty.chat == (ChatMessage(role="user", content=""),)
    assert empty.decide == here.decide
    assert here.flow == empty.flow
    assert here.rid != empty.rid
    without = ask(http, input=[{"role": "user", "content": ""}])
    for mine, one, other in zip(
        found["answers"][1:], plain["answers"][1:], without["answers"][1:], strict=True
    ):
        weights = [
            a["probability"] / b["probability"]
            for a, b in zip(one["probabilities"], other["probabilities"], strict=True)
        ]
        expected = [weight / sum(weights) for weight in weights]
        assert [each["probability"] for each in mine["probabilities"]] == pytest.approx(expected)
    # Both states are paid for.
    tokens = [each["usage"]["input_tokens"] for each in (plain, without, found)]
    assert tokens[0] + tokens[1] == tokens[2]


def test_mean_divides_by_lengths(http: httpx.Client) -> None:
    plain = ask(http)["answers"][1]
    found = ask(http, normalise="mean")["answers"][1]
    logs = [math.log(each["probability"] * plain["option_mass"]) for each in plain["probabilities"]]
    lengths = map(len, ("billing", "returns", "true"))
    expected = softmax(*(log / length for log, length in zip(logs, lengths, strict=True)))
    assert [each["probability"] for each in found["probabilities"]] == pytest.approx(expected)


def test_the_calibration_of_the_server_is_applied(http: httpx.Client, frontend: FakeFrontend) -> None:
    plain = ask(http)["answers"][0]["probability"]
    assert ask(http)["answers"][0]["temperature"] == 1.0
    calibration = Calibration(
        model="m", layout="verbatim-1", temperatures={"predicate": Temperature(base=2.0)}
    )
    frontend.info = msgspec.structs.replace(frontend.info, calibration=calibration)
    answers = ask(http)["answers"]
    found = answers[0]["probability"]
    assert found == pytest.approx(plain**0.5 / (plain**0.5 + (1 - plain) ** 0.5))
    assert [answer["temperature"] for answer in answers] == [2.0, 1.0, 1.0]
    assert ask(http, layout="labels")["answers"][0]["probability"] == plain
    assert ask(http, layout="labels")["answers"][0]["temperature"] == 1.0, "a client can see it"
    assert ask(http, end="turn")["answers"][0]["probability"] == plain, "it was fitted to another end"
    http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "/y"})
    assert ask(http, model=f"{MODEL}:a")["answers"][0]["probability"] == plain, "an adapter is another model"


def test_a_cache_key_holds_the_state(http: httpx.Client, frontend: FakeFrontend) -> None:
    ask(http, prompt_cache_key="k", prompt_cache_options={"mode": "explicit", "ttl": "30m"})
    hint = frontend.requests[0].hint
    assert hint is not None
    assert hint.program == "k"
    assert hint.lease_s == 1800
    ask(http)
    assert frontend.requests[1].hint is None


def test_questions_are_counted_and_logged(
    server: LiveServer, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def counted(kind: str) -> float:
        name = f'ramify_questions_total{{endpoint="/v1/decisions",kind="{kind}"}} '
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
        return float(lines[0].removeprefix(name)) if lines else 0.0

    before = [counted(kind) for kind in ("predicate", "choice", "score")]
    with caplog.at_level(logging.INFO):
        ask(http, questions=[URGENT, URGENT, TEAM])
    after = [counted(kind) for kind in ("predicate", "choice", "score")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1, 0]
    assert any("endpoint=/v1/decisions" in line and "questions=3" in line for line in caplog.messages)
    # The dashboard shows the request.
    programs = http.get("/live").json()["programs"]
    assert "/v1/decisions" in [program["name"] for program in programs]


def test_both_packages_read_the_list_of_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "/y"}).raise_for_status()
    models = http.get("/v1/models").json()["models"]
    # The fields of `ModelMetadata` of typesafe-sdk 0.7.5, all of them texts.
    assert [model.keys() for model in models] == [{"name", "description", "release_date"}] * 2
    assert [model["name"] for model in models] == [MODEL, "a"]
    for model in models:
        datetime.date.fromisoformat(model["release_date"])
    assert MODEL in models[1]["description"]


def test_an_adapter_by_the_name_of_the_model(http: httpx.Client, frontend: FakeFrontend) -> None:
    assert http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "/y"}).status_code == 200
    assert ask(http, model=f"{MODEL}:a")["model"] == f"{MODEL}:a"
    assert frontend.requests[0].lora == "a"


@pytest.mark.parametrize("normalise", ["sum", "pmi"])
def test_many_scores_leave_the_event_loop_free(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, normalise: str
) -> None:
    threads = []

    def answer(*args: Any) -> Answer:
        threads.append(threading.current_thread())
        return answers.answer(*args)

    monkeypatch.setattr(decisions_ask, "answer", answer)
    few = ask(http, normalise=normalise)
    monkeypatch.setattr(decisions_ask, "MAX_SCORES_ON_LOOP", 5)
    assert ask(http, normalise=normalise)["answers"] == few["answers"]
    on_loop, in_threads = threads[: len(threads) // 2], threads[len(threads) // 2 :]
    assert len(set(on_loop)) == 1
    assert set(on_loop).isdisjoint(in_threads)


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def part(data: Any) -> Any:
    return [{"role": "user", "content": [{"type": "input_json", "data": data}]}]


@pytest.mark.parametrize(
    "data", [deep(MAX_JSON_LEVELS), {"a": [0] * (MAX_JSON_VALUES - 2)}, {"a": "x" * (MAX_JSON_BYTES - 8)}, []]
)
def test_json_up_to_the_limits(http: httpx.Client, frontend: FakeFrontend, data: Any) -> None:
    frontend.max_prompt_tokens = 1 << 20
    try:
        ask(http, input=part(data))
    finally:
        frontend.max_prompt_tokens = 4000
    assert frontend.requests[0].chat is not None
    assert frontend.requests[0].chat[0].content == json.dumps(data)


MESSAGE: Any = {"role": "user", "content": "x"}
TWO: Any = [{"value": "a"}, {"value": "b"}]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": [MESSAGE | {"content": 5}]}, "input[0].content"),
    ({"input": [MESSAGE | {"content": None}]}, "input[0].content"),
    ({"input": [MESSAGE | {"x": 5}]}, "input[0].x"),
    ({"input": [MESSAGE | {"role": "tool"}]}, "input[0].role"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    (
        {"input": [MESSAGE | {"content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [MESSAGE | {"content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [MESSAGE | {"content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    (
        {"input": [MESSAGE | {"content": [{"type": "input_text", "text": "x", "a": 1}]}]},
        "input[0].content[0].a",
    ),
    ({"input": part(5)}, "input[0].content[0].data"),
    ({"input": part([1])}, "input[0].content[0].data[0]"),
    ({"input": part(deep(MAX_JSON_LEVELS + 1))}, "input[0].content[0].data"),
    ({"input": part({"a": [0] * (MAX_JSON_VALUES - 1)})}, "input[0].content[0].data"),
    ({"input": part({"a": "x" * (MAX_JSON_BYTES - 7)})}, "input[0].content[0].data"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "r"}]}, "input[0].call_id"),
    ({"input": [{"type": "custom_tool_call_output", "output": "r"}]}, "input[0].call_id"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "x"}]},
        "input[0].arguments",
    ),
    ({"questions": None}, "questions"),
    ({"questions": []}, "questions"),
    ({"questions": [URGENT] * (MAX_QUESTIONS + 1)}, "questions"),
    ({"questions": {"a": URGENT}}, "questions"),
    ({"questions": [URGENT | {"type": "noul"}]}, "questions[0].type"),
    ({"questions": [URGENT | {"type": None}]}, "questions[0].type"),
    ({"questions": [URGENT | {"name": 5}]}, "questions[0].name"),
    ({"questions": [URGENT | {"instructions": ""}]}, "questions[0].instructions"),
    ({"questions": [URGENT | {"instructions": []}]}, "questions[0].instructions"),
    ({"questions": [URGENT | {"instructions": None}]}, "questions[0].instructions"),
    (
        {"questions": [URGENT | {"instructions": [{"type": "input_image", "image_url": "x"}]}]},
        "questions[0].instructions[0].type",
    ),
    (
        {"questions": [URGENT | {"instructions": [{"type": "refusal", "refusal": "x"}]}]},
        "questions[0].instructions[0].type",
    ),
    ({"questions": [URGENT | {"choices": TWO}]}, "questions[0].choices"),
    ({"questions": [TEAM | {"levels": [{"label": "a"}]}]}, "questions[0].levels"),
    ({"questions": [URGENT, TEAM | {"choices": None}]}, "questions[1].choices"),
    ({"questions": [TEAM | {"choices": TWO[:1]}]}, "questions[0].choices"),
    (
        {"questions": [TEAM | {"choices": [{"value": str(i)} for i in range(MAX_OPTIONS + 1)]}]},
        "questions[0].choices",
    ),
    ({"questions": [TEAM | {"choices": [*TWO, {"value": "a"}]}]}, "questions[0].choices[2].value"),
    (
        {"questions": [TEAM | {"choices": [{"value": True}, {"value": True}]}]},
        "questions[0].choices[1].value",
    ),
    ({"questions": [TEAM | {"choices": [*TWO, {"value": 1}]}]}, "questions[0].choices[2].value"),
    ({"questions": [TEAM | {"choices": [*TWO, {"value": ""}]}]}, "questions[0].choices[2].value"),
    (
        {"questions": [TEAM | {"choices": [*TWO, {"value": "c", "label": "x"}]}]},
        "questions[0].choices[2].label",
    ),
    ({"questions": [TEAM | {"choices": [*TWO, "c"]}]}, "questions[0].choices[2]"),
    ({"questions": [ANGER | {"levels": [{"label": "a"}]}]}, "questions[0].levels"),
    ({"questions": [ANGER | {"levels": [{"label": "a"}] * 11}]}, "questions[0].levels"),
    ({"questions": [ANGER | {"levels": [{"label": "a"}, {"label": 5}]}]}, "questions[0].levels[1].label"),
    ({"questions": [ANGER | {"levels": [{"label": "a"}, {"value": "b"}]}]}, "questions[0].levels[1].label"),
    (
        {"questions": [ANGER | {"levels": [{"label": "a"}, {"label": "a", "description": "x"}]}]},
        "questions[0].levels[1].label",
    ),
    ({"layout": "letters"}, "layout"),
    ({"end": "eos"}, "end"),
    ({"normalise": "max"}, "normalise"),
    ({"permutations": 0}, "permutations"),
    ({"permutations": MAX_OPTIONS + 1}, "permutations"),
    ({"stream": True}, "stream"),
    ({"temperature": 1}, "temperature"),
    ({"instructions": "Be kind."}, "instructions"),
    ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"mode": "off"}}, "prompt_cache_options.mode"),
    ({"prompt_cache_key": "k" * 300}, "prompt_cache_key"),
    ({"priority": 1000}, "priority"),
]


@pytest.mark.parametrize(
    ("fields", "named"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refused_by_name_before_any_work(
    http: httpx.Client, frontend: FakeFrontend, fields: dict[str, Any], named: str
) -> None:
    error = refused(http.post("/v1/decisions", json=BODY | fields))
    assert error["param"] == named, error
    assert not frontend.requests


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("prompt", "input"),
        ("messages", "input"),
        ("decide.layout", "layout"),
        ("decide.questions", "questions"),
        ("decide.questions[0]", "questions[0]"),
        ("decide.questions[0].kind", "questions[0].type"),
        ("decide.questions[1].options", "questions[1].choices"),
        ("decide.questions[1].options[2].name", "questions[1].choices[2].value"),
        ("decide.questions[2].options[1].name", "questions[2].levels[1].label"),
        ("decide.questions[2].options[1].description", "questions[2].levels[1].description"),
        (None, None),
    ],
)
def test_errors_of_the_engine_name_fields_of_the_body(
    http: httpx.Client, frontend: FakeFrontend, field: str | None, named: str | None
) -> None:
    frontend.fail_first = InvalidRequest("It is wrong.", field=field)
    assert refused(http.post("/v1/decisions", json=BODY))["param"] == named


def test_two_wrong_fields_are_named_by_one_answer(http: httpx.Client) -> None:
    questions = [URGENT | {"type": "x"}, TEAM | {"choices": [*TWO, {"value": 5}]}, ANGER | {"a": 1}]
    error = refused(http.post("/v1/decisions", json=BODY | {"questions": questions, "layout": 5, "b": 1}))
    assert [one["param"] for one in error["errors"]] == [
        "layout",
        "questions[0].type",
        "questions[1].choices[2].value",
        "questions[2].a",
        "b",
    ]


def test_an_unknown_model_is_refused_as_elsewhere(http: httpx.Client) -> None:
    error = refused(http.post("/v1/decisions", json=BODY | {"model": "gpt-6-luna"}), 404)
    assert error["param"] == "model"
    assert ask(http, model="default")["model"] == "default"


def test_a_state_that_is_too_long_names_the_input(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.max_prompt_tokens = 10
    try:
        assert refused(http.post("/v1/decisions", json=BODY))["param"] == "input"
    finally:
        frontend.max_prompt_tokens = 4000
