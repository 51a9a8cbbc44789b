"""The dashboard and the data behind it."""

from __future__ import annotations

import base64
import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from ramify.errors import EngineError, WorkerDied
from ramify.messages import Finish, Generate, ProgramHint, TextChunk, Usage
from ramify.runtime.server.recent import CLIENT, NAME, PROGRAMS, REQUESTS, TEXT, Recent
from ramify.runtime.server.throughput import INTERVAL_S, INTERVALS, Throughput
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer


def ask(
    http: httpx.Client, text: str, program: str = "p1", path: tuple[str, ...] = ("gen x",), **more: Any
) -> None:
    hint = {"program": program, "name": "judge", "path": path, **more}
    body = {"text": text, "sampling_params": {"max_new_tokens": 5}, "program": hint}
    assert http.post("/generate", json=body).status_code == 200


def live(http: httpx.Client, program: str = "") -> Any:
    response = http.get("/live", params={"program": program})
    assert response.status_code == 200
    return response.json()


@pytest.fixture
def fresh() -> Iterator[httpx.Client]:
    """A client of a server that has had no request yet."""
    with LiveServer(FakeFrontend()) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_programs_and_their_requests(fresh: httpx.Client) -> None:
    ask(fresh, "An essay.", path=("gen first",))
    ask(fresh, "An essay. Its logic?", path=("fork 1", "gen verdict"), forks=["0/2"])
    ask(fresh, "Another.", program="p2")
    fresh.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 3})
    fresh.post("/end_program", json={"program": "p1"})
    found = live(fresh, "p1")
    assert [(one["id"], one["name"], one["requests"], one["ended"]) for one in found["programs"]] == [
        ("/v1/completions", "/v1/completions", 1, False),
        ("p2", "judge", 1, False),
        ("p1", "judge", 2, True),
    ]
    chosen = found["chosen"]
    assert (chosen["prompt_tokens"], chosen["cached_tokens"], chosen["completion_tokens"]) == (9 + 20, 9, 10)
    first, second = chosen["calls"]
    assert (first["path"], second["path"], second["forks"]) == (
        ["gen first"],
        ["fork 1", "gen verdict"],
        ["0/2"],
    )
    assert (second["prompt_tokens"], second["cached"], second["out"], second["outcome"]) == (
        20,
        9,
        5,
        "length",
    )
    assert (second["prompt"], second["text"]) == ("An essay. Its logic?", "S LOG")
    assert 0 <= first["start"] <= first["first"] <= first["end"] <= second["start"] <= chosen["now"]
    assert live(fresh, "nobody")["chosen"] is None
    # The sums of all requests are those of /metrics, where the prompt of several choices counts once.
    fresh.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 3, "n": 2})
    metrics = fresh.get("/metrics").text
    for name, tokens in live(fresh)["tokens"].items():
        assert f"\nramify_{name}_tokens_total {float(tokens)}\n" in metrics
    assert live(fresh)["tokens"]["prompt"] == 9 + 20 + len("Another.") + 2 * len("hello")


def test_a_request_that_runs_and_one_that_failed(server: LiveServer, frontend: FakeFrontend) -> None:
    with LiveServer(FakeFrontend()) as other, httpx.Client(base_url=other.url, timeout=60) as client:
        other.frontend.hold_after = 2
        asking = threading.Thread(target=ask, args=(client, "Wait for it."))
        asking.start()
        assert other.frontend.held.wait(60)
        program = live(client, "p1")["chosen"]
        assert (program["running"], program["idle_s"]) == (1, 0)
        assert (program["prompt_tokens"], program["completion_tokens"]) == (12, 2)
        assert not any(live(client)["tokens"].values()), "only requests that have ended count"
        (call,) = program["calls"]
        assert (call["end"], call["outcome"], call["out"], call["text"]) == (
            None,
            "",
            2,
            " F",
        )
        other.call(other.frontend.release.set)
        asking.join(60)
        other.frontend.fail_first = WorkerDied("The scheduler died.")
        assert client.post("/generate", json={"text": "x", "program": {"program": "p1"}}).status_code == 503
        program = live(client, "p1")["chosen"]
        assert (program["running"], program["failed"], program["completion_tokens"]) == (0, 1, 5)
        failed = program["calls"][1]
        assert (failed["outcome"], failed["error"]) == ("error", "The scheduler died.")
        assert 0 <= program["failed_s"] <= program["now"]


