"""Answers from a file: the same as computed, only for the same request to the same model, in any process."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading

import msgspec
import pytest

import ramify as rm
from ramify import answers
from ramify.answers import AnswerStore
from ramify.errors import InvalidRequest, WorkerDied
from ramify.lang.calls.delivery import key_of
from ramify.loop import wait
from ramify.messages import (
    Finish,
    Generate,
    TextChunk,
    Usage,
)
from ramify.model_info import ModelInfo
from ramify.programs.route import router
from ramify.sampling_params import SamplingParams
from tests.lang.backends import Breaking
from tests.lang.remote import RawServer, ScriptedFrontend, answer, live_endpoint
from tests.server.fake_frontend import LiveServer


class Stored(rm.ScriptedBackend):
    """A script with a store of answers, for a model with a given fingerprint."""

    def __init__(self, answers, path, fingerprint="one") -> None:
        super().__init__(answers)
        self.answers = AnswerStore(path)
        self.fingerprint = fingerprint

    async def info(self) -> ModelInfo:
        return msgspec.structs.replace(await super().info(), fingerprint=self.fingerprint)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.db"


@rm.function
def essay(s, topic="trees", **options):
    s += rm.user("About " + topic) + rm.assistant(rm.gen("draft", max_tokens=20, logprobs=1))
    parts = s.fork(2)
    parts += rm.user("Judge it.") + rm.assistant(rm.gen("view", stop="!"))
    parts.join()
    s += rm.user("Grade?") + rm.assistant(rm.select("grade", ["A", "B"]))
    s += rm.user("How often?") + rm.assistant(rm.gen("number", schema=int))


SCRIPT = {"draft": "Trees are tall.", "view": "fine ! and more", "grade": "B", "number": "12"}


def everything(state):
    """All results of the program."""
    logprobs = state.get_meta_info("draft")["output_token_logprobs"]
    return state.text(), state["view"], state["grade"], state["number"], logprobs


def test_a_second_run_asks_nothing_and_is_the_same(path):
    first = essay.run(backend=Stored(SCRIPT, path), temperature=0)
    backend = Stored({}, path)
    second = essay.run(backend=backend, temperature=0)
    assert everything(second) == everything(first)
    assert second["number"] == 12
    assert backend.requests == []


def test_what_was_stored_is_told_apart_in_trace_and_usage(path):
    first = essay.run(backend=Stored(SCRIPT, path), temperature=0)
    second = essay.run(backend=Stored({}, path), temperature=0)
    computed = first.usage.prompt_tokens + first.usage.completion_tokens
    # The two equal requests of the fork are in flight together.
    assert second.usage == Usage(stored_tokens=computed)
    assert first.usage.stored_tokens == 0
    assert (first.trace.requests, second.trace.requests) == (5, 0)
    draft = second.trace.children[0]
    assert draft.stored
    assert draft.to_dict()["stored"]
    assert draft.to_dict()["stored_tokens"] == draft.usage.stored_tokens > 0
    assert f"stored {draft.usage.stored_tokens}" in str(second.trace)
    assert "stored" not in str(first.trace)
    assert draft.tokens.ids == first.trace.children[0].tokens.ids
    assert second.get_meta_info("draft")["stored_tokens"] > 0


def test_the_next_prompt_holds_the_stored_tokens(path):
    @rm.function
    def two(s, last="two"):
        s += "A:" + rm.gen("a", stop=".") + f" {last}:" + rm.gen("b")

    backend = Stored({"a": ["one two. three", "again"], "b": ["x", "y"]}, path)
    two.run(backend=backend, temperature=0)
    state = two.run("other", backend=backend, temperature=0)
    assert (state["a"], state["b"]) == ("one two", "y")
    _, second, third = backend.requests
    assert third.prompt[:-1] == second.prompt[:-1]
    assert isinstance(third.prompt[1], tuple)  # ids


def test_a_stored_answer_streams(path):
    essay.run(backend=Stored(SCRIPT, path), temperature=0)
    state = essay.run(backend=Stored({}, path), temperature=0, stream=True)
    assert "".join(state.text_iter("draft")) == "Trees are tall."
    assert "".join(state.text_iter()) == state.text()


@rm.function
def ask(s, question="Q:"):
    s += question + rm.gen("x", max_tokens=8)


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1, "seed": 3}, True),
        ({"temperature": 1}, False),
        ({}, False),
    ],
)
def test_only_answers_that_would_be_the_same_are_stored(path, options, stored):
    assert ask.run(backend=Stored(["first"], path), **options)["x"] == "first"
    again = ask.run(backend=Stored(["second"], path), **options)
    assert again["x"] == ("first" if stored else "second")


@pytest.mark.parametrize(
    "other",
    [
        {"question": "R:"},
        {"top_p": 0.5},
        {"max_tokens": 9},
        {"seed": 1},
        {"cache_scope": "tenant"},
        {"fingerprint": "two"},
    ],
)
def test_another_request_or_model_is_asked(path, other):
    @rm.function
    def ask(s, question="Q:"):
        s += question + rm.gen("x")

    given = {"temperature": 0, "max_tokens": 8}
    ask.run(backend=Stored(["first"], path), **given)
    other = dict(other)
    backend = Stored(["second"], path, other.pop("fingerprint", "one"))
    assert ask.run(backend=backend, **given | other)["x"] == "second"


def test_a_constraint_belongs_to_the_request(path):
    @rm.function
    def number(s, pattern):
        s += "N:" + rm.gen("x", regex=pattern)

    assert number.run("[0-9]", backend=Stored(["1"], path), temperature=0)["x"] == "1"
    assert number.run("[1-9]", backend=Stored(["2"], path), temperature=0)["x"] == "2"


def test_priorities_share_an_answer(path):
    one = Generate(rid="1", prompt=("Q",), sampling=SamplingParams(temperature=0), priority=3, every_s=0.5)
    other = Generate(rid="2", prompt=("Q",), sampling=SamplingParams(temperature=0))
    info = wait(Stored([], path).info())
    assert key_of(one, info) == key_of(other, info)


def test_failed_and_cancelled_answers_are_not_stored(path):
    class Failing(Breaking):
        async def info(self):
            return msgspec.structs.replace(await super().info(), fingerprint="one")

    backend = Failing({"x": "one two three"}, WorkerDied("gone"), after=2)
    backend.answers = AnswerStore(path)
    assert ask.run(backend=backend, temperature=0).error() is not None
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM answers").fetchone() == (0,)
    database.close()
    assert ask.run(backend=Stored(["whole"], path), temperature=0)["x"] == "whole"


def test_a_backend_without_a_fingerprint_is_refused(path):
    error = ask.run(backend=Stored(["a"], path, fingerprint=""), temperature=0).error()
    assert "gives no fingerprint" in str(error)


def test_a_recording_has_the_requests_whose_answers_are_stored(path, tmp_path):
    backend = Stored(["yes", "yes"], path)
    for number in range(2):
        recorder = rm.RecordingBackend(backend, tmp_path / f"{number}.jsonl")
        assert ask.run(backend=recorder, temperature=0)["x"] == "yes"
    assert ask.run(backend=rm.ReplayBackend(tmp_path / "1.jsonl"), temperature=0)["x"] == "yes"


# --- the file ---


def chunks(text):
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    return [TextChunk(rid="r", text=text, ids=(1, 2), usage=usage, finish=Finish(reason="stop"))]


def write_other(path):
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE answers (a)")
    database.commit()
    database.close()


def write_newer(path):
    AnswerStore(path)
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("my notes, " * 200), "no store of answers, or is damaged"),
        (write_other, "is not one"),
        (write_newer, "is of version 99, not 1"),
        (lambda path: path.mkdir(), "cannot be opened"),
    ],
)
def test_another_file_is_refused_by_name(path, make, message):
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for backend in (rm.RuntimeEndpoint, rm.OpenAI, rm.Engine):
        with pytest.raises(InvalidRequest, match=message) as raised:
            backend("http://127.0.0.1:1", cache=path)
        assert str(path) in str(raised.value)
        assert raised.value.field == "cache"
    assert before is None or path.read_bytes() == before


def test_a_damaged_file_is_an_error_and_not_a_wrong_answer(path):
    store = AnswerStore(path)
    for number in range(200):
        store.put(b"%32d" % number, chunks("text " * 20), "m")
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\x55" * (len(data) - 4096)  # all but the header
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match="damaged"):
        AnswerStore(path).get(b"%32d" % 7)


def test_a_file_that_cannot_be_written_is_a_warning(path, caplog):
    store = AnswerStore(path)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TRIGGER fails BEFORE INSERT ON answers BEGIN SELECT 1 FROM missing; END")
    database.close()
    with caplog.at_level(logging.WARNING, "ramify"):
        store.put(b"k", chunks("a"), "m")
    assert "was not stored" in caplog.text
    assert store.get(b"k") is None


def test_threads_share_a_store(path):
    store = AnswerStore(path)

    def work(number):
        for place in range(20):
            store.put(b"%d-%d" % (number, place), chunks(f"{number}-{place}"), "m")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(store.get(b"%d-19" % number)[0].text == f"{number}-19" for number in range(8))


WRITER = """
import sys
from ramify.answers import AnswerStore
from tests.lang.test_answer_store import chunks
name, path = sys.argv[1:]
store = AnswerStore(path)
number = 0
while True:
    store.put(f"{name}-{number}".encode(), chunks(f"{name}-{number}"), "m")
    number += 1
    print(number, flush=True)
