"""The frontend with fake engine cores: ids, limits, adapters, schemas."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.engine_messages import Abort, Failed, GetStats, LoadLora, Reply, StepText
from ramify.errors import (
    EngineClosed,
    EngineError,
    InvalidConstraint,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
)
from ramify.messages import ChatMessage, Finish, Generate, TextChunk
from ramify.runtime.config import EngineConfig
from ramify.runtime.engine.engine import Engine
from ramify.runtime.frontend.frontend import Frontend
from tests.fleet.fakes import FakeEngine, Served


def test_an_engine_that_was_closed_before_its_start_does_not_start(tiny_folder: Path) -> None:
    engine = Engine(str(tiny_folder))
    engine.close()
    with pytest.raises(EngineClosed):
        engine.start()
    assert not engine.pids


class Small(FakeEngine):
    """An engine core that accepts prompts of at most 9 tokens."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.max_prompt_tokens = 9


def with_frontend(test: Callable[[Served], Awaitable[None]], **config: Any) -> None:
    """Run `test` with a frontend that has started."""

    async def run() -> None:
        served = Served(Small, **config)
        await served.frontend.start()
        await test(served)
        await served.frontend.aclose()

    asyncio.run(run())


async def opened(served: Served, rid: str, **fields: Any) -> AsyncIterator[TextChunk]:
    """Send a request; returns its chunks. Raises the error if the request is refused."""
    request = Generate(**{"rid": rid, "prompt": () if "chat" in fields else ("Q",), **fields})
    chunks = served.frontend.generate(request)
    first = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    if first.done():
        first.result()
    first.cancel()
    return chunks


def test_a_client_gives_no_id_of_the_engines_own() -> None:
    async def ask(served: Served) -> None:
        with pytest.raises(InvalidRequest, match="begins with '~'"):
            await opened(served, "~heartbeat")
        asked = asyncio.ensure_future(served.frontend.control.stats())
        await asyncio.sleep(0)
        asked.cancel()
        assert [(type(one), one.rid[0]) for one in served.engines[0].sent] == [(GetStats, "~")]

    with_frontend(ask)


@pytest.mark.parametrize("field", ["flow", "key"])
def test_one_body_and_one_key_leave_room_for_others(field: str) -> None:
    async def fill(served: Served) -> None:
        async def ask(rid: str, name: str = "") -> asyncio.Task[Any]:
            request = Generate(rid=rid, prompt=("Q",), **{field: name})  # type: ignore[arg-type]
            task = asyncio.ensure_future(anext(served.frontend.generate(request)))
            await asyncio.sleep(0)
            if task.done():
                task.result()
            return task

        tasks = {f"b{index}": await ask(f"b{index}", "body") for index in range(14)}
        with pytest.raises(
            Overloaded, match="14 requests of one body, program or key are running or queued; the limit is 14"
        ):
            await ask("b14", "body")
        for rid in ("chat", "other"):
            tasks[rid] = await ask(rid)
        with pytest.raises(Overloaded, match="16 requests are running or queued; the limit is 16"):
            await ask("third")
        for rid in ("b3", "b4", "chat"):
            tasks[rid].cancel()
            await asyncio.wait([tasks[rid]])
        for rid in ("b14", "b15"):
            tasks[rid] = await ask(rid, "body")
        with pytest.raises(Overloaded, match="14 requests of one body"):
            await ask("b16", "body")
        for task in tasks.values():
            task.cancel()

    with_frontend(fill, max_waiting=8)


def test_a_chat_of_more_messages_than_tokens_is_refused() -> None:
    hello = ChatMessage(role="user", content="hi")

    async def ask(served: Served) -> None:
        await opened(served, "a", chat=(hello,) * 9)
        with pytest.raises(PromptTooLong, match="10 messages") as refused:
            await opened(served, "b", chat=(hello,) * 10)
        assert refused.value.field == "messages"
        assert refused.value.remedy
        thoughts = ChatMessage(role="assistant", content="", reasoning="x" * 2000)
        with pytest.raises(PromptTooLong, match="characters"):
            await opened(served, "c", chat=(hello, thoughts))
        assert len(served.requests()) == 1

    with_frontend(ask)


