"""Prompts from callers: they become segments, or an error is raised before anything is sent."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ramify.constraint import ebnf
from ramify.engine_messages import Abort, ToTokenizer
from ramify.errors import InvalidConstraint, InvalidRequest, WorkerDied
from ramify.messages import ChatMessage, Finish, Generate, TextChunk
from ramify.runtime.engine.engine import Engine
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.frontend.output_queue import OutputQueue
from ramify.runtime.frontend.prompts import prompts_of, segments_of
from ramify.runtime.processes.ipc import Inbox, Outbox
from tests.fleet.fakes import Served


@pytest.mark.parametrize(
    ("given", "segments"),
    [
        ("a", ("a",)),
        ([1, 2], ((1, 2),)),
        ((1, 2), ((1, 2),)),
        (np.array([1, 2]), ((1, 2),)),
        ([np.int64(1), 2], ((1, 2),)),
        (["a", [1], (2, 3), "b"], ("a", (1,), (2, 3), "b")),
        (("a", (1,)), ("a", (1,))),
        (((1, 2),), ((1, 2),)),
        (iter(["a"]), ("a",)),
        ([], ()),
    ],
)
def test_one_prompt(given: Any, segments: tuple[Any, ...]) -> None:
    found = segments_of(given)
    assert found == segments
    assert all(type(one) is int for part in found if isinstance(part, tuple) for one in part)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (None, "prompt"),
        (5, "prompt"),
        (b"a", "prompt"),
        ({"a": 1}, "prompt"),
        ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([1, "a"], "prompt[0]"),
        (["a", None], "prompt[1]"),
        (["a", [[1]]], "prompt[1]"),
        (["a", ["b"]], "prompt[1]"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        segments_of(given)
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("given", "prompts", "several"),
    [
        ("a", [("a",)], False),
        ([1, 2], [((1, 2),)], False),
        (iter([1, 2]), [((1, 2),)], False),
        (["a", "b"], [("a",), ("b",)], True),
        ([[1, 2], [3]], [((1, 2),), ((3,),)], True),
        (np.array([[1, 2], [3, 4]]), [((1, 2),), ((3, 4),)], True),
        (["a", [1], ["b", [2]]], [("a",), ((1,),), ("b", (2,))], True),
    ],
)
def test_one_prompt_or_several(given: Any, prompts: list[Any], several: bool) -> None:
    assert prompts_of(given) == (prompts, several)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([], "prompts"),
        ("", "prompts"),
        (None, "prompts"),
        (["a", ""], "prompts[1]"),
        ([[1], []], "prompts[1]"),
        (["a", None], "prompts[1]"),
        (["a", ["b", 2.5]], "prompts[1][1]"),
    ],
)
def test_what_are_no_prompts_is_refused_by_its_place(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prompts_of(given)
    assert refused.value.field == field


class Recorder:
    """An engine that records its requests and answers them at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Generate] = []

        async def nothing(frontend: Frontend) -> None:
            frontend._closed = None

        async def answered(frontend: Frontend, request: Generate) -> Any:
            self.sent.append(request)
            vector = np.ones(1, "<f4").tobytes()
            yield TextChunk(rid=request.rid, embedding=vector, finish=Finish(reason="stop"))

        monkeypatch.setattr(Frontend, "start", nothing)
        monkeypatch.setattr(Frontend, "generate", answered)
        monkeypatch.setattr(Frontend, "info", SimpleNamespace(pooling="last", name="none", max_running=8))
        self.engine = Engine("nobody/none")


def test_ids_are_sent_as_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    engine = recorder.engine
    engine.complete([1, 2])
    engine.complete_many([[1, 2], "a", ["a", [3]]])
    assert [one.prompt for one in recorder.sent] == [((1, 2),), ((1, 2),), ("a",), ("a", (3,))]
    assert engine.embed([1, 2]).shape == (1,)
    assert engine.embed([[1, 2]]).shape == (1, 1)
    assert engine.embed([[1, 2], [3]]).shape == (2, 1)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda engine: engine.complete(5), "prompt"),
        (lambda engine: engine.complete(chat="hi"), "chat"),
        (lambda engine: engine.complete(chat=[{"role": "user", "content": "hi"}]), "chat[0]"),
        (lambda engine: engine.complete(chat=[ChatMessage(role="user", content=5)]), "chat[0].content"),
        (lambda engine: engine.complete("a", constraint='root ::= "a"'), "constraint"),
        (lambda engine: engine.embed(None), "prompts"),
        (lambda engine: engine.embed([]), "prompts"),
        (lambda engine: engine.complete_many("a"), "prompts"),
        (lambda engine: engine.complete_many([1, 2]), "prompts"),
        (lambda engine: engine.complete_many(["a", 5]), "prompts[1]"),
    ],
)
def test_nothing_wrong_is_sent(monkeypatch: pytest.MonkeyPatch, call: Any, field: str) -> None:
    recorder = Recorder(monkeypatch)
    with pytest.raises(InvalidRequest) as refused:
        call(recorder.engine)
    assert refused.value.field == field
    assert not recorder.sent


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prompt": (1, 2)}, "prompt[0]"),
        ({"prompt": ("a", (True,))}, "prompt[1]"),
        ({"prompt": ("a", ("b",))}, "prompt[1]"),
        ({"chat": ("hi",)}, "chat[0]"),
        ({"constraint": 'root ::= "a"'}, "constraint"),
    ],
)
def test_the_frontend_refuses_what_the_engine_cannot_read(wrong: Any, field: str) -> None:
    async def ask() -> None:
        served = Served()
        await served.frontend.start()
        with pytest.raises(InvalidRequest) as refused:
            await anext(served.frontend.generate(Generate(rid="r", **wrong)))
        assert refused.value.field == field
        assert served.frontend.in_flight == 0

    asyncio.run(ask())


def test_a_message_that_cannot_be_read_is_refused_by_its_id(tmp_path: Path) -> None:
    refused: list[tuple[str, str]] = []
    inbox: Inbox[Any] = Inbox(tmp_path / "in", ToTokenizer, lambda rid, why: refused.append((rid, why)))
    outbox = Outbox(tmp_path / "in")
    wrong: Any = (5,)
    outbox.send(Generate(rid="r", prompt=wrong))
    outbox.send(Abort(rid="next"))
    assert [inbox.recv(10.0), inbox.recv(10.0)] == [None, Abort(rid="next")]
    assert refused[0][0] == "r"
    assert "prompt[0]" in refused[0][1]
    inbox.close()
    outbox.close()


def test_an_error_raised_again_does_not_grow() -> None:
    async def died(call: Any) -> int:
        with pytest.raises(WorkerDied) as raised:
            await call()
        assert not raised.value.transient
        assert raised.value.message == "Workers died 4 times."
        return len(traceback.extract_tb(raised.value.__traceback__))

    async def run() -> None:
        served, output = Served(), OutputQueue(Generate(rid="q"))
        await served.frontend.start()
        assert not served.frontend.gave_up
        error = WorkerDied("Workers died 4 times.", transient=False)
        served.engines[0].gave_up(error)
        assert served.frontend.gave_up, "what /livez says"
        output.fail(error)
        for call in (
            lambda: anext(served.frontend.generate(Generate(rid="r", prompt=("a",)))),
            served.frontend.control.stats,
            output.next,
        ):
            assert await died(call) == await died(call)

    asyncio.run(run())


def test_a_source_that_is_no_text_is_refused() -> None:
    wrong: Any = 5
    with pytest.raises(InvalidConstraint, match="must be text"):
        ebnf(wrong)
