"""One Ray cluster on this machine for the tests with the marker `ray`, skipped by name without Ray."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("ray") is not None
WARNINGS_OF_RAY = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
"""Ignore Ray 2.60's warnings: deprecated arguments of pydantic, and sockets that are left open."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("ray"):
            for one in WARNINGS_OF_RAY:
                item.add_marker(pytest.mark.filterwarnings(one))
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="needs Ray: pip install 'ramify-llm[ray]'"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A new Ray cluster with two processors; the module `ray`."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of workers: they import test modules
    from ramify.ray.installed import require

    ray = require()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield ray
    ray.shutdown()
