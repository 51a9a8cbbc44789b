"""An exception (a bug) fails only the request or call that it concerns, and the error names it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

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
)
from ramify.errors import EngineError, InvalidRequest, WorkerDied
from ramify.messages import Finish, Generate, TextChunk
from ramify.runtime.fleet.moves import MOST_LIMIT_S
from ramify.runtime.fleet.placement import MOST_HOMES, Placement, Work
from ramify.runtime.processes.ipc import Inbox, Outbox
from tests.fleet.fakes import FakeEngine, Fleet, Served, asked, model_info
from tests.fleet.test_moves import Moving, moving  # noqa: F401


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def fails_by_name(fleet: Fleet, rid: str) -> None:
    (failed,) = [one for one in fleet.got if isinstance(one, Failed)]
    assert failed.rid == rid
    assert "a bug" in failed.error.message


class Buggy(Placement):
    """A placement that fails for one request, and when it counts output."""

    def place(self, work: Work, now: float, only: str | None = None, **options: Any) -> str:
        if work.rid == "bad":
            raise ValueError("a bug")
        return super().place(work, now, only, **options)

    def progress(self, rid: str, tokens: int, now: float) -> None:
        raise ValueError("a bug")


@pytest.fixture
def buggy() -> Fleet:
    return Fleet(fleet_options={"placement": Buggy()})


def test_a_request_that_cannot_be_placed_fails(buggy: Fleet) -> None:
    fleet = buggy
    fleet.send(Generate(rid="bad", prompt=("text",)))
    (question,) = [one for engine in fleet.engines for one in engine.take(Tokenize)]
    fleet.engines[0].receive(Texts(rid=question.rid, prompts=(TokenIds(ids=(1, 2), tokens=()),)))
    fails_by_name(fleet, "bad")


def test_those_behind_it_are_placed(buggy: Fleet) -> None:
    fleet = buggy
    fleet.kill(0)
    fleet.kill(1)
    for rid in ("bad", "a", "b"):
        fleet.send(asked(rid))
    fleet.engines[0].came_back()
    fails_by_name(fleet, "bad")
    assert [one.rid for one in fleet.engines[0].take(Generate)] == ["a", "b"]


def test_a_bug_of_the_connector_fails_its_request(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def raises(size: int) -> bool:
        raise ValueError("a bug")

    monkeypatch.setattr(moving.store, "has_room", raises)
    moving.send(asked("bad", 7))
    fails_by_name(moving, "bad")
    moving.send(Generate(rid="a", prompt=((5, 6, 7),)))
    assert moving.sent() == ["a"]


def test_without_an_answer_of_the_source_the_request_computes(moving: Moving) -> None:  # noqa: F811
    moving.engines[0].refuses = lambda message: isinstance(message, ExportPrefix)
    moving.send(asked("a", 7))
    assert moving.sent() == ["a"]
    assert not moving.timers.waiting


def test_what_arrives_is_passed_on_though_it_cannot_be_counted(buggy: Fleet) -> None:
    fleet = buggy
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


# --- control calls and deaths -------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_call_that_cannot_be_sent_fails_and_is_forgotten(replicas: int) -> None:
    async def run() -> None:
        served = Served(replicas=replicas)
        frontend = served.frontend
        await frontend.start()
        with pytest.raises(InvalidRequest, match="64 bits"):
            await frontend.control.detokenize([(10**30,)], skip_special_tokens=False)
        with pytest.raises(InvalidRequest, match="Unicode"):
            await frontend.loras.load("x", "/\ud800")
        for index in range(replicas):
            served.kill(index)
            assert not [one for one in served.engines[index].sent if not isinstance(one, GetTree)]

    asyncio.run(run())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_request_that_cannot_be_sent_again_fails_alone(replicas: int) -> None:
    async def run() -> None:
        served = Served(replicas=replicas)
        await served.frontend.start()
        tasks = {rid: served.ask(rid) for rid in ("good", "bad")}
        while len(served.requests()) < 2:
            await asyncio.sleep(0)
        rids = [one.rid for one in served.requests()]
        for engine in served.engines:
            engine.refuses = lambda message: message.rid.startswith("bad~")
        for index in range(replicas):
            served.kill(index)
        with pytest.raises(EngineError, match="a bug"):
            await tasks["bad"]
        assert {one.rid for one in served.requests()} == {rid for rid in rids if rid.startswith("good")}
        tasks["good"].cancel()

    asyncio.run(run())


def test_a_request_that_cannot_be_sent_leaves_nothing() -> None:
    async def run() -> None:
        served = Served()
        await served.frontend.start()
        served.engines[0].refuses = lambda message: isinstance(message, Generate)
        with pytest.raises(EngineError, match="a bug"):
            await served.ask("r")
        assert not served.frontend.in_flight
        assert not served.frontend.replicas.statuses()[0].requests

    asyncio.run(run())


def test_a_text_that_differs_ends_the_request_at_the_engine_too() -> None:
    async def run() -> None:
        served = Served()
        await served.frontend.start()
        (engine,) = served.engines
        task = served.ask("r")
        await asyncio.sleep(0)
        (request,) = served.requests()
        engine.receive(StepText(chunks=(TextChunk(rid=request.rid, text="abc", ids=(1,)),)))
        served.kill()
        for text in ("abX", "Y"):
            engine.receive(StepText(chunks=(TextChunk(rid=request.rid, text=text, ids=(1,)),)))
        with pytest.raises(WorkerDied, match="its text differs"):
            await task
        assert [type(one) for one in engine.sent] == [Generate, Abort]

    asyncio.run(run())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_suspect_that_waits_can_be_aborted(replicas: int) -> None:
    async def run() -> None:
        served = Served(replicas=replicas)
        await served.frontend.start()
        tasks = {rid: served.ask(rid) for rid in ("a", "b")}
        await asyncio.sleep(0)
        for _ in range(2):
            rids = [[one.rid for one in engine.take(Generate)] for engine in served.engines]
            served.kill(next(index for index, some in enumerate(rids) if some))
        (running,) = {one.rid.partition("~")[0] for one in served.requests()}
        (waiting,) = set(tasks) - {running}
        before = sum(len(engine.sent) for engine in served.engines)
        assert served.frontend.abort(waiting) == 1
        (chunk,) = await asyncio.wait_for(tasks[waiting], 5)
        assert chunk.finish == Finish(reason="abort")
        assert sum(len(engine.sent) for engine in served.engines) == before
        tasks[running].cancel()
        await asyncio.gather(tasks[running], return_exceptions=True)
        follower = served.ask("c")
        await asyncio.sleep(0)
        assert any(one.rid.startswith("c~") for one in served.requests()), "nothing runs alone any more"
        follower.cancel()

    asyncio.run(run())


def test_where_one_replica_does_not_start_none_stays() -> None:
    ended: list[int] = []

    class Starting(FakeEngine):
        async def start(self) -> None:
            number = int(self.name)
            if number == 1:
                await asyncio.sleep(0)
                raise EngineError("out of memory")
            try:
                await asyncio.sleep(0 if number == 0 else 3600)
            except asyncio.CancelledError:
                ended.append(number)
                raise

    async def run() -> None:
        served = Served(Starting, replicas=3)
        with pytest.raises(EngineError, match="out of memory"):
            await served.frontend.start()
        assert ended == [2]
        assert all(engine.closed for engine in served.engines)

    asyncio.run(run())


def test_a_snapshot_that_is_written_after_its_move_has_ended_is_removed(moving: Moving) -> None:  # noqa: F811
    moving.send(asked("a", 7))
    (message,) = moving.engines[0].take(ExportPrefix)
    moving.kill(1)
    Path(message.path).write_bytes(b"KV snapshot")
    moving.exported(message)
    assert not moving.files()
    moving.exported(message)


def test_homes_of_programs_are_forgotten_from_the_oldest_on() -> None:
    found = Placement(16)
    found.join("a")
    for program in ("first", "second", "first", *map(str, range(MOST_HOMES - 1))):
        found.place(Work(rid=program, digests=(), tokens=1, output=1.0, program=program), 0.0)
        found.ended(program)
    assert len(found._homes) == MOST_HOMES
    assert next(iter(found._homes)) == "first"


def test_a_replica_that_comes_back_with_another_model_is_given_up(fleet: Fleet) -> None:
    async def run() -> None:
        for index, fingerprint in ((0, "after"), (1, "")):
            fleet.kill(index)
            fleet.engines[index].info = model_info(fingerprint=fingerprint)
            fleet.engines[index].came_back()
        await asyncio.sleep(0)
        assert fleet.engines[0].closed
        assert [one.state for one in fleet.fleet.replicas.values()] == ["gone", "up"]
        assert not fleet.gave_up
        fleet.kill(1)
        fleet.engines[1].info = model_info(fingerprint="after")
        fleet.engines[1].came_back()
        assert "another model" in fleet.gave_up[0].message

    asyncio.run(run())


def test_prompts_for_others_count_and_keep_suspects_away(tmp_path: Path) -> None:
    found = Moving(tmp_path, prefill_replicas=1)
    found.send(asked("a", 7))
    (prompt,) = found.engines[0].take(Generate)
    assert found.timers.seconds == [MOST_LIMIT_S], "its pace is not known"
    assert {status.name: status.requests for status in found.fleet.statuses()}["0"] == 1
    found.fleet.send_alone(Generate(rid="suspect", prompt=((1, 2, 3),)))
    assert not found.homes("suspect"), "it waits for replica 1, which has another request"

    async def drain() -> None:
        task = asyncio.ensure_future(found.fleet.drain("0", 5.0))
        await asyncio.sleep(0)
        assert not task.done(), "the prompt is not computed"
        found.engines[0].end(prompt.rid)
        await asyncio.sleep(0)
        assert not task.done(), "its pages are not written"
        found.exported(found.exporting())
        await asyncio.wait_for(task, 1.0)

    asyncio.run(drain())


@pytest.mark.parametrize("dies", [True, False])
def test_a_suspect_finds_another_isolation_replica_when_its_own_goes(fleet: Fleet, dies: bool) -> None:
    for rid, prompt in (("a", (1, 2)), ("b", (3, 4))):
        fleet.send(Generate(rid=rid, prompt=(prompt,)))
    fleet.fleet.send_alone(Generate(rid="suspect", prompt=((5, 6),)))
    assert not fleet.homes("suspect"), "its isolation replica has another request"
    fleet.send(Generate(rid="new", prompt=((7, 8),)))
    other = fleet.home("new")
    for rid in ("new", next(rid for rid in "ab" if fleet.home(rid) == other)):
        fleet.engines[other].end(rid)
    assert not fleet.homes("suspect")
    if dies:
        fleet.kill(1 - other)
    else:
        asyncio.run(fleet.fleet.remove(str(1 - other)))
    assert fleet.home("suspect") == other


def test_prompts_are_tokenised_by_replicas_that_are_heard_from(fleet: Fleet) -> None:
    fleet.engines[0].heartbeat_age_s = 1000.0
    for rid in "abcd":
        fleet.send(Generate(rid=rid, prompt=("text",)))
    assert [len(engine.take(Tokenize)) for engine in fleet.engines] == [0, 4]
