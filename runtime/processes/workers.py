"""The processes of a ring before they have orders: started early, as each imports for a while."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ramify.runtime.config import EngineConfig

ROLES = {
    "scheduler": "scheduler.process",
    "tokenizer": "processes.tokenizer",
    "detokenizer": "processes.detokenizer",
}
"""The scheduler first: it takes longest."""

SPIN_COUNT = "10000"
"""Turns of libgomp's waiting loop before a thread sleeps: some tens of microseconds."""


def worker_env(config: EngineConfig) -> dict[str, str]:
    """Compute threads that spin while they wait starve the other processes where cores are few.

    Not spinning at all costs a wake-up of 30 to 60 us at every matrix product; a spin about as long as
    that gave 8 to 25% more tokens/s on two cores.
    """
    env = dict(os.environ)
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.threads is not None:
        env["OMP_NUM_THREADS"] = str(config.threads)
    return env


class Workers:
    """The processes of one ring. At the end of a ``with`` block those that no ring has taken are killed."""

    def __init__(self, config: EngineConfig) -> None:
        env = worker_env(config)
        self._processes = {role: start(module, env) for role, module in ROLES.items()}

    def take(self) -> dict[str, subprocess.Popen[bytes]]:
        """The processes by role; whoever takes them gives them orders, and ends them."""
        processes, self._processes = self._processes, {}
        return processes

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.take().values():
            process.kill()
            process.communicate()


def start(
    role: str, env: dict[str, str], arguments: Sequence[str] = (), *, own_session: bool = True
) -> subprocess.Popen[bytes]:
    """Start a worker, in a session of its own so that a terminal's Ctrl-C reaches the parent alone.

    Linux may share the processor out by session first, and then heed priorities only inside of one
    (sched(7), autogroup): a worker whose children give way to this process must be in its session.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "ramify.runtime.processes.worker_start", role, *arguments],
        stdin=subprocess.PIPE,
        stdout=sys.stderr if _has_fileno(sys.stderr) else subprocess.DEVNULL,
        env=env,
        start_new_session=own_session,
    )


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
