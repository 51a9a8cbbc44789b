"""``POST /v1/calls``: requests as the runtime's own messages."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import msgspec
import pytest

from ramify.constraint import regex
from ramify.errors import WorkerDied
from ramify.messages import ChatMessage, Generate, LimitHint, ProgramHint, TextChunk, Thinking
from ramify.questions import PREDICATE_OPTIONS, Decide, Question
from ramify.sampling_params import SamplingParams
from tests.server.conftest import refused
from tests.server.fake_frontend import VOCAB_SIZE, FakeFrontend, LiveServer, events, raw_post

ASKED = Generate(
    rid="r",
    prompt=("say ", (104, 105)),
    sampling=SamplingParams(max_tokens=4, seed=3, logprobs=1),
    hint=ProgramHint(program="p", branch="b", calls_left=2),
    scope="tenant",
)


def chunks(answer: list[Any]) -> list[list[TextChunk]]:
    assert answer.pop() == "[DONE]"
    return [msgspec.convert(event["chunks"], list[TextChunk]) for event in answer]


def post(http: httpx.Client, request: Generate) -> httpx.Response:
    return http.post("/v1/calls", content=msgspec.json.encode({"request": request}))


def test_the_request_arrives_as_it_was_made(http: httpx.Client, frontend: FakeFrontend) -> None:
    asked = msgspec.structs.replace(ASKED, constraint=regex("a+"), every_s=0.5)
    assert post(http, asked).status_code == 200
    (received,) = frontend.requests
    assert asked.hint is not None
    assert received.hint is not None
    assert received.hint.client.startswith("python-httpx/")
    assert received.hint.max_pinned_share == 1.0
    # The server adds these two.
    told = {"client": received.hint.client, "max_pinned_share": received.hint.max_pinned_share}
    asked = msgspec.structs.replace(asked, hint=msgspec.structs.replace(asked.hint, **told))
    assert msgspec.json.encode(received) == msgspec.json.encode(asked)


def test_each_chunk_is_an_event(http: httpx.Client) -> None:
    each = chunks(events(post(http, ASKED)))
    assert [len(event) for event in each] == [1] * 5
    told = [chunk for event in each for chunk in event]
    assert "".join(chunk.text for chunk in told) == "SAY "
    assert [chunk.ids for chunk in told] == [(ord(char),) for char in "SAY "] + [()]
    assert told[-1].finish is not None
    assert told[-1].finish.reason == "length"


def test_a_chat_comes_with_questions(http: httpx.Client, frontend: FakeFrontend) -> None:
    question = Question(kind="predicate", instructions="Is it?", options=PREDICATE_OPTIONS)
    chat = (ChatMessage(role="user", content="x"),)
    asked = Generate(
        rid="r", chat=chat, decide=Decide(questions=(question,)), sampling=SamplingParams(max_tokens=0)
    )
    ((last,),) = chunks(events(post(http, asked)))
    assert last.decisions is not None
    assert len(last.decisions.questions) == 1
    assert frontend.requests[0].chat == chat
    wrong = msgspec.structs.replace(asked, prompt=((VOCAB_SIZE,),))
    assert refused(post(http, wrong))["param"] == "prompt"


def test_an_error_after_chunks_is_an_event(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.fail_after = (2, WorkerDied("It died."))
    *told, error = events(post(http, ASKED))
    assert [chunk["text"] for event in told for chunk in event["chunks"]] == ["S", "A"]
    assert error["error"]["code"] == "worker_died"
    frontend.fail_after = (0, WorkerDied("It died."))
    assert post(http, ASKED).status_code == 503


def test_a_client_that_goes_away_ends_its_work(server: LiveServer, frontend: FakeFrontend) -> None:
    frontend.hold_after = 2
    body = msgspec.json.encode({"request": ASKED})
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post("/v1/calls", body))
        assert frontend.held.wait(60)
    assert frontend.closed.wait(60)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": ((VOCAB_SIZE,),)}, "prompt"),
        ({"rid": ""}, "rid"),
        ({"prompt": (), "chat": (ChatMessage(role="user", content="x"),)}, "chat"),
        ({"tools": "[]"}, "tools"),
        ({"template_kwargs": "{}"}, "template_kwargs"),
        ({"thinking": Thinking()}, "thinking"),
        ({"hint": ProgramHint(program="")}, "hint.program"),
        ({"hint": ProgramHint(program="p", lease_s=-1)}, "hint.lease_s"),
        ({"hint": ProgramHint(program="p", calls_left=-1)}, "hint.calls_left"),
        ({"hint": ProgramHint(program="p", parts=((0, -1),))}, "hint.parts"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    http: httpx.Client, frontend: FakeFrontend, changes: dict[str, Any], field: str
) -> None:
    assert refused(post(http, msgspec.structs.replace(ASKED, **changes)))["param"] == field
    assert frontend.requests == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "request"),
        ({"request": {"rid": "r", "prompt": ["a"], "newer": 1}}, "newer"),
        ({"request": {"rid": "r", "prompt": ["a"], "sampling": {"newer": 1}}}, "newer"),
        ({"request": {"rid": "r", "prompt": ["a"], "every_s": "often"}}, "every_s"),
        ({"request": {"rid": "r", "prompt": ["a"]}, "stream": True}, "stream"),
    ],
)
def test_what_is_no_call_is_refused(http: httpx.Client, frontend: FakeFrontend, body: Any, said: str) -> None:
    assert said in refused(http.post("/v1/calls", json=body))["message"]
    assert frontend.requests == []


def test_a_hint_that_names_a_limit_twice_is_refused(http: httpx.Client) -> None:
    hint = ProgramHint(program="p", limits=(LimitHint(id="a"), LimitHint(id="b"), LimitHint(id="a")))
    answer = post(http, msgspec.structs.replace(ASKED, hint=hint))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "hint.limits[2].id")


def test_a_model_that_is_not_served_is_refused(http: httpx.Client, frontend: FakeFrontend) -> None:
    for model, status in (("byte-model", 200), ("byte", 404)):
        body = msgspec.json.encode({"request": ASKED, "model": model})
        assert http.post("/v1/calls", content=body).status_code == status
        assert http.get("/get_model_info", params={"model": model}).status_code == status
    assert len(frontend.requests) == 1
