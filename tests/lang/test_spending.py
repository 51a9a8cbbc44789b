"""The usage of timed-out and cancelled steps: all that the backend computed for them, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import ramify as rm
from ramify.errors import RequestTimeout
from ramify.lang.backends.scripted import ScriptedBackend
from ramify.lang.common.event import Event
from ramify.loop import wait
from ramify.messages import Finish, Generate, SchedulerStats, TextChunk, Usage
from tests.lang.backends import Holding
from tests.lang.engines import OPTIONS
from tests.lang.steps import program_of


class Counting(ScriptedBackend):
    """A backend that computes for ever, and reports its tokens when it is aborted if `answers` is set."""

    def __init__(self, *, answers: bool = True) -> None:
        super().__init__([])
        self.answers = answers
        self.started, self.aborted = Event(), Event()
        self.rids: list[str] = []
        self.closed = 0

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        usage = Usage(prompt_tokens=5, completion_tokens=1)
        try:
            yield TextChunk(rid=request.rid, text="a", ids=(7,), usage=usage)
            self.started.set()
            await self.aborted.wait()
            usage = Usage(prompt_tokens=5, completion_tokens=4)
            yield TextChunk(
                rid=request.rid, text="bcd", ids=(8, 9, 10), usage=usage, finish=Finish(reason="abort")
            )
        finally:
            self.closed += 1

    async def abort(self, rid: str) -> None:
        self.rids.append(rid)
        if self.answers:
            self.aborted.set()


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"retries": 1}])
def test_a_timed_out_step_reads_its_last_chunk(options: dict):
    program = program_of("Count: " + rm.gen("x", timeout=0.02, **options))
    backend = Counting()
    state = program.run(backend=backend)
    error = state.error()
    assert isinstance(error.__cause__, RequestTimeout)
    requests = options.get("n", 1)
    assert state.usage.completion_tokens == 4 * requests
    assert state.usage.prompt_tokens == 5 * requests
    assert len(backend.rids) == backend.closed == requests
    call = state.trace.children[0]
    call = call.children[0] if call.children else call
    assert (call.text, call.finish.reason) == ("abcd", "abort")
    if not options:
        assert error.partial == "abcd"


async def test_a_cancelled_run_reads_the_last_chunk():
    @rm.function
    async def program(s):
        s += "Count: " + rm.gen("x")
        state.append(s)
        await s.wait()

    state: list[rm.ProgramState] = []
    backend = Counting()
    task = asyncio.create_task(program.run(backend=backend))
    await backend.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state[0].usage.completion_tokens == 4
    assert state[0].trace.children[0].text == "abcd"


def test_a_backend_that_does_not_answer_the_abort_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ramify.lang.calls.delivery.ABORT_S", 0.01)
    backend = Counting(answers=False)

    program = program_of("Count: " + rm.gen("x", timeout=0.02))
    state = program.run(backend=backend)
    assert isinstance(state.error().__cause__, RequestTimeout)
    assert state.usage.completion_tokens == 1
    assert backend.closed == 1


class Unsent(Counting):
    """A backend that is cancelled before it has sent the request, and has nothing to abort."""

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        self.started.set()
        try:
            await asyncio.Event().wait()
            yield TextChunk(rid=request.rid)
        finally:
            self.closed += 1

    async def abort(self, rid: str) -> bool:
        self.rids.append(rid)
        return False


def test_a_request_that_was_not_sent_ends_without_waiting_for_its_last_chunk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ramify.lang.calls.delivery.ABORT_S", 3600.0)
    backend = Unsent()

    @rm.function
    def program(s):
        s += "Count: " + rm.gen("x")
        backend.started.block()
        raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        program.run(backend=backend)
    assert len(backend.rids) == backend.closed == 1


def test_an_engine_that_has_not_started_has_sent_nothing(model_folder: Path):
    assert wait(rm.Engine(str(model_folder), **OPTIONS).abort("r")) is False


def test_without_abort_the_tokens_that_have_come_are_counted():
    backend = Holding(["one two three"])

    program = program_of("Count: " + rm.gen("x", timeout=0.02))
    state = program.run(backend=backend)
    assert state.error().partial == "one"
    assert state.usage.completion_tokens == 1
    assert backend.aborted == 1


@pytest.mark.parametrize(("where", "compiled"), [("engine", False), ("endpoint", False), ("endpoint", True)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_in_mid_generation_reports_the_schedulers_count(
    where: str, compiled: bool, stream: bool, request: pytest.FixtureRequest
):
    backend = request.getfixturevalue(where)

    def stats() -> SchedulerStats:
        info = backend.get_server_info()
        return msgspec.convert(info.get("stats") or info["internal_states"][0], SchedulerStats)

    program = program_of(
        "Count: " + rm.gen("x", max_tokens=8000, ignore_eos=True, timeout=0.3, temperature=0)
    )
    warm_up = program_of("?" + rm.gen("x", max_tokens=2, ignore_eos=True))
    warm_up.run(backend=backend)
    backend.flush_cache()
    before = stats()
    state = program.run(backend=backend, stream=stream, compiled=compiled)
    error = state.error()
    assert isinstance(error.__cause__, RequestTimeout)
    after, usage = stats(), state.usage
    assert after.running == 0
    assert 0 < usage.completion_tokens == after.output_tokens - before.output_tokens < 8000
    assert usage.prompt_tokens == len("Count: ")
    call = state.trace.children[0]
    assert len(call.tokens.ids) == usage.completion_tokens
    assert error.partial == call.text
    computed = usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1
    drafts = (after.draft_tokens - after.accepted_tokens) - (before.draft_tokens - before.accepted_tokens)
    assert computed == after.computed_tokens - before.computed_tokens - drafts


def test_a_request_that_never_ran_costs_nothing(engine: rm.Engine):
    """The program is cancelled while its requests are still on their way or queued."""

    @rm.function
    def program(s):
        s += "Q"
        forks = s.fork(8)
        for index, fork in enumerate(forks):
            fork += f" {index}" + rm.gen("x", max_tokens=4000, ignore_eos=True)
        s.cancel()

    before = engine.stats()
    state = program.run(backend=engine)
    after = engine.stats()
    assert state.usage.completion_tokens == after.output_tokens - before.output_tokens
    computed = state.usage.prompt_tokens - state.usage.cached_tokens
    assert computed <= after.computed_tokens - before.computed_tokens
