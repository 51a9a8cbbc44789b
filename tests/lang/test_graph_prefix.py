"""Programs with control flow on results: the steps before it run as a graph, the others one by one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import ramify as rm
from ramify.lang.backends.base import Backend, Submission
from tests.lang.programs import CASES
from tests.lang.test_programs import outcome


class Serving(rm.ScriptedBackend):
    """A backend that takes graphs as a server does; `server` answers their requests."""

    def __init__(self, answers: Any) -> None:
        super().__init__(answers)
        self.server = rm.ScriptedBackend(answers, strict=False)
        self.submissions: list[Submission] = []
        self.others: list[Callable[[], bool]] = []
        self.awaited: list[tuple[str, ...]] = []

    def submit_program(self, submission: Submission, failed: Callable[[], bool]) -> Backend:
        self.submissions.append(submission)
        self.others.append(failed)
        return self.server

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        self.awaited.append(tools)


@pytest.mark.parametrize(
    ("name", "as_graph", "alone"),
    [("tree-of-thought", 10, 0), ("judge", 5, 0), ("json-by-regex", 2, 0), ("react", 3, 3)],
)
def test_what_python_does_not_decide_is_submitted(name: str, as_graph: int, alone: int) -> None:
    case = CASES[name]
    backend = Serving(case.script)
    state = case.program.run(**case.arguments[0], backend=backend, compiled=True)
    steps = case.program.run(**case.arguments[0], backend=rm.ScriptedBackend(case.script))
    assert outcome(state) == outcome(steps)
    assert state.usage.completion_tokens == steps.usage.completion_tokens
    assert (len(backend.submissions), len(backend.server.requests)) == (1, as_graph)
    assert len(backend.requests) == alone
    assert not backend.others[0]()


def answers(request: Any) -> str:
    return "yes"


def test_a_body_that_does_something_else_each_time_is_answered_for_what_it_does() -> None:
    numbers = itertools.count()

    @rm.function
    def program(s):
        s += "a" + rm.gen("x")
        s += f"b {next(numbers)}" + rm.gen("y")
        s += "c" + rm.gen("z")
        return len(s["x"])

    backend = Serving(answers)
    state = program.run(backend=backend, compiled=True)
    assert state.text() == "ayesb 1yescyes"
    assert [len(backend.server.requests), len(backend.requests)] == [1, 2]
    assert [request.prompt for request in backend.requests] != []
    assert backend.others[0]()


@pytest.mark.parametrize("change", ["name", "options", "choices", "role", "fork", "branch", "less"])
def test_no_step_is_taken_for_another(change: str) -> None:
    """The second call of the body takes another path; only the steps before that come from the graph."""
    calls = itertools.count()

    @rm.function
    def program(s):
        first = next(calls) == 0
        other = change if not first else ""
        s += "Q" + rm.gen("same")
        s += (rm.user if other == "role" else rm.system)("Be kind.")
        forks = s.fork(3 if other == "fork" else 2)
        branch = forks[1 if other == "branch" else 0]
        if other != "less":
            branch += rm.gen("b" if other == "name" else "a", max_tokens=3 if other == "options" else 2)
            branch += rm.select("c", ["yes", "no"] if other == "choices" else ["yes", "never"])
        bool(s["same"])

    backend = Serving(answers)
    state = program.run(backend=backend, compiled=True)
    state.sync()
    assert state.error() is None
    names = [call.name for call in state.trace.walk() if call.kind in ("gen", "select")]
    known = {"choices": ["same", "a"], "less": ["same"]}.get(change, ["same"])
    backend_calls = len(backend.server.requests)
    assert backend_calls == len(known)
    assert names[: len(known)] == known
    assert bool(backend.requests) == (change != "less")
    assert backend.others[0]()


def test_texts_with_results_are_compared_when_they_are_there() -> None:
    @rm.function
    def program(s):
        s += "a" + rm.gen("x")
        with s.copy() as aside:
            aside += f"of {s['x'].upper()}: " + rm.gen("y")
        s += "; ".join([s["x"], aside["y"]]) + rm.gen("z")
        if s["z"] == "yes":
            s += rm.gen("last")

    backend = Serving(answers)
    state = program.run(backend=backend, compiled=True)
    assert state.text() == "ayesyes; yesyesyes"
    assert [len(backend.server.requests), len(backend.requests)] == [3, 1]


def test_calls_of_tools_belong_to_the_beginning() -> None:
    def look_up(word: str) -> str:
        """Look up a word."""
        return word.upper()

    @rm.function
    def program(s):
        s += rm.gen("x")
        turn = s.call_tools([look_up], "calls")
        if turn[0].result == "A":
            s += rm.gen("y")

    def answer(request: Any) -> str:
        return '\n{"name": "look_up", "arguments": {"word": "a"}}\n</tool_call>'

    backend, steps = Serving(answer), rm.ScriptedBackend(answer)
    assert outcome(program.run(backend=backend, compiled=True)) == outcome(program.run(backend=steps))
    assert [len(backend.server.requests), len(backend.requests)] == [2, 1]
    assert backend.awaited == [("look_up",)]


@pytest.mark.parametrize("options", [{}, {"validate": lambda x: x, "retries": 1}])
def test_what_depends_on_this_process_is_not_submitted(options: dict[str, Any]) -> None:
    """A read before the first call; functions that check an output."""

    @rm.function
    def program(s):
        s += ("" if options else s.text()) + rm.gen("x", **options)
        bool(s["x"])

    backend = Serving(answers)
    assert program.run(backend=backend, compiled=True)["x"] == "yes"
    assert backend.submissions == []


def test_a_failed_step_ends_the_beginning_too() -> None:
    @rm.function
    def program(s):
        s += "n" + rm.gen("n", schema=int)
        return s["n"] + 1

    backend = Serving(answers)
    with pytest.raises(rm.ProgramError, match="gen 'n'"):
        program.run(backend=backend, compiled=True)
    assert backend.others[0]()


async def test_async_programs_begin_at_the_server() -> None:
    @rm.function
    async def program(s, topic):
        s += f"Q {topic}" + rm.gen("x")
        await asyncio.sleep(0)
        s += rm.gen("y")
        if await s.aget("y") == "yes":
            s += rm.gen("z")
        return await s.aget("x")

    backend = Serving(answers)
    state = await program.run("tea", backend=backend, compiled=True)
    assert state.ret_value == "yes"
    assert [call.text for call in state.trace.children] == ["yes"] * 3
