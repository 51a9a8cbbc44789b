"""`s.recover()`: a branch goes on from before the statement that failed, with the prompt of that place."""

from __future__ import annotations

import pytest

import ramify as rm
from ramify.errors import BackendError
from ramify.lang.state.streaming import _VariableText
from tests.lang.backends import Breaking, Holding
from tests.lang.steps import program_of

PLAIN = "<|im_start|>{}\n{}<|im_end|>\n"


def failing_first(*answers: str) -> rm.ScriptedBackend:
    """A backend that fails the first call of each variable; then come `answers`."""
    return rm.ScriptedBackend({"x": [BackendError("gone"), *answers], "y": ["yes"] * 9})


def prompts(backend: rm.ScriptedBackend) -> list[str]:
    return [backend.prompt_text(request) for request in backend.requests]


def test_an_agent_falls_back_before_the_whole_turn():
    @rm.function
    def program(s):
        s += rm.user("Plan it.")
        s += rm.assistant("Plan: " + rm.gen("x"))
        s += rm.user("never said")
        with pytest.raises(rm.ProgramError, match="gone"):
            s["x"]
        error = s.recover()
        assert (error.variable, str(error.__cause__)) == ("x", "gone")
        s += rm.assistant("Idea: " + rm.gen("x"))
        return s["x"]

    backend = failing_first("walk")
    state = program.run(backend=backend)
    assert state.ret_value == state["x"] == "walk"
    assert state.error() is None
    asked = PLAIN.format("user", "Plan it.") + "<|im_start|>assistant\n"
    assert prompts(backend) == [asked + "Plan: ", asked + "Idea: "]
    assert state.text() == asked + "Idea: walk<|im_end|>\n"
    assert [turn["content"] for turn in state.messages()] == ["Plan it.", "Idea: walk"]
    assert "failed: gone" in str(state.trace)
    assert state.trace.error is None


def test_the_trace_has_what_was_dropped():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("kept")
        s += "a" + rm.gen("y") + rm.gen("x")
        s.sync()
        s.recover()
        s += "b" + rm.gen("x")

    backend = rm.ScriptedBackend({"kept": "k", "y": "one two", "x": [BackendError("gone"), "fine"]})
    trace = program.run(backend=backend).trace
    kept, y, failed, recover, again = trace.children
    assert (recover.kind, recover.name, recover.text, recover.error) == ("recover", "x", "gone", None)
    assert recover.line == failed.line
    assert recover.dropped == (y, failed)
    assert recover.dropped_usage.completion_tokens == y.usage.completion_tokens > 0
    assert not recover.sent
    assert trace.requests == 4
    assert trace.usage.completion_tokens == sum(
        call.usage.completion_tokens for call in (kept, y, failed, again)
    )
    assert recover.to_dict()["dropped"] == ["1", "2"]
    (line,) = [line for line in str(trace).splitlines() if "recover" in line]
    assert line.startswith("├─ recover x")
    computed = y.computed_tokens + failed.computed_tokens
    assert line.endswith(f"dropped 2 calls: computed {computed} + out 3  after: gone")


def test_a_call_is_dropped_once():
    @rm.function
    def program(s):
        with s.assistant():
            s += rm.gen("x")
            s.sync()
            s.recover()
            s += rm.gen("y") + rm.gen("x")
        s.sync()
        s.recover()

    backend = rm.ScriptedBackend({"x": [BackendError("gone"), BackendError("again")], "y": "yes"})
    x, first, y, again, second = program.run(backend=backend).trace.children
    assert first.dropped == (x,)
    assert second.dropped == (y, again)


def test_skipped_variables_stay_failed_until_they_are_set_again():
    @rm.function
    def program(s):
        s += "a" + rm.gen("x")
        s += "b" + rm.gen("y")
        s.sync()
        s.recover()
        with pytest.raises(rm.ProgramError, match="'y' was not run"):
            s["y"]
        s += "c" + rm.gen("y")

    state = program.run(backend=failing_first())
    assert state.text() == "cyes"
    assert state["y"] == "yes"
    with pytest.raises(rm.ProgramError, match="gone"):
        state["x"]


@pytest.mark.parametrize("where", ["inside", "after", "by an exception"])
def test_a_block_is_one_statement_once_it_has_been_left(where: str):
    @rm.function
    def program(s):
        s += rm.user("Q")
        try:
            with s.assistant():
                s += "A: "
                with s.var_scope("whole"):
                    s += "[" + rm.gen("x")
                    if where == "by an exception":
                        s["x"]
                    if where == "inside":
                        s.sync()
                        s.recover()
                        s += "("
                if where == "inside":
                    s += ")"
            s["x"]
        except rm.ProgramError:
            if where != "inside":
                s.recover()
                s += rm.assistant("none")

    state = program.run(backend=failing_first())
    answer = "A: ()" if where == "inside" else "none"
    assert state.messages()[-1] == {"role": "assistant", "content": answer}
    if where == "inside":
        assert state["whole"] == "("
    assert state.error() is None


def test_an_error_that_nobody_recovers_from_still_fails_the_state():
    @rm.function
    def program(s):
        s += "a" + rm.gen("x")
        s.sync()
        s.recover()
        s += "b" + rm.gen("x", stop="never")

    state = program.run(backend=rm.ScriptedBackend([BackendError("gone"), BackendError("gone again")]))
    with pytest.raises(rm.ProgramError, match="gone again"):
        state.text()
    assert "gone again" in str(state.error())


