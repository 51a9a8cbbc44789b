"""A script's answer that no model could give, and a request that is not recorded, end the run."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import ramify as rm
from ramify.errors import BackendError
from ramify.lang.common.event import Event
from ramify.lang.program.run import find_backend
from tests.lang.backends import Holding

RECOVERED = "The program went on."


@rm.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def caught(s):
    with contextlib.suppress(rm.ProgramError):
        s["x"]


def recovered(s):
    s += "Q" + rm.gen("x", regex="[ab]")
    caught(s)
    s.recover()
    s += " again"


def retried(s):
    s += rm.user("Q") + rm.assistant(rm.gen("x", schema=int, retries=2))
    caught(s)


def in_a_fork(s):
    fork, other = s.fork(2)
    fork += rm.gen("x", regex="[ab]")
    other += rm.gen("y")
    caught(fork)


def gathered(s):
    forks = s.fork(2)
    forks += rm.gen("x", choices=["a", "b"])
    forks.join()
    caught(s)


def never_read(s):
    s += rm.gen("x", regex="[ab]")


def everything_caught(s):
    with contextlib.suppress(Exception):
        s += rm.gen("x", regex="[ab]")
        s["x"]
    s["said"] = RECOVERED


def replaced(s):
    s += rm.gen("x", regex="[ab]")
    try:
        s["x"]
    except Exception:
        raise ValueError("The program's own error.") from None


def too_long(s):
    s += rm.gen("x", regex="[a-z ]+", max_tokens=2)
    caught(s)


def unknown_tool(s):
    s += rm.user("Go.", tools=[add])
    s.call_tools([add], "x")
    caught(s)


def in_a_tool(s):
    def outer() -> str:
        """Run a program of its own."""
        return rm.function(everything_caught).run(backend=find_backend(None))["said"]

    s += rm.user("Go.", tools=[outer])
    s.call_tools([outer], "calls")
    s.sync()


def once_more(s):
    s += "Q" + rm.gen("y") + rm.gen("y")
    caught(s)


OUTER = {"name": "outer", "arguments": {}}
CASES = [
    (recovered, {"x": "c"}, "breaks its regex"),
    (retried, {"x": "one"}, "breaks its regex"),
    (in_a_fork, {"x": "c", "y": "fine"}, "breaks its regex"),
    (gathered, {"x": ["a", "c"]}, "none of the choices"),
    (never_read, {"x": "c"}, "breaks its regex"),
    (everything_caught, {"x": "c"}, "breaks its regex"),
    (replaced, {"x": "c"}, "breaks its regex"),
    (too_long, {"x": "a b c"}, "has 3 tokens; max_tokens is 2"),
    (unknown_tool, {"x": {"name": "sub", "arguments": {}}}, "it calls 'sub', which is none of the tools"),
    (unknown_tool, {"x": {"name": "add", "arguments": {"a": "1", "b": 2}}}, "the arguments of add"),
    (in_a_tool, {"calls": OUTER, "x": "c"}, "breaks its regex"),
    (once_more, {"y": ["a"]}, "answers for 'y' are used up"),
    (never_read, {"y": "a"}, "has no answer for 'x'"),
]
cases = pytest.mark.parametrize(("body", "answers", "message"), CASES)


@pytest.fixture
def default(request):
    """Sets the default backend of the tool's program."""
    yield rm.set_default_backend
    rm.set_default_backend(None)


@cases
def test_no_program_recovers(body, answers, message, default):
    script = rm.ScriptedBackend(answers)
    default(script)
    with pytest.raises(rm.NotScripted, match=rf"test_fatal.py:\d+ failed: .*{message}"):
        rm.function(body).run(backend=script)


@cases
def test_nor_one_that_streams(body, answers, message, default):
    script = rm.ScriptedBackend(answers)
    default(script)
    state = rm.function(body).run(backend=script, stream=True)
    for read in (state.sync, state.error, state.text, lambda: list(state.text_iter()), lambda: state["said"]):
        with pytest.raises(rm.NotScripted, match=message):
            read()


async def all_of(iterator):
    return [item async for item in iterator]


READS = {
    "__getitem__": lambda s: s["said"],
    "ret_value": lambda s: s.ret_value,
    "get_var": lambda s: s.get_var("x"),
    "get": lambda s: s.get("x", str),
    "aget": lambda s: asyncio.run(s.aget("x")),
    "thinking": lambda s: s.thinking("x"),
    "get_meta_info": lambda s: s.get_meta_info("x"),
    "prompt_of": lambda s: s.prompt_of("x"),
    "text": lambda s: s.text(),
    "messages": lambda s: s.messages(),
    "sync": lambda s: s.sync(),
    "wait": lambda s: asyncio.run(s.wait()),
    "error": lambda s: s.error(),
    "recover": lambda s: s.recover(),
    "text_iter": lambda s: [list(s.text_iter(name)) for name in ("said", None)],
    "text_async_iter": lambda s: [asyncio.run(all_of(s.text_async_iter(name))) for name in ("said", None)],
    "stream_objects": lambda s: list(s.stream_objects("said", str)),
    "events": lambda s: list(s.events()),
    "partial": lambda s: s.partial("said", str),
    "fork": lambda s: s.fork(),
    "copy": lambda s: s.copy().__enter__(),
    "system": lambda s: s.system("a"),
    "user": lambda s: s.user().__enter__(),
    "assistant": lambda s: s.assistant("a"),
    "var_scope": lambda s: s.var_scope("a").__enter__(),
    "call_tools": lambda s: s.call_tools([add]),
}
"""Public member of a state → a read or an append."""
OTHERS = {"set_var", "usage", "usage_by_model", "trace", "show", "cancel"}
"""Members that read no result, or are there to look at a failed run."""


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("inside", [False, True])
def test_every_read_and_append_raises_it(inside, name):
    states = []

    def body(s):
        everything_caught(s)
        states.append(s)
        return 5

    state = rm.function(body).run(backend=rm.ScriptedBackend({"x": "c"}), stream=True)
    state._branch.run.body_done.block()
    if inside and name != "ret_value":  # the body has no ret_value
        state = states[0]
    with pytest.raises(rm.NotScripted, match="breaks its regex"):
        READS[name](state)


