"""Batches with a results file: one line a row, continued after any kind of end."""

from __future__ import annotations

import dataclasses
import enum
import fcntl
import random
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

import ramify as rm
from ramify.errors import BackendError, InvalidRequest
from ramify.lang.batch.checkpoint import ResultsFile
from ramify.lang.batch.summary import BatchSummary
from ramify.messages import Usage
from tests.lang.backends import Breaking
from tests.lang.batch.batches import UNLUCKY, answer, by_index, double, lines, run


def test_a_line_a_row(program, out):
    summary = run(program, ({"n": n} for n in range(10, 20)), out=out, concurrency=4)
    found = by_index(out)
    assert [line["index"] for line in found] == list(range(10))
    assert found[0]["outputs"] == {"x": 20}
    assert found[0]["returned"] == 21
    assert found[0]["error"] is None
    usage = found[0]["usage"]
    assert (usage["requests"], usage["prompt_tokens"], usage["completion_tokens"]) == (1, 4, 2)
    assert found[3]["error"]["type"] == "ValueError"
    assert found[3]["error"]["message"] == "The program raised ValueError: unlucky"
    assert found[3]["outputs"] == {}
    assert (summary.rows, summary.failed, summary.skipped) == (10, 1, 0)
    assert summary.usage.prompt_tokens == sum(line["usage"]["prompt_tokens"] for line in found)
    assert summary.usage.cached_tokens == sum(line["usage"]["cached_tokens"] for line in found)
    assert "unlucky" in summary.first_error


def test_the_same_call_goes_on_where_it_stopped(program, out):
    class Stop(BaseException): ...

    def interrupted():
        for n in range(40):
            if n == 30:
                raise Stop
            yield {"n": n}

    with pytest.raises(Stop):
        run(program, interrupted(), out=out, concurrency=2, look_ahead=1)
    before = lines(out)
    assert 20 < len(before) < 31
    backend = rm.ScriptedBackend(answer)
    summary = run(program, ({"n": n} for n in range(40)), out=out, backend=backend)
    assert (summary.rows, summary.skipped) == (40 - len(before), len(before))
    assert lines(out)[: len(before)] == before
    assert sorted(line["index"] for line in lines(out)) == list(range(40))
    unlucky_was_done = UNLUCKY in [line["index"] for line in before]
    assert len(backend.requests) == summary.rows - (not unlucky_was_done)


@pytest.mark.slow
def test_killed_again_and_again(out):
    """`kill -9` after 20 to 149 rows have started: no row is lost, and none is written twice."""
    draw = random.Random(5)
    command = [sys.executable, str(Path(__file__).with_name("killed_batch.py")), str(out)]
    kills = 0
    while True:
        patience = draw.randrange(20, 150)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            last = ""
            for count, line in enumerate(process.stdout):
                last = line
                if count == patience:
                    process.kill()
                    break
            process.stdout.read()
        if last.startswith("done"):
            break
        assert process.returncode == -9
        kills += 1
        with out.open("ab") as file:  # what a kill within the system call would leave
            file.write(b'{"index":399,"dig'[: draw.randrange(18)])
    assert kills >= 3
    found = lines(out)
    assert sorted(line["index"] for line in found) == list(range(400))
    assert all(line["outputs"]["x"] == str(2 * line["index"]) for line in found)
    rows, skipped = map(int, last.split()[1:])
    assert rows + skipped == 400


@pytest.mark.parametrize("torn", [b'{"index":2,"digest":"0', b"{", b"\0\0\0"])
def test_a_torn_line_is_cut_off(program, out, torn):
    run(program, [{"n": 1}, {"n": 2}], out=out)
    whole = out.read_bytes()
    out.write_bytes(whole + torn)
    summary = run(program, [{"n": n} for n in (1, 2, 3)], out=out)
    assert (summary.rows, summary.skipped) == (1, 2)
    assert out.read_bytes().startswith(whole)
    assert len(lines(out)) == 3


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"notes", b'{"index":0}\n', b'{"index":0,"x' + b"\n"])
def test_a_file_of_something_else_is_left_alone(program, out, content):
    out.write_bytes(content)
    with pytest.raises(InvalidRequest, match="line 1, is not a result of a batch"):
        run(program, [{"n": 1}], out=out)
    assert out.read_bytes() == content


def test_two_writers_are_refused(program, out):
    file = ResultsFile(out, {"program": {"name": "x"}})
    with pytest.raises(InvalidRequest, match="Another process writes"):
        run(program, [{"n": 1}], out=out)
    file.close()
    assert run(program, [{"n": 1}], out=out).rows == 1


