"""Waiting for changes that Ray makes in other processes and reports to nobody."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    """Check every 0.1 s. Raises AssertionError after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"it did not come about within {limit_s:g} s"
        time.sleep(0.1)