def test_texts_can_be_kept_out() -> None:
    with LiveServer(FakeFrontend(), live_texts=False) as server, httpx.Client(base_url=server.url) as client:
        ask(client, "A secret.")
        answer = client.get("/live", params={"program": "p1"})
        assert "secret" not in answer.text.lower()
        assert answer.json()["chosen"]["calls"][0]["out"] == 5
        server.frontend.fail_first = WorkerDied("A secret.")
        assert client.post("/generate", json={"text": "x", "program": {"program": "p1"}}).status_code == 503
        answer = client.get("/live", params={"program": "p1"})
        assert "secret" not in answer.text.lower()
        assert answer.json()["chosen"]["calls"][1]["error"] == "WorkerDied"


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"user-agent": "claude-cli/2.1.0 (external, cli)"}, "claude-cli/2.1.0"),
        ({"user-agent": "OpenAI/Python 3.57.0"}, "OpenAI/Python 3.57.0"),
        ({"user-agent": "curl/8.5.0", "x-title": "Notebook"}, "Notebook"),
        ({"user-agent": "x" * 1000}, "x" * CLIENT),
        ({"user-agent": ""}, ""),
        ({"user-agent": "(KHTML, like Gecko) foo/1"}, "foo/1"),
        (
            {"user-agent": "Mozilla/5.0 (X11) AppleWebKit/5 (KHTML) Chrome/1"},
            "Mozilla/5.0 AppleWebKit/5 Chrome/1",
        ),
        ({"user-agent": "foo/1 (an open comment"}, "foo/1"),
        ({"user-agent": "foo/1", "x-title": ""}, "foo/1"),
        ({"x-title": "Müller".encode()}, "Müller"),
        ({"x-title": b"\xff\xe2\x80\xaee"}, "\ufffd e"),
    ],
)
def test_the_name_of_a_client(http: httpx.Client, headers: Mapping[str, str | bytes], name: str) -> None:
    body = {"text": "Hello.", "sampling_params": {"max_new_tokens": 2}, "program": {"program": repr(headers)}}
    assert http.post("/generate", json=body, headers=headers).status_code == 200
    program = live(http, repr(headers))["chosen"]
    assert (program["client"], program["calls"][0]["client"]) == (name, name)


def test_the_scheduler_is_asked_only_when_somebody_looks_and_not_by_everybody(fresh: httpx.Client) -> None:
    frontend = FakeFrontend()
    with LiveServer(frontend) as server, httpx.Client(base_url=server.url) as client:
        ask(client, "An essay.")
        assert client.get("/").status_code == 200
        assert frontend.looks == 0
        for _ in range(20):
            live(client)
        assert 1 <= frontend.looks < 20


def test_a_scheduler_that_is_silent(fresh: httpx.Client) -> None:
    frontend = FakeFrontend()
    frontend.stats_error = EngineError("It restarts.")
    with LiveServer(frontend) as server, httpx.Client(base_url=server.url) as client:
        ask(client, "An essay.")
        found = live(client)
        assert (found["stats"], found["age_s"], found["tree"]) == (None, None, [])
        assert found["programs"][0]["id"] == "p1"


def test_the_page_needs_nothing_but_the_server(http: httpx.Client) -> None:
    response = http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert f"<title>{MODEL} · Ramify live</title>" in response.text
    text = response.text.replace("</", "")
    assert not re.search(r"""https?://|//\w|src=|href=|url\(|@import|XMLHttp|/\*include|<!--""", text)
    assert re.findall(r"fetch\(", text) == ["fetch("]
    assert "default-src 'none'; connect-src 'self'" in text


