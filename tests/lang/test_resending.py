"""Requests that are sent again: servers that refuse, are overloaded, break off, die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from email.utils import formatdate

import msgspec
import pytest

import ramify as rm
from ramify import retry
from ramify.errors import BackendError, InvalidRequest, Overloaded, RequestTimeout, WorkerDied
from ramify.lang.backends import http_errors
from ramify.lang.backends.replay import RecordingBackend, ReplayBackend
from ramify.loop import wait
from ramify.messages import Finish, TextChunk, Usage
from ramify.programs.route import router
from ramify.retry import Retry
from tests.end_to_end.served import serve
from tests.lang.backends import Breaking, Holding
from tests.lang.remote import RawServer, ScriptedFrontend, answer, live_endpoint, raw_endpoint, raw_openai
from tests.lang.test_endpoint import INFO
from tests.lang.test_http import on_client, whole


@rm.function
def ask(s, temperature=0.0, seed=None):
    s += "Q:" + rm.gen("x", temperature=temperature, seed=seed)


# --- when, how often, for how long ---


async def failing(retry: Retry, *errors) -> int:
    """Number of attempts at a call that fails with each of `errors` in turn."""
    left, sent = list(errors), 0

    async def send():
        nonlocal sent
        sent += 1
        if left:
            raise left.pop(0)

    with contextlib.suppress(rm.RamifyError):
        await retry.call(send)
    return sent


async def test_pauses_double_and_end_after_the_given_time(clock, monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    await failing(Retry(), *[WorkerDied("gone")] * 50)
    assert clock.pauses == [0.5, 1, 2, 4, 8, 8, 8, 8, 8, 8, 4.5]
    assert sum(clock.pauses) == retry.RETRY_FOR_S


async def test_pauses_are_random(clock):
    await failing(Retry(), *[WorkerDied("gone")] * 4)
    assert all(0 <= pause <= most for pause, most in zip(clock.pauses, (0.5, 1, 2, 4), strict=True))
    assert len(set(clock.pauses)) == 4


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (1, 2), (3, 4), (None, 6)])
async def test_the_number_of_attempts_is_bounded(clock, retries, attempts):
    assert await failing(Retry(retries), *[WorkerDied("gone")] * 5) == attempts


async def test_what_does_not_pass_is_sent_once(clock):
    for error in (InvalidRequest("wrong"), BackendError("odd"), RequestTimeout("over"), ValueError("bug")):
        with contextlib.suppress(ValueError):
            assert await failing(Retry(), error) == 1
    assert clock.pauses == []


async def test_the_servers_own_time_is_kept(clock):
    await failing(Retry(), Overloaded("full", retry_after=7.0))
    assert 7 <= clock.pauses[0] <= 7.5
    assert await failing(Retry(retry_for=6), Overloaded("full", retry_after=7.0)) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("retries", -1), ("retry_for", -0.5), ("retry_for", float("nan"))]
)
def test_numbers_below_zero_are_refused(field, value):
    for backend in (rm.RuntimeEndpoint, rm.OpenAI, rm.Engine):
        with pytest.raises(InvalidRequest, match=field):
            backend("http://127.0.0.1:1", **{field: value})


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3), ("0.5", 0.5), ("", None), ("soon", None), ("-1", None), ("1e3", None), ("٣", 3)],
)
def test_the_header_may_hold_seconds(header, seconds):
    assert http_errors.retry_after_s(header) == seconds


def test_the_header_may_hold_a_date():
    now = time.time()
    assert 0 < http_errors.retry_after_s(formatdate(now + 90, usegmt=True)) <= 90
    assert http_errors.retry_after_s(formatdate(now - 90, usegmt=True)) == 0


# --- over HTTP ---


def events(*chunks, done=True):
    """The HTTP answer to a call."""
    body = b"".join(b"data: " + msgspec.json.encode({"chunks": [chunk]}) + b"\n\n" for chunk in chunks)
    return answer(body + b"data: [DONE]\n\n" * done, kind="text/event-stream")


def said(*texts, rid="r"):
    """Chunks of a whole answer, one for each token."""
    chunks = [TextChunk(rid=rid, text=text, ids=(place,)) for place, text in enumerate(texts)]
    usage = Usage(prompt_tokens=2, completion_tokens=len(texts))
    return [*chunks, TextChunk(rid=rid, usage=usage, finish=Finish(reason="stop"), kept_ids=len(texts))]


def script(*replies, then=None):
    """A server's answers to calls, one after the other; `then` to all further ones."""
    left = list(replies)

    def reply(target):
        if target == "/get_model_info":
            return INFO
        if target in ("/end_program", "/await_tools"):
            return answer(b"{}")
        return left.pop(0) if left or then is None else then

    return reply


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 529])
def test_these_statuses_pass(clock, status):
    refused = answer(b"", f"{status} No", headers="retry-after: 3\r\n")
    with raw_endpoint(script(refused, refused, events(*said("yes")))) as (backend, server):
        state = ask.run(backend=backend)
    assert state["x"] == "yes"
    assert [pause >= 3 for pause in clock.pauses] == [True, True]
    (call,) = state.trace.children
    assert call.resent == call.to_dict()["resent"] == 2
    first, second = call.failures
    assert str(status) in first.error
    assert call.start_s <= first.start_s <= first.end_s <= first.again_s <= second.start_s
    assert [failure["error"] for failure in call.to_dict()["failures"]] == [first.error, second.error]
    assert f"sent again 2x after {second.again_s - call.start_s:.3f} s" in str(state.trace)
    calls = [body["request"]["rid"] for body in server.bodies if "request" in body]
    assert len(set(calls)) == 3  # the server may still run the earlier ones


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 501])
def test_these_statuses_stay(clock, status):
    with raw_endpoint(script(then=answer(b"", f"{status} No"))) as (backend, _):
        assert ask.run(backend=backend).error() is not None
    assert clock.pauses == []


