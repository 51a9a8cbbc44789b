"""Limits of a child process: its processor time, its memory, its priority, and its parent's death."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
IDLE: int | None = getattr(os, "SCHED_IDLE", None)
"""The scheduling policy of processes that run only on idle cores (sched(7)); None if the system has no such
policy."""


class Usage(NamedTuple):
    cpu_s: float
    """Processor time in user and system mode."""
    wants_core: bool
    """Whether the process is running or waits for a core."""


def usage_of(pid: int, proc: Path = PROC) -> Usage | None:
    """Processor time and state of a process (proc(5)); None if the system has no /proc."""
    if not proc.is_dir():
        return None
    fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return Usage((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R")


def run_on_idle_cores(pid: int, policy: int | None = IDLE) -> None:
    """Let the process run on idle cores only, by the scheduling policy `policy`. If `policy` is None, give
    the process the lowest priority.

    The lowest priority (nice 19) alone is not enough: while 100 hostile constraints compiled, a model on two
    threads took 1.34 times as long for a token with nice 19, and 1.04 times as long with SCHED_IDLE.
    """
    if policy is not None:
        os.sched_setscheduler(pid, policy, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, pid, 19)


def die_with(parent: int, timeout_s: float, platform: str = sys.platform) -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason (PR_SET_PDEATHSIG). On
    platforms without such a signal, limit the processor time of this process to 1 to 2 s more than
    `timeout_s` instead."""
    if platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        seconds = math.ceil(timeout_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if os.getppid() != parent:
        os._exit(0)


def limit_memory(extra_bytes: int, statm: Path = PROC / "self" / "statm") -> None:
    """Let this process map at most `extra_bytes` more memory than it maps now (RLIMIT_AS). Does nothing on
    systems that do not report the mapped memory (all but Linux)."""
    if not statm.is_file():
        return
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + extra_bytes, resource.RLIM_INFINITY))
