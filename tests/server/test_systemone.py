"""``POST /v1/systemone``: the same decisions as ``/v1/decisions``, in TypeSafe's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest
import zstandard

from ramify.errors import (
    EngineClosed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RamifyError,
    UnsupportedField,
    WorkerDied,
)
from ramify.questions import Calibration, Temperature
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

PATH = "/v1/systemone"
ID = "x-typesafe-request-id"
NOUL: Any = {"type": "noul", "instructions": "Is it urgent?"}
QUESTIONS: Any = {
    "urgent": NOUL,
    "team": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": None, "returns": "goods"},
    },
    "weight": {"type": "score", "instructions": "How bad?", "criteria": ["low", "high"]},
}
BODY: Any = {"model": MODEL, "state": "It is broken.", "questions": QUESTIONS}
DECISIONS: Any = {
    "model": MODEL,
    "input": "It is broken.",
    "questions": [
        {"type": "predicate", "instructions": "Is it urgent?"},
        {
            "type": "choice",
            "instructions": "Which team?",
            "choices": [{"value": "billing"}, {"value": "returns", "description": "goods"}],
        },
        {
            "type": "score",
            "instructions": "How bad?",
            "levels": [{"label": "0", "description": "low"}, {"label": "1", "description": "high"}],
        },
    ],
}
"""`BODY` in OpenAI's form."""


