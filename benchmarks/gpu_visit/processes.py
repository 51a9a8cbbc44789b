"""The processes of a part: their manners, and a view of all of them from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

MARK = "RAMIFY_GPU_VISIT_PART"
"""Variable that a part's processes inherit, also those with sessions of their own: so they are found."""
PR_SET_PDEATHSIG = 1
"""prctl(2)"""


def die_with_parent() -> None:
    """Abort, with all threads' stacks, as soon as the parent is gone: nothing of a visit outlives it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGABRT)


def leave_no_core() -> None:
    """Writing the memory of a process with a GPU to disk takes longer than a part has."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


class Started:
    """The processes of a part: its group, and those that left the group but carry the part's mark.

    A dying process loses its variables before it closes the device's files, which frees its memory there. So
    a process counts once it was seen.
    """

    def __init__(self, group: int, mark: str) -> None:
        self._group, self._mark = group, f"{MARK}={mark}".encode()
        self._seen: set[int] = set()

    def look(self) -> list[int]:
        """Remember the processes that exist; returns the ids of those that carry the mark."""
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
        """Ids of those that have not yet closed all their files."""
        self.look()
        return sorted(filter(_has_files, self._seen))


def _has_files(pid: int) -> bool:
    """Whether any thread of the process is not a zombie: a thread closes its files before it is one."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, IndexError):
            if _stat(task)[0] not in (b"Z", b"X"):
                return True
    return False


def _stat(folder: Path) -> list[bytes]:
    """The state, the parent and the group, and more numbers (proc(5)), of a process or a thread."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()
