"""The memory of a batch with a results file grows by 16 bytes a row."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc

import pytest

import ramify as rm
from ramify.lang.batch.checkpoint import ResultsFile
from ramify.lang.batch.finished import FinishedRows
from ramify.lang.batch.json_text import canonical
from ramify.lang.batch.keys import hashed
from ramify.lang.batch.results import Plan, run_in_tasks
from ramify.messages import Finish, TextChunk, Usage
from tests.lang.batch.batches import run


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
    """`count` rows. `objects` holds the number of allocated blocks after each tenth of them."""

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
        """Blocks that each further row adds; two or more if rows are kept."""
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
    summary = run(program, rows, out=out, concurrency=4, backend=Forgetting([]))
    assert (summary.rows, summary.failed) == (1000, 0)
    assert out.read_bytes().count(b"\n") == 1001
    assert rows.kept < 1.5


async def test_the_pipeline_itself_keeps_nothing(out):
    """Rows through the window, the tasks and the file, as one finished run."""

    @rm.function
    def nothing(s): ...

    state = nothing.run(backend=rm.ScriptedBackend([]))

    async def one(register, values):
        return state

    rows = Rows(2000)
    plan = Plan(out=out, program="nothing", columns=["text"], concurrency=8)
    summary = await run_in_tasks(one, rows, plan, {"program": {"name": "nothing"}})
    assert summary.rows == rows.count
    assert rows.kept < 0.5


def test_resuming_takes_sixteen_bytes_a_row(out):
    rows, record = 200_000, {"program": {"name": "p"}}
    with out.open("w") as file:
        file.write('{"ramify_results":1,"header":"a","program":{"name":"p"},"key":{"name":"id"}}\n')
        for index in range(rows):
            digest = f"{hashed(canonical({'id': index})):016x}" if index % 1000 == 0 else "0"
            line = f'"header":"a","digest":"{digest}","key":{index},"outputs":{{}},"error":null'
            file.write(f'{{"index":{index},{line}}}\n')
    tracemalloc.start()
    results = ResultsFile(out, record, "id")
    assert results.others == rows
    for index in range(0, rows, 1000):
        assert results.see(index, {"id": index}, index)[1]
    assert results.others == rows - 200
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 16.5 * rows
    assert most < 64 * rows
    results.close()


def test_rows_that_are_seen_are_kept_in_arrays():
    """New identities in any order, mixed with known ones."""
    draw = random.Random(3)
    known = [draw.getrandbits(64) for _ in range(3000)]
    rows = FinishedRows([(identity, 17) for identity in known])
    seen = [draw.choice(known) if draw.random() < 0.3 else draw.getrandbits(64) for _ in range(3000)]
    places = {}
    for place, identity in enumerate(seen, 1):
        assert rows.place(identity) == places.get(identity, 0)
        rows.set_place(identity, place)
        places[identity] = place
    for identity in seen:
        assert rows.place(identity) == places[identity]
        assert rows.word(identity) == (17 if identity in known else 0)
    assert len(rows) == 3000
    assert rows.count(seen=True) == len(set(known) & set(seen))
