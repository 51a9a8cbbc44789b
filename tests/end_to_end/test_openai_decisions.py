"""``/v1/decisions`` and ``/v1/rerank`` on real weights: usage, prompts, and equal numbers of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ramify.runtime.server.decisions.rerank import RELEVANCE
from tests.end_to_end.served import Served, serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]

ITEMS: Any = [
    {"role": "system", "content": "Be strict."},
    {"role": "user", "content": [{"type": "input_json", "data": {"id": 7}}]},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "broken"},
]
QUESTIONS: Any = [
    {"type": "predicate", "instructions": "Is it broken?"},
    {
        "type": "choice",
        "instructions": "Which team?",
        "choices": [{"value": "sale"}, {"value": "sales"}, {"value": True}, {"value": "true"}],
    },
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


def post(served: Served, path: str, **fields: Any) -> Any:
    body = {"model": "default", "return_prompt_ids": True} | fields
    response = httpx.post(served.url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_items_are_read_and_paid_for_once(served: Served) -> None:
    found = post(served, "/v1/decisions", input=ITEMS, questions=QUESTIONS)
    forms = [answer["prompt_ids"][0] for answer in found["answers"]]
    prompt = httpx.post(
        served.url + "/detokenize", json={"model": "default", "tokens": found["prompt_ids"] + forms[0]}
    ).json()
    for text in ("Be strict.", '{"id": 7}', "look", "broken", "Is it broken?"):
        assert text in prompt["prompt"]
    usage = found["usage"]
    # The state once, each form once, and the inner tokens of options that others extend.
    least = len(found["prompt_ids"]) + sum(map(len, forms))
    assert least <= usage["input_tokens"] <= least + 8
    again = post(served, "/v1/decisions", input=ITEMS, questions=QUESTIONS[:1])
    assert again["answers"][0] == found["answers"][0]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= len(found["prompt_ids"]) - 1
    values = [each["value"] for each in found["answers"][1]["probabilities"]]
    assert [(type(value), value) for value in values] == [
        (str, "sale"),
        (str, "sales"),
        (bool, True),
        (str, "true"),
    ]
    assert sum(each["probability"] for each in found["answers"][1]["probabilities"]) == pytest.approx(1)


def test_relevance_is_the_probability_of_a_predicate(served: Served) -> None:
    query = "What is the capital of France?"
    documents = ["Bananas are yellow.", "The capital of France is Paris."]
    found = post(served, "/v1/rerank", query=query, documents=documents)["results"]
    assert [one["index"] for one in found] == [1, 0]
    questions = [
        {"type": "predicate", "instructions": f"Document: {document}\n\n{RELEVANCE}"}
        for document in documents
    ]
    answers = post(served, "/v1/decisions", input=f"Query: {query}", questions=questions)["answers"]
    assert [one["relevance_score"] for one in found[::-1]] == [one["probability"] for one in answers]
