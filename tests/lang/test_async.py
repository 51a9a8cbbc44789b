"""Every blocking function has an awaitable form with the same result, in the caller's event loop."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

import ramify as rm
from ramify.errors import BackendError, Cancelled
from tests.lang.backends import Breaking, Holding

ANSWERS = {"x": "one", "y": "2", "grade": "B", "branch": ["a", "b"]}


@rm.function
def blocking(s, topic, count=2):
    s += rm.system("Be brief.") + rm.user(topic)
    with s.assistant():
        s += rm.gen("x")
    s += rm.user("How many?") + rm.assistant(rm.gen("y", schema=int))
    forks = s.fork(count)
    for branch in forks:
        branch += rm.user("Go on.") + rm.assistant(rm.gen("branch"))
    texts = forks["branch"]
    forks.join()
    s += rm.user(f"{s['x']} {s['y'] + 1} {len(texts)}")
    s += rm.assistant(rm.select("grade", ["A", "B"]))
    return s.get("y", str)


@rm.function
async def awaiting(s, topic, count=2):
    s += rm.system("Be brief.") + rm.user(topic)
    with s.assistant():
        s += rm.gen("x")
    s += rm.user("How many?") + rm.assistant(rm.gen("y", schema=int))
    forks = s.fork(count)
    for branch in forks:
        branch += rm.user("Go on.") + rm.assistant(rm.gen("branch"))
    texts = await forks.aget("branch")
    await forks.wait()
    forks.join()
    s += rm.user(f"{await s.aget('x')} {await s.aget('y') + 1} {len(texts)}")
    s += rm.assistant(rm.select("grade", ["A", "B"]))
    return await s.aget("y", str)


@rm.function
async def short(s):
    s += "a" + rm.gen("x")
    return await s.aget("x")


READS = {
    "text": lambda state: state.text(),
    "messages": lambda state: state.messages(),
    "item": lambda state: state["x"],
    "get_var": lambda state: state.get_var("grade"),
    "get": lambda state: state.get("y"),
    "get as a type": lambda state: state.get("y", float),
    "gathered": lambda state: sorted(state["branch"]),
    "meta": lambda state: state.get_meta_info("x")["completion_tokens"],
    "error": lambda state: state.error(),
    "contains": lambda state: ("x" in state, "z" in state),
    "return value": lambda state: state.ret_value,
    "prompt tokens": lambda state: state.usage.prompt_tokens,
    "completion tokens": lambda state: state.usage.completion_tokens,
    "calls": lambda state: [(call.kind, call.name) for call in state.trace.walk()][1:],
    "text_iter": lambda state: "".join(state.text_iter()),
    "text_iter of a variable": lambda state: "".join(state.text_iter("x")),
    "sync": lambda state: state.sync(),
}


@pytest.mark.parametrize("read", READS)
async def test_an_async_program_reads_as_a_sync_one(read):
    theirs = await asyncio.to_thread(lambda: blocking.run("cats", backend=rm.ScriptedBackend(ANSWERS)))
    ours = await awaiting.run("cats", backend=rm.ScriptedBackend(ANSWERS))
    assert READS[read](ours) == READS[read](theirs)


async def test_call_bind_and_options():
    backend = rm.ScriptedBackend({**ANSWERS, "branch": "a"})
    for run in (
        awaiting.bind(backend=backend)("cats"),
        awaiting.bind(topic="cats").run(backend=backend),
        awaiting.with_options(backend=backend, temperature=0.0).run("cats", count=1),
    ):
        assert (await run)["grade"] == "B"
    assert backend.requests[-1].sampling.temperature == 0.0


async def test_reads_that_would_block_the_loop_say_what_to_write():
    @rm.function
    async def program(s):
        s += "a" + rm.gen("x")
        for read in (lambda: s["x"], s.text, s.sync, lambda: list(s.text_iter())):
            with pytest.raises(RuntimeError, match=r'await s.aget\("name"\)'):
                read()
        await s.wait()
        assert s["x"] == "b"
        assert s.text() == "ab"

    await program.run(backend=Slow(["b"]))


class Slow(rm.ScriptedBackend):
    """Gives the user's loop time to read too early."""

    async def generate(self, request):
        async for chunk in super().generate(request):
            for _ in range(100):
                await asyncio.sleep(0)
            yield chunk


async def test_programs_run_at_once_in_one_loop():
    backend = Holding(lambda request: "a")

    async def release():
        while backend.holding < 8:
            await asyncio.sleep(0)
        backend.release.set()

    *states, _ = await asyncio.gather(*(short.run(backend=backend) for _ in range(8)), release())
    assert [state.ret_value for state in states] == ["a"] * 8


