"""Compiled programs equal the same programs run step by step; others fail to compile with their line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

import ramify as rm
from ramify.errors import RequestTimeout
from ramify.graph import Graph
from ramify.lang.backends.base import Backend, Submission
from ramify.lang.graph.serve import Job, run_row
from ramify.loop import wait
from ramify.messages import Generate, TextChunk
from tests.lang.backends import Holding
from tests.lang.compiling import refusal
from tests.lang.programs import CASES, Case
from tests.lang.programs.random_program import Plan, answering
from tests.lang.remote import ScriptedFrontend
from tests.lang.steps import program_of
from tests.lang.test_programs import outcome, run_all
from tests.server.fake_frontend import LiveServer

ASKS = {
    "tree-of-thought": "a number",
    "react": "a comparison",
    "judge": "arithmetic",
    "json-by-regex": "its type",
    "speculative-select": "a comparison",
}
"""Programs without a complete graph → the question that their control flow asks of a result."""
CALLS_ALONE = {"react", "speculative-select"}
"""The programs in `ASKS` with a question before their last call, so that some calls are in no graph."""


# --- the ten programs -----------------------------------------------------------------------------


class Counting(rm.RuntimeEndpoint):
    """A server that counts the graphs and the single requests that it is sent."""

    graphs = alone = 0

    def submit_program(self, submission: Submission, failed: Callable[[], bool]) -> Backend:
        self.graphs += 1
        return super().submit_program(submission, failed)

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        self.alone += 1
        return super().generate(request)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_ten_programs_compiled_are_the_programs(
    case: Case, engine: rm.Engine, endpoint: rm.RuntimeEndpoint
) -> None:
    server = Counting(endpoint.base_url)
    steps = run_all(case, engine)
    for backend in (engine, server):
        states = case.program.run_batch(case.arguments, backend=backend, compiled=True)
        assert [outcome(state) for state in states] == steps
    assert server.graphs == len(case.arguments)
    assert not server.alone or case.name in CALLS_ALONE
    server.close()


@pytest.mark.parametrize("name", ASKS)
def test_the_programs_that_python_decides_are_refused(name: str) -> None:
    case = CASES[name]
    refused = refusal(case.program, **case.arguments[0])
    assert f"asks for {ASKS[name]}." in str(refused)
    assert refused.line is not None
    assert refused.line.startswith(case.program.body.__code__.co_filename)


@pytest.mark.parametrize("name", ["few-shot", "skeleton-of-thought", "streaming"])
def test_one_graph_serves_many_rows(name: str) -> None:
    case = CASES[name]
    compiled = case.program.compile()
    assert compiled.graph().graph.arguments == (case.varied,)
    rows = case.rows(20)
    states = compiled.run_batch(rows, backend=rm.ScriptedBackend(case.script), num_threads=8)
    steps = case.program.run_batch(rows, backend=rm.ScriptedBackend(case.script))
    assert [outcome(state) for state in states] == [outcome(state) for state in steps]


def test_compiled_programs_run_on_recordings_and_stream(tmp_path: Path) -> None:
    case = CASES["skeleton-of-thought"]
    row, script = case.arguments[0], case.script
    steps = case.program.run(**row, backend=rm.ScriptedBackend(script))
    compiled = case.program.compile()
    path = tmp_path / "run.jsonl"
    assert outcome(
        compiled.run(**row, backend=rm.RecordingBackend(rm.ScriptedBackend(script), path))
    ) == outcome(steps)
    assert outcome(compiled.run(**row, backend=rm.ReplayBackend(path))) == outcome(steps)
    state = compiled.run(**row, backend=rm.ScriptedBackend(script), stream=True)
    assert "".join(state.text_iter()) == steps.text()
    assert list(state.text_iter("short"))[:2] == [" Look", " after"]


def test_compiled_chats_run_on_endpoints_that_take_whole_messages() -> None:
    case = CASES["multi-turn-chat"]
    row = case.arguments[0]
    with LiveServer(ScriptedFrontend(lambda request: f"Since {len(str(request.prompt))}.")) as server:
        backend = rm.OpenAI("scripted", base_url=server.url + "/v1", api_key="none")
        assert outcome(case.program.compile(**row).run(backend=backend)) == outcome(
            case.program.run(**row, backend=backend)
        )
        backend.close()


@pytest.mark.parametrize("seed", range(40))
def test_any_program_without_control_flow_is_the_same_compiled(seed: int) -> None:
    @rm.function
    def program(s, topic):
        s += f"Begin with {topic}"
        return {"read": tuple(Plan(seed).write(s, topic))}

    def run(made: Any, **options: Any) -> dict[str, Any]:
        return outcome(made.run("tea", backend=backend, **options))

    backend = answering()
    steps = run(program)
    compiled = program.compile()
    assert run(compiled) == steps
    assert run(program, compiled=True) == steps
    wire = msgspec.json.encode(compiled.graph().graph)
    job = Job(
        graph=msgspec.json.decode(wire, type=Graph).check(),
        backend=backend,
        info=wait(backend.info()),
        options={},
        scope="",
        events="nodes",
    )
    told: list[dict[str, Any]] = []
    hosted = wait(run_row(job, {"topic": "tea"}, told.append))
    assert hosted["text"] == steps["text"]
    assert hosted["variables"] == steps["variables"]
    assert sorted(told, key=lambda event: event["node"]) == hosted["nodes"]


# --- what a graph holds ---------------------------------------------------------------------------


class Verdict(BaseModel):
    score: Annotated[int, Field(ge=1, le=5)]


@rm.function
def everything(s, topic: str, style="plain"):
    s += rm.system("Be brief.")
    with s.user():
        s += f"About {topic!s} in {style!r} style{'':>2}."
    with s.assistant(), s.var_scope("said"):
        s += "I say " + rm.gen("opening", max_tokens=8, stop=".") + "."
    s += rm.user("Which?") + rm.assistant(rm.select("kind", ["a", "b"]))
    views = s.fork(2)
    for index, view in enumerate(views):
        view += rm.user(f"{index}: " + topic + ", " + str(view["kind"]))
        view += rm.assistant(rm.gen("view", schema=Verdict))
    views.join()
    with s.copy() as aside:
        aside += rm.user(", ".join([topic, s["opening"], "end"]))
        aside += rm.assistant(rm.gen("samples", n=2, seed=7))
    s["constant"] = {"kept": 1}
    s += rm.user("Said: " + s["said"] + s["samples"][0][1].upper() + topic.title().strip())
    s += rm.assistant(rm.gen("label", schema=Literal["x", "y"]))
    return {
        "views": (s["view"], s["view"][0]),
        "label": [s["label"], f"<{s.get('label', str)}>", s.get("opening")],
        "constant": s["constant"],
        "none": None,
    }


def everything_answers(request: Generate) -> str:
    """Scripted answers that do not depend on the order of the requests."""
    if request.sampling.max_tokens == 0:
        return "b"
    if request.constraint is not None:
        return '{"score": 4}' if request.constraint.kind == "json_schema" else "y"
    return "words. More" if request.sampling.seed is None else f"sample {request.sampling.seed}"


def test_all_that_a_graph_can_hold():
    steps = everything.run(topic="tea", backend=rm.ScriptedBackend(everything_answers))
    compiled = everything.compile().run(topic="tea", backend=rm.ScriptedBackend(everything_answers))
    assert outcome(compiled) == outcome(steps)
    assert compiled.messages() == steps.messages()
    assert compiled["view"][0] == Verdict(score=4)
    assert compiled.ret_value["label"] == ["y", "<y>", "words"]
    assert "About tea in 'plain' style  ." in compiled.text()
    assert "Said: I say words.SAMPLE 8Tea" in compiled.text()
    assert compiled.get_meta_info("label")["finish_reason"]["type"] == "stop"
    assert compiled.prompt_of("label") == steps.prompt_of("label")
    for call, other in zip(compiled.trace.walk(), steps.trace.walk(), strict=True):
        assert call.line == other.line


def test_arguments_are_given_once():
    compiled = everything.compile(style="grand")
    assert str(compiled.graph()).startswith("everything(topic)")
    assert "'grand' style" in compiled.run("tea", backend=rm.ScriptedBackend(everything_answers)).text()
    whole = everything.bind(topic="tea").compile(backend=rm.ScriptedBackend(everything_answers))
    assert "About tea" in whole.run().text()
    assert (
        "About tea" in compiled.bind(topic="tea").run(backend=rm.ScriptedBackend(everything_answers)).text()
    )
    assert compiled.compile(topic="jam").graph().graph == compiled.graph().graph
    for wrong in ({}, {"topic": "a", "style": "b"}):
        with pytest.raises(TypeError):
            compiled.run(**wrong, backend=rm.ScriptedBackend([]))
    with pytest.raises(rm.InvalidRequest, match="topic must be JSON"):
        compiled.run(topic=b"tea", backend=rm.ScriptedBackend([]))
    with pytest.raises(TypeError, match="nothing"):
        everything.compile(nothing=1)
    with pytest.raises(rm.InvalidRequest, match="one output"):
        compiled.run(topic="a", n=2, backend=rm.ScriptedBackend([]))


def test_all_steps_are_known_when_the_first_request_is_sent():
    @rm.function
    def program(s):
        s += "A" + rm.gen("a") + "B" + rm.gen("b")
        for branch in s.fork(2):
            branch += "C" + s["a"] + rm.gen("c")
        s += "D" + rm.gen("d")

    backend = rm.ScriptedBackend({name: name for name in "abcd"})
    program.compile().run(backend=backend)
    hints = [request.hint for request in backend.requests]
    assert [hint.calls_left for hint in hints] == [4, 3, 2, 1, 0]
    assert hints[0].next_use == "soon"
    assert {hint.next_use for hint in hints[2:]} == {"never"}


def test_calls_that_do_not_wait_for_each_other_run_together():
    @rm.function
    def program(s):
        s += "first" + rm.gen("first")
        submit_prefix = s["first"]
        for branch in s.fork(3):
            branch += "behind" + submit_prefix + rm.gen("x")

    backend = Holding(lambda request: "one two")
    state = program.compile().run(backend=backend, stream=True)
    backend.started.block()
    assert backend.holding == 1
    backend.release.set()
    state.sync()
    assert state["first"] == "one two"
    assert state.error() is None


# --- failing, ending ------------------------------------------------------------------------------


def test_what_outlives_its_trace_fails_plainly():
    kept: list[Any] = []

    @rm.function
    def program(s):
        s += "a" + rm.gen("x")
        kept.append(s)
        s += rm.gen("y", validate=lambda y: y == kept[0]["x"])

    state = program.compile().run(backend=rm.ScriptedBackend(["x", "y"]))
    with pytest.raises(rm.ProgramError, match=r"gen 'y' .* The result of gen 'x' is not known"):
        state["y"]
    with pytest.raises(rm.ProgramError, match="its program has ended"):
        kept[0] += "more"


def test_a_failed_step_fails_what_needs_it():
    @rm.function
    def program(s):
        good, bad = s.fork(2)
        good += "good" + rm.gen("x")
        bad += "bad" + rm.gen("n", schema=int)
        s += "both" + good["x"] + rm.gen("end")
        return bad["n"]

    def run(made: Any) -> Any:
        with pytest.raises(rm.ProgramError) as failed:
            made.run(backend=rm.ScriptedBackend({"x": "a", "n": "none", "end": "."}, strict=False))
        return failed.value

    steps, compiled = run(program), run(program.compile())
    assert (str(steps), steps.line, steps.prompt, steps.partial) == (
        str(compiled),
        compiled.line,
        compiled.prompt,
        compiled.partial,
    )


def test_a_text_waits_for_a_result_that_fails():
    @rm.function
    def program(s):
        first = s.fork(1)[0]
        first += "a" + rm.gen("n", regex="[0-9]+")
        s += "b" + first["n"] + rm.gen("end")

    state = program.compile().run_batch(
        [{}], backend=rm.ScriptedBackend({"n": "none", "end": "."}, strict=False)
    )[0]
    assert "breaks its regex" in str(state.error())
    with pytest.raises(rm.ProgramError, match="breaks its regex"):
        state["end"]


def test_time_limits_and_cancelling():
    program = program_of("Q" + rm.gen("x", timeout=0.05))
    backend = Holding(lambda request: "one two")
    failed = program.compile().run(backend=backend).error()
    assert isinstance(failed.__cause__, RequestTimeout)
    state = everything.compile().run("tea", backend=Holding(everything_answers), stream=True)
    state.cancel()
    with pytest.raises(rm.ProgramError, match="cancelled"):
        state["label"]


async def test_an_async_program_is_compiled_and_awaited():
    @rm.function
    async def program(s, topic):
        s += f"Q {topic}" + rm.gen("x")
        branch = s.fork(1)[0]
        branch += "again " + await s.aget("x") + rm.gen("y")
        await s.wait()
        return await branch.aget("y")

    backend = rm.ScriptedBackend({"x": "a", "y": "b"})
    steps = await program.run("tea", backend=backend)
    compiled = program.compile()
    states = [
        await compiled.run("tea", backend=backend),
        await program.run("tea", backend=backend, compiled=True),
    ]
    states += await compiled.run_batch([{"topic": "tea"}], backend=backend)
    for state in states:
        assert (state.ret_value, [call.prompt for call in state.trace.walk()]) == (
            steps.ret_value,
            [call.prompt for call in steps.trace.walk()],
        )
    assert str(compiled.graph()).startswith("program(topic)\n")