def test_requests_carry_the_revision_of_their_adapter() -> None:
    async def load(served: Served, revision: str) -> None:
        engine = served.engines[0]
        (order,) = engine.take(LoadLora)
        engine.receive(Reply(rid=order.rid, lora=revision))
        await asyncio.sleep(0)

    async def ask(served: Served) -> None:
        engine = served.engines[0]
        loading = asyncio.ensure_future(served.frontend.loras.load("x", "folder"))
        await asyncio.sleep(0)
        await load(served, "1")
        await loading
        chunks = served.frontend.generate(Generate(rid="a", prompt=("Q",), lora="x"))
        reading = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        (before,) = served.requests()
        engine.receive(StepText(chunks=(TextChunk(rid=before.rid, text="b", ids=(98,)),)))
        await reading
        served.kill()
        await load(served, "2")
        (after,) = served.requests()
        assert [(one.lora_revision, one.continues is None) for one in (before, after)] == [
            ("1", True),
            ("1", False),
        ]

    with_frontend(ask)


def test_an_id_that_is_used_again_gets_nothing_of_the_request_before() -> None:
    async def read(served: Served) -> None:
        engine = served.engines[0]
        request = Generate(rid="a~b", prompt=("Q",))
        before = served.frontend.generate(request)
        first = asyncio.ensure_future(anext(before))
        await asyncio.sleep(0)
        chunk = TextChunk(rid=engine.sent[0].rid, text="old", ids=(1,))
        engine.receive(StepText(chunks=(chunk,)))
        old = await first
        await before.aclose()  # type: ignore[attr-defined]
        second = asyncio.ensure_future(anext(served.frontend.generate(request)))
        await asyncio.sleep(0)
        sent = engine.sent
        assert [type(one) for one in sent] == [Generate, Abort, Generate]
        assert sent[0].rid == sent[1].rid != sent[2].rid
        end = msgspec.structs.replace(chunk, finish=Finish(reason="abort"))
        new = TextChunk(rid=sent[2].rid, text="new", ids=(2,), finish=Finish(reason="stop"))
        engine.receive(StepText(chunks=(end, new)))
        engine.receive(Failed(rid=sent[0].rid, error=EngineError("old").to_info()))
        assert [(one.rid, one.text) for one in (old, await second)] == [("a~b", "old"), ("a~b", "new")]

    with_frontend(read)


def test_a_schema_may_refer_to_the_folder_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "n.json").write_text('{"type": "integer"}')
    threads: set[threading.Thread] = set()

    def bundle(given: Constraint, find: Any) -> Constraint:
        threads.add(threading.current_thread())
        return constraint.with_definitions(given, find)

    monkeypatch.setattr("ramify.runtime.frontend.frontend.with_definitions", bundle)

    async def ask(served: Served) -> None:
        for count, strict in enumerate((True, "validate"), 1):
            wanted = constraint.json_schema({"items": {"$ref": "n.json"}}, strict=strict)  # type: ignore[arg-type]
            chunks = served.frontend.generate(Generate(rid=f"r{count}", prompt=("Q",), constraint=wanted))
            first = asyncio.ensure_future(anext(chunks))
            while len(served.requests()) < count:
                await asyncio.sleep(0.001)
            first.cancel()
            sent = served.requests()[-1].constraint
            assert sent is not None
            assert json.loads(sent.source)["$defs"]["n.json"]["type"] == "integer"
        long = Constraint(kind="json_schema", source='{"$ref": "n.json"}' + " " * 2**20)
        with pytest.raises(InvalidConstraint, match="at most"):
            served.frontend.generate(Generate(rid="a", prompt=("Q",), constraint=long))

    with_frontend(ask, schemas=str(tmp_path))
    assert threads
    assert threading.main_thread() not in threads  # the event loop's here


def test_a_folder_of_schemas_that_is_missing_is_named_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConstraint, match="There is no folder"):
        Frontend(EngineConfig(schemas=str(tmp_path / "none")))
