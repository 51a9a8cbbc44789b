"""Results as a Parquet table: typed columns from the lines of the results file."""

from __future__ import annotations

import json
import sys

import pydantic
import pytest

import ramify as rm
from ramify.errors import InvalidRequest

pytest.importorskip("pyarrow")
from pyarrow import parquet


class Order(pydantic.BaseModel):
    name: str
    items: list[int]


@rm.function
def fill(s, n):
    if n == 3:
        raise ValueError("unlucky")
    s["count"], s["share"], s["good"], s["text"] = n, n / 2, n % 2 == 0, f"row {n}"
    s["order"] = Order(name=f"o{n}", items=list(range(n)))
    s["mixed"] = n if n % 2 else [str(n)]
    s["empty"], s["index"] = {}, -n
    return {"twice": 2 * n}


def run(tmp_path, rows, **options):
    out = tmp_path / "results.parquet"
    return out, fill.run_batch(rows, out=out, backend=rm.ScriptedBackend([]), **options)


def test_errors_and_usage_have_one_type_whether_rows_failed_or_not(tmp_path):
    tables = []
    for number, rows in enumerate([[1], [3], [1, 3]]):
        (tmp_path / str(number)).mkdir()
        out, _ = run(tmp_path / str(number), [{"n": n} for n in rows])
        tables.append(parquet.read_schema(out))
    for name in ("error", "usage"):
        kinds = {str(table.field(name).type) for table in tables}
        assert len(kinds) == 1
        assert kinds.pop().startswith("struct<")
    assert str(tables[0].field("error").type.field("variable").type) == "string"


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupted_run_says_that_the_old_table_is_out_of_date(tmp_path, before):
    def rows():
        yield from [{"n": n} for n in range(9)]
        raise KeyboardInterrupt

    if before:
        run(tmp_path, [{"n": 9}])
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(tmp_path, rows(), look_ahead=1, concurrency=1)
    (note,) = stopped.value.__notes__
    assert "goes on with the others." in note
    assert (f"{tmp_path / 'results.parquet'} is out of date" in note) == before


def test_columns_are_typed(tmp_path):
    out, _ = run(tmp_path, [{"n": n} for n in range(5)])
    table = parquet.read_table(out)
    types = {field.name: str(field.type) for field in table.schema}
    assert {name: types[name] for name in ("index", "header", "count", "outputs.index")} == {
        "index": "int64",
        "header": "string",
        "count": "int64",
        "outputs.index": "int64",
    }
    assert (types["share"], types["good"], types["text"]) == ("double", "bool", "string")
    assert types["order"].startswith("struct<name: string, items: list<")
    assert (types["mixed"], types["empty"]) == ("string", "string")
    rows = {row["index"]: row for row in table.to_pylist()}
    assert rows[4]["order"] == {"name": "o4", "items": [0, 1, 2, 3]}
    assert [json.loads(rows[n]["mixed"]) for n in (1, 2)] == [1, ["2"]]
    assert rows[2]["returned"] == {"twice": 4}
    assert rows[3]["count"] is None
    assert rows[3]["error"]["type"] == "ValueError"
    assert rows[3]["outputs.index"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "results.parquet"]


def test_the_table_has_the_rows_of_all_runs(tmp_path):
    run(tmp_path, [{"n": n} for n in range(4, 1200)])
    out, summary = run(tmp_path, [{"n": n} for n in range(4, 2000)])
    assert (summary.rows, summary.skipped) == (800, 1196)
    assert sorted(parquet.read_table(out)["count"].to_pylist()) == list(range(4, 2000))


def test_without_pyarrow_the_file_is_refused_before_any_row_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # the import fails
    with pytest.raises(InvalidRequest, match="needs pyarrow, which is not installed"):
        run(tmp_path, [{"n": 1}])
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_json_does_not_have_are_numbers_in_the_table(tmp_path):
    @rm.function
    def scored(s, n):
        s["score"], s["word"] = float(n), "NaN"
        s["mixed"] = n if n == "NaN" else "Infinity"
        return [float(n)]

    out = tmp_path / "scores.parquet"
    scored.run_batch([(n,) for n in ("NaN", "-Infinity", 1)], out=out, backend=rm.ScriptedBackend([]))
    table = parquet.read_table(out)
    assert [str(table.schema.field(name).type) for name in ("score", "word", "mixed")] == [
        "double",
        "string",
        "string",
    ]
    rows = sorted(table.to_pylist(), key=lambda row: row["index"])
    assert [str(row["score"]) for row in rows] == ["nan", "-inf", "1.0"]
    assert [row["word"] for row in rows] == ["NaN"] * 3
