"""Questions and answers in TypeSafe's form."""

from __future__ import annotations

import json
import sys
from math import log
from typing import Any

import pytest

from ramify.decisions.answers import answer
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.questions import MAX_OPTIONS, MAX_QUESTIONS, FormScores, Option, Question, QuestionScores
from ramify.runtime.server.decisions.ask import Answered
from ramify.runtime.server.decisions.systemone_questions import (
    answer_body,
    take_questions,
    take_state,
    text_of,
)
from ramify.runtime.server.errors import Problem, systemone_body
from ramify.runtime.server.fields import Fields


def parsed(questions: Any) -> dict[str, Question]:
    fields = Fields.parse(json.dumps({"questions": questions}).encode())
    return {name: one.question for name, one in take_questions(fields).items()}


def test_each_kind() -> None:
    found = parsed(
        {
            "b": {"type": "noul", "instructions": "Is it late?", "criteria": {"true": "after 8"}},
            "a": {"type": "choice", "criteria": {"calm": None, "angry": {"by": ["tone", 1.50]}}},
            "": {"type": "score", "instructions": ["How", "bad?"], "criteria": ["é", {"x": None}]},
        }
    )
    assert list(found.items()) == [
        (
            "b",
            Question(
                kind="predicate",
                instructions="Is it late?",
                options=(Option(name="true", description="after 8"), Option(name="false")),
            ),
        ),
        (
            "a",
            Question(
                kind="choice",
                options=(Option(name="calm"), Option(name="angry", description='{"by": ["tone", 1.5]}')),
            ),
        ),
        (
            "",
            Question(
                kind="score",
                instructions='["How", "bad?"]',
                options=(Option(name="0", description="é"), Option(name="1", description='{"x": null}')),
            ),
        ),
    ]


def test_nouls_need_words() -> None:
    described = {"type": "noul", "criteria": {"true": None, "false": "no question"}}
    assert parsed({"q": described})["q"].options[1].description == "no question"
    for bare in ({}, {"criteria": None}, {"criteria": {}}, {"instructions": "", "criteria": {"true": None}}):
        with pytest.raises(InvalidRequest) as caught:
            parsed({"q": {"type": "noul", **bare}})
        assert caught.value.field == "questions.q.instructions"


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ('"a \\n b"', "a \n b"),
        ('""', ""),
        ('{ "b": 1, "a": [true, null, 2.0], "c": {} }', '{"b": 1, "a": [true, null, 2.0], "c": {}}'),
        (
            '["\\u00e9","\\ud83d\\ude42", 12345678901234567890123]',
            '["é", "🙂", 12345678901234567890123]',
        ),
    ],
)
def test_state_is_text_or_a_line_of_json(sent: str, text: str) -> None:
    assert take_state(Fields.parse(b'{"state": %s}' % sent.encode())) == text


def test_state_of_a_decider() -> None:
    fields = b'{"state": {"a": [1, 2], "b": [0, 1, 2, 3, 4, 5, 6, {"c": 7}]}}'
    numbered = ", ".join(f'{{"_index": {n}, "value": {n}}}' for n in range(7)) + ', {"_index": 7, "c": 7}'
    assert take_state(Fields.parse(fields), "decider-1") == f'{{"a": [1, 2], "b": [{numbered}]}}'
    assert take_state(Fields.parse(fields)) == '{"a": [1, 2], "b": [0, 1, 2, 3, 4, 5, 6, {"c": 7}]}'


