"""Bounded concurrency for the rows of a batch, in threads or tasks.

Results come in input order or as rows end.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sized,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ramify.errors import InvalidRequest, ProgramError
from ramify.lang.batch.breaker import ATTEMPTS, Attempt, Breaker
from ramify.lang.batch.window import Row
from ramify.loop import SIGNAL_CHECK_S, cancel_at_end

if TYPE_CHECKING:
    from ramify.lang.program.run import Run
    from ramify.lang.state.state import ProgramState

DEFAULT_CONCURRENCY = 64
AHEAD = 4
"""Most rows, with results in order, that have begun and were not yielded, as a multiple of the
concurrency."""
BACKLOG = 2
"""Number of rows submitted for each thread, so that no thread is idle while the caller takes a result."""


Register = Callable[["Run"], contextlib.AbstractContextManager[None]]
"""A function that makes a context manager for a run. Within the context, the batch can cancel the run."""


def limit(num_threads: int | Literal["auto"], concurrency: int | None) -> int:
    """The number of rows that run at once: `concurrency`, or `num_threads`, which is SGLang's name for the
    same."""
    if concurrency is not None and num_threads != "auto":
        raise InvalidRequest("num_threads and concurrency mean the same; give one.", field="concurrency")
    found = num_threads if concurrency is None else concurrency
    if found == "auto":
        return DEFAULT_CONCURRENCY
    if type(found) is not int:
        raise InvalidRequest(f"concurrency is {found!r}; it must be an integer.", field="concurrency")
    if found < 1:
        raise InvalidRequest(f"concurrency is {found}; it must be at least 1.", field="concurrency")
    return found


class _Runs:
    def __init__(self) -> None:
        self._running: set[Run] = set()
        self._abandoned = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def register(self, run: Run) -> Iterator[None]:
        with self._lock:
            self._running.add(run)
            abandoned = self._abandoned
        if abandoned:
            run.request_cancel()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(run)

    def heard_s(self) -> float:
        """Time at which the backend last sent something for one of the runs in progress."""
        with self._lock:
            return max((run.heard_s for run in self._running), default=0.0)

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            for run in self._running:
                run.request_cancel()


def finished_in_threads(
    one: Callable[[Register, Any], ProgramState],
    breaker: Breaker[Row],
    concurrency: int,
    wakes: Callable[[Callable[[], None]], None] = lambda wake: None,
) -> Generator[tuple[Row, ProgramState], None, None]:
    """Run ``one(register, row.values)`` for each row of `breaker` in `concurrency` threads; yield (row,
    result) as rows end.

    The iteration ends early if the breaker gives up. The registered runs are cancelled when the caller
    abandons the iteration, also by Ctrl-C. `wakes` is called once, with a function ``wake``. Code that adds
    rows to `breaker` must call ``wake``, from any thread.
    """
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    runs, pending = _Runs(), 0
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="ramify-batch")
    wakes(lambda: ended.put(None))

    def work(attempt: Attempt[Row]) -> tuple[Attempt[Row], ProgramState | None]:
        return attempt, one(runs.register, attempt.row.values) if breaker.may_run(attempt) else None

    try:
        while not _gave_up(breaker, runs):
            while pending < concurrency * BACKLOG and (attempt := breaker.take(pending)) is not None:
                pool.submit(work, attempt).add_done_callback(ended.put)
                pending += 1
            if not pending and breaker.exhausted:
                break
            wait_s = breaker.wait_s()
            try:
                done = ended.get(timeout=SIGNAL_CHECK_S if wait_s is None else wait_s)
            except queue.Empty:
                continue
            if done is None:
                continue
            attempt, state = done.result()
            pending -= 1
            if _stands(breaker, attempt, state):
                yield attempt.row, state
    finally:
        runs.abandon()
        pool.shutdown(wait=True, cancel_futures=True)


async def finished_in_tasks(
    one: Callable[[Register, Any], Awaitable[ProgramState]],
    breaker: Breaker[Row],
    concurrency: int,
    wakes: Callable[[Callable[[], None]], None] = lambda wake: None,
) -> AsyncGenerator[tuple[Row, ProgramState], None]:
    """`finished_in_threads` with tasks of this event loop in place of threads."""
    ended: asyncio.Queue[asyncio.Task[tuple[Attempt[Row], ProgramState]] | None] = asyncio.Queue()
    runs, pending = _Runs(), set[asyncio.Task[Any]]()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        loop.call_soon_threadsafe(ended.put_nowait, None)

    wakes(wake)

    async def work(attempt: Attempt[Row]) -> tuple[Attempt[Row], ProgramState]:
        return attempt, await one(runs.register, attempt.row.values)

    async with cancel_at_end(pending):
        while not _gave_up(breaker, runs):
            while len(pending) < concurrency and (attempt := breaker.take(len(pending))) is not None:
                task = asyncio.create_task(work(attempt))
                task.add_done_callback(ended.put_nowait)
                pending.add(task)
            if not pending and breaker.exhausted:
                break
            wait_s = breaker.wait_s()
            try:
                async with asyncio.timeout(wait_s):
                    done = await ended.get()
            except TimeoutError:
                continue
            if done is None:
                continue
            pending.remove(done)
            attempt, state = done.result()
            if _stands(breaker, attempt, state):
                yield attempt.row, state


def _gave_up(breaker: Breaker[Any], runs: _Runs) -> bool:
    if breaker.wait_s() is not None:
        breaker.heard(runs.heard_s())
    return breaker.gave_up


def _stands(breaker: Breaker[Row], attempt: Attempt[Row], state: ProgramState | None) -> bool:
    """Report the end of a row to `breaker`; returns whether the row's result is final. `state` is None for a
    row that was not started. Raises the `fatal` error of the row, which ends the batch."""
    if state is None:
        breaker.return_unstarted(attempt)
        return False
    state._branch.run.raise_fatal()
    breaker.heard(state._branch.run.heard_s)
    return breaker.ended(attempt, state.error(), state.trace.requests > 0)


# --- results in order ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Arguments of a batch that yields states in the order of its rows."""

    rows: Iterable[Any]
    concurrency: int
    progress: bool
    give_up_after: float | None


