"""Sessions between frontends and replicas without Ray: a fake engine core behind each, and calls in this
process."""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest

from ramify.engine_messages import (
    Abort,
    EndProgram,
    Failed,
    GetPrefixes,
    GetStats,
    GetTree,
    LoadLora,
    Reply,
    StepText,
    TreeChange,
    UnloadLora,
)
from ramify.errors import EngineError, UnsupportedField, WorkerDied
from ramify.messages import Finish, Generate, TextChunk
from ramify.ray import listed
from ramify.ray.fleet import ListedFleet
from ramify.ray.host import EngineHost
from ramify.ray.remote_engine import RemoteEngine
from ramify.ray.snapshots import RemoteSnapshots
from ramify.ray.wire import Goodbye, NoSession, decode_item, encode, session_id
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet.replica import HEARTBEAT, SILENT_S, EngineEvents, FleetEvents
from tests.fleet.fakes import model_info

INFO = model_info(name="m", path="/m")
PAGE_BYTES = 16 * 22_500


class FakeEngine:
    """An `EngineSupervisor` without an engine core. `sent` holds the messages to the core."""

    def __init__(self, config: EngineConfig, workers: Any, **options: Any) -> None:
        self.sent: list[Any] = []
        events: EngineEvents = options["events"]
        self.receive, self.died, self.restarted, self.gave_up = events
        self.restarting = False
        self.heartbeat_age_s = 0.0
        self.info = INFO
        self.max_prompt_tokens = 98
        self.page_bytes = PAGE_BYTES

    async def start(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, GetPrefixes):
            self.receive(Reply(rid=message.rid))

    def say(self, rid: str, text: str, *, last: bool = False) -> None:
        finish = Finish(reason="length") if last else None
        self.receive(StepText(chunks=(TextChunk(rid=self.of(rid), text=text, ids=(1,), finish=finish),)))

    def rids(self, kind: type = Generate) -> list[str]:
        """The frontends' ids of the messages of one kind."""
        return [one.rid.rpartition("/")[2] for one in self.sent if isinstance(one, kind)]

    def of(self, rid: str) -> str:
        """The id in the engine core of the last message whose id is `rid` to its frontend."""
        found: list[str] = [getattr(one, "rid", "") for one in self.sent]
        return [one for one in found if one.rpartition("/")[2] == rid][-1]


class Calls:
    """A `Transport` within this process."""

    def __init__(self) -> None:
        self.now = 1000.0
        """Time of the replicas, in seconds."""
        self.hosts: dict[str, EngineHost] = {}
        self.killed: dict[str, asyncio.Event] = {}
        self.lose = 0
        """Number of further calls that fail."""

    async def add(self, name: str) -> FakeEngine:
        engines: list[FakeEngine] = []

        def make_engine(*arguments: Any, **options: Any) -> FakeEngine:
            engines.append(FakeEngine(*arguments, **options))
            return engines[-1]

        self.hosts[name] = EngineHost(EngineConfig(), make_engine, lambda: self.now)
        self.killed[name] = asyncio.Event()
        await self.hosts[name].start()
        return engines[0]

    async def open(self, replica: str, session: str) -> AsyncGenerator[bytes, None]:
        items = self.hosts[replica].session(session)
        killed = asyncio.ensure_future(self.killed[replica].wait())
        item: asyncio.Future[bytes] = asyncio.Future()
        try:
            while True:
                item = asyncio.ensure_future(anext(items))  # type: ignore[arg-type]
                await asyncio.wait((item, killed), return_when=asyncio.FIRST_COMPLETED)
                if killed.done():
                    raise ConnectionError("The actor died.")
                try:
                    yield item.result()
                except StopAsyncIteration:
                    return
        finally:
            killed.cancel()
            item.cancel()
            await asyncio.gather(item, killed, return_exceptions=True)
            await items.aclose()  # type: ignore[attr-defined]

    async def send(self, replica: str, session: str, number: int, message: bytes) -> None:
        if self.lose:
            self.lose -= 1
            raise ConnectionError("lost")
        if self.killed[replica].is_set() or not await self.hosts[replica].send(session, number, message):
            raise NoSession

    async def export(self, replica: str, session: str, message: bytes) -> tuple[bytes, Any]:
        found = await self.hosts[replica].export(session, message)
        if self.killed[replica].is_set() or found is None:
            raise NoSession
        return found

    async def import_(self, replica: str, session: str, message: bytes, snapshot: Any) -> bytes:
        found = await self.hosts[replica].import_(session, message, snapshot)
        if self.killed[replica].is_set() or found is None:
            raise NoSession
        return found


