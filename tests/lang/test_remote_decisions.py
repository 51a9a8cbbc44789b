"""Decisions of remote endpoints: probabilities as they were given, and nothing that was not."""

from __future__ import annotations

import contextlib
import json
import math

import msgspec
import pytest

import ramify as rm
from ramify.decisions.answers import answer as answered
from ramify.decisions.layouts import DEFAULT_INSTRUCTIONS
from ramify.errors import (
    BackendError,
    InvalidRequest,
    NotFound,
    UnsupportedField,
    UnsupportedNode,
    WorkerDied,
)
from ramify.lang.backends.decisions.apis import DECISION_APIS, openai_body, system_one_body
from ramify.lang.backends.replay import NotRecorded, RecordingBackend, ReplayBackend
from ramify.loop import wait
from ramify.messages import ChatMessage, Finish, Generate, TextChunk, ToolCall, Usage
from ramify.questions import (
    PREDICATE_OPTIONS,
    Decide,
    DecisionScores,
    FormScores,
    Option,
    Question,
    QuestionScores,
)
from ramify.sampling_params import SamplingParams
from tests.lang.remote import RawServer, ScriptedFrontend, answer, live_endpoint, raw_endpoint, raw_openai
from tests.lang.steps import program_of

TEAM = Question(
    kind="choice",
    instructions="Which team?",
    options=(Option(name="billing"), Option(name="returns", description="goods sent back")),
)

URGENT = Question(kind="predicate", instructions="Urgent?", options=PREDICATE_OPTIONS)
SPAM = Question(
    kind="predicate",
    instructions="Spam?",
    options=(Option(name="true", description="an advert"), Option(name="false")),
)
LEVELS = Question(
    kind="score",
    instructions="How bad?",
    options=(Option(name="low"), Option(name="mid", description="so so"), Option(name="high")),
)
CHAT = (
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="It broke."),
    ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="c1", name="look", arguments="{}"),)),
    ChatMessage(role="tool", content="a crack", tool_call_id="c1"),
)


def test_given_probabilities_are_the_answer_bit_for_bit():
    given = (0.1 + 0.2, 0.7)  # 0.30000000000000004; no logarithm is taken and undone
    scores = QuestionScores(layout="/decisions", probabilities=given)
    over_the_wire = msgspec.json.decode(msgspec.json.encode(scores), type=QuestionScores)
    found = answered(TEAM, over_the_wire)
    assert (found.probabilities, found.option_mass, found.layout) == (given, None, "/decisions")
    assert found.confidence == pytest.approx(0.4)
    told = answered(TEAM, msgspec.structs.replace(scores, option_mass=0.25))
    assert told.option_mass == 0.25


def test_what_given_probabilities_do_not_tell_is_refused():
    scores = QuestionScores(layout="/decisions", probabilities=(0.5, 0.5))
    with pytest.raises(UnsupportedField) as refused:
        answered(TEAM, scores, normalise="mean")
    assert refused.value.field == "normalise"
    with pytest.raises(BackendError, match="declined"):
        answered(TEAM, QuestionScores(layout="/decisions"))


# --- decision APIs ---


def asked(*questions, chat=CHAT, **fields):
    return Generate(
        rid="r",
        chat=chat,
        sampling=SamplingParams(max_tokens=0),
        decide=Decide(questions=questions, **fields),
    )


def decided(backend, request):
    """The last chunk of the answer."""

    async def chunks():
        async with contextlib.aclosing(backend.generate(request)) as found:
            return [chunk async for chunk in found]

    return wait(chunks())[-1]


def says(**routes):
    """A server's replies by the last part of the path; every other path is 404."""

    def reply(target):
        found = routes.get(target.rpartition("/")[2])
        return answer(b'{"detail": "Not Found"}', "404 Not Found") if found is None else found

    return reply


def data(**fields):
    return answer(json.dumps(fields).encode())


USAGE = {
    "input_tokens": 50,
    "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 30},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 50,
}


