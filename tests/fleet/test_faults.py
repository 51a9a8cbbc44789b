"""An exception somewhere ends what it is about, by name, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ramify.engine_messages import (
    Abort,
    ExportPrefix,
    Failed,
    GetTree,
    StepText,
    Texts,
    ToFrontend,
    TokenIds,
    Tokenize,
    TreeChange,
)
from ramify.errors import EngineClosed, EngineError, InvalidRequest, WorkerDied
from ramify.messages import Finish, Generate, TextChunk
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet import local, placement, supervisor
from ramify.runtime.fleet.kv_connector import KVConnector
from ramify.runtime.fleet.moves import MOST_LIMIT_S
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.fleet.supervisor import EngineSupervisor
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.processes.ipc import Inbox, Outbox
from tests.fleet.test_fleet import FakeEngine, Fleet, asked
from tests.fleet.test_moves import PAGE_BYTES, Moving, moving  # noqa: F401


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(local, "EngineSupervisor", FakeEngine)
    return Fleet()


def ends_by_name(fleet: Fleet, rid: str) -> None:
    (failed,) = [one for one in fleet.got if isinstance(one, Failed)]
    assert failed.rid == rid
    assert "a bug" in failed.error.message
    left = fleet.fleet
    assert rid not in left._router.requests
    assert rid not in left._placement._reservations


@pytest.fixture
def bug_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement.place

    def raises(self: Placement, work: Any, *more: Any, **options: Any) -> str:
        if work.rid == "bad":
            raise ValueError("a bug")
        return place(self, work, *more, **options)

    monkeypatch.setattr(Placement, "place", raises)


def test_a_request_that_cannot_be_placed_fails(fleet: Fleet, bug_in_place: None) -> None:
    fleet.send(Generate(rid="bad", prompt=("text",)))
    (question,) = [one for engine in fleet.engines for one in engine.take(Tokenize)]
    fleet.engines[0].receive(Texts(rid=question.rid, prompts=(TokenIds(ids=(1, 2), tokens=()),)))
    ends_by_name(fleet, "bad")


def test_those_behind_it_are_placed(fleet: Fleet, bug_in_place: None) -> None:
    fleet.kill(0)
    fleet.kill(1)
    for rid in ("bad", "a", "b"):
        fleet.send(asked(rid))
    fleet.engines[0].came_back()
    ends_by_name(fleet, "bad")
    assert [one.rid for one in fleet.engines[0].take(Generate)] == ["a", "b"]


def test_a_bug_of_the_mover_fails_its_request(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def raises(self: KVConnector, *arguments: Any) -> bool:
        raise ValueError("a bug")

    monkeypatch.setattr(KVConnector, "_has_room", raises)
    moving.send(asked("bad", 7))
    ends_by_name(moving, "bad")
    moving.send(Generate(rid="a", prompt=((5, 6, 7),)))
    assert moving.sent() == ["a"]


def test_without_an_answer_of_the_source_the_request_computes(moving: Moving) -> None:  # noqa: F811
    def raises(message: Any) -> None:
        raise EngineError("The engine core is not running.")

    moving.engines[0].send = raises
    moving.send(asked("a", 7))
    assert moving.sent() == ["a"]
    assert not moving.timers.due


def test_what_arrives_is_passed_on_though_it_cannot_be_counted(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(self: Placement, rid: str, *more: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Placement, "progress", raises)
    fleet.send(asked("a"))
    message = StepText(chunks=(TextChunk(rid="a", text="x", ids=(1,)),))
    fleet.engines[fleet.home("a")].receive(message)
    assert fleet.got == [message]


def test_a_handler_that_raises_loses_its_own_message_alone(tmp_path: Path) -> None:
    got: list[str] = []

    def handle(message: ToFrontend) -> None:
        assert isinstance(message, StepText)
        text = message.chunks[0].text
        got.append(text)
        if text == "1":
            raise ValueError("a bug")

    async def run() -> None:
        inbox: Inbox[ToFrontend] = Inbox(tmp_path / "socket", ToFrontend)
        outbox = Outbox(tmp_path / "socket")
        for number in range(4):
            outbox.send(StepText(chunks=(TextChunk(rid="r", text=str(number)),)))
        assert inbox._socket.poll(5000)
        await asyncio.sleep(0.05)  # all of them are there
        inbox.attach(asyncio.get_running_loop(), handle)
        async with asyncio.timeout(5):
            while len(got) < 4:
                await asyncio.sleep(0.01)
        inbox.close()
        outbox.close()

    asyncio.run(run())
    assert got == ["0", "1", "2", "3"]


def test_what_cannot_be_decoded_loses_no_other_message(tmp_path: Path) -> None:
    inbox: Inbox[ToFrontend] = Inbox(tmp_path / "socket", ToFrontend)
    outbox = Outbox(tmp_path / "socket")
    one, other = StepText(chunks=()), StepText(chunks=(TextChunk(rid="r"),))
    for message in (one, GetTree(), other):
        outbox.send(message)
    got: list[ToFrontend] = []
    while len(got) < 2 and inbox._socket.poll(5000):
        got += inbox.drain()
    assert got == [one, other]
    inbox.close()
    outbox.close()


# --- questions and deaths -----------------------------------------------------------------------


class Stub:
    """An engine core that encodes what it is sent."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.sent: list[Any] = []
        self.refuses: type | tuple[type, ...] = ()

    def send(self, message: Any) -> None:
        if isinstance(message, self.refuses):
            raise ValueError("a bug")
        msgspec.msgpack.encode(message)
        self.sent.append(message)

    def disconnect(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Stubs:
    """A `Frontend` with engine cores that are stubs: `engines` are all that were started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.engines: list[Stub] = []
        stubs = self

        async def start(self: EngineSupervisor) -> None:
            self._engine = Stub()  # type: ignore[assignment]
            self.info = model_info("")
            self._running = True
            stubs.engines.append(self._engine)  # type: ignore[arg-type]

        monkeypatch.setattr(EngineSupervisor, "_start_engine", start)
        monkeypatch.setattr(EngineSupervisor, "start", start)
        monkeypatch.setattr(Frontend, "max_prompt_tokens", 1000)
        monkeypatch.setattr(Frontend, "_model_names", lambda self: ("model",))
        self.frontend = Frontend(EngineConfig(device="cpu", max_running=8, **options))

    def supervisors(self) -> list[Any]:
        engine: Any = self.frontend._engine
        return [engine] if isinstance(engine, EngineSupervisor) else list(engine._engines.values())

    async def kill(self, index: int = 0) -> None:
        """Kill an engine core, and wait until the next one is there."""
        engine = self.supervisors()[index]
        engine._worker_died("scheduler")
        async with asyncio.timeout(5):
            while engine.restarting:
                await asyncio.sleep(0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_question_that_cannot_be_sent_fails_and_is_forgotten(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        stubs = Stubs(monkeypatch, replicas=replicas)
        await stubs.frontend.start()
        with pytest.raises(InvalidRequest, match="64 bits"):
            await stubs.frontend.detokenize([(10**30,)], skip_special_tokens=False)
        with pytest.raises(InvalidRequest, match="Unicode"):
            await stubs.frontend.load_lora("x", "/\ud800")
        await asyncio.sleep(0)
        assert not stubs.frontend._replies.waiting
        for index in range(replicas):
            await stubs.kill(index)
        assert len(stubs.engines) == 2 * replicas

    asyncio.run(run())


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("callback", ["_died", "_restarted"])
def test_an_engine_comes_back_though_a_callback_raises(
    replicas: int, callback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*arguments: Any) -> bool:
        raise ValueError("a bug")

    async def run() -> None:
        stubs = Stubs(monkeypatch, replicas=replicas)
        await stubs.frontend.start()
        engine = stubs.supervisors()[0]
        setattr(engine, callback, raises)
        await stubs.kill()
        assert engine._engine is stubs.engines[-1]
        assert len(stubs.engines) == replicas + 1

    asyncio.run(run())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_request_that_cannot_be_sent_again_fails_alone(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(frontend: Frontend, rid: str) -> None:
        async for _ in frontend.generate(Generate(rid=rid, prompt=((1, 2, 3),))):
            pass

    async def run() -> None:
        stubs = Stubs(monkeypatch, replicas=replicas)
        frontend = stubs.frontend
        await frontend.start()
        tasks = {rid: asyncio.ensure_future(ask(frontend, rid)) for rid in ("bad", "good")}
        while len(frontend._requests.outputs) < 2:
            await asyncio.sleep(0)

        def raises() -> Generate:
            raise ValueError("a bug")

        frontend._requests.outputs["bad"].rest = raises  # type: ignore[method-assign]
        before = list(stubs.engines)
        for engine in before:
            engine.sent.clear()
        for index in range(replicas):
            await stubs.kill(index)
        with pytest.raises(EngineError, match="a bug"):
            await tasks["bad"]
        again = {one.rid for engine in stubs.engines for one in engine.sent if isinstance(one, Generate)}
        assert again == {frontend._requests.outputs["good"].request.rid}
        tasks["good"].cancel()

    asyncio.run(run())


def test_a_request_that_cannot_be_sent_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stubs = Stubs(monkeypatch)
        await stubs.frontend.start()
        stubs.engines[0].refuses = Generate
        chunks = stubs.frontend.generate(Generate(rid="r", prompt=((1,),)))
        with pytest.raises(EngineError, match="a bug"):
            await anext(chunks)
        assert not stubs.frontend._requests.outputs

    asyncio.run(run())


def asking(frontend: Frontend, rid: str) -> asyncio.Task[list[TextChunk]]:
    async def ask() -> list[TextChunk]:
        return [chunk async for chunk in frontend.generate(Generate(rid=rid, prompt=(tuple(range(900)),)))]

    return asyncio.ensure_future(ask())


def test_a_text_that_differs_ends_the_request_at_the_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stubs = Stubs(monkeypatch)
        await stubs.frontend.start()
        task = asking(stubs.frontend, "r")
        await asyncio.sleep(0)
        rid = stubs.engines[0].sent[0].rid
        stubs.supervisors()[0]._handle(StepText(chunks=(TextChunk(rid=rid, text="abc", ids=(1,)),)))
        await stubs.kill()
        for text in ("abX", "Y"):
            stubs.supervisors()[0]._handle(StepText(chunks=(TextChunk(rid=rid, text=text, ids=(1,)),)))
        with pytest.raises(WorkerDied, match="its text differs"):
            await task
        assert [type(one) for one in stubs.engines[-1].sent] == [Generate, Abort]

    asyncio.run(run())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_suspect_that_waits_can_be_aborted(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stubs = Stubs(monkeypatch, replicas=replicas)
        frontend = stubs.frontend
        await frontend.start()
        tasks = {rid: asking(frontend, rid) for rid in ("a", "b")}
        await asyncio.sleep(0)
        for _ in range(2):
            fleet: Any = frontend._engine
            rid = frontend._requests.outputs["a"].request.rid
            home = int(fleet._router.requests[rid].replica) if replicas > 1 else 0
            await stubs.kill(home)
        (waiting,) = frontend._requests.quarantine._waiting
        before = sum(len(engine.sent) for engine in stubs.engines)
        (rid,) = [key for key, one in frontend._requests.outputs.items() if one is waiting]
        assert frontend.abort(rid) == 1
        (chunk,) = await asyncio.wait_for(tasks.pop(rid), 5)
        assert chunk.finish == Finish(reason="abort")
        assert sum(len(engine.sent) for engine in stubs.engines) == before
        (other,) = tasks.values()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert not frontend._requests.quarantine.busy

    asyncio.run(run())


def test_where_one_replica_does_not_start_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    async def run() -> None:
        stubs = Stubs(monkeypatch, replicas=3)
        begun = 0

        async def start(self: EngineSupervisor) -> None:
            nonlocal begun
            begun += 1
            number = begun
            if number == 2:
                await asyncio.sleep(0)
                raise EngineError("out of memory")
            try:
                await asyncio.sleep(0 if number == 1 else 0.2)
            except asyncio.CancelledError:
                ended.append(number)
                raise
            self._engine = Stub()  # type: ignore[assignment]
            self.info = model_info("")

        monkeypatch.setattr(EngineSupervisor, "start", start)
        with pytest.raises(EngineError, match="out of memory"):
            await stubs.frontend.start()
        assert ended == [3]

    asyncio.run(run())


def test_a_snapshot_that_is_written_after_its_move_has_ended_is_removed(moving: Moving) -> None:  # noqa: F811
    moving.send(asked("a", 7))
    (message,) = moving.engines[0].take(ExportPrefix)
    moving.kill(1)
    Path(message.path).write_bytes(b"KV snapshot")
    moving.exported(message)
    assert not moving.files()
    moving.exported(message)
    assert not moving.fleet.connector._late  # type: ignore[union-attr]


def test_homes_of_programs_are_forgotten_from_the_oldest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MOST_HOMES", 3)
    found = Placement(16)
    found.join("a")
    for program in "abcadb":
        found.place(placement.Work(rid=program, digests=(), tokens=1, output=1.0, program=program), 0.0)
        found.ended(program)
    assert list(found._homes) == ["a", "d", "b"]


def test_one_engine_holds_its_events_back_behind_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stubs = Stubs(monkeypatch)
        told: list[Any] = []
        stubs.frontend._tree_changed = lambda name, change: told.append(change)  # type: ignore[method-assign]
        await stubs.frontend.start()
        changes = [TreeChange(epoch=1, number=number, whole=number == 5) for number in (1, 3, 4, 5, 6)]
        for change in changes:
            stubs.supervisors()[0]._handle(change)
        assert told == [changes[0], *changes[3:]]
        assert [type(one) for one in stubs.engines[0].sent] == [GetTree]
        await stubs.kill()
        stubs.supervisors()[0]._handle(changes[0])
        assert told[3:] == [None, changes[0]]

    asyncio.run(run())


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_is_stopped_beside_the_event_loop(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stubs = Stubs(monkeypatch, replicas=replicas)
        await stubs.frontend.start()
        threads: list[int] = []
        for engine in stubs.engines:
            engine.stop = lambda: threads.append(threading.get_ident())  # type: ignore[method-assign]
        await stubs.frontend.aclose()
        assert len(threads) == replicas
        assert threading.get_ident() not in threads

    asyncio.run(run())


def test_an_export_of_a_closed_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stubs = Stubs(monkeypatch)
        await stubs.frontend.start()
        await stubs.frontend.aclose()
        with pytest.raises(EngineClosed):
            await stubs.frontend.export_prefix([1, 2, 3])

    asyncio.run(run())


def test_a_replica_that_comes_back_with_another_model_is_given_up(fleet: Fleet) -> None:
    async def run() -> None:
        for engine in fleet.engines:
            engine.info = model_info("before")
        fleet.fleet._replica_set.info = fleet.engines[0].info
        for index, fingerprint in ((0, "after"), (1, "before")):
            fleet.kill(index)
            fleet.engines[index].info = model_info(fingerprint)
            fleet.engines[index].came_back()
        await asyncio.sleep(0)
        assert fleet.engines[0].closed
        assert [one.state for one in fleet.fleet.replicas.values()] == ["gone", "up"]
        assert not fleet.gave_up
        fleet.kill(1)
        fleet.engines[1].info = model_info("after")
        fleet.engines[1].came_back()
        assert "another model" in fleet.gave_up[0].message

    asyncio.run(run())


def model_info(fingerprint: str) -> Any:
    return SimpleNamespace(name="model", fingerprint=fingerprint, page_size=16)


def test_prompts_for_others_count_and_keep_suspects_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "EngineSupervisor", FakeEngine)
    monkeypatch.setattr(FakeEngine, "page_bytes", PAGE_BYTES)
    found = Moving(tmp_path, prefill_replicas=1, held=())
    found.send(asked("a", 7))
    (prompt,) = found.engines[0].take(Generate)
    engines = found.fleet
    (move,) = engines.connector._moves.values()  # type: ignore[union-attr]
    assert move.move.limit_s == MOST_LIMIT_S, "its pace is a guess"
    assert engines.requests_of("0") == 1
    engines.send_alone(Generate(rid="suspect", prompt=((1, 2, 3),)))
    assert engines._router.isolation_replica == "1"
    drain = DrainOfPrompts(found, prompt)
    asyncio.run(drain.run())
    assert drain.waited == [True, True]


@pytest.mark.parametrize("dies", [True, False])
def test_a_suspect_finds_another_ward_when_its_own_goes(fleet: Fleet, dies: bool) -> None:
    for rid, prompt in (("a", (1, 2)), ("b", (3, 4))):
        fleet.send(Generate(rid=rid, prompt=(prompt,)))
    fleet.fleet.send_alone(Generate(rid="suspect", prompt=((5, 6),)))
    isolation_replica = int(fleet.fleet._router.isolation_replica or "")
    other = 1 - isolation_replica
    rid = next(rid for rid in "ab" if fleet.home(rid) == other)
    ended = TextChunk(rid=rid, finish=Finish(reason="length"))
    fleet.engines[other].receive(StepText(chunks=(ended,)))
    assert not fleet.fleet._router.placed("suspect"), "its ward has another request"
    if dies:
        fleet.kill(isolation_replica)
    else:
        asyncio.run(fleet.fleet._replica_set.remove(str(isolation_replica)))
    assert fleet.home("suspect") == other


class DrainOfPrompts:
    """A replica for prompts that drains waits for the prompt and for its export."""

    def __init__(self, found: Moving, prompt: Generate) -> None:
        self.fleet = found
        self.prompt = prompt
        self.waited: list[bool] = []

    async def run(self) -> None:
        found = self.fleet
        found.fleet._replica_set.before_leaving = None
        task = asyncio.ensure_future(found.fleet.drain("0", 5.0))
        await asyncio.sleep(0)
        self.waited.append(not task.done())
        chunk = TextChunk(rid=self.prompt.rid, finish=Finish(reason="length"))
        found.engines[0].receive(StepText(chunks=(chunk,)))
        await asyncio.sleep(0.01)
        self.waited.append(not task.done())
        found.exported(found.exporting())
        await asyncio.wait_for(task, 1.0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_hangs_with_a_request_is_replaced(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "HEARTBEAT_S", 0.002)
    monkeypatch.setattr(supervisor, "SILENT_S", 0.01)

    async def run() -> None:
        stubs = Stubs(monkeypatch, replicas=replicas)
        await stubs.frontend.start()
        beats = [asyncio.ensure_future(engine._beat()) for engine in stubs.supervisors()]
        await asyncio.sleep(0.1)
        assert len(stubs.engines) == replicas, "nothing waits for them"
        task = asking(stubs.frontend, "r")
        async with asyncio.timeout(5):
            while len(stubs.engines) == replicas:
                await asyncio.sleep(0.001)
        for one in (task, *beats):
            one.cancel()

    asyncio.run(run())


def test_prompts_are_tokenised_by_replicas_that_are_heard_from(fleet: Fleet) -> None:
    fleet.engines[0].heartbeat_age_s = 1000.0
    for rid in "abcd":
        fleet.send(Generate(rid=rid, prompt=("text",)))
    assert [len(engine.take(Tokenize)) for engine in fleet.engines] == [0, 4]
