"""`decide` in compiled programs: as nodes, in conditions and texts, in a view, and run by a server."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

import ramify as rm
from ramify.errors import InvalidRequest
from ramify.graph import Graph
from ramify.lang.graph.serve import Job, run_row
from ramify.loop import wait
from ramify.programs.route import router
from tests.lang.compiling import refusal
from tests.lang.remote import ScriptedFrontend
from tests.server.fake_frontend import LiveServer


class Team(enum.Enum):
    BILLING = "billing"
    RETURNS = "returns"


class Ticket(BaseModel):
    urgent: bool = Field(description="Is it urgent?")
    size: Literal["S", "L"] = Field(description="How large is it?")


LEVELS = Annotated[int, rm.Levels("low", "mid", "high")]


@rm.function
def program(s, text):
    s += rm.user(text)
    s += rm.decide("urgent", bool, "Is it urgent?")
    s += rm.decide("team", Team, "Whose is it?", permutations=2)
    s += rm.decide("ticket", Ticket)
    s += rm.when(s["urgent"], {True: rm.assistant("At once.")}, rm.assistant("Later."))
    s += rm.decide("anger", LEVELS, "How angry is the customer?")
    s += rm.user(f"{s['team']} {s['ticket'].value.size} {s['urgent'].confidence} {s['anger']}.")
    s += rm.assistant(rm.decide("risk", LEVELS, "How risky is it?", append=True))
    views = s.fork(2)
    views += rm.decide("good", ["yes", "no"], "Is it good?")
    views.join()
    s += rm.when(s["risk"].value, {2: rm.user("Careful."), 0: rm.user("Fine.")})
    return s["team"].value, s["ticket"].value


SCRIPT: dict[str, Any] = {
    "urgent": {True: 1.0},
    "team": Team.RETURNS,
    "ticket": {"urgent": False, "size": "L"},
    "anger": "high",
    "risk": 2,
    "good": ["yes", "no"],
}
TEXT = (
    "<|im_start|>user\nOrder 7.<|im_end|>\n<|im_start|>assistant\nAt once.<|im_end|>\n"
    "<|im_start|>user\nreturns L 1.0 high.<|im_end|>\n<|im_start|>assistant\nhigh<|im_end|>\n"
    "<|im_start|>user\nCareful.<|im_end|>\n"
)


@pytest.mark.parametrize("how", ["steps", "compiled", "compiled at once"])
def test_a_compiled_program_decides_like_its_steps(how):
    backend = rm.ScriptedBackend(SCRIPT)
    made = program.compile() if how == "compiled" else program
    state = made.run(text="Order 7.", backend=backend, compiled=how == "compiled at once")
    assert state.error() is None
    assert state.text() == TEXT
    assert state.ret_value == (Team.RETURNS, Ticket(urgent=False, size="L"))
    assert [one.value for one in state["good"]] == ["yes", "no"]
    # urgent stands alone, as team has permutations; nothing lies between team and ticket but their options
    assert [len(sent.decide.questions) for sent in backend.requests] == [1, 1, 2, 1, 1, 1, 1]


def test_decisions_in_a_row_are_one_request_of_a_graph():
    @rm.function
    def two(s):
        s += "Order 7."
        s += rm.decide("urgent", bool, "Is it urgent?")
        s += rm.decide("team", Team, "Whose is it?")

    backend = rm.ScriptedBackend(SCRIPT)
    assert two.compile().run(backend=backend)["team"].value is Team.RETURNS
    assert len(backend.requests) == 1


def test_a_skipped_decision_sets_nothing():
    @rm.function
    def maybe(s, kind):
        s += rm.when(kind, {"bug": rm.decide("urgent", bool, "Is it urgent?")})
        s += rm.gen("x")

    backend = rm.ScriptedBackend({**SCRIPT, "x": "y"})
    state = maybe.compile().run(kind="question", backend=backend)
    assert (state["x"], len(backend.requests)) == ("y", 1)
    with pytest.raises(rm.ProgramError, match="condition"):
        state["urgent"]


def test_the_view_shows_the_questions():
    graph = program.compile().graph()
    assert "decide ticket (urgent: Is it urgent?, size: How large is it?)" in str(graph)
    assert "if ‹urgent›.text is 'True'" in str(graph)
    assert 'n3(["decide urgent (Is it urgent?)"])' in graph.mermaid()
    # The conditions and texts wait for the decisions that they name.
    assert "n3 --> n4" in graph.mermaid()


def job(made: Any, script: Any) -> Job:
    wire = msgspec.json.encode(made.compile().graph().graph)
    backend = rm.ScriptedBackend(script)
    return Job(
        graph=msgspec.json.decode(wire, type=Graph).check(),
        backend=backend,
        info=wait(backend.info()),
        options={},
        scope="",
        events="nodes",
    )


def test_a_server_runs_the_graph_and_tells_plain_data():
    told: list[dict[str, Any]] = []
    hosted = wait(run_row(job(program, SCRIPT), {"text": "Order 7."}, told.append))
    assert hosted["text"] == TEXT
    assert hosted["variables"]["team"]["value"] == "returns"
    assert hosted["variables"]["ticket"]["value"] == {"urgent": False, "size": "L"}
    (urgent,) = [event for event in told if event["name"] == "urgent"]
    assert urgent["value"]["probabilities"] == pytest.approx({"true": 1.0, "false": 0.0})
    assert msgspec.json.decode(msgspec.json.encode(hosted["variables"])) == hosted["variables"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_gets_the_decisions_of_the_server(stream):
    @rm.function
    def triage(s, text):
        s += rm.user(text)
        s += rm.decide("urgent", bool, "Is it urgent?") + rm.decide("team", Team, "Whose is it?")
        s += rm.assistant(rm.gen("reply"))

    frontend = ScriptedFrontend({**SCRIPT, "reply": "Fine."})
    with LiveServer(frontend, router) as server:
        backend = rm.RuntimeEndpoint(server.url)
        state = triage.compile().run(text="Order 7.", backend=backend, stream=stream)
        state.sync()
        backend.close()
    assert state.error() is None
    assert state["team"].value is Team.RETURNS
    assert state["urgent"].probabilities == pytest.approx({True: 1.0, False: 0.0})
    assert [len(sent.decide.questions) for sent in frontend.requests if sent.decide] == [2]


def test_what_is_not_known_is_refused():
    @rm.function
    def truth(s):
        s += rm.decide("urgent", bool, "Is it urgent?")
        if s["urgent"].value:
            s += "x"

    @rm.function
    def member(s):
        s += rm.decide("team", Team, "Whose is it?")
        s += f"{s['team'].value}"

    @rm.function
    def whole(s):
        s += rm.decide("ticket", Ticket)
        s += f"{s['ticket']}"

    assert "rm.when" in refusal(truth).remedy
    assert "'team'" in str(refusal(member))  # str(Team.RETURNS) is no text of the graph
    assert "'ticket'" in str(refusal(whole))


def test_a_case_that_is_no_option_is_refused():
    @rm.function
    def wrong(s):
        s += rm.decide("team", Team, "Whose is it?")
        s += rm.when(s["team"], {"biling": "x"})

    assert "Did you mean billing" in str(refusal(wrong))


QUESTION = {"kind": "predicate", "instructions": "Is it?", "options": [{"name": "true"}, {"name": "false"}]}


@pytest.mark.parametrize(
    ("node", "field"),
    [
        ({}, "graph.nodes[0].question"),
        ({"question": QUESTION, "fields": {"a": QUESTION}}, "graph.nodes[0].question"),
        ({"question": {"kind": "choice", "options": []}}, "graph.nodes[0].question.options"),
        (
            {"fields": {"a": {"kind": "choice", "options": [{"name": ""}]}}},
            "graph.nodes[0].fields.a.options[0].name",
        ),
        ({"fields": {"a": QUESTION}, "append": True}, "graph.nodes[0].append"),
        ({"question": QUESTION, "permutations": 256}, "graph.nodes[0].permutations"),
        ({"question": QUESTION, "permutations": 2, "layout": "isolated"}, "graph.nodes[0].permutations"),
    ],
)
def test_a_wrong_node_is_refused_with_its_path(node, field):
    graph = msgspec.convert({"nodes": [{"kind": "decide", **node}]}, Graph)
    with pytest.raises(InvalidRequest) as refused:
        graph.check()
    assert refused.value.field == field


def test_a_text_names_a_part_of_a_decision():
    parts = [{"from": "node", "node": 0}]
    nodes = [{"kind": "decide", "question": QUESTION}, {"kind": "text", "parts": parts}]
    with pytest.raises(InvalidRequest, match="path"):
        msgspec.convert({"nodes": nodes}, Graph).check()
    parts[0] |= {"path": ["value"], "type": "bool"}
    msgspec.convert({"nodes": nodes}, Graph).check()
