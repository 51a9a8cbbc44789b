"""``POST /v1/programs``: graphs that run in the server, their events, and refused graphs."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import ramify as rm
import ramify.graph
from ramify.errors import BackendError, EngineError, Overloaded
from ramify.lang.graph import execute
from ramify.programs import route as program_route
from ramify.runtime.server import sse
from tests.lang.remote import RawServer, answer
from tests.server.fake_frontend import FakeFrontend, LiveServer, events, raw_post

Json = Any


@pytest.fixture(scope="module")
def module_server() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), program_route.router, max_running=8, max_waiting=8) as server:
        yield server


@rm.function
def program(s, topic: str):
    s += "About " + topic + ":" + rm.gen("first", max_tokens=8)
    branches = s.fork(2)
    for branch in branches:
        branch += " then " + rm.gen("more", max_tokens=4)
    branches.join()
    s += rm.select("kind", ["a", "b"])
    return branches["more"]


GRAPH: Json = msgspec.to_builtins(program.compile().graph().graph)
GRAPH_SOURCE = Path(ramify.graph.__file__).read_text()
PATH = "/v1/programs"


def text(*parts: Json, branch: int = 0) -> Json:
    return {"kind": "text", "parts": list(parts), "branch": branch}


def gen(name: str = "x", **more: Json) -> Json:
    return {"kind": "gen", "name": name, **more}


def graph(*nodes: Json, **more: Json) -> Json:
    return {"graph": {"nodes": list(nodes), **more}}


def test_the_answer_to_one_row(http: httpx.Client, frontend: FakeFrontend) -> None:
    answer = http.post(PATH, json={"graph": GRAPH, "arguments": {"topic": "tea"}, "cache_scope": "mine"})
    assert answer.status_code == 200, answer.text
    (row,) = answer.json()["rows"]
    assert row["text"] == "About tea:OUT TEA:a"
    assert row["variables"] == {"first": "OUT TEA:", "more": ["A: T", "A: T"], "kind": "a"}
    assert [(node["node"], node["branch"], node["name"]) for node in row["nodes"]] == [
        (1, 0, "first"),
        (4, 1, "more"),
        (6, 2, "more"),
        (8, 0, "kind"),
    ]
    assert row["nodes"][0]["value"] == "OUT TEA:"
    assert row["nodes"][0]["finish_reason"] == "length"
    assert row["usage"]["prompt_tokens"] > row["nodes"][0]["usage"]["prompt_tokens"] == len("About tea:")
    assert {request.scope for request in frontend.requests} == {"mine"}
    (ended,) = frontend.ended_programs
    assert {request.hint.program for request in frontend.requests if request.hint} == {ended}
    assert {request.hint.name for request in frontend.requests if request.hint} == {"program"}


def test_the_dashboard_shows_that_a_program_has_ended(http: httpx.Client, frontend: FakeFrontend) -> None:
    assert http.post(PATH, json={"graph": GRAPH, "arguments": {"topic": "tea"}}).status_code == 200
    (ended,) = frontend.ended_programs
    (shown,) = [one for one in http.get("/live").json()["programs"] if one["id"] == ended]
    assert shown["ended"]


def test_a_select_counts_as_one_request_however_many_its_choices(http: httpx.Client) -> None:
    answer = http.post(PATH, json=graph({"kind": "select", "choices": [f"c{i}" for i in range(17)]}))
    assert answer.status_code == 200, answer.text  # the server takes 16


def test_rows_run_together_and_are_told_in_their_order(http: httpx.Client, frontend: FakeFrontend) -> None:
    rows = [{"topic": f"topic {number}"} for number in range(9)]
    answers = http.post(PATH, json={"graph": GRAPH, "rows": rows}).json()["rows"]
    assert [answer["text"].partition(":")[0] for answer in answers] == [
        f"About {row['topic']}" for row in rows
    ]
    assert len(frontend.ended_programs) == 9


def test_a_row_without_what_a_path_names_fails_alone(http: httpx.Client, frontend: FakeFrontend) -> None:
    argument = {"from": "argument", "name": "a", "path": ["k"]}
    body = graph(text("x"), gen(options={"max_tokens": 1}), text(argument), arguments=["a"])
    rows = [{"a": {"k": "1"}}, {"a": {}}, {"a": {"k": "2"}}]
    first, failed, last = http.post(PATH, json={**body, "rows": rows}).json()["rows"]
    assert (first["text"], last["text"]) == ("xX1", "xX2")
    assert failed["failed"]["field"] == "a"
    assert "has nothing at ['k']" in failed["failed"]["message"]
    assert len(frontend.requests) == 2
    assert len(frontend.ended_programs) == 3
    alone = http.post(PATH, json={**body, "rows": rows[1:2]})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "a")


def test_references_to_long_texts_are_refused(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "MAX_TEXT", 1000)
    argument, result = {"from": "argument", "name": "a"}, {"from": "node", "node": 1}

    def ask(arguments: int, results: int) -> httpx.Response:
        nodes = text(*[argument] * arguments), gen(options={"max_tokens": 10}), text(*[result] * results)
        return http.post(PATH, json={**graph(*nodes, arguments=["a"]), "arguments": {"a": "x" * 100}})

    assert ask(9, 11).status_code == 200
    refused = ask(11, 0)
    problem = refused.json()["error"]
    assert (refused.status_code, problem["param"]) == (400, "a")
    assert "more than 1,000 characters" in problem["message"]
    assert "Refer to a long text once" in problem["message"]
    refused = ask(9, 12)
    assert refused.status_code == 400
    assert "more than 1,000 characters" in refused.json()["error"]["message"]


def nested(depth: int) -> Json:
    value: Json = "x"
    for number in range(depth):
        value = [value] if number % 2 else {"k": value}
    return value


@pytest.mark.parametrize(("depth", "status"), [(128, 200), (129, 400), (480, 400)])
def test_the_depth_of_arguments(http: httpx.Client, depth: int, status: int) -> None:
    argument = {"from": "argument", "name": "a"}
    body = {**graph(text("n", argument), gen(), arguments=["a"]), "arguments": {"a": nested(depth)}}
    answer = http.post(PATH, json=body)
    assert answer.status_code == status
    if status == 400:
        problem = answer.json()["error"]
        assert problem["param"] == "arguments.a"
        assert "nested more than 128 deep" in problem["message"]


def test_a_stream_tells_each_node_as_it_ends(server: LiveServer, frontend: FakeFrontend) -> None:
    frontend.hold_after = 3
    body = graph(
        text("one"), gen("a", options={"max_tokens": 2}), text(" two"), gen("b", options={"max_tokens": 5})
    )
    with (
        httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client,
        client.stream("POST", PATH, json={**body, "stream": True}) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert (first["row"], first["node"], first["name"], first["value"]) == (0, 1, "a", "ON")
        assert frontend.held.wait(60)  # the second gen waits, and the first has been told
        server.call(frontend.release.set)
        rest = [line.removeprefix("data: ") for line in lines]
    assert rest[-1] == "[DONE]"
    second, row = map(json.loads, rest[:-1])
    assert (second["node"], second["value"]) == (3, "NEON ")
    assert row["text"] == "oneON twoNEON "
    assert [node["node"] for node in row["nodes"]] == [1, 3]


def test_a_stream_that_has_nothing_to_tell_is_kept_open(
    server: LiveServer, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "SILENCE_S", 0.01)
    frontend.hold_after = 0
    backend = rm.RuntimeEndpoint(server.url)
    waiting = program.compile().run("tea", backend=backend, stream=True)
    body = {**graph(text("a"), gen(options={"max_tokens": 1})), "stream": True}
    with httpx.stream("POST", server.url + PATH, json=body, trust_env=False) as response:
        lines = (line for line in response.iter_lines() if line)
        assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
        server.call(frontend.release.set)
        assert [line for line in lines if line != ": keep-alive"][-1] == "data: [DONE]"
    assert waiting.text() == "About tea:OUT TEA:a"
    backend.close()


def test_options_of_the_run_fill_in_those_of_gens(http: httpx.Client, frontend: FakeFrontend) -> None:
    body = graph(
        text("a"), gen(), gen("y", options={"max_tokens": 3, "logit_bias": {"5": 1.0}}, stop=["end"])
    )
    options = {"max_new_tokens": 2, "temperature": 0.5, "logit_bias": {"7": -1.0}}
    http.post(PATH, json={**body, "sampling_params": options}).raise_for_status()
    first, second = (request.sampling for request in frontend.requests)
    assert (first.max_tokens, first.temperature, first.logit_bias) == (2, 0.5, {7: -1.0})
    assert (second.max_tokens, second.temperature, second.logit_bias) == (3, 0.5, {5: 1.0})
    assert second.stop == ("end",)


def test_constraints_scopes_samples_and_data(http: httpx.Client) -> None:
    body = graph(
        {"kind": "scope_begin", "name": "all"},
        text("list "),
        gen("n", options={"n": 2, "seed": 1, "max_tokens": 12}),
        {"kind": "scope_end", "name": "all"},
        gen("j", constraint={"kind": "choices", "source": '["yes"]'}),
        text("<", {"from": "node", "node": 2, "index": 1}, "|", {"from": "node", "node": 3}, ">"),
        gen(name=None, options={"max_tokens": 1}),
    )
    (row,) = http.post(PATH, json=body).json()["rows"]
    assert row["variables"] == {"n": ["LIST (1) …", "LIST (2) …"], "all": "list LIST (1) …", "j": "yes"}
    assert row["text"].startswith("list LIST (1) …yes<LIST (2) …|list LIST (1) …>")
    assert row["nodes"][-1]["name"] is None


DOCS = (Path(__file__).parents[2] / "docs" / "compiled-programs.md").read_text()


def blocks(section: str) -> list[str]:
    """The fenced blocks of a section of the documentation."""
    text = DOCS.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\w+\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)


def test_the_request_in_the_documentation(http: httpx.Client) -> None:
    body = json.loads(blocks("Over HTTP")[0])
    told = events(http.post(PATH, json={**body, "sampling_params": {"max_tokens": 4}}))
    assert told[-1] == "[DONE]"
    last = {event["row"]: event for event in told[:-1]}
    assert [set(last[row]["variables"]) for row in (0, 1)] == [{"word", "why", "kind"}] * 2
    assert last[1]["text"] == "A word for tea:" + last[1]["variables"]["word"]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", DOCS, re.MULTILINE)))
    assert set(listed) == {"kind"} | set(re.findall(r'tag="(\w+)"', GRAPH_SOURCE)) - {"argument", "node"}


def test_the_program_in_the_documentation(server: LiveServer, tmp_path: Path) -> None:
    path = tmp_path / "documented.py"
    path.write_text(blocks("Compiling")[0].replace("http://127.0.0.1:30000", server.url))
    code = (
        path.read_text().partition("graph = ")[0].replace("rm.user", "plain").replace("rm.assistant", "plain")
    )
    path.write_text(code.replace("import ramify as rm", "import ramify as rm\n\n\ndef plain(x): return x"))
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    backend = rm.RuntimeEndpoint(server.url)
    graph, report = scope["report"].compile(), scope["report"]
    rows = [{"topic": "trams"}, {"topic": "tea"}]
    states = graph.run_batch(rows, backend=backend)
    assert [state.ret_value for state in states] == [
        report.run(**row, backend=backend).ret_value for row in rows
    ]
    backend.close()


# --- garbage ----------------------------------------------------------------------------------------

FORK = {"kind": "fork", "children": [1, 2]}


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "graph", "graph is missing"),
        ({"graph": []}, "graph", "expected `object`"),
        (graph(), "graph.nodes", "no nodes"),
        ({"graph": {}}, "graph", "missing required field `nodes`"),
        (graph({"kind": "loop"}), "graph.nodes[0].kind", "invalid value 'loop'"),
        (graph({"parts": []}), "graph.nodes[0]", "missing required field `kind`"),
        (graph(text("a"), more=1), "graph", "unknown field `more`"),
        (graph({**text("a"), "line": 1}), "graph.nodes[0]", "unknown field `line`"),
        (graph(text("a", branch=1)), "graph.nodes[0].branch", "no earlier fork begins branch 1"),
        (graph(text({"from": "node", "node": 1}), gen()), "graph.nodes[0].parts[0]", "a graph has no cycles"),
        (graph(text({"from": "node", "node": 0})), "graph.nodes[0].parts[0]", "a graph has no cycles"),
        (graph(gen(), text({"from": "node", "node": 7})), "graph.nodes[1].parts[0]", "no node 7"),
        (graph(gen(), text({"from": "node", "node": -1})), "graph.nodes[1].parts[0]", "no node -1"),
        (graph(text("a"), text({"from": "node", "node": 0})), "graph.nodes[1].parts[0]", "has no result"),
        (graph(gen(), text({"from": "node", "node": 0, "index": 0})), "graph.nodes[1].parts[0]", "1 outputs"),
        (
            graph(gen(options={"n": 2}), text({"from": "node", "node": 0, "index": 2})),
            "graph.nodes[1].parts[0]",
            "2 outputs",
        ),
        (graph(text({"from": "argument", "name": "a"})), "graph.nodes[0].parts[0]", "no argument 'a'"),
        (graph(text("a"), arguments=["a", "a"]), "graph.arguments", "named twice"),
        (graph(gen(), arguments=["a"]), "arguments", "lacks the argument 'a'"),
        ({**graph(gen()), "arguments": {"a": "b"}}, "arguments.a", "no argument 'a'"),
        ({**graph(gen()), "arguments": [1]}, "arguments", "expected `object`"),
        ({**graph(gen()), "arguments": {}, "rows": [{}]}, "rows", "both given"),
        ({**graph(gen()), "rows": []}, "rows", "0 rows"),
        ({**graph(gen()), "rows": [{}, {"a": "b"}]}, "rows[1].a", "no argument 'a'"),
        ({**graph(gen()), "rows": [{}] * 5000}, "rows", "5000 rows"),
        ({**graph(gen()), "more": 1}, "more", "not a field"),
        ({**graph(gen()), "events": "chunks"}, "events", "needs stream"),
        ({**graph(gen()), "sampling_params": {"heat": 1}}, "heat", "no option 'heat'"),
        ({**graph(gen()), "sampling_params": {"n": 2}}, "n", "one output"),
        (graph(*[text("a")] * 4097), "graph.nodes", "at most 4096"),
        (
            graph(*({"kind": "fork", "children": list(range(at, at + 256))} for at in (1, 257, 513, 769))),
            "graph.nodes[3].children",
            "more than 1024 branches",
        ),
        (graph({"kind": "fork", "children": []}), "graph.nodes[0].children", "at least one branch"),
        (graph(FORK, FORK), "graph.nodes[1].children", "branch 1 has begun"),
        (graph({"kind": "fork", "children": [0]}), "graph.nodes[0].children", "branch 0 has begun"),
        (graph({"kind": "join", "children": [1]}), "graph.nodes[0].children", "branch 1 was not forked"),
        (graph({"kind": "join", "children": [0]}), "graph.nodes[0].children", "branch 0 was not forked"),
        (graph({"kind": "join", "children": []}), "graph.nodes[0].children", "at least one branch"),
        (
            graph(FORK, {"kind": "join", "children": [1], "branch": 2}),
            "graph.nodes[1].children",
            "was not forked from branch 2",
        ),
        (graph(FORK, {"kind": "join", "children": [1, 1]}), "graph.nodes[1].children", "has been joined"),
        (
            graph(FORK, {"kind": "join", "children": [1]}, text("a", branch=1)),
            "graph.nodes[2].branch",
            "has been joined",
        ),
        (
            graph({"kind": "join", "children": [1], "mode": "race"}),
            "graph.nodes[0].mode",
            "invalid enum value",
        ),
        (graph({"kind": "role_begin", "role": "judge"}), "graph.nodes[0].role", "invalid enum value"),
        (graph({"kind": "scope_end", "name": "a"}), "graph.nodes[0].name", "has not begun"),
        (graph({"kind": "select", "choices": []}), "graph.nodes[0].choices", "there must be choices"),
        (graph({"kind": "select", "choices": ["a", ""]}), "graph.nodes[0].choices", "none may be empty"),
        (
            graph({"kind": "select", "choices": ["a"], "method": "best"}),
            "graph.nodes[0].method",
            "invalid enum",
        ),
        (graph(gen(timeout=0)), "graph.nodes[0].timeout", "above 0"),
        (graph(gen(options={"stop": ["a"] * 40}, stop=["b"] * 40)), "graph.nodes[0].stop", "at most 64"),
        (
            graph(*({"kind": "fork", "children": [at + 1], "branch": at} for at in range(65))),
            "graph.nodes[64].children",
            "more than 64 forks",
        ),
        (graph(gen(options={"heat": 1})), "graph.nodes[0].options", "unknown field `heat`"),
        (graph(gen(options={"temperature": "hot"})), "graph.nodes[0].options", "`float`"),
        (graph(gen(options={"temperature": -1})), "graph.nodes[0].options.temperature", "between 0 and 100"),
        (graph(gen(constraint={"kind": "regex"})), "graph.nodes[0].constraint.regex", "regex is empty"),
        (graph(gen(constraint={"kind": "charm"})), "graph.nodes[0].constraint.kind", "invalid enum value"),
        (graph(gen(options={"n": 100})), None, "asks for 100 generations"),
    ],
)
def test_garbage_is_refused_by_name(
    http: httpx.Client, frontend: FakeFrontend, body: Json, field: str, message: str
) -> None:
    answer = http.post(PATH, json=body)
    problem = answer.json()["error"]
    assert (answer.status_code, problem["param"]) == (400, field), problem
    assert message in problem["message"]
    assert frontend.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"graph": {"nodes": [' + b"[" * 5000])
def test_bytes_that_are_no_program(http: httpx.Client, body: bytes) -> None:
    assert http.post(PATH, content=body).status_code == 400


# --- failing, ending ----------------------------------------------------------------------------------


def test_a_single_row_that_fails_is_answered_with_its_error(
    http: httpx.Client, frontend: FakeFrontend
) -> None:
    frontend.fail_first = Overloaded("The queue is full.", retry_after=3)
    body = graph(text("a"), gen())
    for stream in (False, True):
        answer = http.post(PATH, json={**body, "stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert answer.json()["error"]["message"] == "gen 'x' failed: The queue is full."
    rows = http.post(PATH, json={**body, "rows": [{}, {}]}).json()["rows"]
    assert [row["failed"]["code"] for row in rows] == ["overloaded"] * 2
    frontend.fail_first = RuntimeError("a bug")
    assert http.post(PATH, json=body).status_code == 500


def test_a_branch_that_nobody_needs_fails_alone(http: httpx.Client) -> None:
    body = graph(
        FORK,
        {**gen("late", timeout=1e-9), "branch": 1},
        {**gen("fine", options={"max_tokens": 1}), "branch": 2},
    )
    (row,) = http.post(PATH, json=body).json()["rows"]
    assert "failed" not in row
    late, fine = row["nodes"]
    assert late["failed"]["code"] == "timeout"
    assert "value" in fine


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_calls": 1}, "max_calls"),
        ({"max_total_tokens": 12}, "max_total_tokens"),
        ({"timeout": 1e-9}, "timeout"),
    ],
)
def test_each_run_has_the_limits_of_the_body(http: httpx.Client, options: Json, field: str) -> None:
    two = graph(gen("x", options={"max_tokens": 4}), gen("y", options={"max_tokens": 4}))
    two["graph"]["nodes"].insert(0, {"kind": "text", "parts": ["abc"]})
    answer = http.post(PATH, json=two | options)
    assert answer.status_code == 400
    problem = answer.json()["error"]
    assert (problem["code"], problem["param"]) == ("budget_exceeded", field)
    assert f"{field}=" in problem["message"]
    rows = http.post(PATH, json={**two, "rows": [{}, {}], "max_calls": 2}).json()["rows"]
    assert ["failed" in row for row in rows] == [False, False]


@pytest.mark.parametrize("options", [{"max_calls": 0}, {"max_total_tokens": 1.5}, {"timeout": -1}])
def test_wrong_limits_are_refused_by_name(http: httpx.Client, options: Json) -> None:
    answer = http.post(PATH, json=graph(gen()) | options)
    assert answer.status_code == 400
    assert next(iter(options)) in answer.json()["error"]["message"]


def test_a_role_that_the_template_does_not_have(http: httpx.Client) -> None:
    answer = http.post(PATH, json=graph({"kind": "role_begin", "role": "user"}, gen()))
    assert answer.status_code == 400
    assert "has no user turn" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_work_ends_when_the_client_goes_away(
    server: LiveServer, frontend: FakeFrontend, stream: bool
) -> None:
    frontend.hold_after = 0
    body = {**graph(FORK, {**gen(), "branch": 1}, {**gen(), "branch": 2}), "rows": [{}, {}], "stream": stream}
    request = httpx.Request("POST", server.url + PATH, json=body)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post(PATH, request.content))
        assert frontend.held.wait(60)
    assert frontend.idle.wait(60)
    assert frontend.closed.is_set()
    assert len(frontend.requests) == 4


def test_a_draining_server_takes_no_programs() -> None:
    frontend = FakeFrontend()
    frontend.hold_after = 0
    content = json.dumps({"text": "hi"}).encode()
    with (
        LiveServer(frontend, program_route.router) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        connection.sendall(raw_post("/generate", content))
        assert frontend.held.wait(60)
        server.stop()
        assert httpx.post(server.url + PATH, json=graph(gen()), trust_env=False).status_code == 503


# --- Ramify's own client ----------------------------------------------------------------------------


def test_a_submitted_program_streams_and_is_one_request(server: LiveServer, frontend: FakeFrontend) -> None:
    backend = rm.RuntimeEndpoint(server.url)
    state = program.compile().run("tea", backend=backend, stream=True)
    assert len(list(state.text_iter("first"))) > 1
    assert state.text() == "About tea:OUT TEA:a"
    assert state.ret_value == state["more"]
    assert len({request.hint.program for request in frontend.requests if request.hint}) == 1
    assert len(frontend.ended_programs) == 1
    backend.close()


def test_cancelling_a_submitted_program_ends_its_work(server: LiveServer, frontend: FakeFrontend) -> None:
    frontend.hold_after = 1
    backend = rm.RuntimeEndpoint(server.url)
    state = program.compile().run("tea", backend=backend, stream=True)
    assert frontend.held.wait(60)
    state.cancel()
    assert frontend.closed.wait(60)
    with pytest.raises(rm.ProgramError, match="cancelled"):
        state["kind"]
    backend.close()


def test_errors_of_a_submitted_program_keep_their_kind(server: LiveServer, frontend: FakeFrontend) -> None:
    backend = rm.RuntimeEndpoint(server.url, retries=0)
    frontend.fail_after = (2, EngineError("The device is lost."))
    failed = program.compile().run_batch([{"topic": "tea"}], backend=backend)[0].error()
    assert failed is not None
    assert type(failed.__cause__) is EngineError
    assert (failed.variable, failed.partial) == ("first", "OU")
    assert failed.line is not None
    assert failed.line.startswith(__file__)
    frontend.fail_after = None

    @rm.function
    def checked(s):
        s += "Q" + rm.gen("x", validate=lambda value: 1 / 0)
        s += rm.gen("y")

    frontend.hold_after = 2
    state = checked.compile().run(backend=backend, max_tokens=2)
    assert isinstance(state.error(), rm.ProgramError)
    with pytest.raises(rm.ProgramError, match="division by zero"):
        state["x"]
    assert frontend.idle.wait(60)
    backend.close()


def test_retries_keep_a_program_on_this_side() -> None:
    @rm.function
    def retrying(s):
        s += "Retry: " + rm.gen("x", validate=lambda value: value.index("!"), retries=1, max_tokens=8)

    frontend = FakeFrontend()
    frontend.script = ["no", "yes!"]
    with LiveServer(frontend) as server:  # to another one a request of the test before may still come
        backend = rm.RuntimeEndpoint(server.url)
        assert retrying.compile().run(backend=backend)["x"] == "yes!"
        assert len(frontend.requests) == 2
        backend.close()


def test_a_server_that_breaks_off(server: LiveServer) -> None:
    with LiveServer(FakeFrontend()) as other:  # one without the route
        backend = rm.RuntimeEndpoint(other.url)
        with pytest.raises(rm.ProgramError, match="There is no /v1/programs"):
            program.compile().run("tea", backend=backend)
        backend.close()
    backend = rm.RuntimeEndpoint(other.url)
    with pytest.raises(BackendError):
        program.compile().run("tea", backend=backend)
    backend.close()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ('{"row": 0, "request": 5}', "answered something else"),
        ('{"row": 0, "request": "0", "chunks": [{}]}', "answered something else"),
        ('{"row": 0}', "ended the program before this request"),
        ('{"row": 0, "failed": {"code": "overloaded", "message": "Too many."}}', "Too many."),
        ('{"row": 0, "request": "0", "chunks": [], "failed": {"code": "x", "message": "Odd."}}', "Odd."),
    ],
)
def test_a_server_that_tells_nonsense(told: str, message: str) -> None:
    info = {"ramify": msgspec.to_builtins(FakeFrontend().info)}

    def say(path: str) -> bytes:
        if path == "/get_model_info":
            return answer(json.dumps(info).encode())
        return answer(f"data: {told}\n\ndata: [DONE]\n\n".encode(), kind="text/event-stream")

    with RawServer(say) as server:
        backend = rm.RuntimeEndpoint(server.url, retries=0)
        with pytest.raises(rm.ProgramError, match=message):
            program.compile().run("tea", backend=backend)
        backend.close()


@pytest.mark.slow
def test_sixty_four_programs_at_once(server: LiveServer, frontend: FakeFrontend) -> None:
    backend = rm.RuntimeEndpoint(server.url)
    rows = [{"topic": f"topic {number}"} for number in range(64)]
    compiled = program.compile().run_batch(rows, backend=backend, num_threads=64)
    assert [state.error() for state in compiled] == [None] * 64
    assert [state.text() for state in compiled] == [
        state.text() for state in program.run_batch(rows, backend=backend)
    ]
    backend.close()
