"""Endpoints that deviate from OpenAI's API: accepted answers, errors, and requests that are sent again."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

import ramify as rm
from ramify.lang.backends.sse import DONE, EventParser
from tests.lang.remote import RawServer, answer, raw_openai


class Case(NamedTuple):
    reply: bytes | None
    """Bytes of the answer; None closes the connection without one."""
    text: str | None = None
    """Value that the program gets; None if it fails."""
    error: str = ""
    """A part of the message of the failure."""
    sent: int = 1
    """Number of requests that the endpoint gets."""
    finish: str = "stop"


def chunk(text: str | None, finish: Any = None, **more: Any) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return json.dumps({"choices": [choice], **more})


def stream(*events: str, end: str = "\n\n", kind: str = "text/event-stream") -> bytes:
    return answer("".join(f"data: {event}{end}" for event in events).encode(), kind=kind)


def cut(body: bytes, kind: str = "text/event-stream") -> bytes:
    """An answer whose body is shorter than its announced length."""
    return answer(body, kind=kind, headers=f"content-length: {len(body) + 9}\r\n")


YES, STOP = chunk("yes"), chunk("", "stop")
WHOLE = {"choices": [{"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4}
ERROR = {"error": {"message": "no more credit", "type": "billing", "code": None}}
PAGE = b"<!DOCTYPE html><html><style>p {}</style><body><h1>Sign in</h1> to &quot;the hub&quot;</body></html>"

pytestmark = pytest.mark.usefixtures("clock")

CASES = {
    # --- the end ---
    "an empty finish reason in each event": Case(stream(chunk("yes", ""), STOP, "[DONE]"), "yes"),
    "an empty finish reason at the end": Case(stream(YES, chunk("", ""), "[DONE]"), "yes"),
    "no finish reason, below the limit": Case(stream(chunk("yes", usage=USAGE), "[DONE]"), "yes"),
    "no finish reason, at the limit": Case(
        stream(chunk("yes", usage={**USAGE, "completion_tokens": 5}), "[DONE]"), "yes", finish="length"
    ),
    "no [DONE]": Case(stream(YES, STOP), "yes"),
    "no [DONE], cut behind the finish": Case(cut(f"data: {chunk('yes', 'stop')}\n\n".encode()), "yes"),
    "no blank line at the end": Case(answer(f"data: {YES}\n\ndata: {STOP}".encode()), "yes"),
    "another finish reason": Case(stream(chunk("a", "content_filter"), "[DONE]"), error="'content_filter'"),
    "nothing but [DONE]": Case(stream("[DONE]"), error="ended its answer without any output"),
    "a refusal": Case(
        stream('{"choices":[{"delta":{"refusal":"I will not."}}]}', STOP, "[DONE]"),
        error="The model refused: I will not.",
    ),
    # --- what broke off is sent again twice ---
    "no finish reason and no [DONE]": Case(stream(YES), error="broke off its answer", sent=3),
    "an empty body": Case(stream(), error="broke off its answer", sent=3),
    "cut in the middle": Case(cut(b'data: {"choices"'), error="in the middle of its answer", sent=3),
    "cut in an event": Case(answer(b'data: {"choices": [{"delta'), error="broke off its answer", sent=3),
    "JSON that is cut": Case(answer(json.dumps(WHOLE).encode()[:40]), error="truncated", sent=3),
    "no answer at all": Case(None, error="Server disconnected", sent=1),
    # --- no stream ---
    "JSON where a stream was asked for": Case(answer(json.dumps(WHOLE, indent=1).encode()), "yes"),
    "JSON, called a stream": Case(answer(json.dumps(WHOLE).encode(), kind="text/event-stream"), "yes"),
    "a stream, called JSON": Case(stream(YES, STOP, "[DONE]", kind="application/json"), "yes"),
    "a page": Case(answer(PAGE, kind="text/html"), error="""'Sign in to "the hub"'"""),
    "plain text": Case(answer(b"upstream is gone", kind="text/plain"), error="'upstream is gone'"),
    "JSON of something else": Case(answer(b'{"ok": true}'), error="without any output"),
    "other types": Case(stream('{"choices": "no"}'), error="Expected `array | null`, got `str`"),
    "null everywhere": Case(
        stream('{"choices":null,"usage":null,"error":null}', YES, chunk("", "stop", usage={"x": None})), "yes"
    ),
    # --- errors in a 200 ---
    "an error in the body": Case(answer(json.dumps(ERROR).encode()), error="no more credit"),
    "an error in an event": Case(stream(json.dumps(ERROR)), error="no more credit"),
    "an error in the middle": Case(stream(YES, json.dumps(ERROR), "[DONE]"), error="no more credit"),
    "an error without data:": Case(
        answer(f"data: {YES}\n\n{json.dumps(ERROR)}\n".encode()), error="no more credit"
    ),
    "an error as text": Case(stream('{"error": "no more credit"}'), error="no more credit"),
    "an error as a detail": Case(
        answer(b'event: error\ndata: {"detail": "no more credit"}\n\n'), error="no more credit"
    ),
    "an error that names itself": Case(
        stream('{"object": "error", "message": "no more credit"}'), error="no more credit"
    ),
    "an error in a list": Case(answer(json.dumps([ERROR]).encode()), error="no more credit"),
    "event: error with text": Case(answer(b"event: error\ndata: no credit\n\n"), error="no credit"),
    "an internal error in an event": Case(
        stream('{"error": {"message": "bad luck", "code": 500}}'), error="bad luck"
    ),
    "full, before anything came": Case(
        stream('{"error": {"message": "slow down", "code": "429"}}'), error="slow down", sent=4
    ),
    "full, in the middle": Case(
        stream(YES, '{"error": {"message": "slow down", "code": 429}}'), error="slow down"
    ),
    # --- statuses ---
    "400": Case(answer(b'{"error": "no such field"}', "400 Bad"), error="no such field"),
    "404": Case(answer(b'{"error": {"message": "no model m"}}', "404 Not Found"), error="no model m"),
    "402 with a page": Case(answer(PAGE, "402 Pay"), error='answered 402: Sign in to "the hub"'),
    "422 with details": Case(
        answer(b'{"detail": [{"loc": ["body"], "msg": "odd"}]}', "422 No"), error='"msg":"odd"'
    ),
    "429": Case(answer(b'{"error": {"message": "slow down"}}', "429 Slow"), error="slow down", sent=4),
    "503": Case(answer(b"busy", "503 Busy"), error="answered 503: busy", sent=4),
    # --- the form of events ---
    "CRLF": Case(stream(YES, STOP, "[DONE]", end="\r\n\r\n"), "yes"),
    "CR": Case(stream(YES, STOP, "[DONE]", end="\r\r"), "yes"),
    "no blank lines": Case(stream(YES, STOP, "[DONE]", end="\n"), "yes"),
    "no space": Case(answer(f"data:{YES}\n\ndata:{STOP}\n\ndata:[DONE]\n\n".encode()), "yes"),
    "a byte order mark, comments, other fields": Case(
        answer(f"\ufeff: hi\n\nid: 1\nretry: 5\nevent: x\ndata: {YES}\n:\ndata: {STOP}\n\n".encode()), "yes"
    ),
    "two lines of data": Case(
        answer(f"data: {YES[:11]}\ndata: {YES[11:]}\n\ndata: {STOP}\ndata: [DONE]\n\n".encode()), "yes"
    ),
}


@rm.function
def ask(s):
    s += rm.user("Q?") + rm.assistant(rm.gen("x", max_tokens=5))


@pytest.mark.parametrize("name", CASES)
def test_an_imperfect_endpoint(name: str) -> None:
    case = CASES[name]
    with raw_openai(lambda target: case.reply, extensions=False) as (backend, server):
        backend.retry.retries = 3  # of what is refused before it has begun
        state = ask.run(backend=backend)
        error = state.error()
    assert case.error in str(error)
    assert (error is None) == (case.text is not None), error
    if case.text is not None:
        assert state["x"] == case.text
        assert state.get_meta_info("x")["finish_reason"]["type"] == case.finish
    assert len(server.bodies) == case.sent
    if error is not None:
        again = f" The request was sent {case.sent} times." if case.sent > 1 else ""
        assert str(error).removesuffix(again).endswith((".", "!", "…")), error
        assert str(error).endswith(again)
    if case.sent == 3:
        assert not rm.errors.is_transient(error)  # so a batch does not run the row again


@pytest.mark.parametrize(
    ("name", "answered"),
    [
        ("429", "answered 429: slow down."),
        ("503", "answered 503: busy."),
        ("an error in an event", "answered with an error: no more credit."),
        ("full, in the middle", "answered 429: slow down."),
    ],
)
def test_an_error_says_who_answered(name: str, answered: str, caplog: pytest.LogCaptureFixture) -> None:
    with RawServer(lambda target: CASES[name].reply) as server:
        address = f"{server.url}/v1/chat/completions"
        backend = rm.OpenAI("m", base_url=server.url + "/v1", extensions=False, retries=1)
        error = ask.run(backend=backend).error()
        backend.close()
    assert f"{address} {answered}" in str(error)
    for record in caplog.records:
        assert f"{answered} Requests are sent again, at most 1 times, for up to 60 s." in record.getMessage()


def test_the_log_says_how_often_a_begun_answer_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with raw_openai(lambda target: stream(YES), extensions=False) as (backend, _):
        ask.run(backend=backend)
    (record,) = caplog.records
    assert "Requests are sent again, at most 2 times, for up to 60 s." in record.getMessage()


def test_a_batch_ends_where_every_answer_breaks_off() -> None:
    with raw_openai(lambda target: stream(YES), extensions=False) as (backend, server):
        states = ask.run_batch([{}] * 2, backend=backend)
    assert ["broke off" in str(state.error()) for state in states] == [True, True]
    assert len(server.bodies) == 2 * 3


def test_a_connection_that_stays_open_behind_the_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.lang.backends.openai_stream.END_S", 0.05)
    replies = iter([stream(YES, STOP)])
    with raw_openai(lambda target: next(replies), keeps=True, extensions=False) as (backend, _):
        assert ask.run(backend=backend)["x"] == "yes"


BODY = f"\ufeff: hi\r\nevent: x\r\ndata: {YES}\r\n\r\ndata: 1\ndata: 2\rdata: [DONE]\n\nrest".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_the_parts_of_a_body(size: int) -> None:
    parser = EventParser()
    parts = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    found = [event for part in parts for event in parser.push(part)] + list(parser.end())
    assert found == [(b"x", YES.encode()), (b"", b"1"), (b"", b"2"), (b"", DONE)]
    assert parser.stray == [b"rest"]
