"""The answers of a scripted backend: the choice of the answer to a step, and the text of an answer."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.constraint import Constraint
from ramify.errors import BackendError
from ramify.lang.backends.answer_check import problem_of
from ramify.lang.tools.forms import TaggedCalls, WrittenCalls
from ramify.lang.typed.questions import name_of
from ramify.messages import Generate
from ramify.questions import FormScores, Question, QuestionScores
from ramify.spelling import nearest
from ramify.text import shortened

Answer = Any
"""A text; a value whose JSON the step's schema allows; tool calls; an exception to raise; or a function that
gets the `Generate` request and returns one of these."""
Answers = Mapping[str, Answer] | Sequence[Answer] | Callable[[Generate], Answer]


class NotScripted(BackendError):
    """The error for a step to which a script has no answer, or an answer that no model could give.

    It ends the run: the program cannot recover from it, and `run` raises it. With
    ``ScriptedBackend(strict=False)`` it only fails the step.
    """

    code = "not_scripted"
    fatal = True


JSON_KINDS = ("json_schema", "json_object")
MAX_SHOWN = 200
"""Most characters of a constraint in a message."""


@dataclass(frozen=True)
class Step:
    """A step of a program that needs an answer."""

    name: str
    """Name of the step; empty for a step without a name, and for a step of another process."""
    number: int
    """Number of the request to the backend, from 1."""
    request: Generate
    prompt: str
    form: TaggedCalls | None
    """Format of the step's tool calls; None for a step that calls no tools."""

    @property
    def opening(self) -> str:
        """The beginning of the first tool call, if the prompt ends with that beginning; else empty."""
        opening = self.form.opening(True) if self.form is not None else ""
        return opening if self.prompt.endswith(opening) else ""

    @property
    def wants(self) -> str:
        """Description of the answer that the step expects, for error messages."""
        if self.request.choices is not None:
            return f"one of {json.dumps(self.request.choices.texts, ensure_ascii=False)}"
        if self.request.decide is not None:
            return " and ".join(map(_options_of, self.request.decide.questions))
        constraint = self.request.constraint
        if constraint is None:
            return "text"
        if self.form is not None:
            return "tool calls"
        return f"{constraint.kind} {shortened(constraint.source, MAX_SHOWN)}"


@dataclass(frozen=True)
class Scripted:
    """An answer, and a sentence about the answer's place in the script, which ends error messages."""

    answer: Answer
    place: str
    in_order: bool = False
    """Whether the answer comes from a list of answers."""


