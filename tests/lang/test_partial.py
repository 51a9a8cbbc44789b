"""Partial values: closed values are present and valid wherever the text is cut."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypedDict

import ramify as rm
from ramify.lang.typed.open_object import OpenObject
from ramify.lang.typed.partial import InvalidPart, Partial, PartialReader
from ramify.lang.typed.partial_types import checker_of
from tests.lang.backends import Holding
from tests.lang.steps import program_of


class Color(enum.Enum):
    RED = "red"


class Point(pydantic.BaseModel):
    x: int
    y: Annotated[int, pydantic.Field(ge=0)] = 0


@dataclass
class Line:
    ends: tuple[Point, Point]
    color: Color


class Note(TypedDict, total=False):
    text: str
    tags: list[Literal["a", "b"]]


class Names(pydantic.RootModel[list[Color]]):
    pass


class Drawing(pydantic.BaseModel):
    title: str = pydantic.Field(alias="name")
    lines: list[Line]
    notes: dict[str, Note]
    extra: Point | Note | None
    names: Names
    free: Any


DRAWING = {
    "name": 'A "house"\n\u00e9\U0001f600',
    "lines": [
        {"ends": [{"x": 1, "y": 2}, {"x": -3}], "color": "red"},
        {"ends": [{"x": 0}, {"x": 1.0}], "color": "red"},
    ],
    "notes": {"one": {"text": "", "tags": ["a", "b"]}, "two": {}},
    "extra": {"x": 7, "y": 8},
    "names": ["red"],
    "free": [1e3, None, True, {"": []}],
}
SCHEMA = {
    "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}}}},
    "type": "object",
    "allOf": [{"properties": {"list": {"items": {"$ref": "#/$defs/node"}, "prefixItems": [{"const": 0}]}}}],
    "properties": {
        "list": True,
        "pick": {"anyOf": [{"properties": {"a": {"type": "string"}}}, {"type": "null"}]},
    },
    "patternProperties": {"^n_": {"maximum": 3}},
    "additionalProperties": {"type": "boolean"},
}


def read(text: str, kind: Any, sizes: int = 1) -> list[Partial[Any]]:
    reader = PartialReader(checker_of(kind))
    found = []
    for start in range(0, len(text), sizes):
        if reader.push(text[start : start + sizes]):
            found.append(reader.partial)
    return found


def is_part(part: Any, whole: Any) -> bool:
    """Whether all of `part` is in `whole`, at the same place."""
    if type(part) is OpenObject:
        return is_part(vars(part), whole)
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and is_part(value, whole[key]) for key, value in part.items()
        )
    if isinstance(part, list):
        return (
            isinstance(whole, list)
            and len(part) <= len(whole)
            and all(map(is_part, part, whole[: len(part)]))
        )
    return bool(part == whole)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("sizes", [1, 2, 3, 7, 1000])
def test_closed_values_have_their_types(ascii_only, sizes):
    text = json.dumps(DRAWING, ensure_ascii=ascii_only, indent=1 if sizes == 3 else None)
    found = read(text, Drawing, sizes)
    assert found[-1].value == Drawing.model_validate(DRAWING)
    lines = [partial.value.lines for partial in found[:-1] if "lines" in partial]
    for line in (line for some in lines for line in some):
        assert isinstance(line, Line)  # also the one that is open
        assert all(isinstance(end, Point) for end in getattr(line, "ends", ()))
    if sizes == 1:
        assert any(type(some[-1]) is Line for some in lines if some)
        ends = [
            line.ends for some in lines for line in some if type(line) is OpenObject and "ends" in vars(line)
        ]
        assert any(type(end[0]) is Point for end in ends if end)
        notes = [partial.value.notes for partial in found[:-1] if "notes" in partial]
        assert {"one": {"text": "", "tags": ["a"]}} in notes


def test_partial_values_only_grow():
    text = json.dumps(DRAWING)
    found = [partial.value for partial in read(text, {"type": "object"})]
    assert found[0] == {}
    for before, after in pairwise(found):
        assert is_part(before, after)
    assert found[-1] == DRAWING


def test_where_it_is_being_written():
    reader = PartialReader(checker_of(Drawing))
    reader.push('{"name": "Caf\\u00')
    assert reader.partial == Partial(OpenObject(Drawing, {}), False, ("name",), "Caf")
    reader.push('e9", "lines": [{"ends": [{"x": 1')
    assert repr(reader.partial.value) == "Drawing(title='Café', lines=[Line(ends=[Point()])])"
    assert reader.partial.path == ("lines", 0, "ends", 0, "x")
    assert reader.partial.open_text == ""
    reader.push("2")
    assert "x" not in vars(reader.partial.value.lines[0].ends[0])  # 12 may still become 123
    reader.push(",")
    assert reader.partial.value.lines[0].ends[0].x == 12


OLDER = {
    "items": [{"type": "integer"}, {"$ref": "#day"}],
    "additionalItems": {"type": "string"},
    "$defs": {"day": {"$anchor": "day", "items": {"$ref": "#day"}, "format": "date"}},
}
"""Items by position as up to draft-07, an anchor, a recursive reference, and a format."""


@pytest.mark.parametrize(
    ("kind", "text", "path"),
    [
        (Drawing, '{"name": 3,', ("name",)),
        (Drawing, '{"lines": [{"ends": [{"x": 1, "y": -1}', ("lines", 0, "ends", 0, "y")),
        (Drawing, '{"lines": [{"color": "blue"', ("lines", 0, "color")),
        (Drawing, '{"notes": {"a": {"tags": ["c"', ("notes", "a", "tags", 0)),
        (Drawing, '{"names": ["blue"', ("names", 0)),
        (Drawing, '{"lines": [{"ends": [{"x": 1}]', ("lines", 0, "ends")),
        (list[int], '[1, "x"', (1,)),
        (SCHEMA, '{"list": [1,', ("list", 0)),
        (SCHEMA, '{"list": [0, {"next": {"next": {"value": 1.5,', ("list", 1, "next", "next", "value")),
        (SCHEMA, '{"pick": {"a": 1,', ("pick", "a")),
        (SCHEMA, '{"n_x": 4,', ("n_x",)),
        (SCHEMA, '{"other": 1,', ("other",)),
        (json.dumps(SCHEMA), '{"other": 1,', ("other",)),
        (OLDER, "[1.5,", (0,)),
        (OLDER, '[1, "2026-02-28", 3,', (2,)),
        (OLDER, '[1, [["2026-02-30"', (1, 0, 0)),
    ],
)
def test_a_closed_value_that_does_not_fit_is_found_at_once(kind, text, path):
    reader = PartialReader(checker_of(kind))
    reader.push(text[:-1])
    with pytest.raises(InvalidPart) as found:
        reader.push(text[-1])
    assert found.value.path == path


def test_what_a_schema_allows_goes_through():
    value = {"list": [0, {"next": {"value": 3}}], "pick": {"a": "b"}, "n_x": 3, "other": True}
    assert read(json.dumps(value), SCHEMA)[-1].value == value
    assert read(json.dumps({"pick": None}), SCHEMA)[-1].value == {"pick": None}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(value=json_values, cut=st.integers(1, 9), spaced=st.booleans())
def test_any_json_at_any_cut(value, cut, spaced):
    whole = [value]
    text = json.dumps(whole, indent=2 if spaced else None, ensure_ascii=not spaced)
    found = [partial.value for partial in read(text, list[Any], cut)]
    assert found[-1] == whole
    for partial in found:
        assert is_part(partial, whole)


# --- in programs --------------------------------------------------------------------------------


class Trip(pydantic.BaseModel):
    place: str
    days: list[int]


TRIP = '{"place": "The old town", "days": [1, 2, 3]}'


@rm.function
def plan(s, **options):
    s += "Plan: " + rm.gen("trip", schema=Trip, **options)
    s += " Sure? " + rm.gen("sure", schema=bool)


SCRIPT = {"trip": TRIP, "sure": "true"}


def test_objects_are_streamed():
    state = plan.run(backend=rm.ScriptedBackend(SCRIPT), stream=True)
    found = list(state.stream_objects("trip", Trip))
    assert found[-1] == Partial(Trip(place="The old town", days=[1, 2, 3]), complete=True)
    assert all(not partial.complete and type(partial.value) is OpenObject for partial in found[:-1])
    assert state.partial("trip") == found[-1]
    assert [partial.value for partial in state.stream_objects("sure")] == [True]
    assert list(state.stream_objects("trip"))[-1] == found[-1]  # once more


def test_the_partial_object_of_now():
    backend = Holding({"trip": TRIP, "sure": "true"})
    state = plan.run(backend=backend, stream=True)
    assert state.partial("sure").value is None
    pieces = state.text_iter("trip")
    assert next(pieces) == "{"
    assert state.partial("trip") == Partial(OpenObject(Trip, {}), False, (), "")
    backend.release.set()
    state.sync()
    assert state.partial("trip").value == Trip(place="The old town", days=[1, 2, 3])


async def test_objects_are_streamed_in_an_event_loop():
    backend = Holding([TRIP])

    @rm.function
    async def program(s):
        s += "Plan: " + rm.gen("trip", schema=Trip)
        found = []
        async for partial in s.stream_objects("trip", Trip):
            found.append(partial)
            backend.release.set()
        return found

    state = await program.run(backend=backend, stream=True)
    found = [partial async for partial in state.stream_objects("trip")]
    await state.wait()
    assert found[-1] == state.ret_value[-1] == Partial(Trip(place="The old town", days=[1, 2, 3]), True)
    assert state.ret_value[0] == Partial(OpenObject(Trip, {}))


def test_without_stream_only_the_whole_comes():
    state = plan.run(backend=rm.ScriptedBackend(SCRIPT))
    assert [partial.complete for partial in state.stream_objects("trip")] == [True]


def test_text_can_be_streamed_as_a_type():
    program = program_of("Plan: " + rm.gen("trip", json_schema=Trip.model_json_schema()))
    state = program.run(backend=rm.ScriptedBackend([TRIP]), stream=True)
    assert list(state.stream_objects("trip", Trip))[-1].value == Trip(place="The old town", days=[1, 2, 3])
    with pytest.raises(rm.InvalidRequest, match="without a schema"):
        list(state.stream_objects("trip"))


def test_a_part_that_does_not_fit_raises_before_the_end():
    class Early(pydantic.BaseModel):
        place: Annotated[str, pydantic.AfterValidator(lambda text: int(text) and text)]
        days: list[int]

    backend = Holding({"x": '{"place": "Rome", "days": [1]}'})

    program = program_of("Plan: " + rm.gen("x", schema=Early))
    state = program.run(backend=backend, stream=True)
    backend.release.set()
    with pytest.raises(rm.ProgramError, match="The value at /place is not valid") as failed:
        list(state.stream_objects("x"))
    assert failed.value.line.startswith(__file__)
    assert failed.value.prompt == "Plan: "
    assert failed.value.partial.startswith('{"place": "Rome"')


def test_a_step_that_fails_raises():
    state = plan.run(backend=rm.ScriptedBackend({"trip": '{"place": 3}'}, strict=False), stream=True)
    with pytest.raises(rm.ProgramError, match="breaks its json_schema"):
        list(state.stream_objects("trip"))
    with pytest.raises(KeyError):
        list(state.stream_objects("nothing"))


def test_the_same_objects_over_http(engine, endpoint):
    class Small(pydantic.BaseModel):
        word: Annotated[str, pydantic.Field(max_length=10)]
        count: Annotated[int, pydantic.Field(ge=0, le=99)]
        marks: Annotated[list[Literal["x", "y"]], pydantic.Field(max_length=3)]

    program = program_of(
        "A word, a count and marks: " + rm.gen("x", schema=Small, max_tokens=120, temperature=0.0)
    )

    def stream(backend):
        state = program.run(backend=backend, stream=True)
        return state, list(state.stream_objects("x", Small))

    here, there = stream(engine), stream(endpoint)
    for state, found in (here, there):
        assert found[-1].value == state["x"]
        assert isinstance(found[-1].value, Small)
        for partial in found[:-1]:
            assert is_part(partial.value, json.loads(state.get("x").model_dump_json()))
        # Chunk by chunk, as a reader that is fast enough sees it.
        chunks = [chunk.text for chunk in state._branch.variables["x"].chunks]
        reader = PartialReader(checker_of(Small))
        parts = [reader.partial.value for text in chunks if reader.push(text)]
        assert len(parts) > 3
        assert any("word" in vars(part) for part in parts[:-1])
        assert parts[-1] == state["x"]
    assert here[1][-1] == there[1][-1]


def test_of_several_outputs_only_the_whole_comes():
    backend = Holding({"trip": [TRIP, TRIP]})
    state = program_of("Plan: " + rm.gen("trip", schema=Trip, n=2)).run(backend=backend, stream=True)
    assert next(state.text_iter("trip")) == "{"
    assert state.partial("trip") == Partial(None)
    backend.release.set()
    whole = Partial([Trip(place="The old town", days=[1, 2, 3])] * 2, complete=True)
    assert list(state.stream_objects("trip")) == [whole]
    assert state.partial("trip") == whole