def test_every_member_is_read_above():
    assert {name for name in dir(rm.ProgramState) if name[0] != "_"} == {*READS, *OTHERS} - {"__getitem__"}


@cases
def test_nor_a_batch(body, answers, message, default, tmp_path):
    for options in ({}, {"out": tmp_path / "out.jsonl"}, {"dry_run": True}):
        script = rm.ScriptedBackend(answers)
        default(script)
        with pytest.raises(rm.NotScripted, match=message):
            rm.function(body).run_batch([{}], backend=script, **options)


async def test_nor_one_that_is_async(tmp_path):
    @rm.function
    async def program(s):
        s += rm.gen("x", regex="[ab]")
        try:
            await s.aget("x")
        except Exception:
            return RECOVERED

    def script():
        return rm.ScriptedBackend({"x": "c"})

    with pytest.raises(rm.NotScripted, match="breaks its regex"):
        await program.run(backend=script())
    state = await program.run(backend=script(), stream=True)
    with pytest.raises(rm.NotScripted, match="breaks its regex"):
        await state.aget("x")
    with pytest.raises(rm.NotScripted, match="breaks its regex"):
        await program.run_batch([{}], backend=script())


async def test_nor_one_that_runs_another():
    @rm.function
    async def inner(s):
        s += rm.gen("x", regex="[ab]")

    @rm.function
    async def program(s):
        await asyncio.gather(inner.run(backend=script), return_exceptions=True)
        return RECOVERED

    script = rm.ScriptedBackend({"x": "c"})
    with pytest.raises(rm.NotScripted, match="breaks its regex"):
        await program.run(backend=script)


def test_nor_a_compiled_one():
    @rm.function
    def program(s):
        s += rm.gen("x", regex="[ab]") + rm.gen("y")

    for options in ({}, {"compiled": True}):
        with pytest.raises(rm.NotScripted, match="breaks its regex"):
            program.compile().run(backend=rm.ScriptedBackend({"x": "c", "y": "a"}), **options)


def test_the_first_such_error_ends_all_branches():
    script = rm.ScriptedBackend({"x": "c", "y": "a"})

    @rm.function
    def program(s):
        s += rm.gen("x", regex="[ab]")
        with contextlib.suppress(rm.NotScripted):
            s.sync()
        with contextlib.suppress(rm.NotScripted):
            s.fork(1)[0].__iadd__(rm.gen("y"))

    with pytest.raises(rm.NotScripted, match="breaks its regex"):
        program.run(backend=script)
    assert len(script.requests) == 1


@pytest.mark.parametrize("during", ["a request", "a tool"])
@pytest.mark.parametrize("stream", [True, False])
def test_and_aborts_what_the_other_branches_wait_for(stream, during):
    begun, aborted = Event(), []

    class Partly(Holding):
        """Holds the generations of the first branch."""

        async def generate(self, request):
            if "slow" in self.prompt_text(request):
                async for chunk in super().generate(request):
                    yield chunk
            else:
                if during == "a request":
                    await self.started.wait()
                async for chunk in rm.ScriptedBackend.generate(self, request):
                    yield chunk

    @rm.tool
    async def wait() -> str:
        """Wait."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            aborted.append(True)
        return ""

    @rm.function
    def program(s):
        first, second = s.fork(2)
        if during == "a request":
            first += "slow" + rm.gen("a")
        else:
            first += rm.user("?")
            first.call_tools([wait], "calls")
            begun.block()
        second += rm.gen("x", regex="[ab]")
        with contextlib.suppress(rm.NotScripted):
            first.sync()

    backend = Partly({"a": "one two", "x": "c", "calls": {"name": "wait", "arguments": {}}})
    with pytest.raises(rm.NotScripted, match="breaks its regex"):
        program.run(backend=backend, stream=stream).sync()
    assert [during == "a request", during == "a tool"] == [backend.aborted == 1, aborted == [True]]


@pytest.mark.parametrize("body", [recovered, never_read, everything_caught])
def test_without_strict_only_the_step_fails(body):
    state = rm.function(body).run(backend=rm.ScriptedBackend({"x": "c"}, strict=False))
    with pytest.raises(rm.ProgramError, match="breaks its regex"):
        state["x"]


def test_a_scripted_exception_is_an_ordinary_failure():
    state = rm.function(recovered).run(backend=rm.ScriptedBackend({"x": BackendError("gone")}))
    assert state.text() == " again"


def test_a_request_that_is_not_recorded_ends_the_run_as_well(tmp_path):
    path = tmp_path / "run.jsonl"
    program = rm.function(recovered)
    program.run(backend=rm.RecordingBackend(rm.ScriptedBackend({"x": BackendError("gone")}), path))
    assert program.run(backend=rm.ReplayBackend(path)).text() == " again"
    with pytest.raises(rm.NotRecorded, match="temperature is 0"):
        program.run(temperature=0.5, backend=rm.ReplayBackend(path))
