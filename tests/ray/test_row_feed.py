"""Rows of several batches in one window: order, concurrency, and a lost backend."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import ramify as rm
from ramify.errors import EngineClosed, ProgramError, WorkerDied
from ramify.ray.row_feed import RowFeed


@rm.function
def ask(s, document, question):
    s += document + question + rm.gen("x")


@rm.function
async def ask_async(s, document, question):
    s += document + question + rm.gen("x")
    await s.aget("x")


class Held(rm.ScriptedBackend):
    """A backend that answers "yes" to a request when the test allows it."""

    def __init__(self) -> None:
        super().__init__(lambda request: "yes")
        self.prompts: list[str] = []
        self._came: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()

    async def generate(self, request: Any) -> Any:
        gate: Future[None] = Future()
        self.prompts.append(request.prompt[0])
        self._came.put(gate)
        await asyncio.wrap_future(gate)
        async for chunk in super().generate(request):
            yield chunk

    def next(self) -> Callable[[], None]:
        """Wait for one more request; returns a function that has it answered."""
        gate = self._came.get(timeout=60)
        return lambda: gate.set_result(None)


def feed(program: Any, backend: Any, limit: int, lost: Any = lambda error: None) -> RowFeed:
    batch = program._batch({"backend": backend}, "auto", limit, False, 0.0)
    return RowFeed(program, batch, 64, lambda row, state: state["x"], lost)


@pytest.fixture(params=[ask, ask_async], ids=["threads", "tasks"])
def program(request: pytest.FixtureRequest) -> Iterator[Any]:
    return request.param


def test_rows_of_later_batches_run_beside_those_of_earlier_ones_by_prefix(program: Any) -> None:
    backend = Held()
    rows = feed(program, backend, 1)
    first = [rows.run({"document": document, "question": "1"}) for document in "aac"]
    go = backend.next()
    second = [rows.run({"document": document, "question": "2"}) for document in "ba"]
    go()
    for _ in range(4):
        backend.next()()
    assert {future.result(60) for future in first + second} == {"yes"}
    assert backend.prompts == ["a1", "a1", "a2", "b2", "c1"]
    rows.close()


def test_a_row_that_arrives_starts_while_another_runs(program: Any) -> None:
    backend = Held()
    rows = feed(program, backend, 2)
    one = rows.run({"document": "a", "question": "1"})
    go = backend.next()
    other = rows.run({"document": "b", "question": "1"})
    backend.next()()  # it is asked before the first has been answered
    assert other.result(60) == "yes"
    go()
    assert one.result(60) == "yes"
    again = rows.run({"document": "c", "question": "1"})
    backend.next()()
    assert again.result(60) == "yes"
    rows.close()


def test_an_error_of_the_feed_fails_all_rows(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda failed: None)
    backend = Held()
    rows = feed(program, backend, 1)

    def learn(row: Any, text: str) -> None:
        raise OSError("of the feed")

    monkeypatch.setattr(rows.window, "learn", learn)
    one, two = (rows.run({"document": "a", "question": n}) for n in "12")
    backend.next()()
    assert one.result(60) == "yes"
    assert "of the feed" in str(two.exception(60))
    assert "of the feed" in str(rows.run({"document": "b", "question": "1"}).exception(60))


def test_a_row_that_nobody_waits_for_disturbs_no_other(program: Any) -> None:
    backend = Held()
    rows = feed(program, backend, 1)
    one, two = (rows.run({"document": "a", "question": n}) for n in "12")
    go = backend.next()
    assert one.cancel()
    go()
    backend.next()()
    assert two.result(60) == "yes"
    rows.close()


def test_rows_of_a_closed_feed_fail(program: Any) -> None:
    backend = Held()
    rows = feed(program, backend, 1)
    one, two = (rows.run({"document": "a", "question": n}) for n in "12")
    go = backend.next()
    rows.close()
    go()
    assert one.result(60) == "yes"
    for future in (two, rows.run({"document": "b", "question": "1"})):
        assert isinstance(future.exception(60), EngineClosed)


def test_rows_fail_when_the_backend_answers_nothing(program: Any) -> None:
    told: list[ProgramError] = []

    def dead(request: Any) -> str:
        raise WorkerDied("The scheduler died.")

    rows = feed(program, rm.ScriptedBackend(dead), 4, told.append)
    futures: list[Future[Any]] = [rows.run({"document": "a", "question": str(n)}) for n in range(3)]
    for future in futures:
        assert "gave no answer" in str(future.exception(60))
    assert told
    rows.close()
