"""KV pages moved between two schedulers' trees: the same tokens, nothing lost, no damage accepted."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.engine_messages import ExportPrefix, ImportPrefix, Reply
from ramify.messages import Finish
from ramify.runtime.kv_transfer import files
from ramify.runtime.kv_transfer.files import SnapshotFolder
from ramify.runtime.kv_transfer.snapshot import BadSnapshot, SnapshotReader, SnapshotWriter
from ramify.runtime.scheduler import transfers
from ramify.runtime.scheduler.requests.limits import Tuning
from tests.runtime.local import LocalScheduler
from tests.runtime.tiny import write_model, write_tiny

PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 256, 120)]
WHOLE = 112
"""Number of tokens in the whole pages of `PROMPT`, 16 in each page."""
PAGE_BY_PAGE = Tuning(piece_bytes=1)
PAGE_BYTES = 2 * 2 * 2 * 16 * 64 * 4
"""Bytes of a page: (keys and values) x layers x heads x rows x dimensions x float32."""

FULL = OSError(28, "No space left on device")


@pytest.fixture
def make(tiny_model: Any, tiny_folder: Path) -> Any:
    def made(**options: Any) -> LocalScheduler:
        return LocalScheduler(tiny_model, weights=tiny_folder, **options)

    return made


def export(local: LocalScheduler, path: Path, ids: Sequence[int] = PROMPT, **more: Any) -> Reply | str:
    """Export the pages of `ids` to `path`; returns the answer, or the message of the failure."""
    return ask(local, ExportPrefix(rid="t", ids=tuple(ids), path=str(path), **{"scope": "", **more}))


def import_(local: LocalScheduler, path: Path) -> Reply | str:
    return ask(local, ImportPrefix(rid="t", path=str(path)))


def ask(local: LocalScheduler, message: Any) -> Reply | str:
    local.scheduler.receive(message)
    local.run()
    assert len(local.replies) + len(local.failures) == 1
    return local.replies.pop() if local.replies else local.failures.pop().error.message


def moved(answer: Reply | str) -> tuple[int, int]:
    """(tokens, pages) that an export or import moved."""
    assert isinstance(answer, Reply), answer
    assert answer.transferred is not None
    return answer.transferred.tokens, answer.transferred.bytes // PAGE_BYTES


def unused(local: LocalScheduler) -> bool:
    counts = local.cache.counts()
    return counts.in_use == 0 and counts.free + counts.evictable == counts.total


@pytest.fixture
def snapshot(make: Any, tmp_path: Path) -> Path:
    """The file of a KV snapshot with the whole pages of `PROMPT`."""
    local = make()
    local.complete([PROMPT], max_tokens=1)
    assert moved(export(local, tmp_path / "image")) == (WHOLE, 7)
    assert unused(local)
    return tmp_path / "image"


def test_an_import_is_as_good_as_computing(make: Any, snapshot: Path) -> None:
    sampling = {"max_tokens": 40, "ignore_eos": True}
    (computed,) = make().complete([PROMPT], **sampling)
    local = make()
    assert moved(import_(local, snapshot)) == (WHOLE, 7)
    assert local.cache.counts().evictable == 7
    (taken,) = local.complete([PROMPT], **sampling)
    assert taken.ids == computed.ids
    assert (taken.usage.cached_tokens, computed.usage.cached_tokens) == (WHOLE, 0)
    counters = local.scheduler.stats()
    assert (counters.imported_tokens, counters.refused_imports) == (WHOLE, 0)
    assert unused(local)


@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"kv_cache_dtype": "int8"}],
    ids=["auto", "deterministic", "int8"],
)
def test_the_bits_are_those_that_were_computed(
    tmp_path: Path, tiny_folder: Path, options: dict[str, Any]
) -> None:
    one, two, other = (LocalScheduler(tiny_folder, **each) for each in (options, options, {}))
    one.complete([PROMPT], max_tokens=1)
    export(one, tmp_path / "image")
    import_(two, tmp_path / "image")
    found = []
    for local in (one, two):
        lock = local.cache.acquire(local.cache.match(PROMPT, limit=WHOLE))
        found.append(local.runner.pool.read_pages(lock.pages))
        local.cache.release(lock)
    assert found[0].equal(found[1])
    refused = import_(other, tmp_path / "image")
    assert isinstance(refused, str) == (options != {}), "other options have another KV identity"


def test_only_what_is_missing_travels(make: Any, snapshot: Path, tmp_path: Path) -> None:
    local, other = make(), make()
    local.complete([PROMPT[:70]], max_tokens=1)
    assert moved(import_(local, snapshot)) == (WHOLE, 3), "4 pages were there"
    assert moved(import_(local, snapshot)) == (WHOLE, 0)
    assert moved(export(local, tmp_path / "end", skip=64)) == (WHOLE, 3)
    assert "the tree holds 0 pages" in import_(other, tmp_path / "end")
    other.complete([PROMPT[:70]], max_tokens=1)
    assert moved(import_(other, tmp_path / "end")) == (WHOLE, 3)
    (result,) = other.complete([PROMPT], max_tokens=1)
    assert result.usage.cached_tokens == WHOLE


def test_what_the_tree_lacks_is_not_exported(make: Any, tmp_path: Path) -> None:
    local = make()
    assert "holds 0 whole pages" in export(local, tmp_path / "image")
    local.complete([PROMPT[:20]], max_tokens=1)
    assert "holds 1 whole pages" in export(local, tmp_path / "image", skip=16)
    assert not (tmp_path / "image").exists()


def test_scopes_stay_apart(make: Any, tmp_path: Path) -> None:
    local, other = make(), make()
    local.complete([PROMPT], max_tokens=1, scope="a")
    assert "holds 0" in export(local, tmp_path / "image", scope="b")
    export(local, tmp_path / "image", scope=":a")
    import_(other, tmp_path / "image")
    cached = [
        other.complete([PROMPT], max_tokens=1, scope=scope)[0].usage.cached_tokens for scope in ("b", "", "a")
    ]
    assert cached == [0, 0, WHOLE]


# --- what must be refused -----------------------------------------------------------------------


def refused(local: LocalScheduler, path: Path) -> str:
    answer = import_(local, path)
    assert isinstance(answer, str)
    assert local.scheduler.stats().refused_imports == 1
    assert local.cache.counts().free == local.cache.counts().total, "nothing has changed"
    return answer


class InMemory:
    """A readable KV snapshot in memory."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, size: int) -> bytearray:
        return self._data[offset : offset + size]


