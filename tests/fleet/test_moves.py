"""Moves of cached pages: when they pay, and what becomes of the requests that wait for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.engine_messages import (
    Abort,
    ExportPrefix,
    Failed,
    GetPrefixes,
    HeldPrefix,
    ImportPrefix,
    Reply,
    StepText,
    Transferred,
    TreeChange,
)
from ramify.errors import InvalidRequest, Overloaded, RamifyError, UnsupportedField, WorkerDied
from ramify.messages import Finish, Generate, TextChunk
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet import local
from ramify.runtime.fleet.moves import MOST_LIMIT_S, MovePace, Need, choose
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.kv_transfer.files import SnapshotFolder
from tests.fleet.test_fleet import FakeEngine, Fleet, asked

PREFIX = tuple(range(1000))
WHOLE = 992
"""Tokens of its whole pages."""
PAGE_BYTES = 16 * 22_500

# --- the policy ---------------------------------------------------------------------------------


def test_a_move_is_chosen_where_it_is_cheaper() -> None:
    def chosen(seconds_a_token: float, pages: int, held: int = 0, expected: int = 0) -> bool:
        need = Need(held, max(held, expected), seconds_a_token)
        return choose(need, [("a", 2), ("b", pages)], MovePace(), 16, PAGE_BYTES) is not None

    assert chosen(3e-4, 60)
    assert not chosen(3e-6, 60), "a GPU computes them before they have come"
    assert not chosen(3e-4, 3), "too few to wait for"
    assert not chosen(3e-4, 60, held=58)
    assert not chosen(3e-4, 60, expected=60), "they are computed already, for another request"
    move = choose(Need(4, 10, 1e-3), [("a", 2), ("b", 60)], MovePace(), 16, PAGE_BYTES)
    assert move is not None
    assert (move.source, move.first, move.end, move.gained) == ("b", 4, 60, 800)
    assert move.limit_s == pytest.approx(0.8)
    assert choose(Need(0, 0, 1.0), [], MovePace(), 16, PAGE_BYTES) is None
    assert choose(Need(0, 0, 1.0), [("a", 60)], MovePace(), 16, 0) is None, "replicas that transfer nothing"


def test_the_pace_of_moves_is_measured() -> None:
    pace = MovePace()
    for _ in range(5):
        pace.learn(2.0, 60 * PAGE_BYTES)
    assert pace.seconds_for(60 * PAGE_BYTES) == pytest.approx(2.0)
    need = Need(0, 0, 3e-4)
    assert choose(need, [("a", 60)], MovePace(), 16, PAGE_BYTES) is not None
    assert choose(need, [("a", 60)], pace, 16, PAGE_BYTES) is None, "0.3 s of computing"


# --- requests that wait -------------------------------------------------------------------------


class Moving(Fleet):
    """Two replicas, of which the first holds `held`; new requests go to the second."""

    def __init__(self, folder: Path, held: tuple[int, ...] = PREFIX, **options: Any) -> None:
        super().__init__(**options)
        moves = self.fleet.connector
        assert moves is not None
        moves._later = self.timers
        moves._store = SnapshotFolder(folder)
        for engine in self.engines:
            engine.page_bytes = PAGE_BYTES
        ends = self.fleet._router._digests.page_ends(np.array(held, np.int32), "", 16)
        self.engines[0].receive(TreeChange(epoch=1, number=1, added=tuple(ends)))

    def files(self) -> list[Path]:
        moves = self.fleet.connector
        assert moves is not None
        assert isinstance(moves._store, SnapshotFolder)
        return list(moves._store.path.iterdir())

    def exporting(self) -> ExportPrefix:
        (message,) = self.engines[0].take(ExportPrefix)
        Path(message.path).write_bytes(b"KV snapshot")
        return message

    def exported(self, message: ExportPrefix) -> None:
        done = Transferred(tokens=WHOLE, bytes=62 * PAGE_BYTES)
        self.engines[0].receive(Reply(rid=message.rid, transferred=done))

    def imported(self, message: ExportPrefix) -> None:
        done = Transferred(tokens=WHOLE, bytes=62 * PAGE_BYTES)
        self.engines[1].receive(Reply(rid=message.rid, transferred=done))

    def sent(self) -> list[str]:
        return [one.rid for one in self.engines[1].sent if isinstance(one, Generate)]


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Moving:
    monkeypatch.setattr(local, "EngineSupervisor", FakeEngine)
    monkeypatch.setattr(Placement, "_pace_of", lambda self, replica, now: 1e-3)
    place = Placement.place
    monkeypatch.setattr(
        Placement, "place", lambda self, work, now, only=None, **options: place(self, work, now, "1")
    )
    return Moving(tmp_path)


def test_a_request_waits_for_its_pages(moving: Moving) -> None:
    moving.send(asked("a", 7))
    message = moving.exporting()
    assert (len(message.ids), message.scope, message.skip) == (WHOLE, "", 0)
    assert not moving.sent()
    moving.exported(message)
    assert moving.engines[1].take(ImportPrefix) == [ImportPrefix(rid=message.rid, path=message.path)]
    assert not moving.sent()
    before = moving.fleet._placement.work_of("1")
    moving.imported(message)
    assert moving.sent() == ["a"]
    assert before - moving.fleet._placement.work_of("1") == WHOLE, "they need not be computed"
    assert not moving.files()
    assert not moving.timers.due
    assert not moving.got, "the frontend hears nothing of it"
    chunk = TextChunk(rid="a", text="x", ids=(1,), finish=Finish(reason="length"))
    moving.engines[1].receive(StepText(chunks=(chunk,)))
    assert moving.fleet._placement.work_of("1") == pytest.approx(0)


def test_siblings_wait_for_one_move(moving: Moving) -> None:
    for rid in "abc":
        moving.send(asked(rid, ord(rid)))
    message = moving.exporting()
    moving.send(Generate(rid="other", prompt=((5, 6, 7),)))
    assert moving.sent() == ["other"]
    moving.exported(message)
    moving.imported(message)
    assert sorted(moving.sent()) == ["a", "b", "c", "other"]


def test_other_scopes_do_not_move(moving: Moving) -> None:
    moving.send(asked("a", 7, scope="mine"))
    assert not moving.engines[0].take(ExportPrefix)
    assert moving.sent() == ["a"]


@pytest.mark.parametrize("when", ["export", "import"])
def test_after_a_refusal_the_request_computes(moving: Moving, when: str) -> None:
    moving.send(asked("a", 7))
    message = moving.exporting()
    if when == "import":
        moving.exported(message)
    work = moving.fleet._placement.work_of("1")
    error = WorkerDied("no").to_info()
    moving.engines[when == "import"].receive(Failed(rid=message.rid, error=error))
    assert moving.sent() == ["a"]
    assert moving.fleet._placement.work_of("1") == work
    assert not moving.files()
    assert not moving.got


def test_a_replica_that_refuses_three_snapshots_is_sent_no_more(moving: Moving) -> None:
    wrong = InvalidRequest("The KV snapshot cannot be used: it is of another model.")
    prompts = {
        rid: tuple(range(start, start + 320))
        for start, rid in zip(range(0, 2880, 320), "abcdefghi", strict=True)
    }
    for number, ids in enumerate(prompts.values()):
        ends = moving.fleet._router._digests.page_ends(np.array(ids, np.int32), "", 16)
        moving.engines[0].receive(TreeChange(epoch=1, number=number + 2, added=tuple(ends)))

    def send(rid: str) -> list[Any]:
        moving.send(Generate(rid=rid, prompt=(prompts[rid],)))
        return moving.engines[0].take(ExportPrefix)

    def refuse(rid: str, error: RamifyError) -> None:
        (message,) = send(rid)
        moving.exported(message)
        moving.engines[1].receive(Failed(rid=message.rid, error=error.to_info()))

    for rid in "ab":
        refuse(rid, wrong)
    (message,) = send("c")
    moving.exported(message)
    moving.imported(message)
    for rid, error in (("d", wrong), ("e", Overloaded("no room")), ("f", wrong), ("g", wrong)):
        refuse(rid, error)
    assert send("h") == []
    assert moving.sent() == list("abcdefgh")
    moving.kill(1)
    moving.engines[1].came_back()
    assert send("i"), "it may be another one now"


def test_after_its_time_limit_the_request_computes(moving: Moving) -> None:
    moving.send(asked("a", 7))
    message = moving.exporting()
    moving.timers.due[0]()
    assert moving.sent() == ["a"]
    moving.send(asked("b", 8))
    assert moving.sent() == ["a", "b"], "nothing waits for a move that is late"
    moving.exported(message)
    assert not moving.engines[1].take(ImportPrefix)
    assert not moving.files()
    assert moving.sent() == ["a", "b"]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_death_ends_the_move(moving: Moving, dead: int) -> None:
    moving.send(asked("a", 7))
    message = moving.exporting()
    moving.exported(message)
    moving.kill(dead)
    assert not moving.files()
    if dead == 0:
        assert moving.sent() == ["a"]
    else:
        assert moving.lost == [["a"]], "the frontend sends it again"
        assert not moving.sent()
        assert "a" not in moving.fleet._router.requests
    moving.imported(message)
    assert len(moving.sent()) == (dead == 0)


def test_requests_that_are_aborted_while_they_wait(moving: Moving) -> None:
    """The last one of a move is sent at once, for its answer; others go with those that wait on."""
    for rid in "ab":
        moving.send(asked(rid, ord(rid)))
    message = moving.exporting()
    moving.send(Abort(rid="a"))
    assert not moving.engines[1].sent
    moving.exported(message)
    moving.engines[1].take(ImportPrefix)
    moving.imported(message)
    assert [type(one) for one in moving.engines[1].sent] == [Generate, Abort, Generate], "in this order"
    moving.engines[1].sent.clear()
    moving.send(asked("c", 99))
    moving.send(Abort(rid="c"))
    assert [type(one) for one in moving.engines[1].sent] == [Generate, Abort]


def test_without_room_nothing_moves(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SnapshotFolder, "room", lambda self: 10 * PAGE_BYTES)
    moving.send(asked("a", 7))
    assert moving.sent() == ["a"]


def test_what_is_on_its_way_at_once_is_bounded(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    other, third = PREFIX[::-1], PREFIX[500:] + PREFIX[:500]
    for number, ids in enumerate((other, third)):
        ends = moving.fleet._router._digests.page_ends(np.array(ids, np.int32), "", 16)
        moving.engines[0].receive(TreeChange(epoch=1, number=number + 2, added=tuple(ends)))
    monkeypatch.setattr("ramify.runtime.fleet.kv_connector.MOST_BYTES", 100 * PAGE_BYTES)

    def send(rid: str, *ids: int) -> bool:
        """Whether it waits for pages."""
        moving.send(Generate(rid=rid, prompt=(ids,)))
        return rid not in moving.sent()

    assert send("a", *PREFIX, 7)
    message = moving.exporting()
    assert not send("b", *other, 7), "62 pages are on their way, and it has as many"
    moving.timers.due[0]()
    assert moving.sent() == ["b", "a"]
    assert not send("c", *other, 8), "the source may write the first KV snapshot still"
    moving.exported(message)
    monkeypatch.setattr("ramify.runtime.fleet.kv_connector.MOST_BYTES", 10 * PAGE_BYTES)
    assert send("d", *third, 9), "one alone may be larger"


def test_room_is_counted_once(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV snapshots that are not written yet do not show in what is free."""
    other = PREFIX[::-1]
    ends = moving.fleet._router._digests.page_ends(np.array(other, np.int32), "", 16)
    moving.engines[0].receive(TreeChange(epoch=1, number=2, added=tuple(ends)))
    monkeypatch.setattr(SnapshotFolder, "room", lambda self: 130 * PAGE_BYTES)
    moving.send(asked("a", 7))
    moving.send(Generate(rid="b", prompt=((*other, 7),)))
    assert moving.sent() == ["b"]