def test_openai_is_asked_in_its_form_and_read():
    answers = [
        {"type": "predicate", "name": None, "probability": 0.9},
        {
            "type": "choice",
            "choice": "returns",
            "confidence": 0.5,
            "probabilities": [
                {"value": "returns", "probability": 0.75},
                {"value": "billing", "probability": 0.25},
            ],
        },
        {
            "type": "score",
            "score": 1.1,
            "confidence": 0.2,
            "probabilities": [
                {"value": 0, "label": "low", "probability": 0.2},
                {"value": 1, "label": "mid", "probability": 0.5},
                {"value": 2, "label": "high", "probability": 0.3},
            ],
        },
        {
            "type": "choice",
            "choice": True,
            "confidence": 0.2,
            "probabilities": [{"value": True, "probability": 0.6}, {"value": False, "probability": 0.4}],
        },
    ]
    with raw_openai(says(decisions=data(answers=answers, model="m", usage=USAGE))) as (backend, server):
        chunk = decided(backend, asked(URGENT, TEAM, LEVELS, SPAM))
    (body,) = server.bodies
    assert body["input"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "It broke."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a crack"},
    ]
    assert body["questions"] == [
        {"type": "predicate", "instructions": "Urgent?"},
        {
            "type": "choice",
            "instructions": "Which team?",
            "choices": [{"value": "billing"}, {"value": "returns", "description": "goods sent back"}],
        },
        {
            "type": "score",
            "instructions": "How bad?",
            "levels": [{"label": "low"}, {"label": "mid", "description": "so so"}, {"label": "high"}],
        },
        {
            "type": "choice",
            "instructions": "Spam?",
            "choices": [{"value": True, "description": "an advert"}, {"value": False}],
        },
    ]
    found = [
        answered(question, scores)
        for question, scores in zip((URGENT, TEAM, LEVELS, SPAM), chunk.decisions.questions, strict=True)
    ]
    assert [one.probabilities for one in found] == [
        (0.9, 1.0 - 0.9),
        (0.25, 0.75),
        (0.2, 0.5, 0.3),
        (0.6, 0.4),
    ]
    assert [one.option_mass for one in found] == [None] * 4
    assert chunk.usage == Usage(prompt_tokens=50, cached_tokens=20)
    assert chunk.finish.reason == "length"


def test_a_question_without_instructions_is_asked_as_the_layouts_ask_it():
    question = msgspec.structs.replace(TEAM, instructions="")
    assert openai_body("x", [question])["questions"][0]["instructions"] == DEFAULT_INSTRUCTIONS["choice"]
    assert "instructions" not in system_one_body("x", [question])["questions"]["0"]


def test_a_refusal_of_one_question_leaves_the_others():
    answers = [{"type": "refusal", "name": None}, {"type": "predicate", "probability": 0.9}]
    with raw_openai(says(decisions=data(answers=answers))) as (backend, _):
        refused, given = decided(backend, asked(URGENT, URGENT)).decisions.questions
    assert answered(URGENT, given).probabilities[0] == 0.9
    with pytest.raises(BackendError, match="declined"):
        answered(URGENT, refused)


def test_option_mass_and_layout_of_a_ramify_server_are_kept():
    answers = [{"type": "predicate", "probability": 0.9, "option_mass": 0.5, "layout": "verbatim-1"}]
    with raw_openai(says(decisions=data(answers=answers))) as (backend, _):
        (scores,) = decided(backend, asked(URGENT)).decisions.questions
    assert (answered(URGENT, scores).option_mass, scores.layout) == (0.5, "verbatim-1")


