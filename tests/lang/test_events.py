"""The events of a run: in order, none lost, none twice."""

from __future__ import annotations

import asyncio
import threading
from typing import assert_never

import pytest

import ramify as rm
from ramify.errors import BackendError, Cancelled
from ramify.lang.common.event import Event
from ramify.lang.program.step_output import StepOutput
from ramify.lang.program.variables import Variable
from ramify.lang.tools.forms import TaggedCalls
from ramify.messages import TextChunk
from tests.lang.backends import Breaking, Holding


@rm.tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@rm.tool
async def divide(a: int, b: int) -> float:
    """Divide."""
    return a / b


TOOLS = [add, divide]


def calls(*written: tuple[str, str]) -> str:
    """A turn of calls as the model writes it behind the opening."""
    texts = [f'\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in written]
    return "\n<tool_call>".join(texts)


SUM, QUOTIENT = ("add", '{"a": 2, "b": 3}'), ("divide", '{"a": 1, "b": 0}')


def told(event: rm.events.Event) -> str:
    """One word or two for an event. Every kind of event is here, which a type checker sees too."""
    match event:
        case rm.events.Appended():
            return "appended"
        case rm.events.StepStarted(step):
            return f"{step} started"
        case rm.events.Text(step, text):
            return f"{step} {text}"
        case rm.events.Thought(step, text):
            return f"{step} thinks {text}"
        case rm.events.CallText(step):
            return f"{step} writes"
        case rm.events.ToolCalled(name=name, arguments=arguments):
            return f"{name}{arguments}"
        case rm.events.ToolReturned(name=name, result=result):
            return f"{name} returned {result}"
        case rm.events.ToolFailed(name=name, error=error):
            return f"{name} raised {type(error).__name__}"
        case rm.events.Retried(step, output, error):
            return f"{step} rejected {output}: {error}"
        case rm.events.Recovered(error):
            return f"recovered {error.variable}"
        case rm.events.StepEnded(step):
            return f"{step} ended"
        case rm.events.StepFailed(step):
            return f"{step} failed"
        case _:
            assert_never(event)


def all_told(state, *without: str) -> list[str]:
    return [one for one in map(told, state.events()) if not one.endswith(("appended", *without))]


def text_of(events, branch=()) -> str:
    """The text of a branch that was not forked, from its events."""
    kinds = (rm.events.Appended, rm.events.Text, rm.events.CallText)
    return "".join([one.text for one in events if isinstance(one, kinds) and one.branch == branch])


@pytest.mark.parametrize("stream", [True, False])
def test_an_agent(stream):
    @rm.function
    def agent(s):
        s += rm.system("Calculate.", tools=TOOLS) + rm.user("2 + 3? 1 / 0?")
        s.call_tools(TOOLS, "calls")
        s += rm.assistant("So: " + rm.gen("answer"))
        s += rm.select("sure", ["yes", "no"])

    script = {"calls": calls(SUM, QUOTIENT), "answer": "five", "sure": "no"}
    state = agent.run(backend=rm.ScriptedBackend(script), stream=stream)
    assert all_told(state, "writes") == [
        "calls started",
        "add{'a': 2, 'b': 3}",
        "divide{'a': 1, 'b': 0}",
        "add returned 5",
        "divide raised ZeroDivisionError",
        "calls ended",
        "answer started",
        "answer five",
        "answer ended",
        "sure started",
        "sure no",
        "sure ended",
    ]
    events = list(state.events())
    assert text_of(events) == state.text()
    called = [one.id for one in events if isinstance(one, rm.events.ToolCalled)]
    done = [one for one in events if isinstance(one, rm.events.ToolReturned | rm.events.ToolFailed)]
    assert [one.id for one in done] == called
    assert len(set(called)) == 2
    spent = [call.duration_s for call in state.trace.walk() if call.kind == "tool"]
    assert all(0 < one.seconds <= most for one, most in zip(done, spent, strict=True))
    assert done[0].shown == state["calls"][0].shown
    assert isinstance(done[1].error, ZeroDivisionError)
    ended = [one for one in events if isinstance(one, rm.events.StepEnded)]
    assert [one.value for one in ended] == [state[name] for name in ("calls", "answer", "sure")]


def test_a_call_comes_before_the_turn_is_complete():
    @rm.function
    def agent(s):
        s += rm.user("?")
        s.call_tools(TOOLS, "calls")

    class Halves(rm.ScriptedBackend):
        release = Event()

        async def generate(self, request):
            whole = [chunk async for chunk in super().generate(request)]
            half = next(at for at, one in enumerate(whole) if one.text == ">") + 1
            for chunk in whole[:half]:
                yield chunk
            await self.release.wait()
            for chunk in whole[half:]:
                yield chunk

    backend = Halves({"calls": calls(SUM, QUOTIENT)})
    state = agent.run(backend=backend, stream=True)
    found = []
    for event in state.events():
        found.append(told(event))
        if isinstance(event, rm.events.ToolCalled):
            backend.release.set()  # without the event of the first call there would be no end
    assert [one for one in found if one.startswith(("add", "divide"))] == [
        "add{'a': 2, 'b': 3}",
        "divide{'a': 1, 'b': 0}",
        "add returned 5",
        "divide raised ZeroDivisionError",
    ]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("I know <tool> it.", "I know <tool> it."),
        ("<tool", "<tool"),
        ("<tool_call>" + calls(SUM), ""),
    ],
)
def test_words_and_calls_of_one_turn(output, words, stream):
    @rm.function
    def agent(s):
        s += rm.user("?")
        s.call_tools(TOOLS, "calls", required=False)

    state = agent.run(backend=rm.ScriptedBackend({"calls": output}), stream=stream)
    events = list(state.events())
    assert "".join([one.text for one in events if isinstance(one, rm.events.Text)]) == words
    assert text_of(events) == state.text() == "".join(state.text_iter())
    called = [one.name for one in events if isinstance(one, rm.events.ToolCalled)]
    assert called == ["add"] * ("add" in output)