def test_a_closed_fleet_leaves_no_file(moving: Moving, tmp_path: Path) -> None:
    moving.send(asked("a", 7))
    moving.exporting()
    assert moving.files()
    asyncio.run(moving.fleet.aclose())
    assert not list(tmp_path.iterdir())
    assert not moving.timers.due


# --- drain --------------------------------------------------------------------------------------


def test_a_replica_that_drains_leaves_its_prefixes_to_the_others(moving: Moving) -> None:
    """Those of one program go to one place, where its next request goes; what is short stays."""
    ids = [tuple(range(start, start + 320)) for start in (0, 1000, 2000)]
    held = (
        HeldPrefix(scope=":s", ids=ids[0], owners=("p",)),
        HeldPrefix(scope=":s", ids=ids[1], owners=("p",)),
        HeldPrefix(scope="", ids=(1, 2, 3)),
        HeldPrefix(scope="", ids=ids[2]),
    )

    async def drain() -> None:
        moves = moving.fleet.connector
        assert moves is not None
        leaving = asyncio.ensure_future(moves.evacuate("0"))
        await asyncio.sleep(0)
        (question,) = moving.engines[0].take(GetPrefixes)
        moving.engines[0].receive(Reply(rid=question.rid, prefixes=held))
        for prefix in (ids[0], ids[1], ids[2]):
            while not any(isinstance(one, ExportPrefix) for one in moving.engines[0].sent):
                await asyncio.sleep(0)
            message = moving.exporting()
            assert message.ids == prefix
            moving.exported(message)
            moving.imported(message)
        await leaving

    asyncio.run(drain())
    assert len(moving.engines[1].take(ImportPrefix)) == 3
    assert moving.fleet._placement._homes == {"p": "1"}
    assert not moving.files()