async def until(condition: Callable[[], Any]) -> None:
    """Let other tasks run until `condition` holds."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


# --- a replica ----------------------------------------------------------------------------------


class Reader:
    """One frontend's session with an `EngineHost`."""

    def __init__(self, engine_host: EngineHost, name: str) -> None:
        self.got: list[Any] = []
        self.host, self.name = engine_host, name
        self.number = 0
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for item in self.host.session(self.name):
            self.got += decode_item(item)

    def send(self, message: Any, number: int | None = None) -> asyncio.Future[bool]:
        self.number += 1
        return asyncio.ensure_future(self.host.send(self.name, number or self.number, encode(message)))


async def opened(calls: Calls, *frontends: str) -> tuple[FakeEngine, list[Reader]]:
    """An engine core, and the first session of each frontend."""
    engine = await calls.add("a")
    readers = [Reader(calls.hosts["a"], session_id(name, 0)) for name in frontends]
    await until(lambda: all(reader.got for reader in readers))
    return engine, readers


async def test_each_frontend_gets_the_chunks_of_its_own_requests() -> None:
    engine, (one, two) = await opened(Calls(), "one", "two")
    ends = [one.send(Generate(rid="1")), two.send(Generate(rid="2"))]
    await until(lambda: engine.rids() == ["1", "2"])
    chunks = tuple(
        TextChunk(rid=engine.of(rid), text=rid, ids=(1,), finish=Finish(reason="stop")) for rid in "12"
    )
    engine.receive(StepText(chunks=chunks))
    engine.receive(TreeChange(epoch=1, number=1, added=(5,)))
    assert await asyncio.gather(*ends) == [True, True], "the calls last as long as the requests"
    await until(lambda: len(one.got) == len(two.got) == 3)
    assert [one.got[1].chunks[0].text, two.got[1].chunks[0].text] == ["1", "2"]
    assert one.got[2] == two.got[2] == TreeChange(epoch=1, number=1, added=(5,))


async def test_calls_that_overtake_one_another_arrive_in_order() -> None:
    engine, (one,) = await opened(Calls(), "one")
    await one.send(Abort(rid="1"), number=2)
    await one.send(EndProgram(program="p"), number=3)
    assert engine.sent == []
    ended = one.send(Generate(rid="1"), number=1)
    await until(lambda: engine.sent)
    assert [type(message) for message in engine.sent] == [Generate, Abort, EndProgram]
    engine.say("1", "", last=True)
    await ended


async def test_a_frontend_that_goes_away_leaves_nothing_running() -> None:
    engine, (one, two) = await opened(Calls(), "one", "two")
    for reader, rid in ((one, "1"), (two, "2")):
        reader.send(Generate(rid=rid))
        reader.send(LoadLora(rid=f"load-{rid}", name="lora", path="/p"))
        await until(lambda reader=reader: reader.number == 2)
        if reader is one:
            await until(lambda: engine.rids(LoadLora) == ["load-1"])
            engine.receive(Reply(rid=engine.of("load-1"), lora="r"))
    await until(lambda: two.got[1:] == [Reply(rid="load-2", lora="r")])
    assert engine.rids(LoadLora) == ["load-1"], "the second frontend has found it loaded"
    one.task.cancel()
    await until(lambda: engine.rids(Abort) == ["1"])
    assert not engine.rids(UnloadLora), "the other frontend has it still"
    two.task.cancel()
    await until(lambda: engine.rids(Abort) == ["1", "2"])
    assert [one.name for one in engine.sent if isinstance(one, UnloadLora)] == ["lora"]