def test_calls_are_read_piece_by_piece():
    text = "Well. <tool_call>" + calls(SUM, QUOTIENT)
    reader, words, found = TaggedCalls().reader(), "", []
    for at, char in enumerate(text):
        said, complete = reader.push(char)
        words += said
        found += [(at, call) for call in complete]
    assert words + reader.close() == "Well. "
    first = text.index("</tool_call>") + len("</tool_call>") - 1
    assert found == [(first, SUM), (len(text) - 1, QUOTIENT)]
    assert TaggedCalls().read(text) == ("Well.", [SUM, QUOTIENT])


@pytest.mark.parametrize("keep_failed", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_retries(stream, keep_failed):
    def large(value):
        if value < 5:
            raise ValueError("too small")

    @rm.function
    def program(s):
        s += rm.user("A number.")
        s += rm.assistant(rm.gen("x", schema=int, retries=3, validate=large, keep_failed=keep_failed))
        s += rm.user("Two.") + rm.assistant(rm.gen("y", schema=int, retries=1, validate=large))

    state = program.run(backend=rm.ScriptedBackend({"x": ["3", "4", "7"], "y": ["1", "2"]}), stream=stream)
    found: list[rm.events.Event] = []
    with pytest.raises(rm.ProgramError, match="too small"):
        found.extend(state.events())
    assert [told(one) for one in found if not isinstance(one, rm.events.Appended)] == [
        *("x started", "x rejected 3: too small", "x rejected 4: too small", "x 7", "x ended"),
        *("y started", "y rejected 1: too small", "y failed"),
    ]
    assert text_of(found) == state._branch.text
    assert ("too small" in text_of(found)) == keep_failed


def test_thoughts():
    @rm.function
    def program(s):
        s += rm.user("Q") + rm.assistant(rm.gen("x", thinking=True))

    for stream in (True, False):
        state = program.run(backend=rm.ScriptedBackend({"x": "<think>Hm</think>\n\nYes."}), stream=stream)
        assert all_told(state) == ["x started", "x thinks Hm", "x Yes", "x .", "x ended"] or not stream
        assert "".join([one.text for one in state.events() if isinstance(one, rm.events.Thought)]) == "Hm"
        assert "".join([one.text for one in state.events() if isinstance(one, rm.events.Text)]) == "Yes."


def test_failure_and_recovery():
    @rm.function
    def program(s):
        s += rm.user("Plan it.")
        s += "A: " + rm.gen("x")
        s += rm.gen("never")
        s.sync()
        s.recover()
        s += "B: " + rm.gen("y")

    state = program.run(
        backend=Breaking({"x": "a b c", "y": "d"}, BackendError("gone"), 2, "A: "), stream=True
    )
    assert all_told(state) == [
        *("x started", "x a", "x  b", "x failed", "recovered x"),
        *("y started", "y d", "y ended"),
    ]
    assert (
        "".join(state.text_iter())
        == text_of(state.events())
        == "A: a bB: d".join(["<|im_start|>user\nPlan it.<|im_end|>\n", ""])
    )


def test_an_error_of_the_body_is_raised_after_the_events():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        s.sync()
        raise ZeroDivisionError

    state = program.run(backend=rm.ScriptedBackend({"x": "a"}), stream=True)
    found: list[str] = []
    with pytest.raises(rm.ProgramError, match="ZeroDivisionError"):
        found.extend(map(told, state.events()))
    assert found == ["appended", "x started", "x a", "x ended"]


def test_branches_have_paths_and_readers_of_their_own():
    branches = []

    @rm.function
    def program(s):
        s += "Q"
        for _ in range(2):
            forks = s.fork(2)
            branches.extend(forks)
            forks += [" a", " b"]
            forks += rm.gen("x")
            inner = forks[1].fork(1)
            inner += rm.gen("z")
            branches.extend(inner)
            inner.join()
            forks.join("concate_and_append")

    state = program.run(backend=rm.ScriptedBackend(lambda request: "one two"), stream=True)
    events = list(state.events())
    paths = [(0,), (1,), (1, 0), (2,), (3,), (3, 0)]
    assert {one.branch for one in events} == {(), *paths}
    for branch, path in zip(branches, paths, strict=True):
        own = list(branch.events())
        assert own == [one for one in events if one.branch[: len(path)] == path]
        assert [told(one) for one in own if isinstance(one, rm.events.StepStarted | rm.events.StepEnded)] == (
            ["z started", "z ended"]
            if len(path) == 2
            else ["x started", "x ended"] + ["z started", "z ended"] * (path[0] % 2)
        )
        assert "".join(branch.text_iter()) == branch._branch.text
    assert "".join(state.text_iter()) == state.text() == text_of(events)


class Unread(list):
    def __iter__(self):
        raise AssertionError("the events of the whole run are read")

    __getitem__ = __iter__


def test_a_reader_of_a_branch_does_not_pass_the_events_of_other_branches():
    branches = []

    @rm.function
    def program(s):
        s += "Q"
        branches.extend(s.fork(2))
        for branch in branches:
            branch += rm.gen("x")

    state = program.run(backend=rm.ScriptedBackend(lambda request: "one two"), stream=True)
    state.sync()
    state._branch.events = Unread()
    for branch in branches:
        assert "".join(branch.text_iter()) == "Qone two"
        assert {one.branch for one in branch.events()} == {branch._branch.path}


@pytest.mark.parametrize("during", ["generation", "tool"])
def test_cancel_ends_each_step_and_call_once(during):
    started = threading.Event()

    @rm.tool
    async def wait() -> str:
        """Wait."""
        started.set()
        await asyncio.Event().wait()
        return ""

    @rm.function
    def agent(s):
        s += rm.user("?")
        if during == "tool":
            s.call_tools([wait], "x")
        else:
            s += rm.assistant(rm.gen("x"))
        s += rm.gen("never")

    answers = {"x": calls(("wait", "{}")) if during == "tool" else "a b c"}
    backend = Holding(answers) if during == "generation" else rm.ScriptedBackend(answers)
    state = agent.run(backend=backend, stream=True)
    found: list[rm.events.Event] = []

    def read() -> None:
        for event in state.events():
            found.append(event)
            called = isinstance(event, rm.events.ToolCalled) and started.wait()
            if called or isinstance(event, rm.events.Text):
                state.cancel()

    with pytest.raises(rm.ProgramError, match="cancelled"):
        read()
    ends = [told(one) for one in found if not isinstance(one, rm.events.Appended | rm.events.CallText)]
    if during == "generation":
        assert ends == ["x started", "x a", "x failed"]
    else:
        assert ends == ["x started", "wait{}", "wait raised Cancelled", "x failed"]
    assert isinstance(found[-1].error.__cause__, Cancelled)


def test_two_readers_have_all_events():
    @rm.function
    def program(s):
        forks = s.fork(8)
        for turn in range(4):
            forks += f"{turn}" + rm.gen(f"x{turn}")
        forks.join()

    backend = Holding(lambda request: "a b c d e")
    state = program.run(backend=backend, stream=True)
    read: list[list[rm.events.Event]] = [[], []]

    def reader(found):
        for event in state.events():
            found.append(event)

    threads = [threading.Thread(target=reader, args=(found,)) for found in read]
    for thread in threads:
        thread.start()
    backend.release.set()
    for thread in threads:
        thread.join()
    assert read[0] == read[1] == list(state.events())
    for index in range(8):
        own = [told(one) for one in read[0] if one.branch == (index,)]
        assert own == [
            one
            for turn in range(4)
            for one in (
                "appended",
                f"x{turn} started",
                *(f"x{turn}{word}" for word in (" a", "  b", "  c", "  d", "  e")),
                f"x{turn} ended",
            )
        ]


async def test_in_an_event_loop_and_in_the_body():
    backend = Holding({"x": "a b", "y": "c"})

    @rm.function
    async def program(s):
        s += "Q" + rm.gen("x")
        found = []
        async for event in s.events():
            found.append(told(event))
            if found[-1] == "x a":
                backend.release.set()
        s += rm.gen("y")
        return found

    state = await program.run(backend=backend, stream=True)
    outside = [told(event) async for event in state.events()]
    assert state.ret_value == ["appended", "x started", "x a", "x  b", "x ended"]
    assert outside == [*state.ret_value, "y started", "y c", "y ended"]


@pytest.mark.parametrize("depth", [0, 1])
def test_events_in_the_body_have_those_of_branches_that_still_generate(depth):
    backend = Holding(lambda request: "a b")

    @rm.function
    def program(s):
        state = s.fork(1)[0] if depth else s
        forks = state.fork(2)
        forks += rm.gen("x")
        found = []
        for event in state.events():
            backend.release.set()
            found.append(event)
        return found

    found = program.run(backend=backend, stream=True).ret_value
    ended = [one.branch[depth:] for one in found if isinstance(one, rm.events.StepEnded)]
    assert sorted(ended) == [(0,), (1,)]


def test_a_chunk_wakes_each_reader_once():
    state = rm.function(lambda s: None).run(backend=rm.ScriptedBackend([]))
    branch, variable, woken = state._branch, Variable("x"), []
    with branch.run.listening(lambda: woken.append(len(variable.chunks))):
        StepOutput(branch, variable).take(TextChunk(rid="", text="a", reasoning="b"))
        StepOutput(branch, variable).take(TextChunk(rid=""))
    assert woken == [1, 2]
    assert all_told(state) == ["x thinks b", "x a"]


def test_decisions_of_one_request():
    @rm.function
    def program(s):
        s += "Order 7."
        s += rm.decide("urgent", bool, "Is it urgent?")
        s += rm.decide("team", ["billing", "returns"], "Which team?", append=True)

    state = program.run(backend=rm.ScriptedBackend({"urgent": True, "team": "returns"}), stream=True)
    assert all_told(state) == [
        *("urgent started", "urgent ended"),
        *("team started", "team returns", "team ended"),
    ]
    assert text_of(state.events()) == state.text()
