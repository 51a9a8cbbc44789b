"""The error of a step is raised where its variable is read, names its cause, and blocks no reader."""

from __future__ import annotations

import asyncio
import threading

import pytest

import ramify as rm
from ramify import loop as rm_loop
from ramify.errors import BackendError, Cancelled, InvalidConstraint, InvalidRequest
from tests.lang.backends import Breaking, Holding
from tests.lang.compiling import line_of
from tests.lang.steps import program_of


def test_a_backend_that_breaks_mid_stream():
    @rm.function
    def program(s):
        s += "Before:"
        s += rm.gen("x", schema=int)  # the line that the error names
        s += " after " + rm.gen("y")

    state = program.run(backend=Breaking(["1 "], BackendError("gone"), after=1))
    with pytest.raises(rm.ProgramError, match=r"gen 'x' at .* failed: gone") as failed:
        state["x"]
    error = failed.value
    assert error.line == line_of(__file__, "the line that the error names")
    assert (error.variable, error.prompt, error.partial) == ("x", "Before:", "1")
    assert isinstance(error.__cause__, BackendError)
    with pytest.raises(rm.ProgramError, match="'y' was not run, because an earlier step failed") as skipped:
        state["y"]
    assert skipped.value.__cause__ is state.error()
    with pytest.raises(rm.ProgramError, match="gone"):
        state.text()
    with pytest.raises(rm.ProgramError, match="gone"):
        state.messages()
    assert "failed" in repr(state)
    assert "failed: gone" in str(state.trace)


def test_what_an_error_says_is_said_once():
    program = program_of("?" + rm.gen("x"))
    cause = InvalidConstraint("It has no meaning.", pointer="/properties/a", remedy="Leave it out.")
    state = program.run(backend=rm.ScriptedBackend({"x": cause}))
    with pytest.raises(rm.ProgramError, match="It has no meaning") as failed:
        state["x"]
    said = str(failed.value)
    for part in ("/properties/a", "It has no meaning.", "Leave it out."):
        assert said.count(part) == 1, said
    assert (failed.value.pointer, failed.value.remedy) == (cause.pointer, cause.remedy)


def test_an_error_that_is_not_ours_is_the_cause():
    program = program_of("?" + rm.gen("x"))
    state = program.run(backend=rm.ScriptedBackend({"x": OSError("disk")}))
    with pytest.raises(rm.ProgramError, match="disk") as failed:
        state["x"]
    assert isinstance(failed.value.__cause__, OSError)