def test_a_servers_own_errors_pass_by_their_kind(clock):
    def failed(code):
        return answer(b'data: {"error": {"message": "m", "code": "%s"}}\n\n' % code, kind="text/event-stream")

    replies = [failed(code) for code in (b"worker_died", b"engine_closed", b"overloaded")]
    with raw_endpoint(script(*replies, events(*said("yes")), then=failed(b"timeout"))) as (backend, _):
        assert ask.run(backend=backend)["x"] == "yes"
        assert len(clock.pauses) == 3
        for code in ("timeout", "invalid_request", "unsupported_node"):
            assert ask.run(backend=backend).error() is not None, code
    assert len(clock.pauses) == 3


def test_a_wrong_url_fails_at_once(clock):
    with RawServer(lambda target: b"") as server:
        url = server.url
    for backend in (rm.RuntimeEndpoint(url), rm.OpenAI("m", base_url=url + "/v1")):
        with pytest.raises(rm.RamifyError, match="cannot be reached"):
            ask_chat.run(backend=backend)["x"]
        backend.close()
    assert clock.pauses == []


@rm.function
def ask_chat(s):
    s += rm.user("Q?") + rm.assistant(rm.gen("x"))


def test_a_lost_server_is_waited_for_until_it_is_back(clock):
    with RawServer(script(events(*said("one")))) as server:
        backend = rm.RuntimeEndpoint(server.url)
        assert ask.run(backend=backend)["x"] == "one"
        backend.close()  # its connections only
    again = RawServer(script(events(*said("two"))), port=server.port)
    clock.during = [None, None, again.__enter__]
    state = ask.run(backend=backend)
    assert state["x"] == "two"
    assert state.trace.children[0].resent == 3
    backend.close()
    again.__exit__()


