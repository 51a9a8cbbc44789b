"""llama.cpp's /infill, `suffix` of completions, and `timings`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from ramify.fill import Fill
from ramify.messages import Finish, TextChunk, Usage
from ramify.runtime.server.llamacpp import infill
from ramify.runtime.server.openai.bodies import timings_body
from tests.server.fake_frontend import MODEL, FakeFrontend

BODY: Any = {"input_prefix": "def f", "input_suffix": "\n", "prompt": "(a", "n_predict": 4}
TIMINGS = {
    "cache_n",
    *(f"{name}_{figure}" for name in ("prompt", "predicted") for figure in ("n", "ms")),
    *(f"{name}_per_{figure}" for name in ("prompt", "predicted") for figure in ("token_ms", "second")),
}


def events(answer: httpx.Response) -> list[Any]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def test_an_answer(http: httpx.Client, frontend: FakeFrontend) -> None:
    extra = [{"filename": "a.py", "text": "x"}, {"text": "y"}]
    answer = http.post("/infill", json=BODY | {"input_extra": extra, "temperature": 0, "seed": -1})
    body = answer.json()
    (request,) = frontend.requests
    assert request.prompt == ("def f(a",)
    assert request.fill == Fill("\n", (("a.py", "x"), ("tmp", "y")))
    assert (request.sampling.max_tokens, request.sampling.seed) == (4, None)
    assert len(body["content"]) == 4
    assert len(body["tokens"]) == body["tokens_predicted"] == body["timings"]["predicted_n"] == 4
    assert (body["stop"], body["stop_type"], body["truncated"]) == (True, "limit", False)
    assert body["timings"].keys() >= TIMINGS


def test_a_stream_is_the_same_answer(http: httpx.Client) -> None:
    whole = http.post("/infill", json=BODY).json()
    *pieces, last = events(http.post("/infill", json=BODY | {"stream": True}))
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert not any(piece["stop"] or "timings" in piece for piece in pieces)
    assert last["stop"]
    assert last["content"] == ""
    assert {**last, "timings": 0} | {"content": 0, "tokens": 0} == {**whole, "timings": 0} | {
        "content": 0,
        "tokens": 0,
    }
    told = events(http.post("/infill", json=BODY | {"stream": True, "timings_per_token": True}))
    assert [one["timings"]["predicted_n"] for one in told] == [*range(1, 5), 4]


def test_an_editors_request(http: httpx.Client) -> None:
    """The fields of llama.vim."""
    fields = {
        "id_slot": 0,
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/predicted_n", "nothing/there"],
    }
    answer = http.post("/infill", json=BODY | fields)
    assert answer.json().keys() == {"content", "timings/predicted_n"}
    assert "n_indent" in answer.headers["x-ramify-ignored"]


@pytest.mark.parametrize(("field", "value"), [("n_probs", 3), ("samplers", ["temperature", "xtc"])])
def test_what_would_change_the_answer_is_refused(http: httpx.Client, field: str, value: Any) -> None:
    answer = http.post("/infill", json=BODY | {field: value})
    assert answer.status_code == 400
    assert f"{field} is" in answer.text


async def no_chunks() -> AsyncGenerator[TextChunk, None]:
    return
    yield


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        (Finish(reason="stop", matched=";"), ("word", ";")),
        (Finish(reason="stop", matched=7), ("eos", "")),
        (Finish(reason="length"), ("limit", "")),
    ],
)
def test_why_an_answer_ends(finish: Finish, told: tuple[str, str]) -> None:
    body = infill.last_body(infill.Infill(no_chunks(), "m", False, False, ()), finish, Usage(), "a\n", [1, 2])
    assert (body["stop_type"], body["stopping_word"], body["has_new_line"]) == (*told, True)


def test_suffix_of_completions(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    client.completions.create(model=MODEL, prompt="a", suffix="b", max_tokens=1)
    client.completions.create(model=MODEL, prompt=["a", ""], suffix="b", max_tokens=1)
    client.completions.create(model=MODEL, prompt="a", suffix="", max_tokens=1)
    assert [request.fill for request in frontend.requests] == [*[Fill("b")] * 3, None]
    assert [request.prompt for request in frontend.requests] == [("a",), ("a",), ("",), ("a",)]
    with pytest.raises(openai.BadRequestError, match="echo and suffix"):
        client.completions.create(model=MODEL, prompt="a", suffix="b", echo=True)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model=MODEL, prompt=[1, 2], suffix="b")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_timings_of_openais_endpoints(http: httpx.Client, path: str) -> None:
    body: Any = {"model": MODEL, "max_tokens": 3}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    whole = http.post(path, json=body).json()
    tokens = whole["usage"]["completion_tokens"]
    assert whole["timings"].keys() >= TIMINGS
    assert whole["timings"]["predicted_n"] == tokens
    assert "timings" not in http.post(path, json=body | {"n": 2}).json()
    usage = {"stream_options": {"include_usage": True}}
    for fields in ({}, usage):
        *pieces, last = events(http.post(path, json=body | {"stream": True} | fields))
        assert last["timings"]["predicted_n"] == tokens
        assert not any("timings" in piece for piece in pieces)
    told = events(http.post(path, json=body | {"stream": True, "timings_per_token": True}))
    assert [one["timings"]["predicted_n"] for one in told][-1] == tokens
    assert all("timings" in one for one in told)


def test_the_figures() -> None:
    usage = Usage(
        prompt_tokens=30,
        cached_tokens=10,
        completion_tokens=8,
        grammar_s=0.75,
        queue_s=0.25,
        first_token_s=3.0,
        total_s=7.0,
        draft_tokens=5,
        accepted_tokens=2,
    )
    assert timings_body(usage) == {
        "cache_n": 10,
        "prompt_n": 20,
        "prompt_ms": 2000.0,
        "prompt_per_token_ms": 100.0,
        "prompt_per_second": 10.0,
        "predicted_n": 8,
        "predicted_ms": 4000.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
        "draft_n": 5,
        "draft_n_accepted": 2,
    }
    assert timings_body(Usage())["prompt_per_second"] == 0.0
