"""`rm.pin` on an engine with few pages, and on backends that cannot pin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import ramify as rm
from ramify.errors import InvalidRequest
from tests.lang.engines import OPTIONS

NOTES = "The notes of the meeting: " + "one two three " * 20  # 306 tokens: 20 of 64 pages


@pytest.fixture(scope="module")
def started(model_folder: Path) -> Iterator[rm.Engine]:
    with rm.Engine(str(model_folder), **OPTIONS | {"num_pages": 64, "page_size": 16}) as engine:
        yield engine


@pytest.fixture
def small(started: rm.Engine) -> rm.Engine:
    """An engine with an empty cache, with room for 1,024 tokens, each a byte."""
    started.flush_cache()
    return started


@rm.function
def write(s: rm.ProgramState, text: str) -> None:
    s += text


@rm.function
def ask(s: rm.ProgramState, text: str, question: str) -> None:
    s += text + question
    s += rm.gen("answer", max_tokens=2, ignore_eos=True)


def press(engine: rm.Engine) -> None:
    """Run programs that need more pages than the engine has, two at a time."""
    rows = [{"text": f"{number} " + "four five six " * 15, "question": "?"} for number in range(8)]
    states = ask.run_batch(rows, backend=engine, num_threads=2)
    assert not any(state.error() for state in states)


def cached(engine: rm.Engine, text: str) -> int:
    state = ask.run(text, "What now?", backend=engine)
    assert state.error() is None
    return state.usage.cached_tokens


def test_a_pin_outlives_its_program_until_it_is_released(small: rm.Engine) -> None:
    state = write.run(NOTES, backend=small)
    with rm.pin(state, seconds=600) as held:
        assert held.tokens == len(NOTES)
        press(small)
        assert cached(small, NOTES) >= len(NOTES) - 1
        found = small.cache(texts=True)
        (hold,) = [one for one in found.holds if one.owner == held.owner]
        assert (hold.kind, hold.name, hold.tokens, hold.pages) == ("pin", "write", len(NOTES), 20)
        assert 590 < hold.seconds_left <= 600
        assert NOTES[-40:] == hold.text
        assert small.cache().holds[0].text == ""
        assert state.trace.children[-1].name == "pin"
        assert state.usage.prompt_tokens == len(NOTES)
    press(small)
    assert cached(small, NOTES) < len(NOTES) // 2
    assert small.cache().pages_pinned == 0
    held.release()
    assert small.release(held.owner) == 0


def test_a_branch_of_a_fork_is_pinned_with_its_output(small: rm.Engine) -> None:
    @rm.function
    def program(s: rm.ProgramState) -> rm.Pin:
        s += NOTES
        forks = s.fork(2)
        forks += lambda index: f"Side {index}: " + rm.gen("side", max_tokens=40, ignore_eos=True)
        return rm.pin(forks[1], 600)

    state = program.run(backend=small)
    held = state.ret_value
    assert held.tokens == len(NOTES) + len("Side 1: ") + 40
    press(small)
    found = small.cache()
    (hold,) = [one for one in found.holds if one.kind == "pin"]
    assert (hold.owner, hold.tokens) == (held.owner, held.tokens)
    assert found.pages_pinned == hold.pages >= -(-held.tokens // 16)
    assert small.release(held.owner) == 1
    assert small.cache().pages_pinned == 0


def test_async_programs_await_a_pin(small: rm.Engine) -> None:
    @rm.function
    async def program(s: rm.ProgramState) -> int:
        s += NOTES
        with pytest.raises(RuntimeError, match="would block"):
            rm.pin(s)
        async with await rm.apin(s, 60) as held:
            assert (await asyncio.to_thread(small.cache)).pages_pinned == 20
        return held.tokens

    async def main() -> int:
        tokens: int = (await program.run(backend=small)).ret_value
        return tokens

    assert asyncio.run(main()) == len(NOTES)
    assert small.cache().pages_pinned == 0


def test_a_pin_that_is_too_large_is_refused_with_the_numbers(small: rm.Engine) -> None:
    first = rm.pin(write.run(NOTES, backend=small), 600)
    other = write.run("Other notes: " + "seven " * 40, backend=small)
    with pytest.raises(
        InvalidRequest, match=r"needs 16 KV pages .* hold 20 of the 32 .*Release a pin"
    ) as found:
        rm.pin(other, 600)
    assert found.value.field == "hint.pinned"
    first.release()
    rm.pin(other, 600).release()


def test_wrong_pins(small: rm.Engine) -> None:
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidRequest, match="seconds is"):
            rm.pin(write.run("x", backend=small), seconds)
    with pytest.raises(InvalidRequest, match="nothing to pin"):
        rm.pin(write.run("", backend=small))

    @rm.function
    def failing(s: rm.ProgramState) -> None:
        s += "x" + rm.gen("y", regex="[", max_tokens=4)

    with pytest.raises(rm.ProgramError, match="'y'"):
        rm.pin(failing.run(backend=small))


def test_pins_count_towards_limits(small: rm.Engine) -> None:
    state = write.run(NOTES, backend=small, max_calls=1)
    rm.pin(state).release()
    with pytest.raises(rm.BudgetExceeded):
        rm.pin(state)


@pytest.mark.parametrize(
    "backend", [rm.ScriptedBackend({}), rm.Router({"a": rm.ScriptedBackend({})}), rm.OpenAI("m", api_key="k")]
)
def test_a_backend_that_cannot_pin_is_refused_by_name(backend: rm.Backend) -> None:
    state = write.run("x", backend=rm.ScriptedBackend({}))
    state._branch.run.own_backend = getattr(backend, "backends", {"a": backend})["a"]
    name = "OpenAI" if isinstance(backend, rm.OpenAI) else "ScriptedBackend"
    with pytest.raises(rm.UnsupportedNode, match=f"{name} cannot pin"):
        rm.pin(state)


def test_recorded_pins_are_replayed(small: rm.Engine, tmp_path: Path) -> None:
    recorded = rm.RecordingBackend(small, tmp_path / "calls.jsonl")
    with rm.pin(write.run(NOTES, backend=recorded), 60) as held:
        assert small.cache().pages_pinned == 20
    wanted = held.tokens
    replayed = rm.ReplayBackend(tmp_path / "calls.jsonl")
    assert rm.pin(write.run(NOTES, backend=replayed), 60).tokens == wanted