async def test_an_adapter_that_is_loaded_for_a_frontend_that_is_gone_is_unloaded() -> None:
    engine, (one,) = await opened(Calls(), "one")
    one.send(LoadLora(rid="load", name="lora", path="/p"))
    await until(lambda: engine.rids(LoadLora) == ["load"])
    one.task.cancel()
    await asyncio.gather(one.task, return_exceptions=True)
    engine.receive(Reply(rid=engine.of("load"), lora="r"))
    await until(lambda: [each.name for each in engine.sent if isinstance(each, UnloadLora)] == ["lora"])


async def test_a_silent_frontend_is_taken_to_be_gone() -> None:
    calls = Calls()
    engine, (one, two) = await opened(calls, "one", "two")
    one.send(Generate(rid="1"))
    await until(lambda: engine.rids() == ["1"])
    calls.now += SILENT_S + 1
    assert await two.send(GetStats(rid=HEARTBEAT))
    engine.receive(Reply(rid=HEARTBEAT))
    await until(lambda: engine.rids(Abort) == ["1"])
    assert engine.rids(GetStats) == [], "heartbeats stay outside"
    await one.task
    assert not two.task.done()
    two.task.cancel()


async def test_clients_may_give_the_ids_of_heartbeats_and_of_other_frontends_requests() -> None:
    engine, (one, two) = await opened(Calls(), "one", "two")
    ends = [reader.send(Generate(rid="heartbeat")) for reader in (one, two)]
    await until(lambda: engine.rids() == ["heartbeat"] * 2)
    first, second = (message.rid for message in engine.sent)
    engine.receive(Failed(rid=second, error=EngineError("no").to_info()))
    engine.receive(StepText(chunks=(TextChunk(rid=first, text="x", finish=Finish(reason="stop")),)))
    assert await asyncio.gather(*ends) == [True, True]
    await until(lambda: len(one.got) == len(two.got) == 2)
    assert one.got[1].chunks[0].rid == two.got[1].rid == "heartbeat"
    assert (one.got[1].chunks[0].text, two.got[1].error.message) == ("x", "no")
    for reader in (one, two):
        reader.task.cancel()


async def test_a_new_session_of_a_frontend_ends_those_before_it() -> None:
    """A stream that breaks on the frontend's side alone leaves its session behind on the replica."""
    engine, (old, other) = await opened(Calls(), "f", "g")
    old.send(Generate(rid="r"))
    other.send(Generate(rid="s"))
    await until(lambda: engine.rids() == ["r", "s"])
    new = Reader(old.host, session_id("f", 1))
    await until(lambda: new.got)
    assert engine.rids(Abort) == ["r"]
    before = engine.of("r")
    await old.task
    ended = new.send(Generate(rid="r"))
    await until(lambda: engine.rids() == ["r", "s", "r"])
    engine.receive(StepText(chunks=(TextChunk(rid=before, text="late", finish=Finish(reason="abort")),)))
    engine.say("r", "again", last=True)
    assert await ended
    await until(lambda: len(new.got) == 2)
    assert new.got[1].chunks[0].text == "again"
    assert not other.task.done()
    for reader in (new, other):
        reader.task.cancel()


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
async def test_of_sessions_that_wait_for_the_engine_only_the_newest_lives(numbers: tuple[int, int]) -> None:
    """Both sessions are opened while the engine core is down, in either order."""
    calls = Calls()
    engine = await calls.add("a")
    engine.died(WorkerDied("dead"))
    readers = {number: Reader(calls.hosts["a"], session_id("f", number)) for number in numbers}
    await asyncio.sleep(0)
    engine.restarted()
    await readers[0].task
    await until(lambda: readers[1].got)
    assert readers[0].got[-1] == Goodbye(reason="The frontend has a newer session.")
    engine.receive(TreeChange(epoch=1, number=1, added=(5,)))
    await until(lambda: len(readers[1].got) == 2)
    assert not await calls.hosts["a"].send(readers[0].name, 1, encode(GetTree()))
    readers[1].task.cancel()


async def test_an_engine_that_is_gone_fails_the_health_check() -> None:
    calls = Calls()
    engine = await calls.add("a")
    calls.hosts["a"].check()
    engine.heartbeat_age_s = SILENT_S + 1
    with pytest.raises(EngineError, match="silent"):
        calls.hosts["a"].check()
    engine.gave_up(EngineError("no more"))
    with pytest.raises(EngineError, match="no more"):
        calls.hosts["a"].check()