class _InOrder:
    """An iterator over the input's rows for a breaker, which also puts the rows' states in order. While the
    number of rows that have begun and were not yielded is at its bound (`AHEAD`), `next` raises
    StopIteration."""

    def __init__(self, batch: Batch) -> None:
        self._source = enumerate(batch.rows)
        self._ahead = batch.concurrency * AHEAD
        self._begun: dict[int, Any] = {}
        """Row number → row, for the rows in progress."""
        self._ended: dict[int, ProgramState] = {}
        self._next = 0
        self.breaker = Breaker(self, batch.give_up_after)

    def __iter__(self) -> _InOrder:
        return self

    def __next__(self) -> Row:
        # While rows wait after a failure, further rows may begin: their answers show that the backend lives.
        limit = self._ahead + self.breaker.waiting * ATTEMPTS
        if len(self._begun) + len(self._ended) >= limit:
            raise StopIteration
        number, row = next(self._source)
        self._begun[number] = row
        return Row(number, row)

    def put(self, number: int, state: ProgramState) -> Iterator[ProgramState]:
        """Note that row `number` has ended. Yields all states that are now next in order, if there are
        any."""
        del self._begun[number]
        self._ended[number] = state
        while self._next in self._ended:
            self._next += 1
            yield self._ended.pop(self._next - 1)

    def left(self) -> Iterator[tuple[ProgramState | None, Any]]:
        """After the breaker has given up, yield a pair for each row that was not yielded: (state, None) if
        the row has ended, else (None, row)."""
        while self._begun or self._ended:
            yield self._ended.pop(self._next, None), self._begun.pop(self._next, None)
            self._next += 1
        for _, row in self._source:
            yield None, row


def run_in_threads(
    one: Callable[[Register, Any], ProgramState],
    refuse: Callable[[ProgramError, Any], ProgramState],
    batch: Batch,
) -> Iterator[ProgramState]:
    """Yield ``one(register, row)`` for each row, in order. If the breaker gives up, the rows that have not
    ended get the state ``refuse(error, row)``."""
    order = _InOrder(batch)
    finished = finished_in_threads(one, order.breaker, batch.concurrency)
    with progress(batch.rows, batch.progress) as bar, contextlib.closing(finished):
        for row, state in finished:
            bar.advance()
            yield from order.put(row.index, state)
    for found, values in order.left():
        yield refuse(order.breaker.unrun(), values) if found is None else found


async def run_in_tasks(
    one: Callable[[Register, Any], Awaitable[ProgramState]],
    refuse: Callable[[ProgramError, Any], Awaitable[ProgramState]],
    batch: Batch,
) -> AsyncIterator[ProgramState]:
    """`run_in_threads` with tasks of this event loop in place of threads."""
    order = _InOrder(batch)
    finished = finished_in_tasks(one, order.breaker, batch.concurrency)
    with progress(batch.rows, batch.progress) as bar:
        async with contextlib.aclosing(finished):
            async for row, state in finished:
                bar.advance()
                for ready in order.put(row.index, state):
                    yield ready
    for found, values in order.left():
        yield await refuse(order.breaker.unrun(), values) if found is None else found


# --- progress -----------------------------------------------------------------------------------


class Progress:
    """A progress bar, or a substitute that does nothing if no bar is shown."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, **figures: Any) -> None:
        """Count a row that has ended; `figures` are shown after the bar."""
        if self._bar is not None:
            if figures:
                self._bar.set_postfix(figures, refresh=False)
            self._bar.update()

    def skip(self) -> None:
        """Count a row that need not run. The row does not count towards the speed, from which the remaining
        time is computed."""
        if self._bar is not None:
            for count in ("n", "initial", "last_print_n"):
                setattr(self._bar, count, getattr(self._bar, count) + 1)


@contextlib.contextmanager
def progress(rows: Iterable[Any], shown: bool) -> Iterator[Progress]:
    """A `Progress` for the rows in `rows`, with a bar if `shown`."""
    if not shown:
        yield Progress(None)
        return
    import tqdm

    with tqdm.tqdm(total=len(rows) if isinstance(rows, Sized) else None, unit="row") as bar:
        yield Progress(bar)
