"""The processes of a part: rules for the processes themselves, and a view of all of them from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

MARK = "GPU_VISIT_PART"
"""Environment variable that all processes of a part inherit. Processes that start a session of their own are
found by it."""
PR_SET_PDEATHSIG = 1
"""prctl(2)"""


def die_with_parent() -> None:
    """Abort, with all threads' stacks, as soon as the parent dies, so that nothing of a visit outlives it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGABRT)


def leave_no_core() -> None:
    """Disable core dumps: writing the memory of a process with a GPU to disk takes longer than a part has."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


class Started:
    """The processes of a part: those in its group, and those that left the group but carry the part's mark.

    A process that was seen once counts until it has closed all its files. A dying process loses its
    environment variables earlier than it closes the device's files, and only closing them frees its memory on
    the device.
    """

    def __init__(self, group: int, mark: str) -> None:
        self._group, self._mark = group, f"{MARK}={mark}".encode()
        self._seen: set[int] = set()

    def look(self) -> list[int]:
        """Remember all existing processes of the part. Returns the ids of those that carry the mark."""
        marked = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):  # another user's, or gone meanwhile
                if int(_stat(folder)[2]) == self._group:
                    self._seen.add(int(folder.name))
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    marked.append(int(folder.name))
        self._seen.update(marked)
        return marked

    def signal(self, number: signal.Signals) -> None:
        marked = self.look()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) != self._group:
                    os.kill(pid, number)

    def living(self) -> list[int]:
        """Ids of the part's processes that have not yet closed all their files."""
        self.look()
        return sorted(filter(_has_files, self._seen))


def _has_files(pid: int) -> bool:
    """Whether a thread of the process is no zombie yet. A thread closes its files before becoming one."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, IndexError):
            if _stat(task)[0] not in (b"Z", b"X"):
                return True
    return False


def _stat(folder: Path) -> list[bytes]:
    """State, parent, group and further fields of a process or a thread (proc(5))."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()
