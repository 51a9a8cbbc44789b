"""Programs and `ramify chat` on an engine that bounds the output tokens of a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ramify as rm
from ramify.cli.chat import Chat
from ramify.sampling_params import SamplingParams
from tests.lang.engines import OPTIONS

pytestmark = pytest.mark.slow
MOST = 20


@pytest.fixture(scope="module")
def bounded(model_folder: Path) -> Iterator[rm.Engine]:
    with rm.Engine(str(model_folder), max_output_tokens=MOST, **OPTIONS) as engine:
        yield engine


@rm.function
def whole(s: rm.ProgramState) -> None:
    s += "Once" + rm.gen("x", ignore_eos=True)


@rm.function
def turn(s: rm.ProgramState, most: int | None = None) -> None:
    s += rm.user("Hi.") + rm.assistant(rm.gen("x", most, ignore_eos=True))


def test_the_default_of_a_gen_is_cut_to_the_bound(bounded: rm.Engine) -> None:
    for program in (whole, turn):
        state = program.run(backend=bounded)
        assert state.get_meta_info("x")["finish_reason"] == {"type": "length", "length": MOST}


def test_the_default_of_a_gen_is_cut_to_the_room_in_the_context(bounded: rm.Engine) -> None:
    room = MOST // 2
    prompt = "a" * (16384 - room)

    @rm.function
    def long(s: rm.ProgramState) -> None:
        s += prompt + rm.gen("x", ignore_eos=True, token_healing=False)

    assert long.run(backend=bounded).usage.completion_tokens == room


def test_a_number_that_the_program_names_is_refused_over_the_bound(bounded: rm.Engine) -> None:
    assert turn.run(most=MOST, backend=bounded).usage.completion_tokens == MOST
    for state in (turn.run(most=500, backend=bounded), whole.run(max_tokens=500, backend=bounded)):
        with pytest.raises(rm.ProgramError, match=r"requested 500 .* may have 20 here"):
            state["x"]


def test_an_answer_that_the_engine_cuts_does_not_exceed_the_limits_of_the_program(bounded: rm.Engine) -> None:
    assert whole.run(max_total_tokens=100, backend=bounded).error() is None
    with pytest.raises(rm.ProgramError, match=f"max_total_tokens={MOST} of the run"):
        whole.run(max_total_tokens=MOST, backend=bounded)["x"]


def test_answers_of_a_chat_are_cut(bounded: rm.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    Chat(bounded, SamplingParams(max_tokens=512, temperature=0.0)).converse(iter(["Hi."]))
    told = f"The answer was cut after {MOST} tokens (the model or the server allows no more).\n"
    assert capsys.readouterr().err == told
