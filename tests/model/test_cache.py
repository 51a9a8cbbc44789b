"""The cache folder when processes die, disks fail and entries vanish."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ramify import cache

DIES_WHILE_FLUSHING = """
import os, pathlib, sys, time
from ramify import cache
cache._flush = lambda path: time.sleep(60)
cache.opened(pathlib.Path(sys.argv[1]), lambda folder: (folder / "x").write_text("whole"), os.listdir)
os._exit(0)
"""
DIES_WHILE_BUILDING = """
import os, pathlib, sys
from ramify import cache
build = lambda folder: ((folder / "x").write_text("half"), os._exit(0))
cache.opened(pathlib.Path(sys.argv[1]), build, os.listdir)
"""


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    return tmp_path / "kind" / "entry"


def left_by(script: str, entry: Path) -> None:
    subprocess.run([sys.executable, "-c", script, str(entry)], check=True)
    assert not entry.exists()


def content(folder: Path) -> str:
    return (folder / "x").read_text()


def build_anew(folder: Path) -> None:
    (folder / "x").write_text("new")


def files_of(entry: Path) -> list[str]:
    return sorted(path.name for path in entry.parent.iterdir())


@pytest.mark.skipif(not cache._boot(), reason="the kernel has no id of its run")
def test_what_was_written_before_its_process_died_is_used(entry: Path) -> None:
    left_by(DIES_WHILE_FLUSHING, entry)
    assert cache.opened(entry, build_anew, content) == "whole"
    cache.finish()
    assert content(entry) == "whole"
    assert files_of(entry) == [".entry.lock", "entry"]


@pytest.mark.parametrize("boot", ["another", ""])
def test_what_was_not_on_disk_is_built_anew_after_a_start_of_the_system(
    entry: Path, boot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by(DIES_WHILE_FLUSHING, entry)
    monkeypatch.setattr(cache, "_boot", lambda: boot)
    assert cache.opened(entry, build_anew, content) == "new"
    cache.finish()
    assert content(entry) == "new"
    assert files_of(entry) == [".entry.lock", "entry"]


def test_what_was_half_written_is_built_anew(entry: Path) -> None:
    left_by(DIES_WHILE_BUILDING, entry)
    assert cache.opened(entry, build_anew, content) == "new"
    cache.finish()
    assert content(entry) == "new"


def test_a_disk_that_fails_after_the_files_are_in_use_is_an_error(
    entry: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_flush", fail)
    assert cache.opened(entry, build_anew, content) == "new"
    cache.finish()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "No space left" in record.message
    assert "restart the engine" in record.message
    assert files_of(entry) == [".entry.lock"]


def test_entries_that_vanish_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    for name in ("gone", "kept", "renamed"):
        (tmp_path / "packed" / name).mkdir(parents=True)
        (tmp_path / "packed" / name / "model.pt").write_bytes(bytes(10))
    stat = os.stat

    def late(path: object, **options: bool) -> os.stat_result:
        """Stat after another process has moved or removed the file."""
        if str(path).endswith("renamed/model.pt"):
            Path(str(path)).rename(tmp_path / "elsewhere")
        if str(path).endswith("gone"):
            cache.shutil.rmtree(str(path), ignore_errors=True)
        return stat(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", late)
    assert sorted((found.name, found.size) for found in cache.entries()) == [("kept", 10), ("renamed", 0)]