def details(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 422, answer.text
    assert answer.headers[ID]
    return list(answer.json()["detail"])


def locs(answer: httpx.Response) -> list[Sequence[str | int]]:
    found = [detail["loc"] for detail in details(answer)]
    assert all(loc[0] == "body" for loc in found)
    return [loc[1:] for loc in found]


def test_both_forms_have_the_same_numbers(http: httpx.Client, frontend: FakeFrontend) -> None:
    temperatures = {"choice": Temperature(base=2.0)}
    calibration = Calibration(model="m", layout="verbatim-1", temperatures=temperatures)
    frontend.info = msgspec.structs.replace(frontend.info, calibration=calibration)
    mine, theirs = http.post(PATH, json=BODY).json(), http.post("/v1/decisions", json=DECISIONS).json()
    one, other = frontend.requests
    assert msgspec.structs.replace(one, rid="", flow="") == msgspec.structs.replace(other, rid="", flow="")
    noul, choice, score = mine["answers"].values()
    first, second, third = theirs["answers"]
    assert noul["noul"] == first["probability"]
    assert (choice["choice"], choice["confidence"]) == (second["choice"], second["confidence"])
    assert choice["probabilities"] == {one["value"]: one["probability"] for one in second["probabilities"]}
    assert (score["score"], score["confidence"]) == (third["score"], third["confidence"])
    assert list(score["probabilities"].values()) == [one["probability"] for one in third["probabilities"]]
    assert [(one["option_mass"], one["temperature"]) for one in mine["answers"].values()] == [
        (one["option_mass"], one["temperature"]) for one in theirs["answers"]
    ]
    assert [one["temperature"] for one in theirs["answers"]] == [1.0, 2.0, 1.0]
    assert mine["usage"]["input_tokens"] == theirs["usage"]["input_tokens"]


def test_an_answer(http: httpx.Client) -> None:
    answer = http.post(PATH, json=BODY)
    body = answer.json()
    assert body.keys() == {"model", "answers", "usage"}
    assert body["model"] == MODEL
    assert list(body["answers"]) == list(QUESTIONS)
    assert body["answers"]["weight"]["legend"] == {"0": "low", "1": "high"}
    assert all(one["layout"] == "verbatim-1" for one in body["answers"].values())
    assert body["usage"]["output_tokens"] == 0
    assert answer.headers[ID] != http.post(PATH, json=BODY).headers[ID]
    again = http.post(PATH, json=BODY).json()
    assert again["answers"] == body["answers"]
    assert again["usage"]["cached_tokens"] > 0


def test_names_do_not_reach_the_model(http: httpx.Client, frontend: FakeFrontend) -> None:
    renamed = {f"is it {name}?": question for name, question in QUESTIONS.items()}
    answers = [http.post(PATH, json=BODY | {"questions": each}).json() for each in (QUESTIONS, renamed)]
    assert list(answers[1]["answers"]) == list(renamed)
    assert list(answers[0]["answers"].values()) == list(answers[1]["answers"].values())
    one, other = frontend.requests
    assert one.decide == other.decide


def test_a_state_of_json_is_its_text(http: httpx.Client, frontend: FakeFrontend) -> None:
    for state in ({"b": 1, "a": ["é"]}, '{"b": 1, "a": ["é"]}'):
        http.post(PATH, json=BODY | {"state": state}).raise_for_status()
    one, other = frontend.requests
    assert one.chat == other.chat


@pytest.mark.parametrize("trained_layout", ["", "decider-1"])
def test_json_is_the_same_text_as_in_decisions(
    http: httpx.Client, frontend: FakeFrontend, trained_layout: str
) -> None:
    frontend.info = msgspec.structs.replace(frontend.info, trained_layout=trained_layout)
    value = {"b": [*range(9)], "a": {"é": [1.50, None, True, 12345678901234567890123]}}
    http.post(PATH, json=BODY | {"state": value}).raise_for_status()
    parts = [{"role": "user", "content": [{"type": "input_json", "data": value}]}]
    http.post("/v1/decisions", json=DECISIONS | {"input": parts}).raise_for_status()
    question = {"type": "noul", "instructions": value}
    http.post(PATH, json=BODY | {"questions": {"a": question}}).raise_for_status()
    instructions = [{"type": "input_json", "data": value}]
    questions = [{"type": "predicate", "instructions": instructions}]
    http.post("/v1/decisions", json=DECISIONS | {"questions": questions}).raise_for_status()
    one, other, asked, asked_there = frontend.requests
    assert one.chat == other.chat
    assert asked.decide == asked_there.decide
    assert one.chat is not None
    assert ("_index" in one.chat[0].content) == bool(trained_layout)


def test_names_of_models(http: httpx.Client) -> None:
    for name in ("jev-latest", "jev-2026-09-15", "default"):
        answer = http.post(PATH, json=BODY | {"model": name})
        assert answer.json()["model"] == (name if name == "default" else MODEL)
    for path, name in ((PATH, "other"), ("/v1/decisions", "jev-latest")):
        body = BODY if path == PATH else DECISIONS
        assert http.post(path, json=body | {"model": name}).status_code == 404
    unknown = http.post(PATH, json=BODY | {"model": "other"})
    assert f"'{MODEL}'" in unknown.json()["detail"]
    assert http.post(PATH, json={"state": "x", "questions": QUESTIONS}).json()["model"] == MODEL


def test_ramifys_own_fields(http: httpx.Client, frontend: FakeFrontend) -> None:
    own = {"layout": "labels", "end": "turn", "permutations": 2, "return_prompt_ids": True, "priority": 3}
    body = http.post(PATH, json=BODY | own | {"normalise": "pmi"}).json()
    request, empty = frontend.requests
    assert request.decide is not None
    assert (request.decide.layout, request.decide.end, request.decide.permutations) == ("labels", "turn", 2)
    assert request.priority == 3
    assert empty.chat is not None
    assert empty.chat[-1].content == ""
    assert body["prompt_ids"] == list(b"<user>It is broken.")
    assert all(one["prompt_ids"] for one in body["answers"].values())
    assert "prompt_ids" not in http.post(PATH, json=BODY).text


def test_all_wrong_fields_are_named(http: httpx.Client, frontend: FakeFrontend) -> None:
    wrong = {
        "is it?": {"type": "noul", "instructions": 5, "hint": 1},
        "good": NOUL,
        "team": {"type": "choice", "criteria": {"a.b": 1}, "levels": []},
        "bad": {"type": "score", "criteria": ["a", 5]},
        "none": None,
    }
    body = {
        "model": MODEL,
        "state": 5,
        "questions": wrong,
        "layout": "x",
        "temperature": 1,
        "assets": {"a": {}},
    }
    answer = http.post(PATH, json=body)
    assert sorted(map(str, locs(answer))) == sorted(
        map(
            str,
            [
                ["state"],
                ["questions", "is it?", "instructions"],
                ["questions", "is it?", "hint"],
                ["questions", "team", "criteria", "a.b"],
                ["questions", "team", "levels"],
                ["questions", "bad", "criteria", 1],
                ["questions", "none"],
                ["layout"],
                ["temperature"],
                ["assets"],
            ],
        )
    )
    assert all(detail["msg"] and "Also wrong" not in detail["msg"] for detail in details(answer))
    types = {str(detail["loc"][-1]): detail["type"] for detail in details(answer)}
    assert (types["assets"], types["state"]) == ("unsupported_field", "invalid_request")
    assert not frontend.requests


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff{}"])
def test_what_is_no_body(http: httpx.Client, body: bytes) -> None:
    assert locs(http.post(PATH, content=body)) == [[]]


def test_a_place_inside_of_the_state_is_told_as_the_state(http: httpx.Client) -> None:
    body = json.dumps(BODY | {"state": {"a": [0.5]}}).replace("0.5", "1e999")
    assert locs(http.post(PATH, content=body)) == [["state"]]


TOO_LONG = PromptTooLong(
    "This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens.",
    field="prompt",
    lengths=(5000, 0, 4096),
)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (TOO_LONG, 413, ("4096", "your state resulted in 5000")),
        (Overloaded("The queue is full.", retry_after=2.0), 429, ("The queue is full.",)),
        (WorkerDied("The engine died."), 503, ("The engine died.",)),
        (EngineClosed("The server is shutting down."), 503, ("shutting down",)),
    ],
)
def test_errors_of_the_engine(
    http: httpx.Client, frontend: FakeFrontend, error: RamifyError, status: int, told: Sequence[str]
) -> None:
    frontend.fail_first = error
    answer = http.post(PATH, json=BODY)
    assert answer.status_code == status
    assert answer.json().keys() == {"detail"}
    assert all(words in answer.json()["detail"] for words in told)
    assert answer.headers[ID]
    assert answer.headers.get("retry-after") == ("2" if status == 429 else None)