def test_system_one_is_asked_where_there_are_no_decisions():
    answers = {
        "0": {"type": "noul", "noul": 0.9},
        "1": {"type": "choice", "choice": "returns", "probabilities": {"returns": 0.75, "billing": 0.25}},
        "2": {"type": "score", "score": 1.1, "probabilities": {"0": 0.2, "1": 0.5, "2": 0.3}},
        "3": {"type": "noul", "noul": 0.6},
    }
    usage = {"input_tokens": 50, "output_tokens": 1}
    masses = {"1": {"label_mass": 0.8, "argmax_is_label": True}}
    reply = says(systemone=data(model="m", answers=answers, usage=usage, diagnostics=masses))
    with raw_openai(reply) as (backend, server):
        chunk = decided(
            backend, asked(URGENT, TEAM, LEVELS, SPAM, chat=(ChatMessage(role="user", content="x"),))
        )
        decided(backend, asked(URGENT, TEAM, LEVELS, SPAM))
    assert [head.split()[1] for head in server.heads] == ["/v1/decisions", "/v1/systemone", "/v1/systemone"]
    assert server.bodies[1] == {
        "model": "m",
        "state": "x",
        "questions": {
            "0": {"type": "noul", "instructions": "Urgent?"},
            "1": {
                "type": "choice",
                "instructions": "Which team?",
                "criteria": {"billing": None, "returns": "goods sent back"},
            },
            "2": {"type": "score", "instructions": "How bad?", "criteria": ["low", "mid: so so", "high"]},
            "3": {"type": "noul", "instructions": "Spam?", "criteria": {"true": "an advert", "false": None}},
        },
    }
    assert server.bodies[2]["state"][1] == {"role": "user", "content": "It broke."}
    assert [scores.probabilities for scores in chunk.decisions.questions] == [
        (0.9, 1.0 - 0.9),
        (0.25, 0.75),
        (0.2, 0.5, 0.3),
        (0.6, 1.0 - 0.6),
    ]
    assert [scores.option_mass for scores in chunk.decisions.questions] == [None, 0.8, None, None]
    assert chunk.usage == Usage(prompt_tokens=50, completion_tokens=1)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([{"type": "predicate", "probability": 0.9}] * 2, "answered 2 questions; 1 were asked"),
        ([{"type": "choice", "probabilities": [{"value": "billing", "probability": 1}]}], "option 'returns'"),
        ([{"type": "choice", "probabilities": 3}], "something else than decisions"),
    ],
)
def test_an_answer_that_does_not_answer_is_an_error(answers, said):
    with (
        raw_openai(says(decisions=data(answers=answers))) as (backend, _),
        pytest.raises(BackendError, match=said),
    ):
        decided(backend, asked(TEAM))


def test_an_error_that_is_not_a_missing_route_is_the_answer():
    broken = json.dumps({"error": {"message": "Too many.", "param": "questions"}}).encode()
    with raw_openai(says(decisions=answer(broken, "400 Bad Request"))) as (backend, server):
        with pytest.raises(InvalidRequest) as refused:
            decided(backend, asked(TEAM))
        assert refused.value.field == "questions"
    assert len(server.heads) == 1


# --- log-probabilities ---


