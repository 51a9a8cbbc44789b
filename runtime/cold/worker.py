"""The thread in which a cold tier reads and writes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class Job:
    """A call in the worker's thread: it has a `result` or an `error` once `done` is set."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._call, self._arguments = call, arguments
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        self.seconds = 0.0

    def run(self) -> None:
        began = time.perf_counter()
        try:
            self.result = self._call(*self._arguments)
        except Exception as error:
            self.error = error
        self.seconds = time.perf_counter() - began
        self.done.set()


class Worker:
    """A thread that runs jobs in order, and calls `wake` after each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._run_all, name="cold tier", daemon=True).start()

    def run(self, call: Callable[..., Any], *arguments: Any) -> Job:
        job = Job(call, *arguments)
        self._jobs.put(job)
        return job

    def _run_all(self) -> None:
        while True:
            self._jobs.get().run()
            self._wake()