def test_a_server_that_stays_away_fails_the_step_after_the_time(clock):
    with raw_endpoint(script(events(*said("one"))), retry_for=20) as (backend, _):
        ask.run(backend=backend)["x"]
    error = ask.run(backend=backend).error()
    assert error.__cause__.transient
    assert rm.errors.is_transient(error)
    assert sum(clock.pauses) == pytest.approx(20)
    backend.close()


def test_what_is_not_a_generation_is_sent_again_too(clock):
    busy = answer(b"", "503 Busy")
    replies = iter([busy, INFO, busy, busy, answer(b'{"a": 1}'), busy, answer(b"{}")])
    with raw_endpoint(lambda target: next(replies)) as (backend, _):
        assert wait(backend.info()).name == "m"
        assert rm.get_server_info(backend) == {"a": 1}
        assert rm.flush_cache(backend) is True
    assert len(clock.pauses) == 4


def test_the_end_of_a_program_does_not_wait_for_a_lost_server(clock):
    with raw_endpoint(script(events(*said("one")))) as (backend, _):
        ask.run(backend=backend)
    wait(backend.end_program("p"))
    backend.close()
    assert clock.pauses == []


def test_an_openai_endpoint_is_asked_again(clock):
    chunk = b'data: {"choices": [{"delta": {"content": "yes"}%s}]}\n\n'
    replies = [
        answer(b'{"error": {"message": "slow down", "code": "rate_limit"}}', "429 Slow"),
        answer(b'data: {"error": {"message": "full", "code": 503}}\n\n', kind="text/event-stream"),
        answer(chunk % b"", kind="text/event-stream"),  # broken off
        answer(chunk % b', "finish_reason": "stop"', kind="text/event-stream"),
    ]
    left = iter(replies)
    with raw_openai(lambda target: next(left), extensions=False) as (backend, _):
        state = ask_chat.run(backend=backend)
    assert state["x"] == "yes"
    assert state.trace.children[0].resent == 3


def test_an_outage_is_logged_once(clock, caplog):
    @rm.function
    def many(s):
        branches = s.fork(5)
        branches += "Q:" + rm.gen("x", temperature=0)
        branches.join()

    class Full(ScriptedFrontend):
        down = True

        async def generate(self, request):
            if self.down:
                raise Overloaded("The queue is full.")
            async for chunk in super().generate(request):
                yield chunk

    frontend = Full(lambda request: "yes")

    def up():
        frontend.down = False

    with live_endpoint(frontend) as (backend, _), caplog.at_level(logging.WARNING, "ramify"):
        for outages in (1, 2):
            frontend.down = True
            clock.during = [None] * 8 + [up]
            assert many.run(backend=backend)["x"] == ["yes"] * 5
            logged = [record.getMessage() for record in caplog.records if "sent again" in record.getMessage()]
            assert len(logged) == outages
        assert "The queue is full." in logged[0]


@pytest.mark.parametrize("inside", [False, True])
def test_a_batch_leaves_a_long_outage_to_its_breaker(clock, inside):
    @rm.function
    def around(s):
        ask.run(backend=backend).sync()
        s += "Q:" + rm.gen("x")

    backend = Breaking(lambda request: "yes", WorkerDied("gone"), after=0)
    backend.retry = Retry()
    (around if inside else ask).run_batch([{}], backend=backend, give_up_after=0)
    assert sum(clock.pauses) == pytest.approx(retry.IN_BATCH_S * (1 + inside))
    clock.pauses.clear()
    backend.retry = Retry(retry_for=2)
    ask.run_batch([{}], backend=backend, give_up_after=0)
    assert sum(clock.pauses) == pytest.approx(2)


# --- broken off in the middle ---

BROKEN = events(*said("one", " two")[:2], done=False)


def broken_then(clock, *texts, stream, **options):
    """A run whose first answer breaks off after two tokens; the second one says `texts`."""
    with raw_endpoint(script(BROKEN, events(*said(*texts)))) as (backend, server):
        state = ask.run(backend=backend, stream=stream, **options)
        shown = list(state.text_iter("x")) if stream and state.error() is None else []
        state.error()
    return state, shown, sum("request" in body for body in server.bodies)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}])