@pytest.mark.parametrize(
    ("field", "loc"),
    [
        ("decide.questions[1].options[1].name", ["questions", "team", "criteria", "returns"]),
        ("decide.questions[2].options[1].name", ["questions", "weight", "criteria", 1]),
        ("decide.questions[0].options", ["questions", "urgent", "criteria"]),
        ("decide.questions[0].instructions", ["questions", "urgent", "instructions"]),
        ("decide.questions[0]", ["questions", "urgent"]),
        ("decide.questions", ["questions"]),
        ("decide.layout", ["layout"]),
        ("prompt", ["state"]),
        ("messages", ["state"]),
    ],
)
def test_errors_of_the_engine_have_the_clients_names(
    http: httpx.Client, frontend: FakeFrontend, field: str, loc: list[str | int]
) -> None:
    frontend.fail_first = InvalidRequest(f"{field} is wrong.", field=field)
    answer = http.post(PATH, json=BODY)
    assert locs(answer) == [loc]
    assert "decide" not in answer.text
    frontend.fail_first = UnsupportedField("It is wrong.", field=field)
    assert details(http.post(PATH, json=BODY))[0]["type"] == "unsupported_field"


def test_bodies_in_zstd(http: httpx.Client) -> None:
    body = zstandard.compress(json.dumps(BODY).encode())
    answer = http.post(PATH, content=body, headers={"content-encoding": "zstd"})
    assert answer.json()["answers"] == http.post(PATH, json=BODY).json()["answers"]


def test_a_form_with_images_is_refused(http: httpx.Client) -> None:
    kind = {"content-type": "multipart/form-data; boundary=x", "authorization": "Bearer k"}
    answer = http.post(PATH, content=b"--x--\r\n", headers=kind)
    assert answer.status_code == 415
    assert "images" in answer.json()["detail"]
    assert answer.headers[ID]


def test_the_key() -> None:
    with LiveServer(FakeFrontend(), api_key="sesame") as server:
        answer = httpx.post(server.url + PATH, json=BODY)
        assert (answer.status_code, answer.json()) == (
            401,
            {"detail": "The API key is missing or wrong. Send it as a bearer token."},
        )
        assert answer.headers[ID]
        bearer = {"authorization": "Bearer sesame"}
        assert httpx.post(server.url + PATH, json=BODY, headers=bearer).status_code == 200


def test_other_methods(http: httpx.Client) -> None:
    answer = http.get(PATH)
    assert (answer.status_code, answer.json()) == (405, {"detail": f"{PATH} does not take GET, but POST."})


def test_models(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"x-typesafe-sdk": "x"})
    (model,) = answer.json()["models"]
    assert model.keys() == {"name", "description", "release_date"}
    assert model["name"] == answer.json()["data"][0]["id"] == MODEL
    assert answer.headers[ID]
    assert "slug" in http.get("/v1/models?client_version=1").json()["models"][0]
