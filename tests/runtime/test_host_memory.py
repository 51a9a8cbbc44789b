"""Free memory as the kernel and the cgroups report it, from files as Linux writes them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from ramify.runtime import host_memory as module
from ramify.runtime.host_memory import host_memory, mapped_weights

GIB = 1 << 30


class Files:
    """A fake /proc and a fake /sys/fs/cgroup of a machine with 64 GiB."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"

    def meminfo(self, available: float, mapped: float) -> None:
        self._write(
            self.proc / "meminfo",
            f"MemTotal: {64 << 20} kB\nMemFree: 123 kB\nMemAvailable:   {int(available * (1 << 20))} kB\n"
            f"Active(file): 5 kB\nMapped:  {int(mapped * (1 << 20))} kB\n",
        )

    def cgroup(self, folder: str, limit: float | None, used: float, cached: float, mapped: float) -> None:
        """Of version 2; sizes in GiB, `limit` None for none."""
        here = self.cgroups / folder
        self._write(here / "memory.max", "max\n" if limit is None else f"{int(limit * GIB)}\n")
        self._write(here / "memory.current", f"{int(used * GIB)}\n")
        half = int(cached * GIB / 2)
        stat = f"anon 7\nactive_file {half}\ninactive_file {half}\nfile_mapped {int(mapped * GIB)}\n"
        self._write(here / "memory.stat", stat)

    def version_1(self, folder: str, limit: int, used: float, cached: float, mapped: float) -> None:
        here = self.cgroups / "memory" / folder
        self._write(here / "memory.limit_in_bytes", f"{limit}\n")
        self._write(here / "memory.usage_in_bytes", f"{int(used * GIB)}\n")
        half, mapped_bytes = int(cached * GIB / 2), int(mapped * GIB)
        stat = f"total_active_file {half}\ntotal_inactive_file {half}\ntotal_mapped_file {mapped_bytes}\n"
        self._write(here / "memory.stat", f"active_file 1\nmapped_file 1\n{stat}")

    def process(self, lines: str) -> None:
        self._write(self.proc / "self/cgroup", lines)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Files:
    made = Files(tmp_path)
    monkeypatch.setattr(module, "PROC", made.proc)
    monkeypatch.setattr(module, "CGROUPS", made.cgroups)
    monkeypatch.setattr(os, "sysconf", lambda name: 64 << 20 if name == "SC_PHYS_PAGES" else 1 << 10)
    return made


def gib(mapped: float = 0) -> tuple[float, float]:
    total, free, _ = host_memory(int(mapped * GIB))
    return round(total / GIB, 3), round(free / GIB, 3)


def test_the_page_cache_is_free_but_not_files_that_are_mapped(files: Files) -> None:
    files.meminfo(available=20, mapped=3)
    assert gib() == (64, 17)
    assert gib(mapped=5) == (64, 15), "mapped by this process and not read yet"
    assert gib(mapped=2) == (64, 17), "read already"
    assert gib(mapped=30) == (64, 0)
    assert host_memory().available == 20 * GIB


def test_the_cgroups_of_version_2_bound_both_from_the_own_one_up(files: Files) -> None:
    files.meminfo(available=20, mapped=0)
    files.process("0::/app.slice/ramify.service\n")
    files.cgroup("app.slice/ramify.service", limit=None, used=1, cached=0, mapped=0)
    assert gib() == (64, 20)
    files.cgroup("app.slice", limit=8, used=5, cached=2, mapped=0.5)
    assert gib() == (8, 4.5)
    assert gib(mapped=1) == (8, 4)
    assert host_memory().available == 5 * GIB
    files.cgroup("app.slice/ramify.service", limit=6, used=5.5, cached=0, mapped=0)
    assert gib() == (6, 0.5)


def test_in_a_container_the_root_of_the_mount_is_its_cgroup(files: Files) -> None:
    files.meminfo(available=20, mapped=0)
    files.cgroup("", limit=4, used=1, cached=0.5, mapped=0.5)
    for path in ("/", "/kubepods/pod1"):
        files.process(f"0::{path}\n")
        assert gib() == (4, 3)


def test_the_cgroups_of_version_1(files: Files) -> None:
    files.meminfo(available=20, mapped=0)
    files.process("5:cpu,cpuacct:/a\n4:memory:/docker/1\n0::/\n")
    files.version_1("docker/1", limit=4 * GIB, used=3, cached=1, mapped=0.25)
    files.version_1("", limit=9223372036854771712, used=10, cached=0, mapped=0)
    assert gib() == (4, 1.75)


def test_mapped_files_count_as_weights_and_libraries_do_not(tmp_path: Path) -> None:
    before = mapped_weights()
    for name, counts in (("model.gguf", True), ("small.gguf", False), ("libmodel.so.1", False)):
        path = tmp_path / name
        size = 1 << 16 if name.startswith("small") else 3 << 20
        path.write_bytes(bytes(size))
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            assert mapped_weights() - before == (size if counts else 0)