def test_a_replica_that_dies_while_it_drains_keeps_nobody_waiting(moving: Moving) -> None:
    async def drain() -> None:
        moves = moving.fleet.connector
        assert moves is not None
        leaving = asyncio.ensure_future(moves.evacuate("0"))
        await asyncio.sleep(0)
        moving.engines[0].take(GetPrefixes)
        moving.kill(0)
        await leaving

    asyncio.run(drain())
    assert not moving.files()


# --- prefill and decode roles -------------------------------------------------------------------


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Moving:
    """The first of two replicas computes prompts."""
    monkeypatch.setattr(local, "EngineSupervisor", FakeEngine)
    monkeypatch.setattr(Placement, "_pace_of", lambda self, replica, now: 1e-3)
    monkeypatch.setattr(FakeEngine, "page_bytes", PAGE_BYTES)
    return Moving(tmp_path, prefill_replicas=1, held=())


def prefill(roles: Moving) -> Generate:
    (prompt,) = roles.engines[0].take(Generate)
    assert isinstance(prompt, Generate)
    return prompt


def computed(roles: Moving, prompt: Generate, reason: Any = "length") -> None:
    roles.engines[0].receive(StepText(chunks=(TextChunk(rid=prompt.rid, finish=Finish(reason=reason)),)))