@contextlib.contextmanager
def with_logprobs(window, *, chat=True, failures=(), **options):
    """An endpoint without a decision API whose first token has the log-probabilities ``window(prompt)``. The
    first answers are `failures`."""
    servers, failed = [], list(failures)

    def reply(target):
        kind = target.removeprefix("/v1/")
        if kind not in ("chat/completions", "completions"):
            return answer(b"", "405 Method Not Allowed")
        if failed:
            return failed.pop()
        body = servers[0].bodies[-1]
        top = window(body["messages"][-1]["content"] if chat else body["prompt"])
        texts = list(top)
        logprobs = {
            "content": [
                {
                    "token": texts[0],
                    "logprob": top[texts[0]],
                    "top_logprobs": [{"token": text, "logprob": top[text]} for text in texts],
                }
            ]
        }
        if not chat:
            logprobs = {"tokens": texts[:1], "token_logprobs": [top[texts[0]]], "top_logprobs": [top]}
        said = {"message": {"content": texts[0]}} if chat else {"text": texts[0]}
        usage = {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
        return data(choices=[{**said, "finish_reason": "length", "logprobs": logprobs}], usage=usage)

    with raw_openai(reply, is_chat_model=chat, **options) as (backend, server):
        servers.append(server)
        yield backend, server


def by_question(prompt):
    """Log-probabilities for the question that stands last in the prompt."""
    if "Which team?" in prompt:
        assert prompt.endswith(("and nothing else.", "\nAnswer:"))
        return {"A": -0.3, "B": -1.6, " A": -4.0, "The": -5.0}
    if "How bad?" in prompt:
        return {"C": -0.1, "A": -2.5, "B": -4.0}
    return {"Yes": -0.1, "No": -3.0, "yes": -4.0, "A": -5.0, "B": -6.0}


def test_labels_are_scored_where_there_is_no_decision_api():
    with with_logprobs(by_question) as (backend, server):
        chunk = decided(backend, asked(TEAM, LEVELS, chat=CHAT[:2]))
        again = decided(backend, asked(TEAM, chat=CHAT[:2]))
    paths = [head.split()[1].removeprefix("/v1") for head in server.heads]
    assert paths == ["/decisions", "/systemone"] + ["/chat/completions"] * 3, "the way is found once"
    body = server.bodies[2]
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)
    assert body["messages"][-1] == {
        "role": "user",
        "content": "It broke.\n\nWhich team?\nA. billing\nB. returns: goods sent back\n"
        "Answer with the letter of exactly one of these options, and nothing else.",
    }
    team, levels = chunk.decisions.questions
    weights = [math.exp(-0.3) + math.exp(-4.0), math.exp(-1.6)]
    found = answered(TEAM, team)
    assert found.probabilities == pytest.approx([weight / sum(weights) for weight in weights])
    assert found.option_mass == pytest.approx(sum(weights))
    assert answered(LEVELS, levels).best == 2
    assert team.layout == "labels-1"
    assert again.decisions.questions == (team,)
    assert chunk.usage == Usage(prompt_tokens=20, cached_tokens=8, completion_tokens=2)


def test_labels_behind_a_plain_prompt():
    request = msgspec.structs.replace(asked(TEAM, chat=None), prompt=("It broke.",))
    with with_logprobs(by_question, chat=False) as (backend, server):
        (scores,) = decided(backend, request).decisions.questions
    assert server.bodies[-1]["logprobs"] == 20
    assert server.bodies[-1]["prompt"].startswith("It broke.\n\nWhich team?\nA. billing\n")
    assert scores.forms[0].logprobs[1] == -1.6


def test_another_turn_is_asked_behind_another_role():
    with with_logprobs(by_question) as (backend, server):
        turns = (ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content="It broke."))
        decided(backend, asked(TEAM, chat=turns))
    assert [turn["role"] for turn in server.bodies[-1]["messages"]] == ["user", "assistant", "user"]


def test_orders_and_layouts_are_asked_of_the_labels():
    with with_logprobs(by_question) as (backend, server):
        (scores,) = decided(backend, asked(TEAM, chat=CHAT[:2], permutations=2)).decisions.questions
        assert [form.options for form in scores.forms] == [(0, 1), (1, 0)]
        (scores,) = decided(backend, asked(URGENT, chat=CHAT[:2], layout="verbatim")).decisions.questions
        assert scores.forms[0].options == (0, 0, 1)
        with pytest.raises(UnsupportedNode, match="end of a turn") as refused:
            decided(backend, asked(TEAM, chat=CHAT[:2], end="turn"))
        assert refused.value.field == "decide.end"
        with pytest.raises(UnsupportedNode) as refused:
            decided(backend, asked(TEAM, chat=CHAT[:2], prompt_ids=True))
        assert refused.value.field == "decide.prompt_ids"
    assert not any("decisions" in head.split()[1] for head in server.heads), "the API does not take them"