def test_a_parse_failure_keeps_the_text():
    program = program_of("?" + rm.gen("x", schema=int))
    backend = Breaking(["1 "], BackendError("never"), after=99)
    assert program.run(backend=backend)["x"] == 1

    import pydantic

    class Even(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def check(cls, value):
            raise ValueError("never even")

    typed = program_of("?" + rm.gen("x", schema=Even))
    state = typed.run(backend=rm.ScriptedBackend(['{"n": 1}']))
    with pytest.raises(rm.ProgramError, match="never even") as failed:
        state["x"]
    assert failed.value.partial == '{"n": 1}'
    assert failed.value.finish_reason == "stop"
    assert isinstance(failed.value.__cause__, pydantic.ValidationError)


def test_an_unknown_variable_is_a_key_error_that_lists_the_known():
    @rm.function
    def program(s):
        s += "?" + rm.gen("known")
        with pytest.raises(KeyError):
            s["unknown"]

    state = program.run(backend=rm.ScriptedBackend(["x"]))
    with pytest.raises(rm.ProgramError, match=r"sets no variable 'unknown'\. It sets 'known'\."):
        state["unknown"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_of_the_body_is_raised_as_it_is_and_cancels_the_rest(error):
    backend = Holding(["long answer"])

    @rm.function
    def program(s):
        s += "?" + rm.gen("x")
        backend.started.block()
        raise error("body")

    with pytest.raises(error, match="body"):
        program.run(backend=backend)
    assert backend.aborted == 1
    assert len(backend.ended) == 1


def test_an_exception_of_a_body_in_the_background_has_its_line():
    @rm.function
    def program(s):
        for branch in s.fork(2):
            branch += rm.gen("x", max_tokens="x")  # the wrong option

    error = program.run(backend=rm.ScriptedBackend([]), stream=True).error()
    assert error.line == line_of(__file__, "the wrong option")


def test_a_state_plus_a_turn_is_not_an_append():
    @rm.function
    def program(s):
        s = s + rm.user("x")

    with pytest.raises(TypeError, match=r"write s \+= …"):
        program.run(backend=rm.ScriptedBackend([]))


def test_reading_a_failed_branch_raises_and_its_siblings_go_on():
    @rm.function
    def program(s):
        s += "Q"
        forks = s.fork(3)
        for index, branch in enumerate(forks):
            branch += f" {index}:" + rm.gen("x")
            branch += " then " + rm.gen("y")
        with pytest.raises(rm.ProgramError, match="gone"):
            forks["x"]
        assert forks[0]["x"] == "a"
        nested = forks[1].fork(2)
        with pytest.raises(rm.ProgramError, match="gone"):
            nested[1].text()
        forks.join()
        s += "!" + rm.gen("z")

    state = program.run(backend=Breaking(lambda r: "a", BackendError("gone"), after=0, where="Q 1:"))
    assert state["z"] == "a"
    with pytest.raises(rm.ProgramError, match="gone"):
        state["y"]
    assert state.error() is None


def test_joining_the_text_of_a_failed_branch_fails_the_join():
    @rm.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        for index, branch in enumerate(forks):
            branch += f" {index}:" + rm.gen("x")
        forks.join("concate_and_append")
        s += rm.gen("z")

    state = program.run(backend=Breaking(lambda r: "a", BackendError("gone"), after=0, where="Q 1:"))
    with pytest.raises(rm.ProgramError, match="gone"):
        state["z"]


def test_a_fork_of_a_failed_state_fails_at_once():
    @rm.function
    def program(s):
        s += rm.gen("x")
        forks = s.fork(2)
        forks += rm.gen("y")
        s.sync()
        later = s.fork(1)[0]
        later += rm.gen("z")
        for branch, name in ((forks[0], "y"), (later, "z")):
            with pytest.raises(rm.ProgramError, match="gone"):
                branch[name]

    assert program.run(backend=Breaking(lambda r: "a", BackendError("gone"), after=0)).error() is not None


def test_nothing_is_appended_after_the_end():
    kept = []

    @rm.function
    def program(s):
        kept.append(s)
        forks = s.fork(1)
        forks.join()
        with pytest.raises(rm.ProgramError, match="it was joined"):
            forks[0] += "more"

    state = program.run(backend=rm.ScriptedBackend([]))
    with pytest.raises(rm.ProgramError, match="its program has ended"):
        state += "more"
    with pytest.raises(rm.ProgramError, match="its program has ended"):
        kept[0] += rm.gen("x")


def test_cancel_from_another_thread_unblocks_a_reader():
    backend = Holding(["long answer"])
    handles = []

    @rm.function
    def program(s):
        handles.append(s)
        s += rm.user("?") + rm.assistant(rm.gen("x"))
        s["x"]

    def cancel():
        backend.started.block()
        handles[0].cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(rm.ProgramError, match="cancelled") as failed:
        program.run(backend=backend)
    thread.join()
    assert isinstance(failed.value.__cause__, Cancelled)
    assert backend.aborted == 1


def test_cancel_after_the_end_changes_nothing():
    program = program_of("a" + rm.gen("x"))
    state = program.run(backend=rm.ScriptedBackend(["b"]))
    state.cancel()
    rm_loop.wait(asyncio.sleep(0))  # behind the cancellation, on the same loop
    assert (state.text(), state.error()) == ("ab", None)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (lambda: rm.user(rm.user("a")), "A user turn begins inside a user turn"),
        (lambda: rm.user(rm.assistant("a")), "An assistant turn begins inside a user turn"),
        (lambda: rm.user_end(), r"user_end\(\) without user_begin\(\)"),
        (lambda: rm.user_begin() + "a" + rm.assistant_end(), r"assistant_end\(\) without"),
    ],
)
def test_turns_that_do_not_fit(turns, message):
    program = program_of(turns())
    error = program.run(backend=rm.ScriptedBackend([])).error()
    assert isinstance(error.__cause__, InvalidRequest)
    with pytest.raises(rm.ProgramError, match=message):
        raise error


