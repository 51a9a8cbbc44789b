"""The bodies and the answers of decision APIs, translated from `Decide` and to `DecisionScores`.

OpenAI's form (``POST /v1/decisions``, openai-python 3.57, ``types/decision.py``):

    {"input": "It broke.", "questions": [{"type": "predicate", "instructions": "Is it a complaint?"}]}
    {"answers": [{"type": "predicate", "probability": 0.9}], "usage": {…}}

System One (``POST /v1/systemone``, typesafe-sdk 0.7.5, ``_schemas/models.py``):

    {"state": "It broke.", "questions": {"0": {"type": "noul", "instructions": "Is it a complaint?"}}}
    {"answers": {"0": {"type": "noul", "noul": 0.9}}, "usage": {…}}

A Ramify server adds ``option_mass``, ``layout`` and ``temperature`` to each answer. vLLM 0.32 gives the
option mass as ``{"diagnostics": {"0": {"label_mass": 0.8}}}`` beside the answers of System One. Names of
questions are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from ramify.decisions.layouts import DEFAULT_INSTRUCTIONS
from ramify.errors import BackendError, NotFound, RamifyError
from ramify.messages import ChatMessage, Usage
from ramify.questions import DecisionScores, Question, QuestionScores

OPENAI, SYSTEM_ONE = "/decisions", "/systemone"
"""Paths of the two APIs below a base URL that ends in ``/v1``."""

State = str | Sequence[ChatMessage]
Answered = tuple[DecisionScores, Usage]


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    option_mass: float | None = None
    layout: str | None = None
    temperature: float = 1.0


class _Entry(msgspec.Struct, frozen=True):
    value: str | bool | int
    probability: float


class _OpenAIAnswer(_Answer, frozen=True, kw_only=True):
    probability: float | None = None
    probabilities: tuple[_Entry, ...] = ()


class _SystemOneAnswer(_Answer, frozen=True, kw_only=True):
    noul: float | None = None
    probabilities: dict[str, float] = {}


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _CachedTokens | None = None


class _OpenAIBody(msgspec.Struct, frozen=True):
    answers: tuple[_OpenAIAnswer, ...]
    usage: _Usage | None = None


class _Diagnostics(msgspec.Struct, frozen=True):
    label_mass: float | None = None


class _SystemOneBody(msgspec.Struct, frozen=True):
    answers: dict[str, _SystemOneAnswer]
    usage: _Usage | None = None
    diagnostics: dict[str, _Diagnostics] = {}


# --- OpenAI's form ---


def openai_body(state: State, questions: Sequence[Question]) -> dict[str, Any]:
    """The fields ``input`` and ``questions``."""
    given = state if isinstance(state, str) else _items(state)
    return {"input": given, "questions": [_openai_question(question) for question in questions]}


def openai_scores(questions: Sequence[Question], answer: Any) -> Answered:
    """The probabilities in `answer`. Raises `BackendError` if it does not answer all questions."""
    body = _read(answer, _OpenAIBody, OPENAI)
    if len(body.answers) != len(questions):
        raise BackendError(f"{OPENAI} answered {len(body.answers)} questions; {len(questions)} were asked.")
    found = []
    for number, (question, one) in enumerate(zip(questions, body.answers, strict=True)):
        if one.type == "predicate" and one.probability is not None:
            table: dict[Any, float] = {True: one.probability, False: 1.0 - one.probability}
        else:
            table = {entry.value: entry.probability for entry in one.probabilities}
        values = _openai_values(question)
        found.append(_scores(OPENAI, number, one, values, table))
    return DecisionScores(questions=tuple(found)), _usage(body.usage)


def _openai_question(question: Question) -> dict[str, Any]:
    instructions = question.instructions or DEFAULT_INSTRUCTIONS[question.kind]  # required in this form
    asked = {"type": question.kind, "instructions": instructions}
    if question.kind == "score":
        return asked | {"levels": _described("label", question)}
    if question.kind == "choice":
        return asked | {"choices": _described("value", question)}
    if not any(option.description for option in question.options):
        return asked
    # A predicate has no descriptions in this form; a choice between true and false has.
    return asked | {"type": "choice", "choices": _described("value", question)}


def _described(key: str, question: Question) -> list[dict[str, Any]]:
    entries = []
    for value, option in zip(_names(question), question.options, strict=True):
        entries.append({key: value} | ({"description": option.description} if option.description else {}))
    return entries


def _names(question: Question) -> list[Any]:
    if question.kind == "predicate":
        return [True, False]
    return [option.name for option in question.options]


def _openai_values(question: Question) -> list[Any]:
    """The values by which an answer names the options."""
    return list(range(len(question.options))) if question.kind == "score" else _names(question)


def _items(chat: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The turns of a chat as items of OpenAI's Responses API, without their reasoning."""
    items: list[dict[str, Any]] = []
    for turn in chat:
        if turn.role == "tool":
            items.append(
                {"type": "function_call_output", "call_id": turn.tool_call_id, "output": turn.content}
            )
            continue
        if turn.content or not turn.tool_calls:
            items.append({"role": turn.role, "content": turn.content})
        for call in turn.tool_calls:
            items.append(
                {
                    "type": "function_call",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": call.arguments,
                }
            )
    return items


