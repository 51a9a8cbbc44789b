"""Limits of blocks in compiled programs: the same step by step, as a graph, and at a server."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

import ramify as rm
from ramify.bounds import Bounds
from ramify.errors import InvalidRequest
from ramify.graph import Gen, Graph
from ramify.programs.route import router
from tests.lang.compiling import line_of, refusal
from tests.lang.remote import ScriptedFrontend
from tests.lang.steps import cause, program_of
from tests.server.conftest import LiveServer


def facts(program: Any, **options: Any) -> Any:
    """The outcome of a run: its text, or its error and the spending of its limit."""
    try:
        return program.run(**options).text()
    except rm.ProgramError as error:
        found = cause(error)
        spent = found.message, found.field, found.bound, found.spent
        return str(error), error.variable, error.prompt, error.partial, spent


@rm.function
def calls(s):
    s += "a" + rm.gen("a")
    with rm.limit(max_calls=2):
        s += "b" + rm.gen("b")
        with rm.limit(max_calls=5):
            s += "c" + rm.select("c", ["x", "y"])
            s += "d" + rm.gen("d")
    s += "e" + rm.gen("e")


@rm.function
def tokens(s):
    with rm.limit(max_total_tokens=100):
        s += "a" + rm.gen("a")
        with rm.limit(max_total_tokens=8):  # tokens
            s += "b" + rm.gen("b")
            s += "c" + rm.gen("c")


@rm.function
def turns(s):
    with rm.limit(max_total_tokens=9):
        s += rm.user("Kind?") + rm.assistant(rm.select("kind", ["x", "y"]))
    with rm.limit(max_calls=2):
        s += rm.when(s["kind"], {"x": "X" + rm.gen("a"), "y": "Y" + rm.gen("a")})
        rm.repeat(s, again, until="y", at_most=3)


def again(s):
    s += "?" + rm.select("c", ["x", "y"])
    return s["c"]


@rm.function
def enough(s):
    for name in "abc":
        with rm.limit(max_calls=1, timeout=60):
            s += name + rm.gen(name)


ANSWERS: dict[str, Any] = {"a": "one", "b": "two", "c": "x", "d": "four", "e": "five", "kind": "x"}


@pytest.mark.parametrize("program", [calls, tokens, turns, enough])
def test_the_same_in_a_graph_and_at_a_server(program: Any) -> None:
    plain = facts(program, backend=rm.ScriptedBackend(ANSWERS))
    assert isinstance(plain, str) == (program is enough)
    backend = rm.ScriptedBackend(ANSWERS)
    assert facts(program.compile(), backend=backend) == plain
    with LiveServer(ScriptedFrontend(ANSWERS), router) as server:
        endpoint = rm.RuntimeEndpoint(server.url)
        assert facts(program.compile(), backend=endpoint) == plain
        assert facts(program, backend=endpoint, compiled=True, stream=True) == plain
        endpoint.close()
        assert len(server.frontend.requests) == 2 * len(backend.requests)


def test_each_run_has_limits_of_its_own() -> None:
    compiled = calls.compile()
    states = compiled.run_batch([{}, {}], backend=rm.ScriptedBackend(lambda request: "x"))
    assert [(cause(state).spent, state.error().variable) for state in states] == [(2, "d")] * 2


def test_a_block_is_named_by_its_line() -> None:
    state = tokens.compile().run(backend=rm.ScriptedBackend(ANSWERS))
    assert f"max_total_tokens=8 of the limit at {line_of(__file__, 'tokens')}" in str(cause(state))
    assert "gen b in limit 0 (max_total_tokens=100) in limit 1 (max_total_tokens=8)" in str(
        tokens.compile().graph()
    )


def test_branches_and_joins() -> None:
    @rm.function
    def program(s):
        with rm.limit(max_calls=3):
            forks = s.fork(2)
            for fork in forks:
                fork += "?" + rm.gen("x")
        with rm.limit(max_calls=1):
            forks[0] += "!" + rm.gen("y")
            forks[1] += "!"
        with rm.limit(timeout=60):
            forks.join("concate_and_append")
        s += "." + rm.gen("z")

    graph = program.compile().graph().graph
    limits = [node.limits for node in graph.nodes if getattr(node, "limits", ())]
    assert limits == [(0,), (0,), (0, 1), (2,)]
    texts = {
        made.run(backend=rm.ScriptedBackend(lambda request: "x")).text()
        for made in (program, program.compile())
    }
    assert texts == {"?x!x?x!.x"}


async def test_async_programs() -> None:
    @rm.function
    async def program(s):
        with rm.limit(max_calls=1):
            s += "a" + rm.gen("x")
            s += "b" + rm.gen("y")

    for made in (program, program.compile()):
        state = await made.run(backend=rm.ScriptedBackend(lambda request: "x"))
        await state.wait()
        assert state.error().variable == "y"
        assert cause(state).spent == 1


def test_programs_that_a_tool_runs_count() -> None:
    helper = program_of("?" + rm.gen("x"))

    @rm.tool
    def ask() -> str:
        """Ask."""
        return helper.run(backend=backend)["x"]

    @rm.function
    def agent(s, most):
        s += rm.system("Ask.", tools=[ask]) + rm.user("Go on.")
        with rm.limit(max_calls=most):
            return s.call_tools([ask], name="calls")

    for given in (agent.bind, agent.compile):
        backend = rm.ScriptedBackend({"calls": [[{"name": "ask", "arguments": {}}]] * 2, "x": "yes"})
        (call,) = given(most=1).run(backend=backend).ret_value
        assert cause(call.error).bound == 1
        assert given(most=2).run(backend=backend).ret_value[0].shown == "yes"


def test_the_time_of_a_block_begins_with_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("ramify.lang.calls.limits.time", clock)

    @rm.function
    def program(s):
        s += "a" + rm.gen("a")
        with rm.limit(timeout=150):
            for name in "bcd":
                s += name + rm.gen(name)

    def answer(request: Any) -> str:
        now[0] += 100
        return "x"

    state = program.compile().run(backend=rm.ScriptedBackend(answer))
    assert (state.error().variable, cause(state).field, cause(state).spent) == ("d", "timeout", 200)


def test_what_was_spent_is_not_known_while_tracing() -> None:
    @rm.function
    def program(s):
        with rm.limit(max_calls=9) as spent:
            assert spent.calls == 0
            s += "a" + rm.gen("x")
        if spent.calls > 1:  # reads
            s += "b"

    error = refusal(program)
    assert "What a limit's steps have spent is not known before the program runs" in str(error)
    assert error.line == line_of(__file__, "reads")
    with LiveServer(ScriptedFrontend({"x": "y"}), router) as server:
        endpoint = rm.RuntimeEndpoint(server.url)
        assert program.run(backend=endpoint, compiled=True).text() == "ay"
        endpoint.close()


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        ('"limits":[{"max_calls":1}],"nodes":[{"kind":"gen","limits":[1]}]', "nodes[0].limits"),
        ('"limits":[{"max_calls":1}],"nodes":[{"kind":"gen","limits":[-1]}]', "different indices below 1"),
        (
            '"limits":[{"max_calls":1}],"nodes":[{"kind":"select","choices":["a"],"limits":[0,0]}]',
            "different",
        ),
        ('"limits":[{}],"nodes":[{"kind":"gen"}]', "each with timeout"),
        (f'"limits":[{",".join(["{}"] * 1025)}],"nodes":[{{"kind":"gen"}}]', "1024 limits"),
        ('"limits":[{"max_calls":0}],"nodes":[{"kind":"gen"}]', "limits[0].max_calls"),
        ('"limits":[{"max_calls":1.5}],"nodes":[{"kind":"gen"}]', "limits[0].max_calls"),
        ('"limits":[{"calls":1}],"nodes":[{"kind":"gen"}]', "unknown field `calls`"),
        ('"nodes":[{"kind":"text","parts":[],"limits":[]}]', "unknown field `limits`"),
    ],
)
def test_wrong_graphs_are_refused(graph: str, problem: str) -> None:
    with pytest.raises((InvalidRequest, msgspec.ValidationError), match=re.escape(problem)):
        msgspec.json.decode(f"{{{graph}}}", type=Graph).check()


def test_a_graph_with_deep_limits_is_refused() -> None:
    graph = Graph(limits=(Bounds(max_calls=1),) * 65, nodes=(Gen(limits=tuple(range(65))),))
    with pytest.raises(InvalidRequest, match="more than 64 limits"):
        graph.check()


def test_tokens_that_the_runtime_counts(endpoint: rm.RuntimeEndpoint) -> None:
    """The runtime ends the requests. The server names the limit."""

    @rm.function
    def program(s):
        with rm.limit(max_total_tokens=120):  # outer
            forks = s.fork(2)
            for fork in forks:
                with rm.limit(max_total_tokens=100):
                    fork += "Count: " + rm.gen("x", max_tokens=500, ignore_eos=True, temperature=0)
            with rm.limit(timeout=1000):
                s += "And: " + rm.gen("y", max_tokens=500, ignore_eos=True, temperature=0)
        return list(forks)

    compiled = program.compile()
    with rm.limit(max_total_tokens=100_000):
        states = compiled.run(backend=endpoint, max_total_tokens=10_000).ret_value
    errors = [cause(fork.error()) for fork in states]
    named = f"max_total_tokens=120 of the limit at {line_of(__file__, 'outer')}: "
    assert [error.message.startswith(named) for error in errors] == [True] * 2, errors
    assert all(100 <= error.spent <= 130 for error in errors)


def test_time_at_a_server(endpoint: rm.RuntimeEndpoint) -> None:
    @rm.function
    def program(s):
        s += "Hi" + rm.gen("a", max_tokens=2, ignore_eos=True)
        with rm.limit(timeout=0.02):  # timed
            s += "Count: " + rm.gen("x", max_tokens=1500, ignore_eos=True, temperature=0)

    state = program.compile().run(backend=endpoint)
    assert state.error().variable == "x"
    named = f"timeout=0.02 of the limit at {line_of(__file__, 'timed')} is over"
    assert cause(state).message.startswith(named)


def test_over_http_a_limit_is_named_by_its_index() -> None:
    graph = {
        "limits": [{"max_calls": 1}],
        "nodes": [
            {"kind": "text", "parts": ["a"]},
            {"kind": "gen", "name": "x", "limits": [0]},
            {"kind": "gen", "name": "y", "limits": [0]},
        ],
    }
    with LiveServer(ScriptedFrontend({"x": "one"}), router) as server:
        answer = httpx.post(f"{server.url}/v1/programs", json={"graph": graph}, timeout=20)
    assert answer.status_code == 400
    assert "max_calls=1 of limit 0 of 'program': 1 calls are spent." in answer.text