"""


def test_processes_write_at_the_same_time_and_one_is_killed(path):
    """All processes start on a missing file; the answers that a killed one reported as written are
    found."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name, str(path)], stdout=subprocess.PIPE, text=True)
        for name in "abc"
    ]
    written = {}
    for name, writer in zip("abc", writers, strict=True):
        for _ in range(50):
            written[name] = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    store = AnswerStore(path)
    for name, count in written.items():
        for number in range(count):
            assert store.get(f"{name}-{number}".encode())[0].text == f"{name}-{number}"
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_opens_the_file_itself(path):
    """Parent and child go on writing, and either may close the file first."""
    store = AnswerStore(path)
    store.put(b"before", chunks("before"), "m")
    wrote, closed = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        store.put(b"child", chunks("child"), "m")
        os.write(wrote[1], b".")
        os.read(closed[0], 1)
        store.put(b"child again", chunks("child again"), "m")
        os._exit(0)
    os.read(wrote[0], 1)
    store.put(b"parent", chunks("parent"), "m")
    store.close()
    os.write(closed[1], b".")
    assert os.waitpid(child, 0)[1] == 0
    for pipe in (*wrote, *closed):
        os.close(pipe)
    for key in (b"before", b"child", b"parent", b"child again"):
        assert AnswerStore(path).get(key)[0].text == key.decode()