def test_an_option_outside_of_the_window_is_refused():
    with with_logprobs(lambda prompt: {"A": -0.1, "Bill": -2.0}) as (backend, server):
        with pytest.raises(UnsupportedNode, match="does not show the probability of 'B'") as refused:
            decided(backend, asked(TEAM, TEAM, TEAM, chat=CHAT[:2]))
        assert refused.value.field == "decide.questions[0].options[1]"
        assert len(server.heads) == 3, "one request finds it out"
        many = Question(kind="choice", options=tuple(Option(name=f"n{index}") for index in range(21)))
        with pytest.raises(UnsupportedNode, match="more options") as refused:
            decided(backend, asked(TEAM, many, chat=CHAT[:2]))
        assert refused.value.field == "decide.questions[1].options"


def test_an_endpoint_without_logprobs_is_refused_by_name():
    reply = says(completions=data(choices=[{"message": {"content": "A"}, "finish_reason": "stop"}]))
    with raw_openai(reply) as (backend, _), pytest.raises(UnsupportedNode, match="no log-probabilities"):
        decided(backend, asked(TEAM))


def test_a_wrong_base_url_is_named():
    with RawServer(lambda target: answer(b"", "404 Not Found")) as server:
        backend = rm.OpenAI("m", base_url=server.url)
        with contextlib.closing(backend), pytest.raises(NotFound, match="Add /v1 to base_url"):
            decided(backend, asked(TEAM))


# --- Ramify's own server ---

SCORES = DecisionScores(
    questions=(
        QuestionScores(
            layout="verbatim-1",
            forms=(
                FormScores(options=(0, 0, 1), logprobs=(-0.1, -3.0, -2.5), lengths=(1, 1, 2), ids=(7, 8)),
            ),
        ),
    ),
    state_ids=(5, 6),
)
FULL = Decide(
    questions=(TEAM,),
    layout="verbatim",
    end="turn",
    permutations=2,
    opening="\n",
    closing=" ->",
    prompt_ids=True,
)


class Deciding(ScriptedFrontend):
    """Answers each request with `SCORES`, the first after `failures`."""

    def __init__(self, *failures):
        super().__init__([])
        self.info = msgspec.structs.replace(self.info, fingerprint="one")
        self.failures = list(failures)

    async def generate(self, request):
        self.requests.append(request)
        if self.failures:
            raise self.failures.pop(0)
        usage, finish = Usage(prompt_tokens=9, cached_tokens=2), Finish(reason="length")
        yield TextChunk(rid=request.rid, decisions=SCORES, usage=usage, finish=finish)


PLAIN = Generate(rid="r", prompt=("It ", (1, 2)), sampling=SamplingParams(max_tokens=0), decide=FULL)


def test_our_own_server_gets_and_gives_the_messages():
    frontend = Deciding()
    with live_endpoint(frontend) as (backend, _):
        chunk = decided(backend, PLAIN)
    assert msgspec.json.encode(frontend.requests) == msgspec.json.encode([PLAIN])
    assert chunk.decisions == SCORES
    assert chunk.usage == Usage(prompt_tokens=9, cached_tokens=2)


def test_an_older_server_is_refused_by_name():
    said = ".request: object contains unknown field `decide`."
    error = {"message": said, "type": "invalid_request_error", "param": ".request", "code": "invalid_request"}
    with raw_endpoint(lambda target: answer(json.dumps({"error": error}).encode(), "400 Bad Request")) as (
        backend,
        _,
    ):
        with pytest.raises(UnsupportedNode, match="has no decisions") as refused:
            decided(backend, PLAIN)
        assert refused.value.field == "decide"


def test_a_recorded_decision_is_replayed(tmp_path):
    with live_endpoint(Deciding()) as (backend, _):
        decided(RecordingBackend(backend, tmp_path / "run.jsonl"), PLAIN)
    replay = ReplayBackend(tmp_path / "run.jsonl")
    other = msgspec.structs.replace(FULL, questions=(URGENT,))
    with pytest.raises(NotRecorded, match="decide is"):
        decided(replay, msgspec.structs.replace(PLAIN, decide=other))
    assert decided(replay, msgspec.structs.replace(PLAIN, rid="s")).decisions == SCORES
    assert replay.unused == []


