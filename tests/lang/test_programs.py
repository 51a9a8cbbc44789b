"""The ten programs: equal results on all backends, and no token computed twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import ramify as rm
from ramify.lang.backends.base import Backend
from tests.lang.engines import Recording, tokeniser, work_of
from tests.lang.programs import CASES, Case

every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def outcome(state: rm.ProgramState) -> dict[str, Any]:
    """The results of a run without its times."""
    names = sorted(state._branch.variables)
    calls = [(call.kind, call.name, call.prompt, call.text) for call in state.trace.walk()]
    return {
        "text": state.text(),
        "variables": {name: state[name] for name in names},
        "returned": state.ret_value,
        "calls": calls,
    }


def run_all(case: Case, backend: Backend) -> list[dict[str, Any]]:
    return [outcome(state) for state in case.program.run_batch(case.arguments, backend=backend)]


@every_case
def test_a_program_runs_on_a_script(case: Case) -> None:
    backend = rm.ScriptedBackend(case.script)
    states = [case.program.run(**row, backend=backend) for row in case.rows(len(case.arguments) + 2)]
    assert [state.error() for state in states] == [None] * len(states)
    prompts = {tuple(call.prompt for call in state.trace.walk()) for state in states}
    assert len(prompts) == len(states)
    assert all(state.trace.requests >= 1 for state in states)


@every_case
def test_a_program_over_http_is_the_program_in_process(
    case: Case, engine: rm.Engine, endpoint: rm.RuntimeEndpoint
) -> None:
    here = run_all(case, engine)
    assert run_all(case, endpoint) == here
    assert [outcome(case.program.run(**row, backend=engine)) for row in case.arguments] == here


@every_case
def test_streaming_changes_nothing(case: Case, engine: rm.Engine) -> None:
    whole = case.program.run(**case.arguments[0], backend=engine)
    state = case.program.run(**case.arguments[0], backend=engine, stream=True)
    assert "".join(state.text_iter()) == whole.text()
    assert outcome(state) == outcome(whole)
    for name in case.streams:
        assert "".join(state.text_iter(name)) == whole[name]


@every_case
def test_nothing_is_computed_twice(case: Case, engine: rm.Engine, model_folder: Path) -> None:
    """The prompt tokens that a program computes are the distinct tokens of its tree of calls."""
    for rows in (case.arguments[:1], case.arguments):
        engine.flush_cache()
        recording = Recording(engine)
        for row in rows:
            case.program.run(**row, backend=recording)
        work = work_of(recording.events, tokeniser(model_folder))
        assert work.programs == len(rows)
        work.check()
    # One token a request, and for a choice of a select those that it may share with the prompt.
    assert work.for_logits <= 4 * work.requests
    assert work.computed < 0.6 * work.sent


def test_batches_share_what_their_rows_share(engine: rm.Engine, model_folder: Path) -> None:
    case = CASES["few-shot"]
    engine.flush_cache()
    recording = Recording(engine)
    case.program.run_batch(case.rows(32), backend=recording)
    work = work_of(recording.events, tokeniser(model_folder))
    assert work.requests == 32
    work.check()
    assert work.computed < work.sent / 5


def test_rows_differ() -> None:
    for case in CASES.values():
        rows = case.rows(40)
        assert len({repr(row) for row in rows}) == 40
        assert rows[: len(case.arguments)] == list(case.arguments)


async def test_async_readers_of_a_sync_program(engine: rm.Engine) -> None:
    case = CASES["streaming"]
    state = await asyncio.to_thread(case.program.run, **case.arguments[0], backend=engine, stream=True)
    pieces = [piece async for piece in state.text_async_iter()]
    assert "".join(pieces) == await asyncio.to_thread(state.text)
