"""``/v1/rerank`` and ``/v1/score``: how relevant texts are to queries, by a predicate for each pair.

query       "What is the capital of France?"     the state
document    "Paris is its capital."              one predicate; its P(true) is the relevance

Both forms are vLLM's. ``/rerank`` and ``/v2/rerank`` take Cohere's and Jina's bodies as well
(https://docs.cohere.com/reference/rerank).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ramify.decisions.checks import Place
from ramify.decisions.logit_score import NAME as RERANKER
from ramify.errors import InvalidRequest
from ramify.messages import ChatMessage, Generate
from ramify.questions import MAX_QUESTIONS, PREDICATE_OPTIONS, Question
from ramify.runtime.server.decisions.ask import (
    Answered,
    Answers,
    Asked,
    States,
    answers_of,
    ask,
    trained_layout,
)
from ramify.runtime.server.decisions.state import text_state
from ramify.runtime.server.fields import MAX_OBJECTS, Fields, json_response
from ramify.runtime.server.openai.request import take_header
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.tables.decisions import RERANK, SCORE

router = Router()

RELEVANCE = "Does the document answer the query?"
"""The question about each document, unless ``instruction`` has another."""
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two fields of ``/v1/score``, as versions of vLLM have them."""


class _Ranked(NamedTuple):
    """A parsed request to rank documents."""

    asked: Asked
    header: dict[str, Any]
    shown: Sequence[Any] | None
    """The documents as the answer repeats them; None if it does not."""
    top_n: int


@router.post(RERANK.path, any_key=True)
@router.post("/rerank", any_key=True)
@router.post("/v2/rerank", any_key=True)
async def rerank(request: Request) -> Response:
    ranked, headers = await parse_body(request, RERANK, _parse_rerank)
    found = await answers_of(request, ranked.asked, partial(_path_of, "documents", ranked.asked, None))
    relevance = [one.answer.probabilities[0] for one in found.answers]
    # Equal ones stay in the order of the request.
    order = sorted(range(len(relevance)), key=relevance.__getitem__, reverse=True)
    results = []
    for index in order[: ranked.top_n or None]:
        shown = {} if ranked.shown is None else {"document": ranked.shown[index]}
        own = {"index": index, "relevance_score": relevance[index]}
        results.append(own | shown | _beside(found.answers[index]))
    body = {"id": ranked.header["id"], "model": ranked.header["model"], "results": results}
    return json_response(body | {"usage": _usage(found)}, headers)


def _parse_rerank(service: Service, fields: Fields) -> _Ranked:
    header = take_header(service, fields, "rerank-")
    query: str = fields.need("query")
    given: list[str | dict[str, Any]] = fields.take("documents", list[str | dict[str, Any]], [])
    ranked_by: list[str] = fields.take("rank_fields", list[str], []) or ["text"]
    _check_count("documents", given)
    texts = [_text_of(one, ranked_by, f"documents[{index}]") for index, one in enumerate(given)]
    shown = [{"text": one} if isinstance(one, str) else one for one in given]
    top_n: int = fields.take("top_n", int, 0)
    if top_n < 0:
        raise InvalidRequest(f"top_n is {top_n}; it must be 0 or more.", field="top_n")
    repeats: bool = fields.take("return_documents", bool, True)
    states = _states(service, fields, header["id"], {query: texts})
    spelled = {"prompt": "query", "messages": "query", "chat": "query"}
    asked = ask(service, fields, header, states, RERANK, spelled)
    return _Ranked(asked, header, shown if repeats else None, top_n)


def _text_of(document: str | dict[str, Any], ranked_by: Sequence[str], path: str) -> str:
    """The text of a document: of an object, a line for each of the fields `ranked_by`."""
    if isinstance(document, str):
        return document
    values = []
    for field in ranked_by:
        value = document.get(field)
        if not isinstance(value, str):
            place = f"{path}.{field}"
            raise InvalidRequest(f"{place} is no text.", field=place, remedy="Name others in rank_fields.")
        values.append(value)
    return "\n".join(values)


class _Scored(NamedTuple):
    """A parsed request to score pairs."""

    asked: Asked
    header: dict[str, Any]
    order: list[int]
    """Index of the pair that each question is about."""
    field: str
    """Name of the field with the texts."""