class Script:
    """A script, and the positions up to which its answers have been used."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._used: Counter[str] = Counter()
        self._names: set[str] = set()
        self._searched: dict[str, Step] = {}
        """Keys that answered as a regular expression, each with the first step that it answered."""

    @property
    def unused(self) -> list[tuple[str | int, Answer]]:
        """(key or index, answer) of each answer that was not used."""
        if callable(self._answers):
            return []
        left: list[tuple[str | int, Answer]] = []
        if not isinstance(self._answers, Mapping):
            left += enumerate(self._answers)
            return left[self._used[""] :]
        for key, found in self._answers.items():
            left += [(key, one) for one in (found if _in_order(found) else [found])[self._used[key] :]]
        return left

    def next(self, step: Step) -> Scripted:
        """Take the answer to `step`. Raises `NotScripted` if there is no answer, and the answer itself if it
        is an exception."""
        found = self._find(step)
        answer = found.answer(step.request) if callable(found.answer) else found.answer
        if isinstance(answer, BaseException):
            raise answer
        return Scripted(answer, found.place, found.in_order)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """A ``with`` block that takes all answers of a request. If it raises, none is taken."""
        before = self._used.copy()
        try:
            yield
        except Exception:
            self._used = before
            raise

    def _find(self, step: Step) -> Scripted:
        answers = self._answers
        if callable(answers):
            return Scripted(answers, f"It is the script's answer to call {step.number}.")
        if not isinstance(answers, Mapping):
            return self._take("", answers, step)
        self._names.add(step.name)
        if step.name and step.name in answers:
            if (other := self._searched.get(step.name)) is not None:
                raise _lacks(answers, other, step.name)
            return self._take(step.name, answers[step.name], step)
        near = [key for key in answers if re.search(key, step.prompt)]
        for key in near:
            if key not in self._names:
                self._searched.setdefault(key, step)
                return self._take(key, answers[key], step)
        raise _lacks(answers, step, *near[:1])

    def _take(self, key: str, answer: Any, step: Step) -> Scripted:
        used = self._used[key]
        whose = f" for {key!r}" if key else ""
        if not _in_order(answer):
            self._used[key] = 1
            return Scripted(answer, f"It is the script's answer{whose}, in call {step.number}.")
        if used == len(answer):
            raise NotScripted(
                f"The script's {used} answers{whose} are used up. Call {step.number}, of "
                f"{step.name or 'an unnamed step'!r}, wants {step.wants}."
            )
        self._used[key] = used + 1
        place = f"It is answer {used + 1} of {len(answer)}{whose} in the script, in call {step.number}."
        return Scripted(answer[used], place, True)


def _lacks(answers: Mapping[str, Answer], step: Step, near: str = "") -> NotScripted:
    """The error for `step`, which has no answer, and in whose prompt the name `near` of a step stands."""
    keys = ", ".join(map(repr, answers)) or "none"
    found = f" {near!r} stands in its prompt, but is the name of another step." if near else ""
    return NotScripted(
        f"The script has no answer for {step.name or 'an unnamed step'!r}, which is call {step.number} "
        f"and wants {step.wants}. Its keys are {keys}.{found}",
        remedy=nearest(step.name, answers),
    )


def _in_order(answer: Any) -> bool:
    return isinstance(answer, Sequence) and not isinstance(answer, str)


# --- decisions ---------------------------------------------------------------------------------------

LEAST = 1e-300
"""Probability in place of 0, whose logarithm has no JSON."""


def scores_of(found: Scripted, fields: Sequence[str], questions: Sequence[Question]) -> list[QuestionScores]:
    """The scores of a step's `questions` that give the answer of a script: a value, which gets probability 1,
    or a mapping from values to probabilities. For a step with `fields`, a mapping from fields to such
    answers, or an object with these attributes. Raises `NotScripted` for an answer that has something
    else."""
    if fields == ("",):
        return [_scores(found.answer, question, found) for question in questions]
    answers = found.answer if isinstance(found.answer, Mapping) else getattr(found.answer, "__dict__", {})
    missing = [one for one in fields if one not in answers]
    unknown = [one for one in answers if one not in fields]
    if missing or unknown:
        lacks = f" It has nothing for {', '.join(missing)}." * bool(missing)
        lacks += f" It has {', '.join(map(str, unknown))}, which is no field to decide." * bool(unknown)
        raise NotScripted(
            f"The script answers with {found.answer!r}.{lacks} {found.place}",
            remedy=nearest(str(unknown[0]), missing) if unknown else None,
        )
    return [_scores(answers[one], question, found) for one, question in zip(fields, questions, strict=True)]


def _scores(answer: Answer, question: Question, found: Scripted) -> QuestionScores:
    options = len(question.options)
    if isinstance(answer, Mapping):
        masses = [0.0] * options
        numbers = all(isinstance(mass, int | float) and mass >= 0 for mass in answer.values())
        for value, mass in answer.items() if numbers else ():
            masses[_option(value, question, found)] += mass
        if not 0 < math.fsum(masses) < 1 + 1e-9:
            raise NotScripted(
                f"The script answers with {answer!r}; probabilities have a sum above 0 and up to 1. "
                f"{found.place}"
            )
    else:
        masses = [0.0] * options
        masses[_option(answer, question, found)] = 1.0
    return uniform(question, masses)


def uniform(question: Question, masses: Sequence[float] = ()) -> QuestionScores:
    """Scores that give the options these probabilities, by default equal ones."""
    options = len(question.options)
    logprobs = tuple(math.log(max(mass, LEAST)) for mass in masses or [1 / options] * options)
    form = FormScores(options=tuple(range(options)), logprobs=logprobs, lengths=(1,) * options)
    return QuestionScores(layout="scripted-1", forms=(form,))


def _option(value: Answer, question: Question, found: Scripted) -> int:
    """The index of the option that `value` stands for: a bool, the name of an option, a member of an Enum, or
    the number or the name of a level."""
    names = [option.name for option in question.options]
    if question.kind == "score" and type(value) is int and 0 <= value < len(names):
        return value
    if name_of(value) in names:
        return names.index(name_of(value))
    raise NotScripted(
        f"The script decides for {value!r}, and wants {_options_of(question)}. {found.place}",
        remedy=nearest(str(value), names),
    )


def _options_of(question: Question) -> str:
    return "one of " + ", ".join(repr(option.name) for option in question.options)


def text_of(found: Scripted, step: Step) -> str:
    """The text of an answer. Raises `NotScripted` if the step's constraint does not allow the text."""
    answer, constraint = found.answer, step.request.constraint
    if isinstance(answer, str):
        text = answer
    elif step.form is not None:
        text = step.form.write("", _calls(found)).removeprefix(step.opening)
    elif constraint is None:
        raise NotScripted(
            f"The script answers with {answer!r}, which is no text. {found.place}",
            remedy="Write the text, or give the gen a schema.",
        )
    else:
        text = _json(found, constraint)
    if constraint is None:
        return text
    if problem := problem_of(text, constraint, step.form, step.opening):
        wanted = f" It wants {step.wants}." if constraint.kind in JSON_KINDS else ""
        raise NotScripted(
            f"The scripted answer {text!r} breaks its {constraint.kind}: {problem.text}.{wanted} "
            f"{found.place}",
            remedy=problem.remedy or _remedy(found, constraint),
        )
    return text


