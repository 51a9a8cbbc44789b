"""`ramify run --input`: rows from a file into a results file."""

from __future__ import annotations

import importlib.util
import json

import pytest

from ramify.cli import main
from ramify.cli.inputs.program_file import load
from ramify.cli.inputs.run_rows import InputRows
from tests.cli.conftest import Folder
from tests.server.fake_frontend import LiveServer

PROGRAM = """
    import ramify as rm

    @rm.function
    def greet(s, name: str, count: int = 1, extra=None):
        if name == "nobody":
            raise ValueError("There is nobody.")
        s += "hello " + name
        s += rm.gen("answer", max_tokens=4 * count)

    @rm.function
    async def later(s, name, key="-"):
        s += f"hello {name} {key}" + rm.gen("answer", max_tokens=4)
"""


def test_csv(folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    rows = folder.write("rows.csv", "name,count,id\n123,2,a\nabcd,,b\nnobody,1,c\n")
    assert folder.run(server, "--input", str(rows), "--key", "id") == 1
    found = folder.results()
    assert [line["key"] for line in found] == ["a", "b", "c"]
    assert found[0]["outputs"] == {"answer": "ELLO 123"}
    assert found[1]["outputs"] == {"answer": "LLO "}
    assert found[1]["usage"]["completion_tokens"] == 4  # an empty count is the default
    assert found[2]["error"]["message"] == "The program raised ValueError: There is nobody."
    out = capsys.readouterr().out
    assert out.startswith("3 rows in ")
    assert "1 failed" in out
    assert "first error: The program raised ValueError" in out


def test_going_on(folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    rows = folder.write("rows.jsonl", "\n".join(json.dumps({"name": f"n{i}"}) for i in range(5)))
    assert folder.run(server, "--input", str(rows)) == 0
    folder.write(rows.name, rows.read_text() + '\n\n{"name": "last"}\n')
    assert folder.run(server, "--input", str(rows)) == 0
    assert [line["index"] for line in folder.results()] == list(range(6))
    assert "1 rows in" in (out := capsys.readouterr().out)
    assert "5 were done before" in out
    assert folder.run(server, "count=2", "--input", str(rows)) == 2
    assert "the argument count was not there, is 2. Give another file" in capsys.readouterr().err
    assert folder.run(server, "count=2", "--input", str(rows), "--rerun", "changed") == 0
    assert "6 rows in" in capsys.readouterr().out


def test_failed_rows_are_reported_until_they_run_again(
    folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = folder.write("rows.csv", "name\nab\nnobody\n")
    assert folder.run(server, "--input", str(rows)) == 1
    assert folder.run(server, "--input", str(rows)) == 1
    assert "2 were done before (1 of them failed" in capsys.readouterr().out
    program = folder.path / "greeting.py"
    program.write_text(program.read_text().replace("raise ValueError", "print"))
    assert folder.run(server, "--input", str(rows), "--rerun", "failed") == 2
    assert "the body of greet changed: line 4 was raise ValueError" in capsys.readouterr().err
    assert folder.run(server, "--input", str(rows), "--rerun", "failed,missing") == 0
    assert "1 rows in" in capsys.readouterr().out


def test_the_line_and_the_traceback_of_a_body_are_in_its_row(folder: Folder, server: LiveServer) -> None:
    rows = folder.write("rows.csv", "name\nnobody\n")
    assert folder.run(server, "--input", str(rows)) == 1
    error = folder.results()[0]["error"]
    assert error["line"] == folder.program("7")
    assert error["traceback"].endswith('raise ValueError("There is nobody.")\n')
    assert "ramify/lang" not in error["traceback"]


def test_a_report_of_the_first_rows(folder: Folder, server: LiveServer) -> None:
    rows = folder.write("rows.jsonl", "\n".join(json.dumps({"name": f"n{i}"}) for i in range(5)))
    report = folder.path / "trace.html"
    assert folder.run(server, "--input", str(rows), "--trace", str(report), "--trace-rows", "3") == 0
    data = report.read_text().partition('id="data">')[2].partition("</script>")[0]
    root = json.loads(data.replace("<\\/", "</"))["root"]
    assert root["name"] == "greet, 3 rows"
    assert {child["name"] for child in root["children"]} < {f"row {index}" for index in range(5)}
    assert root["requests"] == 3
    assert max(child["end"] for child in root["children"]) == root["end"]


def test_the_first_rows_and_a_sample(
    folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = folder.write("rows.csv", "name\n" + "".join(f"n{i}\n" for i in range(20)))
    assert folder.run(server, "--input", str(rows), "--limit", "3") == 0
    assert [line["index"] for line in folder.results()] == [0, 1, 2]
    assert "the first 3 of 20 rows\n3 rows in" in capsys.readouterr().out
    assert folder.run(server, "--input", str(rows), "--sample", "5") == 0
    assert "a sample of 5 of 20 rows (--sample-seed 0)" in capsys.readouterr().out
    first = [line["index"] for line in folder.results()]
    assert folder.run(server, "--input", str(rows), "--sample", "5") == 0
    assert "\nno row was left to run, 5 were done before\n" in capsys.readouterr().out
    assert folder.run(server, "--input", str(rows), "--sample", "5", "--sample-seed", "1") == 0
    assert [line["index"] for line in folder.results()] != first
    assert folder.run(server, "--input", str(rows)) == 0
    assert [line["index"] for line in folder.results()] == list(range(20))  # each where it stands in the file


def test_a_limit_on_a_finished_file(
    folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = folder.write("rows.csv", "name\n" + "".join(f"n{i}\n" for i in range(9)) + "nobody\n")
    assert folder.run(server, "--input", str(rows)) == 1
    capsys.readouterr()
    assert folder.run(server, "--input", str(rows), "--limit", "6") == 0  # the failed row is the tenth
    assert capsys.readouterr().out == (
        "the first 6 of 10 rows\nno row was left to run, 6 were done before\n"
        "the file has 4 more results, of rows other than these\n"
    )
    assert folder.run(server, "--input", str(rows), "--limit", "6", "--dry-run") == 0
    assert capsys.readouterr().out == (
        "the first 6 of 10 rows\n--- no row is left to run, 6 were done before\n"
    )


def test_what_a_batch_would_take(
    folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = folder.write("rows.csv", "name\n" + "".join(f"name{i}\n" for i in range(50)))
    place = folder.program()
    arguments = ["--input", str(rows), "--dry-run", "--price", "1,0.5,2", "--endpoint", server.url]
    assert main.main(["run", place, *arguments]) == 0
    out = capsys.readouterr().out
    assert "hello name" in out
    assert "50 rows to run; estimated from 8 rows that were run, and not written" in out
    assert "output tokens             200" in out
    assert "cost " in out
    assert len(server.frontend.requests) == 8
    assert not (folder.path / "out.jsonl").exists()


def test_help_shows_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["run", "--help"])
    assert "file.py:function --input FILE --output FILE [key=value …]" in capsys.readouterr().out


def test_an_async_program_and_an_argument_named_like_an_option(folder: Folder, server: LiveServer) -> None:
    rows = folder.write("rows.jsonl", '{"name": "abcdef"}\n{"name": "ghijkl"}\n')
    assert folder.run(server, "key=k", "--input", str(rows), "--concurrency", "1", name="later") == 0
    assert [line["outputs"]["answer"] for line in folder.results()] == ["ABCD", "GHIJ"]


@pytest.mark.parametrize(
    ("file", "text", "arguments", "problem"),
    [
        ("rows.csv", "name,id\na,1\n", [], "no parameter 'id', which is a column"),
        ("rows.csv", "name,id\na,1\n", [], "--columns name leaves the others out"),
        ("rows.csv", "id,text\na,1\n", ["--key", "id"], "column of {path}. It has name, count, extra."),
        ("rows.csv", "count\n1\n", [], "needs 'name'"),
        ("rows.csv", "id;name\na;b, c\n", [], "one column 'id;name': is the delimiter ';'?"),
        ("rows.csv", "name\na\n", ["name=b"], "name is given on the command line and is a column"),
        ("rows.csv", "name\na\n", ["--concurrency", "0"], "concurrency is 0"),
        ("rows.csv", "name\na\n", ["--limit", "0"], "--limit is 0"),
        ("rows.csv", "name\na\n", ["--limit", "1", "--sample", "1"], "exclude each other"),
        ("rows.csv", "name\na\n", ["--sample-seed", "1"], "--sample-seed needs --sample"),
        ("rows.csv", "name\na\n", ["--price", "1,2"], "must be three numbers"),
    ],
)
def test_what_is_refused(
    folder: Folder,
    server: LiveServer,
    file: str,
    text: str,
    arguments: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = folder.write(file, text)
    assert folder.run(server, *arguments, "--input", str(rows)) == 2
    assert problem.replace("{path}", str(rows)) in capsys.readouterr().err


def test_results_are_not_written_as_csv(
    folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = folder.write("rows.csv", "name\na\n")
    place = folder.program()
    out = ["--input", str(rows), "--output", str(folder.path / "out.csv"), "--endpoint", server.url]
    assert main.main(["run", place, *out]) == 2
    assert "not written as .csv. Name a .jsonl or .parquet file." in capsys.readouterr().err


def test_flags_that_need_each_other(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder.program()
    assert main.main(["run", place, "name=x", "--key", "id", "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "--key needs --input" in capsys.readouterr().err
    assert main.main(["run", place, "--input", "x.csv", "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "--input needs --output" in capsys.readouterr().err
    assert main.main(["run", place, "--input", "x.csv", "--output", "o", "--endpoint", "http://x"]) == 2
    assert "no file x.csv" in capsys.readouterr().err


def test_columns_are_chosen(folder: Folder) -> None:
    rows = folder.write("rows.csv", "name,count,id,more\na,2,7,8\n")
    program = load(folder.program())
    assert list(InputRows(str(rows), program, [], "id", "name")) == [{"name": "a", "id": "7"}]
    assert list(InputRows(str(rows), program, [], None, "name, count")) == [{"name": "a", "count": 2}]


def test_cells_of_csv(folder: Folder) -> None:
    text = '\ufeffname,count,extra\n"a, ""b""\nc",1,"[1, 2]"\n5,,{\n,3,\nshort\nx,1,2,3\n'
    rows = folder.write("rows.csv", text)
    program = load(folder.program())
    assert list(InputRows(str(rows), program, [], None, None)) == [
        {"name": 'a, "b"\nc', "count": 1, "extra": [1, 2]},
        {"name": "5", "extra": "{"},
        {"name": "", "count": 3},
        "Row 3 (line 6) has 1 field, the header 3.",
        "Row 4 (line 7) has 4 fields, the header 3; quote the comma.",
    ]


@pytest.mark.parametrize(
    ("data", "problem"), [("", "is empty: it has no bytes"), ("\n\n", "has no header"), ("name\n", None)]
)
def test_a_file_without_rows(
    folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str], data: str, problem: str | None
) -> None:
    rows = folder.write("rows.csv", data)
    assert folder.run(server, "--input", str(rows)) == (0 if problem is None else 2)
    assert (problem or "") in capsys.readouterr().err
    assert (folder.path / "out.jsonl").exists() == (problem is None)


def test_an_empty_pipe(folder: Folder, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe of a program that has failed."""
    with folder.write("nothing", "").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert folder.run(server, "--input", "-") == 2


def test_a_doubled_key_is_found_before_a_row_runs(
    folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "id,name\n" + "".join(f"{n % 1500},n\n" for n in range(1501))
    rows = folder.write("rows.csv", data)
    assert folder.run(server, "--input", str(rows), "--key", "id") == 2
    said = capsys.readouterr().err
    assert "Rows 0 and 1500 of the input have the same id: '0'. Rows are counted from 0." in said
    assert "goes on" not in said
    assert not server.frontend.requests
    assert folder.run(server, "--input", str(rows), "--key", "id", "--limit", "3") == 0


@pytest.mark.parametrize(
    ("name", "bad", "good", "key"),
    [
        ("csv", "id,name\n1,a\n2,Came, in pieces\n", 'id,name\n1,a\n2,"Came, in pieces"\n', "2"),
        ("csv", "name,id\nCame, in pieces,2\n", 'name,id\n"Came, in pieces",2\n', "2"),
        ("csv", "id,name\n2\n", "id,name\n2,a\n", "2"),
        ("jsonl", '{"id": 2, "name": "a\n', '{"id": 2, "name": "a"}\n', 2),
        ("jsonl", '{"name": "a", "name": "b", "id": 2}\n', '{"name": "b", "id": 2}\n', 2),
    ],
)
def test_a_malformed_row_keeps_its_key(
    folder: Folder,
    server: LiveServer,
    capsys: pytest.CaptureFixture[str],
    name: str,
    bad: str,
    good: str,
    key: object,
) -> None:
    rows = folder.write(f"rows.{name}", bad)
    arguments = ("--input", str(rows), "--key", "id")
    assert folder.run(server, *arguments) == 1
    line = folder.results()[-1]
    assert (line["key"], line["error"] is None) == (key, False)
    folder.write(rows.name, good)
    assert folder.run(server, *arguments) == 0
    found = folder.results()
    assert [line["error"] for line in found] == [None] * len(found)
    assert found[-1]["key"] == key
    assert "more results" not in capsys.readouterr().out


def test_a_key_that_cannot_be_told_is_none(folder: Folder, server: LiveServer) -> None:
    text = "extra,id,name\n1,2,a,b\n1,2,c\n"
    rows = folder.write("rows.csv", text)
    assert folder.run(server, "--input", str(rows), "--key", "id") == 1
    assert [line["key"] for line in folder.results()] == [None, "2"]
    torn = folder.write("rows.jsonl", '{"id": 12\n{"name": "a", "id": 3\n{"id": 12, "name": "b"}\n')
    (folder.path / "out.jsonl").unlink()
    assert folder.run(server, "--input", str(torn), "--key", "id") == 1
    assert [line["key"] for line in folder.results()] == [None, None, 12]


def test_malformed_rows_with_the_key_of_another_row_fail_alone(folder: Folder, server: LiveServer) -> None:
    """Such rows are the lines of a cell that should have been quoted."""
    rows = folder.write("rows.csv", "id,name\n1,a\nThanks\n2,b\nThanks\n1\n")
    assert folder.run(server, "--input", str(rows), "--key", "id") == 1
    assert [line["key"] for line in folder.results()] == ["1", "Thanks", "2", None, None]
    assert folder.run(server, "--input", str(rows), "--key", "id") == 1
    assert [line["key"] for line in folder.results()] == ["1", "Thanks", "2", None, None]


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow(
    folder: Folder, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = folder.write("rows.parquet", "PAR1")
    assert folder.run(server, "--input", str(rows)) == 2
    assert (
        'needs pyarrow, which is not installed. pip install "ramify-llm[parquet]"' in capsys.readouterr().err
    )


def test_parquet(folder: Folder, server: LiveServer) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = [f"n{index}" for index in range(3000)]
    path = folder.path / "rows.parquet"
    parquet.write_table(pyarrow.table({"name": names, "count": [1] * 3000}), path)
    program = load(folder.program())
    rows = InputRows(str(path), program, [], None, None)
    assert list(rows) == [{"name": name, "count": 1} for name in names]
