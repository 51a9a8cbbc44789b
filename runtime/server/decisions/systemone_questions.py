"""Questions and answers in TypeSafe's form, System One.

    {"urgent": {"type": "noul", "instructions": "Is it urgent?"},
     "tone": {"type": "choice", "criteria": {"calm": None, "angry": "an upset message"}},
     "weight": {"type": "score", "criteria": ["can wait", "needs attention"]}}

A noul is a predicate. The levels of a score are named by their numbers, as in its legend: "0", "1", and so
on. Content that is an object or an array is read as compact JSON. Names of questions are written into the
answer alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ramify.decisions.answers import Answer
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.questions import MAX_OPTIONS, MAX_QUESTIONS, Option, Question, QuestionKind
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.tables.systemone import CRITERIA, QUESTION
from ramify.text import quoted

Content = str | dict[str, Any] | list[Any]

MAX_LEVELS = 10

_KINDS: dict[str, QuestionKind] = {"noul": "predicate", "choice": "choice", "score": "score"}


class Asked(NamedTuple):
    """A question, and what its answer repeats of it."""

    question: Question
    legend: list[Content]
    """The levels of a score as the client wrote them; empty for other kinds."""


class _Named(Fields):
    """An object whose keys are names that the client chose."""

    def path(self, field: str) -> str:
        return f"{self._path}{key_path(field)}"


def key_path(name: str) -> str:
    """`name` as part of a path, with quotes if it would be misread: ``.urgent``, ``["is it?"]``."""
    return f".{name}" if re.fullmatch(r"[\w-]+", name) else f"[{json.dumps(name, ensure_ascii=False)}]"


def text_of(content: Content | None) -> str:
    """`content` as the model reads it: text as it is, objects and arrays as compact JSON with their keys in
    the order of the body, None as an empty text."""
    if content is None:
        return ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def take_state(fields: Fields) -> str:
    """The text of the field ``state``. Raises `InvalidRequest` if it is missing."""
    state: Content | None = fields.take("state", Content)
    if state is None:
        raise InvalidRequest("state is missing.", field="state")
    return text_of(state)


def take_questions(fields: Fields) -> dict[str, Asked]:
    """Name → question, of the field ``questions``. Raises `InvalidRequest` and `UnsupportedField`, which name
    the place by its path, such as ``questions.urgent.criteria``."""
    given: dict[str, msgspec.Raw] | None = fields.take("questions", dict[str, msgspec.Raw])
    if given is None:
        raise InvalidRequest("questions is missing.", field="questions")
    _check_count(given, MAX_QUESTIONS, "questions")
    named = _Named(given, "questions", fields.body)
    left_out = fields.body.left_out
    return {name: _asked(_object(named, name)) for name in given if named.path(name) not in left_out}


def _object(named: _Named, name: str) -> Fields:
    question = named.take_object(name)
    if question is None:
        raise InvalidRequest(f"{named.path(name)} is null.", field=named.path(name))
    return question


def _asked(question: Fields) -> Asked:
    given: str = question.need("type")
    path = question.path("type")
    if given == "box":
        raise UnsupportedField(f"{path} is 'box'; images are not supported.", field=path)
    if given not in _KINDS:
        raise InvalidRequest(f"{path} is {quoted(given)}; it must be noul, choice or score.", field=path)
    kind = _KINDS[given]
    instructions = text_of(question.take("instructions", Content))
    legend: list[Content] = []
    match kind:
        case "predicate":
            options = _outcomes(question)
            if not instructions and not any(option.description for option in options):
                path = question.path("instructions")
                raise InvalidRequest(f"{path} is missing, and no criteria describe an outcome.", field=path)
        case "choice":
            options = _choices(question)
        case "score":
            legend = question.take("criteria", list[Content]) or []
            _check_count(legend, MAX_LEVELS, question.path("criteria"))
            options = tuple(
                Option(name=str(level), description=text_of(each)) for level, each in enumerate(legend)
            )
    question.finish(QUESTION)
    return Asked(Question(kind=kind, instructions=instructions, options=options), legend)


def _outcomes(question: Fields) -> tuple[Option, ...]:
    """True and false, with the descriptions in the criteria of a noul."""
    criteria = question.take_object("criteria")
    descriptions: dict[str, Content | None] = {}
    if criteria is not None:
        descriptions = {name: criteria.take(name, Content) for name in ("true", "false")}
        criteria.finish(CRITERIA)
    return tuple(Option(name=name, description=text_of(descriptions.get(name))) for name in ("true", "false"))


def _choices(question: Fields) -> tuple[Option, ...]:
    path = question.path("criteria")
    given: dict[str, Any] = question.take("criteria", dict[str, Any]) or {}
    _check_count(given, MAX_OPTIONS, path)
    for name, description in given.items():
        place = path + key_path(name)
        if not name:
            raise InvalidRequest(f"{path} has an option without a name.", field=place)
        if not isinstance(description, str | dict | list | None):
            raise InvalidRequest(f"{place} must be a text, an object, an array or null.", field=place)
    return tuple(Option(name=name, description=text_of(content)) for name, content in given.items())


def _check_count(entries: list[Any] | Mapping[str, Any], most: int, path: str) -> None:
    if not 1 <= len(entries) <= most:
        raise InvalidRequest(f"{path} has {len(entries)} entries; it must have 1 to {most}.", field=path)


def answer_body(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The JSON of an answer. ``option_mass`` and ``layout`` are Ramify's own fields."""
    names = [option.name for option in asked.question.options]
    probabilities = dict(zip(names, answer.probabilities, strict=True))
    body: dict[str, Any]
    match asked.question.kind:
        case "predicate":
            body = {"type": "noul", "noul": answer.probabilities[0]}
        case "choice":
            body = {"type": "choice", "choice": names[answer.best], "confidence": answer.confidence}
            body |= {"probabilities": probabilities}
        case "score":
            body = {"type": "score", "score": answer.score, "confidence": answer.confidence}
            body |= {"legend": dict(zip(names, asked.legend, strict=True)), "probabilities": probabilities}
    return body | {"option_mass": answer.option_mass, "layout": answer.layout}
