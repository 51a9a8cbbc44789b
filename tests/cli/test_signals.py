"""Ctrl-C and SIGTERM in commands that take long, as real processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ramify.cli import calibrate, main, pull
from tests.cli.conftest import Folder
from tests.lang.remote import ScriptedFrontend
from tests.server.fake_frontend import LiveServer

PROGRAM = """
    import os
    import ramify as rm

    @rm.function
    def greet(s, name):
        if name == "b":
            raise ValueError("b")
        s += "hello " + name + rm.gen("answer", max_tokens=4)

    @rm.function
    async def agreet(s, name):
        if name == "b":
            raise ValueError("b")
        s += "hello " + name + rm.gen("answer", max_tokens=4)

    @rm.function
    def stuck(s, name):
        s += "hello " + name + rm.gen("answer", max_tokens=4)
        if name == "d":
            open(os.environ["PIPE"], "w").close()  # tells the test
            open(os.environ["PIPE"]).close()  # and waits for ever
"""


@pytest.fixture
def holding() -> Iterator[LiveServer]:
    """A server that answers the third request only when it is aborted."""
    frontend = ScriptedFrontend(lambda request: "fine")
    frontend.hold_after = 3
    with LiveServer(frontend) as server:
        yield server


@contextlib.contextmanager
def ramify(folder: Folder, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "ramify", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment or None
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.01)


def lines_of(path: Path) -> int:
    return path.read_text().count('{"index":') if path.exists() else 0


@pytest.mark.parametrize(
    ("name", "number", "status", "word"),
    [
        ("greet", signal.SIGINT, 130, "interrupted"),
        ("agreet", signal.SIGTERM, 143, "ended by SIGTERM"),
    ],
)
def test_a_batch_says_what_is_done_and_how_to_go_on(
    folder: Folder, holding: LiveServer, name: str, number: signal.Signals, status: int, word: str
) -> None:
    rows = folder.write("rows.csv", "name\n" + "\n".join("abcdefgh"))
    out = folder.path / "out.jsonl"
    options = ["--input", rows, "--output", out, "--concurrency", "1", "--endpoint", holding.url]
    arguments = ["run", folder.program(name), *options]
    with ramify(folder, *arguments) as process:
        assert holding.frontend.held.wait(60)
        until(lambda: lines_of(out) == 3)  # a, the failed b, and c; d is held
        process.send_signal(number)
        assert process.wait(60) == status
        assert process.stderr is not None
        assert process.stderr.read() == (
            f"ramify: {word}.\n"
            f"3 of 8 rows are done (1 failed), 5 are left. Results are in {out}; "
            "the same again goes on with the others.\n"
            f"To go on: ramify {' '.join(map(str, arguments))}\n"
        )
    holding.frontend.hold_after = None
    assert main.main([*map(str, arguments)]) == 1  # b has failed
    assert lines_of(out) == 8


def test_the_second_signal_ends_a_program_that_hangs(folder: Folder, holding: LiveServer) -> None:
    holding.frontend.hold_after = None
    rows = folder.write("rows.csv", "name\n" + "\n".join("cd"))
    out, pipe = folder.path / "out.jsonl", folder.path / "pipe"
    subprocess.run(["mkfifo", pipe], check=True)
    options = ["--input", rows, "--output", out, "--concurrency", "1", "--endpoint", holding.url]
    with ramify(folder, "run", folder.program("stuck"), *options, PIPE=str(pipe)) as process:
        pipe.read_text()
        until(lambda: lines_of(out) == 1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)  # another signal: two equal ones may arrive as one
        assert process.wait(60) == 143
    assert lines_of(out) == 1


def test_a_load_test_says_what_it_has_measured(folder: Folder, holding: LiveServer) -> None:
    holding.frontend.hold_after = 2 + 3  # two requests warm up, two are the first run
    lines = folder.path / "lines.jsonl"
    options = [
        "--workload",
        "single",
        "--requests",
        "2",
        "--runs",
        "3",
        "--max-tokens",
        "4",
        "--no-ignore-eos",
    ]
    arguments = ["bench", "--url", holding.url, *options, "--jsonl", lines]
    with ramify(folder, *arguments) as process:
        assert holding.frontend.held.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read().endswith(
            f"ramify: interrupted.\n1 of 3 measurements are done; their figures are in {lines}. A load test "
            f"does not go on: to measure anew, ramify {' '.join(map(str, arguments))}\n"
        )
    assert lines.read_text().count("\n") == 1


def interrupt(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGTERM)


def test_pull_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pull, "_pull", interrupt)
    assert main.main(["pull", "some model"]) == 143
    assert capsys.readouterr().err == (
        "ramify: ended by SIGTERM.\nWhat is finished is kept. To go on: ramify pull 'some model'\n"
    )


def test_calibrate_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "read_file", interrupt)
    out = str(tmp_path / "t.json")
    target = ["--endpoint", "http://me:secret@host", "--endpoint-k", "secret"]
    assert main.main(["calibrate", "q.jsonl", "--output", out, *target]) == 143
    assert capsys.readouterr().err.endswith(
        f"No answers are kept. {out} is not written. To begin anew: ramify calibrate q.jsonl --output {out} "
        "--endpoint http://host --endpoint-k '…'\n"
    )
