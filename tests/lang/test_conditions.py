"""Conditions and bounded loops: the same step by step, as a graph, and at a server."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Literal

import msgspec
import pytest
from pydantic import BaseModel

import ramify as rm
from ramify.errors import InvalidRequest
from ramify.graph import Graph
from ramify.lang.graph.serve import Job, run_row
from ramify.loop import wait
from ramify.programs.route import router
from tests.lang.compiling import refusal
from tests.lang.remote import ScriptedFrontend
from tests.server.conftest import LiveServer


class Verdict(BaseModel):
    passed: bool
    level: Literal["low", "high"]


@rm.function
def triage(s, ticket, vip):
    s += rm.user(f"Ticket {ticket['title']} ({ticket['pages']} pages), {vip}")
    s += rm.assistant(rm.select("kind", ["bug", "question", "praise"]))
    s += rm.when(
        s["kind"],
        {
            "bug": rm.user("Which version?") + rm.assistant(rm.gen("answer", max_tokens=8)),
            "question": rm.user("Answer it.") + rm.assistant(rm.gen("answer", max_tokens=9)),
        },
    )
    s += rm.when(vip, {True: "Be kind. "}, "Be brief. ")
    s += rm.gen("draft")

    def improve(s):
        s += rm.user("Improve " + s["draft"]) + rm.assistant(rm.gen("draft", max_tokens=10))
        s += rm.user("Good?") + rm.assistant(rm.select("good", ["yes", "no"]))
        return s["good"]

    rm.repeat(s, improve, until="yes", at_most=3)
    s += rm.user("So: " + s["draft"])
    return s["draft"], s["good"], ticket, vip


def script(kind: str, goods: list[str]) -> dict[str, Any]:
    return {"kind": kind, "answer": ["A"], "draft": ["d0", "d1", "d2", "d3"], "good": goods}


CASES = [
    (kind, vip, goods)
    for kind, vip, goods in itertools.product(
        ("bug", "question", "praise"), (True, False), (["yes"], ["no", "yes"], ["no", "no", "no"])
    )
]


def facts(state: rm.ProgramState, kind: str) -> Any:
    names = ["kind", "draft", "good", *(["answer"] if kind != "praise" else [])]
    return state.text(), state.ret_value, {name: state[name] for name in names}, state.messages()


@pytest.mark.parametrize(("kind", "vip", "goods"), CASES)
def test_a_graph_takes_the_same_course(kind: str, vip: bool, goods: list[str]) -> None:
    given = {"ticket": {"title": "x", "pages": 3}, "vip": vip}
    plain = triage.run(**given, backend=rm.ScriptedBackend(script(kind, goods)))
    backend = rm.ScriptedBackend(script(kind, goods))
    graph = triage.compile()
    assert facts(graph.run(**given, backend=backend), kind) == facts(plain, kind)
    assert len(backend.requests) == 2 + (kind != "praise") + 2 * len(goods)


@pytest.mark.parametrize(("kind", "vip", "goods"), CASES[::5])
def test_a_server_takes_the_same_course(kind: str, vip: bool, goods: list[str]) -> None:
    given = {"ticket": {"title": "x", "pages": 3}, "vip": vip}
    plain = triage.run(**given, backend=rm.ScriptedBackend(script(kind, goods)))
    with LiveServer(ScriptedFrontend(script(kind, goods)), router) as server:
        backend = rm.RuntimeEndpoint(server.url)
        state = triage.compile().run(**given, backend=backend)
        backend.close()
    assert facts(state, kind) == facts(plain, kind)


def test_the_events_of_a_server() -> None:
    backend = rm.ScriptedBackend(script("bug", ["yes"]))
    graph = triage.compile().graph().graph
    job = Job(
        graph=msgspec.json.decode(msgspec.json.encode(graph), type=Graph).check(),
        backend=backend,
        info=wait(backend.info()),
        options={},
        scope="",
        events="nodes",
    )
    row = wait(run_row(job, {"ticket": {"title": "x", "pages": 3}, "vip": True}, lambda event: None))
    assert "failed" not in row
    assert row["variables"] == {"kind": "bug", "answer": "A", "draft": "d1", "good": "yes"}
    skipped = [node["name"] for node in row["nodes"] if node.get("skipped")]
    assert skipped == ["answer", "draft", "good", "draft", "good"]
    assert row["usage"].completion_tokens == sum(
        node["usage"].completion_tokens for node in row["nodes"] if "usage" in node
    )


def test_conditions_on_fields() -> None:
    @rm.function
    def program(s):
        s += "q" + rm.gen("verdict", schema=Verdict)
        s += rm.when(s["verdict"].passed, {True: "passed", False: "failed"})
        s += rm.when(s["verdict"].level, {"high": rm.when(s["verdict"].passed, {True: "!", False: "?"})})

    for passed, level in itertools.product((True, False), ("low", "high")):
        answer = Verdict(passed=passed, level=level).model_dump_json()
        texts = {
            made.run(backend=rm.ScriptedBackend([answer])).text() for made in (program, program.compile())
        }
        mark = {("high", True): "!", ("high", False): "?"}.get((level, passed), "")
        assert texts == {f"q{answer}{'passed' if passed else 'failed'}{mark}"}


def test_a_variable_that_no_case_has_set() -> None:
    @rm.function
    def program(s):
        s += "q" + rm.select("kind", ["a", "b"])
        s += rm.when(s["kind"], {"a": rm.gen("more")})
        s += " end"
        return s["more"]

    for made in (program, program.compile()):
        assert made.run(backend=rm.ScriptedBackend({"kind": "a", "more": "x"})).ret_value == "x"
        with pytest.raises(rm.ProgramError, match="'more'"):
            made.run(backend=rm.ScriptedBackend({"kind": "b", "more": "x"}))


def test_the_older_value_stays_where_the_case_is_not_taken() -> None:
    @rm.function
    def program(s):
        s += rm.gen("draft") + rm.select("good", ["yes", "no"])
        s += rm.when(s["good"], {"no": rm.gen("draft")})
        s += " -> " + s["draft"]
        return s["draft"]

    for good, draft in (("yes", "one"), ("no", "two")):
        for made in (program, program.compile()):
            state = made.run(backend=rm.ScriptedBackend({"draft": ["one", "two"], "good": good}))
            assert state.ret_value == state["draft"] == draft
            assert state.text().endswith(f"-> {draft}")


def test_a_failed_step_under_a_condition_fails_the_program() -> None:
    @rm.function
    def program(s):
        s += "Kind: " + rm.select("kind", ["a", "b"])
        s += rm.when(s["kind"], {"a": rm.gen("number", schema=int)})
        s += "end"

    for made in (program, program.compile()):
        state = made.run(backend=rm.ScriptedBackend({"kind": "a", "number": "none"}, strict=False))
        assert "number" in str(state.error())
        assert made.run(backend=rm.ScriptedBackend({"kind": "b"})).error() is None


def test_async_programs() -> None:
    @rm.function
    async def program(s):
        async def again(s):
            s += "." + rm.select("go", ["on", "stop"])
            return await s.aget("go")

        await rm.repeat(s, again, until={"stop"}, at_most=4)
        s += rm.when(await s.aget("go"), {"stop": "stopped"}, "tired")

    async def texts(answers: list[str]) -> set[str]:
        made = (program, program.compile())
        return {(await one.run(backend=rm.ScriptedBackend({"go": answers}))).text() for one in made}

    assert asyncio.run(texts(["on", "stop"])) == {".on.stopstopped"}
    assert asyncio.run(texts(["on"] * 4)) == {".on.on.on.ontired"}


def test_what_a_condition_cannot_be() -> None:
    with pytest.raises(InvalidRequest, match=r"case 1.5 is no str"):
        rm.when("a", {1.5: "x"})

    @rm.function
    def forks(s):
        def round(s):
            s += rm.select("go", ["on", "stop"])
            s.fork(2)
            return s["go"]

        rm.repeat(s, round, until="stop", at_most=2)

    assert "fork cannot depend on a condition" in str(refusal(forks))

    @rm.function
    def whole(s):
        s += rm.gen("x", schema=Verdict)
        s += rm.when(s["x"], {"a": "b"})

    assert "asks for a comparison" in str(refusal(whole))
    with pytest.raises(InvalidRequest, match="at_most is 0"):
        rm.repeat(rm.ProgramState, lambda s: None, until=1, at_most=0)  # type: ignore[arg-type]


ON_A = '"when":[{"value":{"from":"argument","name":"a"},"among":[]}]'
ON_B = '"when":[{"value":{"from":"argument","name":"b"},"among":[]}]'


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ('{"kind":"gen","when":[{"value":{"from":"node","node":0},"among":["a"]}]}', "does not come before"),
        (f'{{"kind":"fork","children":[1],{ON_A}}}', "skipped"),
        (f'{{"kind":"text","parts":[],{ON_B}}}', "no argument"),
        ('{"kind":"gen"},{"kind":"either","of":[]}', "1 to 256"),
        ('{"kind":"gen"},{"kind":"either","of":[0]},{"kind":"either","of":[1]}', "is an either"),
        ('{"kind":"text","parts":["a"]},{"kind":"either","of":[0]}', "has no result"),
        (f'{{"kind":"scope_begin","name":"x"}},{{"kind":"scope_end","name":"x",{ON_A}}}', "other conditions"),
    ],
)
def test_wrong_graphs_are_refused(nodes: str, problem: str) -> None:
    graph = msgspec.json.decode(f'{{"arguments":["a"],"nodes":[{nodes}]}}', type=Graph)
    with pytest.raises(InvalidRequest, match=problem):
        graph.check()


@pytest.mark.parametrize("value", ["text", 3, 1.5, True, None, [1, "a", None], {"a": {"b": [2]}}])
def test_arguments_of_any_json_type(value: Any) -> None:
    @rm.function
    def program(s, given):
        s += f"It is {given}." + rm.gen("x")
        return given

    for made in (program, program.compile()):
        state = made.run(given=value, backend=rm.ScriptedBackend(["y"]))
        assert state.text() == f"It is {value}.y"
        assert state.ret_value == value


def test_arguments_that_are_no_json() -> None:
    @rm.function
    def program(s, given):
        s += given["a"]["b"]

    assert program.compile().run(given={"a": {"b": 7}}, backend=rm.ScriptedBackend([])).text() == "7"
    nan = float("nan")
    for wrong, problem in (((1, 2), "must be JSON"), (nan, "must be JSON"), ({"a": {}}, "nothing at")):
        with pytest.raises(InvalidRequest, match=problem):
            program.compile().run(given=wrong, backend=rm.ScriptedBackend([]))


def test_a_picture_shows_conditions_and_no_roles() -> None:
    view = triage.compile().graph()
    assert "if ‹kind› is 'bug': gen answer" in str(view)
    drawn = view.mermaid()
    assert "if ‹kind› is 'bug': gen answer" in drawn
    assert "user:" not in drawn
    assert "either" not in drawn


def test_values_are_compared_as_text_everywhere() -> None:
    @rm.function
    def program(s, given):
        s += "Pick " + rm.select("k", ["1", "2"])
        s += rm.when(s["k"], {1: " one", 2: " two"}, " none")
        s += rm.when(given, {"True": " yes"}, " no")

    for made in (program, program.compile()):
        state = made.run(given=True, backend=rm.ScriptedBackend({"k": "2"}))
        assert state.text() == "Pick 2 two yes"
    with pytest.raises(InvalidRequest, match="reads like another"):
        rm.when("1", {1: "a", "1": "b"})


def test_a_round_that_returns_nothing_is_refused() -> None:
    @rm.function
    def program(s):
        def again(s):
            s += "again"

        rm.repeat(s, again, until="yes", at_most=2)

    for run in (program.run, lambda **given: program.compile().run(**given)):
        with pytest.raises(rm.RamifyError, match="returned None"):
            run(backend=rm.ScriptedBackend([]))
