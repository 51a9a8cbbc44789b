"""Spans of OpenTelemetry: of requests at the server, below the spans of programs, and on their way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

import ramify as rm
from ramify.errors import InvalidRequest, WorkerDied
from ramify.programs.route import router
from ramify.runtime.config import ServerConfig
from ramify.runtime.server.app.serve import serve
from ramify.spans import PROGRAMS, _exporting, tracer_of
from tests.lang.remote import ScriptedFrontend
from tests.lang.test_tools import after_trigger, written
from tests.server.conftest import CHAT, COMPLETION
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

trace = pytest.importorskip("opentelemetry.trace", reason="needs ramify-llm[otel]")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "the lighthouse keeper's password"


@pytest.fixture(scope="module")
def exporter() -> Any:
    """An exporter in memory, of a provider that the application, this test, has set."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


@pytest.fixture(scope="module")
def traced(exporter: Any) -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), otel=True) as server:
        yield server


@pytest.fixture
def spans(exporter: Any) -> Any:
    """The spans that have ended since the test began."""
    exporter.clear()
    return lambda: list(exporter.get_finished_spans())


@pytest.fixture
def programs(spans: Any) -> Iterator[None]:
    rm.enable_otel()
    yield
    PROGRAMS.tracer, PROGRAMS.texts = None, False


def test_a_request_is_a_span_in_the_trace_of_its_client(traced: LiveServer, spans: Any) -> None:
    traced.frontend.reset()
    headers = {"traceparent": PARENT, "tracestate": "a=b", "x-request-id": "mine"}
    body = CHAT | {"temperature": 0.5, "seed": 3, "stop": ["zzz"]}
    with httpx.Client(base_url=traced.url) as http:
        for stream in (False, True):
            answer = http.post("/v1/chat/completions", json=body | {"stream": stream}, headers=headers)
            assert answer.status_code == 200
    usage = http_usage(traced, body)
    for span, cached in zip(spans()[:2], (0, usage["prompt_tokens"] - 1), strict=True):
        assert span.name == f"chat {MODEL}"
        assert span.kind is trace.SpanKind.SERVER
        assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        assert span.context.trace_state.get("a") == "b"
        assert span.status.is_ok
        told = dict(span.attributes)
        assert told.pop("gen_ai.response.id").startswith("chatcmpl-")
        assert told.pop("gen_ai.usage.cache_read.input_tokens", 0) == cached
        assert told.pop("gen_ai.response.time_to_first_chunk") >= 0
        assert told.pop("ramify.client").startswith("python-httpx")
        assert told == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "ramify",
            "gen_ai.request.model": MODEL,
            "gen_ai.response.model": MODEL,
            "gen_ai.request.max_tokens": 2,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.top_k": 0,
            "gen_ai.request.seed": 3,
            "gen_ai.request.presence_penalty": 0.0,
            "gen_ai.request.frequency_penalty": 0.0,
            "gen_ai.request.stop_sequences": ("zzz",),
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.response.finish_reasons": ("length",),
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "ramify.request_id": "mine",
        }


def http_usage(server: LiveServer, body: Any) -> Any:
    return httpx.post(server.url + "/v1/chat/completions", json=body).json()["usage"]


def test_every_attribute_of_the_conventions_is_one_of_theirs(
    traced: LiveServer, spans: Any, programs: None
) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    rm.enable_otel(texts=True)
    backend = rm.ScriptedBackend({"plan": "Two."})
    assert ask.run(thing="tram", backend=backend)["plan"] == "Two."
    names = {name for span in spans() for name in span.attributes if name.startswith("gen_ai.")}
    assert len(names) > 8
    assert names <= known


def test_failures_and_refusals_are_spans(traced: LiveServer, spans: Any) -> None:
    traced.frontend.reset()
    traced.frontend.fail_first = WorkerDied("The scheduler died.")
    headers = {"traceparent": PARENT}
    url = traced.url + "/v1/completions"
    assert httpx.post(url, json=COMPLETION, headers=headers).status_code == 503
    assert httpx.post(url, json=COMPLETION | {"top_p": 7}, headers=headers).status_code == 400
    assert httpx.get(traced.url + "/v1/nothing").status_code == 404
    failed, refused = spans()
    assert failed.name == f"text_completion {MODEL}"
    assert failed.attributes["error.type"] == WorkerDied.code
    assert failed.attributes["http.response.status_code"] == 503
    assert not failed.status.is_ok
    assert refused.name == "POST /v1/completions"
    assert refused.attributes["http.response.status_code"] == 400
    assert f"{refused.parent.span_id:016x}" == PARENT.split("-")[2]


