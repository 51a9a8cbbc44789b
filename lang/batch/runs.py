"""Bounded concurrency for the rows of a batch, in threads or tasks; results in order or as they come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sized,
)
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ramify.errors import InvalidRequest
from ramify.loop import SIGNAL_CHECK_S, cancel_at_end

if TYPE_CHECKING:
    from ramify.lang.program.run import Run

T = TypeVar("T")

DEFAULT_CONCURRENCY = 64
AHEAD = 4
"""Results in order: at most `AHEAD` times the concurrency of rows are running, queued, or wait for an earlier
row's result to be taken."""
BACKLOG = 2
"""Results as they come: rows submitted for each thread, so that no thread is idle while a line is written."""


class Register(Protocol):
    """Registers a run for the length of a block, so that the run can be cancelled."""

    def __call__(self, run: Run) -> contextlib.AbstractContextManager[None]: ...


def limit(num_threads: int | Literal["auto"], concurrency: int | None) -> int:
    """The number of rows that run at once, from `concurrency` or its SGLang name `num_threads`."""
    if concurrency is not None and num_threads != "auto":
        raise InvalidRequest("num_threads and concurrency mean the same; give one.", field="concurrency")
    found = num_threads if concurrency is None else concurrency
    if found == "auto":
        return DEFAULT_CONCURRENCY
    if found < 1:
        raise InvalidRequest(f"concurrency is {found}; it must be at least 1.", field="concurrency")
    return found


class _Threads:
    """`concurrency` threads and their current runs, which are cancelled when the batch is abandoned."""

    def __init__(self, concurrency: int) -> None:
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="ramify-batch")
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

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._pool.submit(work, *arguments)

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._abandoned = True
            for run in self._running:
                run.request_cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)


def run_in_threads(
    one: Callable[[Register, Any], T], rows: Iterable[Any], concurrency: int, progress_bar: bool
) -> Iterator[T]:
    """Yield ``one(register, row)`` for each row, in order, from `concurrency` threads.

    The registered runs are cancelled when the iteration is abandoned, also by Ctrl-C.
    """
    pending: deque[Future[T]] = deque()
    source = iter(rows)
    with _Threads(concurrency) as threads, progress(rows, progress_bar) as advance:

        def work(row: Any) -> T:
            try:
                return one(threads.register, row)
            finally:
                advance()

        while True:
            for row in itertools.islice(source, concurrency * AHEAD - len(pending)):
                pending.append(threads.submit(work, row))
            if not pending:
                break
            yield pending.popleft().result()


def finished_in_threads(
    one: Callable[[Register, Any], T], rows: Iterator[Any], concurrency: int
) -> Generator[T, None, None]:
    """`run_in_threads` with the results as they come. Rows are read as threads become free."""
    results: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
    pending = 0
    with _Threads(concurrency) as threads:
        while True:
            for row in itertools.islice(rows, concurrency * BACKLOG - pending):
                threads.submit(one, threads.register, row).add_done_callback(results.put)
                pending += 1
            if not pending:
                break
            yield _get(results).result()
            pending -= 1


def _get(results: queue.SimpleQueue[T]) -> T:
    """Wait for the next result; Ctrl-C interrupts it."""
    while True:
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=SIGNAL_CHECK_S)


async def run_in_tasks(
    one: Callable[[Any], Awaitable[T]], rows: Iterable[Any], concurrency: int, progress_bar: bool
) -> AsyncIterator[T]:
    """Yield ``await one(row)`` for each row, in order, `concurrency` at a time.

    The remaining tasks are cancelled when the iteration is abandoned.
    """
    slots = asyncio.Semaphore(concurrency)
    pending: deque[asyncio.Task[T]] = deque()
    source = iter(rows)
    with progress(rows, progress_bar) as advance:

        async def work(row: Any) -> T:
            async with slots:
                try:
                    return await one(row)
                finally:
                    advance()

        async with cancel_at_end(pending):
            while True:
                for row in itertools.islice(source, concurrency * AHEAD - len(pending)):
                    pending.append(asyncio.create_task(work(row)))
                if not pending:
                    break
                # Not `await pending[0]`: cancelling the caller would cancel that task before the others.
                await asyncio.wait([pending[0]])
                yield pending.popleft().result()


async def finished_in_tasks(
    one: Callable[[Any], Coroutine[Any, Any, T]], rows: Iterator[Any], concurrency: int
) -> AsyncGenerator[T, None]:
    """`run_in_tasks` with the results as they come. A row is read when its task can start."""
    pending: set[asyncio.Task[T]] = set()
    done: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    async with cancel_at_end(pending):
        while True:
            for row in itertools.islice(rows, concurrency - len(pending)):
                task = asyncio.create_task(one(row))
                task.add_done_callback(done.put_nowait)
                pending.add(task)
            if not pending:
                break
            task = await done.get()
            pending.remove(task)
            yield task.result()


@contextlib.contextmanager
def progress(rows: Iterable[Any], shown: bool) -> Iterator[Callable[..., None]]:
    """A function that advances a progress bar by one row and shows figures on it; a no-op unless `shown`."""
    if not shown:
        yield lambda **figures: None
        return
    import tqdm

    with tqdm.tqdm(total=len(rows) if isinstance(rows, Sized) else None, unit="row") as bar:

        def advance(**figures: Any) -> None:
            if figures:
                bar.set_postfix(figures, refresh=False)
            bar.update()

        yield advance
