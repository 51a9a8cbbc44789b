"""Fields of typed results in graphs are written into text as Python would write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

import ramify as rm
from ramify.graph import Gen, Graph, Result, Text
from ramify.graph_text import scalar_text
from ramify.lang.typed.static_type import static_type
from tests.lang.compiling import refusal
from tests.lang.test_programs import outcome


class Inner(BaseModel):
    kind: Literal["x", "y"]
    source: str
    sure: bool


class Outer(BaseModel):
    score: Annotated[int, Field(ge=1, le=5)]
    weight: float
    what: Annotated[str, Field(max_length=20)]
    inner: Inner
    words: Annotated[list[str], Field(min_length=2, max_length=3)]
    pair: tuple[int, Inner]


class Record(TypedDict):
    name: str
    note: NotRequired[str]


@dataclass
class Point:
    x: int
    inner: Inner


ANSWER = {
    "score": 4,
    "weight": 1,
    "what": 'a "word"\n',
    "inner": {"kind": "x", "source": "é", "sure": True},
    "words": ["one", "two"],
    "pair": [7, {"kind": "y", "source": "", "sure": False}],
}


@rm.function
def fields(s):
    s += "Q" + rm.gen("o", schema=Outer)
    o = s["o"]
    s += f"{o.score}|{o.weight!s}|" + o.what.strip() + "|" + str(o.inner.sure) + o.inner.kind + o.inner.source
    s += "/".join([o.words[0], o.words[1].upper(), f"{o.pair[0]}", str(o.pair[1].sure)])
    s += rm.gen("p", schema=Point)
    s += f"{s['p'].x} {s['p'].inner.kind}" + rm.gen("r", schema=Record)
    s += s["r"]["name"] + rm.gen("n", schema=int) + rm.gen("f", schema=float)
    s += f"{s['n']} " + str(s["f"])
    return o, o.score, o.inner, [o.inner.source, s["p"].inner, s["r"]], {"n": s["n"], "text": f"<{o.weight}>"}


def test_fields_are_what_python_makes_of_them() -> None:
    script = {
        "o": json.dumps(ANSWER),
        "p": '{"x": -3, "inner": {"kind": "y", "source": "", "sure": true}}',
        "r": '{"name": "n"}',
        "n": "42 ",
        "f": "1e3\n",
    }
    steps = fields.run(backend=rm.ScriptedBackend(script))
    compiled = fields.compile().run(backend=rm.ScriptedBackend(script))
    assert outcome(compiled) == outcome(steps)
    assert compiled.ret_value[0] == Outer.model_validate(ANSWER)
    assert '4|1.0|a "word"|Truexé' in compiled.text()
    assert "one/TWO/7/False" in compiled.text()
    assert compiled.text().endswith("42 1000.0")


def test_the_wire_form_says_where_a_field_is() -> None:
    made = fields.compile().graph()
    wire = msgspec.json.encode(made.graph)
    assert msgspec.json.decode(wire, type=Graph).check() == made.graph
    parts = [part for node in made.graph.nodes if isinstance(node, Text) for part in node.parts]
    assert Result(node=1, type="bool", path=("pair", 1, "sure")) in parts
    assert "‹o›.pair[1].sure" in str(made)


class Changing(BaseModel):
    value: str
    other: int

    @field_validator("value")
    @classmethod
    def shout(cls, value: str) -> str:
        return value.upper()


class Stripping(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)
    value: str


class Renamed(BaseModel):
    value: int = Field(validation_alias="Value")


class Late(BaseModel):
    value: int

    def model_post_init(self, context: Any) -> None:
        self.value += 1


class Loose(BaseModel):
    default: int = 3
    maybe: int | None
    either: int | str
    trimmed: Annotated[str, StringConstraints(to_lower=True)]
    several: list[int]
    mixed: Literal[1, "a"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Changing, "value"),
        (Stripping, "value"),
        (Renamed, "value"),
        (Late, "value"),
        *((Loose, name) for name in Loose.model_fields),
        (Inner, "model_fields_set"),
        (Inner, "nothing"),
    ],
)
def test_a_field_that_json_alone_does_not_tell_is_not_put_into_text(kind: Any, name: str) -> None:
    def body(s):
        s += rm.gen("x", schema=kind)
        s += f"{getattr(s['x'], name)}"

    assert "The result of gen 'x' is not known" in str(refusal(rm.function(body)))


def test_other_fields_of_a_type_with_functions_are_there() -> None:
    shape = static_type(Changing)
    assert shape is not None
    other = shape.attribute("other")
    assert other is not None
    assert other.scalar == "int"


@pytest.mark.parametrize(
    ("use", "question"),
    [
        (lambda o: o.score + 1, "arithmetic"),
        (lambda o: o.score > 3, "a comparison"),
        (lambda o: f"{o.score:>3}", "a finished string"),
        (lambda o: o.words[2], "its items"),
        (lambda o: o.words[-1], "its items"),
        (lambda o: o.pair[2], "its items"),
        (lambda o: len(o.words), "its length"),
        (lambda o: list(o.words), "its items"),
        (lambda o: o.inner.nothing, "its nothing"),
        (lambda o: f"{o.inner}", "a finished string"),
        (lambda o: o["score"], "its items"),
    ],
)
def test_what_python_goes_by_is_refused(use: Any, question: str) -> None:
    def body(s):
        s += rm.gen("x", schema=Outer)
        return use(s["x"])

    assert f"asks for {question}." in str(refusal(rm.function(body)))


def test_a_key_that_may_be_missing_is_refused() -> None:
    def body(s):
        s += rm.gen("x", schema=Record)
        return s["x"]["note"]

    assert "its items" in str(refusal(rm.function(body)))


@pytest.mark.parametrize(
    ("text", "path", "kind", "expected"),
    [
        ('{"a": [1, 2.0]}', ("a", 1), "int", "2"),
        ("3", (), "float", "3.0"),
        ("true", (), "bool", "True"),
        ('"\\u00e9"', (), "str", "é"),
    ],
)
def test_scalars_as_python_writes_them(text: str, path: Any, kind: Any, expected: str) -> None:
    assert scalar_text(text, path, kind) == expected


@pytest.mark.parametrize(
    ("text", "path", "kind"),
    [("{", (), "int"), ("{}", ("a",), "int"), ("[]", (0,), "int"), ("true", (), "int"), ("1", (), "str")],
)
def test_where_there_is_no_such_value(text: str, path: Any, kind: Any) -> None:
    with pytest.raises(rm.ProgramError, match=f"has no {kind} at"):
        scalar_text(text, path, kind)


@pytest.mark.parametrize(
    ("source", "part", "problem"),
    [
        (Gen(), Result(node=0, path=("a",)), "a path needs the type"),
        (Gen(options={"n": 2}), Result(node=0, index=0, type="int"), "single output of a gen"),
    ],
)
def test_a_graph_with_a_wrong_field_is_refused(source: Gen, part: Result, problem: str) -> None:
    with pytest.raises(rm.InvalidRequest, match=problem):
        Graph(nodes=(source, Text(parts=(part,)))).check()