def test_every_flipped_bit_is_found(make: Any, snapshot: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One bit is flipped in each byte before the pages, and in 200 random bytes of the pages."""
    data = snapshot.read_bytes()
    start = len(data) - 7 * PAGE_BYTES
    rng = random.Random(0)
    places = [*range(start), *(rng.randrange(start, len(data)) for _ in range(200))]
    assert start > 24 + 4 * WHOLE
    for place in places:
        garbled = bytearray(data)
        garbled[place] ^= 1 << rng.randrange(8)
        with pytest.raises(BadSnapshot):
            SnapshotReader(InMemory(garbled)).pages(0, 7)
    for place in (3, 40, start - 5, len(data) - 1):
        garbled = bytearray(data)
        garbled[place] ^= 1
        snapshot.write_bytes(garbled)
        caplog.clear()
        refused(make(), snapshot)
        assert len(caplog.records) == 1


@pytest.mark.parametrize("size", [0, 10, 24, 60, 400, -1, 1])
def test_a_torn_or_longer_file_is_refused(make: Any, snapshot: Path, size: int) -> None:
    data = snapshot.read_bytes()
    snapshot.write_bytes(data + b"\0" if size == 1 else data[:size])
    refused(make(), snapshot)


@pytest.mark.parametrize(
    ("place", "error"),
    [("scheduler.transfers.SnapshotWriter", ValueError("a bug")), ("kv_transfer.files.NewFile.write", FULL)],
)
def test_an_export_that_fails_gives_everything_back(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    def raises(*arguments: Any, **options: Any) -> None:
        raise error

    local = make()
    local.complete([PROMPT], max_tokens=1)
    monkeypatch.setattr(f"ramify.runtime.{place}", raises)
    assert str(error) in str(export(local, tmp_path / "image"))
    assert unused(local)
    assert not (tmp_path / "image").exists()


def test_other_models_and_engines_are_refused(make: Any, snapshot: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", seed=1)
    same = shutil.copytree(write_tiny(tmp_path / "tiny"), tmp_path / "elsewhere")
    assert "of another model" in refused(LocalScheduler(tmp_path / "other"), snapshot)
    assert "of another model" in refused(make(dtype="bfloat16"), snapshot)
    assert "of another model" in refused(make(page_size=8), snapshot)
    assert "of another model" in refused(make(context_length=256), snapshot)
    assert moved(import_(LocalScheduler(same), snapshot)) == (WHOLE, 7), "the same files in another folder"


def test_what_does_not_fit_the_engine_is_refused(make: Any, tmp_path: Path) -> None:
    local = make()
    identity = local.scheduler.transfers.identity()

    def written(ids: list[int], *, finished: bool = True, **more: Any) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        file = files.NewFile(str(path))
        page_bytes = local.runner.pool.page_bytes
        fields = {"identity": identity, "scope": "", "page_size": 16, "page_bytes": page_bytes} | more
        writer = SnapshotWriter(file, ids=np.array(ids, np.int32), first_page=0, **fields)
        writer.write_pages(bytes(len(ids) // fields["page_size"] * fields["page_bytes"]))
        if finished:
            writer.finish()
        file.close(keep=True)
        return path

    assert "16 tokens in 4 bytes" in refused(make(), written([1] * 16, page_bytes=4))
    assert "8 tokens in" in refused(make(), written([1] * 16, page_size=8))
    assert "528 tokens" in refused(make(), written([1] * 528))
    assert "outside of the vocabulary" in refused(make(), written([1] * 15 + [320]))
    assert "never finished" in refused(make(), written([1] * 16, finished=False))
    assert moved(import_(make(), written([1] * 16))) == (16, 1)
    assert moved(import_(make(), written([]))) == (0, 0)


def test_files_are_private_and_new(make: Any, snapshot: Path, tmp_path: Path) -> None:
    local = make()
    local.complete([PROMPT], max_tokens=1)
    before = snapshot.read_bytes()
    assert snapshot.stat().st_mode & 0o777 == 0o600
    assert "exists" in export(local, snapshot)
    assert snapshot.read_bytes() == before
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert "exists" in export(local, tmp_path / "link")
    assert not (tmp_path / "target").exists()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(snapshot)
    refused(make(), tmp_path / "link")
    snapshot.chmod(0o640)
    assert "no private file" in refused(make(), snapshot)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "no private file" in refused(make(), tmp_path / "pipe")
    refused(make(), tmp_path / "none")
    assert unused(local)


def test_caches_that_share_nothing_refuse(make: Any, snapshot: Path, tiny_model: Any) -> None:
    assert "naive" in refused(make(prefix_cache="naive"), snapshot)
    assert "cannot be told apart" in refused(LocalScheduler(tiny_model), snapshot)


# --- beside requests ----------------------------------------------------------------------------


def test_steps_go_on_between_the_pieces(make: Any, snapshot: Path) -> None:
    local = make(tuning=PAGE_BY_PAGE)
    running = local.submit([1, 2, 3], max_tokens=20, ignore_eos=True)
    local.step()
    local.scheduler.receive(ImportPrefix(rid="t", path=str(snapshot)))
    lengths = []
    while not local.replies:
        assert local.cache.match(PROMPT).length == 0, "all of it or nothing"
        lengths.append(len(local.results[running].ids))
        local.step()
    assert lengths == list(range(1, 8)), "a page after each step"
    assert local.cache.match(PROMPT).length == WHOLE
    local.run()


def test_an_import_takes_no_page_that_is_leased_or_running(make: Any, snapshot: Path) -> None:
    local = make(num_pages=12)
    local.complete([[9] * 60], max_tokens=1)
    lock = local.cache.acquire(local.cache.match([9] * 60))
    local.cache.lease(lock, "p", 1e9)
    local.cache.release(lock)
    local.complete([[8] * 30], max_tokens=1)
    running = local.submit([7] * 16, max_tokens=14, ignore_eos=True)
    local.step()
    assert moved(import_(local, snapshot))[0] < WHOLE
    assert local.cache.match([9] * 60).length == 60
    assert local.scheduler.stats().retractions == 0
    assert local.results[running].finish == Finish(reason="length")
    full = make(num_pages=9)
    full.submit([7] * 100, max_tokens=8, ignore_eos=True)
    full.submit([6] * 10, max_tokens=3, ignore_eos=True)
    full.step()
    assert "No page is free" in import_(full, snapshot)


def test_an_import_takes_no_page_that_the_machine_has_no_memory_for(make: Any, snapshot: Path) -> None:
    local = make(num_pages=12)
    local.cache.limit = 2
    found, _ = moved(import_(local, snapshot))
    assert 0 < found < WHOLE
    assert local.cache.touched == 2


def test_an_import_gives_way_to_running_requests(
    make: Any, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make(num_pages=9, tuning=PAGE_BY_PAGE)
    running = local.submit([7] * 10, max_tokens=90, ignore_eos=True)
    local.step()
    monkeypatch.setattr(transfers.Transfers, "_read", lambda *_: None)  # a slow disk
    local.scheduler.receive(ImportPrefix(rid="t", path=str(snapshot)))
    while not local.failures:
        local.step()
    assert "needed the pages" in local.failures[0].error.message
    local.run()
    assert len(local.results[running].ids) == 90
    assert local.scheduler.stats().retractions == 0


def test_pages_that_are_exported_are_not_evicted(make: Any, tmp_path: Path) -> None:
    local = make(num_pages=15, tuning=PAGE_BY_PAGE)
    local.complete([PROMPT], max_tokens=1)
    (want,) = make().complete([PROMPT], max_tokens=8)
    local.scheduler.receive(ExportPrefix(rid="t", ids=tuple(PROMPT), scope="", path=str(tmp_path / "image")))
    local.step()
    local.submit([5] * 110, max_tokens=10, ignore_eos=True)
    while not local.scheduler.stats().evicted_pages:
        local.step()
    assert not local.replies, "the export goes on"
    local.run()
    other = make()
    assert moved(import_(other, tmp_path / "image")) == (WHOLE, 7)
    (got,) = other.complete([PROMPT], max_tokens=8)
    assert got.ids == want.ids


def test_a_draft_model_computes_what_was_imported(
    make: Any, tiny_folder: Path, snapshot: Path, tmp_path: Path
) -> None:
    """Imported pages lack the draft model's KV, even if it had KV in these pages before."""
    local = make(draft=tiny_folder, speculation=True, num_pages=12)
    local.complete([[5] * 100], max_tokens=20, ignore_eos=True)
    assert moved(import_(local, snapshot)) == (WHOLE, 7)
    (got,) = local.complete([PROMPT], max_tokens=24, ignore_eos=True)
    (want,) = make().complete([PROMPT], max_tokens=24, ignore_eos=True)
    assert got.ids == want.ids
    stats = local.scheduler.stats()
    assert stats.model_accepted_tokens == stats.model_draft_tokens > 0, "the same model proposes the same"


def test_random_moves_between_two_trees_change_no_output(make: Any, tmp_path: Path) -> None:
    """Prompts from a small tree of texts, exports, imports, evictions and flushes, in any order."""
    rng = random.Random(3)
    both = [make(num_pages=40, page_size=4, chunk_tokens=16) for _ in range(2)]
    oracle = make(num_pages=64, page_size=4, prefix_cache="naive")
    wanted: dict[tuple[int, ...], list[int]] = {}
    cached = 0
    for turn in range(60):
        ids = tuple(part for _ in range(rng.randrange(1, 5)) for part in [rng.choice((3, 5))] * 7)
        ids = rng.choice([ids, *wanted])
        here, there = rng.sample(both, 2)
        kind = rng.choice(("ask", "ask", "move", "move", "flush"))
        if kind == "ask":
            (result,) = here.complete([ids], max_tokens=3)
            if ids not in wanted:
                wanted[ids] = oracle.complete([ids], max_tokens=3)[0].ids
            assert result.ids == wanted[ids]
            cached += result.usage.cached_tokens
        elif kind == "move":
            path = tmp_path / str(turn)
            if not isinstance(export(here, path, ids), str):
                import_(there, path)
        elif rng.random() < 0.3:
            here.cache.flush()
    assert all(unused(local) for local in both)
    imported = [local.scheduler.stats().imported_tokens for local in both]
    assert min(imported) > 0, imported
    assert cached > 50


# --- folders ------------------------------------------------------------------------------------


def test_a_folder_of_the_dead_is_removed_and_one_of_the_living_stays(tmp_path: Path) -> None:
    first = SnapshotFolder(tmp_path)
    assert first.path.stat().st_mode & 0o777 == 0o700
    Path(first.new()).write_bytes(b"x")
    second = SnapshotFolder(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    os.close(first._lock)  # as the kernel does at a death
    first._lock = -1
    third = SnapshotFolder(tmp_path)
    assert set(tmp_path.iterdir()) == {second.path, third.path}
    for folder in (second, third):
        folder.close()
        folder.close()
    assert not list(tmp_path.iterdir())
    assert third.new() != third.new()


def test_pages_of_ranks_are_refused_by_name(make: Any, snapshot: Path) -> None:
    """Each rank has only a part of every page."""
    local = make()
    assert local.scheduler.transfers.page_bytes == PAGE_BYTES
    local.scheduler.transfers.ranks = 2
    assert local.scheduler.transfers.page_bytes == 0
    assert "tensor_parallel is 2" in refused(local, snapshot)
