"""Retries after invalid outputs, and time limits."""

from __future__ import annotations

import asyncio
import itertools

import pydantic
import pytest

import ramify as rm
from ramify.errors import RequestTimeout
from ramify.lang.program.retries import describe
from ramify.model_info import ChatFormat
from tests.lang.backends import Holding
from tests.lang.steps import program_of


class Trip(pydantic.BaseModel):
    start: int
    end: int


def in_order(trip: Trip) -> None:
    if trip.end <= trip.start:
        raise ValueError(f"it ends on day {trip.end}, before it starts")


BAD, GOOD = '{"start": 5, "end": 3}', '{"start": 3, "end": 5}'


def asking(**options):
    return program_of(
        rm.system("Plan.") + rm.user("When?"),
        rm.assistant("Sure: " + rm.gen("trip", schema=Trip, validate=in_order, **options)),
        rm.user("Thanks.") + rm.assistant(rm.gen("bye")),
    )


HEAD = "<|im_start|>system\nPlan.<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\nSure: "
CORRECTION = (
    "<|im_end|>\n<|im_start|>user\nThat is not valid. it ends on day 3, before it starts.\n"
    "Give the whole answer again, corrected.<|im_end|>\n<|im_start|>assistant\nSure: "
)


def test_a_retry_shows_the_error_and_leaves_no_trace_in_the_state():
    backend = rm.ScriptedBackend({"trip": [BAD, GOOD], "bye": "Bye."})
    state = asking(retries=2).run(backend=backend)
    assert state["trip"] == Trip(start=3, end=5)
    assert backend.prompt_text(backend.requests[1]) == HEAD + BAD + CORRECTION
    assert state.prompt_of("trip") == HEAD + BAD + CORRECTION
    assert backend.prompt_text(backend.requests[2]).startswith(HEAD + GOOD + "<|im_end|>\n")
    assert BAD not in state.text()
    assert [message["content"] for message in state.messages()] == [
        "Plan.",
        "When?",
        "Sure: " + GOOD,
        "Thanks.",
        "Bye.",
    ]


def test_failed_attempts_can_be_kept():
    backend = rm.ScriptedBackend({"trip": [BAD, GOOD], "bye": "Bye."})
    state = asking(retries=1, keep_failed=True).run(backend=backend)
    assert state["trip"] == Trip(start=3, end=5)
    assert state.text().startswith(HEAD + BAD + CORRECTION + GOOD + "<|im_end|>\n")
    assert [message["role"] for message in state.messages()][1:5] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    # All that was sent and generated before is found again, but for each output's last token.
    requests = [call for call in state.trace.walk() if call.requests and not call.children]
    for before, after in itertools.pairwise(requests):
        known = before.own_usage.prompt_tokens + before.own_usage.completion_tokens - 1
        assert after.own_usage.cached_tokens == known


def test_the_attempts_are_in_the_trace():
    backend = rm.ScriptedBackend({"trip": [BAD, GOOD], "bye": "Bye."})
    step = asking(retries=2).run(backend=backend).trace.children[0]
    assert [(call.kind, call.text, call.error is None) for call in step.children] == [
        ("attempt", BAD, False),
        ("attempt", GOOD, True),
    ]
    assert step.requests == 2
    assert step.text == GOOD
    assert step.error is None
    assert step.usage.completion_tokens == sum(call.own_usage.completion_tokens for call in step.children)
    _, rejected, valid = str(step).splitlines()
    assert rejected.startswith("├─ attempt trip")
    assert rejected.endswith("failed: it ends on day 3, before it starts")
    assert valid.startswith("└─ attempt trip")
    once = asking(retries=2).run(backend=rm.ScriptedBackend({"trip": GOOD, "bye": "Bye."})).trace.children[0]
    assert len(str(once).splitlines()) == 1


def test_an_attempt_that_takes_too_long_has_failed():
    program = program_of("Count: " + rm.gen("x", timeout=0.02, retries=3))
    (step,) = program.run(backend=Holding(lambda request: "one two")).trace.children
    (sent,) = step.children
    assert sent.error == "cancelled"


def test_the_last_error_is_raised():
    backend = rm.ScriptedBackend({"trip": [BAD, BAD, BAD]})
    state = asking(retries=2).run(backend=backend)
    with pytest.raises(rm.ProgramError, match="before it starts") as failed:
        state["trip"]
    error = failed.value
    assert isinstance(error.__cause__, ValueError)
    assert (error.variable, error.partial, error.finish_reason) == ("trip", BAD, "stop")
    assert error.prompt == HEAD + BAD + CORRECTION + BAD + CORRECTION
    assert error.line.startswith(__file__)
    assert len(backend.requests) == 3


def test_without_retries_validate_fails_the_step():
    backend = rm.ScriptedBackend({"trip": BAD})
    error = asking().run(backend=backend).error()
    assert "before it starts" in str(error)
    assert (error.prompt, error.partial) == (HEAD, BAD)
    assert len(backend.requests) == 1


def test_text_that_does_not_parse_is_retried_as_plain_text():
    def even(text):
        if int(text) % 2:
            raise AssertionError(f"{text} is odd")

    program = program_of("An even number: " + rm.gen("n", validate=even, retries=3, stop="\n") + "!")
    backend = rm.ScriptedBackend(["seven\n", "7\n", "8\n"])
    state = program.run(backend=backend)
    assert (state["n"], state.text()) == ("8", "An even number: 8!")
    assert backend.prompt_text(backend.requests[2]) == (
        "An even number: seven\nThat is not valid. invalid literal for int() with base 10: 'seven'.\n"
        "The same again, corrected:\n7\nThat is not valid. 7 is odd.\nThe same again, corrected:\n"
    )


