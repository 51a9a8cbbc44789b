"""A program over HTTP equals the program in process, and every failure of the connection is one of
Ramify's errors."""

from __future__ import annotations

import json
from typing import Literal

import msgspec
import pytest

import ramify as rm
from ramify.constraint import json_schema
from ramify.errors import BackendError, Overloaded, PromptTooLong, RequestTimeout, Unauthorized
from ramify.lang.backends.base import Backend
from ramify.lang.common.event import Event
from ramify.loop import wait
from ramify.messages import HELD_S, Finish, Generate, ProgramHint, TextChunk, Usage
from ramify.programs.route import router
from ramify.sampling_params import SamplingParams
from tests.lang.remote import ScriptedFrontend, answer, live_endpoint, raw_endpoint
from tests.server.fake_frontend import LiveServer


@rm.function
def everything(s):
    s += rm.system("Be brief.") + rm.user("Is it?")
    views = s.fork(2)
    for view in views:
        view += rm.assistant(rm.gen("view", stop=" Really", temperature=0.5, seed=3))
    views.join()
    s += rm.user("A number:") + rm.assistant("number " + rm.gen("n", schema=int))
    s += " bool " + rm.gen("flag", schema=bool)
    s += " sample " + rm.gen("sample", n=2, return_logprob=True, top_logprobs_num=1, logprob_start_len=2)
    s += " end" + rm.gen("logprobs", return_logprob=True)


SCRIPT = {
    r"sample $": "one two",
    r"bool $": "true",
    r"number $": "42 ",
    r"end$": " The end",
    r"assistant\n$": "It is fine. Really!",
}


def test_a_request_arrives_as_it_was_made():
    request = Generate(
        rid="r",
        prompt=("a", (1, 2)),
        sampling=SamplingParams(max_tokens=5, min_tokens=1, seed=7, stop=("x",), logprobs=2, top_k=4),
        constraint=msgspec.structs.replace(json_schema({"enum": [1]}), any_order=True, whitespace="compact"),
        hint=ProgramHint(program="p", lease_s=1.5, next_use="tool", branch="b", ended=("a",)),
        scope="tenant",
        every_s=2.0,
    )

    async def ask(backend):
        return [chunk async for chunk in backend.generate(request)]

    frontend = ScriptedFrontend(["1"])
    with live_endpoint(frontend) as (backend, _):
        chunks = wait(ask(backend))
    (received,) = frontend.requests
    assert received.hint.client
    assert received.hint.max_pinned_share == 1.0
    # The server adds these two.
    told = {"client": received.hint.client, "max_pinned_share": received.hint.max_pinned_share}
    expected = msgspec.structs.replace(request, hint=msgspec.structs.replace(request.hint, **told))
    assert msgspec.json.encode(received) == msgspec.json.encode(expected)
    assert [chunk.text for chunk in chunks if chunk.text] == ["1"]
    assert chunks[-1].finish.reason == "stop"


@pytest.mark.parametrize("compiled", [False, True])
def test_only_who_follows_a_text_has_it_piece_by_piece(compiled):
    frontend = ScriptedFrontend(lambda request: "one two three")
    with live_endpoint(frontend, router) as (backend, _):
        assert ask.run(backend=backend, compiled=compiled)["x"] == "one two three"
        state = ask.run(backend=backend, stream=True, compiled=compiled)
        assert list(state.text_iter("x")) == ["one", " two", " three"]
    assert [request.every_s for request in frontend.requests] == [HELD_S, 0.0]


def facts(state):
    """The parts of a state that do not depend on the place where it ran: all but times and ids.

    The network decides which of two branches computes their shared prefix, so the split of cached tokens is
    left out inside the tree.
    """
    varies = {"start_s", "end_s"}

    def call_facts(call, varies):
        data = call.to_dict()
        inside = varies | {"cached_tokens", "computed_tokens", "distinct_tokens", "miss"}
        return {key: value for key, value in data.items() if key not in varies} | {
            "children": [call_facts(child, inside) for child in call.children]
        }

    metas = {name: state.get_meta_info(name) for name in ("n", "flag", "sample", "logprobs")}
    plain = json.loads(json.dumps(metas, default=str))
    for meta in (plain["n"], plain["flag"], plain["logprobs"], *plain["sample"]):
        del meta["id"]
    return state.text(), state.messages(), state["view"], state["n"], plain, call_facts(state.trace, varies)


