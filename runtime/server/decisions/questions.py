"""Questions of OpenAI's ``/v1/decisions``, and their answers in that API's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ramify.decisions.checks import Place
from ramify.decisions.values import option_names
from ramify.errors import InvalidRequest
from ramify.questions import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    PREDICATE_OPTIONS,
    Option,
    Question,
    QuestionKind,
)
from ramify.runtime.server.decisions.ask import Answered
from ramify.runtime.server.decisions.state import take_parts
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.tables.decisions import CHOICE, INSTRUCTIONS_PART, LEVEL, QUESTION
from ramify.text import quoted

MIN_CHOICES = 2
MIN_LEVELS, MAX_LEVELS = 2, 10
"""Least and most options (OpenAI's limits). Most choices: `MAX_OPTIONS`."""


class NamedQuestion(NamedTuple):
    """A question as the client asks it."""

    name: str | None
    question: Question
    values: Sequence[str | bool]
    """The value of each choice, or the label of each level; empty for a predicate."""


def take_questions(fields: Fields) -> list[NamedQuestion]:
    """Take the field ``questions``."""
    questions = fields.take_objects("questions") or []
    _check_count(fields, "questions", len(questions), 1, MAX_QUESTIONS)
    return [take_question(one) for one in questions]


def take_question(fields: Fields) -> NamedQuestion:
    """Read the object of one question."""
    kind: QuestionKind = fields.need("type", QuestionKind)
    name: str | None = fields.take("name", str)
    instructions = take_parts(fields, "instructions", INSTRUCTIONS_PART)
    if not instructions:
        path = fields.path("instructions")
        raise InvalidRequest(f"{path} is empty.", field=path)
    values: Sequence[str | bool] = ()
    options: tuple[Option, ...] = PREDICATE_OPTIONS
    if kind == "choice":
        values, options = _take_choices(fields)
    elif kind == "score":
        values, options = _take_levels(fields)
    fields.finish(QUESTION)
    return NamedQuestion(name, Question(kind=kind, instructions=instructions, options=options), values)


def _take_choices(fields: Fields) -> tuple[list[str | bool], tuple[Option, ...]]:
    choices = fields.take_objects("choices") or []
    _check_count(fields, "choices", len(choices), MIN_CHOICES, MAX_OPTIONS)
    values: list[str | bool] = []
    descriptions: list[str] = []
    for choice in choices:
        values.append(choice.need("value", str | bool))
        descriptions.append(choice.take("description", str, ""))
        choice.finish(CHOICE)
    _check_unique(choices, "value", values)
    named = zip(option_names(values), descriptions, strict=True)
    return values, tuple(Option(name=name, description=text) for name, text in named)


def _take_levels(fields: Fields) -> tuple[list[str | bool], tuple[Option, ...]]:
    levels = fields.take_objects("levels") or []
    _check_count(fields, "levels", len(levels), MIN_LEVELS, MAX_LEVELS)
    options = []
    for level in levels:
        options.append(Option(name=level.need("label"), description=level.take("description", str, "")))
        level.finish(LEVEL)
    _check_unique(levels, "label", [option.name for option in options])
    return [option.name for option in options], tuple(options)


def _check_unique(options: Sequence[Fields], field: str, values: Sequence[str | bool]) -> None:
    seen: set[tuple[type, str | bool]] = set()
    for option, value in zip(options, values, strict=True):
        if (type(value), value) in seen:
            path = option.path(field)
            shown = quoted(value) if isinstance(value, str) else str(value).lower()
            raise InvalidRequest(f"{path} is {shown}, as an earlier one is.", field=path)
        seen.add((type(value), value))


def _check_count(fields: Fields, field: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most and not fields.body.left_out:  # which may be items of this list
        path = fields.path(field)
        raise InvalidRequest(f"{path} has {count} items; it must have from {least} to {most}.", field=path)


def answer_body(asked: NamedQuestion, found: Answered) -> dict[str, Any]:
    """The JSON of an answer."""
    answer = found.answer
    body: dict[str, Any] = {"type": answer.kind, "name": asked.name}
    if answer.kind == "predicate":
        body["probability"] = answer.probabilities[0]
    else:
        pairs = zip(asked.values, answer.probabilities, strict=True)
        body["confidence"] = answer.confidence
        if answer.kind == "choice":
            body["choice"] = asked.values[answer.best]
            body["probabilities"] = [{"value": value, "probability": p} for value, p in pairs]
        else:
            body["score"] = answer.score
            body["probabilities"] = [
                {"label": label, "value": level, "probability": p} for level, (label, p) in enumerate(pairs)
            ]
    return body | found.own_fields()


_OPTIONS = {"choice": ("choices", "value"), "score": ("levels", "label")}
"""Kind → the client's names of the options, and of the name of an option."""


def path_of(questions: Sequence[NamedQuestion], place: Place, state: int = 0) -> str:
    """The client's path of a place in the `Decide` of `questions`."""
    if place.question is None:
        return place.name
    path = f"questions[{place.question}]"
    options, name = _OPTIONS.get(questions[place.question].question.kind, ("", ""))
    path += "" if place.option is None else f".{options}[{place.option}]"
    names = {"kind": "type", "options": options, "name": name}
    return f"{path}.{names.get(place.name, place.name)}" if place.name else path