def test_a_model_without_a_chat_template_has_no_turns():
    program = program_of(rm.user("a") + rm.assistant(rm.gen("x")))
    state = program.run(backend=rm.ScriptedBackend(["a"], chat_format=None))
    with pytest.raises(rm.ProgramError, match="has no chat template"):
        state["x"]


def test_a_turn_that_the_template_lacks_is_named():
    from ramify.model_info import ChatFormat

    alternating = ChatFormat(
        prefix={">user": "U:", "user>assistant": "A:"}, suffix={"user": "\n"}, exact=True
    )

    program = program_of(rm.user("a") + rm.user("b"))
    error = program.run(backend=rm.ScriptedBackend([], chat_format=alternating)).error()
    with pytest.raises(rm.ProgramError, match="has no user turn after a user turn"):
        raise error


def test_no_backend_and_no_backend_at_all():
    program = program_of("a")
    with pytest.raises(InvalidRequest, match=r"No backend to run on\. Pass backend="):
        program.run()
    with pytest.raises(InvalidRequest, match="backend is 'http://localhost', and there is no Router"):
        program.run(backend="http://localhost")
    with pytest.raises(InvalidRequest, match="is not a backend"):
        rm.set_default_backend(object())


def test_a_backend_that_cannot_be_reached_fails_the_run_itself():
    class Unreachable(rm.ScriptedBackend):
        async def info(self):
            raise BackendError("refused")

    program = program_of("a")
    with pytest.raises(BackendError, match="refused"):
        program.run(backend=Unreachable([]))


def test_a_backend_that_stops_short_or_aborts():
    class Short(rm.ScriptedBackend):
        async def generate(self, request):
            async for chunk in super().generate(request):
                if chunk.finish is None:
                    yield chunk

    program = program_of("a" + rm.gen("x"))
    with pytest.raises(rm.ProgramError, match="without a final chunk"):
        program.run(backend=Short(["b"]))["x"]


def test_an_end_of_program_that_fails_is_only_logged(caplog):
    class Forgetful(rm.ScriptedBackend):
        async def end_program(self, program):
            raise BackendError("busy")

    program = program_of("a" + rm.gen("x"))
    assert program.run(backend=Forgetful(["b"]))["x"] == "b"
    assert "could not be ended on its backend: busy" in caplog.text


def test_programs_that_are_none():
    with pytest.raises(TypeError, match="takes no state"):
        rm.function(lambda: None)
    with pytest.raises(TypeError, match="cannot have a parameter 'backend'"):
        rm.function(lambda s, backend: None)
    with pytest.raises(TypeError, match="num_api_spec_tokens"):
        rm.function(num_api_spec_tokens=64)
    assert rm.function()(lambda s: None).run(backend=rm.ScriptedBackend([])).text() == ""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_that_ends_the_body_is_that_of_the_steps_it_cancels(compiled, stream):
    @rm.function
    def program(s):
        first = s.fork(1)[0]
        first += "a" + rm.gen("n")
        s += "b" + rm.gen("end")
        return first["n"]

    program = program.compile() if compiled else program
    backend = Holding({"n": BackendError("gone"), "end": "one two"})
    if stream:
        state = program.run(backend=backend, stream=True)
    else:
        [state] = program.run_batch([{}], backend=backend)
    for read in (state.error, state.text, lambda: state["end"], lambda: state.ret_value):
        try:
            found = read()
        except rm.ProgramError as error:
            found = error
        assert found.variable == "n", read
        assert "gone" in str(found)


def test_the_value_of_a_compiled_program_waits_for_its_body():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        return s["x"]

    backend = Holding({"x": "one two"})
    state = program.compile().run(backend=backend, stream=True)
    backend.started.block()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(state.ret_value))
    thread.start()
    backend.release.set()
    thread.join()
    assert found == ["one two"]