def test_a_file_that_is_replaced_before_it_is_locked_is_opened_again(out, monkeypatch):
    record, lock = {"program": {"name": "x"}}, fcntl.flock

    def append(file, n, error=None):
        row, _ = file.see(n, {"n": n})
        file.append(n, row, {"outputs": {}, "error": error})

    first = ResultsFile(out, record)
    append(first, 0, {"transient": True})
    first.close()
    first = ResultsFile(out, record)
    append(first, 0)

    def late(file, how):
        monkeypatch.undo()
        first.close()  # drops the line that was replaced
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = ResultsFile(out, record)
    append(second, 1)
    second.close()
    assert [line["index"] for line in lines(out)] == [0, 1]


def test_failed_rows_are_run_again_when_asked_for(program, out):
    rows = [{"n": n} for n in range(6)]
    failing = Breaking(answer, BackendError("gone"), after=0, where="3 times")
    assert run(program, rows, out=out, backend=failing).failed == 1
    again = rm.ScriptedBackend(answer)
    summary = run(program, rows, out=out, backend=again, rerun="missing")
    assert (summary.rows, summary.skipped, summary.failed_before) == (0, 6, 1)
    assert "6 were done before (1 of them failed: rerun failed runs them again)" in str(summary)
    out.write_bytes(out.read_bytes() + b'{"index":')
    summary = run(program, rows, out=out, backend=again, rerun="failed,missing")
    assert (summary.rows, summary.failed, summary.skipped) == (1, 0, 5)
    assert sorted(line["index"] for line in lines(out)) == list(range(6))
    assert all(line["error"] is None for line in lines(out))
    assert list(out.parent.iterdir()) == [out]


def test_a_key_is_copied_and_is_no_argument(program, out):
    run(program, [{"n": 1, "id": "a"}, {"n": 2, "id": "b"}], out=out, key="id")
    assert sorted((line["key"], line["outputs"]["x"]) for line in lines(out)) == [("a", 2), ("b", 4)]


class Colour(enum.Enum):
    RED = "red"


class Model(pydantic.BaseModel):
    name: str


@dataclasses.dataclass
class Plain:
    size: int


def test_values_of_all_kinds_become_json(out):
    @rm.function
    def program(s):
        s["colour"], s["model"], s["plain"] = Colour.RED, Model(name="x"), [Plain(3)]
        s["other"] = Path("a")

    program.run_batch([{}], out=out, backend=rm.ScriptedBackend([]))
    assert lines(out)[0]["outputs"] == {
        "colour": "red",
        "model": {"name": "x"},
        "plain": [{"size": 3}],
        "other": "a",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator_style": True}, "no states to yield"),
        ({"look_ahead": 0}, "look_ahead is 0"),
        ({"out": None, "key": "n"}, "key needs out"),
        ({"out": None, "rerun": "failed"}, "rerun needs out"),
        ({"rerun": "all"}, "rerun is 'all'; it must be one of changed, failed, missing"),
        ({"trace_rows": 0}, "trace_rows is 0"),
        ({"retry_failed": True}, "no option 'retry_failed'"),
        ({"out": None, "look_ahead": 5}, "look_ahead needs out"),
    ],
)
def test_options_that_mean_nothing_are_refused(out, options, message):
    with pytest.raises(InvalidRequest, match=message):
        run(double, [{"n": 1}], **{"out": out, **options})


def test_progress_shows_what_was_done_before(program, out, capsys):
    rows = [{"n": n} for n in range(12)]
    run(program, rows[:5], out=out)
    run(program, rows, out=out, progress=True)
    err = capsys.readouterr().err
    assert "12/12" in err
    assert "failed=0" in err
    assert "skipped=5" in err
    assert "cached=" in err


def test_the_summary_in_words():
    summary = BatchSummary(
        rows=10,
        failed=1,
        skipped=5,
        duration_s=2.0,
        usage=Usage(prompt_tokens=100, cached_tokens=75, completion_tokens=60),
        first_error="gone",
    )
    assert str(summary).splitlines() == [
        "10 rows in 2.0 s (5.0 rows/s), 1 failed, 5 were done before",
        "30 output tokens/s, 80 tokens/s in all, 75% of 100 prompt tokens cached",
        "first error: gone",
    ]
    assert str(BatchSummary()).startswith("0 rows in 0.0 s (0.0 rows/s), 0 failed\n")
