"""Files of rows that would lose or mix rows without a word: refused with the line, or told row by row."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import ramify as rm
from ramify.cli.inputs.run_rows import InputRows
from ramify.errors import InvalidRequest


@rm.function
def program(s, text: str, more=None):
    s += text


def rows_of(path: Path | str, only: str | None = None, key: str | None = None) -> InputRows:
    return InputRows(str(path), program, [], key, only)


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


CSV = "more,text\n1,a\n2,b\n"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        # a quote that is not closed
        (
            'more,text\n1,a\n2,"b\n3,c\n4,d\n',
            "Lines 3 to 5 of {}: the field that begins with a quote",
        ),
        ('more,text\n1,a\n2,"b\n3,c\n4,"d"\n5,e\n', "Lines 3 to 5 of {}: "),
        ('more,text\n1,"a"b\n', "Line 2 of {}: "),
        ('"more,text\n1,a\n', "Lines 1 to 2 of {}: "),
        # the header
        (
            "text,more,text\na,1,b\n",
            "The header of {} names 'text' twice, as columns 1 and 3. Give it a name of its own.",
        ),
        ("id,text,id\n1,a,2\n", "Give it a name of its own, or leave it out: --columns text."),
        ("id,more,text,more\n1,a,b,c\n", "Give it a name of its own, or leave it out: --columns text."),
        (
            ",text\n0,a\n",
            "The header of {} names no column 1. Give it a name of its own, or",
        ),
        ("text, \na,b\n", "names no column 2"),
        # encodings
        (
            CSV.encode("utf-16"),
            "Line 1 of {} is not UTF-8: invalid start byte. Convert the file, as with iconv -f utf-16",
        ),
        (CSV.encode("utf-16le"), "Line 1 of {} has a NUL character. Remove it; or if the file is UTF-16"),
        (b"text\na\nb\0c\n", "Line 3 of {} has a NUL character"),
        ("text\na\nb\ncaf\xe9\n".encode("latin1"), "Line 4 of {} is not UTF-8"),
        (b"text\ra\rb\rcaf\xe9\r", "Line 4 of {} is not UTF-8"),
    ],
)
def test_csv_that_is_refused(tmp_path: Path, data: str | bytes, problem: str) -> None:
    path = write(tmp_path, "rows.csv", data)
    with pytest.raises(InvalidRequest) as refused:
        rows_of(path)
    assert problem.format(path) in str(refused.value)


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (
            'more,text\n1,"a\nb, ""c"""\n2,d" e\n',
            [{"more": 1, "text": 'a\nb, "c"'}, {"more": 2, "text": 'd" e'}],
        ),
        ("\ufefftext\r\na\r\n\r\nb\r\n", [{"text": "a"}, {"text": "b"}]),
        ("text\ra\rb\r", [{"text": "a"}, {"text": "b"}]),
        ("text\na\u2028b\n", [{"text": "a\u2028b"}]),
        (
            "more,text\n1\n1,a,b\n1,c\n",
            [
                "Row 0 (line 2) has 1 field, the header 2.",
                "Row 1 (line 3) has 3 fields, the header 2; quote the comma.",
                {"more": 1, "text": "c"},
            ],
        ),
        ("text,more\na," + "[" * 100_000 + "\n", [{"text": "a", "more": "[" * 100_000}]),
        ("text\n", []),
    ],
)
def test_csv_that_is_read(tmp_path: Path, data: str, rows: list[Any]) -> None:
    found = rows_of(write(tmp_path, "rows.csv", data))
    assert list(found) == rows
    assert len(found) == len(rows)


