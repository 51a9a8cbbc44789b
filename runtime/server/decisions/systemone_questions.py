"""Questions and answers in TypeSafe's form, System One.

    {"urgent": {"type": "noul", "instructions": "Is it urgent?"},
     "tone": {"type": "choice", "criteria": {"calm": None, "angry": "an upset message"}},
     "weight": {"type": "score", "criteria": ["can wait", "needs attention"]}}

A noul is a predicate. The levels of a score are options with the names "0", "1", … of its legend, and the
levels' texts are their descriptions. Names of questions are written into the answer alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ramify.decisions.checks import Place
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.questions import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    PREDICATE_OPTIONS,
    Option,
    Question,
    QuestionKind,
)
from ramify.runtime.server.decisions.ask import Answered
from ramify.runtime.server.decisions.state import json_line
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.tables.systemone import OUTCOMES, QUESTION
from ramify.text import quoted

Content = str | dict[str, Any] | list[Any]

MAX_LEVELS = 10

_FIELDS = {"kind": "type", "instructions": "instructions", "options": "criteria"}
"""Field of a `Question` → the client's."""
_KINDS: dict[str, QuestionKind] = {"noul": "predicate", "choice": "choice", "score": "score"}


class NamedQuestion(NamedTuple):
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


def text_of(content: Content | None, path: str, trained_layout: str = "") -> str:
    """`content`, which stands at `path`, as the model reads it. Objects and arrays are a `json_line`. None is
    an empty text.

    trained_layout : as in `json_line`
    """
    if content is None or isinstance(content, str):
        return content or ""
    try:
        return json_line(content, trained_layout)
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply.", field=path) from None


def _take_text(fields: Fields, field: str) -> str:
    return text_of(fields.take(field, Content), fields.path(field))


def take_state(fields: Fields, trained_layout: str = "") -> str:
    """The text of the field ``state``. Raises `InvalidRequest` if it is missing.

    trained_layout : the layout that the state is written for; empty for one of other models
    """
    if not fields.given("state"):
        raise InvalidRequest("state is missing.", field="state")
    return text_of(fields.take("state", Content), fields.path("state"), trained_layout)


def take_questions(fields: Fields) -> dict[str, NamedQuestion]:
    """Name → question, of the field ``questions``. Raises `InvalidRequest` and `UnsupportedField`, which name
    the place by its path, such as ``questions.urgent.criteria``."""
    given: dict[str, msgspec.Raw] | None = fields.take("questions", dict[str, msgspec.Raw])
    if given is None:
        raise InvalidRequest("questions is missing.", field="questions")
    _check_count(given, MAX_QUESTIONS, "questions")
    named = _Named(given, "questions", fields.body)
    left_out = fields.body.left_out
    return {name: _taken(_object(named, name)) for name in given if named.path(name) not in left_out}


def _object(named: _Named, name: str) -> Fields:
    question = named.take_object(name)
    if question is None:
        raise InvalidRequest(f"{named.path(name)} is null.", field=named.path(name))
    return question


def _taken(question: Fields) -> NamedQuestion:
    question.taken.update(QUESTION.names("taken"))
    question.finish(QUESTION)  # first, as a question with another wrong field is left out after that
    given: str = question.need("type")
    path = question.path("type")
    if given == "box":
        raise UnsupportedField(f"{path} is 'box'; images are not supported.", field=path)
    if given not in _KINDS:
        raise InvalidRequest(f"{path} is {quoted(given)}; it must be noul, choice or score.", field=path)
    kind = _KINDS[given]
    instructions = _take_text(question, "instructions")
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
            path = question.path("criteria")
            _check_count(legend, MAX_LEVELS, path)
            options = tuple(
                [
                    Option(name=str(level), description=text_of(content, path))
                    for level, content in enumerate(legend)
                ]
            )
    return NamedQuestion(Question(kind=kind, instructions=instructions, options=options), legend)


def _outcomes(question: Fields) -> tuple[Option, ...]:
    """True and false, with the descriptions in the criteria of a noul."""
    criteria = question.take_object("criteria")
    if criteria is None:
        return PREDICATE_OPTIONS
    options = tuple(
        Option(name=one.name, description=_take_text(criteria, one.name)) for one in PREDICATE_OPTIONS
    )
    criteria.finish(OUTCOMES)
    return options


def _choices(question: Fields) -> tuple[Option, ...]:
    path = question.path("criteria")
    given: dict[str, Any] = question.take("criteria", dict[str, Any]) or {}
    _check_count(given, MAX_OPTIONS, path)
    for name, content in given.items():
        if not name:
            raise InvalidRequest(f"{path} has an option without a name.", field=path + key_path(name))
        if not isinstance(content, str | dict | list | None):
            place = path + key_path(name)
            raise InvalidRequest(f"{place} must be a text, an object, an array or null.", field=place)
    return tuple([Option(name=name, description=text_of(content, path)) for name, content in given.items()])


def _check_count(entries: list[Any] | Mapping[str, Any], most: int, path: str) -> None:
    if not 1 <= len(entries) <= most:
        raise InvalidRequest(f"{path} has {len(entries)} entries; it must have 1 to {most}.", field=path)


def answer_body(asked: NamedQuestion, found: Answered) -> dict[str, Any]:
    """The JSON of an answer."""
    answer = found.answer
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
    return body | found.own_fields()


def path_of(questions: Mapping[str, NamedQuestion], place: Place, state: int = 0) -> str:
    """The client's path of a place in the `Decide` of `questions`."""
    if place.question is None:
        return place.name
    name = list(questions)[place.question]
    path, question = f"questions{key_path(name)}", questions[name].question
    if place.option is not None:
        option = question.options[place.option].name
        return f"{path}.criteria" + (f"[{option}]" if question.kind == "score" else key_path(option))
    return f"{path}.{_FIELDS[place.name]}" if place.name in _FIELDS else path
