"""The engine's life without its processes: closed before the start, and an engine core that cannot be
replaced."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.engine_messages import Abort, Failed, GetStats, StepText
from ramify.errors import (
    EngineClosed,
    EngineError,
    InvalidConstraint,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    WorkerDied,
)
from ramify.messages import ChatMessage, Finish, Generate, TextChunk
from ramify.runtime.config import EngineConfig
from ramify.runtime.engine.engine import Engine
from ramify.runtime.fleet.supervisor import EngineSupervisor
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.frontend.loras import LoadedLora
from ramify.sampling_params import SamplingParams


def test_an_engine_that_was_closed_before_its_start_does_not_start(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    async def start(self: Frontend) -> None:
        started.append(self)

    monkeypatch.setattr(Frontend, "start", start)
    engine = Engine(str(tiny_folder))
    engine.close()
    with pytest.raises(EngineClosed):
        engine.start()
    assert not started


def supervisor(**callbacks: Any) -> EngineSupervisor:
    """One without an engine core."""
    usual: dict[str, Any] = {
        "receive": lambda message: None,
        "died": lambda error: False,
        "restarted": lambda: None,
        "gave_up": lambda error: None,
    }
    return EngineSupervisor(EngineConfig(), None, **(usual | callbacks))


def test_any_error_in_a_restart_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(self: EngineSupervisor) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(EngineSupervisor, "_start_engine", fails)
    told: list[EngineError] = []
    engine = supervisor(name="7", gave_up=told.append)

    async def restart() -> None:
        engine._running = True
        engine._worker_died("scheduler")
        assert engine._restart is not None
        await asyncio.wait([engine._restart])

    asyncio.run(restart())
    assert "no more processes" in str(told[0])
    assert all(line.startswith("replica 7: ") for line in caplog.messages)
    assert "The scheduler process died" in caplog.messages[0]
    assert not engine.restarting


@pytest.mark.parametrize(("deaths", "closes"), [(1, False), (2, False), (3, True)])
def test_an_engine_that_dies_while_starting_is_started_once_more(
    deaths: int, closes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts: list[int] = []

    async def start(self: EngineSupervisor) -> None:
        starts.append(1)
        if len(starts) <= deaths:
            raise WorkerDied("The scheduler process ended with code -9 while starting.")

    monkeypatch.setattr(EngineSupervisor, "_start_engine", start)
    told: list[EngineError] = []
    restarted: list[bool] = []
    engine = supervisor(gave_up=told.append, restarted=lambda: restarted.append(True))

    async def restart() -> None:
        engine._running = True
        engine._worker_died("scheduler")
        assert engine._restart is not None
        await asyncio.wait([engine._restart])

    asyncio.run(restart())
    assert len(starts) == min(deaths + 1, 3)
    assert restarted == [True] * (not closes)
    if closes:
        assert isinstance(told[0], EngineClosed)
        assert "code -9" in str(told[0])
        assert told[0].remedy
    else:
        assert not told
        assert "ready again after" in caplog.messages[-1]


class _Sockets:
    """An engine core's end that refuses what msgpack refuses, and the ids in `breaks`."""

    def __init__(self, breaks: str = "") -> None:
        self.breaks = breaks
        self.sent: list[str] = []

    def send(self, message: Any) -> None:
        msgspec.msgpack.encode(message)
        if message.rid == self.breaks:
            raise EngineError("cannot send")
        self.sent.append(message.rid)


def test_a_text_that_cannot_be_sent_is_refused_while_a_suspect_runs_alone() -> None:
    engine = supervisor()
    sockets = _Sockets(breaks="b")
    engine._engine = sockets  # type: ignore[assignment]
    engine.send_alone(Generate(rid="suspect", prompt=("Q",)))
    engine.send(Generate(rid="a", prompt=("Q",)))
    with pytest.raises(UnicodeEncodeError):
        engine.send(Generate(rid="bad", prompt=("\ud800",)))
    for rid in "bc":
        engine.send(Generate(rid=rid, prompt=("Q",)))
    assert sockets.sent == ["suspect"]
    engine.end_alone()
    assert sockets.sent == ["suspect", "a", "c"], "one that fails keeps none behind it"


def opened(monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Frontend, list[Any]]:
    """A frontend without processes, for prompts of 9 tokens, and the messages that it sends."""
    monkeypatch.setattr(Frontend, "max_prompt_tokens", 9)
    frontend = Frontend(EngineConfig(max_running=8, **config))
    monkeypatch.setattr(frontend, "_closed", None)
    sent: list[Any] = []
    monkeypatch.setattr(frontend._engine, "send", sent.append)
    return frontend, sent


def test_a_client_gives_no_id_of_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, sent = opened(monkeypatch)
    with pytest.raises(InvalidRequest, match="begins with '~'"):
        frontend._open(Generate(rid="~heartbeat", prompt=("Q",)))

    async def ask() -> None:
        asked = asyncio.ensure_future(frontend.stats())
        await asyncio.sleep(0)
        asked.cancel()

    asyncio.run(ask())
    assert [(type(one), one.rid[0]) for one in sent] == [(GetStats, "~")]


