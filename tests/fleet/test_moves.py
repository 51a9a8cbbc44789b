"""Moves of cached pages: when they are worth their time, and what happens to requests that wait for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

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
from ramify.runtime.fleet.moves import MOST_LIMIT_S, MovePace, choose
from ramify.runtime.fleet.placement import Placement, Work
from ramify.runtime.kv_transfer.files import SnapshotFolder
from tests.fleet.fakes import PREFIX, Fleet, asked, page_ends

WHOLE = 992
"""Number of tokens in the whole pages of `PREFIX`."""
PAGE_BYTES = 16 * 22_500

# --- the policy ---------------------------------------------------------------------------------


def test_a_move_is_chosen_where_it_is_cheaper() -> None:
    def chosen(seconds_a_token: float, pages: int, held: int = 0, expected: int = 0) -> bool:
        sources = [("a", 2), ("b", pages)]
        expected = max(held, expected)
        return choose(held, expected, seconds_a_token, sources, MovePace(), 16, PAGE_BYTES) is not None

    assert chosen(3e-4, 60)
    assert not chosen(3e-6, 60), "a GPU computes them before they have come"
    assert not chosen(3e-4, 3), "too few to wait for"
    assert not chosen(3e-4, 60, held=58)
    assert not chosen(3e-4, 60, expected=60), "they are computed already, for another request"
    move = choose(4, 10, 1e-3, [("a", 2), ("b", 60)], MovePace(), 16, PAGE_BYTES)
    assert move is not None
    assert (move.source, move.first, move.end, move.gained) == ("b", 4, 60, 800)
    assert move.limit_s == pytest.approx(0.8)
    assert choose(0, 0, 1.0, [], MovePace(), 16, PAGE_BYTES) is None
    assert choose(0, 0, 1.0, [("a", 60)], MovePace(), 16, 0) is None, "replicas that transfer nothing"


def test_the_pace_of_moves_is_measured() -> None:
    pace = MovePace()
    for _ in range(5):
        pace.learn(2.0, 60 * PAGE_BYTES)
    assert pace.seconds_for(60 * PAGE_BYTES) == pytest.approx(2.0)
    assert choose(0, 0, 3e-4, [("a", 60)], MovePace(), 16, PAGE_BYTES) is not None
    assert choose(0, 0, 3e-4, [("a", 60)], pace, 16, PAGE_BYTES) is None, "0.3 s of computing"


# --- requests that wait -------------------------------------------------------------------------


class Store(SnapshotFolder):
    """A folder of KV snapshots with `free` bytes of room."""

    free = 1 << 40

    def room(self) -> int:
        return self.free


class FixedPace(Placement):
    """A placement that assumes 1 ms a token for every replica."""

    def _pace_of(self, replica: Any, now: float) -> float:
        return 1e-3


class ToTheSecond(FixedPace):
    """A placement that sends every new request to replica 1."""

    def place(self, work: Work, now: float, only: str | None = None, **options: Any) -> str:
        return super().place(work, now, "1")


class Moving(Fleet):
    """A fleet of two replicas. The first has the pages of `held`."""

    def __init__(
        self,
        folder: Path,
        *,
        held: tuple[int, ...] = (),
        placement: Placement | None = None,
        **options: Any,
    ) -> None:
        self.store = Store(folder)
        self.placement = placement or FixedPace()
        fleet_options = {"placement": self.placement, "make_store": lambda: self.store}
        super().__init__(page_bytes=PAGE_BYTES, fleet_options=fleet_options, **options)
        self.changes = 0
        self.hold(held)

    def hold(self, ids: tuple[int, ...]) -> None:
        """Let the first replica hold the whole pages of a prompt."""
        self.changes += 1
        self.engines[0].receive(TreeChange(epoch=1, number=self.changes, added=page_ends(ids)))

    def files(self) -> list[Path]:
        return list(self.store.path.iterdir())

    def exporting(self) -> ExportPrefix:
        (message,) = self.engines[0].take(ExportPrefix)
        assert isinstance(message, ExportPrefix)
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
def moving(tmp_path: Path) -> Moving:
    """A fleet whose first replica has the pages of `PREFIX`, and whose second gets all new requests."""
    return Moving(tmp_path, held=PREFIX, placement=ToTheSecond())


def test_a_request_waits_for_its_pages(moving: Moving) -> None:
    moving.send(asked("a", 7))
    message = moving.exporting()
    assert (len(message.ids), message.scope, message.skip) == (WHOLE, "", 0)
    assert not moving.sent()
    moving.exported(message)
    assert moving.engines[1].take(ImportPrefix) == [ImportPrefix(rid=message.rid, path=message.path)]
    assert not moving.sent()
    before = moving.placement.work_of("1")
    moving.imported(message)
    assert moving.sent() == ["a"]
    assert before - moving.placement.work_of("1") == WHOLE, "they need not be computed"
    assert not moving.files()
    assert not moving.timers.waiting
    assert not moving.got, "the frontend hears nothing of it"
    moving.engines[1].end("a", 1)
    assert moving.placement.work_of("1") == pytest.approx(0)


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
    work = moving.placement.work_of("1")
    error = WorkerDied("no").to_info()
    moving.engines[when == "import"].receive(Failed(rid=message.rid, error=error))
    assert moving.sent() == ["a"]
    assert moving.placement.work_of("1") == work
    assert not moving.files()
    assert not moving.got


def test_a_replica_that_refuses_three_snapshots_is_sent_no_more(moving: Moving) -> None:
    wrong = InvalidRequest("The KV snapshot cannot be used: it is of another model.")
    prompts = {
        rid: tuple(range(start, start + 320))
        for start, rid in zip(range(0, 2880, 320), "abcdefghi", strict=True)
    }
    for ids in prompts.values():
        moving.hold(ids)

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
    moving.timers.waiting[0]()
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
        assert not moving.requests()
    moving.imported(message)
    assert len(moving.sent()) == (dead == 0)


def test_requests_that_are_aborted_while_they_wait(moving: Moving) -> None:
    """An aborted request is sent at once, to be answered. A request for the same pages waits on."""
    for rid in "ab":
        moving.send(asked(rid, ord(rid)))
    message = moving.exporting()
    moving.send(Abort(rid="a"))
    assert [(type(one), one.rid) for one in moving.engines[1].sent] == [(Generate, "a"), (Abort, "a")]
    moving.exported(message)
    moving.engines[1].take(ImportPrefix)
    moving.imported(message)
    assert moving.sent() == ["a", "b"]
    moving.engines[1].sent.clear()
    moving.send(asked("c", 99))
    moving.send(Abort(rid="c"))
    assert [type(one) for one in moving.engines[1].sent] == [Generate, Abort]


def test_without_room_nothing_moves(moving: Moving) -> None:
    moving.store.free = 10 * PAGE_BYTES
    moving.send(asked("a", 7))
    assert moving.sent() == ["a"]


def test_what_is_on_its_way_at_once_is_bounded(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    other, third = PREFIX[::-1], PREFIX[500:] + PREFIX[:500]
    for ids in (other, third):
        moving.hold(ids)
    monkeypatch.setattr("ramify.runtime.fleet.kv_connector.MOST_BYTES", 100 * PAGE_BYTES)

    def send(rid: str, *ids: int) -> bool:
        """Send a request; returns whether it waits for pages."""
        moving.send(Generate(rid=rid, prompt=(ids,)))
        return rid not in moving.sent()

    assert send("a", *PREFIX, 7)
    message = moving.exporting()
    assert not send("b", *other, 7), "62 pages are on their way, and it has as many"
    moving.timers.waiting[0]()
    assert moving.sent() == ["b", "a"]
    assert not send("c", *other, 8), "the source may write the first KV snapshot still"
    moving.exported(message)
    monkeypatch.setattr("ramify.runtime.fleet.kv_connector.MOST_BYTES", 10 * PAGE_BYTES)
    assert send("d", *third, 9), "one alone may be larger"


def test_room_is_counted_once(moving: Moving) -> None:
    """Room for a KV snapshot that is not written yet is reserved: the folder's free room does not show it."""
    other = PREFIX[::-1]
    moving.hold(other)
    moving.store.free = 130 * PAGE_BYTES
    moving.send(asked("a", 7))
    moving.send(Generate(rid="b", prompt=((*other, 7),)))
    assert moving.sent() == ["b"]


