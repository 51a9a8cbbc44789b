"""POST /v1/rerank and /v1/score: a predicate about each document."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import pytest

from ramify.errors import InvalidRequest
from ramify.messages import ChatMessage, Generate, TextChunk
from ramify.questions import MAX_QUESTIONS
from ramify.runtime.server.decisions.rerank import RELEVANCE
from ramify.runtime.server.fields import MAX_OBJECTS
from tests.server.conftest import refused
from tests.server.fake_frontend import MODEL, FakeFrontend

DOCUMENTS = ["Paris is its capital.", "Bananas are yellow.", "Lyon is a city.", "Bananas are yellow."]
BODY: Any = {"model": MODEL, "query": "What is the capital of France?", "documents": DOCUMENTS}
SCORE: Any = {"model": MODEL, "text_1": BODY["query"], "text_2": DOCUMENTS}


def post(http: httpx.Client, path: str, body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def truth(http: httpx.Client, query: str, document: str, instruction: str = RELEVANCE) -> float:
    """P(true) of the predicate about one document, from /v1/decisions."""
    question = {"type": "predicate", "instructions": f"Document: {document}\n\n{instruction}"}
    body = {"model": MODEL, "input": f"Query: {query}", "questions": [question]}
    found: float = post(http, "/v1/decisions", body)["answers"][0]["probability"]
    return found


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_the_most_relevant_come_first(http: httpx.Client, frontend: FakeFrontend, path: str) -> None:
    found = post(http, path, BODY)
    (request,) = frontend.requests
    assert request.chat == (ChatMessage(role="user", content=f"Query: {BODY['query']}"),)
    assert request.decide is not None
    assert len(request.decide.questions) == 4
    expected = [truth(http, BODY["query"], document) for document in DOCUMENTS]
    results = found["results"]
    assert {one["index"]: one["relevance_score"] for one in results} == dict(enumerate(expected))
    assert [one["relevance_score"] for one in results] == sorted(expected, reverse=True)
    assert len(set(expected)) == 3  # the texts make a difference
    # Equal documents stay in their order.
    places = [one["index"] for one in results]
    assert places.index(1) < places.index(3)
    assert all(one["document"] == {"text": DOCUMENTS[one["index"]]} for one in results)
    assert all(0 < one["option_mass"] < 1 for one in results)
    assert found["model"] == MODEL
    assert found["id"].startswith("rerank-")
    usage = found["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > sum(map(len, DOCUMENTS))


def test_a_document_of_a_later_state_is_named(
    http: httpx.Client, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = frontend._chunks

    async def failing(request: Generate) -> AsyncGenerator[TextChunk, None]:
        if request.decide is not None and len(request.decide.questions) == 11:
            raise InvalidRequest("It is wrong.", field="decide.questions[9]")
        async for chunk in chunks(request):
            yield chunk

    monkeypatch.setattr(frontend, "_chunks", failing)
    documents = [f"d{i}" for i in range(MAX_QUESTIONS + 11)]
    error = refused(http.post("/v1/rerank", json=BODY | {"documents": documents}))
    assert error["param"] == f"documents[{MAX_QUESTIONS + 9}]"


def test_the_first_n_without_their_documents(http: httpx.Client) -> None:
    whole = post(http, "/v1/rerank", BODY)["results"]
    found = post(http, "/v1/rerank", BODY | {"top_n": 2, "return_documents": False})["results"]
    assert [one["index"] for one in found] == [one["index"] for one in whole[:2]]
    assert all("document" not in one for one in found)
    assert len(post(http, "/v1/rerank", BODY | {"top_n": 9})["results"]) == 4


def test_documents_that_are_objects(http: httpx.Client, frontend: FakeFrontend) -> None:
    one = {"title": "T", "text": "B", "n": 7}
    found = post(http, "/v1/rerank", BODY | {"documents": [one]})
    assert found["results"][0]["document"] == one
    post(http, "/v1/rerank", BODY | {"documents": [one], "rank_fields": ["title", "text"]})
    asked = [request.decide.questions[0].instructions for request in frontend.requests if request.decide]
    assert asked == [f"Document: {text}\n\n{RELEVANCE}" for text in ("B", "T\nB")]


def test_another_instruction(http: httpx.Client) -> None:
    found = post(http, "/v1/rerank", BODY | {"instruction": "Is it about fruit?"})
    for one in found["results"]:
        expected = truth(http, BODY["query"], DOCUMENTS[one["index"]], "Is it about fruit?")
        assert one["relevance_score"] == expected


def test_many_documents_are_several_messages(http: httpx.Client, frontend: FakeFrontend) -> None:
    documents = [f"d{i}" for i in range(2 * MAX_QUESTIONS + 1)]
    found = post(http, "/v1/rerank", BODY | {"documents": documents})
    sizes = [len(request.decide.questions) for request in frontend.requests if request.decide]
    assert sizes == [MAX_QUESTIONS, MAX_QUESTIONS, 1]
    assert sorted(one["index"] for one in found["results"]) == list(range(len(documents)))
    last = next(one for one in found["results"] if one["index"] == len(documents) - 1)
    assert last["relevance_score"] == truth(http, BODY["query"], documents[-1])


def test_a_model_without_a_chat_template(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.info = msgspec.structs.replace(frontend.info, chat_format=None)
    post(http, "/v1/rerank", BODY)
    assert frontend.requests[0].prompt == (f"Query: {BODY['query']}",)


def test_prompt_ids_are_those_of_whole_prompts(http: httpx.Client) -> None:
    found = post(http, "/v1/rerank", BODY | {"return_prompt_ids": True, "top_n": 1})["results"][0]
    prompt = bytes(found["prompt_ids"][0]).decode()
    assert prompt.startswith(f"<user>Query: {BODY['query']}Document: {DOCUMENTS[found['index']]}")


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_scores_of_one_query(http: httpx.Client, path: str, first: str, second: str) -> None:
    found = post(http, path, {"model": MODEL, first: BODY["query"], second: DOCUMENTS})
    assert [one["index"] for one in found["data"]] == [0, 1, 2, 3]
    expected = [truth(http, BODY["query"], document) for document in DOCUMENTS]
    assert [one["score"] for one in found["data"]] == expected
    assert {one["object"] for one in found["data"]} == {"score"}
    assert (found["object"], found["model"]) == ("list", MODEL)


def test_scores_of_pairs(http: httpx.Client, frontend: FakeFrontend) -> None:
    """Texts about equal queries are one message, whatever is between them."""
    queries, texts = ["a", "b", "a"], ["x", "y", "z"]
    found = post(http, "/v1/score", {"model": MODEL, "text_1": queries, "text_2": texts})
    sizes = [len(request.decide.questions) for request in frontend.requests if request.decide]
    assert sizes == [2, 1]
    expected = [truth(http, query, text) for query, text in zip(queries, texts, strict=True)]
    assert [one["score"] for one in found["data"]] == expected
    single = post(http, "/v1/score", {"model": MODEL, "text_1": "a", "text_2": "x"})
    assert [one["score"] for one in single["data"]] == expected[:1]


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("prompt", "query"),
        ("decide.layout", "layout"),
        ("decide.questions", "documents"),
        ("decide.questions[1].instructions", "documents[1]"),
    ],
)
def test_errors_of_the_engine_name_fields_of_the_body(
    http: httpx.Client, frontend: FakeFrontend, field: str, named: str
) -> None:
    frontend.fail_first = InvalidRequest("It is wrong.", field=field)
    assert refused(http.post("/v1/rerank", json=BODY))["param"] == named
    frontend.fail_first = InvalidRequest("It is wrong.", field=field)
    score = refused(http.post("/v1/score", json=SCORE))["param"]
    assert score == named.replace("query", "text_1").replace("documents", "text_2")


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/rerank", {"query": None}, "query"),
        ("/v1/rerank", {"query": ["x"]}, "query"),
        ("/v1/rerank", {"documents": None}, "documents"),
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["x"] * (MAX_OBJECTS + 1)}, "documents"),
        ("/v1/rerank", {"documents": ["x", 5]}, "documents[1]"),
        ("/v1/rerank", {"documents": ["x", {"title": "x"}]}, "documents[1].text"),
        ("/v1/rerank", {"documents": [{"a": "x"}], "rank_fields": ["a", "b"]}, "documents[0].b"),
        ("/v1/rerank", {"top_n": -1}, "top_n"),
        ("/v1/rerank", {"max_tokens_per_doc": 100}, "max_tokens_per_doc"),
        ("/v1/rerank", {"truncate_prompt_tokens": 100}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"stream": True}, "stream"),
        ("/v1/rerank", {"texts": ["x"]}, "texts"),
        ("/v1/score", {"text_1": None}, "text_1"),
        ("/v1/score", {"text_2": []}, "text_2"),
        ("/v1/score", {"text_2": [5]}, "text_2[0]"),
        ("/v1/score", {"text_1": ["x", "y"]}, "text_1"),
        ("/v1/score", {"queries": "x", "items": "y"}, "queries"),
        ("/v1/score", {"layout": "x"}, "layout"),
    ],
)
def test_refused_by_name(
    http: httpx.Client, frontend: FakeFrontend, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = http.post(path, json=(SCORE if "score" in path else BODY) | fields)
    assert refused(answer)["param"] == named
    assert not frontend.requests


def test_rerankers_get_the_texts_as_they_are(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.info = msgspec.structs.replace(frontend.info, trained_layout="logit-score-1")
    post(http, "/v1/rerank", BODY)
    post(http, "/v1/score", SCORE | {"instruction": "Find cities."})
    plain, instructed = frontend.requests
    query = ChatMessage(role="user", content=BODY["query"])
    assert plain.chat == (query,)
    assert instructed.chat == (ChatMessage(role="system", content="Find cities."), query)
    for request in (plain, instructed):
        assert request.decide is not None
        assert [one.instructions for one in request.decide.questions] == DOCUMENTS
    post(http, "/v1/rerank", BODY | {"layout": "verbatim"})
    assert frontend.requests[-1].chat == (ChatMessage(role="user", content=f"Query: {BODY['query']}"),)