def test_what_nobody_has_seen_is_dropped(clock, options):
    state, _, sent = broken_then(clock, "quite", " other", stream=False, **options)
    assert (state["x"], sent) == ("quite other", 2)
    assert state.text() == "Q:quite other"
    (call,) = state.trace.children
    assert call.tokens.ids == (0, 1)
    assert state.get_meta_info("x")["completion_tokens"] == 2


@pytest.mark.parametrize(("failures", "tokens"), [(0, 4), (1, 2 + 4), (2, 2 + 2 + 4), (3, 2 + 2 + 2)])
def test_attempts_that_broke_off_count(clock, failures, tokens):
    """Broken attempts count in usage and limits, but not in the output's own figures."""

    class Often(Breaking):
        async def generate(self, request):
            self.where = "" if len(self.requests) < failures else "never"
            async for chunk in super().generate(request):
                yield chunk

    backend = Often(lambda request: "one two three", WorkerDied("gone"), after=2)
    backend.retry = Retry(2)
    with rm.limit(max_total_tokens=1000) as limit:
        state = ask.run(backend=backend)
    assert (state.error() is None) == (failures < 3)
    assert state.usage.completion_tokens == tokens
    assert sum(usage.completion_tokens for usage in state.usage_by_model.values()) == tokens
    assert limit.tokens == state.usage.prompt_tokens + tokens
    if failures < 3:
        assert state.get_meta_info("x")["completion_tokens"] == 4


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("texts", [("one", " two", " three"), ("one t", "wo three"), ("one two three",)])
def test_a_streamed_output_goes_on_where_it_broke_off(clock, options, texts):
    state, shown, sent = broken_then(clock, *texts, stream=True, **options)
    assert "".join(shown) == state["x"] == "one two three"
    assert sent == 2
    assert state.text() == "Q:one two three"
    (call,) = state.trace.children
    assert (call.resent, call.text, call.tokens.ids) == (1, "one two three", tuple(range(len(texts))))
    assert [span.text for span in call.tokens.spans(call.text, {}) if span.text] == list(texts)


def test_log_probabilities_go_on_where_they_broke_off(clock):
    def scored(*texts):
        return [
            msgspec.structs.replace(
                chunk,
                logprobs=rm.messages.TokenLogprobs(
                    ids=chunk.ids, logprobs=(-1.0 * place,), texts=(chunk.text,)
                ),
            )
            if chunk.text
            else chunk
            for place, chunk in enumerate(said(*texts))
        ]

    @rm.function
    def program(s):
        s += "Q:" + rm.gen("x", temperature=0, return_logprob=True)

    whole = scored("one", " two", " three")
    with raw_endpoint(script(events(*whole[:2], done=False), events(*whole))) as (backend, _):
        state = program.run(backend=backend, stream=True)

        async def read():
            return [pair async for pair in state.text_async_iter("x", return_meta_data=True)]

        pieces = asyncio.run(read())
    assert [(text, meta["output_token_logprobs"]) for text, meta in pieces if text] == [
        ("one", [[0.0, 0, "one"]]),
        (" two", [[-1.0, 1, " two"]]),
        (" three", [[-2.0, 2, " three"]]),
    ]


def test_a_streamed_sample_is_not_sent_again(clock):
    state, _, sent = broken_then(clock, "quite", " other", stream=True, temperature=1.0)
    assert (state.error().partial, sent) == ("one two", 1)
    assert "broke off" in str(state.error())
    assert clock.pauses == []


@pytest.mark.parametrize("texts", [("one", " too", " many"), ("one",), ("one", " tw")])
def test_another_text_than_was_streamed_is_an_error(clock, texts):
    state, _, sent = broken_then(clock, *texts, stream=True)
    assert sent == 2
    assert "does not begin with the text that was streamed" in str(state.error())


