"""`ramify bench` against servers, its arithmetic, and its report."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ramify.bench import client, figures, load, workloads
from ramify.bench.client import Endpoint, LoadClient, Sample
from ramify.bench.load import Measured
from ramify.bench.plan import Plan, Series
from ramify.bench.report import report
from ramify.bench.workloads import COMPLETIONS, Job, Phase, Sizes
from ramify.cli import main
from ramify.errors import InvalidRequest, Overloaded
from tests.server import byte_model
from tests.server.fake_frontend import FakeFrontend, LiveServer

pytestmark = pytest.mark.slow


def instance(schema: Any) -> Any:
    """An instance of a schema of the JSON workloads."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema["type"]:
        case "object":
            return {name: instance(inner) for name, inner in schema["properties"].items()}
        case "array":
            return [instance(schema["items"])]
        case "integer":
            return schema["minimum"]
    return {"string": "s", "boolean": True}[schema["type"]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(byte_model, "_instance", instance)
    with LiveServer(FakeFrontend()) as server:
        yield server


SMALL = ["--requests", "6", "--concurrency", "2", "--prompt-tokens", "40"]


def bench(server: LiveServer, *arguments: str) -> int:
    return main.main(["bench", "--url", server.url, *SMALL, *arguments])


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_workload(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    names = "single,batch,prefix,tree"
    assert bench(server, "--workload", names, "--max-tokens", "5", "--json") == 0
    found = {line["workload"]: line for line in lines(capsys.readouterr().out)}
    assert list(found) == ["single", "batch", "prefix-cold", "prefix-warm", "tree"]
    for line in found.values():
        assert (line["failed"], line["first_error"]) == (0, None)
        assert line["output_tokens"] == 5 * line["requests"]
        assert line["itl_s"]["max"] >= 0  # pieces that arrive together have no time between them
        assert line["e2e_s"]["max"] >= line["ttft_s"]["p50"] > 0
    assert found["tree"]["requests"] == 5 * found["single"]["requests"] == 30
    assert found["prefix-warm"]["cached_share"] > 0.5 > found["batch"]["cached_share"]
    assert found["tree"]["cached_share"] > 0.5


def test_chats_go_on_from_the_answers(server: LiveServer) -> None:
    assert bench(server, "--workload", "tree", "--requests", "1", "--max-tokens", "5") == 0
    chats = [request.chat for request in server.frontend.requests if request.chat]
    assert [len(chat) for chat in chats] == [2, 4, 6, 8, 10]
    for before, after in itertools.pairwise(chats):
        assert after[: len(before)] == before
        assert after[len(before)].content == before[-1].content[-8:].upper()[:5]


def test_json_answers_are_checked(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--workload", "json-same,json-many", "--json") == 0
    same, many = lines(capsys.readouterr().out)
    assert (same["valid_share"], many["valid_share"]) == (1.0, 1.0)
    assert same["valid_per_s"] == pytest.approx(same["requests_per_s"])
    sources = [request.constraint.source for request in server.frontend.requests if request.constraint]
    assert (len(set(sources[:6])), len(set(sources[6:]))) == (1, 6)


def test_an_answer_that_is_cut_off_is_not_valid(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "--workload", "json-same", "--max-tokens", "5", "--json") == 0
    assert lines(capsys.readouterr().out)[0]["valid_share"] == 0.0


def test_the_table(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--workload", "single,json-same", "--goodput", "e2e=10000") == 0
    header, single, same = (re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines())
    ranks = [f"{name} {rank}" for name in ("TTFT", "TPOT", "ITL", "E2E") for rank in ("p50", "p99")]
    assert header == [
        "workload",
        "req/s",
        "out tok/s",
        *ranks,
        "cached",
        "good/s",
        "good",
        "valid",
        "client CPU",
    ]
    assert (single[0], same[0]) == ("single", "json-same")
    assert len(single) == len(header) - 1  # nothing to be valid
    assert same[-3:-1] == ["100%", "100%"]


def test_the_users_own_prompts(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    bodies = [
        "just text",
        {"prompt": [1, 2, 3], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5},
        {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        },
    ]
    file.write_text("\n\n".join(map(json.dumps, bodies)))
    arguments = ["--prompts", str(file), "--max-tokens", "20", "--json"]
    assert main.main(["bench", "--url", server.url, *arguments]) == 0
    (line,) = lines(capsys.readouterr().out)
    assert (line["workload"], line["requests"], line["valid_share"]) == ("prompts", 4, 1.0)
    asked = [request.sampling.max_tokens for request in server.frontend.requests[2:]]
    assert sorted(asked) == [2, 20, 20, 20]


def test_two_endpoints_alternate(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--workload", "batch", "--max-tokens", "4", "--runs", "3"]
    both = ["--name", "a", "--against", server.url + "/v1", "--against-name", "b"]
    file = tmp_path / "lines.jsonl"
    assert bench(server, *arguments, *both, "--jsonl", str(file)) == 0
    found = lines(file.read_text())
    assert [line["endpoint"] for line in found[:-1]] == ["a", "b", "b", "a", "a", "b"]
    assert found[-1]["ratio"] == "a / b"
    pairs = [(found[i]["requests_per_s"], found[j]["requests_per_s"]) for i, j in ((0, 1), (3, 2), (4, 5))]
    assert found[-1]["requests_per_s"] == sorted(a / b for a, b in pairs)[1]
    out, err = capsys.readouterr()
    assert "a / b" in out
    assert "b, batch, run 3: " in err
    # The same prompts for both in a run, and others in the next.
    prompts = [str(request.prompt) for request in server.frontend.requests[4:]]
    assert set(prompts[:6]) == set(prompts[6:12])
    assert len(set(prompts)) == 18


def test_arrivals_at_a_rate(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "batch", "--rate", "50,400", "--max-tokens", "3", "--json"]
    assert bench(server, *arguments, "--goodput", "e2e=10000,ttft=0.0001") == 0
    slow, fast = lines(capsys.readouterr().out)
    assert (slow["rate"], fast["rate"]) == (50.0, 400.0)
    assert slow["duration_s"] > fast["duration_s"]
    assert (slow["goodput_per_s"], slow["goodput_share"]) == (0.0, 0.0)


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
async def test_a_late_arrival_counts_from_when_it_was_due(arrivals: load.Arrivals) -> None:
    """An open loop does not wait for answers, and what it sends too late is not measured as quick."""
    sent: list[float] = []

    class Stub(LoadClient):
        async def send(self, path: str, body: Any, due: float | None = None) -> Sample:
            assert due is not None
            sent.append(due)
            await asyncio.sleep(0)
            return Sample(due, stamps=[due + 1], end=due + 2)

    stub = Stub(Endpoint("x", "http://127.0.0.1:9/v1", "m"))
    phase = Phase("p", [Job(COMPLETIONS, {})] * 200, 1)
    measured = await load.measure_phase(stub, phase, 10_000.0, "seed", arrivals)
    await stub.aclose()
    assert [sample.ttft_s for sample in measured.samples] == pytest.approx([1.0] * 200)
    assert 0.5 < 10_000 * (max(sent) - min(sent)) / (len(sent) - 1) < 2
    gaps = [after - before for before, after in itertools.pairwise(sent)]
    assert (gaps == pytest.approx([1e-4] * 199)) is (arrivals == "constant")


def test_all_requests_fail(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.frontend.fail_first = Overloaded("The queue is full.", retry_after=1)
    assert bench(server, "--workload", "batch") == 2
    assert "The queue is full." in capsys.readouterr().err


def test_a_phase_that_fails_leaves_the_others(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "single,prefix", "--prompt-tokens", "100", "--max-tokens", "2"]
    server.frontend.max_prompt_tokens = 650
    assert bench(server, *arguments, "--requests", "2") == 1
    out = capsys.readouterr().out
    assert "single" in out
    assert "first error of prefix-cold: invalid_request: The prompt is too long." in out


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--url", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--requests", "0"], "--requests must be"),
        (["--workload", "fast"], "'fast'; it must be one of single, batch"),
        (["--workload", "prompts"], "needs --prompts"),
        (["--prompts", "nowhere.jsonl"], "no file nowhere.jsonl"),
        (["--rate", "2,x"], "'x' is not a number"),
        (["--rate", "-1"], "'-1' is not a number"),
        (["--arrivals", "constant"], "--arrivals needs --rate"),
        (["--goodput", "itl=5"], "'itl=5' is not one of ttft=MS, tpot=MS, e2e=MS"),
        (["--goodput", "ttft=0"], "is not one of"),
        (["--against-name", "b"], "need --against"),
        (["--jsonl", "/nowhere/x"], "cannot be written"),
    ],
)
def test_bad_arguments(
    server: LiveServer, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, *arguments) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("text", "problem"), [("{", "line 1, is not JSON"), ("{}", "line 1, has not one")])
def test_bad_prompts(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(InvalidRequest, match=problem):
        workloads.read_prompts(str(tmp_path / "p.jsonl"))


# --- workloads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in workloads.WORKLOADS if name != "prompts"])
def test_a_seed_makes_the_same_and_another_makes_others(name: str) -> None:
    assert workloads.phases(name, "1", Sizes()) == workloads.phases(name, "1", Sizes())
    first, second = (workloads.phases(name, seed, Sizes())[0].jobs for seed in ("1", "2"))
    assert not [one for one, other in zip(first, second, strict=True) if one.body == other.body]


def test_what_is_shared_is_shared() -> None:
    cold, warm = workloads.phases("prefix", "1", Sizes())
    shared = workloads.words(1500, "1", "prefix") + " "
    prompts = [job.body["prompt"] for job in cold.jobs + warm.jobs]
    assert len(set(prompts)) == 128
    assert all(prompt.startswith(shared) for prompt in prompts)
    assert len(prompts[0].removeprefix(shared).split()) == 30


# --- arithmetic ---------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert figures.percentiles([]) is None
    assert figures.percentiles([float(i) for i in range(1, 101)]) == {
        "mean": 50.5,
        "p50": 50.0,
        "p90": 90.0,
        "p95": 95.0,
        "p99": 99.0,
        "max": 100.0,
    }
    assert figures.percentiles([3.0]) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 3.0)


GOOD = Sample(10.0, end=12.0, stamps=[10.5, 11.0, 11.5], prompt_tokens=8, cached_tokens=4, output_tokens=5)


def test_the_figures_of_a_phase() -> None:
    bad = Sample(10.0, end=99.0, error="gone")
    found = figures.figures(Measured([GOOD, bad], 4.0, 1.0), {"ttft": 0.5, "e2e": 2.0})
    assert (found["requests"], found["failed"], found["first_error"]) == (2, 1, "gone")
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["total_tokens_per_s"]) == (
        0.25,
        1.25,
        3.25,
    )
    assert found["ttft_s"]["max"] == 0.5
    assert found["itl_s"]["p50"] == 0.5
    assert found["tpot_s"]["p50"] == 0.25  # a second for four tokens in two pieces
    assert (found["e2e_s"]["p50"], found["cached_share"], found["client_cpu_share"]) == (2.0, 0.5, 0.25)
    assert (found["goodput_per_s"], found["goodput_share"]) == (0.25, 0.5)
    assert figures.figures(Measured([GOOD], 4.0, 1.0), {"tpot": 0.2})["goodput_share"] == 0.0


def test_the_median_of_runs() -> None:
    runs = [
        {"requests": 2, "failed": 0, "first_error": None, "x": v, "t": {"p50": v}} for v in (1.0, 9.0, 2.0)
    ]
    runs.append({"requests": 2, "failed": 2, "first_error": "gone", "x": 3.0, "t": None})
    assert figures.median(runs) == {
        "runs": 4,
        "requests": 8,
        "failed": 2,
        "first_error": "gone",
        "x": 2.5,
        "t": {"p50": 2.0},
    }


def test_events_cut_anywhere_are_read() -> None:
    text = "".join(
        f"data: {json.dumps(event)}\r\n\r\n"
        for event in (
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "Grüße"}}]},
            {"choices": [{"text": " du"}]},
            {
                "choices": [],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None},
            },
        )
    )
    data = (text + "data: [DONE]\n\n").encode()
    for size in (1, 7, 1000):
        pieces = [(float(i), data[i : i + size]) for i in range(0, len(data), size)]
        sample = client.read_chunks(Sample(0.0, pieces))
        assert (sample.text, sample.prompt_tokens, sample.output_tokens) == ("Grüße du", 3, 2)
        assert len(sample.stamps) == 2
        assert sample.error is None


