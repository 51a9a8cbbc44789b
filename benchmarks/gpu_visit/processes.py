"""Manners of a part's processes."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2)"""


def die_with_parent() -> None:
    """Abort, with all threads' stacks, as soon as the parent is gone: nothing of a visit outlives it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGABRT)


def leave_no_core() -> None:
    """Writing the memory of a process with a GPU to disk takes longer than a part has."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