def test_a_sample_of_which_nothing_was_streamed_yet_is_sent_again(clock):
    with raw_endpoint(script(events(done=False), events(*said("yes")))) as (backend, _):
        state = ask.run(backend=backend, stream=True, temperature=1.0)
        assert list(state.text_iter("x")) == ["yes"]


def test_a_steps_own_time_limit_counts_all_attempts(clock):
    @rm.function
    def limited(s):
        s += "Q:" + rm.gen("x", timeout=0.05)

    clock.stands = True
    with raw_endpoint(script(then=answer(b"", "503 Busy"))) as (backend, _):
        error = limited.run(backend=backend).error()
    assert isinstance(error.__cause__, RequestTimeout)
    assert not rm.errors.is_transient(error)


# --- a post on a connection that is closed without an answer ---


def test_only_a_kept_connection_may_be_stale(clock):
    async def use(client):
        with pytest.raises(BackendError, match="Server disconnected"):
            await client.post("/", {"n": 0})
        return [await client.post("/", {"n": number}) for number in (1, 2)]

    replies = iter([None, whole(b"1"), None, whole(b"2")])
    with RawServer(lambda target: next(replies), keeps=True) as server:
        assert on_client(server.url, use) == [1, 2]
    assert [body["n"] for body in server.bodies] == [0, 1, 2, 2]


# --- compiled programs ---


@rm.function
def two_steps(s):
    s += "A:" + rm.gen("a", temperature=0) + " B:" + rm.gen("b", temperature=0)


