"""Decisions of remote endpoints: probabilities as they were given, and nothing that was not."""

from __future__ import annotations

import msgspec
import pytest

from ramify.decisions.answers import answer
from ramify.errors import BackendError, UnsupportedField
from ramify.questions import Option, Question, QuestionScores

TEAM = Question(
    kind="choice",
    instructions="Which team?",
    options=(Option(name="billing"), Option(name="returns", description="goods sent back")),
)


def test_given_probabilities_are_the_answer_bit_for_bit():
    given = (0.1 + 0.2, 0.7)  # 0.30000000000000004; no logarithm is taken and undone
    scores = QuestionScores(layout="/decisions", probabilities=given)
    over_the_wire = msgspec.json.decode(msgspec.json.encode(scores), type=QuestionScores)
    found = answer(TEAM, over_the_wire)
    assert (found.probabilities, found.option_mass, found.layout) == (given, None, "/decisions")
    assert found.confidence == pytest.approx(0.4)
    told = answer(TEAM, msgspec.structs.replace(scores, option_mass=0.25))
    assert told.option_mass == 0.25


def test_what_given_probabilities_do_not_tell_is_refused():
    scores = QuestionScores(layout="/decisions", probabilities=(0.5, 0.5))
    with pytest.raises(UnsupportedField) as refused:
        answer(TEAM, scores, normalise="mean")
    assert refused.value.field == "normalise"
    with pytest.raises(BackendError, match="declined"):
        answer(TEAM, QuestionScores(layout="/decisions"))