async def test_cancelling_the_caller_aborts_the_request():
    backend = Holding(["long answer"])

    task = asyncio.create_task(short.run(backend=backend))
    await backend.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.aborted == 1
    assert len(backend.ended) == 1


async def test_a_time_limit_on_one_read_leaves_the_step_alone():
    backend = Holding(["answer"])

    @rm.function
    async def program(s):
        s += "a" + rm.gen("x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.aget("x"), 0.001)
        backend.release.set()
        return await s.aget("x")

    assert (await program.run(backend=backend)).ret_value == "answer"


async def test_an_exception_of_the_body_is_raised_and_cancels_the_rest():
    backend = Holding(["answer"])

    @rm.function
    async def program(s):
        s += "a" + rm.gen("x")
        await backend.started.wait()
        raise ZeroDivisionError("body")

    with pytest.raises(ZeroDivisionError):
        await program.run(backend=backend)
    assert backend.aborted == 1


async def test_a_failed_step_raises_where_it_is_awaited():
    @rm.function
    async def program(s):
        s += "a" + rm.gen("x")
        with pytest.raises(KeyError):
            await s.aget("unknown")
        await s.aget("x")

    with pytest.raises(rm.ProgramError, match="gone"):
        await program.run(backend=Breaking(["b"], BackendError("gone"), after=0))


async def test_streaming():
    state = await awaiting.run("cats", backend=rm.ScriptedBackend(ANSWERS), stream=True)
    assert [piece async for piece in state.text_async_iter("x")] == ["one"]
    assert await state.aget("grade") == "B"
    pieces = [piece async for piece in state.text_async_iter()]
    assert len(pieces) > 0
    await state.wait()
    assert "".join(pieces) == state.text()


async def test_streaming_of_an_unknown_variable_ends_with_the_program():
    state = await awaiting.run("cats", backend=rm.ScriptedBackend(ANSWERS), stream=True)
    with pytest.raises(KeyError):
        await state.aget("nothing")
    with pytest.raises(KeyError):
        [piece async for piece in state.text_async_iter("nothing")]


async def test_cancelling_a_stream():
    backend = Holding(["long answer"])

    @rm.function
    async def program(s):
        s += "a" + rm.gen("x")

    state = await program.run(backend=backend, stream=True)
    await backend.started.wait()
    state.cancel()
    with pytest.raises(rm.ProgramError) as failed:
        await state.aget("x")
    assert isinstance(failed.value.__cause__, Cancelled)
    await state.wait()
    assert backend.aborted == 1


def test_a_loop_that_ends_with_the_error_of_a_stream():
    """`asyncio.run` cancels the program's task while that cancels the run."""

    async def main():
        state = await short.run(backend=Breaking(["b"], BackendError("gone"), 0), stream=True)
        return [piece async for piece in state.text_async_iter("x")]

    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(5):
            with pytest.raises(rm.ProgramError):
                asyncio.run(main())
        gc.collect()
    assert [str(one.message) for one in caught] == []


async def test_a_sync_program_can_be_streamed_from_a_loop():
    state = blocking.run("cats", backend=rm.ScriptedBackend(ANSWERS), stream=True)
    pieces = [piece async for piece in state.text_async_iter()]
    assert "".join(pieces) == state.text()
    meta = [meta async for _, meta in state.text_async_iter("x", return_meta_data=True)]
    assert meta[-1]["completion_tokens"] >= 1
    with pytest.raises(ValueError, match="return_meta_data"):
        [piece async for piece in state.text_async_iter(return_meta_data=True)]


async def test_a_finished_program_is_iterated_at_once():
    state = await awaiting.run("cats", backend=rm.ScriptedBackend(ANSWERS))
    assert [piece async for piece in state.text_async_iter()] == [state.text()]
    assert [piece async for piece in state.text_async_iter("y")] == ["2"]
    pairs = [pair async for pair in state.text_async_iter("x", return_meta_data=True)]
    assert pairs == [("one", state.get_meta_info("x"))]


def test_a_loop_that_ends_when_the_steps_have_ended_does_not_fail_the_run() -> None:
    async def run() -> rm.ProgramState:
        state = await short.run(stream=True, backend=rm.ScriptedBackend(ANSWERS))
        await state.wait()
        return state

    for _ in range(200):
        assert asyncio.run(run()).error() is None
