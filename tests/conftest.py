"""Fixtures and settings of all tests."""

import gc
import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from ramify import machine_code


def pytest_configure() -> None:
    """Bind each of several test processes, with the engines that it starts, to one core.

    The threads of an engine wait for each other in every layer. If two engines share two cores, threads wait
    for cores as well. With one core for each engine, tests of engines take a quarter less time.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    # Tests that set RAMIFY_HOME to an empty folder find compiled code all the same.
    os.environ["NUMBA_CACHE_DIR"] = str(machine_code.root())
    # A shell starts its background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a busy machine any example may take longer than the 0.2 s that hypothesis allows.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt the objects of all tests and imports from garbage collection, as they live to the end. Scanning
    them repeatedly takes a third of the time to collect the 9,000 tests, and 5% of the time to run them."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed all generators, so that a test draws the same numbers alone and in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