def test_one_body_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, _ = opened(monkeypatch, max_waiting=8)
    for index in range(14):
        frontend._open(Generate(rid=f"b{index}", prompt=("Q",), flow="body"))
    with pytest.raises(
        Overloaded, match="14 requests of one body or program are running or queued; the limit is 14"
    ):
        frontend._open(Generate(rid="b14", prompt=("Q",), flow="body"))
    for rid in ("chat", "other"):
        frontend._open(Generate(rid=rid, prompt=("Q",)))
    with pytest.raises(Overloaded, match="16 requests are running or queued; the limit is 16"):
        frontend._open(Generate(rid="third", prompt=("Q",)))
    for rid in ("b3", "b4", "chat"):
        frontend._requests.close(rid)
    assert frontend._requests.in_flow(Generate(rid="r", flow="body")) == 12
    frontend._open(Generate(rid="b14", prompt=("Q",), flow="body"))


def test_a_chat_of_more_messages_than_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, sent = opened(monkeypatch)
    hello = ChatMessage(role="user", content="hi")
    frontend._open(Generate(rid="a", chat=(hello,) * 9))
    with pytest.raises(PromptTooLong, match="10 messages") as refused:
        frontend._open(Generate(rid="b", chat=(hello,) * 10))
    assert refused.value.field == "messages"
    assert refused.value.remedy
    thoughts = ChatMessage(role="assistant", content="", reasoning="x" * 2000)
    with pytest.raises(PromptTooLong, match="characters"):
        frontend._open(Generate(rid="c", chat=(hello, thoughts)))
    assert len(sent) == 1


def test_requests_carry_the_revision_of_their_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, sent = opened(monkeypatch)
    frontend._loras.loaded["x"] = LoadedLora(path="folder", revision="1")
    output = frontend._open(Generate(rid="a", prompt=("Q",), lora="x"))
    frontend._loras.loaded["x"] = LoadedLora(path="folder", revision="2")
    output.put(TextChunk(rid="a", text="b", ids=(98,)))
    frontend._loras.restore = lambda: None  # type: ignore[method-assign]
    frontend._send_again()
    assert [(request.lora_revision, request.continues is None) for request in sent] == [
        ("1", True),
        ("1", False),
    ]


def test_an_id_that_is_used_again_gets_nothing_of_the_request_before(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, sent = opened(monkeypatch)
    request = Generate(rid="a~b", prompt=("Q",))

    async def read() -> tuple[TextChunk, TextChunk]:
        before = frontend.generate(request)
        first = asyncio.ensure_future(anext(before))
        await asyncio.sleep(0)
        chunk = TextChunk(rid=sent[0].rid, text="old", ids=(1,))
        frontend._receive(StepText(chunks=(chunk,)))
        old = await first
        await before.aclose()  # type: ignore[attr-defined]
        second = asyncio.ensure_future(anext(frontend.generate(request)))
        await asyncio.sleep(0)
        assert [type(one) for one in sent] == [Generate, Abort, Generate]
        assert sent[0].rid == sent[1].rid != sent[2].rid
        end = msgspec.structs.replace(chunk, finish=Finish(reason="abort"))
        new = TextChunk(rid=sent[2].rid, text="new", ids=(2,), finish=Finish(reason="stop"))
        frontend._receive(StepText(chunks=(end, new)))
        frontend._receive(Failed(rid=sent[0].rid, error=EngineError("old").to_info()))
        return old, await second

    old, new = asyncio.run(read())
    assert [(one.rid, one.text) for one in (old, new)] == [("a~b", "old"), ("a~b", "new")]


def test_a_schema_may_refer_to_the_folder_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "n.json").write_text('{"type": "integer"}')
    opened: list[Generate] = []

    def taken(self: Frontend, request: Generate) -> Any:
        opened.append(request)
        raise EngineClosed("It is enough.")

    def bundle(given: Constraint, find: Any) -> Constraint:
        threads.add(threading.current_thread())
        return constraint.with_definitions(given, find)

    threads: set[threading.Thread] = set()
    monkeypatch.setattr(Frontend, "_open", taken)
    monkeypatch.setattr("ramify.runtime.frontend.frontend.with_definitions", bundle)
    frontend = Frontend(EngineConfig(schemas=str(tmp_path)))
    for strict in (True, "validate"):
        wanted = constraint.json_schema({"items": {"$ref": "n.json"}}, strict=strict)  # type: ignore[arg-type]
        request = Generate(rid="a", constraint=wanted, sampling=SamplingParams())
        with pytest.raises(EngineClosed):
            asyncio.run(anext(frontend.generate(request)))  # type: ignore[arg-type]
    for request in opened:
        assert request.constraint is not None
        assert json.loads(request.constraint.source)["$defs"]["n.json"]["type"] == "integer"
    assert len(opened) == 2
    assert threads
    assert threading.main_thread() not in threads  # the event loop's here
    long = Constraint(kind="json_schema", source='{"$ref": "n.json"}' + " " * 2**20)
    with pytest.raises(InvalidConstraint, match="at most"):
        frontend.generate(Generate(rid="a", constraint=long, sampling=SamplingParams()))


def test_a_folder_of_schemas_that_is_missing_is_named_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConstraint, match="There is no folder"):
        Frontend(EngineConfig(schemas=str(tmp_path / "none")))