# --- System One ---


def system_one_body(state: State, questions: Sequence[Question]) -> dict[str, Any]:
    """The fields ``state`` and ``questions``. A chat of one user turn is sent as its text, any other chat as
    the list of its messages."""
    if not isinstance(state, str):
        alone = len(state) == 1 and state[0].role == "user"
        given: Any = state[0].content if alone else _items(state)
    else:
        given = state
    asked = {str(number): _system_one_question(question) for number, question in enumerate(questions)}
    return {"state": given, "questions": asked}


def system_one_scores(questions: Sequence[Question], answer: Any) -> Answered:
    """The probabilities in `answer`. Raises `BackendError` if it does not answer all questions."""
    body = _read(answer, _SystemOneBody, SYSTEM_ONE)
    found = []
    for number, question in enumerate(questions):
        one = body.answers.get(str(number))
        if one is None:
            raise BackendError(f"{SYSTEM_ONE} did not answer question {number}.")
        if (told := body.diagnostics.get(str(number))) is not None:
            one = msgspec.structs.replace(one, option_mass=told.label_mass)
        table: dict[Any, float] = dict(one.probabilities)
        values: list[Any] = [option.name for option in question.options]
        if question.kind == "predicate":
            values = [True, False]
            table = {} if one.noul is None else {True: one.noul, False: 1.0 - one.noul}
        elif question.kind == "score":
            values = [str(level) for level in range(len(question.options))]
        found.append(_scores(SYSTEM_ONE, number, one, values, table))
    return DecisionScores(questions=tuple(found)), _usage(body.usage)


def _system_one_question(question: Question) -> dict[str, Any]:
    instructions = {"instructions": question.instructions} if question.instructions else {}
    described = [option.description or None for option in question.options]
    if question.kind == "score":
        levels = [
            f"{option.name}: {option.description}" if option.description else option.name
            for option in question.options
        ]
        return {"type": "score", **instructions, "criteria": levels}
    names: Iterable[str] = ("true", "false")
    if question.kind == "choice":
        names = [option.name for option in question.options]
    elif not any(described):
        return {"type": "noul", **instructions}
    kind = "noul" if question.kind == "predicate" else "choice"
    return {"type": kind, **instructions, "criteria": dict(zip(names, described, strict=True))}


# --- both ---


def _scores(
    path: str, number: int, answer: _Answer, values: Sequence[Any], table: dict[Any, float]
) -> QuestionScores:
    layout = answer.layout or path
    if answer.type == "refusal":
        return QuestionScores(layout=layout)
    if missing := [value for value in values if value not in table]:
        raise BackendError(f"{path} gave no probability for option {missing[0]!r} of question {number}.")
    return QuestionScores(
        layout=layout,
        probabilities=tuple([table[value] for value in values]),
        option_mass=answer.option_mass,
        temperature=answer.temperature,
    )


def _read(answer: Any, kind: type[Any], path: str) -> Any:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise BackendError(f"{path} answered something else than decisions: {error}.") from None


def _usage(found: _Usage | None) -> Usage:
    if found is None:
        return Usage()
    details = found.input_tokens_details
    return Usage(
        prompt_tokens=found.input_tokens,
        cached_tokens=0 if details is None else details.cached_tokens,
        completion_tokens=found.output_tokens,
    )


class DecisionApi(NamedTuple):
    """A decision API: its path, the fields of a request, and the reading of an answer."""

    path: str
    body: Callable[[State, Sequence[Question]], dict[str, Any]]
    scores: Callable[[Sequence[Question], Any], Answered]


DECISION_APIS = (
    DecisionApi(OPENAI, openai_body, openai_scores),
    DecisionApi(SYSTEM_ONE, system_one_body, system_one_scores),
)
"""In the order in which an endpoint is asked for them."""


def is_missing(error: RamifyError) -> bool:
    """Whether `error` says that the endpoint has no such API, or not for this model.

    A 404 with a remedy is a wrong base URL.
    """
    return error.field == "model" or (isinstance(error, NotFound) and error.remedy is None)
