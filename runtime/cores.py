"""The cores that this process may use. On systems without affinity, such as macOS, these are all cores."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """The numbers of the usable cores, ascending; at least one."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def bind(pid: int, cores: tuple[int, ...]) -> None:
    """Restrict a process, with its future threads and children, to `cores`, if the system supports that.

    Raises `ProcessLookupError` if the process has ended.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cores)