async def test_what_is_no_message_is_refused() -> None:
    _, (one,) = await opened(Calls(), "one")
    wrong = msgspec.msgpack.encode({"type": "Generate", "rid": "wrong", "scope": 7})
    assert await one.host.send(one.name, 1, wrong)
    await until(lambda: len(one.got) == 2)
    assert isinstance(one.got[1], Failed)
    assert (one.got[1].rid, "scope" in one.got[1].error.message) == ("wrong", True)
    one.task.cancel()


# --- a frontend's engine core --------------------------------------------------------------------------


class Events:
    """Messages, deaths and returns that a `RemoteEngine` has reported to its fleet."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.deaths = self.returns = 0

    def _died(self, error: WorkerDied) -> None:
        self.deaths += 1

    def _restarted(self) -> None:
        self.returns += 1

    def receive(self, message: Any) -> None:
        self.got.append(message)

    @property
    def events(self) -> EngineEvents:
        return EngineEvents(self.receive, self._died, self._restarted, lambda error: None)


async def test_an_engine_that_restarts_begins_a_new_session() -> None:
    calls, events = Calls(), Events()
    engine = await calls.add("a")
    remote = RemoteEngine("a", calls, RemoteSnapshots(), events.events, retry_s=0)
    await remote.start()
    assert remote.info == INFO
    await until(lambda: engine.sent == [GetTree()])
    remote.send(Generate(rid="1"))
    await until(lambda: engine.rids() == ["1"])
    engine.died(WorkerDied("dead"))
    await until(lambda: events.deaths == 1)
    assert remote.restarting
    engine.say("1", "late")
    remote.send(Generate(rid="2"))
    engine.restarted()
    await until(lambda: events.returns == 1)
    engine.say("1", "later")
    remote.send(Generate(rid="3"))
    await until(lambda: engine.rids() == ["1", "3"])
    assert events.got == [], "nothing of a request that goes on elsewhere"
    await remote.aclose()
    await until(lambda: engine.rids(Abort) == ["3"])


async def test_a_handler_that_raises_does_not_end_the_session() -> None:
    class Raising(Events):
        def receive(self, message: Any) -> None:
            super().receive(message)
            if len(self.got) == 1:
                raise ValueError("a bug")

    calls, events = Calls(), Raising()
    engine = await calls.add("a")
    remote = RemoteEngine("a", calls, RemoteSnapshots(), events.events)
    await remote.start()
    changes = [TreeChange(epoch=1, number=number, added=(number,)) for number in (1, 2)]
    for change in changes:
        engine.receive(change)
    await until(lambda: events.got == changes)
    assert not events.deaths
    await remote.aclose()


async def test_a_lost_call_ends_the_session() -> None:
    calls, events = Calls(), Events()
    engine = await calls.add("a")
    remote = RemoteEngine("a", calls, RemoteSnapshots(), events.events, retry_s=0)
    await remote.start()
    remote.send(Generate(rid="1"))
    await until(lambda: engine.rids() == ["1"])
    calls.lose = 1
    remote.send(Abort(rid="1"))
    await until(lambda: events.deaths == 1 and events.returns == 1)
    assert engine.rids(Abort) == ["1"], "by the replica"
    await remote.aclose()


async def test_messages_about_a_request_are_no_part_of_it() -> None:
    """Ray Serve cancels the calls of a request whose client is gone, which it finds by a context variable."""
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    seen: list[str] = []

    class Watched(Calls):
        async def send(self, *arguments: Any) -> None:
            seen.append(request.get())
            await super().send(*arguments)

    calls = Watched()
    await calls.add("a")
    remote = RemoteEngine("a", calls, RemoteSnapshots(), Events().events)
    await remote.start()
    request.set("some client's")
    remote.send(Abort(rid="1"))
    await until(lambda: len(seen) == 2)
    assert seen == ["none", "none"]
    await remote.aclose()


# --- the fleet ----------------------------------------------------------------------------------


class Fleet:
    """A started `ListedFleet` over two replicas."""

    def __init__(self, drain_s: float = 60.0) -> None:
        self.calls = Calls()
        self.listed = listed.ListedReplicas()
        self.lost: list[list[str]] = []
        self.got: list[Any] = []
        events = FleetEvents(
            receive=self.got.append,
            lost=lambda error, rids: bool(self.lost.append(list(rids))),
            restarted=lambda: None,
            gave_up=lambda error: None,
            tree_changed=lambda name, change: None,
        )
        self.fleet = ListedFleet(events, transport=self.calls, listed=self.listed, drain_s=drain_s)

    async def start(self) -> dict[str, FakeEngine]:
        engines = {name: await self.calls.add(name) for name in "ab"}
        self.listed.update(["a", "b"])
        await self.fleet.start()
        await until(lambda: self.up == ["a", "b"])
        return engines

    @property
    def up(self) -> list[str]:
        return sorted(name for name, replica in self.fleet.replicas.items() if replica.up)

    def place(self, rid: str, first: int) -> None:
        self.fleet.send(Generate(rid=rid, prompt=(tuple(range(first, first + 64)),)))


async def test_a_killed_replica_loses_its_requests_to_others() -> None:
    fleet = Fleet()
    engines = await fleet.start()
    for index in range(4):
        fleet.place(f"r{index}", 100 * index)
    await until(lambda: sum(len(engine.rids()) for engine in engines.values()) == 4)
    of_a = engines["a"].rids()
    assert len(of_a) == 2, "placement by least work"
    fleet.calls.killed["a"].set()
    await until(lambda: fleet.lost == [of_a])
    fleet.listed.update(["b"])
    await until(lambda: list(fleet.fleet.replicas) == ["b"])
    new = await fleet.calls.add("c")
    fleet.listed.update(["b", "c"])
    await until(lambda: fleet.up == ["b", "c"])
    fleet.place("next", 900)
    await until(lambda: new.rids() == ["next"])
    await fleet.fleet.aclose()


async def test_a_replica_that_is_not_listed_any_more_drains() -> None:
    fleet = Fleet()
    engines = await fleet.start()
    fleet.place("r", 0)
    await until(lambda: engines["a"].rids() == ["r"])
    replica = types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id="a"))
    fleet.listed.update(["b"])
    await until(lambda: fleet.fleet.replicas["a"].draining)
    assert fleet.listed.kept([replica], ["b"]) == [replica], "calls about its requests still get there"
    fleet.place("s", 0)
    await until(lambda: engines["b"].rids() == ["s"])
    engines["a"].say("r", "text", last=True)
    await until(lambda: list(fleet.fleet.replicas) == ["b"])
    assert fleet.got[-1].chunks[0].text == "text"
    assert fleet.lost in ([], [[]]), "it has ended there"
    await until(lambda: fleet.listed.kept([replica], ["b"]) == [])
    await fleet.fleet.aclose()


async def test_what_does_not_end_in_time_goes_on_elsewhere() -> None:
    fleet = Fleet(drain_s=0.0)
    engines = await fleet.start()
    fleet.place("r", 0)
    await until(lambda: engines["a"].rids() == ["r"])
    fleet.listed.update(["b"])
    await until(lambda: ["r"] in fleet.lost)
    await until(lambda: engines["a"].rids(Abort) == ["r"])
    await fleet.fleet.aclose()


async def test_replicas_are_added_and_stopped_by_ray_alone() -> None:
    fleet = Fleet()
    await fleet.start()
    with pytest.raises(UnsupportedField, match="ramify deploy --replicas"):
        assert fleet.fleet.operator
    assert fleet.up == ["a", "b"]
    await fleet.fleet.aclose()


async def test_without_replicas_requests_wait() -> None:
    fleet = Fleet()
    engines = await fleet.start()
    assert fleet.fleet.max_prompt_tokens == 98
    fleet.listed.update([])
    await until(lambda: not fleet.fleet.replicas)
    assert fleet.fleet.max_prompt_tokens == 98
    assert fleet.fleet.restarting
    fleet.place("r", 0)
    fleet.listed.update(["a"])
    await until(lambda: engines["a"].rids() == ["r"])
    await fleet.fleet.aclose()


def test_a_call_goes_to_the_replica_that_it_names() -> None:
    candidates = [
        types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id=name)) for name in ("a", "b")
    ]
    assert listed.choose("b", candidates) is candidates[1]
    assert listed.choose("c", candidates) is None
