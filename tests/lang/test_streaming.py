"""Text while it is generated, read from another thread."""

from __future__ import annotations

import asyncio

import pytest

import ramify as rm
from ramify.errors import BackendError
from ramify.lang.state.streaming import BranchText
from tests.lang.backends import Breaking, Holding
from tests.lang.steps import program_of


@rm.function
def story(s, topic):
    s += rm.user("About " + topic)
    s += rm.assistant(rm.gen("first"))
    s += rm.user("And?") + rm.assistant(rm.gen("second", stop="!"))


ANSWERS = {"first": "Once upon a time", "second": "the end! more"}


def test_everything_arrives_in_pieces_and_in_order():
    state = story.run("cats", backend=rm.ScriptedBackend(ANSWERS), stream=True)
    pieces = list(state.text_iter())
    assert len(pieces) >= 1
    assert "".join(pieces) == state.text()


def test_a_variable_arrives_in_pieces():
    backend = Holding(ANSWERS)
    state = story.run("cats", backend=backend, stream=True)
    pieces = state.text_iter("first")
    assert next(pieces) == "Once"
    assert not backend.release.is_set()
    backend.release.set()
    assert list(pieces) == [" upon", " a", " time"]
    assert "".join(state.text_iter("second")) == "the end"
    assert "".join(state.text_iter("second")) == "the end"


def test_the_state_is_readable_while_it_runs():
    backend = Holding(ANSWERS)
    state = story.run("cats", backend=backend, stream=True)
    assert "running" in repr(state)
    backend.release.set()
    assert state["second"] == "the end"
    assert state.messages()[-1]["content"] == "the end"
    with pytest.raises(KeyError):
        state["third"]


def test_values_that_are_not_generated_in_chunks_come_as_a_whole():
    @rm.function
    def program(s):
        s += "Pick: "
        s += rm.select("pick", ["A", "B"])
        with s.var_scope("scope"):
            s += "!"
        s["number"] = 3

    state = program.run(backend=rm.ScriptedBackend({"pick": "B"}), stream=True)
    for name, text in (("pick", "B"), ("scope", "!"), ("number", "3")):
        assert list(state.text_iter(name)) == [text]
    assert "".join(state.text_iter()) == "Pick: B!"


def test_branches_stream_too():
    branches = []

    @rm.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        branches.extend(forks)
        forks += [" a:", " b:"]
        forks += rm.gen("x")
        forks.join()

    state = program.run(backend=rm.ScriptedBackend(lambda r: "one two"), stream=True)
    state.sync()
    assert ["".join(branch.text_iter()) for branch in branches] == ["Q a:one two", "Q b:one two"]


ITERATIONS = {
    "text": lambda s: s.text_iter(),
    "variable": lambda s: s.text_iter("x"),
    "thoughts": lambda s: s.text_iter("x", thinking=True),
    "objects": lambda s: s.stream_objects("x", list[int]),
    "events": lambda s: s.events(),
    "unknown": lambda s: s.text_iter("y"),
    "unknown thoughts": lambda s: s.text_iter("y", thinking=True),
    "unknown objects": lambda s: s.stream_objects("y", list[int]),
}


@pytest.mark.parametrize("kind", ITERATIONS)
@pytest.mark.parametrize("stream", [True, False])
def test_the_body_iterates_over_its_steps_so_far(stream, kind):
    found = []

    @rm.function
    def program(s):
        s += "Q" + rm.gen("x", thinking=True)
        branch = s.fork(1)[0]
        for state in (s, branch):
            if kind.startswith("unknown"):
                with pytest.raises(KeyError, match="sets no variable 'y'"):
                    list(ITERATIONS[kind](state))
                continue
            found.extend(ITERATIONS[kind](state))
        s += "End"
        return True

    backend = rm.ScriptedBackend({"x": "<think>Hm</think>[1, 2]"})
    state = program.run(backend=backend, stream=stream)
    assert state.ret_value
    assert bool(found) != kind.startswith("unknown")


