"""Systems other than Linux (docs/platforms.md): each test takes away something that only Linux has."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ramify import cache, machine_code
from ramify.errors import EngineError
from ramify.runtime import host_memory
from ramify.runtime.config import EngineConfig
from ramify.runtime.cores import usable_cores
from ramify.runtime.executor import memory
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.kv_transfer import files
from ramify.runtime.model.shape.hf_config import config_from_hf
from ramify.runtime.processes import shares, worker_start

SHAPE = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture
def missing(tmp_path: Path) -> Path:
    return tmp_path / "missing"


@pytest.mark.parametrize(("text", "free"), [("MemAvailable:  2097152 kB\n", 2.0), (None, 8.0), ("?\n", 8.0)])
def test_without_meminfo_all_of_the_memory_is_free(
    text: str | None, free: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    monkeypatch.setattr(os, "sysconf", lambda name: 8 << 20 if name == "SC_PHYS_PAGES" else 1 << 10)
    with pytest.raises(EngineError, match=rf"has 8\.0\d* GiB, of which {free:.1f}\d* GiB are free"):
        memory.check_host(EngineConfig(device="cpu", kv_memory_gb=9), 9 << 30, 0)
    assert host_memory.mapped_weights() == 0


def test_without_cpuinfo_kernels_are_cached_by_the_processors_name(
    monkeypatch: pytest.MonkeyPatch, missing: Path
) -> None:
    with_it = machine_code._processor.__wrapped__()
    assert with_it.startswith(("flags", "Features"))
    monkeypatch.setattr(machine_code, "_CPUINFO", missing)
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert machine_code._processor.__wrapped__() == "arm"


def test_without_topology_cores_keep_their_order(monkeypatch: pytest.MonkeyPatch, missing: Path) -> None:
    monkeypatch.setattr(shares, "_TOPOLOGY", missing)
    assert list(shares.whole().cores) == usable_cores()


@pytest.mark.parametrize(
    ("system", "library", "asked"),
    [("linux", True, [0]), ("linux", False, []), ("darwin", True, [])],
    ids=["glibc", "musl", "macOS"],
)
def test_the_heap_is_trimmed_where_malloc_trim_is(
    system: str, library: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    entries = SimpleNamespace(malloc_trim=calls.append) if library else SimpleNamespace()
    monkeypatch.setattr(worker_start.ctypes, "CDLL", lambda _: entries)
    monkeypatch.setattr(worker_start.sys, "platform", system)
    worker_start.trim_heap()
    assert calls == asked


def has_no_huge_pages(*_: object) -> None:
    raise OSError("no huge pages")


@pytest.mark.parametrize("without", ["constant", "kernel"])
def test_kv_pages_need_no_huge_pages(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "constant":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
        monkeypatch.setattr(mmap, "mmap", has_no_huge_pages)  # nor the flags that Linux alone has
    else:
        refusing = type("Refusing", (mmap.mmap,), {"madvise": has_no_huge_pages})
        monkeypatch.setattr(mmap, "mmap", refusing)
    pool = KvPool(config_from_hf(SHAPE), num_pages=3, page_size=4, dtype=torch.float32)
    data = torch.randint(256, (2, pool.page_bytes), dtype=torch.uint8)
    pool.write_pages([2, 0], data)
    assert torch.equal(pool.read_pages([2, 0]), data)


def test_without_shared_memory_snapshots_are_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: Path
) -> None:
    monkeypatch.setattr(files, "SHARED_MEMORY", missing)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = files.SnapshotFolder()
    assert folder.path.parent == tmp_path
    snapshot = Path(folder.new())
    snapshot.write_bytes(b"pages")
    assert folder.has_room(5)
    folder.close()
    assert not snapshot.exists()


def test_without_a_boot_id_the_cache_takes_what_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: Path
) -> None:
    """Without a boot id, unflushed data cannot be told from the remains of a system crash."""
    monkeypatch.setattr(cache, "_BOOT_ID", missing)
    entry = tmp_path / "cache" / "entry"
    half = entry.with_name(".entry..written")
    half.mkdir(parents=True)
    (half / "x").write_text("old")

    def build(folder: Path) -> None:
        (folder / "x").write_text("new")

    def content(folder: Path) -> str:
        return (folder / "x").read_text()

    assert cache.opened(entry, build, content) == "new"
    cache.finish()
    assert content(entry) == "new"
    assert cache.opened(entry, build, content) == "new"
    assert sorted(path.name for path in entry.parent.iterdir()) == [".entry.lock", "entry"]