def test_a_program_over_http_equals_the_program_in_process():
    local = everything.run(backend=rm.ScriptedBackend(SCRIPT))
    frontend = ScriptedFrontend(SCRIPT)
    with live_endpoint(frontend) as (backend, _):
        assert isinstance(backend, Backend)
        remote = everything.run(backend=backend, cache_scope="tenant")
        assert facts(remote) == facts(local)
        assert {request.scope for request in frontend.requests} == {"tenant"}
    assert frontend.ended_programs == [frontend.requests[0].hint.program]


def test_forced_tokens_are_told_apart_over_http():
    @rm.function
    def program(s):
        s += "It is " + rm.gen("pick", schema=Literal["not at all", "very much so"])

    with live_endpoint(ScriptedFrontend({"is $": "very much so"})) as (backend, _):
        state = program.run(backend=backend)
    (call,) = state.trace.children
    spans = [(span.text, span.forced) for span in call.tokens.spans(call.text, {})]
    assert spans == [("very", 0), (" much", 1), (" so", 1), ("", 0)]


def test_select_over_http_sends_ids_back():
    @rm.function
    def program(s):
        s += "One two three:" + rm.select("x", [" a", " b c"]) + " next" + rm.gen("y")

    frontend = ScriptedFrontend({"next$": " done"})
    with LiveServer(frontend) as server:
        backend = rm.RuntimeEndpoint(server.url + "/")
        state = program.run(backend=backend)
        assert state["x"] == " a"  # all are equally likely to the script; the first wins
        assert state["y"] == " done"
        ids = tuple(frontend.backend.encode([" a"]))
        assert frontend.requests[-1].prompt == ("One two three:", ids, " next")
        assert state.trace.children[0].requests == 1
        backend.close()


def test_what_a_server_says_of_itself():
    with live_endpoint(ScriptedFrontend([])) as (backend, _):
        assert backend.get_model_name() == ""
        assert rm.get_server_info(backend)["model_path"] == ""
        assert rm.flush_cache(backend) is True


def test_the_key_is_sent():
    with LiveServer(ScriptedFrontend(["a"]), api_key="secret") as server:
        stranger, friend = rm.RuntimeEndpoint(server.url), rm.RuntimeEndpoint(server.url, "secret")
        with pytest.raises(Unauthorized):
            ask.run(backend=stranger)
        assert ask.run(backend=friend)["x"] == "a"
        for backend in (stranger, friend):
            backend.close()


@rm.function
def ask(s):
    s += "Q:" + rm.gen("x")


