"""The cold tier: prefixes that outlive their process, with the same tokens; no damage, no leak, no slip."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramify.engine_messages import Abort, AwaitTools, FlushCache
from ramify.errors import UnsupportedField
from ramify.messages import ProgramHint
from ramify.runtime.cold import files, tier, writer
from ramify.runtime.cold.files import FileStore
from ramify.runtime.cold.gate import Gate
from ramify.runtime.cold.memory import MemoryStore
from ramify.runtime.cold.open import open_stores
from ramify.runtime.config import EngineConfig
from ramify.runtime.engine.engine import Engine
from ramify.runtime.kv_transfer.files import NewFile
from ramify.runtime.kv_transfer.identity import kv_identity
from ramify.runtime.kv_transfer.snapshot import BadSnapshot
from ramify.runtime.scheduler.requests.limits import Tuning
from tests.runtime.local import LocalScheduler, Result

PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 256, 120)]
OTHER = [int(token) for token in np.random.default_rng(2).integers(0, 256, 120)]
WHOLE = 112
"""Number of tokens in the whole pages of `PROMPT`, 16 in each page."""
PAGE_BYTES = 2 * 2 * 2 * 16 * 64 * 4
ID = "1d" * 16
"""An identity of no engine."""
PAGE_BY_PAGE = Tuning(piece_bytes=1)
SAMPLING: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}

Make = Callable[..., LocalScheduler]


@pytest.fixture
def make(tiny_model: Any, tiny_folder: Path, tmp_path: Path) -> Make:
    """Makes a scheduler whose cold tier is in the folder "cold", as if its process had just started."""

    def made(
        *, most: int = 1 << 30, identity: str = "", tuning: Tuning = PAGE_BY_PAGE, **options: Any
    ) -> LocalScheduler:
        def store(local: LocalScheduler) -> list[FileStore]:
            pool = local.runner.pool
            own = identity or kv_identity(local.config, pool, tiny_folder)
            sizes = {"page_size": pool.page_size, "page_bytes": pool.page_bytes}
            return [FileStore(tmp_path / "cold", own, most_bytes=most, **sizes)]

        local = LocalScheduler(tiny_model, cold=store, tuning=tuning, **options)
        local.scheduler.cold.gate.pays = lambda tokens, size: tokens > 0
        return local

    return made


def run(local: LocalScheduler) -> None:
    """Step until no request is left, waiting for the cold tier's thread."""
    cold = local.scheduler.cold
    while local.scheduler.busy or cold.held:
        if not local.scheduler.busy:
            assert cold._read.job.done.wait(60)
        local.step()


def complete(local: LocalScheduler, *prompts: list[int], **more: Any) -> list[Result]:
    rids = [local.submit(prompt, **{**SAMPLING, **more}) for prompt in prompts]
    run(local)
    return [local.results[rid] for rid in rids]


def close(local: LocalScheduler) -> None:
    """End the process gracefully."""
    local.scheduler.cold.close(60)
    local.cache.check()
    assert local.cache.counts().in_use == 0


@pytest.fixture
def before(make: Make) -> list[int]:
    """The output of a process that has ended and left `PROMPT` in the cold tier."""
    local = make()
    (result,) = complete(local, PROMPT)
    close(local)
    return result.ids