def test_the_key_opens_the_page_and_its_data() -> None:
    def basic(given: str) -> dict[str, str]:
        return {"authorization": "Basic " + base64.b64encode(given.encode()).decode()}

    with LiveServer(FakeFrontend(), api_key="ses:ame") as server, httpx.Client(base_url=server.url) as client:
        for path in ("/", "/live"):
            refused = client.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith("Basic ")
            for wrong in (basic("me:wrong"), basic("ses:ame"), {"authorization": "Basic ses:ame"}):
                assert client.get(path, headers=wrong).status_code == 401
            for right in (basic("me:ses:ame"), basic(":ses:ame"), {"authorization": "Bearer ses:ame"}):
                assert client.get(path, headers=right).status_code == 200
        # Elsewhere a password that a browser sends by itself opens nothing.
        assert client.get("/metrics", headers=basic("me:ses:ame")).status_code == 401


def recent_of(**options: bool) -> Recent:
    ticks = itertools.count()
    return Recent(clock=lambda: float(next(ticks)), **{"texts": True} | options)


def request_of(program: str, prompt: str = "Why?", path: tuple[str, ...] = ("gen x",)) -> Generate:
    hint = ProgramHint(program=program, name="judge", path=path)
    return Generate(rid=f"{program}-0", prompt=(prompt,), hint=hint)


def last_chunk(text: str = "", **usage: int) -> TextChunk:
    return TextChunk(rid="", text=text, ids=(1, 2), usage=Usage(**usage), finish=Finish(reason="stop"))


def test_programs_that_have_ended_are_forgotten_before_those_that_run() -> None:
    recent = recent_of()
    running = recent.record_request(request_of("kept"), "/generate")
    for number in range(2 * PROGRAMS):
        recent.record_request(request_of(f"p{number}"), "/generate").end_request("stop")
    assert [one.id for one in recent] == [f"p{2 * PROGRAMS - 1 - i}" for i in range(PROGRAMS - 1)] + ["kept"]
    running.end_request("stop")


def test_more_programs_run_than_are_remembered() -> None:
    recent = recent_of()
    recordings = [
        recent.record_request(request_of(f"p{number}"), "/generate") for number in range(2 * PROGRAMS)
    ]
    assert len(list(recent)) == PROGRAMS
    assert recent.get("p0") is None
    for recording in recordings:
        recording.add_chunk(last_chunk("so"))
        recording.end_request("stop")
    assert not any(one.running for one in recent)


def test_sums_outlive_the_requests_that_are_forgotten() -> None:
    recent = recent_of()
    for _ in range(REQUESTS + 10):
        recording = recent.record_request(request_of("p"), "/generate")
        recording.add_chunk(last_chunk(prompt_tokens=3, cached_tokens=1, evicted_tokens=1))
        recording.end_request("stop")
    (program,) = recent
    found = program.details(0.0)
    assert (found["requests"], len(found["calls"])) == (REQUESTS + 10, REQUESTS)
    assert (found["prompt_tokens"], found["evicted_tokens"]) == (3 * (REQUESTS + 10), REQUESTS + 10)


def test_texts_and_names_are_cut() -> None:
    recent = recent_of()
    recording = recent.record_request(
        request_of("p" * 1000, "x" * 1000 + "!", path=("n" * 1000,) * 1000), "/generate"
    )
    recording.add_chunk(last_chunk("y" * 1000))
    (program,) = recent
    (call,) = program.requests
    assert (len(program.id), len(call.path[0])) == (NAME, NAME)
    assert call.prompt == "x" * (TEXT - 1) + "!"
    assert call.text == "y" * TEXT
    assert len(call.path) < 100
    assert recent.get("p" * 1000) is program
    recent.end_program("p" * 1000)
    assert program.ended