def test_texts_are_told_only_if_asked_for(exporter: Any, traced: LiveServer, spans: Any) -> None:
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": SECRET}]}
    traced.frontend.reset()
    httpx.post(traced.url + "/v1/chat/completions", json=body)
    (span,) = spans()
    assert SECRET not in str(dict(span.attributes))
    exporter.clear()
    with LiveServer(FakeFrontend(), otel=True, log_texts=True) as server:
        answer = httpx.post(server.url + "/v1/chat/completions", json=body).json()
    (span,) = spans()
    (asked,) = json.loads(span.attributes["gen_ai.input.messages"])
    assert asked == {"role": "user", "parts": [{"type": "text", "content": SECRET}]}
    (said,) = json.loads(span.attributes["gen_ai.output.messages"])
    text = answer["choices"][0]["message"]["content"]
    assert said == {
        "role": "assistant",
        "parts": [{"type": "text", "content": text}],
        "finish_reason": "length",
    }


@rm.function
def ask(s: rm.ProgramState, thing: str) -> None:
    s += rm.user(f"Review a {thing}.") + rm.assistant(rm.gen("plan", max_tokens=4))


@rm.function
def forked(s: rm.ProgramState) -> None:
    views = s.fork(2)
    for view in views:
        view += rm.user("one") + rm.assistant(rm.gen("view", max_tokens=4))
    views.join()


def parents(found: Any) -> dict[str, str | None]:
    """Name of each span → name of its parent."""
    names = {span.context.span_id: span.name for span in found}
    return {span.name: span.parent and names.get(span.parent.span_id, "outside") for span in found}


def traced_run(program: Any, exporter: Any, **arguments: Any) -> tuple[list[Any], str]:
    """(the spans of a run of `program` at a server, the model's name), within a span of the application."""
    frontend = ScriptedFrontend({"one": "yes", "tram": "Two."})
    with LiveServer(frontend, router, otel=True) as server:
        backend = rm.RuntimeEndpoint(server.url)
        backend.get_model_name()
        if program is ask:
            program = program.compile(backend=backend)
        exporter.clear()
        with trace.get_tracer("application").start_as_current_span("application"):
            assert program.run(**arguments, backend=backend).error() is None
        backend.close()
    found = list(exporter.get_finished_spans())
    assert len({span.context.trace_id for span in found}) == 1
    return found, frontend.info.name


def test_the_requests_of_a_program_are_below_its_span_at_the_server_too(
    exporter: Any, programs: None
) -> None:
    found, model = traced_run(forked, exporter)
    at_server = [span for span in found if span.kind is trace.SpanKind.SERVER]
    assert len(at_server) == 2
    here = [span for span in found if span not in at_server]
    assert parents(here) == {
        "application": None,
        "invoke_workflow forked": "application",
        f"text_completion {model}": "invoke_workflow forked",
    }
    sent = {span.context.span_id for span in here if span.kind is trace.SpanKind.CLIENT}
    assert {span.parent.span_id for span in at_server} == sent
    assert all(span.attributes["ramify.program.name"] == "forked" for span in at_server)


def test_a_program_that_a_server_runs_is_below_the_clients_span(exporter: Any, programs: None) -> None:
    found, _ = traced_run(ask, exporter, thing="tram")
    # The server is in this process, in which spans of programs are on: it has one of its own.
    runs = [span for span in found if span.name == "invoke_workflow ask"]
    ids = {span.context.span_id for span in runs}
    assert [span.parent.span_id in ids for span in sorted(runs, key=lambda one: one.start_time)] == [
        False,
        True,
    ]


