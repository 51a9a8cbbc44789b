"""Types become constraints, and outputs become values of those types."""

from __future__ import annotations

import asyncio
import enum
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pydantic
import pytest

import ramify as rm
from ramify.lang.typed.schema import convert, schema_of
from tests.lang.steps import program_of


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
    ask = program_of("Q:" + rm.gen("x", schema=kind))
    backend = rm.ScriptedBackend([answer])
    state = ask.run(backend=backend)
    assert state["x"] == value
    assert type(state["x"]) is type(value)
    sent = backend.requests[0].constraint
    assert (sent and sent.kind) == constraint


@pytest.mark.parametrize(("kind", "answer", "value", "_"), CASES)
def test_get_parses_plain_text_as_a_type(kind, answer, value, _):
    ask = program_of("Q:" + rm.gen("x"))
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
    ask = program_of("I have " + rm.gen("n", schema=int, stop="!") + " apples.")
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
    ask = program_of(rm.user("Q") + rm.assistant(rm.gen("x")))
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
    assert len(backend.requests) == 14


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


# --- options of JSON ------------------------------------------------------------------------------


def ask_with(**options: Any) -> Any:
    return program_of("Q:" + rm.gen("x", **options))


@pytest.mark.parametrize("compiled", [False, True])
def test_options_of_json_reach_the_constraint_and_values_stay_typed(compiled: bool) -> None:
    ask = ask_with(schema=Point, whitespace=2, any_order=True, strict=False)
    backend = rm.ScriptedBackend(['{ "y": 2, "x": 1 }'])
    state = (ask.compile(backend=backend) if compiled else ask).run(backend=backend)
    assert state["x"] == Point(1, 2)
    (sent,) = (request.constraint for request in backend.requests)
    assert sent is not None
    assert (sent.kind, sent.whitespace, sent.any_order, sent.strict) == ("json_schema", 2, True, False)
    assert schema_of(Point).constraint != sent, "the cached constraint of the type is as it was"


@pytest.mark.parametrize("field", ["schema", "json_schema"])
@pytest.mark.parametrize("strict", [True, "validate"])
def test_definitions_are_put_beside_the_schema(field: str, strict: Any) -> None:
    ask = ask_with(
        **{field: {"items": {"$ref": "n.json"}}}, definitions={"n.json": {"minimum": 3}}, strict=strict
    )
    backend = rm.ScriptedBackend(["[5]"])
    state = ask.run(backend=backend)
    assert state["x"] == ([5] if field == "schema" else "[5]")
    (sent,) = (request.constraint for request in backend.requests)
    assert sent is not None
    assert json.loads(sent.source)["$defs"] == {"n.json": {"$id": "n.json", "minimum": 3}}
    with pytest.raises(rm.NotScripted, match="minimum"):
        ask.run(backend=rm.ScriptedBackend(["[2]"]))


def test_definitions_are_for_json_schemas() -> None:
    with pytest.raises(rm.InvalidConstraint, match="definitions is for JSON") as refused:
        ask_with(regex="a", definitions={}).run(backend=rm.ScriptedBackend(["a"]))
    assert refused.value.field == "definitions"


def test_options_of_json_hold_for_schemas_that_stay_text_and_for_batches() -> None:
    ask = ask_with(json_schema={"type": "object"}, any_order=True)
    backend = rm.ScriptedBackend(["{}"] * 2)
    states = ask.run_batch([{}, {}], backend=backend)
    assert [state["x"] for state in states] == ["{}", "{}"]
    assert all(request.constraint and request.constraint.any_order for request in backend.requests)


@pytest.mark.parametrize(
    "beside",
    [
        {"regex": "a"},
        {"choices": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"ebnf": 'root ::= "a"'},
        {"structural_tag": {}},
        {"dtype": int},
        {"schema": int},
        {"schema": str},
        {},
    ],
)
@pytest.mark.parametrize("option", [{"any_order": True}, {"strict": "validate"}, {"whitespace": "compact"}])
def test_options_of_json_are_refused_beside_what_is_not_json(
    beside: dict[str, Any], option: dict[str, Any]
) -> None:
    with pytest.raises(rm.InvalidRequest) as refused:
        rm.gen("x", **beside, **option)
    assert refused.value.field in option


@pytest.mark.parametrize("schema", ["schema", "json_schema"])
def test_a_validated_output_that_breaks_its_schema_is_not_parsed(schema: str) -> None:
    unique = {"type": "array", "uniqueItems": True}
    node: Any = rm.gen("x", **{schema: unique}, strict="validate")
    assert node.parse("[1, 2]") == ([1, 2] if schema == "schema" else "[1, 2]")
    with pytest.raises(ValueError, match="/uniqueItems"):
        node.parse("[1, 1]")
    loose: Any = rm.gen("x", **{schema: unique}, strict=False)
    assert loose.parse("[1, 1]") == ([1, 1] if schema == "schema" else "[1, 1]")


@pytest.mark.parametrize("exponent", ["e289", "E+99", "e-289", "e05", "e005"])
def test_a_float_is_finite(exponent: str) -> None:
    schema = schema_of(float)
    assert schema.constraint is not None
    longest = "9" * 18 + ".5" + exponent
    assert re.fullmatch(schema.constraint.source, longest)
    assert math.isfinite(schema.parse(longest))
    for beyond in ("e290", "e300", "e1000", "e0289"):
        assert not re.fullmatch(schema.constraint.source, "1" + beyond)


def test_an_output_that_cannot_be_validated_is_not_parsed() -> None:
    node: Any = rm.gen("x", json_schema={"type": "number", "multipleOf": 999983}, strict="validate")
    for text in ("9E999999999", "9E99999999999999999999", "9E7", "[" * 20_000):
        with pytest.raises(ValueError, match=r"multiple|too long|nested|JSON"):
            node.parse(text)
    assert node.parse("999983E3") == "999983E3"


@pytest.mark.parametrize("text", ["1e400", "-Infinity", "NaN", "[" * 100_000, "9" * 5000, "{"])
def test_json_that_has_no_value_in_python_is_a_value_error(text: str) -> None:
    for parse in (schema_of({"type": "number"}).parse, schema_of(float).parse):
        with pytest.raises(ValueError):
            parse(text)


def test_members_of_a_union_keep_their_order():
    """``A | B`` equals ``B | A``. Of the members that fit equally well the first is taken."""

    class A(pydantic.BaseModel):
        x: int

    class B(pydantic.BaseModel):
        x: int

    assert [type(convert({"x": 1}, kind)) for kind in (A | B, B | A)] == [A, B]
    assert [type(convert([{"x": 1}], kind)[0]) for kind in (list[A | B], list[B | A])] == [A, B]
    texts = [schema_of(kind).constraint.source for kind in (list[int | bool], list[bool | int])]
    assert texts[0] != texts[1]