def program_events(*found, done=True):
    body = b"".join(b"data: " + msgspec.json.encode({"row": 0, **event}) + b"\n\n" for event in found)
    return answer(body + b"data: [DONE]\n\n" * done, kind="text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
def test_a_compiled_program_goes_on_by_itself(clock, stream):
    finished = {"request": "0", "chunks": said("one", rid="server-0")}
    begun = {"request": "1", "chunks": said("two", " three", rid="server-1")[:1]}
    found = [finished, begun] if stream else [finished]
    with raw_endpoint(script(program_events(*found, done=False), events(*said("two", " three")))) as (
        backend,
        server,
    ):
        state = two_steps.run(backend=backend, compiled=True, stream=stream)
        if stream:
            assert "".join(state.text_iter("b")) == "two three"
        assert (state["a"], state["b"]) == ("one", "two three")
        state._branch.run.finished.block()
    requests = [body["request"] for body in server.bodies if "request" in body]
    assert [request["prompt"] for request in requests] == [["A:", [0], " B:"]]
    assert server.bodies[-1] == {"program": requests[0]["hint"]["program"]}  # /end_program
    # Without text of it, the second request may begin after the stream has broken off.
    assert [call.resent for call in state.trace.children] in ([0, 1], *([] if stream else [[0, 0]]))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_program_survives_a_ring_that_dies(clock, compiled):
    """The server's run of the program fails with the request; later requests are sent by themselves."""

    class Dying(ScriptedFrontend):
        left = 1

        async def generate(self, request):
            async for chunk in super().generate(request):
                yield chunk
                if self.left and "A:" in request.prompt:
                    self.left = 0
                    raise WorkerDied("The scheduler process died.")

    with live_endpoint(Dying({"A:$": "one", "B:$": "two three"}), router) as (backend, _):
        state = two_steps.run(backend=backend, compiled=compiled)
        assert (state["a"], state["b"]) == ("one", "two three")
    assert state.trace.children[0].resent <= 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_program_that_branches_on_a_result_is_sent_again(clock, compiled):
    """Both the step of the graph and the step after the branch fail once."""

    @rm.function
    def branching(s):
        s += "Q:" + rm.gen("x", temperature=0)
        if s["x"] == "yes":
            s += " R:" + rm.gen("y", temperature=0)

    class Full(ScriptedFrontend):
        sent = 0

        async def generate(self, request):
            self.sent += 1
            if self.sent % 2:
                raise Overloaded("The queue is full.")
            async for chunk in super().generate(request):
                yield chunk

    with live_endpoint(Full(lambda request: "yes"), router) as (backend, _):
        state = branching.run(backend=backend, compiled=compiled)
        assert (state["x"], state["y"]) == ("yes", "yes")
        assert [call.resent for call in state.trace.children] == [1, 1]


def test_a_compiled_program_whose_failure_stays_is_not_sent_again(clock):
    failed = {"request": "0", "chunks": [], "failed": {"code": "invalid_request", "message": "wrong"}}
    with raw_endpoint(script(program_events(failed))) as (backend, _):
        assert "wrong" in str(two_steps.run(backend=backend, compiled=True).error())
    assert clock.pauses == []


# --- other backends ---


def test_an_engines_dead_processes_are_waited_for(clock):
    """The retry depends on the error and on the attribute `retry` of the backend."""
    backend = Breaking({"x": "one two three"}, WorkerDied("The scheduler died."), after=1)
    backend.retry = Retry(2)
    assert isinstance(ask.run(backend=backend).error().__cause__, WorkerDied)
    assert len(backend.requests) == 3
    plain = Breaking({"x": "one"}, WorkerDied("The scheduler died."), after=0)
    assert isinstance(ask.run(backend=plain).error().__cause__, WorkerDied)
    assert len(plain.requests) == 1
    assert rm.Engine(retries=5).retry.retries == 5


def test_a_run_that_is_cancelled_sends_nothing_again(clock):
    backend = Holding({"x": "one two"})
    backend.retry = Retry()
    state = ask.run(backend=backend, stream=True)
    assert next(state.text_iter("x")) == "one"
    state.cancel()
    assert len(backend.requests) == 1


def test_a_recording_has_the_attempt_that_answered(clock, tmp_path):
    class Once(Breaking):
        async def generate(self, request):
            self.where = "" if len(self.requests) == 0 else "never"
            async for chunk in super().generate(request):
                yield chunk

    backend = Once(lambda request: "one two", WorkerDied("gone"), after=1)
    backend.retry = Retry()
    recorder = RecordingBackend(backend, tmp_path / "r")
    assert ask.run(backend=recorder)["x"] == "one two"
    assert len(backend.requests) == 2
    replay = ReplayBackend(tmp_path / "r")
    assert ask.run(backend=replay)["x"] == "one two"
    assert replay.unused == []


# --- real servers ---


@rm.function
def three_poems(s):
    s += rm.user("Name three things.") + rm.assistant(rm.gen("things", max_tokens=40, temperature=0))
    parts = s.fork(3)
    for number, part in enumerate(parts):
        part += rm.user(f"A poem about number {number}.")
        part += rm.assistant(rm.gen("poem", max_tokens=60, temperature=0))
    parts.join()
    s += rm.user("Which is best?") + rm.assistant(rm.gen("best", max_tokens=20, temperature=0))


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(
    "how",
    [{"stream": True}, pytest.param({"stream": True, "compiled": True}, marks=pytest.mark.long)],
    ids=["by steps", "compiled"],
)
def test_a_program_outlives_its_server(how):
    """SIGKILL in the middle of the second poem; the same model comes back on the same port."""
    flags = ("--deterministic", "--threads", "1")
    with contextlib.ExitStack() as servers:
        first = servers.enter_context(serve(*flags))
        port = first.url.rpartition(":")[2]
        backend = rm.RuntimeEndpoint(first.url, retry_for=200)
        expected = three_poems.run(backend=backend)
        state = three_poems.run(backend=backend, **how)
        pieces = state.text_iter("things")
        shown = [next(pieces), next(pieces)]
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(30)
        servers.enter_context(serve("--port", port, *flags))
        shown += pieces
        for name in ("things", "poem", "best"):
            assert state[name] == expected[name]
        assert "".join(shown) == expected["things"]
        assert state.text() == expected.text()
        assert max(call.resent for call in state.trace.walk()) >= 1
        backend.close()
