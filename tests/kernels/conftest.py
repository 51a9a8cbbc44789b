"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """Restores the number of threads after a test that sets it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads_as_before: None) -> None:
    """Begins the test with one thread, and restores the number after it."""
    torch.set_num_threads(1)
