"""The number of cores on systems without CPU affinity, such as macOS."""

from __future__ import annotations

import os

import pytest

from ramify.runtime import cores
from ramify.runtime.config import EngineConfig
from ramify.runtime.processes.shares import shares


def test_they_are_those_of_the_affinity() -> None:
    assert cores.usable_cores() == sorted(os.sched_getaffinity(0))


def test_without_affinity_all_are_used_and_nobody_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert cores.usable_cores() == [0, 1, 2, 3]
    found = shares(EngineConfig(replicas=2, device="cpu"))
    assert [share.cores for share in found] == [(0, 1), (2, 3)]
    found[0].bind(os.getpid())
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.usable_cores() == [0]
