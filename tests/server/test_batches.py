"""Batch files with OpenAI's client and the fake frontend."""

from __future__ import annotations

import asyncio
import errno
import http.client as http_client
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ramify.batches import lines, route, runner, store, upload
from ramify.errors import EngineClosed, WorkerDied
from ramify.priority import BATCH
from tests.server.conftest import CHAT, COMPLETION, RESPONSE, refused
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.test_hostile_bodies import HOSTILE

EMBEDDING = {"model": MODEL, "input": "hi"}
DECISIONS = EMBEDDING | {"questions": [{"type": "predicate", "instructions": "Is it?"}]}
SYSTEM_ONE = {
    "model": MODEL,
    "state": "hi",
    "questions": {"q": {"type": "noul", "instructions": "Is it?"}},
}
BATCH_OBJECT: dict[str, Any] = {
    "id": store.new_id("batch_"),
    "endpoint": "/v1/completions",
    "input_file_id": store.new_id("file-"),
    "completion_window": "24h",
    "created_at": int(time.time()),
    "expires_at": int(time.time()) + 86400,
    "owner": "",
    "served": MODEL,
}
FORM = {"authorization": "Bearer none"}
LIMIT_S = 40.0
"""Limit for what takes under a second on an idle machine."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), route.router, batch_dir=str(folder)) as server:
        yield server


def line(number: int, body: Any = COMPLETION, url: str = "/v1/completions", **others: Any) -> dict[str, Any]:
    return {"custom_id": f"line {number}", "method": "POST", "url": url, "body": body} | others


def written(*found: Any) -> bytes:
    return b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in found)


def start(client: openai.OpenAI, *found: Any, endpoint: Any = "/v1/completions", **fields: Any) -> Any:
    file = client.files.create(file=("in.jsonl", written(*found)), purpose="batch")
    fields = {"completion_window": "24h"} | fields
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **fields)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=LIMIT_S)


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def ended(client: openai.OpenAI, identity: str) -> Any:
    """The batch, once it has ended."""
    wait_for(lambda: client.batches.retrieve(identity).status not in store.UNFINISHED)
    return client.batches.retrieve(identity)


def content(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    """custom_id → line of an output file, in which no id is there twice."""
    assert file is not None
    found = [json.loads(one) for one in client.files.content(file).text.splitlines()]
    named = {one["custom_id"]: one for one in found}
    assert len(named) == len(found)
    return named


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, "chat.completion"),
        ("/v1/responses", RESPONSE, "response"),
        ("/v1/completions", COMPLETION, "text_completion"),
        ("/v1/embeddings", EMBEDDING, "list"),
        ("/v1/messages", CHAT, "message"),
        ("/v1/decisions", DECISIONS, None),
        ("/v1/systemone", SYSTEM_ONE, None),
        ("/v1/rerank", {"model": MODEL, "query": "q", "documents": ["a"]}, None),
        ("/v1/score", {"model": MODEL, "text_1": "q", "text_2": "a"}, "list"),
    ],
)
def test_each_endpoint(client: openai.OpenAI, endpoint: str, body: Any, kind: str | None) -> None:
    wrong = body | {"model": "no such model"}
    batch = start(
        client, line(1, body, endpoint), line(2, wrong, endpoint), endpoint=endpoint, metadata={"night": "1"}
    )
    assert batch.metadata == {"night": "1"}
    batch = ended(client, batch.id)
    assert (batch.status, batch.errors, batch.model) == ("completed", None, MODEL)
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    good, bad = content(client, batch.output_file_id), content(client, batch.error_file_id)
    assert set(good["line 1"]) == {"id", "custom_id", "response", "error"}
    assert good["line 1"]["response"]["status_code"] == 200
    answer = good["line 1"]["response"]["body"]
    assert answer.get("object", answer.get("type")) == kind
    assert batch.usage.input_tokens > 0
    assert bad["line 2"]["response"]["status_code"] == 404
    assert "no such model" in json.dumps(bad["line 2"]["response"]["body"])
    assert bad["line 2"]["error"] is None


def test_thinking_and_the_request_id_of_messages(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = {"input_tokens": 2, "output_tokens": 5, "output_tokens_details": {"thinking_tokens": 3}}

    async def post(*_: Any) -> runner.Answer:
        return runner.Answer(200, {"request-id": "req_7"}, json.dumps({"usage": usage}).encode())

    monkeypatch.setattr(runner, "post", post)
    batch = ended(client, start(client, line(1, url="/v1/messages"), endpoint="/v1/messages").id)
    assert batch.usage.output_tokens_details.reasoning_tokens == 3
    assert content(client, batch.output_file_id)["line 1"]["response"]["request_id"] == "req_7"


def test_a_batch_that_looks_ahead_leaves_the_threads_to_others(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking, going_on = threading.Event(), threading.Event()
    take = lines.Lines.take

    def slow(self: lines.Lines) -> Any:
        taking.set()
        assert going_on.wait(LIMIT_S)
        return take(self)

    monkeypatch.setattr(lines.Lines, "take", slow)
    batch = start(client, *map(line, range(100)))
    try:
        assert taking.wait(LIMIT_S)
        client.with_options(timeout=5).files.create(file=b"", purpose="batch")
    finally:
        going_on.set()
    assert ended(client, batch.id).request_counts.completed == 100


def test_lines_have_a_low_priority_and_one_flow(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    batch = start(client, line(1), line(2, COMPLETION | {"priority": 3}))
    ended(client, batch.id)
    client.completions.create(**COMPLETION)
    assert sorted(request.priority for request in frontend.requests) == [BATCH, 0, 3]
    assert [request.flow == batch.id for request in frontend.requests] == [True, True, False]


def test_lines_are_stored_only_if_they_say_so(client: openai.OpenAI) -> None:
    found = [line(n, RESPONSE | more, "/v1/responses") for n, more in enumerate([{}, {"store": True}])]
    batch = ended(client, start(client, *found, endpoint="/v1/responses").id)
    bodies = [one["response"]["body"] for one in content(client, batch.output_file_id).values()]
    assert sorted(body["store"] for body in bodies) == [False, True]
    for body in bodies:
        if body["store"]:
            assert client.responses.retrieve(body["id"]).id == body["id"]
        else:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(body["id"])


def test_lines_with_one_prefix_follow_each_other(client: openai.OpenAI, tmp_path: Path) -> None:
    documents = [f"{letter * 50} question {n}" for n in range(3) for letter in "abc"]
    found = [line(n, COMPLETION | {"prompt": text}) for n, text in enumerate(documents)]
    (tmp_path / "in.jsonl").write_bytes(written(*found))
    left = lines.Lines(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "/v1/completions")
    rows = iter(left.take, None)
    assert "".join(json.loads(left.body(row))["prompt"][0] for row in rows if row) == "aaabbbccc"
    left.close()
    batch = ended(client, start(client, *found).id)
    assert batch.usage.input_tokens_details.cached_tokens >= 6 * 50


def test_no_more_lines_at_a_time_than_keep_the_batch_full(
    client: openai.OpenAI, frontend: FakeFrontend, server: LiveServer
) -> None:
    frontend.hold_after = 0
    batch = start(client, *(line(n) for n in range(200)))
    most = frontend.info.max_running * 5 // 4 + 1
    wait_for(lambda: len(frontend.running) >= most)
    assert len(frontend.running) == most < 200
    server.call(frontend.release.set)
    assert ended(client, batch.id).request_counts.completed == 200


@pytest.mark.parametrize(
    ("text", "number", "param"),
    [
        (b"nonsense\n", 2, None),
        (b"[]\n", 2, None),
        (b'\n\n{"custom_id": "x"}\n', 4, "method"),
        (line(2, custom_id=7), 2, "custom_id"),
        (line(2, custom_id="x" * 513), 2, "custom_id"),
        (line(1), 2, "custom_id"),
        (line(2, method="GET"), 2, "method"),
        (line(2, url="/v1/responses"), 2, "url"),
        (line(2, body=[]), 2, "body"),
        (line(2, COMPLETION | {"stream": True}), 2, "body.stream"),
        (line(2, priority=1), 2, "priority"),
    ],
)
def test_a_wrong_line_is_named(client: openai.OpenAI, text: Any, number: int, param: str | None) -> None:
    batch = ended(client, start(client, line(1), text).id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    (error,) = batch.errors.data
    assert (error.line, error.param) == (number, param)
    assert error.message


def test_an_empty_file_and_a_long_one(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(client, start(client).id).errors.data[0].code == "empty_file"
    monkeypatch.setattr(lines, "MAX_LINES", 3)
    errors = ended(client, start(client, *map(line, range(9))).id).errors.data
    assert [(error.code, error.line) for error in errors] == [("too_many_requests", 4)]


def test_cancel(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.hold_after = 1
    batch = start(client, *map(line, range(3)))
    assert frontend.held.wait(LIMIT_S)
    with pytest.raises(openai.BadRequestError, match="Cancel the batch first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert frontend.idle.wait(LIMIT_S)  # its requests have ended
    left = content(client, batch.error_file_id)
    assert {one["error"]["code"] for one in left.values()} == {"batch_cancelled"}
    assert len(left) == 3
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.batches.cancel(batch.id)


def test_a_batch_that_ends_while_it_is_cancelled_keeps_its_answers(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, frontend: FakeFrontend, server: LiveServer
) -> None:
    frontend.hold_after = 1
    batch = start(client, line(1))
    assert frontend.held.wait(LIMIT_S)
    save = store.Store.save

    async def slow(self: store.Store, what: Any) -> None:
        await save(self, what)
        if isinstance(what, store.Batch) and what.status == "cancelling":
            frontend.release.set()
            while what.status == "cancelling":
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # until its task has ended

    monkeypatch.setattr(store.Store, "save", slow)
    assert client.batches.cancel(batch.id).status == "completed"
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert content(client, batch.output_file_id)["line 1"]["response"]["status_code"] == 200


def test_the_window_ends(
    client: openai.OpenAI, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(route.WINDOW_S, "m", 1)
    frontend.hold_after = 1
    batch = ended(client, start(client, line(1), completion_window="1m").id)
    assert batch.status == "expired"
    assert content(client, batch.error_file_id)["line 1"]["error"]["code"] == "batch_expired"


def test_a_full_queue_and_a_dying_engine(
    client: openai.OpenAI, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [429, 503, 503, 429, 503, 200]
    sent = []

    async def post(*_: Any) -> runner.Answer:
        sent.append(answers[len(sent)])
        return runner.Answer(sent[-1], {"retry-after": "0"}, b"{}")

    monkeypatch.setattr(runner, "post", post)
    batch = ended(client, start(client, line(1)).id)
    assert sent == answers[:5]
    assert content(client, batch.error_file_id)["line 1"]["response"]["status_code"] == 503


@pytest.mark.parametrize("error", [EngineClosed("It has been closed."), WorkerDied("It died too often.")])
def test_an_engine_that_has_closed_answers_no_line(
    folder: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    closed = FakeFrontend()
    closed.fail_first, closed.gave_up = error, True
    with LiveServer(closed, route.router, batch_dir=str(folder)) as server, client_of(server.url) as client:
        batch = start(client, *map(line, range(3)))
        wait_for(lambda: "in a later server" in caplog.text)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert list(lines.results_of(folder / f"{batch.id}.jsonl")) == []
    with (
        LiveServer(FakeFrontend(), route.router, batch_dir=str(folder)) as server,
        client_of(server.url) as client,
    ):
        assert ended(client, batch.id).request_counts.completed == 3


def test_a_full_disk_fails_the_batch_alone(
    client: openai.OpenAI, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(lines.Lines, "write", full)
        batch = ended(client, start(client, line(1)).id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "disk_full")
    with monkeypatch.context() as broken:
        broken.setattr(upload.Form, "write", full)
        answer = http.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}, headers=form())
        assert refused(answer, 507)["code"] == "disk_full"
    assert ended(client, start(client, line(1)).id).status == "completed"


def form() -> dict[str, str]:
    """Headers of a form, whose content type httpx writes."""
    return FORM | {"content-type": "multipart/form-data; boundary=b"}


def test_files(client: openai.OpenAI, folder: Path) -> None:
    data = written(line(1))
    file = client.files.create(file=("../../etc/passwd", data), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("../../etc/passwd", len(data), "batch")
    assert client.files.retrieve(file.id).to_dict() == file.to_dict()
    assert client.files.content(file.id).content == data
    second = client.files.create(file=b"", purpose="batch")
    assert [one.id for one in client.files.list()] == [second.id, file.id]
    assert [one.id for one in client.files.list(order="asc", limit=1)] == [file.id, second.id]
    assert client.files.list(limit=1).has_more
    assert list(client.files.list(purpose="batch_output")) == []
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {"lock", f"{second.id}.json", f"{second.id}.jsonl"}


def test_batches_are_listed(client: openai.OpenAI) -> None:
    ids = [start(client, line(1)).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
    assert [batch.id for batch in client.batches.list(limit=1).data] == ids[:1:-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/generate"}, "endpoint"),
        ({"endpoint": "/v1/messages/x"}, "endpoint"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"input_file_id": "../lock"}, "id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"model": MODEL}, "model"),
    ],
)
def test_a_wrong_field_is_named(client: openai.OpenAI, http: httpx.Client, fields: Any, param: str) -> None:
    file = client.files.create(file=written(line(1)), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
    answer = http.post("/v1/batches", json=body)
    assert refused(answer, 404 if param == "id" else 400)["param"].startswith(param)


def test_all_wrong_fields_are_named(http: httpx.Client) -> None:
    body = {"input_file_id": 5, "endpoint": "/x", "completion_window": "3x", "foo": 1}
    error = refused(http.post("/v1/batches", json=body))
    assert {one["param"] for one in error["errors"]} == set(body)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999", "after=", "a=b", "order=up"])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_wrong_query(http: httpx.Client, path: str, query: str) -> None:
    answer = http.get(f"{path}?{query}")
    assert answer.status_code == 200 if query == "after=" else refused(answer)["param"]


@pytest.mark.parametrize("value", HOSTILE)
def test_no_field_of_a_batch_or_of_a_line_is_a_500(
    http: httpx.Client, client: openai.OpenAI, value: str
) -> None:
    file = client.files.create(file=written(line(1)), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for field in (*good, "metadata", "no_such_field"):
        text = json.dumps(good | {field: "HERE"}).replace('"HERE"', HOSTILE[value])
        answer = http.post("/v1/batches", content=text.encode())
        assert answer.status_code < 500, (field, answer.text[:500])
        assert len(answer.text) < 5000
    for field in (*line(1), "no_such_field"):
        text = json.dumps(line(2) | {field: "HERE"}).replace('"HERE"', HOSTILE[value])
        batch = ended(client, start(client, line(1), text.encode() + b"\n").id)
        assert batch.status in ("failed", "completed")
        for error in batch.errors.data if batch.errors else ():
            assert error.line == 2
            assert len(error.message) < 1000


PART = 'content-disposition: form-data; name="{}"'
FILE = f"--b\r\n{PART.format('file')}; filename=f\r\n\r\n{{}}\r\n"
PURPOSE = f"--b\r\n{PART.format('purpose')}\r\n\r\nbatch\r\n"
FORMS = {
    "whole": (FILE + PURPOSE + "--b--", 200),
    "empty": ("", 400),
    "no end": (FILE + PURPOSE, 400),
    "cut in a header": (FILE[:20], 400),
    "no file": (PURPOSE + "--b--", 400),
    "no purpose": (FILE + "--b--", 400),
    "two files": (FILE + FILE + PURPOSE + "--b--", 400),
    "another purpose": (FILE + PURPOSE.replace("batch", "vision") + "--b--", 400),
    "another field": (FILE + PURPOSE + PURPOSE.replace("purpose", "expires_after[seconds]") + "--b--", 400),
    "no name": (FILE.replace('name="file"; ', "") + "--b--", 400),
    "long field": (FILE + PURPOSE.replace("batch", "x" * 2000) + "--b--", 400),
    "long header": (FILE.replace("form-data", "x" * 100_000) + "--b--", 400),
    "another boundary": (FILE.replace("--b", "--c") + "--c--", 400),
    "no form": ('{"purpose": "batch"}', 400),
    "nul": ("\0" * 1000, 400),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(http: httpx.Client, name: str, folder: Path) -> None:
    body, status = FORMS[name]
    answer = http.post("/v1/files", content=body.encode(), headers=form())
    assert answer.status_code == status, answer.text
    if status == 400:
        refused(answer)
        assert {path.name for path in folder.iterdir()} == {"lock"}


def test_no_cut_or_changed_form_is_a_500(http: httpx.Client) -> None:
    body = (FILE + PURPOSE + "--b--").encode()
    for at in range(len(body)):
        for changed in (body[:at], body[:at] + b"\xff" + body[at + 1 :], body[:at] + body[at + 1 :]):
            assert http.post("/v1/files", content=changed, headers=form()).status_code < 500, changed
    kinds = (
        "multipart/form-data",
        "multipart/form-data; boundary=",
        f"multipart/form-data; boundary={'b' * 9000}",
    )
    for kind in kinds:
        assert http.post("/v1/files", content=body, headers=FORM | {"content-type": kind}).status_code in (
            400,
            415,
        )


def test_an_upload_is_bounded(http: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_FILE_BYTES", 1000)
    body = (FILE.format("x" * 2000) + PURPOSE + "--b--").encode()
    assert refused(http.post("/v1/files", content=body, headers=form()), 413)["param"] == "file"
    assert {path.name for path in folder.iterdir()} == {"lock"}


def test_parallel_uploads_share_the_room(folder: Path) -> None:
    body = (FILE.format("x" * 700) + PURPOSE + "--b--").encode()
    with (
        LiveServer(FakeFrontend(), route.router, batch_dir=str(folder), batch_gb=1000 / 2**30) as server,
        httpx.Client(base_url=server.url, timeout=LIMIT_S) as http,
    ):
        first = http_client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
        first.putrequest("POST", "/v1/files")
        for name, value in (form() | {"content-length": str(len(body))}).items():
            first.putheader(name, value)
        first.endheaders(body[:100])
        wait_for(lambda: any(folder.glob("upload-*")))
        answer = http.post("/v1/files", content=body, headers=form())
        assert refused(answer, 507)["code"] == "disk_full"
        first.send(body[100:])
        file = json.loads(first.getresponse().read())
        first.close()
        assert http.delete(f"/v1/files/{file['id']}").status_code == 200
        assert http.post("/v1/files", content=body, headers=form()).status_code == 200


def test_the_event_loop_does_not_wait_for_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, changing = [], []

    class Watched(dict[str, Any]):
        def __setitem__(self, *item: Any) -> None:
            changing.append(threading.current_thread())
            super().__setitem__(*item)

    read, scandir = store.Store._read, os.scandir

    def watched_read(self: store.Store) -> None:
        reading.append(threading.current_thread())
        read(self)
        self.files, self.batches = Watched(self.files), Watched(self.batches)

    def watched_scandir(path: Any) -> Any:
        if path == folder:
            reading.append(threading.current_thread())
        return scandir(path)

    monkeypatch.setattr(store.Store, "_read", watched_read)
    monkeypatch.setattr(os, "scandir", watched_scandir)
    with (
        LiveServer(FakeFrontend(), route.router, batch_dir=str(folder)) as server,
        client_of(server.url) as client,
    ):
        assert ended(client, start(client, line(1)).id).status == "completed"
        assert len(reading) >= 3  # at the start, at the upload and at the batch
        assert server._thread not in reading
        assert len(changing) >= 4
        assert set(changing) == {server._thread}


def test_the_last_of_two_saves_is_on_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store.Store(folder, 1000)
    batch = store.Batch(**BATCH_OBJECT)
    second = threading.Event()
    write = store.Store._write

    def slow(self: store.Store, identity: str, description: bytes) -> None:
        if b'"status":"cancelling"' in description:
            second.set()
        else:
            second.wait(0.3)
        write(self, identity, description)

    async def save_twice() -> None:
        first = asyncio.create_task(kept.save(batch))
        await asyncio.sleep(0)
        batch.enter("cancelling")
        await asyncio.gather(first, kept.save(batch))

    monkeypatch.setattr(store.Store, "_write", slow)
    asyncio.run(save_twice())
    assert json.loads((folder / f"{batch.id}.json").read_bytes())["status"] == "cancelling"
    kept.close()


def test_a_form_of_a_web_page_is_refused(http: httpx.Client) -> None:
    body = (FILE + PURPOSE + "--b--").encode()
    for headers, status in (
        ({"authorization": ""}, 415),
        ({"authorization": "Basic eDp5"}, 415),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ):
        refused(http.post("/v1/files", content=body, headers=form() | headers), status)
    for path in ("/v1/batches", "/v1/chat/completions", "/v1/files/x/content"):
        refused(http.post(path, content=body, headers=form()), 415)


def test_files_belong_to_a_key(folder: Path) -> None:
    found = {"api_key": "one", "batch_dir": str(folder), "allowed_hosts": "*.example.com,127.0.0.1"}
    with LiveServer(FakeFrontend(), route.router, **found) as server, client_of(server.url, "one") as client:
        batch = ended(client, start(client, line(1)).id)
        assert batch.status == "completed"
        assert content(client, batch.output_file_id)["line 1"]["response"]["status_code"] == 200
    found["api_key"] = "two"
    with LiveServer(FakeFrontend(), route.router, **found) as server, client_of(server.url, "two") as client:
        assert list(client.files.list()) == list(client.batches.list()) == []
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.output_file_id)
    assert "one" not in "".join(path.read_text() for path in folder.glob("*.json"))


def test_one_server_uses_a_folder(client: openai.OpenAI, folder: Path) -> None:
    list(client.files.list())
    with LiveServer(FakeFrontend(), route.router, batch_dir=str(folder)) as other:
        error = refused(httpx.get(other.url + "/v1/files"), 409)
    assert error["code"] == "batch_dir_in_use"
    assert "--batch-dir" in error["message"]


def test_servers_on_two_ports_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    with (
        LiveServer(FakeFrontend(), route.router, batch_dir=None, port=30000) as one,
        LiveServer(FakeFrontend(), route.router, batch_dir=None, port=30001) as other,
    ):
        for server in (one, other):
            assert httpx.get(server.url + "/v1/files").status_code == 200
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == ["30000", "30001"]


def test_off(folder: Path) -> None:
    with LiveServer(FakeFrontend(), route.router, batch_dir=str(folder), batch_gb=0) as server:
        assert "--batch-gb" in refused(httpx.get(server.url + "/v1/files"), 404)["message"]
    assert not folder.exists()


SCRIPT = """
import sys
from pathlib import Path
from ramify.batches.route import router
from ramify.runtime.config import ServerConfig
from ramify.runtime.frontend import frontend
from tests.server.fake_frontend import FakeFrontend