def segments(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cold").glob("*/*.kv"))


def test_a_prompt_is_found_by_the_next_process(make: Make, before: list[int]) -> None:
    local = make()
    (result,) = complete(local, PROMPT)
    assert result.ids == before
    assert result.usage.cached_tokens == WHOLE
    stats = local.scheduler.stats()
    assert (stats.cold_tokens, stats.cold_bytes) == (WHOLE, 7 * PAGE_BYTES)
    assert stats.computed_tokens == len(PROMPT) - WHOLE + len(before) - 1
    (again,) = complete(local, PROMPT)
    assert again.usage.cached_tokens == len(PROMPT) - 1
    assert local.scheduler.stats().cold_tokens == WHOLE, "the second time it is in the tree"


def test_deterministic_bits_are_those_that_were_computed(make: Make) -> None:
    found = []
    for _ in range(2):
        local = make(deterministic=True)
        complete(local, PROMPT)
        lock = local.cache.acquire(local.cache.match(PROMPT, limit=WHOLE))
        found.append(local.runner.pool.read_pages(lock.pages))
        local.cache.release(lock)
        close(local)
    assert local.scheduler.stats().cold_tokens == WHOLE
    assert found[0].equal(found[1])


def test_the_tree_and_the_files_continue_each_other(make: Make, before: list[int]) -> None:
    local = make()
    complete(local, PROMPT[:40], max_tokens=1)  # the tree has two whole pages and a half one
    (result,) = complete(local, PROMPT)
    assert (result.ids, result.usage.cached_tokens) == (before, WHOLE)
    assert local.scheduler.stats().cold_tokens == WHOLE


def test_branches_of_a_fork_share_one_read(make: Make, before: list[int]) -> None:
    local = make()
    tails = [[*PROMPT, *OTHER[:place]] for place in (3, 7, 20)]
    results = complete(local, *tails)
    assert [result.usage.cached_tokens >= WHOLE for result in results] == [True] * 3
    assert local.scheduler.stats().cold_tokens == WHOLE
    assert [result.ids for result in results] == [
        result.ids for result in complete(make(identity=ID), *tails)
    ]


def test_turns_of_a_chat_write_only_what_is_new(make: Make, tmp_path: Path) -> None:
    local = make()
    (first,) = complete(local, PROMPT)
    local.scheduler.cold.writer.close(60)
    turn = [*PROMPT, *first.ids, *OTHER[:40]]
    complete(local, turn)
    close(local)
    sizes = [path.stat().st_size // PAGE_BYTES for path in segments(tmp_path)]
    assert sorted(sizes) == [3, 8]  # of 120 + 11 computed tokens, then of 120 + 12 + 40 + 11
    (again,) = complete(make(), turn)
    assert again.usage.cached_tokens == len(turn) // 16 * 16


def test_a_long_prefix_is_cut_into_segments(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 3 * PAGE_BYTES)
    local = make()
    complete(local, PROMPT, max_tokens=1)
    close(local)
    assert sorted(path.stat().st_size // PAGE_BYTES for path in segments(tmp_path)) == [1, 3, 3]
    (result,) = complete(make(), PROMPT)
    assert result.usage.cached_tokens == WHOLE


def test_without_a_cold_dir_there_is_none(tiny_model: Any, tmp_path: Path) -> None:
    local = LocalScheduler(tiny_model)
    local.complete([PROMPT])
    assert local.scheduler.cold is None
    assert open_stores(EngineConfig(), local.runner.pool, str, states=False) == []
    assert list(tmp_path.iterdir()) == []


def test_files_are_private(make: Make, before: list[int], tmp_path: Path) -> None:
    folder = segments(tmp_path)[0].parent
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert (folder.stat().st_mode & 0o777, folder.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match="no private folder"):
        make()


def test_another_identity_is_ignored_and_leaves_by_the_cap(
    make: Make, before: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "ramify"):
        local = make(identity=ID, most=10 * PAGE_BYTES)
    assert len([text for text in caplog.messages if "other models or options" in text]) == 1
    (result,) = complete(local, PROMPT)
    assert (result.ids, result.usage.cached_tokens) == (before, 0)
    assert len(segments(tmp_path)) == 1
    close(local)
    assert {path.parent.name for path in segments(tmp_path)} == {ID}


def test_the_last_pages_of_the_least_recently_used_prefix_leave_at_the_cap(
    make: Make, tmp_path: Path
) -> None:
    local = make(most=20 * PAGE_BYTES)  # so a segment has two pages
    prompts = [[place, *PROMPT] for place in range(3)]
    for prompt in prompts[:2]:
        complete(local, prompt, max_tokens=1)
        close(local)
    local.cache.flush()
    (used,) = complete(local, prompts[0])
    assert used.usage.cached_tokens == WHOLE
    close(local)
    complete(local, prompts[2], max_tokens=1)
    close(local)
    local = make(most=20 * PAGE_BYTES)
    found = [complete(local, prompt)[0].usage.cached_tokens for prompt in prompts]
    assert (found[0], found[2]) == (WHOLE, WHOLE)
    assert 0 < found[1] < WHOLE
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 20 * PAGE_BYTES


@pytest.mark.parametrize("pages", [3, 7])
def test_a_prefix_larger_than_the_cap_is_cut_and_written_once(make: Make, tmp_path: Path, pages: int) -> None:
    local = make(most=pages * PAGE_BYTES)
    (first,) = complete(local, PROMPT)
    close(local)
    writer = local.scheduler.cold.writer
    assert (writer._pending_tokens, writer._write) == (0, None), "an idle engine writes no more"
    assert writer.written_bytes == int(files.HELD * pages) * PAGE_BYTES
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= pages * PAGE_BYTES
    (again,) = complete(make(), PROMPT)
    assert (again.ids, again.usage.cached_tokens) == (first.ids, int(files.HELD * pages) * 16)


def test_a_prefix_whose_segments_are_removed_meanwhile_is_written_once(make: Make) -> None:
    """As when engines with other prompts share the folder and its cap."""
    local = make(most=10 * PAGE_BYTES)
    complete(local, PROMPT)
    (store,) = local.scheduler.cold._stores
    begin, begun = store.begin, []

    def removing(scope: str, ids: np.ndarray, first: int) -> Any:
        begun.append(first)
        for path in store.path.glob("*.kv"):
            path.unlink()
        for segment in list(store.index.segments.values()):
            store.index.remove(segment)
        return begin(scope, ids, first)

    store.begin = removing
    close(local)
    assert begun == [0, 1]
    assert local.scheduler.cold.writer._pending_tokens == 0


def segments_of(local: LocalScheduler) -> list[Path]:
    """The files of the segments that `local` knows, in the order in which it wrote them."""
    (store,) = local.scheduler.cold._stores
    return [store.path / name for name in store.index.segments]


def test_nobody_finds_what_another_scope_holds(make: Make) -> None:
    local = make()
    complete(local, PROMPT, scope="a")
    close(local)
    local = make()
    other, none, same = (complete(local, PROMPT, scope=scope)[0] for scope in ("b", "", "a"))
    assert [each.usage.cached_tokens for each in (other, none, same)] == [0, 0, WHOLE]
    assert local.scheduler.stats().cold_tokens == WHOLE


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_an_abort_while_reading_gives_all_back(make: Make, before: list[int], pieces: int) -> None:
    local = make()
    rid = local.submit(PROMPT, **SAMPLING)
    cold = local.scheduler.cold
    assert local.scheduler.stats().waiting == 1
    local.step()
    for _ in range(pieces):
        assert cold._read.job.done.wait(60)
        local.step()
    local.scheduler.receive(Abort(rid=rid))
    local.step()
    assert local.results[rid].finish.reason == "abort"
    assert (cold.held, local.cache.counts().in_use) == (0, 0)
    assert local.cache.match(PROMPT).length == 16 * pieces, "pages that were read stay in the tree"
    (result,) = complete(local, PROMPT)
    assert (result.ids, result.usage.cached_tokens) == (before, WHOLE)


def test_an_abort_before_the_read_begins(make: Make, before: list[int]) -> None:
    local = make()
    rids = [local.submit(PROMPT, **SAMPLING) for _ in range(2)]
    local.scheduler.receive(Abort(rid=rids[1]))
    run(local)
    assert local.results[rids[0]].ids == before
    assert local.results[rids[1]].finish.reason == "abort"


def test_others_go_on_while_a_request_reads(make: Make, before: list[int]) -> None:
    local = make()
    (alone,) = complete(make(identity=ID), OTHER)
    held, other = (local.submit(prompt, **SAMPLING) for prompt in (PROMPT, OTHER))
    cold = local.scheduler.cold
    while not local.results[other].ended:
        local._step()  # the read goes on between steps, or not
    assert local.results[other].ids == alone.ids
    run(local)
    assert local.results[held].ids == before
    assert cold.tokens == WHOLE


def test_a_read_gives_way_to_running_requests(make: Make, before: list[int]) -> None:
    local = make(num_pages=12)
    long = local.submit(OTHER[:90], max_tokens=60, ignore_eos=True)  # it needs 6 pages, then 10
    local.step()
    held = local.submit(PROMPT[:100], **SAMPLING)
    cold, disk = local.scheduler.cold, threading.Event()
    cold._worker.run(disk.wait)
    local.step()
    assert cold._read is not None
    while cold._read is not None:
        local.step()
    assert not local.results[long].ended
    disk.set()
    run(local)
    assert len(local.results[long].ids) == 60
    assert local.results[held].usage is not None
    assert local.cache.counts().in_use == 0


def test_a_disk_that_does_not_answer_is_given_up(make: Make, before: list[int]) -> None:
    now = 0.0
    local = make(clock=lambda: now)
    cold, disk = local.scheduler.cold, threading.Event()
    cold.gate.tokens.learn(1.0, 1000.0)
    cold._worker.run(disk.wait)
    held = local.submit(PROMPT, **SAMPLING)
    local.step()
    assert cold.wait_s == tier.LEAST_LIMIT_S
    now += tier.LEAST_LIMIT_S
    local.step()
    run(local)
    result = local.results[held]
    assert (result.ids, result.usage.cached_tokens) == (before, 0)
    local.cache.flush()
    assert complete(local, PROMPT)[0].usage.cached_tokens == 0, "nothing more is asked of it"
    disk.set()
    cold._worker.run(lambda: None).done.wait(60)
    local.cache.flush()
    assert complete(local, PROMPT)[0].usage.cached_tokens == WHOLE


def test_no_more_pages_are_read_than_there_is_room_for(make: Make, before: list[int]) -> None:
    local = make(num_pages=12)
    local.submit(OTHER[:100], max_tokens=50, ignore_eos=True)
    local.step()
    local.submit(PROMPT, **SAMPLING)
    local.step()
    assert len(local.scheduler.cold._read.pages) == 5


def test_a_request_for_which_reading_does_not_pay_is_computed(make: Make, before: list[int]) -> None:
    local = make()
    local.scheduler.cold.gate.pays = lambda tokens, size: tokens > WHOLE
    (result,) = complete(local, PROMPT)
    assert (result.ids, result.usage.cached_tokens) == (before, 0)
    assert local.scheduler.stats().cold_tokens == 0


def test_the_gate_weighs_measured_times() -> None:
    gate = Gate()
    assert gate.pays(16, 1 << 30), "unknown times: read"
    gate.tokens.learn(0.25, 1000)
    assert gate.pays(16, 1 << 30)
    gate.bytes.learn(1.0, 1.2e9)
    assert gate.pays(512, 512 * 23040)
    assert not gate.pays(12, 12 * 23040), "the overhead alone takes as long"
    gate.bytes.learn(1000.0, 1.2e9)
    assert not gate.pays(512, 512 * 23040), "a slow disk"


def test_the_pace_of_computing_is_known_after_a_restart(make: Make) -> None:
    local = make()
    complete(local, PROMPT)
    close(local)
    known = local.scheduler.stats().cold_token_s
    assert known > 0
    assert make().scheduler.stats().cold_token_s == pytest.approx(known)


def test_flushing_the_cache_forgets_the_files(make: Make, before: list[int], tmp_path: Path) -> None:
    local = make()
    local.scheduler.receive(FlushCache(rid="f"))
    (result,) = complete(local, PROMPT)
    assert result.usage.cached_tokens == 0
    local.scheduler.cold._worker.run(lambda: None).done.wait(60)
    assert segments(tmp_path) == []


@pytest.mark.parametrize("reads", [False, True])
def test_flushing_the_cache_frees_the_pages_that_the_tier_uses(
    make: Make, before: list[int], tmp_path: Path, reads: bool
) -> None:
    local = make()
    cold = local.scheduler.cold
    rid = local.submit(PROMPT if reads else OTHER, **SAMPLING)
    if reads:
        local.step()
        assert cold._read.job.done.wait(60)
        local.step()
        assert cold._read.copied
    else:
        run(local)
        cold.writer._go_on(busy=False)
        assert cold.writer._write.lock is not None
    local.scheduler.receive(FlushCache(rid="f"))
    assert local.cache.counts().free == local.cache.num_pages
    run(local)
    assert local.results[rid].usage.cached_tokens == 0
    cold._worker.run(lambda: None).done.wait(60)
    assert segments(tmp_path) == []


def test_writing_waits_for_idle_time(make: Make) -> None:
    now = 0.0
    local = make(clock=lambda: now)
    cold = local.scheduler.cold
    complete(local, PROMPT)
    step_until_still(local)
    assert cold.writer.written_bytes == 0
    assert cold.wait_s == pytest.approx(writer.IDLE_S)
    now = writer.IDLE_S + 0.01
    assert cold.wait_s == 0.0
    step_until_still(local)
    assert cold.writer.written_bytes == 8 * PAGE_BYTES
    assert cold.wait_s is None


def step_until_still(local: LocalScheduler) -> None:
    """Step as the process's loop does while no message arrives: when the tier's thread wakes it."""
    cold = local.scheduler.cold
    for _ in range(50):
        local.step()
        cold._worker.run(lambda: None).done.wait(60)


def test_twice_used_prefixes_are_written_while_requests_run(make: Make) -> None:
    now = 0.0
    local = make(clock=lambda: now)
    complete(local, PROMPT[:40], max_tokens=1)
    complete(local, PROMPT[:40], max_tokens=1)
    local.submit(OTHER, max_tokens=1000, ignore_eos=True)
    for _ in range(100):
        now += 0.2  # the time that pieces may take is a share of it
        local.step()
        local.scheduler.cold._worker.run(lambda: None).done.wait(60)
    assert local.scheduler.cold.writer.written_bytes == 2 * PAGE_BYTES


def test_a_prefix_is_read_before_a_tool_returns(make: Make) -> None:
    now = 0.0
    local = make(clock=lambda: now)
    cold = local.scheduler.cold
    cold.gate.bytes.learn(1.0, 1e9)

    def call(prompt: list[int], **more: Any) -> Result:
        hint = ProgramHint(program="p", name="p", lease_s=600.0, branch="b", **more)
        return complete(local, prompt, hint=hint)[0]

    first = call(PROMPT, next_use="tool")
    now = 1.0
    step_until_still(local)
    assert cold.writer.written_bytes > 0
    local.cache.flush()
    local.scheduler.receive(AwaitTools(program="p", branch="b", tools=("search",)))
    assert 0 < cold.wait_s < 2.0, "the prior of tools is 2 s"
    now += cold.wait_s
    step_until_still(local)
    assert cold.tokens == 128
    counts = local.cache.counts()
    assert (counts.leased, counts.in_use) == (8, 0)
    turn = call([*PROMPT, *first.ids, *OTHER[:9]])
    assert turn.usage.cached_tokens == 128
    assert cold.tokens == 128, "read before the request came"


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (errno.EROFS, "create"),
        (errno.ENOSPC, "create"),
        (errno.ENOSPC, "first write"),
        (errno.ENOSPC, "last write"),
    ],
)
def test_a_disk_that_takes_nothing_costs_one_line(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
    call: str,
) -> None:
    class Failing(NewFile):
        def __init__(self, path: str) -> None:
            if call == "create":
                raise OSError(error, os.strerror(error))
            super().__init__(path)

        def write(self, offset: int, data: Any) -> None:
            if call == "first write" or offset == 0:
                raise OSError(error, os.strerror(error))
            super().write(offset, data)

    local = make()
    with monkeypatch.context() as broken:
        broken.setattr(files, "NewFile", Failing)
        for prompt in (PROMPT, OTHER):
            (result,) = complete(local, prompt)
            assert result.finish.reason == "length"
            local.scheduler.cold.writer.close(60)
            local.scheduler.cold._worker.run(lambda: None).done.wait(60)
    assert [text for text in caplog.messages if os.strerror(error) in text] == caplog.messages
    assert len(caplog.messages) == 1
    assert [path for path in tmp_path.glob("cold/*/*") if path.name != "pace"] == []
    complete(local, PROMPT)
    close(local)
    assert segments(tmp_path), "the disk has room again"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of five pages at the cold tier's folder."""
    folder = tmp_path / "cold"
    folder.mkdir(mode=0o700)
    size = f"size={5 * PAGE_BYTES},mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="needs mount")
def test_a_full_and_a_read_only_file_system(make: Make, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = make()
    expected = [complete(local, prompt)[0].ids for prompt in (PROMPT[:50], OTHER)]
    close(local)
    assert caplog.messages == [
        f"the cold tier writes nothing for now: [Errno 28] {os.strerror(errno.ENOSPC)}"
    ]
    assert len(list(disk.glob("*/*"))) == 2, "one segment and the pace"
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    caplog.clear()
    local = make()
    found = [complete(local, prompt)[0] for prompt in (PROMPT[:50], OTHER)]
    close(local)
    assert [result.ids for result in found] == expected
    assert [result.usage.cached_tokens for result in found] == [48, 0], "what is there is read"
    assert len(caplog.messages) == 1
    assert os.strerror(errno.EROFS) in caplog.messages[0]


def test_a_folder_that_cannot_be_used_costs_one_line_and_the_tier(
    tiny_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    pool = LocalScheduler(tiny_model).runner.pool
    config = EngineConfig(cold_dir=str(tmp_path / "file" / "cold"))
    assert open_stores(config, pool, lambda: "x", states=False) == []
    assert len(caplog.messages) == 1
    assert "there is no cold tier" in caplog.messages[0]


def test_options_that_exclude_a_cold_tier_are_refused_by_name(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match="cold_dir is set and prefix_cache is 'naive'"):
        EngineConfig(cold_dir="x", prefix_cache="naive")
    with pytest.raises(ValueError, match="cold_dir is set and tensor_parallel is 2"):
        EngineConfig(cold_dir="x", tensor_parallel=2)
    with pytest.raises(ValueError, match="cold_gb is 0"):
        EngineConfig(cold_gb=0)
    pool = LocalScheduler(tiny_model).runner.pool
    with pytest.raises(UnsupportedField, match="linear attention"):
        open_stores(EngineConfig(cold_dir="x"), pool, str, states=True)
    with pytest.raises(UnsupportedField, match="host_kv_gb is 2 on the CPU"):
        open_stores(EngineConfig(host_kv_gb=2), pool, str, states=False)


def test_engines_share_a_folder(make: Make, before: list[int], tmp_path: Path) -> None:
    one, two = make(), make()
    for path in segments(tmp_path):
        path.unlink()  # as another engine does at the cap
    (result,) = complete(one, PROMPT)
    assert (result.ids, result.usage.cached_tokens) == (before, 0)
    assert one.scheduler.stats().cold_damaged_segments == 0
    close(one)
    (unfound,) = complete(two, PROMPT)
    assert unfound.usage.cached_tokens == 0, "it has read the folder's list before"
    assert complete(make(), PROMPT)[0].usage.cached_tokens == WHOLE


def test_only_the_tiers_own_files_are_removed(tmp_path: Path) -> None:
    hexadecimal = "0123456789abcdef"
    kept = [tmp_path / "photos" / f"{hexadecimal}.kv", tmp_path / ID / "notes.kv", tmp_path / "d.kv" / "a"]
    kept.append(tmp_path / ID / f"{hexadecimal}.kv" / "a")  # in a folder with the name of a segment
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 500)
        os.utime(path, (1, 1))
    (tmp_path / ID).chmod(0o700)
    store = FileStore(tmp_path, ID, **{**STORE, "most_bytes": 700})
    for place in range(8):
        write_segment(store, np.arange(8, dtype=np.int32) + 100 * place)
    assert [path.read_bytes() for path in kept] == [b"x" * 500] * 4
    assert 0 < len(store.index.segments) < 8


def test_a_file_that_cannot_be_removed_costs_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, ID, **{**STORE, "most_bytes": 500})
    write_segment(store, np.arange(8, dtype=np.int32))
    write_segment(store, np.arange(8, dtype=np.int32) + 100)

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as kept:
        kept.setattr(files, "remove", refuse)
        with pytest.raises(OSError, match="cannot be removed"):
            store.begin("", np.arange(8, dtype=np.int32) + 200, 0)
    write_segment(store, np.arange(8, dtype=np.int32) + 200)


def test_unfinished_files_of_other_identities_are_removed(tmp_path: Path) -> None:
    abandoned = FileStore(tmp_path, "0e" * 16, **STORE).begin("", np.arange(8, dtype=np.int32), 0)
    living = FileStore(tmp_path, "0e" * 16, **STORE).begin("", np.arange(8, dtype=np.int32), 0)
    os.close(abandoned._lock)  # as when its process dies
    FileStore(tmp_path, ID, **STORE)
    assert list(tmp_path.glob("*/*.part")) == [living._path]
    abandoned._file.close(keep=False)
    living.cancel()


def test_a_segment_that_cannot_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    store = FileStore(tmp_path, ID, **STORE)
    descriptors = len(os.listdir("/dev/fd"))
    with monkeypatch.context() as broken:
        broken.setattr(files.fcntl, "flock", refuse)
        with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
            store.begin("", np.arange(8, dtype=np.int32), 0)
    assert list(tmp_path.glob("*/*")) == []
    assert len(os.listdir("/dev/fd")) == descriptors


def test_a_truncated_file_counts_as_damaged(make: Make, before: list[int], tmp_path: Path) -> None:
    (path,) = segments(tmp_path)
    os.truncate(path, 10)
    local = make()
    assert local.scheduler.stats().cold_damaged_segments == 1
    assert not path.exists()


def test_a_damaged_page_is_computed(make: Make, before: list[int], tmp_path: Path) -> None:
    (path,) = segments(tmp_path)
    local = make()
    flip(path, path.stat().st_size - 4 * PAGE_BYTES + 5)  # in page 4 of 8
    (result,) = complete(local, PROMPT)
    assert (result.ids, result.usage.cached_tokens) == (before, 4 * 16)
    assert local.scheduler.stats().cold_damaged_segments == 1
    close(local)
    assert complete(make(), PROMPT)[0].usage.cached_tokens == WHOLE, "it was written again"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


STORE = {"page_size": 4, "page_bytes": 96, "most_bytes": 1 << 20}


def write_segment(store: Any, ids: np.ndarray, first: int = 0, scope: str = "") -> torch.Tensor:
    """Write the pages of `ids` from page `first` on to `store`; returns them."""
    pages = torch.from_numpy(np.random.default_rng(int(ids.sum())).integers(0, 256, (len(ids) // 4, 96)))
    pages = pages.to(torch.uint8)
    writing = store.begin(scope, ids, first)
    for page in pages[first:]:
        writing.write(page[None])
    done = writing.finish()
    for name in done.removed:
        store.index.remove(store.index.segments[name])
    store.index.add(done.segment)
    return pages[first:]


def read_all(store: Any, ids: np.ndarray, scope: str = "") -> torch.Tensor | None:
    """The pages of `ids` in `store`, as far as they can be read."""
    found = []
    for segment, first, count in store.index.find(ids, scope, 0):
        try:
            found.append(store.read(segment, first, count))
        except (OSError, BadSnapshot):
            break
    return torch.cat(found) if found else None


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_never_gives_other_bytes(tmp_path: Path, data: st.DataObject) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    store = FileStore(folder, ID, **STORE)
    ids = np.arange(20, dtype=np.int32)
    pages = write_segment(store, ids, scope="s")
    (path,) = folder.glob("*/*.kv")
    size = path.stat().st_size
    opened = data.draw(st.booleans(), "opened before the damage")
    if opened:
        assert read_all(store, ids, "s").equal(pages)
    if data.draw(st.booleans(), "flip"):
        with path.open("r+b") as file:
            at = data.draw(st.integers(0, size - 1), "at")
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ data.draw(st.integers(1, 255), "bits")]))
    else:
        os.truncate(path, data.draw(st.integers(0, size - 1), "length"))
    for each in (store, FileStore(folder, ID, **STORE)):
        found = read_all(each, ids, "s")
        assert found is None or found.equal(pages[: len(found)])
        assert read_all(each, ids, "") is None


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np, torch
from ramify.runtime.cold import files
from tests.runtime.test_cold import ID, STORE, read_all, write_segment

class Killed(files.NewFile):
    left = 0
    def write(self, offset, data):
        view = memoryview(data).cast("B")
        done = view[: Killed.left]
        super().write(offset, done)
        Killed.left -= len(done)
        if len(done) < len(view):
            os.kill(os.getpid(), signal.SIGKILL)

files.NewFile = Killed
ids = np.arange(20, dtype=np.int32)
whole = folders = 0
for at in range(0, 1000, 11):
    folder = Path(sys.argv[1]) / str(at)
    child = os.fork()
    if not child:
        Killed.left = at
        store = files.FileStore(folder, ID, **STORE)
        write_segment(store, ids[:8])
        write_segment(store, ids, 2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    Killed.left = 1 << 30
    store = files.FileStore(folder, ID, **STORE)
    found = read_all(store, ids)
    assert not list(folder.glob("*/*.part"))
    count = 0 if found is None else len(found)
    assert count in (0, 2, 5), count
    assert (count == 5) == (status == 0), (count, status)
    print(at, count)
"""


@pytest.mark.slow
def test_a_process_killed_at_any_byte_leaves_whole_segments(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"0", "2", "5"}


@pytest.mark.parametrize("make_store", [lambda path: FileStore(path, ID, **STORE), lambda path: memory()])
def test_stores_have_one_interface(tmp_path: Path, make_store: Callable[[Path], Any]) -> None:
    store, ids = make_store(tmp_path), np.arange(20, dtype=np.int32)
    first, rest = write_segment(store, ids[:8]), write_segment(store, ids, 2)
    assert read_all(store, ids).equal(torch.cat([first, rest]))
    assert store.index.find(ids + 1, "", 0) == []
    segment = store.index.segments[next(iter(store.index.segments))]
    assert store.seconds_a_byte(segment) > 0
    store.begin("", ids, 0).cancel()
    store.drop(segment)
    with pytest.raises(FileNotFoundError):
        store.read(segment, 0, 1)
    with pytest.raises(OSError, match="segment"):
        store.begin("", np.arange(4 << 20, dtype=np.int32), 0)


def memory(most: int = 1 << 20) -> MemoryStore:
    return MemoryStore(page_size=4, page_bytes=96, most_bytes=most, pinned=False)


def test_memory_drops_the_least_recently_used_segments() -> None:
    store = memory(most=4 * 96)
    one, two, three = (np.arange(8, dtype=np.int32) + 100 * place for place in range(3))
    write_segment(store, one)
    write_segment(store, two)
    store.touch(next(iter(store.index.segments.values())))
    write_segment(store, three)
    assert [read_all(store, ids) is not None for ids in (one, two, three)] == [True, False, True]
    assert store.bytes == 4 * 96


def test_pinned_memory_counts_as_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **more: empty(*shape, **more))
    store = MemoryStore(page_size=4, page_bytes=96, most_bytes=600, pinned=True)
    for place in range(3):
        write_segment(store, np.arange(8, dtype=np.int32) + 100 * place)
    assert (len(store.index.segments), store.bytes) == (2, 2 * 256)
    store.drop(next(iter(store.index.segments.values())))
    assert store.bytes == 256


def test_memory_and_files_together(tiny_model: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """As on a CUDA device: evicted pages are in the host's memory, and what that has dropped in files."""

    def stores(local: LocalScheduler) -> list[Any]:
        pool = local.runner.pool
        sizes = {"page_size": pool.page_size, "page_bytes": pool.page_bytes}
        return [
            MemoryStore(most_bytes=9 * PAGE_BYTES, pinned=False, **sizes),
            FileStore(tmp_path / "cold", ID, most_bytes=1 << 30, **sizes),
        ]

    local = LocalScheduler(tiny_model, cold=stores, tuning=PAGE_BY_PAGE)
    local.scheduler.cold.gate.pays = lambda tokens, size: tokens > 0
    first = complete(local, PROMPT, OTHER)
    close(local)
    assert [len(store.index.segments) for store in local.scheduler.cold._stores] == [9, 2]
    local.cache.flush()
    again = complete(local, PROMPT, OTHER)
    assert [each.ids for each in again] == [each.ids for each in first]
    assert [each.usage.cached_tokens for each in again] == [WHOLE, WHOLE]


def test_a_store_that_fails_rests_alone(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stores(local: LocalScheduler) -> list[Any]:
        sizes = {"page_size": local.runner.pool.page_size, "page_bytes": local.runner.pool.page_bytes}
        return [
            FileStore(tmp_path / "cold", ID, most_bytes=1 << 30, **sizes),
            MemoryStore(most_bytes=1 << 30, pinned=False, **sizes),
        ]

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    local = LocalScheduler(tiny_model, cold=stores)
    monkeypatch.setattr(files, "NewFile", refuse)
    for prompt in (PROMPT, OTHER):
        complete(local, prompt)
    close(local)
    assert [len(store.index.segments) for store in local.scheduler.cold._stores] == [0, 2]
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_an_engine_core_that_is_killed_finds_what_was_used_once(tiny_folder: Path, tmp_path: Path) -> None:
    """For real: `kill -9` when idle, then a graceful end at once, and in both cases a new process."""
    options = {"dtype": "float32", "num_pages": 256, "threads": 1, "cold_dir": str(tmp_path / "cold")}

    def found(engine: Engine, prompt: list[int]) -> tuple[tuple[int, ...], int]:
        output = engine.complete(prompt, **SAMPLING)
        return output.ids, output.usage.cached_tokens

    one, two = (
        [int(token) for token in np.random.default_rng(seed).integers(0, 256, 480)] for seed in (1, 2)
    )
    with Engine(str(tiny_folder), **options) as engine:
        first, none = found(engine, one)
        while not engine.stats().cold_written_bytes:
            time.sleep(0.02)
        os.kill(engine.pids["scheduler"], signal.SIGKILL)
        assert found(engine, one) == (first, 464)
        other, none = found(engine, two)
    with Engine(str(tiny_folder), **options) as engine:
        assert found(engine, two) == (other, 464)
    assert none == 0