def test_an_error_within_a_stream_is_the_requests() -> None:
    sample = client.read_chunks(Sample(0.0, [(0.0, b'data: {"error": {"message": "out of pages"}}\n\n')]))
    assert sample.error == "out of pages"
    assert client.read_chunks(Sample(0.0, [(0.0, b"data: {\n\n")])).error is not None
    assert client.read_chunks(Sample(0.0, [(0.0, b"data: [DONE]\n\n")])).error == "The server sent no text."


# --- the report ---------------------------------------------------------------------------------


def plots(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


@pytest.mark.parametrize("rates", [[], ["--rate", "100,200", "--goodput", "e2e=10000"]])
def test_the_report(rates: list[str], server: LiveServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.html"
    both = ["--name", "<a>", "--against", server.url, "--against-name", "b", "--max-tokens", "4"]
    assert bench(server, "--workload", "batch,json-same", *both, *rates, "--html", str(file)) == 0
    text = file.read_text()
    assert "&lt;a&gt; against b" in text
    assert "<a>" not in text
    assert not [word for word in ("src=", "@import", 'href="http') if word in text]
    drawn = plots(text)
    assert len(drawn) == 2
    for plot in drawn:
        words = "".join(plot.itertext())
        assert ("Throughput" in words) == (not rates)
        for title in ("Time to first text", "Between pieces of text", "Whole request", "<a>"):
            assert title in words
        assert ("requests/s offered" in words and "b within bounds" in words) == bool(rates)


def test_a_report_of_failures_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    failed = figures.figures(Measured([Sample(0.0, error="gone")], 1.0, 0.0), {})
    worked = figures.figures(Measured([GOOD], 1.0, 0.0), {})
    series = [Series("w", "a", rate, [found]) for rate, found in ((1.0, failed), (2.0, worked))]
    endpoint = Endpoint("a", "http://a/v1", "m")
    assert len(plots(report(series, Plan([endpoint], ["w"], Sizes())))) == 1


def test_a_report_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main.main(["bench", "--html", "never.html"]) == 2
    assert "ramify-llm[bench]" in capsys.readouterr().err
