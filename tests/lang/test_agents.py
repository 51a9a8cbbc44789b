"""Agents on a real engine: no token is computed twice, and cancelling an agent frees its pages."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pytest

import ramify as rm
from ramify.lang.backends.base import Backend
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from tests.lang.engines import Recording, tokeniser, work_of

TURNS = 20


def search(words: Annotated[str, pydantic.Field(max_length=8)]) -> str:
    """Search the library."""
    return f"Three books about {words} were found on the second floor, shelf {len(words)}."


def lend(number: Annotated[int, pydantic.Field(ge=1, le=99)], days: Literal[7, 14]) -> dict[str, int]:
    """Lend a book."""
    return {"number": number, "days": days}


@rm.function
def librarian(s: rm.ProgramState, turns: int) -> None:
    s += rm.system("You look after a small library and answer with care.", tools=[search, lend])
    for turn in range(turns):
        s += rm.user(f"Reader {turn} asks for a book about the sea.")
        s.call_tools([search, lend], f"calls {turn}", 120, max_calls=2, temperature=0.0)
        s += rm.assistant(rm.gen(f"answer {turn}", max_tokens=16, temperature=0.0))


def shares(state: rm.ProgramState) -> tuple[int, int]:
    """Summed over all requests but the first: tokens of the request before it, and cached tokens."""
    calls = [call for call in state.trace.children if call.kind == "gen"]
    known = found = 0
    for before, after in pairwise(calls):
        known += before.own_usage.prompt_tokens + before.own_usage.completion_tokens
        found += after.own_usage.cached_tokens
    return known, found


@pytest.mark.slow
def test_twenty_turns_are_computed_once(
    engine: rm.Engine, endpoint: rm.RuntimeEndpoint, model_folder: Path
) -> None:
    engine.flush_cache()
    recording = Recording(engine)
    here = librarian.run(TURNS, backend=recording)
    assert here.error() is None
    assert here.trace.requests == 2 * TURNS
    assert sum(call.kind == "tool" for call in here.trace.children) >= TURNS
    known, found = shares(here)
    assert found >= 0.99 * known
    work_of(recording.events, tokeniser(model_folder)).check()

    endpoint.flush_cache()
    there = librarian.run(TURNS, backend=endpoint)
    assert there.text() == here.text()
    known, found = shares(there)
    assert found >= 0.99 * known


def test_what_is_sent_is_what_the_template_makes_of_the_messages(
    engine: rm.Engine, model_folder: Path
) -> None:
    recording = Recording(engine)
    state = librarian.run(4, backend=recording)
    tokenizer = load_tokenizer(model_folder)
    whole = tokenizer.apply_chat_template(state.messages(), tokenize=False)
    assert state.text() == whole
    for asked in recording.asked:
        sent = "".join(
            part if isinstance(part, str) else tokenizer.decode(part) for part in asked.request.prompt
        )
        assert whole.startswith(sent)


def held(engine: rm.Engine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.running, stats.waiting, stats.pages_in_use


@pytest.mark.parametrize("kind", ["gen", "select", "fork"])
async def test_cancelling_the_task_of_a_program_frees_the_engine(engine: rm.Engine, kind: str) -> None:
    @rm.function
    async def endless(s: rm.ProgramState) -> None:
        s += rm.user("Tell me everything.")
        if kind == "fork":
            for fork in s.fork(4):
                fork += rm.assistant(rm.gen("x", max_tokens=8000, ignore_eos=True))
        else:
            s += rm.assistant(rm.gen("x", max_tokens=8000, ignore_eos=True))
        if kind == "select":
            s += rm.user("Well?") + rm.assistant(rm.select("y", ["yes", "no"]))
        await s.wait()

    task = asyncio.create_task(endless.run(backend=engine))
    while (await asyncio.to_thread(held, engine))[0] == 0:
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while (await asyncio.to_thread(held, engine)) != (0, 0, 0):
        assert asyncio.current_task() is not None
    assert (await asyncio.to_thread(engine.stats)).pages_leased == 0


@pytest.mark.parametrize("where", ["engine", "endpoint"])
def test_a_time_out_frees_the_engine(where: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(where)

    @rm.function
    def hasty(s: rm.ProgramState) -> str:
        slow = s.fork(1)[0]
        slow += "Count: " + rm.gen("x", max_tokens=8000, ignore_eos=True, timeout=0.3)
        with pytest.raises(rm.ProgramError, match="longer than"):
            _ = slow["x"]
        s += "Say: " + rm.gen("y", max_tokens=4, temperature=0.0)
        return s.get("y", str)

    state = hasty.run(backend=backend)
    assert state.ret_value
    if where == "engine":
        while held(request.getfixturevalue("engine")) != (0, 0, 0):
            pass
