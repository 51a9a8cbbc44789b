"""Workers that are started before they get their orders: importing takes each of them 0.3 s to 2 s."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ramify.runtime.config import EngineConfig
from ramify.runtime.processes.shares import Share, on_cpu, shares, whole

ROLES = {
    "scheduler": "scheduler.process",
    "tokenizer": "processes.tokenizer",
    "detokenizer": "processes.detokenizer",
}
"""Role → module. The scheduler is first, as it takes longest to import."""

GOMP_SPINCOUNT = "10000"
"""Iterations of libgomp's busy-waiting before a thread sleeps. They take some tens of microseconds."""


def worker_env(config: EngineConfig) -> dict[str, str]:
    """The environment of a worker: the parent's, with settings for compute threads.

    Compute threads that busy-wait starve the other processes where cores are few. Threads that sleep at once
    cost a wake-up of 30 to 60 us at every matrix product. Busy-waiting for about as long as a wake-up takes
    gave 8 to 25% more tokens/s on two cores than either extreme.
    """
    env = dict(os.environ)
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env.setdefault("GOMP_SPINCOUNT", GOMP_SPINCOUNT)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.threads is not None:
        env["OMP_NUM_THREADS"] = str(config.threads)
    return env


class PrestartedWorkers:
    """The processes of one engine core. The end of a ``with`` block kills them unless `take` was called.

    `share` has the cores and GPUs of the processes. None: those of the first replica.
    """

    def __init__(self, config: EngineConfig, share: Share | None = None) -> None:
        env = worker_env(config)
        if config.replicas > 1:
            share = share or shares(config)[0]
            env |= share.env()
        self._processes = {role: start(module, env) for role, module in ROLES.items()}
        ranks = ["scheduler"]
        for index in range(1, config.tensor_parallel):
            ranks.append(f"rank-{index}")
            self._processes[ranks[-1]] = start("executor.rank_process", env, [str(index)])
        if share is not None:
            for process in self._processes.values():
                share.bind(process.pid)
        if len(ranks) > 1 and on_cpu(config):
            for role, own in zip(ranks, (share or whole()).of_ranks(len(ranks)), strict=True):
                own.bind(self._processes[role].pid)

    def take(self) -> dict[str, subprocess.Popen[bytes]]:
        """The processes by role. The caller must give them their orders, and must end them."""
        processes, self._processes = self._processes, {}
        return processes

    @property
    def alive(self) -> bool:
        """Whether the processes wait for their orders: none was taken, and none has ended."""
        return bool(self._processes) and all(one.poll() is None for one in self._processes.values())

    def __enter__(self) -> PrestartedWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.take().values():
            process.kill()
            process.communicate()


def start(
    module: str, env: dict[str, str], arguments: Sequence[str] = (), *, own_session: bool = True
) -> subprocess.Popen[bytes]:
    """Start a worker that runs ``ramify.runtime.<module>``.

    With `own_session` it gets a session of its own, so that a terminal's Ctrl-C reaches the parent alone.
    Otherwise it shares the caller's session, which is meant for a worker of low priority: Linux may divide
    processor time between sessions first and heed niceness only inside one (sched(7), autogroup).
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ramify.runtime.processes.worker_start", module, *arguments],
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
