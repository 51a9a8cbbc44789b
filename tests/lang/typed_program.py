"""The types of programs: checked by mypy with the package, and imported by the tests.

Each ``type: ignore`` below marks a mistake that a type checker must find; one that it does not find is
reported as unused.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypedDict, assert_type

import ramify as rm
from ramify.lang.functions.async_function import AsyncFunction
from ramify.lang.functions.function import Function
from ramify.lang.tools.tool import ToolCalls, ToolTurn
from ramify.lang.typed.partial import Partial


class Place(TypedDict):
    city: str


def at_least_one(number: int) -> None:
    """Raise ValueError for a number below 1."""
    if number < 1:
        raise ValueError("too small")


@rm.tool
def look_up(word: str) -> list[str]:
    """Look a word up."""
    return [word]


@rm.tool(name="sum", timeout=2.0)
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@rm.function
def judge(s: rm.ProgramState, essay: str, count: int = 1) -> None:
    s += rm.user(essay) + rm.assistant(rm.gen("x", schema=int))


@rm.function
async def ajudge(s: rm.ProgramState, essay: str) -> int:
    s += essay + rm.gen("x")
    return assert_type(await s.aget("x", int), int)


def decisions(s: rm.ProgramState) -> None:
    s += rm.decide("urgent", bool, "Is it urgent?")
    s += rm.decide("team", ["a", "b"], "Which team?", append=True)
    s += rm.decide("place", Place)
    assert_type(s.get("urgent", rm.Decision).option_mass, float | None)
    assert_type(s.get("urgent", rm.Decision).temperature, float)
    found = rm.decide("A text.", {"urgent": (bool, "Is it urgent?"), "place": Place})
    assert_type(found, dict[str, Any])
    rm.decide("urgent", bool, "Is it urgent?", tone="loud")  # type: ignore[call-overload]


def backends() -> list[rm.Backend]:
    listed: list[rm.Backend] = [
        rm.ScriptedBackend([]),
        rm.RuntimeEndpoint("http://localhost"),
        rm.OpenAI("m"),
        rm.Engine(),
    ]
    return [*listed, rm.Router({"a": listed[0], "b": listed[1]}, default="a")]


@rm.function
def on_two_models(s: rm.ProgramState, big: rm.Backend) -> None:
    s += rm.gen("x", backend=big) + rm.select("y", ["a", "b"], backend="big")
    s.call_tools([look_up], backend="big")
    judge(s, "a", backend=big)


def results(backend: rm.Backend) -> None:
    state = judge.run("a", count=2)
    assert_type(state, rm.ProgramState)
    assert_type(state.get("x", int), int)
    assert_type(judge("a"), rm.ProgramState)
    assert_type(judge.run("a", backend=backend), rm.ProgramState)
    assert_type(judge.run("a", temperature=0.1), rm.ProgramState)
    assert_type(judge.with_options(backend=backend).run("a"), rm.ProgramState)
    assert_type(judge.bind(essay="a"), Function[...])
    assert_type(ajudge.bind(essay="a"), AsyncFunction[...])
    assert_type(judge.run_batch([]), list[rm.ProgramState])
    assert_type(judge.run_batch([], generator_style=True), Iterator[rm.ProgramState])


def called_tools(s: rm.ProgramState) -> None:
    s += rm.system("a", tools=[look_up, add])
    turn = s.call_tools([look_up, add], "calls", max_calls=2)
    assert_type(turn, ToolTurn)
    assert_type(s.get("calls", ToolCalls), ToolCalls)
    for call in turn:
        assert_type(call, rm.ToolCall)
        assert_type(call.arguments, dict[str, Any])
    assert_type(look_up("a"), list[str])
    given: Callable[[int, int], Coroutine[Any, Any, int]] = add
    assert given is add


def checked(s: rm.ProgramState) -> None:
    s += rm.gen("n", schema=int, validate=at_least_one, retries=2, keep_failed=True, timeout=3)
    s += rm.gen("place", schema=Place, max_tokens=9)
    s += rm.select("x", ["a", "b"], timeout=1.5)
    assert_type(s.get("n", int), int)
    assert_type(s.get("place", Place), Place)
    assert_type(s.get("n", list[int]), list[int])
    assert_type(s.prompt_of("n"), str)
    assert_type(s.partial("place", Place), Partial[Place])
    for partial in s.stream_objects("place", Place):
        assert_type(partial, Partial[Place])
        assert_type(partial.complete, bool)


async def streamed(s: rm.ProgramState) -> None:
    async for partial in s.stream_objects("place", Place):
        assert_type(partial, Partial[Place])
    assert_type(await s.call_tools([look_up]), ToolCalls)
    assert_type(await s.aget("place", Place), Place)


async def awaited(backend: rm.Backend) -> None:
    assert_type(await ajudge.run("a"), rm.ProgramState)
    state = await ajudge.run("a", backend=backend, stream=True)
    assert_type(state, rm.ProgramState)
    await state.wait()
    assert_type(await ajudge.run_batch([]), list[rm.ProgramState])


async def mistakes(backend: rm.Backend) -> None:
    judge.run(3)  # type: ignore[call-overload]
    judge("a", wrong=1)  # type: ignore[call-overload]
    judge.with_options(backend=backend).run(essay=3)  # type: ignore[call-overload]
    await ajudge.run(essay=3)  # type: ignore[call-overload]
    ajudge("a").text()  # type: ignore[attr-defined]
    look_up(3)  # type: ignore[arg-type]
    rm.gen("x", timeout="soon")  # type: ignore[arg-type]
    rm.gen("x", retries="often")  # type: ignore[arg-type]
    judge.run("a").call_tools([look_up], errors="hide")  # type: ignore[arg-type]
    rm.tool(timeout="soon")  # type: ignore[call-overload]