def test_recovering_without_a_failure_is_refused_by_name():
    backend = Holding(["long answer"])

    @rm.function
    def program(s):
        s += "a" + rm.gen("x")
        backend.started.block()
        with pytest.raises(rm.ProgramError, match=r"nothing to recover from.*Read the variable first"):
            s.recover()
        backend.release.set()
        s.sync()
        with pytest.raises(rm.ProgramError, match="no step of this state has failed"):
            s.recover()

    state = program.run(backend=backend)
    assert state["x"] == "long answer"
    with pytest.raises(rm.ProgramError, match="cannot be recovered: its program has ended"):
        state.recover()


def test_branches_recover_alone():
    @rm.function
    def program(s):
        s += "Q"
        forks = s.fork(3)
        for index, branch in enumerate(forks):
            branch += f" {index}:" + rm.gen("x")
        with pytest.raises(rm.ProgramError, match="gone"):
            forks[1]["x"]
        forks[1].recover()
        forks[1] += " other:" + rm.gen("x")
        forks.join()
        s += "!"

    state = program.run(backend=Breaking(lambda r: "a", BackendError("gone"), after=0, where="Q 1:"))
    assert state["x"] == ["a", "a", "a"]
    assert state.text() == "Q!"


def test_a_branch_forked_after_the_failure_is_forked_again():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        early = s.fork(1)
        s.sync()
        with pytest.raises(rm.ProgramError, match=r"no step of its own has failed.*fork again"):
            early[0].recover()
        s.recover()
        late = s.fork(2)
        late += "w" + rm.gen("y")
        late.join("concate_and_append")

    assert program.run(backend=failing_first()).text() == "wyeswyes"


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_a_failed_join_recovers_to_before_the_join(mode: str):
    @rm.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        forks[0] += " 0:" + rm.gen("x")
        forks[1] += " 1:" + rm.gen("x")
        forks.join(mode)
        with pytest.raises(rm.ProgramError, match="gone"):
            s["x"] if mode == "gather_variable" else s.text()
        assert s.recover().variable == "x"
        last = s.trace.children[-1]
        assert (last.kind, last.name, last.text) == ("recover", "x", "gone")
        assert forks[0]["x"] == "a"
        with pytest.raises(rm.ProgramError, match="cannot be recovered: it was joined"):
            forks[1].recover()
        s += " then " + rm.gen("y")

    state = program.run(backend=Breaking(lambda r: "a", BackendError("gone"), after=0, where="Q 1:"))
    assert state.text() == "Q then a"


async def test_async_programs_and_streams():
    @rm.function
    async def program(s):
        s += "Q"
        s += "a" + rm.gen("x")
        with pytest.raises(rm.ProgramError, match="gone"):
            await s.aget("x")
        s.recover()
        s += "b" + rm.gen("y")

    assert (await program.run(backend=failing_first())).text() == "Qbyes"
    state = await program.run(backend=failing_first(), stream=True)
    assert "".join([text async for text in state.text_async_iter()]) == "Qabyes"


def test_a_reader_of_a_stream_is_raised_the_error_that_the_body_recovers_from():
    @rm.function
    def program(s):
        reader = _VariableText(s, "x")
        s += "a" + rm.gen("x")
        s.sync()
        assert reader.ended
        s.recover()
        s += "b" + rm.gen("x")
        s.sync()
        assert list(reader.new()) == []
        with pytest.raises(rm.ProgramError, match="gone"):
            reader.check()

    state = program.run(backend=failing_first("again"), stream=True)
    assert "".join(state.text_iter()) == "abagain"
    assert state["x"] == "again"


def test_failing_tools():
    @rm.tool
    def look_up(word: str) -> str:
        raise LookupError(f"no {word}")

    @rm.function
    def agent(s):
        s += rm.user("What is it?")
        try:
            return list(s.call_tools([look_up], name="calls", errors="raise"))
        except rm.ProgramError:
            assert isinstance(s.recover().__cause__, LookupError)
        s += rm.assistant("I only know that " + rm.gen("y"))
        return s["y"]

    script = rm.ScriptedBackend(
        {
            "calls": '\n{"name": "look_up", "arguments": {"word": "it"}}\n</tool_call>',
            "y": "it is.",
        }
    )
    state = agent.run(backend=script)
    assert state.ret_value == "it is."
    assert [turn["role"] for turn in state.messages()] == ["user", "assistant"]


def test_a_cancelled_run_is_not_recovered():
    backend = Holding(["long answer"])

    @rm.function
    def program(s):
        s += "a" + rm.gen("x")
        backend.started.block()
        s.cancel()
        s.sync()
        with pytest.raises(rm.ProgramError, match="The run was cancelled"):
            s.recover()

    program.run(backend=backend)


def test_the_prompt_after_a_recovery_is_found_in_the_cache(engine: rm.Engine):
    @rm.function
    def program(s):
        s += "A prefix that is long enough to be kept in several pages of the tree. "
        s += rm.gen("first", max_tokens=4, temperature=0, ignore_eos=True)
        s += " then "
        s += "more " + rm.gen("x", max_tokens=4, ignore_eos=True, validate=lambda text: 1 / 0)
        with pytest.raises(rm.ProgramError):
            s["x"]
        s.recover()
        s += rm.gen("again", max_tokens=4, temperature=0, ignore_eos=True)

    straight = program_of(
        "A prefix that is long enough to be kept in several pages of the tree. ",
        rm.gen("first", max_tokens=4, temperature=0, ignore_eos=True),
        " then ",
        rm.gen("again", max_tokens=4, temperature=0, ignore_eos=True),
    )
    engine.flush_cache()
    recovered = program.run(backend=engine)
    usage = recovered.trace.children[-1].own_usage
    assert usage.prompt_tokens - usage.cached_tokens <= 1
    assert straight.run(backend=engine).text() == recovered.text()
