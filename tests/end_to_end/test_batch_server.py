"""A batch over a real server that is killed, and an estimate against what the examples then take."""

from __future__ import annotations

import csv
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ramify as rm
from examples.classify import ROWS, classify
from examples.extract import extract
from tests.end_to_end.served import serve
from tests.lang.engines import OPTIONS, write_long

pytestmark = [pytest.mark.slow]

PROGRAM = """
import ramify as rm

@rm.function
def count(s, n: int):
    s += f"Count from {n}:" + rm.gen("x", max_tokens=4, temperature=0.0)
"""
NUMBER = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    write_long(folder / "model")
    (folder / "count.py").write_text(PROGRAM)
    (folder / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(NUMBER)))
    return folder


@pytest.fixture
def flags(folder: Path) -> list[str]:
    """The state of a server whose address stays the same when it starts again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    return ["--port", str(port), "--model", str(folder / "model"), *options]


def start(folder: Path, url: str, out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ramify", "run", f"{folder / 'count.py'}:count", "--no-progress"]
    command += ["--input", str(folder / "rows.jsonl"), "--output", str(out), "--endpoint", url]
    command += ["--concurrency", "4", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_of(batch: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status of a batch, and what it has printed."""
    with batch:
        said, _ = batch.communicate()
        return batch.returncode, said


def results(out: Path) -> list[dict[str, object]]:
    """The complete lines: the batch may be writing another one."""
    lines = out.read_bytes().splitlines(keepends=True) if out.exists() else []
    found = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [line for line in found if "index" in line]


def wait_for(out: Path, batch: subprocess.Popen[str], count: int) -> None:
    while len(results(out)) < count:
        assert batch.poll() is None, end_of(batch)


def test_a_server_that_is_killed_and_starts_again_costs_no_row(
    folder: Path, flags: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with serve(*flags) as served:
        batch = start(folder, served.url, out)
        wait_for(out, batch, 20)
        served.process.kill()
    with serve(*flags):
        status, said = end_of(batch)
    assert status == 0, said
    assert sorted(line["index"] for line in results(out)) == list(range(NUMBER))  # type: ignore[type-var]
    assert not any(line["error"] for line in results(out))


@pytest.mark.long
def test_without_a_server_the_batch_stops_and_goes_on_later(
    folder: Path, flags: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with serve(*flags) as served:
        batch = start(folder, served.url, out, "--give-up-after", "2")
        wait_for(out, batch, 20)
        served.process.kill()
        status, said = end_of(batch)
    assert status == 1, said
    found = re.search(r"(\d+) rows are done, (\d+) are left; run the same again to go on", said)
    assert found is not None, said
    assert int(found[1]) == len(results(out)) == NUMBER - int(found[2])
    assert not any(line["error"] for line in results(out))
    with serve(*flags) as served:
        status, said = end_of(start(folder, served.url, out))
    assert status == 0, said
    assert f"{found[1]} were done before" in said
    assert sorted(line["index"] for line in results(out)) == list(range(NUMBER))  # type: ignore[type-var]


@pytest.fixture(scope="module")
def engine() -> Iterator[rm.Engine]:
    with rm.Engine() as engine:
        yield engine


@pytest.mark.weights
@pytest.mark.parametrize(
    "program", [classify, pytest.param(extract, marks=pytest.mark.long)], ids=["classify", "extract"]
)
def test_an_estimate_is_within_a_fifth_of_what_the_example_takes(
    program: Any, engine: rm.Engine, tmp_path: Path
) -> None:
    with ROWS.open(newline="") as file:
        rows = [{"text": row["text"]} for row in csv.DictReader(file)] * 2
    rows = [{"text": f"({n}) {row['text']}"} for n, row in enumerate(rows)]
    engine.flush_cache()
    estimate = program.run_batch(rows, dry_run=True, backend=engine)
    engine.flush_cache()
    taken = program.run_batch(rows, out=tmp_path / "out.jsonl", backend=engine)
    print(f"\n{estimate}\n{taken}")
    for name in ("prompt_tokens", "completion_tokens"):
        found = getattr(taken.usage, name)
        assert getattr(estimate.usage, name) == pytest.approx(found, rel=0.2), name
    computed = [usage.prompt_tokens - usage.cached_tokens for usage in (estimate.usage, taken.usage)]
    assert computed[0] == pytest.approx(computed[1], rel=0.2)
