"""KV snapshots of cached pages between replicas, without Ray: fake engine cores, and calls in this
process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.engine_messages import ExportPrefix, Failed, ImportPrefix, Reply, Transferred, TreeChange
from ramify.ray.snapshots import ReplicaSnapshots
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.kv_transfer import files
from tests.ray.test_sessions import PAGE_BYTES, FakeEngine, Fleet, until

TOKENS = 64
IMAGE = b"a KV snapshot"
DONE = Transferred(tokens=TOKENS, bytes=4 * PAGE_BYTES)


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Folder of KV snapshots; empty at the end."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    yield tmp_path
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class Moving(Fleet):
    """The prompt of every request is held by the replica a, and every request is placed on b."""

    async def start(self) -> dict[str, FakeEngine]:
        engines = await super().start()
        ends = self.fleet._router._digests.page_ends(np.arange(TOKENS, dtype=np.int32), "", 16)
        engines["a"].receive(TreeChange(epoch=1, number=1, added=tuple(ends)))
        await until(lambda: self.fleet._placement.held("a", ends) == len(ends))
        return engines


@pytest.fixture
def to_b(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement.place
    monkeypatch.setattr(Placement, "_pace_of", lambda self, replica, now: 1.0)
    monkeypatch.setattr(
        Placement, "place", lambda self, work, now, only=None, **options: place(self, work, now, "b")
    )


async def asked_of(engine: FakeEngine, kind: type) -> Any:
    """Wait for a message of this type to the engine core: files are read in threads."""
    for _ in range(1000):
        found = [one for one in engine.sent if isinstance(one, kind)]
        if found:
            return found[0]
        await asyncio.sleep(0.005)
    raise AssertionError(f"no {kind.__name__} has come")


@pytest.mark.usefixtures("to_b")
async def test_a_snapshot_goes_from_the_file_of_one_replica_to_that_of_another() -> None:
    moving = Moving()
    engines = await moving.start()
    moving.place("r", 0)
    export = await asked_of(engines["a"], ExportPrefix)
    assert (len(export.ids), engines["b"].rids()) == (TOKENS, [])
    Path(export.path).write_bytes(IMAGE)
    engines["a"].receive(Reply(rid=export.rid, transferred=DONE))
    arriving = await asked_of(engines["b"], ImportPrefix)
    assert arriving.path != export.path
    assert Path(arriving.path).read_bytes() == IMAGE
    assert not Path(export.path).exists()
    engines["b"].receive(Reply(rid=arriving.rid, transferred=DONE))
    await until(lambda: engines["b"].rids() == ["r"])
    assert moving.fleet._snapshots._snapshots == {}
    await moving.fleet.aclose()
    for one in moving.calls.hosts.values():
        await one.aclose()


@pytest.mark.usefixtures("to_b")
async def test_where_the_source_dies_the_request_computes() -> None:
    moving = Moving()
    engines = await moving.start()
    moving.place("r", 0)
    await asked_of(engines["a"], ExportPrefix)
    moving.calls.killed["a"].set()
    await until(lambda: engines["b"].rids() == ["r"])
    await moving.fleet.aclose()
    await moving.calls.hosts["a"].aclose()


@pytest.mark.usefixtures("to_b")
async def test_a_lost_snapshot_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    moving = Moving()
    engines = await moving.start()

    async def lost(*arguments: Any) -> None:
        raise ConnectionError("The object is lost.")

    monkeypatch.setattr(moving.calls, "export", lost)
    moving.place("r", 0)
    await until(lambda: engines["b"].rids() == ["r"])
    assert moving.lost == []
    assert moving.up == ["a", "b"]
    await moving.fleet.aclose()


async def test_an_export_whose_frontend_goes_away_leaves_no_file() -> None:
    sent: list[Any] = []
    snapshots = ReplicaSnapshots(sent.append)
    message = ExportPrefix(rid="move", ids=tuple(range(TOKENS)), scope="", path="x")
    caller = asyncio.ensure_future(snapshots.export(message, PAGE_BYTES, 16))
    await until(lambda: sent)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    Path(sent[0].path).write_bytes(IMAGE)
    assert snapshots.answered(Reply(rid=sent[0].rid, transferred=DONE))
    for _ in range(1000):
        if not Path(sent[0].path).exists():
            break
        await asyncio.sleep(0.005)
    assert not Path(sent[0].path).exists()
    await snapshots.aclose()


async def test_what_is_no_bytes_and_what_has_no_room_is_refused() -> None:
    sent: list[Any] = []
    snapshots = ReplicaSnapshots(sent.append)
    refused = await snapshots.import_(ImportPrefix(rid="move", path="x"), {"pickled": 1})
    assert isinstance(refused, Failed)
    assert "it is dict, not bytes" in refused.error.message
    message = ExportPrefix(rid="move", ids=tuple(range(TOKENS)), scope="", path="x")
    answer, snapshot = await snapshots.export(message, 10**15, 16)
    assert isinstance(answer, Failed)
    assert (answer.rid, answer.error.code, snapshot, sent) == ("move", "overloaded", None, [])
    await snapshots.aclose()