@pytest.mark.parametrize("sent", ["{}", '{"state": null}', '{"state": 5}', '{"state": true}'])
def test_other_states(sent: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        take_state(Fields.parse(sent.encode()))
    assert caught.value.field == "state"


CHOICE: Any = {"type": "choice", "criteria": {"a": None}}
SCORE: Any = {"type": "score", "criteria": ["a"]}
NOUL: Any = {"type": "noul", "instructions": "x"}
WRONG: list[tuple[Any, str, list[str | int]]] = [
    (None, "questions", ["questions"]),
    ([], "questions", ["questions"]),
    ({}, "questions", ["questions"]),
    ({str(n): NOUL for n in range(MAX_QUESTIONS + 1)}, "questions", ["questions"]),
    ({"q": None}, "questions.q", ["questions", "q"]),
    ({"q": "x"}, "questions.q", ["questions", "q"]),
    ({"is it?": {}}, 'questions["is it?"].type', ["questions", "is it?", "type"]),
    ({'a"].[0]': {"type": "x"}}, 'questions["a\\"].[0]"].type', ["questions", 'a"].[0]', "type"]),
    ({"": NOUL | {"a": 1}}, 'questions[""].a', ["questions", "", "a"]),
    ({"1": NOUL | {"instructions": 5}}, "questions.1.instructions", ["questions", "1", "instructions"]),
    ({"q": NOUL | {"criteria": []}}, "questions.q.criteria", ["questions", "q", "criteria"]),
    (
        {"q": NOUL | {"criteria": {"true": 1}}},
        "questions.q.criteria.true",
        ["questions", "q", "criteria", "true"],
    ),
    (
        {"q": NOUL | {"criteria": {"yes": "x"}}},
        "questions.q.criteria.yes",
        ["questions", "q", "criteria", "yes"],
    ),
    ({"q": CHOICE | {"criteria": None}}, "questions.q.criteria", ["questions", "q", "criteria"]),
    ({"q": CHOICE | {"criteria": {}}}, "questions.q.criteria", ["questions", "q", "criteria"]),
    ({"q": CHOICE | {"criteria": ["a"]}}, "questions.q.criteria", ["questions", "q", "criteria"]),
    ({"q": CHOICE | {"criteria": {"": "x"}}}, 'questions.q.criteria[""]', ["questions", "q", "criteria", ""]),
    (
        {"q": CHOICE | {"criteria": {"a": "x", "b.c": False}}},
        'questions.q.criteria["b.c"]',
        ["questions", "q", "criteria", "b.c"],
    ),
    (
        {"q": CHOICE | {"criteria": dict.fromkeys(map(str, range(MAX_OPTIONS + 1)))}},
        "questions.q.criteria",
        ["questions", "q", "criteria"],
    ),
    ({"q": SCORE | {"criteria": []}}, "questions.q.criteria", ["questions", "q", "criteria"]),
    ({"q": SCORE | {"criteria": ["a"] * 11}}, "questions.q.criteria", ["questions", "q", "criteria"]),
    ({"q": SCORE | {"criteria": ["a", None]}}, "questions.q.criteria[1]", ["questions", "q", "criteria", 1]),
]


@pytest.mark.parametrize(("questions", "field", "loc"), WRONG)
def test_wrong_questions_are_named(questions: Any, field: str, loc: list[str | int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(questions)
    assert caught.value.field == field
    problem = Problem.of(caught.value)._replace(status=422)
    (detail,) = json.loads(systemone_body(problem))["detail"]
    assert detail == {"loc": ["body", *loc], "msg": str(caught.value), "type": caught.value.code}


def test_the_largest_questions() -> None:
    options = dict.fromkeys(map(str, range(MAX_OPTIONS)))
    found = parsed({str(n): CHOICE | {"criteria": options} for n in range(MAX_QUESTIONS)})
    assert len(found) == MAX_QUESTIONS
    assert len(found["399"].options) == MAX_OPTIONS
    assert len(parsed({"q": SCORE | {"criteria": ["a"] * 10}})["q"].options) == 10


def test_boxes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedField, match="images are not supported") as caught:
        parsed({"q": {"type": "box", "instructions": "the dog"}})
    assert caught.value.field == "questions.q.type"


def test_answers() -> None:
    fields = Fields.parse(
        json.dumps(
            {
                "questions": {
                    "n": NOUL,
                    "c": {"type": "choice", "criteria": {"x": None, "y": "z"}},
                    "s": {"type": "score", "criteria": ["low", {"a": 1}, "high"]},
                    "one": SCORE,
                }
            }
        ).encode()
    )
    scores = {"n": (0.3, 0.1), "c": (0.1, 0.3), "s": (0.25, 0.25, 0.5), "one": (0.5,)}
    bodies = {
        name: answer_body(one, Answered(answer(one.question, written(scores[name])), [], ()))
        for name, one in take_questions(fields).items()
    }
    own = {"layout": "verbatim-1"}
    assert bodies == {
        "n": {"type": "noul", "noul": pytest.approx(0.75), "option_mass": pytest.approx(0.4)} | own,
        "c": {
            "type": "choice",
            "choice": "y",
            "confidence": pytest.approx(0.5),
            "probabilities": {"x": pytest.approx(0.25), "y": pytest.approx(0.75)},
            "option_mass": pytest.approx(0.4),
        }
        | own,
        "s": {
            "type": "score",
            "score": pytest.approx(1.25),
            "confidence": pytest.approx(max(0, 1 - 0.75 / (2 / 3))),
            "legend": {"0": "low", "1": {"a": 1}, "2": "high"},
            "probabilities": {"0": pytest.approx(0.25), "1": pytest.approx(0.25), "2": pytest.approx(0.5)},
            "option_mass": pytest.approx(1.0),
        }
        | own,
        "one": {
            "type": "score",
            "score": 0.0,
            "confidence": 1.0,
            "legend": {"0": "a"},
            "probabilities": {"0": 1.0},
            "option_mass": pytest.approx(0.5),
        }
        | own,
    }


def written(probabilities: tuple[float, ...]) -> QuestionScores:
    """Scores of a question whose options have one spelling each."""
    form = FormScores(
        options=tuple(range(len(probabilities))),
        logprobs=tuple(map(log, probabilities)),
        lengths=(1,) * len(probabilities),
    )
    return QuestionScores(layout="verbatim-1", forms=(form,))


def test_json_that_is_nested_too_deeply() -> None:
    deep: Any = []
    for _ in range(5 * sys.getrecursionlimit()):  # hypothesis raises the limit
        deep = [deep]
    with pytest.raises(InvalidRequest, match="state is nested too deeply"):
        text_of(deep, "state")