def test_the_time_of_a_request() -> None:
    now = [0.0]
    recent = Recent(texts=True, clock=lambda: now[0])
    recording = recent.record_request(request_of("p"), "/generate")
    now[0] = 1.0
    recording.add_chunk(TextChunk(rid="", text="a", ids=(1,)))
    (program,) = recent
    call = program.details(9.0)["calls"][0]
    assert (call["start"], call["first"], call["end"], call["out"]) == (0.0, 1.0, None, 1)
    recording.add_chunk(last_chunk(grammar_s=1, queue_s=2, first_token_s=4, total_s=9))
    assert program.details(9.0)["calls"][0]["phases"] is None
    now[0] = 2.0
    recording.end_request("length")
    call = program.details(9.0)["calls"][0]
    assert (call["end"], call["outcome"]) == (2.0, "length")
    assert call["phases"] == {"grammar_s": 1, "queue_s": 2, "prefill_s": 1, "decode_s": 5}


def test_the_usage_of_a_running_request_counts() -> None:
    recent = recent_of()
    recording = recent.record_request(request_of("p"), "/generate")
    (program,) = recent
    assert program.summary(0.0)["prompt_tokens"] == 0
    first = TextChunk(rid="", ids=(1, 2), forced=(1,), usage=Usage(prompt_tokens=9, cached_tokens=4))
    recording.add_chunk(first)
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens", "running")
    assert [program.summary(0.0)[name] for name in names] == [9, 4, 2, 1, 1]
    recording.add_chunk(last_chunk(prompt_tokens=9, cached_tokens=4, completion_tokens=4, forced_tokens=2))
    recording.end_request("stop")
    assert [program.summary(0.0)[name] for name in names] == [9, 4, 4, 2, 0]


def test_throughput_of_intervals() -> None:
    now = [100.0]
    throughput = Throughput(lambda: now[0])
    throughput.add_tokens(300, 200, 0)
    assert throughput.to_dict()["prompt_tokens"] == []  # the first interval has not ended
    now[0] += INTERVAL_S
    throughput.add_tokens(0, 0, 40)
    throughput.add_tokens(0, 0, 2)
    now[0] += 2 * INTERVAL_S
    found = throughput.to_dict()
    assert (found["prompt_tokens"], found["cached_tokens"]) == ([300, 0, 0], [200, 0, 0])
    assert found["output_tokens"] == [0, 42, 0]


def test_throughput_is_kept_for_ten_minutes() -> None:
    now = [0.0]
    throughput = Throughput(lambda: now[0])
    for step in range(3 * INTERVALS):
        now[0] = step * INTERVAL_S
        throughput.add_tokens(0, 0, step)
    assert throughput.to_dict()["output_tokens"] == list(range(2 * INTERVALS - 1, 3 * INTERVALS - 1))
    now[0] = 1e9  # nobody asks anything for years
    assert throughput.to_dict()["output_tokens"] == [0] * INTERVALS


def test_requests_are_counted_in_the_throughput() -> None:
    now = [0.0]
    recent = Recent(texts=True, clock=lambda: now[0])
    recording = recent.record_request(request_of("p"), "/generate")
    usage = Usage(prompt_tokens=9, cached_tokens=4)
    recording.add_chunk(TextChunk(rid="", ids=(1, 2), usage=usage))
    now[0] = INTERVAL_S
    recording.add_chunk(last_chunk(prompt_tokens=9, cached_tokens=4, completion_tokens=4))
    recording.end_request("stop")
    now[0] = 2 * INTERVAL_S
    found = recent.throughput.to_dict()
    assert (found["prompt_tokens"], found["cached_tokens"]) == ([9, 0], [4, 0])
    assert found["output_tokens"] == [2, 2]


def test_the_prompt_of_several_choices_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[int, int, int]] = []
    monkeypatch.setattr(Throughput, "add_tokens", lambda self, *tokens: added.append(tokens))
    body = {"model": MODEL, "prompt": "Hello.", "n": 3, "max_tokens": 4}
    with LiveServer(FakeFrontend()) as server, httpx.Client(base_url=server.url) as client:
        usage = client.post("/v1/completions", json=body).json()["usage"]
    prompt, cached, output = map(sum, zip(*added, strict=True))
    assert (prompt, cached) == (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    assert (prompt > 0, output) == (True, 3 * 4)
