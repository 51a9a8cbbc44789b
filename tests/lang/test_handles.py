"""A step read as a handle: wherever a variable's name is taken, its step can be given."""

from __future__ import annotations

import asyncio

import pytest

import ramify as rm
from ramify.errors import InvalidRequest
from ramify.lang.typed.partial import Partial

score = rm.gen("score", schema=int)
word = rm.gen("word", max_tokens=8)
SCRIPT = {"score": "4", "word": "good", "pick": "a"}


def backend() -> rm.ScriptedBackend:
    return rm.ScriptedBackend(SCRIPT)


@rm.function
def judge(s: rm.ProgramState) -> tuple[int, str]:
    s += rm.user("How is it?") + rm.assistant(score + word)
    return s[score], s.get(word)


READS = {
    "getitem": lambda s, name: s[name],
    "get_var": lambda s, name: s.get_var(name),
    "get": lambda s, name: s.get(name, str),
    "get_meta_info": lambda s, name: s.get_meta_info(name),
    "prompt_of": lambda s, name: s.prompt_of(name),
    "contains": lambda s, name: name in s,
    "partial": lambda s, name: s.partial(name),
    "text_iter": lambda s, name: list(s.text_iter(name)),
    "stream_objects": lambda s, name: list(s.stream_objects(name)),
    "async": lambda s, name: asyncio.run(s.aget(name)),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_step_reads_as_its_name(read, stream):
    state = judge.run(backend=backend(), stream=stream)
    assert read(state, score) == read(state, "score")
    assert state.ret_value == (4, "good")


def test_text_is_streamed_by_its_step():
    async def texts(state):
        return [text async for text in state.text_async_iter(word)]

    assert asyncio.run(texts(judge.run(backend=backend(), stream=True))) == ["good"]


def test_thoughts_are_read_by_the_step():
    thoughtful = rm.gen("x", thinking=True)

    @rm.function
    def program(s):
        s += rm.user("?") + rm.assistant(thoughtful)
        return s.thinking(thoughtful), s.thinking("x")

    first, second = program.run(backend=rm.ScriptedBackend({"x": "a"})).ret_value
    assert first == second


def test_forks_are_read_by_the_step():
    @rm.function
    def program(s):
        views = s.fork(2)
        views += score
        views.join()
        return views[score], s[score]

    @rm.function
    async def later(s):
        views = s.fork(2)
        views += score
        return await views.aget(score)

    assert program.run(backend=backend()).ret_value == ([4, 4], [4, 4])
    assert asyncio.run(later.run(backend=backend())).ret_value == [4, 4]


def test_a_compiled_program_reads_steps():
    pick = rm.select("pick", ["a", "b"])

    @rm.function
    def program(s, topic):
        s += topic + score + pick
        s += rm.when(s[pick], {"a": word})
        return {"score": s[score], "same": s.get(score, int), "word": s[word]}

    compiled = program.compile()
    expected = {"score": 4, "same": 4, "word": "good"}
    assert compiled.run("?", backend=backend()).ret_value == expected
    assert program.run("?", backend=backend()).ret_value == expected


def test_decisions_and_selections_are_read_by_their_steps():
    team, urgent = rm.select("team", ["a", "b"]), rm.decide("urgent", bool, "Is it?")

    @rm.function
    def program(s):
        s += "?" + team
        s += urgent
        return s[team], s[urgent].value, s.get(urgent, bool)

    script = rm.ScriptedBackend({"team": "b", "urgent": True})
    assert program.run(backend=script).ret_value == ("b", True, True)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (rm.gen(), "a Gen without a name"),
        (rm.select(choices=["a"]), "a Select without a name"),
        (rm.user(rm.gen("x")), r"several steps joined with \+"),
        ("a" + word, r"several steps joined with \+"),
    ],
)
def test_a_step_without_a_name_is_refused_with_the_remedy(step, what):
    state = judge.run(backend=backend())
    for use in (*READS.values(), lambda s, name: s.set_var(name, 1), lambda s, name: s.var_scope(name)):
        with pytest.raises(InvalidRequest, match=f"is given by {what}.*Give one step that has a name"):
            use(state, step)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_variable_is_set_by_its_step(compiled):
    @rm.function
    def program(s):
        s[score] = 3
        s.set_var(rm.gen("other"), 4)
        with s.var_scope(word):
            s += "set"

    state = (program.compile() if compiled else program).run(backend=backend())
    assert (state["score"], state["other"], state["word"]) == (3, 4, "set")


def test_a_step_that_was_not_appended_is_an_unknown_variable():
    state = judge.run(backend=backend())
    assert rm.gen("other") not in state
    with pytest.raises(rm.ProgramError, match="other"):
        state[rm.gen("other")]


# --- the return value ---


def test_the_return_value_of_a_streamed_program_is_waited_for():
    @rm.function
    def program(s):
        s += score
        return s[score] + 1

    assert program.run(backend=backend(), stream=True).ret_value == 5


def test_the_return_value_of_a_failed_body_raises_its_error():
    @rm.function
    def program(s):
        s += score
        raise ValueError("no verdict")

    state = program.run(backend=backend(), stream=True)
    with pytest.raises(rm.ProgramError, match="no verdict"):
        _ = state.ret_value


async def test_a_running_async_program_refuses_to_block_for_its_return_value():
    @rm.function
    async def program(s):
        s += score
        return await s.aget(score)

    state = await program.run(backend=backend(), stream=True)
    with pytest.raises(RuntimeError, match=r"await s\.wait"):
        _ = state.ret_value
    await state.wait()
    assert state.ret_value == 4


def test_the_state_inside_a_body_has_no_return_value():
    @rm.function
    def program(s):
        return s.ret_value

    with pytest.raises(rm.ProgramError, match="Only the state that run returns"):
        program.run(backend=backend())


def test_a_partial_value_is_read_by_the_step():
    assert judge.run(backend=backend()).partial(score) == Partial(4, complete=True)
