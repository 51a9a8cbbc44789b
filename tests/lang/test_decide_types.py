"""Questions of Python types, and decisions that are used in place of their values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field

import ramify as rm
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang.typed.questions import questions_of
from ramify.questions import Option, Question
from tests.lang.steps import program_of


class Team(enum.Enum):
    BILLING = "billing"
    RETURNS = "goods back"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


def options(*pairs):
    return tuple(Option(name=name, description=about) for name, about in pairs)


@pytest.mark.parametrize(
    ("kind", "question", "values"),
    [
        (bool, ("predicate", ("true", ""), ("false", "")), (True, False)),
        (
            {True: "someone waits", False: "no one does"},
            ("predicate", ("true", "someone waits"), ("false", "no one does")),
            (True, False),
        ),
        (Literal[False, True], ("predicate", ("true", ""), ("false", "")), (True, False)),
        (Literal["a", "b"], ("choice", ("a", ""), ("b", "")), ("a", "b")),
        (Literal[1, 2], ("choice", ("1", ""), ("2", "")), (1, 2)),
        (Literal[True, "true"], ("choice", ("true", ""), ('"true"', "")), (True, "true")),
        (Team, ("choice", ("billing", ""), ("goods back", "")), (Team.BILLING, Team.RETURNS)),
        (Size, ("choice", ("SMALL", ""), ("LARGE", "")), (Size.SMALL, Size.LARGE)),
        (["a", ("b", "about b")], ("choice", ("a", ""), ("b", "about b")), ("a", "b")),
        ({"a": None, "b": "about b"}, ("choice", ("a", ""), ("b", "about b")), ("a", "b")),
        (
            {Team.BILLING: "invoices", Team.RETURNS: ""},
            ("choice", ("billing", "invoices"), ("goods back", "")),
            (Team.BILLING, Team.RETURNS),
        ),
        (
            Annotated[Team, {Team.RETURNS: "sent back"}],
            ("choice", ("billing", ""), ("goods back", "sent back")),
            (Team.BILLING, Team.RETURNS),
        ),
        (rm.Levels("low", ("high", "danger")), ("score", ("low", ""), ("high", "danger")), (0, 1)),
        (Annotated[int, rm.Levels("low", "high")], ("score", ("low", ""), ("high", "")), (0, 1)),
    ],
)  # fmt: skip
def test_a_type_is_a_question(kind, question, values):
    found = questions_of(kind, "Which?")
    shape, *pairs = question
    assert found.question == Question(kind=shape, instructions="Which?", options=options(*pairs))
    assert found.values == values


class Model(BaseModel):
    urgent: bool = Field(description="Is it urgent?")
    team: Annotated[Team, {Team.RETURNS: "sent back"}] = Field(alias="theTeam", description="Whose is it?")
    size: Literal["S", "L"]


@dataclass
class Data:
    urgent: Annotated[bool, Field(description="Is it urgent?")]
    size: Literal["S", "L"] = "S"


class Dict(TypedDict):
    urgent: Annotated[bool, Field(description="Is it urgent?")]


@pytest.mark.parametrize(
    ("kind", "instructions"),
    [
        (Model, {"urgent": "Is it urgent?", "theTeam": "Whose is it?", "size": ""}),
        (Data, {"urgent": "Is it urgent?", "size": ""}),
        (Dict, {"urgent": "Is it urgent?"}),
    ],
)
def test_a_type_with_fields_is_a_question_for_each(kind, instructions):
    found = questions_of(kind, None)
    assert {name: one.question.instructions for name, one in found.items()} == instructions


@pytest.mark.parametrize(
    ("answer", "kind", "value"),
    [
        ({"urgent": True, "theTeam": Team.RETURNS, "size": "L"}, Model,
         Model(urgent=True, theTeam=Team.RETURNS, size="L")),
        (Data(urgent=False, size="L"), Data, Data(urgent=False, size="L")),
        ({"urgent": True}, Dict, {"urgent": True}),
    ],
)  # fmt: skip
def test_the_value_of_a_type_with_fields_is_an_instance(answer, kind, value):
    state = program_of(rm.decide("x", kind)).run(backend=rm.ScriptedBackend({"x": answer}))
    assert (type(state["x"].value), state["x"].value) == (kind if kind is not Dict else dict, value)


class Nested(BaseModel):
    inner: Model


class Free(BaseModel):
    words: str = Field(description="Say something.")


class Mute(BaseModel):
    urgent: bool


@pytest.mark.parametrize(
    ("kind", "error", "field"),
    [
        (str, UnsupportedField, "x"),
        (list[str], UnsupportedField, "x"),
        (Nested, UnsupportedField, "x.inner"),
        (Free, UnsupportedField, "x.words"),
        (Mute, InvalidRequest, "x.urgent"),
        (["a", "a"], InvalidRequest, "x"),
        (Literal[1, "1"], InvalidRequest, "x"),
        ([1, True, "maybe"], InvalidRequest, "x"),
        (Literal[0, False], InvalidRequest, "x"),
        ([Size.SMALL, 1], InvalidRequest, "x"),
        ("Is it urgent?", InvalidRequest, "x"),
        (["a", ""], InvalidRequest, "x"),
        ([], InvalidRequest, "x"),
        ([{"value": "a"}], InvalidRequest, "x"),
        ([str(number) for number in range(256)], InvalidRequest, "x"),
        ({"a": 1, "b": "about"}, InvalidRequest, "x"),
        (Annotated[str, rm.Levels("low", "high")], InvalidRequest, "x"),
        (Annotated[Team, {"billing": "about"}], InvalidRequest, "x"),
    ],
)
def test_what_is_no_question_is_refused_with_its_place(kind, error, field):
    with pytest.raises(error) as refused:
        questions_of(kind, None, "x")
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("kind", "instructions", "words"),
    [
        (["a", "a"], None, "named 'a'"),
        ([1, "1"], None, "named '1'"),
        ([1, True, "maybe"], None, "1 and True, which are equal"),
        ("Is it urgent?", None, r"\(bool, 'Is it urgent\?'\)"),
        ("Is it urgent?", bool, "type comes first"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_to_write(kind, instructions, words):
    with pytest.raises(InvalidRequest, match=words):
        questions_of(kind, instructions, "x")


def test_a_model_takes_no_instructions_and_a_bool_needs_them():
    with pytest.raises(InvalidRequest) as refused:
        rm.decide("x", Model, "Which?")
    assert refused.value.field == "instructions"
    with pytest.raises(InvalidRequest, match="asks nothing"):
        rm.decide("x", bool)
    with pytest.raises(InvalidRequest) as refused:
        rm.decide("x")
    assert refused.value.field == "kind"
    assert rm.decide("x", choices=["a", "b"]).asked[""].values == ("a", "b")


# --- a decision in place of its value ---


@pytest.fixture
def state():
    backend = rm.ScriptedBackend(
        {
            "urgent": False,
            "team": Team.RETURNS,
            "risk": {"high": 0.003},
            "data": {"urgent": True, "size": "S"},
        }
    )
    return program_of(
        rm.decide("urgent", bool, "Is it?"),
        rm.decide("team", Team),
        rm.decide("risk", rm.Levels("low", "high")),
        rm.decide("data", Data),
    ).run(backend=backend)


@pytest.mark.parametrize("name", ["urgent", "team", "data"])
def test_a_decision_is_no_value(state, name):
    found = state[name]
    with pytest.raises(TypeError, match=r"\.value"):
        bool(found)
    with pytest.raises(TypeError, match=r"\.value"):
        _ = found == "returns"
    with pytest.raises(TypeError, match=r"\.value"):
        _ = found != False  # noqa: E712 - this comparison is the mistake
    with pytest.raises(TypeError):
        hash(found)
    assert found == state[name]
    assert found.value == state[name].value


def test_in_text_a_decision_is_its_value(state):
    words = f"{state['urgent']} {state['team']} {state['risk']} {state['data']}"
    assert words == "False goods back high urgent: True, size: S"
    assert "option_mass=0.003" in repr(state["risk"])
    with pytest.raises(AttributeError, match="Levels"):
        _ = state["team"].score


def test_a_choice_of_true_and_false_as_texts_is_a_choice():
    step = rm.decide("x", ["True", "False"], "Which?")
    found = program_of(step).run(backend=rm.ScriptedBackend({"x": "False"}))["x"]
    plain = found.to_dict()
    assert (plain["value"], list(plain["probabilities"])) == ("False", ["True", "False"])


def test_the_attributes_of_a_model_are_by_field(state):
    data = state["data"]
    assert data.layout == {"urgent": "scripted-1", "size": "scripted-1"}
    assert data.option_mass == {"urgent": pytest.approx(1.0), "size": pytest.approx(1.0)}


def test_when_reads_a_decision(state):
    assert rm.when(state["urgent"], {True: "yes", False: "no"}) == rm.when("False", {"False": "no"})
    assert rm.when(state["team"], {"goods back": "x"}) == rm.when("x", {"x": "x"})
    assert rm.when(state["risk"], {"high": "x"}) == rm.when("x", {"x": "x"})
    with pytest.raises(InvalidRequest, match="Did you mean billing"):
        rm.when(state["team"], {"biling": "x"})
    with pytest.raises(InvalidRequest, match="has 'low', 'high'"):
        rm.when(state["risk"], {1: "x"})
