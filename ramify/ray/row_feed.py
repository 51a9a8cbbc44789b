"""A feed that runs the rows of several batches together, with one window, one breaker and one thread pool.

    batch 1   a1 b1 a2      in flight, at most 2   a1 a2
    batch 2   b2 a3         then, by prefix        a3 b1, then b2

A batch is complete when its last row has ended. So batches 1 and 2 run at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ramify.errors import EngineClosed, ProgramError
from ramify.lang.backends.model_info import model_info
from ramify.lang.batch import runs
from ramify.lang.batch.breaker import Breaker
from ramify.lang.batch.window import Row, Window
from ramify.lang.functions.async_function import AsyncFunction
from ramify.lang.functions.program import Batch, Program
from ramify.lang.state.state import ProgramState
from ramify.loop import wait


class _Inbox:
    """An iterator over the rows that have arrived. After StopIteration, it continues if more rows arrive."""

    def __init__(self) -> None:
        self.rows: deque[Row] = deque()

    def __iter__(self) -> _Inbox:
        return self

    def __next__(self) -> Row:
        try:
            return self.rows.popleft()
        except IndexError:
            raise StopIteration from None


class RowFeed:
    """A thread that runs rows as they arrive.

    Args:
        program: The program that runs for each row.
        batch: The arguments of the batch; `limit` rows run at once.
        size: Number of rows in the window. Further rows wait in the order in which they came.
        finish: Called in the feed's thread with each row that has ended. The value that it returns, or the
            error that it raises, becomes the result of `run`.
        lost: Called with an error when the backend has given no answer for `give_up_after` seconds. Rows that
            have not been answered fail with the same error.

    The constructor raises the error of the backend if its `info` fails. If the feed's thread ends by an
    error, all rows fail with that error, also rows that come later.
    """

    def __init__(
        self,
        program: Program[..., Any, Any],
        batch: Batch,
        size: int,
        finish: Callable[[Row, ProgramState], Any],
        lost: Callable[[ProgramError], None] = lambda error: None,
    ) -> None:
        self._program, self._batch = program, batch
        self._finish, self._lost = finish, lost
        self._info = wait(model_info(batch.settings.backend))
        self._inbox = _Inbox()
        self.window = Window(self._inbox, size, program.arg_names)
        self._breaker = Breaker(self.window, batch.give_up_after)
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._arrived = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._closed = False
        self._failure: BaseException | None = None
        """The error that has ended the thread; None while the thread runs."""
        threading.Thread(target=self._run, name="ramify-rows", daemon=True).start()

    def run(self, values: Any, identity: Any = None) -> Future[Any]:
        """Add a row to run; returns a future for its result. May be called in any thread."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._futures[number] = future
        self._inbox.rows.append(Row(number, values, identity))
        self._arrived.set()
        with contextlib.suppress(RuntimeError):  # the event loop of the last rows has just closed
            self._wake()
        return future

    def close(self) -> None:
        """Start no further rows.

        When the next of the running rows ends, the others are abandoned. They fail then, as do the waiting
        rows.
        """
        self._closed = True
        self._arrived.set()

    def _run(self) -> None:
        while True:
            self._arrived.wait()
            self._arrived.clear()
            try:
                if isinstance(self._program, AsyncFunction):
                    asyncio.run(self._run_tasks())
                else:
                    self._run_threads()
            except BaseException as failure:
                self._end(failure)
                raise
            if self._closed:
                self._end(EngineClosed("The rows' feed has been closed."))
                return
            if self._breaker.gave_up:
                error = self._breaker.unrun()
                self._lost(error)
                self._fail_all(error)

    def _end(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = failure
        self._fail_all(failure)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            futures, self._futures = self._futures, {}
        for future in futures.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _run_threads(self) -> None:
        one: Any = functools.partial(self._program._run_row, self._batch, self._info)  # type: ignore[attr-defined]
        finished = runs.finished_in_threads(one, self._breaker, self._batch.limit, self._set_wake)
        with contextlib.closing(finished):
            for row, state in finished:
                self._ended(row, state)
                if self._closed:
                    return

    async def _run_tasks(self) -> None:
        one: Any = functools.partial(self._program._run_row, self._batch, self._info)  # type: ignore[attr-defined]
        finished = runs.finished_in_tasks(one, self._breaker, self._batch.limit, self._set_wake)
        async with contextlib.aclosing(finished):
            async for row, state in finished:
                self._ended(row, state)
                if self._closed:
                    return

    def _ended(self, row: Row, state: ProgramState) -> None:
        with self._lock:
            future = self._futures.pop(row.index, None)
        if future is not None:
            result, error = None, None
            try:
                result = self._finish(row, state)
            except BaseException as failure:
                error = failure
            if future.set_running_or_notify_cancel():
                future.set_result(result) if error is None else future.set_exception(error)
        if state.error() is None:
            self.window.learn(row, state._branch.text)
