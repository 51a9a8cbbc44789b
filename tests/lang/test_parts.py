"""Programs as parts of others: called with a state, their steps are appended to it."""

from __future__ import annotations

import pytest

import ramify as rm


@rm.function
def ask(s: rm.ProgramState, question: str, most: int = 4) -> str:
    s += rm.user(question) + rm.assistant(rm.gen("answer", max_tokens=most))
    return str(s["answer"]).upper()


@rm.function
def both(s: rm.ProgramState) -> list[str]:
    first = ask(s, "One?")
    branches = s.fork(2)
    return [first, *(ask(branch, f"After {first}?", most=2) for branch in branches)]


@rm.function
async def later(s: rm.ProgramState, question: str) -> str:
    s += rm.user(question) + rm.assistant(rm.gen("answer"))
    return str(await s.aget("answer"))


@rm.function
async def outer(s: rm.ProgramState) -> str:
    return str(await later(s, "Now?"))


@rm.function
def asks_bound(s: rm.ProgramState) -> str:
    return str(ask.bind(question="Bound?")(s))


@rm.function
def plain(s: rm.ProgramState, topic: str) -> None:
    s += "About " + topic
    tail(s, word="end")


@rm.function
def tail(s: rm.ProgramState, word: str) -> None:
    s += rm.gen("more", max_tokens=2) + word


def test_its_steps_are_those_of_the_program_it_is_called_in() -> None:
    backend = rm.ScriptedBackend(lambda request: "yes")
    state = both.run(backend=backend)
    assert state.ret_value == ["YES"] * 3
    assert state["answer"] == "yes"
    assert [request.sampling.max_tokens for request in backend.requests] == [4, 2, 2]
    assert len({request.hint.program for request in backend.requests if request.hint}) == 1


def test_what_is_bound_to_it_counts() -> None:
    state = asks_bound.run(backend=rm.ScriptedBackend(["b"]))
    assert state.ret_value == "B"
    assert "Bound?" in state.prompt_of("answer")


async def test_async_parts() -> None:
    state = await outer.run(backend=rm.ScriptedBackend(["a"]))
    assert state.ret_value == "a"


def test_a_part_is_compiled_along() -> None:
    graph = plain.compile()
    state = graph.run(topic="trams", backend=rm.ScriptedBackend(["!"]))
    assert state.text() == "About trams!end"


def test_options_of_a_run_are_refused() -> None:
    @rm.function
    def wrong(s: rm.ProgramState) -> None:
        ask.bind(temperature=0.5)(s, "Why?")

    with pytest.raises(rm.UnsupportedField, match="temperature has no effect"):
        wrong.run(backend=rm.ScriptedBackend(["a"]))


def test_arguments_are_checked() -> None:
    @rm.function
    def wrong(s: rm.ProgramState) -> None:
        ask(s)  # type: ignore[call-overload]

    with pytest.raises(TypeError, match="question"):
        wrong.run(backend=rm.ScriptedBackend(["a"]))