def test_pydantics_errors_are_shown_by_path():
    class Strict(pydantic.BaseModel):
        day: int

        @pydantic.field_validator("day")
        @classmethod
        def small(cls, day: int) -> int:
            if day > 31:
                raise ValueError("no month is so long")
            return day

    program = program_of("Day: " + rm.gen("x", schema=Strict, retries=1))
    backend = rm.ScriptedBackend(['{"day": 40}', '{"day": 30}'])
    assert program.run(backend=backend)["x"].day == 30
    prompt = backend.prompt_text(backend.requests[1])
    assert "That is not valid. day: Value error, no month is so long.\n" in prompt
    assert "http" not in prompt


def test_only_the_valid_output_is_streamed():
    backend = rm.ScriptedBackend({"trip": [BAD, GOOD], "bye": "Bye."})
    state = asking(retries=1).run(backend=backend, stream=True)
    assert "".join(state.text_iter("trip")) == GOOD
    assert "".join(state.text_iter()) == state.text()
    kept = asking(retries=1, keep_failed=True).run(
        backend=rm.ScriptedBackend({"trip": [BAD, GOOD], "bye": "Bye."}), stream=True
    )
    assert "".join(kept.text_iter()) == kept.text()


def test_a_template_that_cannot_go_on_says_so():
    one_turn = ChatFormat(prefix={">user": "U:", "user>assistant": "A:"}, suffix={}, exact=True)

    program = program_of(rm.user("Q") + rm.assistant(rm.gen("x", schema=int, validate=in_order, retries=1)))
    backend = rm.ScriptedBackend(["x"], chat_format=one_turn, strict=False)
    assert program.run(backend=backend).error() is not None


def test_retries_take_one_sample():
    program = program_of("a" + rm.gen("x", n=2, retries=1))
    assert "n=1" in str(program.run(backend=rm.ScriptedBackend([])).error())


# --- time-outs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        lambda: rm.gen("x", timeout=0.02),
        lambda: rm.gen("x", timeout=0.02, n=2),
        lambda: rm.gen("x", timeout=0.02, retries=3),
        lambda: rm.select("x", ["one two", "b"], timeout=0.02),
    ],
)
def test_a_step_that_takes_too_long_is_aborted(step):
    backend = Holding(lambda request: "one two")

    program = program_of("Count: " + step())
    state = program.run(backend=backend)
    with pytest.raises(rm.ProgramError, match=r"longer than 0\.02 s") as failed:
        state["x"]
    assert isinstance(failed.value.__cause__, RequestTimeout)
    assert failed.value.prompt == "Count: "
    assert backend.aborted == backend.most
    assert backend.holding == 0


async def test_an_async_program_goes_on_after_a_time_out():
    backend = Holding(["one two", "three"])

    @rm.function
    async def program(s):
        hasty = s.fork(1)[0]
        hasty += "Count: " + rm.gen("x", timeout=0.02)
        with pytest.raises(rm.ProgramError):
            await hasty.aget("x")
        backend.release.set()
        s += "Count: " + rm.gen("x")
        return await s.aget("x")

    assert (await program.run(backend=backend)).ret_value == "three"


# --- prompts ------------------------------------------------------------------------------------


def test_the_prompt_of_any_call():
    @rm.function
    def program(s):
        s += "Pick: " + rm.select("pick", ["a", "b"]) + ". "
        for fork in s.fork(2):
            fork += "Fork: " + rm.gen("x")
        s["given"] = 3
        s += "End: " + rm.gen("end", schema=int)

    state = program.run(backend=rm.ScriptedBackend({"pick": "b", "x": "1", "end": "none"}, strict=False))
    assert state.prompt_of("pick") == "Pick: "
    assert state.prompt_of("end") == "Pick: b. End: "
    assert state.trace.children[0].prompt == "Pick: "
    with pytest.raises(rm.ProgramError, match="no prompt"):
        state.prompt_of("given")
    with pytest.raises(KeyError):
        state.prompt_of("nothing")


async def test_the_prompt_is_there_while_it_runs():
    backend = Holding(["one two"])

    @rm.function
    async def program(s):
        s += "Count: " + rm.gen("x")
        await asyncio.to_thread(backend.started.block)
        prompt = s.trace.children[0].prompt
        backend.release.set()
        await s.wait()
        return prompt, s.prompt_of("x")

    assert (await program.run(backend=backend)).ret_value == ("Count: ", "Count: ")


def test_a_rejection_shows_the_value_and_the_attempts():
    def small(value):
        assert value < 5, "too large"

    @rm.function
    def program(s, retries):
        s += "q" + rm.gen("x", schema=int, validate=small, retries=retries)

    once = program.run(0, backend=rm.ScriptedBackend(["9"])).error()
    assert "validate rejected 9: too large" in str(once)
    last = program.run(2, backend=rm.ScriptedBackend(["9", "8", "7"])).error()
    assert "validate rejected 7 in the last of 3 attempts: too large" in str(last)
    assert isinstance(last.__cause__, AssertionError)


def test_an_error_of_the_whole_output_names_no_place():
    """An endpoint may put its JSON into a fence."""
    with pytest.raises(pydantic.ValidationError) as failed:
        Trip.model_validate_json("```json\n{}\n```")
    assert describe(failed.value).startswith("Invalid JSON: ")