@router.post(SCORE.path, any_key=True)
@router.post("/score", any_key=True)
async def score(request: Request) -> Response:
    scored, headers = await parse_body(request, SCORE, _parse_score)
    found = await answers_of(
        request, scored.asked, partial(_path_of, scored.field, scored.asked, scored.order)
    )
    data: list[Any] = [None] * len(scored.order)
    for index, one in zip(scored.order, found.answers, strict=True):
        own = {"index": index, "object": "score", "score": one.answer.probabilities[0]}
        data[index] = own | _beside(one)
    header = {name: scored.header[name] for name in ("id", "created", "model")}
    return json_response({"object": "list", "data": data, "usage": _usage(found)} | header, headers)


def _parse_score(service: Service, fields: Fields) -> _Scored:
    header = take_header(service, fields, "score-")
    first, second = _pair_of(fields)
    queries, texts = _take_texts(fields, first), _take_texts(fields, second)
    if len(queries) not in (1, len(texts)):
        raise InvalidRequest(
            f"{first} has {len(queries)} texts and {second} has {len(texts)}; it must have 1 or as many.",
            field=first,
        )
    pairs = list(enumerate(zip(queries if len(queries) > 1 else queries * len(texts), texts, strict=True)))
    by_query: dict[str, list[str]] = {}
    places: dict[str, list[int]] = {}
    for index, (query, text) in pairs:
        by_query.setdefault(query, []).append(text)
        places.setdefault(query, []).append(index)
    states = _states(service, fields, header["id"], by_query)
    spelled = {"prompt": first, "messages": first, "chat": first}
    asked = ask(service, fields, header, states, SCORE, spelled)
    return _Scored(asked, header, [index for each in places.values() for index in each], second)


def _pair_of(fields: Fields) -> tuple[str, str]:
    """The pair of `PAIRS` that the body has."""
    whole = [pair for pair in PAIRS if all(map(fields.given, pair))]
    if len(whole) == 1:
        return whole[0]
    begun = whole[1:] or [pair for pair in PAIRS if any(map(fields.given, pair))] or PAIRS
    missing = next((field for field in begun[0] if not fields.given(field)), begun[0][0])
    names = ", ".join(" and ".join(pair) for pair in PAIRS)
    raise InvalidRequest(f"Give one of these pairs of fields: {names}.", field=missing)


def _take_texts(fields: Fields, field: str) -> list[str]:
    value: str | list[str] = fields.take(field, str | list[str])
    texts = [value] if isinstance(value, str) else value
    _check_count(field, texts)
    return texts


def _check_count(field: str, texts: Sequence[Any]) -> None:
    if not 1 <= len(texts) <= MAX_OBJECTS:
        raise InvalidRequest(
            f"{field} has {len(texts)} items; it must have from 1 to {MAX_OBJECTS}.", field=field
        )


def _states(service: Service, fields: Fields, rid: str, texts: Mapping[str, Sequence[str]]) -> States:
    """States for queries with the texts to score, each with at most `MAX_QUESTIONS` questions.

    The layout of a reranker writes query, document and instruction itself.
    """
    instruction: str = fields.take("instruction", str, "")
    states = []
    for query, documents in texts.items():
        if trained_layout(service, fields) == RERANKER:
            system = (ChatMessage(role="system", content=instruction),) if instruction else ()
            state = Generate(rid=rid, chat=(*system, ChatMessage(role="user", content=query)))
            written = documents
        else:
            state = text_state(f"Query: {query}", rid, service.frontend.info.chat_format)
            written = [f"Document: {one}\n\n{instruction or RELEVANCE}" for one in documents]
        for start in range(0, len(written), MAX_QUESTIONS):
            questions = [
                Question(kind="predicate", instructions=text, options=PREDICATE_OPTIONS)
                for text in written[start : start + MAX_QUESTIONS]
            ]
            states.append((state, questions))
    return states


def _path_of(texts: str, asked: Asked, order: Sequence[int] | None, place: Place, state: int) -> str:
    """The client's path of a place. The client has written the questions in the field `texts`.

    order : index of the text that each question is about; None if they are in the order of the texts
    """
    if place.question is None:
        return texts if place.name == "questions" else place.name
    index = sum(map(len, asked.questions[:state])) + place.question
    return f"{texts}[{index if order is None else order[index]}]"


def _beside(one: Answered) -> dict[str, Any]:
    """`own_fields` of an answer. ``prompt_ids`` has the state before each written form."""
    whole = [(*one.state_ids, *form) for form in one.form_ids]
    return one._replace(form_ids=whole).own_fields()


def _usage(found: Answers) -> dict[str, Any]:
    return {
        "prompt_tokens": found.prompt_tokens,
        "total_tokens": found.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": found.cached_tokens},
    }