def test_streaming_and_cancelling_over_http(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ramify.lang.calls.delivery.ABORT_S", 0.01)  # the script goes on after an abort
    frontend = ScriptedFrontend(lambda request: "one two three")
    with live_endpoint(frontend) as (backend, _):
        state = ask.run(backend=backend, stream=True)
        assert list(state.text_iter("x")) == ["one", " two", " three"]
        frontend.hold_after = 2
        state = ask.run(backend=backend, stream=True)
        assert frontend.held.wait(10)
        state.cancel()
        assert frontend.closed.wait(10)
        with pytest.raises(rm.ProgramError, match="cancelled"):
            state["x"]


def test_an_abort_that_overtakes_its_request_is_sent_again(monkeypatch: pytest.MonkeyPatch):
    """The first abort arrives before its request, as it may on another connection."""
    monkeypatch.setattr("ramify.lang.calls.delivery.ABORT_S", 3600.0)

    class Overtaken(ScriptedFrontend):
        def __init__(self) -> None:
            super().__init__([])
            self.asked, self.aborted = Event(), Event()
            self.aborts = 0

        async def generate(self, request: Generate):
            self.asked.set()
            await self.aborted.wait()
            usage = Usage(prompt_tokens=5, completion_tokens=4)
            yield TextChunk(rid=request.rid, text="abcd", usage=usage, finish=Finish(reason="abort"))

        def abort(self, rid_prefix: str | None = None) -> int:
            self.aborts += rid_prefix is not None
            if self.aborts == 3:
                self.aborted.set()
            return self.aborts // 3

    @rm.function
    def fails(s):
        states.append(s)
        s += "Q:" + rm.gen("x")
        frontend.asked.block()
        raise ValueError("of the body")

    frontend, states = Overtaken(), []
    with LiveServer(frontend) as server:
        backend = rm.RuntimeEndpoint(server.url)
        with pytest.raises(ValueError, match="of the body"):
            fails.run(backend=backend)
        backend.close()
    assert frontend.aborts == 3
    assert states[0].usage.completion_tokens == 4


def test_an_error_of_the_server_keeps_its_kind_and_field():
    class Full(ScriptedFrontend):
        async def generate(self, request):
            if request.prompt == ("Q:",):
                raise Overloaded("The queue is full.", retry_after=2.0)
            raise PromptTooLong("Too long.", field="prompt")
            yield

    @rm.function
    def long(s):
        s += "Long:" + rm.gen("x")

    with live_endpoint(Full([]), retries=0) as (backend, _):
        full = ask.run(backend=backend).error().__cause__
        assert (type(full), full.retry_after) == (Overloaded, 2.0)
        too_long = long.run(backend=backend).error().__cause__
        assert (type(too_long), too_long.field) == (PromptTooLong, "prompt")


INFO = answer(
    json.dumps(
        {
            "ramify": {
                "name": "m",
                "path": "",
                "vocab_size": 9,
                "context_length": 9,
                "eos_token_ids": [0],
                "bos_token_id": None,
                "dtype": "",
                "device": "",
                "chat_format": None,
            }
        }
    ).encode()
)
CHUNK = b'data: {"chunks": [{"rid": "r", "text": "\xe2\x80\xa8a", "ids": [1]}]}'
STREAM = "text/event-stream"


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (answer(b'{"error": {"message": "slow"}}', "504 Gateway Timeout"), RequestTimeout, "slow"),
        (answer(b"", "429 Too Many", headers="retry-after: 3\r\n"), Overloaded, "answered 429"),
        (answer(b"data: [DONE]\n\n", kind=STREAM), BackendError, "without a final chunk"),
        (
            answer(
                CHUNK + b'\n\ndata: {"error": {"message": "died", "code": "worker_died"}}\n\n', kind=STREAM
            ),
            rm.RamifyError,
            "died",
        ),
        (answer(b'data: {"chunks": [{"text": "a"}]}\n\n', kind=STREAM), BackendError, "something else"),
    ],
)
def test_a_server_that_misbehaves(reply, error, message):
    with raw_endpoint(lambda path: INFO if path == "/get_model_info" else reply, retries=0) as (backend, _):
        failed = ask.run(backend=backend).error()
        assert isinstance(failed.__cause__, error)
        assert message in str(failed)
        if reply.endswith(b"}}\n\n"):
            assert failed.partial == "\u2028a"


@pytest.mark.parametrize(
    ("reply", "message"),
    [(answer(b"{}"), "is not a Ramify server"), (answer(b"hello"), "did not answer in JSON")],
)
def test_another_kind_of_server(reply, message):
    with raw_endpoint(lambda path: reply) as (backend, _), pytest.raises(BackendError, match=message):
        ask.run(backend=backend)


def test_a_chat_template_by_name_is_refused():
    with pytest.raises(rm.UnsupportedField, match="chat_template_name"):
        rm.RuntimeEndpoint("http://127.0.0.1:1", chat_template_name="chatml")