def test_a_closed_fleet_leaves_no_file(moving: Moving, tmp_path: Path) -> None:
    moving.send(asked("a", 7))
    moving.exporting()
    assert moving.files()
    asyncio.run(moving.fleet.aclose())
    assert not list(tmp_path.iterdir())
    assert not moving.timers.waiting


# --- drain --------------------------------------------------------------------------------------


def test_a_replica_that_drains_leaves_its_prefixes_to_the_others(moving: Moving) -> None:
    """All prefixes of a program go to the replica of its next request. Short prefixes stay."""
    ids = [tuple(range(start, start + 320)) for start in (0, 1000, 2000)]
    held = (
        HeldPrefix(scope=":s", ids=ids[0], owners=("p",)),
        HeldPrefix(scope=":s", ids=ids[1], owners=("p",)),
        HeldPrefix(scope="", ids=(1, 2, 3)),
        HeldPrefix(scope="", ids=ids[2]),
    )

    async def drain() -> None:
        leaving = asyncio.ensure_future(moving.fleet.drain("0", 1.0))
        while not (calls := moving.engines[0].take(GetPrefixes)):
            await asyncio.sleep(0)
        (question,) = calls
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
    assert not moving.files()


def test_a_replica_that_dies_while_it_drains_keeps_nobody_waiting(moving: Moving) -> None:
    async def drain() -> None:
        leaving = asyncio.ensure_future(moving.fleet.drain("0", 1.0))
        while not moving.engines[0].take(GetPrefixes):
            await asyncio.sleep(0)
        moving.kill(0)
        await leaving

    asyncio.run(drain())
    assert not moving.files()


# --- prefill and decode roles -------------------------------------------------------------------


@pytest.fixture
def roles(tmp_path: Path) -> Moving:
    """A fleet of two replicas, of which the first computes prompts (prefill)."""
    return Moving(tmp_path, prefill_replicas=1)


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
    assert roles.placement.work_of("0") == pytest.approx(0)
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
    roles.timers.waiting[0]()
    assert roles.sent() == ["a"]
    assert roles.engines[0].take(Abort) == [Abort(rid=prompt.rid)]
    computed(roles, prompt, "abort")
    assert not roles.engines[0].take(ExportPrefix)
    assert roles.placement.work_of("0") == pytest.approx(0)


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
    work = roles.placement.work_of("1")
    roles.send(Generate(rid="b", prompt=(PREFIX[::-1],)))  # as the frontend does
    assert roles.sent() == ["a", "b"]
    assert roles.placement.work_of("1") > work > WHOLE, "its first place there is free again"
    roles.exported(message)
    assert not roles.files()


def test_a_replicas_first_prompt_has_the_longest_time(roles: Moving) -> None:
    """The first prompt loads kernels, and so takes longer than the fleet's pace predicts."""
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


def test_roles_need_pages_that_can_move() -> None:
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
