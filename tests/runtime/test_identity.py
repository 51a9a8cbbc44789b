"""The KV identity: another one for every change of keys and values, and read from the files once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ramify.runtime.config import EngineConfig
from ramify.runtime.kv_transfer import identity
from ramify.runtime.kv_transfer.identity import kv_identity
from tests.runtime.local import LocalScheduler


@pytest.fixture
def weights(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    return shutil.copytree(tiny_folder, tmp_path / "model")


@pytest.fixture(scope="module")
def pool(tiny_model: Any) -> Any:
    return LocalScheduler(tiny_model).runner.pool


def test_any_byte_of_the_weights_counts(weights: Path, pool: Any) -> None:
    path = weights / "model.safetensors"
    status = path.stat()
    found = {kv_identity(EngineConfig(), pool, weights)}
    places = range(0, status.st_size, max(1, status.st_size // 40))
    for place in places:
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the time of change is another one
        found.add(kv_identity(EngineConfig(), pool, weights))
    assert len(found) == len(places) + 1


def test_a_file_is_read_once_and_paths_do_not_count(
    weights: Path, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kv_identity(EngineConfig(), pool, weights)
    assert kv_identity(EngineConfig(), pool, shutil.copytree(weights, tmp_path / "copy")) == first
    monkeypatch.setattr(identity, "_content_digest", lambda path: pytest.fail(f"{path} is read again"))
    assert kv_identity(EngineConfig(), pool, weights) == first


def test_without_a_cache_folder_files_are_read_each_time(
    weights: Path, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kv_identity(EngineConfig(), pool, weights)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "file"))
    assert kv_identity(EngineConfig(), pool, weights) == first


def test_the_sources_and_the_number_format_count(
    weights: Path, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {kv_identity(EngineConfig(dtype=dtype), pool, weights) for dtype in ("float32", "bfloat16")}
    monkeypatch.setattr(identity, "_sources", lambda package: f"other {package.__name__}")
    found.add(kv_identity(EngineConfig(dtype="float32"), pool, weights))
    assert len(found) == 3