def test_columns_that_are_left_out_need_no_name(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.csv", ",text,id,id\n0,a,1,2\n")
    assert list(rows_of(path, "text")) == [{"text": "a"}]
    with pytest.raises(InvalidRequest, match="names 'id' twice, as columns 3 and 4"):
        rows_of(path, "text", "id")
    with pytest.raises(InvalidRequest, match=r"has no column 'txt'; it has , text, id, id. Did you mean"):
        rows_of(path, "txt")


def test_json_lines(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    lines = [
        '{"text": "a"}',
        '{"text": "a", "text": "b"}',
        '{"text": {"b": 1, "b": 2}}',
        deep,
        "{",
        '{"text": "c"}',
    ]
    data = "\ufeff" + "\r".join(lines)
    rows = rows_of(write(tmp_path, "rows.jsonl", data))
    assert list(rows) == [
        {"text": "a"},
        "Row 1 (line 2) has an object with the key 'text' twice.",
        "Row 2 (line 3) has an object with the key 'b' twice.",
        "Row 3 (line 4) is nested too deep.",
        "Row 4 (line 5) is not JSON: Expecting property name enclosed in double quotes at column 2.",
        {"text": "c"},
    ]
    assert len(rows) == 6
    with pytest.raises(InvalidRequest, match=r"Line 1 of .* has a NUL character"):
        rows_of(write(tmp_path, "wide.jsonl", '{"text": "a"}\n'.encode("utf-16le")))


@pytest.mark.parametrize(
    ("name", "data"), [("csv", CSV), ("jsonl", '\n {"text": "a", "more": 1}\n{"text": "b", "more": 2}\n')]
)
def test_a_pipe_is_read_once(tmp_path: Path, name: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, as ``--input <(…)`` and ``--input -`` give one."""
    expected = [{"text": "a", "more": 1}, {"text": "b", "more": 2}]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(data,))
    writer.start()
    rows = rows_of(pipe)
    writer.join()
    assert (len(rows), list(rows), list(rows)) == (2, expected, expected)
    ends = os.pipe()
    os.write(ends[1], data.encode())
    os.close(ends[1])
    assert list(rows_of(f"/dev/fd/{ends[0]}")) == expected
    os.close(ends[0])
    with write(tmp_path, f"rows.{name}", data).open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert list(rows_of("-")) == expected
    with write(tmp_path, "bad.csv", "text,text\n1,2").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        with pytest.raises(InvalidRequest, match="The header of standard input names 'text' twice"):
            rows_of("-")


@pytest.mark.parametrize("data", ['[{"text": "a"}, {"text": "b"}]', '[\n  {"text": "a"}\n]\n', "[]"])
def test_an_array_is_no_json_lines(tmp_path: Path, data: str) -> None:
    path = write(tmp_path, "rows.jsonl", data)
    for key in (None, "id"):
        with pytest.raises(
            InvalidRequest, match=r"is one JSON array; JSON lines have one object a line. Conv"
        ):
            rows_of(path, key=key)


def test_rows_may_be_lists(tmp_path: Path) -> None:
    rows = rows_of(write(tmp_path, "rows.jsonl", '[{"a": 1}]\n["b"]\n'))
    assert list(rows) == [[{"a": 1}], ["b"]]


@pytest.mark.parametrize(("name", "data"), [("csv", "id,text\n1,a\n"), ("jsonl", '{"id": 1, "text": "a"}')])
def test_a_key_that_is_no_column(tmp_path: Path, name: str, data: str) -> None:
    path = write(tmp_path, f"rows.{name}", data)
    with pytest.raises(InvalidRequest, match=r"has no (column )?'nope'.*t has id, text") as refused:
        rows_of(path, key="nope")
    assert refused.value.field == "key"


def test_a_folder_and_a_file_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"is a folder. Name a file in it"):
        rows_of(tmp_path)
    with pytest.raises(InvalidRequest, match=r"none of .csv, .jsonl, .parquet. Rename or convert it"):
        rows_of(write(tmp_path, "rows.txt", CSV))


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    table = pyarrow.table([["a"], ["b"], [1]], names=["text", "text", "more"])
    parquet.write_table(table, path)
    with pytest.raises(InvalidRequest, match="names 'text' twice, as columns 1 and 2"):
        rows_of(path)
    parquet.write_table(table.select([1, 2]), path)
    rows = rows_of(path, "text")
    assert (len(rows), list(rows)) == (1, [{"text": "b"}])
    with pytest.raises(InvalidRequest, match=r"rows.parquet is not Parquet"):
        rows_of(write(tmp_path, "rows.parquet", json.dumps({"text": "a"})))