# --- programs ---

IS_URGENT = rm.decide("urgent", bool, "Urgent?")
WHICH_TEAM = rm.decide("team", {"billing": "", "returns": "goods sent back"}, "Which team?")


def test_a_program_decides_on_an_endpoint():
    answers = [
        {"type": "predicate", "probability": 0.9},
        {
            "type": "choice",
            "probabilities": [
                {"value": "billing", "probability": 0.25},
                {"value": "returns", "probability": 0.75},
            ],
        },
    ]
    with raw_openai(says(decisions=data(answers=answers, usage=USAGE))) as (backend, server):
        state = program_of(rm.user("It broke."), IS_URGENT, WHICH_TEAM).run(backend=backend)
    assert state["urgent"].value is True
    assert (state["team"].value, state["team"].option_mass) == ("returns", None)
    assert json.loads(json.dumps(state["team"].to_dict()))["option_mass"] is None
    assert "returns 0.75" in str(state.trace)
    (body,) = server.bodies
    assert body["input"] == [{"role": "user", "content": "It broke."}]
    assert state.usage.prompt_tokens == 50


def test_a_refusal_fails_its_own_step():
    answers = {"predicate": {"type": "predicate", "probability": 0.9}, "choice": {"type": "refusal"}}

    def reply(target):
        questions = servers[0].bodies[-1]["questions"]
        return data(answers=[answers[one["type"]] for one in questions], usage=USAGE)

    servers = []
    with raw_openai(reply) as (backend, server):
        servers.append(server)
        state = program_of(rm.user("It broke."), IS_URGENT, WHICH_TEAM).run(backend=backend)
    assert state["urgent"].probabilities[True] == 0.9
    with pytest.raises(rm.ProgramError, match="declined") as failed:
        state["team"]
    assert failed.value.variable == "team"


def test_a_normalisation_of_scores_is_refused_where_there_are_none():
    step = rm.decide("urgent", bool, "Urgent?", normalise="mean")
    answers = [{"type": "predicate", "probability": 0.9}]
    with raw_openai(says(decisions=data(answers=answers))) as (backend, _):
        failed = program_of(rm.user("It broke."), step).run(backend=backend).error()
    assert "without their scores" in str(failed)


def test_a_decision_is_sent_again_and_kept(tmp_path):
    frontend = Deciding(WorkerDied("The engine core died."))
    program = program_of("It broke.", WHICH_TEAM)
    with live_endpoint(frontend, cache=tmp_path / "answers.db") as (backend, _):
        first = program.run(backend=backend)
        second = program.run(backend=backend)
    assert first["team"].value == "billing"
    assert second["team"] == first["team"]
    assert len(frontend.requests) == 2, "one attempt failed, one was answered, and the rest is stored"
    (call,) = first.trace.children
    assert call.resent == 1
    assert second.usage == Usage(stored_tokens=9)


def test_questions_by_log_probabilities_are_each_sent_again():
    failures = [answer(b"", "503 Service Unavailable")]
    with with_logprobs(by_question, failures=failures) as (backend, server):
        state = program_of(rm.user("It broke."), WHICH_TEAM, IS_URGENT).run(backend=backend)
        assert state["team"].value == "billing"
    asked = [head for head in server.heads if "completions" in head.split()[1]]
    assert len(asked) == 3, "only the question that failed is asked again"


def test_the_way_may_be_found_by_another_request_meanwhile():
    found = []

    def reply(target):
        if target.endswith("/systemone"):
            return data(answers={"0": {"type": "noul", "noul": 0.9}})
        found[0]._decision_apis = DECISION_APIS[1:]  # the other request was faster
        return answer(b"", "404 Not Found")

    with raw_openai(reply) as (backend, _):
        found.append(backend)
        (scores,) = decided(backend, asked(URGENT)).decisions.questions
    assert scores.probabilities[0] == 0.9