def test_tools_and_programs_within_them_are_spans(programs: None, spans: Any) -> None:
    @rm.tool
    def review(thing: str) -> str:
        """Review a thing."""
        text = ask.run(thing=thing, backend=rm.ScriptedBackend({"plan": "Two."}))["plan"]
        assert isinstance(text, str)
        return text

    @rm.function
    def agent(s: rm.ProgramState) -> None:
        s += rm.user("Go.", tools=[review])
        s.call_tools([review])

    answer = after_trigger(written("review", thing="tram"))
    assert agent.run(backend=rm.ScriptedBackend([answer])).error() is None
    found = spans()
    above = parents(found)
    assert above["execute_tool review"] == "invoke_workflow agent"
    assert above["invoke_workflow ask"] == "execute_tool review"
    (whole,) = [span for span in found if span.name == "invoke_workflow agent"]
    asked = [span for span in found if span.name.startswith("text_completion")]
    tokens = "gen_ai.usage.output_tokens"
    assert whole.attributes[tokens] == sum(span.attributes[tokens] for span in asked) > 0


def test_a_program_that_fails_says_so(programs: None, spans: Any) -> None:
    @rm.function
    def broken(s: rm.ProgramState) -> None:
        raise ValueError(SECRET)

    with pytest.raises(Exception, match=SECRET):
        broken.run(backend=rm.ScriptedBackend({}))
    (span,) = spans()
    assert span.attributes["error.type"] == "ValueError"
    assert not span.status.is_ok
    assert SECRET not in str(span.to_json())


def test_a_request_to_an_engine_is_a_span_too(
    programs: None, spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rm.Engine()
    frontend = FakeFrontend()
    monkeypatch.setattr(rm.Engine, "_frontend", frontend)
    monkeypatch.setattr(engine._life, "_owner", os.getpid())
    answer = engine.complete(SECRET, max_tokens=2)
    frontend.fail_first = WorkerDied("The scheduler died.")
    with pytest.raises(WorkerDied):
        engine.complete(SECRET, max_tokens=2)
    frontend.reset()
    rm.enable_otel(texts=True)
    engine.complete(SECRET, max_tokens=2)
    told, failed, texts = spans()
    assert told.name == f"text_completion {MODEL}"
    assert told.attributes["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens == 2
    assert told.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert SECRET not in str(dict(told.attributes))
    assert not failed.status.is_ok
    assert json.loads(texts.attributes["gen_ai.output.messages"])[0]["parts"][0]["content"] == answer.text


def test_programs_have_no_spans_unless_asked_for(spans: Any) -> None:
    ask.run(thing="tram", backend=rm.ScriptedBackend({"plan": "Two."}))
    assert spans() == []


def test_without_the_extra_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'ramify-llm\[otel\]'"):
        serve(ServerConfig(port=0, otel=True))
    with pytest.raises(InvalidRequest, match=r"pip install 'ramify-llm\[otel\]'"):
        rm.enable_otel()


def test_another_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(InvalidRequest, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        _exporting.__wrapped__()


class Collector(HTTPServer):
    """A collector of OTLP over HTTP on loopback, which keeps the bodies that it gets."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.bodies.append((self.path, body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)


def test_a_server_sends_its_spans_to_a_collector() -> None:
    """In a process of its own, by the variables of OpenTelemetry; the last spans are sent at its exit."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from tests.server.test_serve_process import SCRIPT

    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    environment = os.environ | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        "NO_PROXY": "*",
    }
    script = SCRIPT.replace("drain_s=10", "otel=True").replace("self.hold_after = 1", "")
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("Serving")).split()[-1]
        answer = httpx.post(url + "/v1/completions", json=COMPLETION, headers={"traceparent": PARENT})
        assert answer.status_code == 200
        process.terminate()
        process.communicate()
    collector.shutdown()
    thread.join()
    collector.server_close()
    assert process.returncode == 0
    ((path, body),) = collector.bodies
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    told = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert told["service.name"] == "ramify"
    assert told["deployment.environment.name"] == "test"
    ((span,),) = [scope.spans for scope in resource.scope_spans]
    assert span.name == f"text_completion {MODEL}"
    assert span.trace_id.hex() == PARENT.split("-")[1]


def test_the_applications_provider_is_used(exporter: Any, spans: Any) -> None:
    tracer_of().start_span("own").end()
    assert [span.name for span in spans()] == ["own"]
