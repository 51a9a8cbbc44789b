"""The output of ``ramify run``: files, pipes and standard output; full disks and Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ramify as rm
from ramify.cli import main
from ramify.errors import RamifyError
from ramify.lang.batch.checkpoint import ResultsFile
from tests.cli.conftest import Folder
from tests.server.fake_frontend import LiveServer

PROGRAM = """
    import os, signal
    import ramify as rm

    @rm.function
    def greet(s, name):
        if name == "stop":
            os.kill(os.getpid(), signal.SIGINT)
        s += "hello " + name + rm.gen("answer", max_tokens=4)
"""


def command(folder: Folder, server: LiveServer, output: Path | str, *more: str) -> list[str]:
    rows = folder.path / "rows.csv"
    if not rows.exists():
        folder.write(rows.name, "name\n" + "".join(f"n{number}\n" for number in range(5)))
    options = ["--input", str(rows), "--output", str(output), "--endpoint", server.url]
    return ["run", folder.program(), *options, *more]


def indices(text: str) -> list[int]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert "ramify_results" in lines[0]
    return sorted(line["index"] for line in lines[1:])


def test_standard_output(folder: Folder, server: LiveServer, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("-", "/dev/stdout", "/dev/fd/1"):
        assert main.main(command(folder, server, name)) == 0
        said = capfd.readouterr()
        assert indices(said.out) == [0, 1, 2, 3, 4]
        assert said.err.startswith("5 rows in ")
    assert not Path("-").exists()


def test_a_pipe(folder: Folder, server: LiveServer, capfd: pytest.CaptureFixture[str]) -> None:
    read: list[str] = []
    pipe = folder.path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert main.main(command(folder, server, pipe)) == 0
    reader.join()
    assert indices(read[0]) == [0, 1, 2, 3, 4]
    assert capfd.readouterr().out.startswith("5 rows in ")
    ends = os.pipe()
    assert main.main(command(folder, server, f"/dev/fd/{ends[1]}")) == 0
    os.close(ends[1])
    with open(ends[0]) as end:
        assert indices(end.read()) == [0, 1, 2, 3, 4]


def test_a_reader_that_has_enough(folder: Folder, server: LiveServer) -> None:
    ends = os.pipe()
    os.close(ends[0])
    with pytest.raises(BrokenPipeError):
        rm.function(lambda s, name: None).run_batch(
            [{"name": "a"}], out=f"/dev/fd/{ends[1]}", backend=rm.ScriptedBackend([])
        )
    os.close(ends[1])


@pytest.mark.parametrize(
    ("output", "more", "problem"),
    [
        ("", [], "{} is a folder. Name a file in it."),
        ("gone/out.jsonl", [], "There is no folder {0.parent} for out.jsonl. Make it: mkdir -p {0.parent}"),
        ("out.jsonl", ["--trace", "gone/trace.html"], "There is no folder gone for trace.html"),
        ("out.jsonl", ["--trace", "/"], "/ is a folder"),
        ("/dev/null", ["--rerun", "failed"], "/dev/null is no file that has results"),
        ("/dev/fd/77", [], "/dev/fd/77 is not open: this process has no descriptor 77. Name a file"),
        ("out.jsonl", ["--trace", "/dev/fd/77"], "/dev/fd/77 is not open"),
        ("pipe.parquet", [], "is a pipe or a device, and a table needs a file"),
    ],
)
def test_what_is_refused_before_a_row_runs(
    folder: Folder,
    server: LiveServer,
    output: str,
    more: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    os.mkfifo(folder.path / "pipe.parquet")
    before = len(server.frontend.requests)
    path = folder.path / output
    assert main.main(command(folder, server, path, *more)) == 2
    assert problem.format(path) in capsys.readouterr().err
    assert len(server.frontend.requests) == before


def test_an_interrupted_batch_into_a_stream(
    folder: Folder, server: LiveServer, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.write("rows.csv", "\n".join(["name", *(f"n{number}" for number in range(5)), "stop"]))
    assert main.main(command(folder, server, "-", "--concurrency", "1")) == 130
    said = capfd.readouterr().err
    assert "of 6 rows were written to -; a further run begins anew." in said
    assert "To go on" not in said


def test_a_full_disk(folder: Folder, server: LiveServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(command(folder, server, "/dev/full")) == 2
    assert "ramify: /dev/full cannot be written: No space left on device. Make room" in capfd.readouterr().err
    out = folder.path / "out.jsonl"
    size = 1500  # the header and a few lines
    script = (
        "import resource, sys; from ramify.cli import main;"
        "sys.dont_write_bytecode = True;"  # Python keeps the half of a file that is larger than the limit
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}));"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    arguments = command(folder, server, out)
    found = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=folder.path
    )
    assert found.returncode == 2, found.stderr
    assert (
        f"ramify: {out} cannot be written: File too large. Make room there (df -h, ulimit -f). "
        in found.stderr
    )
    assert "Then run the same again: the rows that are in it are not run again." in found.stderr
    assert f"left. Results are in {out}; the same again goes on with the others.\n" in found.stderr
    done = indices(out.read_text())  # whole lines
    assert len(done) < 5
    assert main.main(arguments) == 0
    assert indices(out.read_text()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_line_that_is_written_by_half_is_taken_back(tmp_path: Path, number: int) -> None:
    class Full:
        """A file that takes 5 bytes more."""

        def __init__(self, file: Any) -> None:
            self._file, self._written = file, False

        def write(self, data: bytes) -> int:
            if self._written:
                raise OSError(number, os.strerror(number))
            self._written = True
            return int(self._file.write(bytes(data[:5])))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    out = tmp_path / "out.jsonl"
    file = ResultsFile(out, {"program": {"name": "x"}})
    for index in range(2):
        file.append(index, file.see(index, {"n": index})[0], {"outputs": {}, "error": {"transient": True}})
    file.close()
    whole = out.read_bytes()
    file = ResultsFile(out, {"program": {"name": "x"}})
    row, _ = file.see(0, {"n": 0})
    file._file = Full(file._file)
    with pytest.raises(RamifyError, match=f"cannot be written: {os.strerror(number)}"):
        file.append(0, row, {"outputs": {}, "error": None})
    file.close()
    assert out.read_bytes() == whole


def test_a_full_standard_output(folder: Folder, server: LiveServer) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "ramify", *command(folder, server, folder.path / "out.jsonl")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (found.returncode, found.stderr) == (
        2,
        "ramify: standard output cannot be written: No space left on device.\n",
    )
