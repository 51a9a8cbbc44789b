"""Typed programs, right and wrong, that mypy and pyright check (`test_type_checkers`) and `test_typed` runs.

Each ``type: ignore`` below marks a mistake that both type checkers must find; one that either does not find
is reported as unused.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any, Literal, TypedDict, assert_never, assert_type

import pydantic

import ramify as rm
from ramify.lang.batch.estimate import BatchEstimate
from ramify.lang.batch.summary import BatchSummary
from ramify.lang.functions.async_function import AsyncFunction
from ramify.lang.functions.function import Compiled, Function
from ramify.lang.tools.tool import ToolCalls, ToolTurn
from ramify.lang.typed.partial import Partial


class Place(TypedDict):
    city: str


class Verdict(pydantic.BaseModel):
    score: int


class Team(enum.Enum):
    BILLING = "billing"
    RETURNS = "returns"


Size = Literal["S", "L"]
Rows = list[rm.ProgramState[float]] | Iterator[rm.ProgramState[float]] | BatchSummary | BatchEstimate


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


# --- programs, their arguments and their results ---


@rm.function
def judge(s: rm.ProgramState, essay: str, count: int = 1) -> float:
    score = rm.gen("x", schema=int)
    s += rm.user(essay) + rm.assistant(score)
    return s[score]


@rm.function
async def ajudge(s: rm.ProgramState, essay: str) -> int:
    score = rm.gen("x", schema=int)
    s += essay + score
    return assert_type(await s.aget(score), int)


@rm.function()
async def in_parentheses(s: rm.ProgramState, essay: str) -> str:
    return await ajudge(s, essay) * essay


@rm.function
def returns_any(s: rm.ProgramState, essay: str) -> Any:
    s += essay + rm.gen("x")
    return s["x"]


@rm.function
def four(s: rm.ProgramState, a: str, b: list[float], c: int, *, d: str = "") -> None:
    s += a


def results(backend: rm.Backend) -> None:
    state = judge.run("a", count=2)
    assert_type(state, rm.ProgramState[float])
    assert_type(state.ret_value, float)
    assert_type(judge("a"), rm.ProgramState[float])
    assert_type(judge.run("a", backend=backend), rm.ProgramState[float])
    assert_type(judge.run(essay="a", count=3, backend=backend, temperature=0.1), rm.ProgramState[float])
    assert_type(judge.run("a", count=3, max_new_tokens=9, stop=["."]), rm.ProgramState[float])
    assert_type(judge.run("a", 3, timeout=9.0), rm.ProgramState[float])
    assert_type(judge.with_options(backend=backend).run("a"), rm.ProgramState[float])
    assert_type(judge.bind(essay="a"), Function[..., float])
    assert_type(judge.bind(essay="a").run(count=3, backend=backend).ret_value, float)
    assert_type(ajudge.bind(essay="a"), AsyncFunction[..., int])
    assert_type(judge.compile(), Compiled[..., float])
    assert_type(judge.compile().run(essay="a", backend=backend).ret_value, float)
    assert_type(judge.run_batch([], backend=backend, concurrency=2), list[rm.ProgramState[float]])
    assert_type(judge.run_batch([], generator_style=True), Iterator[rm.ProgramState[float]])
    flag = bool(os.environ.get("FLAG"))
    assert_type(judge.run_batch([], generator_style=flag), Rows)
    assert_type(judge.run_batch([], out=os.environ.get("OUT")), Rows)
    assert_type(judge.run_batch([], out=os.devnull, dry_run=flag), Rows)
    four.run("a", [1, 2], 3, lora="")
    four.run("a", b=[1, 2], c=3, d="d", backend=backend)
    assert returns_any.run("a").ret_value == "1"
    options: dict[str, Any] = {"backend": backend}
    judge.run("a", **options)


async def awaited(backend: rm.Backend) -> None:
    assert_type(await ajudge.run("a"), rm.ProgramState[int])
    state = await ajudge.run("a", backend=backend, stream=True)
    assert_type(state, rm.ProgramState[int])
    await state.wait()
    assert_type(state.ret_value, int)
    assert_type(await ajudge.run_batch([]), list[rm.ProgramState[int]])
    assert_type((await in_parentheses.run("a", backend=backend)).ret_value, str)


async def inside(s: rm.ProgramState, big: rm.Backend) -> None:
    assert_type(judge(s, "a"), float)
    assert_type(judge(s, "a", count=3, backend=big), float)
    assert_type(judge(s, essay="a", backend="big"), float)
    assert_type(await ajudge(s, "a", backend=big), int)


async def wrong_arguments(s: rm.ProgramState, backend: rm.Backend) -> None:
    judge.run(3)  # type: ignore[call-overload]
    judge.run(essay=3)  # type: ignore[call-overload]
    judge.run(3, backend=backend)  # type: ignore[call-overload]
    judge.run(essay=3, backend=backend)  # type: ignore[call-overload]
    judge.run("a", count="b", stream=True)  # type: ignore[call-overload]
    judge.run("a", "b", timeout=3)  # type: ignore[call-overload]
    judge.run(backend=backend)  # type: ignore[call-overload]
    judge.run("a", backnd=backend)  # type: ignore[call-overload]
    judge.run("a", temperature="hot")  # type: ignore[call-overload]
    judge.run("a", 2, backend)  # type: ignore[call-overload]
    judge.run(backend, essay="a")  # type: ignore[call-overload]
    four.run("a", ["b"], 3, backend=backend)  # type: ignore[list-item]
    judge("a", wrong=1)  # type: ignore[call-overload]
    judge(s, 3)  # type: ignore[call-overload]
    judge(s, 3, backend=backend)  # type: ignore[call-overload]
    judge(s, essay=3, backend=backend)  # type: ignore[call-overload]
    judge.with_options(backend=backend).run(essay=3)  # type: ignore[call-overload]
    judge.with_options(tempature=0.3)  # type: ignore[call-arg]
    judge.run_batch([], concurency=2)  # type: ignore[call-overload]
    judge.run_batch([], stream=True)  # type: ignore[call-overload]
    judge.run("a").ret_value.strip()  # type: ignore[attr-defined]
    await ajudge.run(essay=3)  # type: ignore[call-overload]
    await ajudge.run(essay=3, backend=backend)  # type: ignore[call-overload]
    ajudge("a").text()  # type: ignore[attr-defined]


# --- steps and their values ---


def values(s: rm.ProgramState) -> None:
    text, pick = rm.gen("text"), rm.select("pick", ["a", "b"])
    number, verdict = rm.gen("n", schema=int), rm.gen("verdict", schema=Verdict, max_tokens=96)
    size, place = rm.gen("size", schema=Size), rm.gen("place", schema=Place | None)
    several, texts = rm.gen("several", schema=list[Place], n=2), rm.gen("texts", n=3, temperature=0.9)
    data = rm.gen("data", schema={"type": "object"})
    s += text + pick + rm.user("?") + rm.assistant(number + verdict)
    assert_type(s[text], str)
    assert_type(s[pick], str)
    assert_type(s[number], int)
    assert_type(s[verdict].score, int)
    assert_type(s[size], Size)
    assert_type(s[place], Place | None)
    assert_type(s[several], list[list[Place]])
    assert_type(s[texts], list[str])
    assert_type(s[data], Any)
    assert_type(s["verdict"], Any)
    assert_type(s.get(verdict), Verdict)
    assert_type(s.get(text, int), int)
    assert_type(s[rm.gen("x", schema=Annotated[int, pydantic.Field(ge=1)], validate=at_least_one)], int)
    assert_type(s[rm.gen("x", dtype=int)], str)
    assert_type(s[rm.gen_int("x", temperature=0.5)], str)
    assert_type(s[rm.gen("x", choices=["a"])], str)
    assert_type(s.get_meta_info(verdict), Any)
    assert_type(s.prompt_of(verdict), str)
    assert_type(s.partial(verdict), Partial[Verdict])
    assert_type(list(s.text_iter(verdict)), list[str])
    for partial in s.stream_objects(verdict):
        assert_type(partial, Partial[Verdict])
    views = s.fork(2)
    assert_type(views[0], rm.ProgramState)
    assert_type(views[verdict], list[Verdict])
    assert_type(views["verdict"], list[Any])


def names(s: rm.ProgramState) -> None:
    s += rm.gen("n", schema=int, validate=at_least_one, retries=2, keep_failed=True, timeout=3)
    assert_type(s.get("n", int), int)
    assert_type(s.get("place", Place), Place)
    assert_type(s.get("n", list[int]), list[int])
    assert_type(s.get("size", Size), Size)
    assert_type(s.partial("place", Place), Partial[Place])
    for partial in s.stream_objects("place", Place):
        assert_type(partial, Partial[Place])
        assert_type(partial.complete, bool)


async def streamed(s: rm.ProgramState) -> None:
    verdict = rm.gen("verdict", schema=Verdict)
    async for partial in s.stream_objects(verdict):
        assert_type(partial, Partial[Verdict])
    assert_type(await s.call_tools([look_up]), ToolCalls)
    assert_type(await s.aget("place", Place), Place)
    assert_type(await s.aget(verdict), Verdict)
    assert_type(await s.fork(2).aget(verdict), list[Verdict])


def decisions(s: rm.ProgramState) -> None:
    urgent = rm.decide("urgent", bool, "Is it urgent?")
    team, size = rm.decide("team", Team), rm.decide("size", Size, permutations=2)
    level = rm.decide("level", Annotated[int, rm.Levels("low", "high")], "How urgent is it?")
    named = rm.decide("named", ["a", "b"], "Which team?", append=True)
    chosen, verdict = rm.decide("chosen", choices=["a", "b"]), rm.decide("verdict", Verdict)
    s += urgent + team + size + level + named + chosen + verdict
    assert_type(s[urgent].value, bool)
    assert_type(s[team].value, Team)
    assert_type(s[team].probabilities, dict[Team, float])
    assert_type(s[size].value, Size)
    assert_type(s[level].value, int)
    assert_type(s[named].value, str)
    assert_type(s[chosen].value, str)
    assert_type(s[verdict].value.score, int)
    assert_type(s[verdict]["score"].confidence, float)
    assert_type(s.get("urgent", rm.Decision).option_mass, float | None)
    found = rm.decide("A text.", {"urgent": (bool, "Is it urgent?"), "place": Place})
    assert_type(found, dict[str, Any])


def called_tools(s: rm.ProgramState) -> None:
    s += rm.system("a", tools=[look_up, add])
    turn = s.call_tools([look_up, add], "calls", max_calls=2, temperature=0.0)
    assert_type(turn, ToolTurn)
    assert_type(s.get("calls", ToolCalls), ToolCalls)
    for call in turn:
        assert_type(call, rm.ToolCall)
        assert_type(call.arguments, dict[str, Any])
    assert_type(look_up("a"), list[str])
    given: Callable[[int, int], Coroutine[Any, Any, int]] = add
    assert given is add


def backends() -> list[rm.Backend]:
    listed: list[rm.Backend] = [
        rm.ScriptedBackend([]),
        rm.RuntimeEndpoint("http://localhost"),
        rm.OpenAI("m"),
        rm.Engine(),
    ]
    return [*listed, rm.Router({"a": listed[0], "b": listed[1]}, default="a")]


def happened(s: rm.ProgramState) -> None:
    for event in s.events():
        assert_type(shown(event), str)


def shown(event: rm.events.Event) -> str:
    match event:
        case rm.events.Appended(text) | rm.events.Text(_, text):
            return text
        case rm.events.Thought(text=text) | rm.events.CallText(text=text):
            return text
        case rm.events.ToolCalled(id=id, arguments=arguments):
            assert_type(arguments, dict[str, Any])
            return id
        case rm.events.ToolReturned(seconds=seconds):
            return f"{seconds:.2f} s"
        case rm.events.ToolFailed(error=error) | rm.events.Retried(error=error):
            assert_type(error, Exception)
            return str(error)
        case rm.events.Recovered(error=error) | rm.events.StepFailed(error=error):
            return str(error.line)
        case rm.events.StepStarted(step) | rm.events.StepEnded(step):
            return step or ""
    assert_never(event)


def wrong_steps(s: rm.ProgramState) -> None:
    rm.gen("x", tempature=0.3)  # type: ignore[call-overload]
    rm.gen("x", temperature="hot")  # type: ignore[call-overload]
    rm.gen("x", timeout="soon")  # type: ignore[call-overload]
    rm.gen("x", schema=int, retries="often")  # type: ignore[call-overload]
    rm.gen("x", schema=int, regex="a")  # type: ignore[call-overload]
    rm.gen("x", schema=3)  # type: ignore[call-overload]
    rm.gen("x", schema=Verdict, validate=at_least_one)  # type: ignore[arg-type]
    rm.gen_int("x", tempature=0.3)  # type: ignore[call-arg]
    rm.select("x", ["a"], tempature=0.3)  # type: ignore[call-arg]
    rm.decide("urgent", bool, "Is it urgent?", tone="loud")  # type: ignore[call-overload]
    rm.tool(timeout="soon")  # type: ignore[call-overload]
    look_up(3)  # type: ignore[arg-type]
    s.call_tools([look_up], errors="hide")  # type: ignore[arg-type]
    s.call_tools([look_up], tempature=0.3)  # type: ignore[call-arg]
    _ = s[rm.gen("x", schema=Verdict)].scroe  # type: ignore[attr-defined]
    s[rm.gen("x", schema=int)].upper()  # type: ignore[attr-defined]
    s[3]  # type: ignore[call-overload]
    s[rm.user("a")]  # type: ignore[call-overload]
