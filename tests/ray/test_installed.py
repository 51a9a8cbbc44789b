"""`rm.ray` without Ray, with another version of it, and with the one that it is tested with."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import ramify as rm
from ramify.ray.installed import VERSION, require


def test_the_name_is_there_without_importing_ray() -> None:
    code = "import sys, ramify as rm; rm.ray; assert not {'ray', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_ray_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(rm.InvalidRequest, match=r"pip install 'ramify-llm\[ray\]'") as refused:
        require("ray.data")
    assert refused.value.field == "ray"


def test_another_minor_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("ray")
    other.__version__ = "2.6.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", other)
    with pytest.raises(rm.InvalidRequest, match=rf"2\.6\.0; it must be {VERSION}"):
        require()


@pytest.mark.ray
def test_a_cluster_runs_a_task(ray_cluster: object) -> None:
    ray = require()
    assert ray is ray_cluster

    @ray.remote
    def twice(n: int) -> int:
        return 2 * n

    assert ray.get(twice.remote(21)) == 42
    assert require("ray.data").__name__ == "ray.data"
    assert require("ray.serve").__name__ == "ray.serve"
