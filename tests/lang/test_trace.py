"""The tree of calls says exactly what was sent, cached, computed and generated."""

from __future__ import annotations

import pytest

import ramify as rm
from ramify.errors import BackendError
from ramify.messages import Usage
from ramify.programs.route import router
from tests.lang.backends import PHASES, Timed
from tests.lang.remote import ScriptedFrontend, live_endpoint
from tests.lang.steps import program_of


@rm.function
def judge(s, essay):
    s += rm.system("You grade essays.") + rm.user(essay)
    views = s.fork(2)
    for view in views:
        view += rm.user("Judge it.") + rm.assistant(rm.gen("verdict"))
    views.join()
    s += rm.user("Grade it.") + rm.assistant(rm.select("grade", ["A", "B"]))
    s += rm.user("Why?") + rm.assistant(rm.gen("why", n=2))


@pytest.fixture(scope="module")
def run():
    backend = rm.ScriptedBackend({"verdict": "It is fine.", "grade": "B", "why": ["So.", "So."]})
    return judge.run("An essay.", backend=backend), backend


def test_the_tree_follows_the_program(run):
    def shape(call):
        return (call.kind, call.name, [shape(child) for child in call.children])

    state, _ = run
    verdict = ("gen", "verdict", [])
    assert shape(state.trace) == (
        "program",
        "judge",
        [
            ("fork", "fork 0", [verdict]),
            ("fork", "fork 1", [verdict]),
            ("select", "grade", []),
            ("gen", "why", [("sample", "why", []), ("sample", "why", [])]),
        ],
    )


def test_usage_is_the_sum_over_all_requests(run):
    state, backend = run
    requests = [call for call in state.trace.walk() if call.requests and not call.children]
    assert state.trace.requests == len(requests) == len(backend.requests) == 5
    total = state.usage
    assert isinstance(total, Usage)
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens"):
        assert getattr(total, name) == sum(getattr(call.own_usage, name) for call in requests)
    assert total.prompt_tokens == sum(len(backend.encode(request.prompt)) for request in backend.requests)
    assert state.trace.computed_tokens == total.prompt_tokens - total.cached_tokens


def test_no_token_of_a_turn_is_computed_twice():
    @rm.function
    def agent(s):
        s += rm.system("Use tools.")
        for turn in range(20):
            s += rm.user(f"Result {turn} of the tool.") + rm.assistant(rm.gen("step"))
            s["step"]

    backend = rm.ScriptedBackend({"step": "Call the next tool."})
    state = agent.run(backend=backend)
    calls = state.trace.children
    assert len(calls) == 20
    before = 0
    for call in calls:
        # All that was sent and generated before is found again, but for the end-of-sequence token.
        assert call.own_usage.cached_tokens == before
        before = call.own_usage.prompt_tokens + call.own_usage.completion_tokens - 1


def test_exact_prompts_lines_and_times(run):
    state, backend = run
    calls = [call for call in state.trace.walk() if call.kind in ("gen", "select")]
    assert calls[0].prompt == backend.prompt_text(backend.requests[0])
    assert calls[0].prompt.endswith("Judge it.<|im_end|>\n<|im_start|>assistant\n")
    for call in state.trace.walk():
        assert call.end_s is not None
        assert call.duration_s >= 0
        assert 0 <= call.start_s <= call.end_s <= state.trace.end_s
    assert all(call.line.startswith(__file__) for call in calls)
    assert calls[0].first_text_s >= calls[0].start_s


def test_a_branch_has_the_trace_of_its_own(run):
    branches = []

    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        branches.append(s.fork(1)[0])
        branches[0] += "R" + rm.gen("y")

    state = program.run(backend=rm.ScriptedBackend({"x": "a", "y": "b"}))
    assert [call.name for call in branches[0].trace.children] == ["y"]
    assert branches[0].usage.completion_tokens == 2
    assert state.usage.completion_tokens == 4


def test_the_text_form_is_a_tree(run):
    state, _ = run
    lines = str(state.trace).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "judge",
        "├─ fork 0",
        "│",
        "├─ fork 1",
        "│",
        "├─ select grade",
        "└─ gen why",
    ]
    assert "gen verdict" in lines[2]
    assert lines[2].endswith("'It is fine.'")
    assert lines[5].endswith("'B'")
    assert "computed" in lines[0]
    assert "forced" in lines[0]


def test_plain_data(run):
    import json

    state, _ = run
    data = json.loads(json.dumps(state.trace.to_dict()))
    assert data["name"] == "judge"
    assert data["children"][0]["children"][0]["text"] == "It is fine."
    assert data["computed_tokens"] == data["prompt_tokens"] - data["cached_tokens"]


def test_forced_tokens_are_counted():
    program = program_of("Q:" + rm.gen("x", schema=bool))
    state = program.run(backend=rm.ScriptedBackend(["true"]))
    assert state.usage.forced_tokens == 0

    from typing import Literal

    longer = program_of("Q:" + rm.gen("x", schema=Literal["not at all", "very much so"]))
    state = longer.run(backend=rm.ScriptedBackend(["very much so"]))
    assert state.usage.forced_tokens == 2
    assert "(forced 2)" in str(state.trace)


# --- phases ---


@pytest.mark.parametrize("where", ["here", "calls", "programs"])
def test_requests_tell_their_phases(where):
    """Directly, over ``/v1/calls``, and over ``/v1/programs``."""
    program = program_of("Q:" + rm.gen("x") + " A:" + rm.select("y", ["a", "b"]))
    script = {"x": "one two", "y": "a"}
    if where == "here":
        state = program.run(backend=Timed(script))
    else:
        frontend = ScriptedFrontend(lambda request: "a")
        frontend.backend = Timed(script if where == "programs" else lambda request: "a")
        with live_endpoint(frontend, router) as (backend, _):
            ran = program.compile() if where == "programs" else program
            state = ran.run(backend=backend)
            state.sync()
    gen, select = state.trace.children
    assert gen.phases == select.phases == PHASES
    assert gen.to_dict()["phases"] == PHASES
    assert state.trace.phases is None
    assert "grammar 2.000 s  queue 0.500 s" in str(gen)


def test_phases_that_are_not_known_are_absent(run):
    state, _ = run
    assert {call.phases for call in state.trace.walk()} == {None}
    assert state.trace.to_dict()["children"][0]["children"][0]["phases"] is None
    assert "queue" not in str(state.trace)


def test_a_request_that_broke_off_has_no_phases():
    class Broken(Timed):
        async def generate(self, request):
            async for chunk in super().generate(request):
                yield chunk
                raise BackendError("gone")

    (call,) = program_of("Q:" + rm.gen("x")).run(backend=Broken({"x": "one two"})).trace.children
    assert call.usage.completion_tokens == 1
    assert call.usage.queue_s == 0.5
    assert call.phases is None


def test_short_waits_are_not_in_the_tree():
    (call,) = program_of("Q:" + rm.gen("x")).run(backend=Timed({"x": "one"})).trace.children
    call.end_s = call.start_s + 30.0
    assert "grammar 2.000 s" in str(call)
    assert "queue" not in str(call)