def is_open(path):
    """Whether this process has a file open whose name begins with `path`."""
    links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return any(link.startswith(str(path)) for link in links)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs fork and Linux' /proc")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_inherits_no_connection(path):
    store = AnswerStore(path)
    store.put(b"k", chunks("a"), "m")
    assert is_open(path)
    child = os.fork()
    if child == 0:
        os._exit(is_open(path))
    assert os.waitpid(child, 0)[1] == 0
    assert store.get(b"k")[0].text == "a"


@pytest.fixture
def busy(path, monkeypatch):
    """A lock on the whole file, as another process may hold it."""
    monkeypatch.setattr(answers, "BUSY_S", 0.0)
    AnswerStore(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")
    other.execute("INSERT INTO answers VALUES (x'00', 'm', x'00')")
    yield other
    other.close()


def test_a_busy_file_is_refused_by_name(path, busy):
    with pytest.raises(InvalidRequest, match="cannot be opened: database is locked") as raised:
        AnswerStore(path)
    assert raised.value.field == "cache"


def test_a_file_that_becomes_busy_is_one_warning_and_no_error(path, monkeypatch, caplog, request):
    backend = Stored(["first", "second"], path)
    assert ask.run(backend=backend, temperature=0)["x"] == "first"
    backend.answers.close()
    request.getfixturevalue("busy")
    with caplog.at_level(logging.WARNING, "ramify"):
        assert ask.run(backend=backend, temperature=0)["x"] == "second"
    assert [record.message.count("locked") for record in caplog.records] == [1]


# --- over HTTP ---


def served(answers):
    frontend = ScriptedFrontend(answers)
    frontend.info = msgspec.structs.replace(frontend.info, fingerprint="model 1")
    return frontend


@pytest.mark.parametrize("compiled", [False, True])
def test_a_servers_answers_are_stored(path, compiled):
    frontend = served(lambda request: "yes")
    with LiveServer(frontend, router) as server:
        for _ in range(2):
            backend = rm.RuntimeEndpoint(server.url, cache=path)
            assert ask.run(backend=backend, temperature=0, compiled=compiled)["x"] == "yes"
            backend.close()
        assert len(frontend.requests) == 1
        frontend.info = msgspec.structs.replace(frontend.info, fingerprint="model 2")
        backend = rm.RuntimeEndpoint(server.url, cache=path)
        ask.run(backend=backend, temperature=0)
        backend.close()
    assert len(frontend.requests) == 2


def test_a_store_is_used_by_a_compiled_program_that_branches_on_a_result(path):
    @rm.function
    def branching(s):
        s += "Q:" + rm.gen("x")
        if s["x"] == "yes":
            s += " R:" + rm.gen("y")

    frontend = served(lambda request: "yes")
    with LiveServer(frontend, router) as server:
        for _ in range(2):
            backend = rm.RuntimeEndpoint(server.url, cache=path)
            assert branching.run(backend=backend, temperature=0, compiled=True)["y"] == "yes"
            backend.close()
    assert len(frontend.requests) == 2


def test_a_server_that_comes_back_with_another_model_is_noticed():
    frontend = served(lambda request: "yes")
    with live_endpoint(frontend) as (backend, _):
        ask.run(backend=backend)["x"]
        frontend.info = msgspec.structs.replace(frontend.info, fingerprint="model 2")
        with pytest.raises(rm.ProgramError, match="began on another model"):
            ask.run(backend=backend)["x"]
        assert ask.run(backend=backend)["x"] == "yes"


def test_an_openai_endpoints_answers_are_stored(path):
    @rm.function
    def chat(s):
        s += rm.user("Q?") + rm.assistant(rm.gen("x", temperature=0))

    event = b'data: {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    with RawServer(lambda target: answer(event, kind="text/event-stream")) as server:
        for name in ("m", "m", "other"):
            backend = rm.OpenAI(name, base_url=server.url, extensions=False, cache=path)
            assert chat.run(backend=backend)["x"] == "yes"
            backend.close()
    assert len(server.bodies) == 2
