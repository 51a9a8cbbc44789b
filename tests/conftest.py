"""Fixtures and settings of all tests."""

import gc
import os
import random

import numpy as np
import pytest
import torch

from ramify import machine_code


def pytest_configure() -> None:
    """Each of several test processes keeps to one core, with the engines that it starts.

    An engine's threads wait for each other in every layer. Where two engines share two cores, they wait for
    cores as well: in turn on one core each, tests of engines take a quarter less.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    # Tests that set RAMIFY_HOME to an empty folder find compiled code all the same.
    os.environ["NUMBA_CACHE_DIR"] = str(machine_code.root())
    gc.disable()


def pytest_collection_finish() -> None:
    """Objects of 9,000 tests and their imports live to the end. Collecting them again and again takes a third
    of the time to collect the tests, and 5% of their own."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same numbers alone, in any order, and in a process of its own."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