def test_a_prompt_is_computed_on_one_replica_and_decoded_on_the_other(roles: Moving) -> None:
    roles.send(asked("a", 7, scope="s"))
    prompt = prefill(roles)
    assert (prompt.prompt, prompt.scope, prompt.sampling.max_tokens) == ((PREFIX[:WHOLE],), "s", 0)
    assert not roles.engines[0].take(ExportPrefix)
    assert not roles.sent()
    computed(roles, prompt)
    assert roles.fleet._placement.work_of("0") == pytest.approx(0)
    message = roles.exporting()
    assert (message.ids, message.scope) == (PREFIX[:WHOLE], ":s")
    roles.exported(message)
    roles.imported(message)
    assert roles.sent() == ["a"]
    assert not roles.files()


def test_siblings_share_one_prefill_and_short_prompts_need_none(roles: Moving) -> None:
    for rid in "abc":
        roles.send(asked(rid, ord(rid)))
    roles.send(Generate(rid="short", prompt=((5,) * 60,)))
    assert roles.sent() == ["short"]
    computed(roles, prefill(roles))
    message = roles.exporting()
    roles.exported(message)
    roles.imported(message)
    assert sorted(roles.sent()) == ["a", "b", "c", "short"]


def test_a_prefill_that_is_late_is_given_up(roles: Moving) -> None:
    roles.send(asked("a", 7))
    prompt = prefill(roles)
    roles.timers.due[0]()
    assert roles.sent() == ["a"]
    assert roles.engines[0].take(Abort) == [Abort(rid=prompt.rid)]
    computed(roles, prompt, "abort")
    assert not roles.engines[0].take(ExportPrefix)
    assert not roles.fleet.connector._moves
    assert roles.fleet._placement.work_of("0") == pytest.approx(0)


