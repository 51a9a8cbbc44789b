"""The memory of a batch with a results file grows by four bytes a row."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import pytest

import ramify as rm
from ramify.lang.batch.checkpoint import ResultsFile
from ramify.lang.batch.results import Plan, run_in_tasks
from ramify.messages import Finish, TextChunk, Usage


@pytest.fixture
def out(tmp_path):
    return tmp_path / "results.jsonl"


@pytest.fixture(autouse=True)
def _collect_new_objects_only():
    gc.freeze()
    yield
    gc.unfreeze()


class Forgetting(rm.ScriptedBackend):
    """A backend that keeps no requests."""

    async def generate(self, request):
        yield TextChunk(
            rid=request.rid, text="ok", ids=(1,), usage=Usage(prompt_tokens=3), finish=Finish(reason="stop")
        )

    async def end_program(self, program): ...


class Rows:
    """`count` rows, and how many objects there were as each tenth of them was asked for."""

    def __init__(self, count):
        self.count = count
        self.objects = []

    def __iter__(self):
        for index in range(self.count):
            if index % (self.count // 10) == self.count // 20:
                gc.collect()
                self.objects.append(sys.getallocatedblocks())
            yield {"text": f"{index} " + "x" * 100}

    @property
    def kept(self):
        """Objects more for each row after the first few: two or more where rows are kept."""
        return (min(self.objects[7:]) - min(self.objects[2:5])) / (self.count / 2)


@pytest.mark.parametrize("name", ["asks", "asks_later", "only_text"])
def test_runs_are_not_kept(out, name):
    @rm.function
    def asks(s, text):
        s += text + rm.gen("x")

    @rm.function
    async def asks_later(s, text):
        s += text + rm.gen("x")

    @rm.function
    def only_text(s, text):
        s += text

    program = {"asks": asks, "asks_later": asks_later, "only_text": only_text}[name]
    rows = Rows(1000)
    found = program.run_batch(rows, out=out, concurrency=4, backend=Forgetting([]))
    summary = asyncio.run(found) if asyncio.iscoroutine(found) else found
    assert (summary.rows, summary.failed) == (1000, 0)
    assert out.read_bytes().count(b"\n") == 1000
    assert rows.kept < 1


async def test_the_pipeline_itself_keeps_nothing(out):
    """Rows through the window, the tasks and the file, as one finished run."""

    @rm.function
    def nothing(s): ...

    state = nothing.run(backend=rm.ScriptedBackend([]))

    async def one(register, values):
        return state

    rows = Rows(2000)
    plan = Plan(out=out, program="nothing", columns=["text"], same=None, concurrency=8)
    summary = await run_in_tasks(one, rows, plan)
    assert summary.rows == rows.count
    assert rows.kept < 0.5


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_resuming_takes_four_bytes_a_row(out):
    with out.open("w") as file:
        for index in range(200_000):
            file.write(f'{{"index":{index},"digest":"0000000a","outputs":{{}},"error":null}}\n')
    before = resident_bytes()
    results = ResultsFile(out)
    assert results.lines == 200_000
    assert results.is_done(199_999, 10)
    assert not results.is_done(200_000, 10)
    assert resident_bytes() - before < 4e6
    results.close()