class StubFrontend(FakeFrontend):
    def __init__(self, config, workers):
        super().__init__()
        self.info = self.info.__class__(**{n: getattr(self.info, n) for n in self.info.__struct_fields__}
                                        | {"max_running": 8})
    async def start(self): pass
    def generate(self, request):
        print("line", request.prompt[0], flush=True)
        return super().generate(request)

frontend.Frontend = StubFrontend
from ramify.runtime.server.app.serve import serve
sys.exit(serve(ServerConfig(port=0, batch_dir=sys.argv[1]), lambda: [router]))
"""


def serving(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("Serving"):
            return process, text.split()[-1]
    raise AssertionError(process.wait(60))


def test_what_a_killed_server_left_is_removed(folder: Path) -> None:
    with (
        LiveServer(FakeFrontend(), route.router, batch_dir=str(folder)) as server,
        client_of(server.url) as client,
    ):
        batch = ended(client, start(client, line(1)).id)
        file, output = batch.input_file_id, batch.output_file_id
    kept = {"lock", "mine.jsonl", "file-of-mine.jsonl", f"{batch.id}.json"}
    kept |= {f"{one}{ending}" for one in (file, output) for ending in (".json", ".jsonl")}
    unknown = "0" * 24
    left = {f"file-{unknown}.jsonl", f"batch_{unknown}.jsonl", "upload-" + "0" * 16}
    left |= {f"{batch.id}.jsonl", f"{batch.id}.jsonl.17.new"}
    for name in left | kept:
        (folder / name).touch()
    with LiveServer(FakeFrontend(), route.router, batch_dir=str(folder)):
        deadline = time.monotonic() + 60
        while (found := {path.name for path in folder.iterdir()}) != kept:  # cleared after the start
            assert time.monotonic() < deadline, found
            time.sleep(0.02)


def test_a_killed_and_a_stopped_server_go_on_where_they_were(folder: Path) -> None:
    total, identity, sent, finished = 400, "", [], [set[str]()]
    for end in (signal.SIGKILL, signal.SIGTERM, None):
        process, url = serving(folder)
        try:
            with client_of(url) as client:
                if not identity:
                    bodies = [COMPLETION | {"prompt": f"text {n}", "max_tokens": 1} for n in range(total)]
                    identity = start(client, *(line(n, body) for n, body in enumerate(bodies))).id
                if end is not None:
                    while client.batches.retrieve(identity).request_counts.completed < 40 * len(finished):
                        pass
                    process.send_signal(end)
                else:
                    batch = ended(client, identity)
                    found = content(client, batch.output_file_id)
                    process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        sent.append([text[len("line text ") :] for text in out.splitlines() if text.startswith("line text ")])
        results = lines.results_of(folder / f"{identity}.jsonl")
        finished.append({one.key.removeprefix("line ") for one in results})
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": total, "completed": total, "failed": 0}
    assert set(found) == {f"line {n}" for n in range(total)}
    for before, asked in zip(finished, sent, strict=False):
        assert not before & set(asked)  # what had an answer is not computed again
        assert len(asked) == len(set(asked))
    assert 40 <= len(finished[1]) < len(finished[2]) < total