def test_an_abort_ends_the_prefill(roles: Moving) -> None:
    roles.send(asked("a", 7))
    prompt = prefill(roles)
    roles.send(Abort(rid="a"))
    assert [type(one) for one in roles.engines[1].sent] == [Generate, Abort]
    assert roles.engines[0].take(Abort) == [Abort(rid=prompt.rid)]


def test_without_its_partner_a_replica_does_both(roles: Moving) -> None:
    roles.send(asked("a", 7))
    prefill(roles)
    roles.kill(0)
    roles.send(asked("a", 7))  # as the frontend does
    assert roles.sent() == ["a"]
    roles.send(asked("b", 8))
    assert roles.sent() == ["a", "b"]
    roles.engines[0].came_back()
    roles.kill(1)
    roles.send(asked("c", 9))
    assert prefill(roles).rid == "c"


def test_a_death_over_a_prompt_counts_against_those_that_asked_for_it(roles: Moving) -> None:
    roles.send(asked("a", 7))
    computed(roles, prefill(roles))
    message = roles.exporting()
    roles.send(Generate(rid="b", prompt=(PREFIX[::-1],)))
    prefill(roles)
    roles.kill(0)
    assert roles.lost == [["b"]], "the prompt of the other one had been computed"
    assert roles.sent() == ["a"]
    work = roles.fleet._placement.work_of("1")
    roles.send(Generate(rid="b", prompt=(PREFIX[::-1],)))  # as the frontend does
    assert roles.sent() == ["a", "b"]
    assert roles.fleet._placement.work_of("1") > work > WHOLE, "its first place there is free again"
    assert all(one.sent for one in roles.fleet._router.requests.values())
    roles.exported(message)
    assert not roles.files()


def test_a_replicas_first_prompt_has_the_longest_time(roles: Moving) -> None:
    """It loads kernels, and is slower than the fleet's pace says."""
    roles.send(asked("a", 7))
    computed(roles, prefill(roles))
    roles.send(Generate(rid="b", prompt=(PREFIX[::-1],)))
    prefill(roles)
    roles.kill(0)
    roles.engines[0].came_back()
    roles.send(Generate(rid="c", prompt=(PREFIX[1:],)))
    first, second, anew = roles.timers.seconds
    assert first == anew == MOST_LIMIT_S
    assert second < MOST_LIMIT_S / 2


def test_roles_need_pages_that_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "EngineSupervisor", FakeEngine)
    monkeypatch.setattr(FakeEngine, "page_bytes", 0)
    with pytest.raises(UnsupportedField, match="linear attention"):
        Fleet(prefill_replicas=1)
    with pytest.raises(ValueError, match="divided among ranks"):
        EngineConfig(replicas=2, prefill_replicas=1, tensor_parallel=2)
    with pytest.raises(ValueError, match="shares no pages"):
        EngineConfig(replicas=2, prefill_replicas=1, prefix_cache="naive")


@pytest.mark.parametrize(("replicas", "prefill"), [(1, 1), (2, 2), (2, -1)])
def test_roles_that_make_no_sense_are_refused(replicas: int, prefill: int) -> None:
    with pytest.raises(ValueError, match=f"prefill_replicas is {prefill} of {replicas} replicas"):
        EngineConfig(replicas=replicas, prefill_replicas=prefill)