@pytest.mark.parametrize("kind", ["text", "variable", "events"])
def test_a_body_that_iterates_is_a_reader_while_it_waits(kind):
    waits, woken = [], []

    @rm.function
    def program(s):
        run, branch = s._branch.run, s._branch
        s += "Q" + rm.gen("x")
        with run.listening(lambda: waits.append(run.is_read(branch)), readers=True):
            for _ in ITERATIONS[kind](s):
                assert not run.is_read(branch)
                backend.release.set()
        with run.listening(lambda: woken.append(True)), run.reading(branch):
            pass
        return True

    backend = Holding({"x": "a b"})
    assert program.run(backend=backend, stream=True).ret_value
    assert True in waits
    assert not woken  # else two readers would wake each other for ever


@pytest.mark.parametrize("kind", [None, "x", "y"])
async def test_the_body_of_an_async_program_iterates_too(kind):
    @rm.function
    async def program(s):
        s += "Q" + rm.gen("x")
        try:
            return "".join([text async for text in s.text_async_iter(kind)])
        except KeyError:
            return "unknown"

    state = await program.run(backend=rm.ScriptedBackend({"x": "a b"}), stream=True)
    await asyncio.wait_for(state.wait(), 30)
    assert state.ret_value == {None: "Qa b", "x": "a b", "y": "unknown"}[kind]


def test_the_text_of_a_branch_begins_with_that_before_its_fork():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        forks = s.fork(2)
        forks += [" a:", " b:"]
        forks += rm.gen("y")
        return forks[1]

    backend = Holding({"x": "one two", "y": "three"})
    branch = program.run(backend=backend, stream=True).ret_value
    reader = BranchText(branch)
    backend.started.block()
    assert list(reader.new()) == []  # the fork is not reached
    backend.release.set()
    branch.sync()
    assert list(reader.new()) == [("Qone two b:three", None)]
    assert reader.ended


def test_an_error_ends_the_iteration_with_itself():
    backend = Breaking({"first": "a b c", "second": "d"}, BackendError("gone"), after=2)
    state = story.run("cats", backend=backend, stream=True)
    pieces = state.text_iter("first")
    assert [next(pieces), next(pieces)] == ["a", " b"]
    with pytest.raises(rm.ProgramError, match="gone"):
        next(pieces)
    with pytest.raises(rm.ProgramError, match="gone"):
        list(state.text_iter())


def test_an_exception_of_the_body_reaches_the_reader():
    @rm.function
    def program(s):
        s += "a"
        raise ZeroDivisionError("body")

    state = program.run(backend=rm.ScriptedBackend([]), stream=True)
    with pytest.raises(rm.ProgramError, match="ZeroDivisionError: body"):
        list(state.text_iter())
    with pytest.raises(rm.ProgramError, match="ZeroDivisionError: body") as failed:
        state["x"]
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_cancel_ends_the_iteration():
    backend = Holding(ANSWERS)
    state = story.run("cats", backend=backend, stream=True)
    pieces = state.text_iter("first")
    assert next(pieces) == "Once"
    state.cancel()
    with pytest.raises(rm.ProgramError, match="cancelled"):
        list(pieces)
    state.sync()
    assert backend.aborted == 1


def test_without_stream_the_text_comes_at_the_end():
    state = story.run("cats", backend=rm.ScriptedBackend(ANSWERS))
    assert list(state.text_iter()) == [state.text()]
    assert list(state.text_iter("first")) == ["Once upon a time"]


async def test_meta_data_say_how_many_tokens_there_are_so_far(engine: rm.Engine) -> None:
    ask = program_of(
        "x" + rm.gen("x", max_tokens=40, temperature=2, seed=3, ignore_eos=True, return_logprob=True)
    )
    state = ask.run(backend=engine, stream=True)
    told = 0
    async for text, meta in state.text_async_iter("x", return_meta_data=True):
        assert text
        told += len(meta["output_token_logprobs"])  # of tokens that gave no text yet as well
        assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == told
    assert told > 20
