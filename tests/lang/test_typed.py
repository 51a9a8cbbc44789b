"""Types become constraints, and outputs become values of those types."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pydantic
import pytest

import ramify as rm
from ramify.lang.typed.schema import schema_of


class Verdict(pydantic.BaseModel):
    score: Annotated[int, pydantic.Field(ge=1, le=5)]
    reason: str


@dataclass
class Point:
    x: int
    y: int = 0


class Movie(TypedDict):
    title: str
    year: int


class Cast(TypedDict, total=False):
    lead: str | None
    movies: list[Movie]


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


CASES: list[tuple[Any, str, Any, str | None]] = [
    (str, "any text", "any text", None),
    (int, "42", 42, "regex"),
    (int, "-7", -7, "regex"),
    (float, "2.5e3", 2500.0, "regex"),
    (bool, "true", True, "choices"),
    (Literal["a", "b"], "b", "b", "choices"),
    (Literal[1, 2], "2", 2, "choices"),
    (Literal["a", None], "null", None, "json_schema"),
    (Color, "green", Color.GREEN, "choices"),
    (Level, "2", Level.HIGH, "choices"),
    (Verdict, '{"score": 3, "reason": "fine"}', Verdict(score=3, reason="fine"), "json_schema"),
    (Point, '{"x": 1}', Point(1), "json_schema"),
    (Movie, '{"title": "M", "year": 1931}', {"title": "M", "year": 1931}, "json_schema"),
    (
        list[Cast],
        '[{"movies": [{"title": "M", "year": 1}]}]',
        [{"movies": [{"title": "M", "year": 1}]}],
        "json_schema",
    ),
    (Movie | None, "null", None, "json_schema"),
    (list[int], "[1, 2]", [1, 2], "json_schema"),
    (list[Point], '[{"x": 1, "y": 2}]', [Point(1, 2)], "json_schema"),
    (dict, '{"a": 1}', {"a": 1}, "json_schema"),
    (dict[str, float], '{"a": 1}', {"a": 1.0}, "json_schema"),
    (int | None, "null", None, "json_schema"),
    (tuple[int, str], '[1, "a"]', (1, "a"), "json_schema"),
    (Annotated[int, pydantic.Field(ge=0)], "5", 5, "json_schema"),
    (Annotated[str, pydantic.Field(max_length=3)], '"abc"', "abc", "json_schema"),
    ({"type": "object", "required": ["a"]}, '{"a": [1]}', {"a": [1]}, "json_schema"),
    ('{"type": "array"}', "[1]", [1], "json_schema"),
]


@pytest.mark.parametrize(("kind", "answer", "value", "constraint"), CASES)
def test_a_schema_makes_a_constraint_and_a_value(kind, answer, value, constraint):
    @rm.function
    def ask(s):
        s += "Q:" + rm.gen("x", schema=kind)

    backend = rm.ScriptedBackend([answer])
    state = ask.run(backend=backend)
    assert state["x"] == value
    assert type(state["x"]) is type(value)
    sent = backend.requests[0].constraint
    assert (sent and sent.kind) == constraint


@pytest.mark.parametrize(("kind", "answer", "value", "_"), CASES)
def test_get_parses_plain_text_as_a_type(kind, answer, value, _):
    @rm.function
    def ask(s):
        s += "Q:" + rm.gen("x")

    state = ask.run(backend=rm.ScriptedBackend([answer]))
    assert state["x"] == answer
    assert state.get("x", kind) == value


def test_get_checks_values_that_were_never_text():
    @rm.function
    def ask(s):
        s["numbers"] = ["1", "2"]
        for branch in s.fork(2):
            branch += rm.gen("n", schema=int)
        s["point"] = Point(1, 2)

    state = ask.run(backend=rm.ScriptedBackend(["1", "2"]))
    assert state.get("numbers", list[int]) == [1, 2]
    assert state.get("point", Point) == Point(1, 2)
    assert state.get("point") == Point(1, 2)


def test_key_order_of_a_class_reaches_the_constraint():
    source = schema_of(Verdict).constraint.source
    assert list(json.loads(source)["properties"]) == ["score", "reason"]


def test_numbers_end_at_white_space():
    @rm.function
    def ask(s):
        s += "I have " + rm.gen("n", schema=int, stop="!") + " apples."

    backend = rm.ScriptedBackend(["12 "])
    state = ask.run(backend=backend)
    assert state["n"] == 12
    assert state.text() == "I have 12 apples."
    assert backend.requests[0].sampling.stop == ("!", " ", "\n")


@pytest.mark.parametrize(
    ("kind", "answer", "cause"),
    [
        (Verdict, '{"score": 3}', pydantic.ValidationError),
        (int, "12", None),
        (dict, "[]", pydantic.ValidationError),
        (list[int], '["x"]', pydantic.ValidationError),
        (bool, "maybe", ValueError),
    ],
)
def test_an_output_of_the_wrong_type_fails_its_step(kind, answer, cause):
    @rm.function
    def ask(s):
        s += rm.user("Q") + rm.assistant(rm.gen("x"))

    state = ask.run(backend=rm.ScriptedBackend([answer]))
    if cause is None:
        assert state.get("x", kind) == 12
        return
    with pytest.raises(cause):
        state.get("x", kind)


class Bare:
    pass


class Loop(TypedDict):
    inner: list[Loop]


@pytest.mark.parametrize("kind", [Bare, Callable[[int], int], list[Bare], Loop])
def test_a_type_without_a_schema_is_refused_at_the_gen(kind):
    with pytest.raises(rm.InvalidConstraint, match="no JSON schema"):
        rm.gen("x", schema=kind)


def test_an_unhashable_annotation_has_a_schema():
    kind = Annotated[int, pydantic.Field(json_schema_extra={"examples": [1]})]
    assert schema_of(kind).parse("3") == 3


async def test_what_type_checkers_are_shown_also_runs():
    from tests.lang import typed_program

    backend = rm.ScriptedBackend(lambda request: "1")
    rm.set_default_backend(backend)
    try:
        await asyncio.to_thread(typed_program.results, backend)
        await typed_program.awaited(backend)
    finally:
        rm.set_default_backend(None)
    assert len(backend.requests) == 7


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    inner: Verdict


def test_objects_of_types_are_closed_where_the_type_says_nothing() -> None:
    def source(kind: Any) -> Any:
        constraint = schema_of(kind).constraint
        assert constraint is not None
        return json.loads(constraint.source)

    assert source(Point)["additionalProperties"] is False
    assert source(Cast)["$defs"]["Movie"]["additionalProperties"] is False
    opened = source(Open)
    assert opened["additionalProperties"] is True
    assert opened["$defs"]["Verdict"]["additionalProperties"] is False
    assert source(dict[str, int])["additionalProperties"] == {"type": "integer"}
