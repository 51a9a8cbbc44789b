"""Results as Arrow columns: types of Python types, and tables whose columns agree."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal, Optional, TypedDict

import pyarrow as pa
import pydantic
import pytest

import ramify as rm
from ramify.ray.columns import Columns, arrow_type


class Colour(enum.Enum):
    RED = "red"


class Part(pydantic.BaseModel):
    name: str
    weight: float | None = None


@dataclasses.dataclass
class Box:
    parts: list[Part]
    colour: Colour


class Label(TypedDict):
    text: str
    count: int


class Tree(pydantic.BaseModel):
    children: list[Tree] = []


PART = pa.struct({"name": pa.string(), "weight": pa.float64()})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (str, pa.string()),
        (int, pa.int64()),
        (bool, pa.bool_()),
        (float, pa.float64()),
        (Literal["a", "b"], pa.string()),
        (Literal[1, 2], pa.int64()),
        (Literal["a", 2], None),
        (Colour, pa.string()),
        (Optional[int], pa.int64()),  # noqa: UP045 - both spellings
        (int | str, None),
        (list[list[int]], pa.list_(pa.list_(pa.int64()))),
        (Part, PART),
        (Box, pa.struct({"parts": pa.list_(PART), "colour": pa.string()})),
        (Label, pa.struct({"text": pa.string(), "count": pa.int64()})),
        (dict[str, int], None),
        (Any, None),
        (Tree, None),
        (pa.int8(), pa.int8()),
        ({"type": "array", "items": {"type": "string"}}, pa.list_(pa.string())),
    ],
)
def test_types(kind: Any, expected: Any) -> None:
    assert arrow_type(kind) == expected


def line(error: str | None = None, returned: Any = None, **outputs: Any) -> dict[str, Any]:
    failed = None if error is None else {"type": error, "transient": False, "partial": 5}
    return {"outputs": outputs, "returned": returned, "error": failed, "usage": {"requests": 1}}


def rows(count: int, **columns: Any) -> Any:
    return pa.table({"text": [f"t{n}" for n in range(count)], **columns})


def test_declared_columns_have_their_type_in_a_batch_of_failures() -> None:
    columns = Columns({"box": Box, "any": dict[str, int]})
    table = columns.table(rows(1), ["00"], [line("ValueError")])
    assert table.schema.field("box").type == arrow_type(Box)
    assert table.schema.field("any").type == pa.string()
    assert table["error"].to_pylist()[0]["partial"] == "5"
    filled = columns.table(rows(1), ["01"], [line(box={"parts": [], "colour": "red"}, any={"a": 1})])
    assert filled.schema == table.schema
    assert filled["any"].to_pylist() == ['{"a": 1}']


def test_other_columns_stay_and_widen() -> None:
    columns = Columns({})
    columns.table(rows(1), ["00"], [line(score=1, note="x", returned=None)])
    table = columns.table(rows(2), ["01", "02"], [line(score=0.5), line()])
    assert table.column_names == ["text", "row_id", "returned", "error", "usage", "score", "note"]
    assert table["score"].to_pylist() == [0.5, None]
    assert table["note"].type == pa.string()
    mixed = columns.table(rows(2), ["03", "04"], [line(score="high"), line(score={"a": 1})])
    assert mixed["score"].to_pylist() == ['"high"', '{"a": 1}']


def test_a_variable_with_a_taken_name_and_a_column_with_one() -> None:
    table = Columns({}).table(rows(1), ["00"], [line(text="x", error_="y", usage=3)])
    assert table["outputs.text"].to_pylist() == ["x"]
    assert table["outputs.usage"].to_pylist() == [3]
    with pytest.raises(rm.InvalidRequest, match="has a column 'error'"):
        Columns({}).table(rows(1, error=["e"]), ["00"], [line()])


def test_a_value_of_another_type_than_declared_is_refused() -> None:
    with pytest.raises(rm.InvalidRequest, match="'n' is not of the type in columns"):
        Columns({"n": int}).table(rows(1), ["00"], [line(n="many")])


def test_declared_columns_of_floats_take_what_json_has_as_text() -> None:
    columns = Columns({"score": float, "part": Part, "scores": list[float]})
    outputs = {"score": "NaN", "part": {"name": "NaN", "weight": "Infinity"}, "scores": ["-Infinity", 1.0]}
    line = {"returned": None, "error": None, "usage": None, "outputs": outputs}
    (row,) = columns.table(pa.table({"n": [1]}), ["a"], [line]).to_pylist()
    assert str(row["score"]) == "nan"
    assert row["part"] == {"name": "NaN", "weight": float("inf")}
    assert row["scores"] == [float("-inf"), 1.0]
