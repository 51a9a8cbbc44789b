"""The cores that this process may use. Systems without affinity, such as macOS, have all of theirs."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """The numbers of the cores, ascending; at least one."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def bind(pid: int, cores: tuple[int, ...]) -> None:
    """Keep a process, and its threads and children, on `cores`, where the system can.

    Raises `ProcessLookupError` where there is no such process any more.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cores)
