"""Tool calls in compiled programs: the client runs the tools, here or while a server waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

import ramify as rm
from ramify.errors import InvalidRequest
from ramify.lang.graph.serve import Job, ToolResults
from ramify.programs.route import _ProgramStream, router
from ramify.runtime.config import ServerConfig
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from tests.lang.remote import ScriptedFrontend
from tests.server.conftest import LiveServer


@rm.tool
def weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise ValueError("There is no such city.")
    return f"sunny in {city}"


@rm.function
def agent(s, question):
    s += rm.system("Help.", tools=[weather]) + rm.user(question)
    turn = s.call_tools([weather], "calls", max_tokens=90)
    s += rm.assistant(rm.gen("answer", max_tokens=10))
    views = s.fork(2)
    for view in views:
        view += rm.user("And there?")
        view.call_tools([weather], "more", max_tokens=90)
        view += rm.assistant(rm.gen("last", max_tokens=10))
    views.join()
    s += rm.user("So?") + rm.assistant(rm.gen("end", max_tokens=10))
    return s["answer"], turn


@rm.function
def one_turn(s):
    s += rm.user("How?", tools=[weather])
    s.call_tools([weather], "calls", max_tokens=90)
    s += rm.assistant(rm.gen("answer", max_tokens=10))


def call(city: str) -> dict[str, Any]:
    return {"name": "weather", "arguments": {"city": city}}


def body_of(program: Any) -> dict[str, Any]:
    """The body of a request that streams a run with the id ``mine``."""
    return {"graph": msgspec.to_builtins(program.compile().graph().graph), "stream": True, "id": "mine"}


def events_of(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in stream.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


SCRIPT = {
    "calls": [call("Rome"), call("Atlantis")],
    "answer": "It is.",
    "more": [[call("Bonn")], [call("Oslo")]],
    "last": "Fine.",
    "end": "Good.",
}


def script() -> dict[str, Any]:
    return {**SCRIPT, "calls": [SCRIPT["calls"]]}


def test_a_graph_with_tools_runs_like_its_program() -> None:
    plain = agent.run("How?", backend=rm.ScriptedBackend(script()))
    graph = agent.compile()
    state = graph.run(question="How?", backend=rm.ScriptedBackend(script()))
    assert state.text() == plain.text()
    answer, turn = state.ret_value
    assert answer == "It is."
    assert [one.shown for one in turn] == [one.shown for one in plain.ret_value[1]]
    assert "describe weather" in str(graph.graph())
    assert "call_tools calls (weather)" in graph.graph().mermaid()


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_waits_for_the_tools_of_its_client(stream: bool) -> None:
    plain = agent.run("How?", backend=rm.ScriptedBackend(script()))
    with LiveServer(ScriptedFrontend(script()), router) as server:
        backend = rm.RuntimeEndpoint(server.url)
        state = agent.compile().run(question="How?", backend=backend, stream=stream)
        state.sync()
        backend.close()
    assert state.error() is None
    assert "Error: ValueError: There is no such city." in state.text()
    # The network decides which branch asks first.
    assert sorted(state.text()) == sorted(plain.text())
    assert [tool.name for tool in state.trace.walk() if tool.kind == "tool"] == ["weather"] * 4
    assert kinds_of(state) == kinds_of(plain)


def kinds_of(state: rm.ProgramState) -> dict[tuple[int, ...], list[tuple[str, str | None]]]:
    """Path of a branch → kind and name of its events that do not depend on the pieces of texts."""
    found: dict[tuple[int, ...], list[tuple[str, str | None]]] = {}
    for one in state.events():
        if not isinstance(one, rm.events.Appended | rm.events.Text | rm.events.CallText):
            name = getattr(one, "name", getattr(one, "step", None))
            found.setdefault(one.branch, []).append((type(one).__name__, name))
    assert len(found) == 3
    return {path: sorted(kinds, key=str) for path, kinds in found.items()}  # tools end in any order


def test_any_client_can_answer_the_calls() -> None:
    body = body_of(one_turn)
    answers = {"calls": [[call("Rome"), call("Oslo")]], "answer": "Sunny."}
    with LiveServer(ScriptedFrontend(answers), router) as server, contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
        refused = client.post("/v1/programs", json={**body, "stream": False})
        assert refused.status_code == 400
        assert "waits for the client's results" in refused.text
        events: list[dict[str, Any]] = []
        problems: list[tuple[int, str]] = []

        def answer(place: str) -> None:
            def send(run: str, **fields: Any) -> None:
                found = httpx.post(f"{server.url}/v1/programs/{run}/results", json=fields)
                problems.append((found.status_code, found.text))

            send("other", tools=place, results=["a"])
            send("mine", tools=place)
            send("mine", tools=place, results=["dry", "wet"])

        with client.stream("POST", "/v1/programs", json=body) as stream:
            for event in events_of(stream):
                events.append(event)
                if "tools" in event:
                    thread = threading.Thread(target=answer, args=(event["tools"],))
                    thread.start()
                    stack.callback(thread.join)
        late = client.post("/v1/programs/mine/results", json={"tools": "0", "results": []})
    (asked,) = (event for event in events if "tools" in event)
    assert [one["name"] for one in asked["calls"]] == ["weather", "weather"]
    assert [json.loads(one["arguments"]) for one in asked["calls"]] == [{"city": "Rome"}, {"city": "Oslo"}]
    row = events[-1]
    assert "dry" in row["text"]
    assert "wet" in row["text"]
    assert row["variables"]["calls"] == [
        {"name": "weather", "result": "dry"},
        {"name": "weather", "result": "wet"},
    ]
    assert [status for status, _ in problems[:3]] == [404, 400, 200]
    assert late.status_code == 404


async def test_equal_results_may_come_twice() -> None:
    results = ToolResults()
    results.put("0", ["a"])
    results.put("0", ["a"])
    assert await results.wait("0", 1) == ["a"]
    with pytest.raises(InvalidRequest, match="Other results of 0"):
        results.put("0", ["b"])
    waiting = asyncio.ensure_future(results.wait("1", 1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    results.put("1", ["late"])


def test_each_row_gets_the_results_of_its_own_calls() -> None:
    body = {**body_of(one_turn), "rows": [{}, {}]}
    frontend = ScriptedFrontend({"calls": [[call("Rome")], [call("Oslo")]], "answer": ["Sunny."] * 2})
    rows: dict[int, Any] = {}
    with LiveServer(frontend, router) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        path = "/v1/programs/mine/results"
        with client.stream("POST", "/v1/programs", json=body) as stream:
            for event in events_of(stream):
                if "tools" in event:
                    told = {"row": event["row"], "tools": event["tools"]}
                    fields = {**told, "results": [f"result of row {event['row']}"]}
                    assert httpx.post(server.url + path, json={**fields, "row": 2}).status_code == 404
                    assert httpx.post(server.url + path, json={**fields, "row": -1}).status_code == 404
                    assert httpx.post(server.url + path, json=fields).status_code == 200
                elif "text" in event:
                    rows[event["row"]] = event["variables"]["calls"]
    assert rows == {row: [{"name": "weather", "result": f"result of row {row}"}] for row in (0, 1)}


def test_an_id_that_runs_is_refused_and_is_free_again_at_the_end() -> None:
    body = body_of(one_turn)
    with LiveServer(ScriptedFrontend({"calls": [[call("Rome")]] * 2, "answer": "Sunny."}), router) as server:
        for _ in range(2):
            with httpx.stream("POST", f"{server.url}/v1/programs", json=body, timeout=20) as stream:
                assert stream.status_code == 200
                again = httpx.post(f"{server.url}/v1/programs", json=body)
                assert (again.status_code, again.json()["error"]["param"]) == (400, "id")
            results = {"tools": "none", "results": []}
            while httpx.post(f"{server.url}/v1/programs/mine/results", json=results).status_code == 200:
                time.sleep(0.01)  # the server has not heard that the client is gone


async def test_a_stream_that_never_begins_frees_its_id() -> None:
    service = Service(ScriptedFrontend(script()), ServerConfig())
    graph = one_turn.compile().graph().graph
    backend = rm.ScriptedBackend(script())
    job = Job(graph=graph, backend=backend, info=await backend.info(), options={}, scope="", events="nodes")
    stream = _ProgramStream(service, "mine", job, [{}], 1)
    assert len(service.programs["mine"]) == 1

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError

    calling = asyncio.ensure_future(stream({"type": "http"}, gone, send))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait((calling,))
    assert not service.programs


@pytest.mark.parametrize("retries", [0, 2])
def test_a_server_that_forgot_the_program_does_not_fail_its_step(retries: int) -> None:
    forgets = Router()

    @forgets.get("/forget")
    async def forget(request: Request) -> Response:
        Service.serving(request).programs.clear()  # as a restart does
        return Response()

    frontend = ScriptedFrontend({"calls": {**call("Rome"), "name": "forgetting"}, "dry in Rome": "Sunny."})
    with LiveServer(frontend, router, forgets) as server:
        backend = rm.RuntimeEndpoint(server.url, retries=retries)

        @rm.tool
        def forgetting(city: str) -> str:
            """The weather."""
            assert httpx.get(f"{server.url}/forget").status_code == 200
            return f"dry in {city}"

        @rm.function
        def asks(s):
            s += rm.user("How?", tools=[forgetting])
            s.call_tools([forgetting], "calls", max_tokens=90)
            s += rm.assistant(rm.gen("answer", max_tokens=10))

        state = asks.compile().run(backend=backend)
        assert state.error() is None
        assert state["answer"] == "Sunny."
        assert "dry in Rome" in state.text()
        backend.close()


def test_a_wrong_number_of_results_fails_the_step() -> None:
    body = body_of(one_turn)
    with (
        LiveServer(ScriptedFrontend({"calls": call("Rome")}), router) as server,
        httpx.stream("POST", f"{server.url}/v1/programs", json=body, timeout=20) as stream,
    ):
        for event in events_of(stream):
            if "tools" in event:
                fields = {"tools": event["tools"], "results": ["a", "b"]}
                httpx.post(f"{server.url}/v1/programs/mine/results", json=fields)
            failed = event.get("failed")
    assert "2 results for 1 calls" in str(failed)


def test_the_calls_are_no_text() -> None:
    @rm.function
    def shows(s):
        s += rm.user("How?", tools=[weather])
        turn = s.call_tools([weather], "calls")
        s += rm.user(f"You called {turn}.")

    with pytest.raises(rm.CompileError, match="is not known before the program runs"):
        shows.compile()


async def test_async_programs_can_await_the_turn() -> None:
    @rm.function
    async def asks(s):
        s += rm.user("How?", tools=[weather])
        turn = await s.call_tools([weather], "calls", max_tokens=90)
        s += rm.assistant(rm.gen("answer"))
        return turn

    backend = rm.ScriptedBackend({"calls": call("Rome"), "answer": "Sunny."})
    state = await asks.compile().run(backend=backend)
    assert [one.result for one in state.ret_value] == ["sunny in Rome"]