def _json(found: Scripted, constraint: Constraint) -> str:
    """The JSON text of an answer. Under a constraint that is not of a JSON kind, a string is written without
    quotes."""
    value = _jsonable(found.answer, found)
    plain = isinstance(value, str) and constraint.kind not in JSON_KINDS
    return value if plain else json.dumps(value, ensure_ascii=False)


def _jsonable(value: Any, found: Scripted) -> Any:
    import pydantic_core

    try:
        return pydantic_core.to_jsonable_python(value, by_alias=True)
    except pydantic_core.PydanticSerializationError as error:
        raise NotScripted(
            f"The script answers with {value!r}, which has no JSON: {error}. {found.place}"
        ) from error


def _calls(found: Scripted) -> WrittenCalls:
    """The tool calls in an answer: (name, arguments as JSON text). Raises `NotScripted` if the answer has
    anything but tool calls."""
    calls: WrittenCalls = []
    for one in found.answer if _in_order(found.answer) else [found.answer]:
        call = one if isinstance(one, Mapping) else getattr(one, "__dict__", {})
        if not isinstance(call.get("name"), str):
            raise NotScripted(
                f"The script answers with {one!r}, which is no tool call. {found.place}",
                remedy='Write rm.ToolCall(name, arguments), {"name": …, "arguments": {…}}, a list of these, '
                "or the text that the model would write.",
            )
        arguments = _jsonable(call.get("arguments", {}), found)
        calls.append((call["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls


def _remedy(found: Scripted, constraint: Constraint) -> str | None:
    array = constraint.kind == "json_schema" and json.loads(constraint.source).get("type") == "array"
    if array and found.in_order and not _in_order(found.answer):
        return "A list in a script is the answers in order; write [[…]] for one answer that is a list."
    return None
