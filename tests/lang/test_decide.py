"""`decide` in programs: the place of questions, requests that carry several, errors, traces, and replays."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import traceback
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel, Field

import ramify as rm
from ramify.answers import AnswerStore
from ramify.decisions.trained import Other
from ramify.errors import BudgetExceeded, InvalidRequest, UnsupportedField, UnsupportedNode
from ramify.lang.program import decisions
from ramify.lang.trace.report import report_data
from ramify.questions import Calibration, DecisionScores, Temperature
from tests.lang.chat_templates import pieces_of
from tests.lang.compiling import line_of
from tests.lang.steps import cause, program_of

URGENT = rm.decide("urgent", bool, "Is it urgent?")
TEAM = rm.decide("team", {"billing": "invoices", "returns": "goods sent back"}, "Which team?")
RISK = rm.decide("risk", Annotated[int, rm.Levels("low", "mid", "high")], "How risky is it?")
SCRIPT: dict[str, Any] = {"urgent": True, "team": {"billing": 0.2, "returns": 0.6}, "risk": 2}


class Ticket(BaseModel):
    urgent: bool = Field(description="Is it urgent?")
    risk: Annotated[int, rm.Levels("low", "mid", "high")] = Field(description="How risky is it?")


def asked(backend: Any) -> list[list[str]]:
    """The questions of each request."""
    return [[one.instructions for one in sent.decide.questions] for sent in backend.requests if sent.decide]


# --- results ---


def test_a_decision_has_the_scripted_probabilities():
    state = program_of("Order 7.", URGENT, TEAM, RISK).run(backend=rm.ScriptedBackend(SCRIPT))
    urgent, team, risk = state["urgent"], state["team"], state["risk"]
    assert (urgent.value, urgent.probabilities) == (True, pytest.approx({True: 1.0, False: 0.0}))
    assert team.value == "returns"
    assert team.probabilities == pytest.approx({"billing": 0.25, "returns": 0.75})
    assert (team.option_mass, team.confidence) == (pytest.approx(0.8), pytest.approx(0.5))
    assert (risk.value, risk.score) == (2, 2.0)
    assert state.text() == "Order 7."
    assert state.get("urgent", bool) is True
    assert state.get_meta_info("team")["option_mass"] == team.option_mass


def test_a_model_is_an_instance_and_a_decision_for_each_field():
    backend = rm.ScriptedBackend({"ticket": {"urgent": False, "risk": "mid"}})
    found = program_of("Order 7.", rm.decide("ticket", Ticket)).run(backend=backend)["ticket"]
    assert found.value == Ticket(urgent=False, risk=1)
    assert found["risk"].probabilities == pytest.approx({0: 0.0, 1: 1.0, 2: 0.0})
    assert found.confidence == {"urgent": found["urgent"].confidence, "risk": found["risk"].confidence}
    assert found.layout == found.to_dict()["layout"] == dict.fromkeys(found, found["risk"].layout)
    assert found.temperature == found.to_dict()["temperature"] == {"urgent": 1.0, "risk": 1.0}
    assert asked(backend) == [["Is it urgent?", "How risky is it?"]]


def test_a_validator_of_the_model_fails_its_own_step():
    class Strict(BaseModel):
        risk: Annotated[int, Field(le=1), rm.Levels("low", "mid", "high")] = Field(description="How risky?")

    state = program_of(URGENT, rm.decide("strict", Strict)).run(
        backend=rm.ScriptedBackend({"urgent": True, "strict": {"risk": 2}})
    )
    assert state["urgent"].value is True
    with pytest.raises(rm.ProgramError, match="decide 'strict'"):
        state["strict"]


def test_append_puts_the_value_into_the_text():
    step = rm.decide("team", ["billing", "returns"], "Which team?", append=True)
    program = program_of(rm.user("Order 7."), rm.assistant("It goes to " + step + "."), rm.user("Why?"))
    state = program.run(backend=rm.ScriptedBackend({"team": "returns"}))
    assert "It goes to returns.<|im_end|>" in state.text()
    assert "Which team?" not in state.text()


# --- the place of the question ---

CLOSING = "<|im_end|>\n<|im_start|>assistant\n"
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("items", "state", "opening"),
    [
        ([rm.user("Hi.")], f"{USER}Hi.", "\n\n"),
        ([rm.user_begin(), "Hi."], f"{USER}Hi.", "\n\n"),
        ([rm.user_begin()], USER, ""),
        ([], USER, ""),
        ([rm.user("Hi."), rm.assistant_begin()], f"{USER}Hi.", "\n\n"),
        (
            [rm.user("Hi."), rm.assistant("Ho.")],
            f"{USER}Hi.<|im_end|>\n{ASSISTANT}Ho.<|im_end|>\n{USER}",
            "",
        ),
        (
            [rm.user("Hi."), rm.assistant_begin(), "It is"],
            f"{USER}Hi.<|im_end|>\n{ASSISTANT}It is<|im_end|>\n{USER}",
            "",
        ),
    ],
)
def test_in_a_chat_the_question_is_in_a_user_turn(items, state, opening):
    backend = rm.ScriptedBackend(SCRIPT)
    done = program_of(*items, URGENT).run(backend=backend)
    assert done["urgent"].value is True
    decide = backend.requests[0].decide
    assert backend.prompt_text(backend.requests[0]) == state
    assert (decide.opening, decide.closing) == (opening, CLOSING)
    assert "urgent" not in done.text()


@pytest.mark.parametrize("chat_format", [None, "chatml"])
def test_behind_text_without_turns_the_question_is_plain(chat_format):
    backend = rm.ScriptedBackend(SCRIPT, **({} if chat_format else {"chat_format": None}))
    program_of("Order 7.", URGENT).run(backend=backend)
    (request,) = backend.requests
    assert request.prompt == ("Order 7.",)
    assert (request.decide.opening, request.decide.closing) == (None, None)


@pytest.mark.parametrize("layout", ["decider-1", Other("a Kev checkpoint", "kev_config.json").layout])
def test_a_trained_layout_is_given_messages(layout):
    """So is one that is not supported, which the tokenizer refuses by name."""

    class Trained(rm.ScriptedBackend):
        async def info(self):
            return msgspec.structs.replace(await super().info(), trained_layout=layout)

        def _refuse_unsupported(self, request):
            """The script takes messages here."""

    backend = Trained(SCRIPT)
    program_of(rm.user("Hi."), URGENT).run(backend=backend)
    program_of("Hi.", URGENT).run(backend=backend)
    program_of(rm.user("Hi."), rm.decide("urgent", bool, "Is it?", layout="labels")).run(backend=backend)
    chat, plain, labels = backend.requests
    assert [(turn.role, turn.content) for turn in chat.chat] == [("user", "Hi.")]
    assert (chat.decide.opening, chat.prompt) == (None, ())
    assert (plain.chat, plain.prompt, plain.decide.opening) == (None, ("Hi.",), None)
    assert (labels.chat, labels.decide.opening) == (None, "\n\n")


def test_a_backend_of_whole_messages_gets_them():
    class Messages(rm.ScriptedBackend):
        takes_messages = True

        def _refuse_unsupported(self, request):
            """The script takes messages here."""

    backend = Messages(SCRIPT)
    state = program_of(rm.user("Hi."), rm.assistant("Ho."), rm.user_begin(), "So?", URGENT).run(
        backend=backend
    )
    assert state["urgent"].value is True
    (request,) = backend.requests
    assert [(turn.role, turn.content) for turn in request.chat] == [
        ("user", "Hi."),
        ("assistant", "Ho."),
        ("user", "So?"),
    ]
    assert request.decide.opening is None


def test_thoughts_are_closed_before_the_answer():
    form = pieces_of("qwen3")
    backend = rm.ScriptedBackend(SCRIPT, chat_format=form)
    program_of(rm.user("Hi."), URGENT).run(backend=backend)
    closing = backend.requests[0].decide.closing
    assert closing.endswith(form.thinking.off)
    assert form.thinking.off.startswith("<think>")


def test_a_later_step_has_the_same_prefix_as_without_the_question():
    backend = rm.ScriptedBackend({**SCRIPT, "reply": "Fine."})
    program_of(rm.user("Hi."), URGENT, rm.assistant(rm.gen("reply"))).run(backend=backend)
    assert backend.prompt_text(backend.requests[1]) == f"{USER}Hi.{CLOSING}"


# --- several decisions in a request ---


@pytest.fixture
def held(monkeypatch):
    """Decisions wait for more without end, unless something shows that no more come."""
    monkeypatch.setattr(decisions, "HOLD_S", 60.0)


@pytest.mark.parametrize("run", ["plain", "stream", "async"])
def test_decisions_in_a_row_are_one_request(held, run):
    def body(s):
        s += rm.user("Order 7.")
        s += URGENT
        s += TEAM + RISK

    async def async_body(s):
        body(s)
        return (await s.aget("risk")).value

    backend = rm.ScriptedBackend(SCRIPT)
    if run == "async":
        state = asyncio.run(rm.function(async_body).run(backend=backend))
    else:
        state = rm.function(body).run(backend=backend, stream=run == "stream")
    assert [state[name].value for name in ("urgent", "team", "risk")] == [True, "returns", 2]
    assert asked(backend) == [["Is it urgent?", "Which team?", "How risky is it?"]]
    assert state.trace.requests == 1
    assert state.usage.prompt_tokens == sum(call.own_usage.prompt_tokens for call in state.trace.walk())


@pytest.mark.parametrize(
    ("between", "second"),
    [
        ([" And."], TEAM),
        ([rm.gen("x")], TEAM),
        ([], rm.decide("team", ["billing", "returns"], "Which team?", layout="labels")),
        ([], rm.decide("team", ["billing", "returns"], "Which team?", normalise="mean")),
        ([], rm.decide("team", ["billing", "returns"], "Which team?", priority=3)),
        ([], rm.decide("team", ["billing", "returns"], "Which team?", timeout=9.0)),
    ],
)
def test_what_lies_between_or_differs_makes_two_requests(held, between, second):
    backend = rm.ScriptedBackend({**SCRIPT, "x": "y"})
    state = program_of("Order 7.", URGENT, *between, second).run(backend=backend)
    assert state["team"].value == "returns"
    assert asked(backend) == [["Is it urgent?"], ["Which team?"]]


def test_an_appended_value_is_in_the_state_of_the_next(held):
    backend = rm.ScriptedBackend(SCRIPT)
    step = rm.decide("urgent", bool, "Is it urgent?", append=True)
    program_of("Urgent: ", step, TEAM).run(backend=backend)
    assert [request.prompt for request in backend.requests] == [("Urgent: ",), ("Urgent: True",)]


def test_each_backend_gets_its_own(held):
    small, big = rm.ScriptedBackend(SCRIPT), rm.ScriptedBackend(SCRIPT)
    elsewhere = rm.decide("risk", ["low", "high"], "How risky is it?", backend="big")
    big_script = rm.ScriptedBackend({"risk": "high"})
    state = program_of(URGENT, elsewhere).run(backend=rm.Router({"small": small, "big": big_script}))
    assert state["risk"].value == "high"
    assert (len(asked(small)), len(asked(big_script)), asked(big)) == (1, 1, [])


def test_reading_one_sends_it(held):
    """Without a reason to send, the run would take a minute."""

    @rm.function
    def program(s):
        s += "Order 7."
        s += URGENT
        if s["urgent"].value:
            s += TEAM
        views = s.fork(2)
        views += URGENT
        views.join()
        s["urgent"]
        s += RISK

    backend = rm.ScriptedBackend(SCRIPT)
    done = threading.Thread(target=program.run, kwargs={"backend": backend}, daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive()
    assert [len(one) for one in asked(backend)] == [1, 1, 1, 1, 1]


def test_awaiting_sends_all_of_a_branch(held):
    @rm.function
    async def program(s):
        async def one(branch):
            branch += URGENT
            branch += TEAM
            return await branch.aget("team")

        s += "Order 7."
        return await asyncio.gather(*map(one, s.fork(3)))

    backend = rm.ScriptedBackend(SCRIPT)
    asyncio.run(asyncio.wait_for(program.run(backend=backend), 20))
    assert [len(one) for one in asked(backend)] == [2, 2, 2]


def test_a_decision_that_nobody_reads_is_not_held_long():
    @rm.function
    def program(s):
        s += URGENT
        return sent.wait(10)

    sent = threading.Event()

    class Noting(rm.ScriptedBackend):
        async def generate(self, request):
            sent.set()
            async for chunk in super().generate(request):
                yield chunk

    assert program.run(backend=Noting(SCRIPT)).ret_value, "sent while the body still runs"


def test_a_decision_that_waits_for_more_is_cancelled(held):
    @rm.function
    def program(s):
        s += URGENT
        s += TEAM
        begun.set()
        end.wait(20)

    begun, end = threading.Event(), threading.Event()
    backend = rm.ScriptedBackend(SCRIPT)
    state = program.run(backend=backend, stream=True)
    assert begun.wait(10)
    state.cancel()
    for name in ("urgent", "team"):
        with pytest.raises(rm.ProgramError, match="cancelled"):
            state[name]
    assert backend.requests == []
    end.set()


def test_an_appended_value_is_streamed():
    step = rm.decide("team", ["billing", "returns"], "Which team?", append=True)
    state = program_of("To ", step, ".").run(backend=rm.ScriptedBackend(SCRIPT), stream=True)
    assert "".join(state.text_iter()) == "To returns."


def test_more_questions_than_a_request_takes_are_two_requests(held, monkeypatch):
    monkeypatch.setattr(decisions, "MAX_QUESTIONS", 2)
    backend = rm.ScriptedBackend(SCRIPT)
    program_of("Order 7.", URGENT, TEAM, RISK).run(backend=backend)
    assert [len(one) for one in asked(backend)] == [2, 1]


def test_a_request_of_several_is_one_call_of_a_limit(held):
    backend = rm.ScriptedBackend(SCRIPT)
    assert program_of(URGENT, TEAM).run(backend=backend, max_calls=1).error() is None
    failed = program_of(URGENT, " ", TEAM).run(backend=backend, max_calls=1)
    assert isinstance(cause(failed), BudgetExceeded)


# --- errors ---


@pytest.mark.parametrize("script", [{"urgent": True, "team": "retuns"}, [True, "retuns"]])
def test_an_answer_that_is_no_option_fails_its_own_step(held, script):
    @rm.function
    def program(s):
        s += URGENT
        s += rm.decide("team", ["billing", "returns"], "Which team?")  # the script is wrong here

    state = program.run(backend=rm.ScriptedBackend(script, strict=False))
    assert state["urgent"].value is True
    with pytest.raises(rm.ProgramError, match="Did you mean returns") as failed:
        state["team"]
    assert failed.value.line == line_of(__file__, "the script is wrong here")


def test_an_error_of_a_script_is_told_once(held):
    program = program_of(URGENT, TEAM)
    with pytest.raises(rm.NotScripted) as failed:
        program.run(backend=rm.ScriptedBackend({"urgent": "ja", "team": "returns"}))
    assert "".join(traceback.format_exception(failed.value)).count("The script decides for 'ja'") <= 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"urgent": True}, "It has nothing for risk"),
        ({"urgent": True, "risks": 1}, "risks, which is no field to decide.*Did you mean risk"),
        ({"urgent": True, "risk": 0, "team": 1}, "It has team, which"),
        ({"urgent": {True: "likely"}, "risk": 0}, "probabilities have a sum"),
        (True, "nothing for urgent, risk"),
    ],
)
def test_a_script_with_other_fields_or_values_is_told_which(answer, words):
    with pytest.raises(rm.NotScripted, match=words):
        program_of(rm.decide("ticket", Ticket)).run(backend=rm.ScriptedBackend({"ticket": answer}))


class Refusing(rm.ScriptedBackend):
    """Refuses a question, as a tokenizer does whose options have the same tokens."""

    def __init__(self, answers, error=InvalidRequest, *, names_it=True):
        super().__init__(answers)
        self.error, self.names_it = error, names_it
        self.sizes = []

    async def generate(self, request):
        self.sizes.append(len(request.decide.questions))
        for place, question in enumerate(request.decide.questions):
            if question.instructions == "Which team?":
                where = f"decide.questions[{place}].options[1]" if self.names_it else None
                raise self.error("Two options have the same tokens.", field=where)
        async for chunk in super().generate(request):
            yield chunk


@pytest.mark.parametrize("error", [InvalidRequest, UnsupportedNode])
def test_a_refused_question_fails_its_own_step_alone(held, error):
    state = program_of(URGENT, TEAM, RISK).run(backend=Refusing(SCRIPT, error))
    assert state["urgent"].value is True
    with pytest.raises(rm.ProgramError, match=f"decide 'team' at {re.escape(TEAM.line)} failed"):
        state["team"]
    with pytest.raises(rm.ProgramError, match="'risk' was not run, because an earlier step failed"):
        state["risk"]


@pytest.mark.parametrize(
    ("place", "names_it", "sizes"),
    [
        (15, True, [16, 15, 1]),
        (6, True, [16, 6, 10]),
        (0, True, [16]),
        (15, False, [16, 8, 8, 4, 4, 2, 2, 1, 1]),
        (0, False, [16, 8, 4, 2, 1]),
    ],
)
def test_a_refused_question_costs_few_requests(held, place, names_it, sizes):
    steps = [rm.decide(f"q{number}", bool, f"Is it {number}?") for number in range(16)]
    steps[place] = TEAM
    backend = Refusing(dict.fromkeys([step.variable for step in steps], True), names_it=names_it)
    state = program_of(*steps).run(backend=backend)
    assert all(state[f"q{number}"].value for number in range(place))
    with pytest.raises(rm.ProgramError, match=f"decide 'team' at {re.escape(TEAM.line)} failed"):
        state["team"]
    assert backend.sizes == sizes


def test_decisions_are_held_while_the_body_appends_more(monkeypatch):
    monkeypatch.setattr(decisions, "HOLD_S", 2.0)

    @rm.function
    def program(s):
        for number in range(5):
            s += rm.decide(f"q{number}", bool, "Is it?")
            time.sleep(0.5)

    backend = rm.ScriptedBackend({f"q{number}": True for number in range(5)})
    program.run(backend=backend)
    assert [len(one) for one in asked(backend)] == [5]


def test_a_program_recovers_from_a_refused_question(held):
    @rm.function
    def program(s):
        s += "Order 7."
        s += URGENT
        s += TEAM
        s.sync()
        s.recover()
        s += RISK

    state = program.run(backend=Refusing(SCRIPT))
    assert (state["risk"].value, state.error(), state.text()) == (2, None, "Order 7.")


def test_a_backend_that_answers_no_questions_is_named():
    class Old(rm.ScriptedBackend):
        async def generate(self, request):
            async for chunk in super().generate(request):
                yield msgspec.structs.replace(chunk, decisions=None)

    state = program_of(URGENT).run(backend=Old(SCRIPT))
    with pytest.raises(rm.ProgramError, match="Old answered no questions") as failed:
        state["urgent"]
    assert isinstance(failed.value, UnsupportedNode)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"layout": "labelled"}, "layout"),
        ({"end": "stop"}, "end"),
        ({"normalise": "avg"}, "normalise"),
        ({"permutations": 0}, "permutations"),
        ({"timeout": -1.0}, "timeout"),
        ({"choices": ["a", "b"]}, "choices"),
    ],
)
def test_wrong_options_are_refused_at_once(options, field):
    with pytest.raises(InvalidRequest) as refused:
        rm.decide("x", bool, "Is it?", **options)
    assert refused.value.field == field


def test_a_decision_does_not_think():
    with pytest.raises(UnsupportedNode):
        rm.separate_reasoning(URGENT, "qwen3")


# --- normalising and calibration ---


def test_pmi_asks_behind_an_empty_state_as_well():
    class Biased(rm.ScriptedBackend):
        """Behind an empty state, billing has 3 times the probability of returns."""

        async def generate(self, request):
            async for chunk in super().generate(request):
                if self.prompt_text(request) == USER:
                    biased = rm.ScriptedBackend([{"billing": 0.75, "returns": 0.25}])
                    bare = msgspec.structs.replace(request, prompt=("x",))
                    with_bias = [part async for part in _outside(biased, bare)]
                    chunk = msgspec.structs.replace(chunk, decisions=with_bias[0].decisions)
                yield chunk

    step = rm.decide("team", ["billing", "returns"], "Which team?", normalise="pmi")
    backend = Biased({"team": {"billing": 0.5, "returns": 0.5}})
    state = program_of(rm.user("Order 7."), step).run(backend=backend)
    assert state["team"].probabilities == pytest.approx({"billing": 0.25, "returns": 0.75})
    assert [backend.prompt_text(one) for one in backend.requests] == [f"{USER}Order 7.", USER]
    assert state.trace.requests == 2


def test_the_empty_state_of_plain_text_is_plain_text():
    step = rm.decide("team", ["billing", "returns"], "Which team?", normalise="pmi")
    backend = rm.ScriptedBackend([{"billing": 0.5, "returns": 0.5}] * 2)
    program_of("Order 7.", step).run(backend=backend)
    assert [backend.prompt_text(one) for one in backend.requests] == ["Order 7.", ""]


async def _outside(backend, request):
    """The answer to a request that no step has sent."""
    from ramify.lang.trace.calls import CURRENT

    token = CURRENT.set(None)
    try:
        async for chunk in backend.generate(request):
            yield chunk
    finally:
        CURRENT.reset(token)


def test_the_models_calibration_is_applied():
    class Calibrated(rm.ScriptedBackend):
        async def info(self):
            temperatures = {"choice:2": Temperature(base=2.0)}
            calibration = Calibration(model="", layout="scripted-1", temperatures=temperatures)
            return msgspec.structs.replace(await super().info(), calibration=calibration)

    step = rm.decide("team", ["billing", "returns"], "Which team?")
    state = program_of(step).run(backend=Calibrated({"team": {"billing": 0.1, "returns": 0.9}}))
    assert state["team"].probabilities == pytest.approx({"billing": 0.25, "returns": 0.75})  # sqrt(9) = 3
    assert state["team"].temperature == state["team"].to_dict()["temperature"] == 2
    # Neither for other orders of the options than those that it was fitted to, nor for an adapter.
    for options in ({"permutations": 2}, {"lora": "poems"}):
        other = rm.decide("team", ["billing", "returns"], "Which team?", **options)
        state = program_of(other).run(backend=Calibrated({"team": {"billing": 0.1, "returns": 0.9}}))
        assert state["team"].probabilities == pytest.approx({"billing": 0.1, "returns": 0.9})
        assert state["team"].temperature == 1


# --- traces, recordings, stores, batches ---


def test_the_trace_shows_each_decision(held):
    state = program_of("Order 7.", URGENT, rm.decide("ticket", Ticket)).run(
        backend=rm.ScriptedBackend(
            {"urgent": {True: 0.0036, False: 0.0004}, "ticket": {"urgent": False, "risk": 0}}
        )
    )
    first, second = state.trace.children
    sure = "1.00 (confidence 1.00, option mass 1)"
    for shown in (str(state.trace), state.trace._repr_html_()):
        assert "True 0.90 (confidence 0.80, option mass 0.004)" in shown
        assert f"urgent False {sure}, risk low {sure}" in shown
    assert (first.sent, second.sent, second.merged) == (True, False, True)
    told = state.trace.to_dict()["children"]
    assert told[0]["decisions"][""]["probabilities"] == pytest.approx({"true": 0.9, "false": 0.1})
    data = report_data(state.trace)["root"]["children"]
    assert [row[0] for row in data[1]["decisions"]] == ["urgent", "risk"]
    assert data[0]["decisions"][0][5] == [("True", pytest.approx(0.9)), ("False", pytest.approx(0.1))]
    assert json.loads(json.dumps(state.trace.to_dict()))


def test_the_report_shows_the_question_as_it_was_asked():
    class Verbatim(rm.ScriptedBackend):
        async def generate(self, request):
            async for chunk in super().generate(request):
                found = [
                    msgspec.structs.replace(one, layout="verbatim-1") for one in chunk.decisions.questions
                ]
                yield msgspec.structs.replace(chunk, decisions=DecisionScores(questions=tuple(found)))

    for backend, question in (
        (rm.ScriptedBackend(SCRIPT), "Which team?"),
        (
            Verbatim(SCRIPT),
            "Which team?\n- billing: invoices\n- returns: goods sent back\nAnswer with exactly",
        ),
    ):
        state = program_of("Order 7.", TEAM).run(backend=backend)
        (row,) = report_data(state.trace)["root"]["children"][0]["decisions"]
        assert row[6].startswith(question)


def test_a_recording_is_replayed(tmp_path):
    program = program_of(rm.user("Order 7."), URGENT, TEAM, rm.assistant(rm.gen("reply")))
    recorder = rm.RecordingBackend(rm.ScriptedBackend({**SCRIPT, "reply": "Ok."}), tmp_path / "run.jsonl")
    first = program.run(backend=recorder)
    replayed = rm.ReplayBackend(tmp_path / "run.jsonl")
    second = program.run(backend=replayed)
    assert [second[name] for name in ("urgent", "team")] == [first[name] for name in ("urgent", "team")]
    assert (second.text(), replayed.unused) == (first.text(), [])


def test_a_recording_is_replayed_whichever_decisions_are_together(tmp_path, monkeypatch):
    apart = program_of("Order 7.", URGENT, TEAM, RISK)
    recorder = rm.RecordingBackend(rm.ScriptedBackend(SCRIPT), tmp_path / "run.jsonl")
    first = apart.run(backend=recorder)
    monkeypatch.setattr(decisions, "MAX_QUESTIONS", 2)  # two requests in place of one
    replayed = rm.ReplayBackend(tmp_path / "run.jsonl")
    second = apart.run(backend=replayed)
    assert [second[name] for name in SCRIPT] == [first[name] for name in SCRIPT]
    assert replayed.unused == []
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    with pytest.raises(rm.NotRecorded, match="repeats"):
        raise apart.run(backend=replayed).error().__cause__


def test_a_recorded_refusal_is_replayed(tmp_path):
    program = program_of(URGENT, TEAM, RISK)
    first = program.run(backend=rm.RecordingBackend(Refusing(SCRIPT), tmp_path / "run.jsonl"))
    replayed = rm.ReplayBackend(tmp_path / "run.jsonl")
    second = program.run(backend=replayed)
    assert second["urgent"] == first["urgent"]
    assert str(second.error()) == str(first.error())
    assert replayed.unused == []


def test_a_probability_of_zero_is_replayed(tmp_path):
    recorder = rm.RecordingBackend(rm.ScriptedBackend([{True: 1.0}]), tmp_path / "run.jsonl")
    first = program_of(URGENT).run(backend=recorder)
    again = program_of(URGENT).run(backend=rm.ReplayBackend(tmp_path / "run.jsonl"))
    assert again["urgent"] == first["urgent"]
    assert again["urgent"].probabilities[False] == pytest.approx(0.0)


def test_a_stored_answer_needs_no_request(tmp_path):
    class Stored(rm.ScriptedBackend):
        def __init__(self, answers):
            super().__init__(answers)
            self.answers = AnswerStore(tmp_path / "answers.db")

        async def info(self):
            return msgspec.structs.replace(await super().info(), fingerprint="one")

    first = program_of("Order 7.", URGENT, TEAM).run(backend=Stored(SCRIPT))
    backend = Stored({})
    second = program_of("Order 7.", URGENT, TEAM).run(backend=backend)
    assert second["team"] == first["team"]
    assert backend.requests == []
    other = Stored({"team": "billing"})
    assert program_of("Order 8.", TEAM).run(backend=other)["team"].value == "billing"


def test_a_batch_writes_decisions_as_json(tmp_path):
    @rm.function
    def program(s, text):
        s += rm.user(text)
        s += URGENT + rm.decide("ticket", Ticket)
        return s["urgent"].value

    def answer(request):
        late = "late" in request.prompt[0]
        return late if len(request.decide.questions) == 1 else {"urgent": late, "risk": 2}

    rows = [{"text": "late"}, {"text": "fine"}]
    summary = program.run_batch(rows, out=tmp_path / "out.jsonl", backend=rm.ScriptedBackend(answer))
    assert summary.failed == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {line["returned"]: line["outputs"] for line in lines if "outputs" in line}
    assert found[True]["urgent"]["probabilities"] == pytest.approx({"true": 1.0, "false": 0.0})
    assert found[False]["ticket"]["value"] == {"urgent": False, "risk": 2}


# --- decisions as calls of their own ---

QUESTIONS = {"urgent": (bool, "Is it urgent?"), "team": (["billing", "returns"], "Which team?")}


def test_a_call_asks_about_a_text():
    backend = rm.ScriptedBackend(SCRIPT)
    found = rm.decide("Order 7 arrived broken.", QUESTIONS, backend=backend)
    assert {name: one.value for name, one in found.items()} == {"urgent": True, "team": "returns"}
    assert asked(backend) == [["Is it urgent?", "Which team?"]]
    assert backend.prompt_text(backend.requests[0]) == f"{USER}Order 7 arrived broken."
    plain = rm.ScriptedBackend(SCRIPT, chat_format=None)
    rm.decide("Order 7.", QUESTIONS, backend=plain, permutations=2)
    assert plain.requests[0].prompt == ("Order 7.",)
    assert plain.requests[0].decide.permutations == 2


def test_an_async_call_asks_about_messages():
    backend = rm.ScriptedBackend(SCRIPT)
    chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    found = asyncio.run(rm.adecide(chat, QUESTIONS, backend=backend, layout="labels"))
    assert found["team"].value == "returns"
    assert backend.prompt_text(backend.requests[0]).endswith(f"Ho.<|im_end|>\n{USER}")
    assert backend.requests[0].decide.layout == "labels"


def test_a_call_about_a_model_returns_its_decisions():
    backend = rm.ScriptedBackend([{"urgent": True, "risk": 1}])
    found = rm.decide("Order 7 arrived broken.", {"ticket": Ticket}, backend=backend)["ticket"]
    assert found.value == Ticket(urgent=True, risk=1)
    assert list(found) == ["urgent", "risk"]


@pytest.mark.parametrize("state", ["refund", "I want a refund"])
def test_the_text_of_a_state_does_not_make_a_step(state):
    assert rm.decide(state, QUESTIONS, backend=rm.ScriptedBackend(SCRIPT))["urgent"].value is True


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        (("refund", {"a": "Is it broken?"}), "kind", r"\{'a': \(bool, 'Is it broken\?'\)\}"),
        (("It is broken.", {"a": "Is it broken?"}), "kind", r"\{'a': \(bool, 'Is it broken\?'\)\}"),
        (("team", {"billing": None}), "kind", r"decide\(name, options, instructions\)"),
        (("It is broken.", [(bool, "Is it broken?")]), "name", r"decide\(state, \{name"),
        (("It is broken.", bool, "Is it broken?"), "name", r"decide\(state, \{name"),
        (("It is broken.", Ticket), "name", r"decide\(state, \{name"),
        (("It is broken.", {"a": "Is it broken?", "b": bool}), "a", r"\(bool, 'Is it broken\?'\)"),
        (("It is broken.", {"a": ("Is it broken?", bool)}), "a", "type comes first"),
        (("It is broken.", {1: (bool, "Is it broken?")}), "questions", "a name is a text"),
    ],
)
def test_a_call_that_is_written_wrong_is_no_step(arguments, field, words):
    with pytest.raises(InvalidRequest, match=words) as refused:
        rm.decide(*arguments)
    assert refused.value.field == field


def test_options_without_instructions_are_named_choices():
    step = rm.decide("team", choices={"billing": "invoices", "returns": ""})
    assert step.asked[""].values == ("billing", "returns")
    assert rm.decide("urgent", {True: "someone waits", False: ""}).asked[""].values == (True, False)


def test_an_async_call_takes_a_mapping_only():
    with pytest.raises(InvalidRequest, match="mapping from names to types"):
        asyncio.run(rm.adecide("Order 7.", Ticket))


def test_a_call_in_a_program_is_in_its_trace():
    @rm.function
    def program(s):
        s += "x"
        return rm.decide("Order 7.", QUESTIONS, backend=backend)["team"].value

    backend = rm.ScriptedBackend(SCRIPT)
    state = program.run(backend=backend)
    assert (state.ret_value, state.trace.requests) == ("returns", 1)


@pytest.mark.parametrize(
    ("state", "questions", "error", "field"),
    [
        ("A text.", {}, InvalidRequest, "questions"),
        ([{"role": "user"}], QUESTIONS, UnsupportedField, "state[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], QUESTIONS, UnsupportedField, "state[0]"),
        ([{"role": "user", "content": "Hi."}], bool, InvalidRequest, "name"),
        ({"a": 1}, QUESTIONS, InvalidRequest, "state"),
    ],
)
def test_what_a_call_does_not_take_is_refused(state, questions, error, field):
    with pytest.raises(error) as refused:
        rm.decide(state, questions, backend=rm.ScriptedBackend(SCRIPT))
    assert refused.value.field == field
