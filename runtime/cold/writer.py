"""Writes prefixes of the tree to cold stores, a segment at a time, in idle time.

Leased and twice-used prefixes go first, and are written while requests run too, for `BUSY_SHARE` of the time.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ramify.radix.cache import PrefixCache
from ramify.radix.lock import PrefixLock
from ramify.runtime.cold.store import ColdStore, Finished, SegmentWriter
from ramify.runtime.cold.worker import Job, Worker

if TYPE_CHECKING:
    from ramify.runtime.executor.kv_pool import KvPool

log = logging.getLogger("ramify")

IDLE_S = 0.3
"""Prefixes are written once the scheduler has had nothing to compute for this number of seconds."""
BUSY_SHARE = 0.02
"""Share of the scheduler's time that writing may take while requests run."""
MOST_PENDING = 1 << 20
"""Most tokens of prefixes that wait to be written, 4 bytes each; the oldest are dropped."""
SEGMENT_BYTES = 64 << 20
"""Most bytes of a segment, but at least a page. A process that is killed loses the segment in progress."""
LEAST_SEGMENTS = 8
"""Segments that a store has room for, at least, so that few pages are removed for a new one."""
RETRY_S = 60.0
"""Seconds without writing to a store after a write to it has failed."""


class Prefix(NamedTuple):
    ids: np.ndarray
    """(tokens,) int32"""
    scope: str


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    prefix: Prefix
    begun: tuple[int, int] = (-1, -1)
    """Number of the store and first page of the segment that was begun last. The next one is a later one, so
    that a prefix whose segments are removed meanwhile is not written again and again."""


@dataclasses.dataclass(slots=True, eq=False)
class _Write:
    store: int
    """The store's number."""
    lock: PrefixLock | None
    """The lock on the prefix; None once all pages are handed to the worker."""
    pages: list[int]
    """Pages of the segment. The first `copied` are handed to the worker."""
    job: Job
    writer: SegmentWriter | None = None
    copied: int = 0
    void: bool = False
    """The segment is removed as soon as it is finished."""


class ColdWriter:
    """The prefixes that wait to be written, and the segment in progress.

    piece : pages that are copied from the pool at a time
    """

    def __init__(
        self,
        stores: Sequence[ColdStore],
        cache: PrefixCache,
        pool: KvPool,
        clock: Callable[[], float],
        worker: Worker,
        piece: int,
    ) -> None:
        self._stores, self._cache, self._pool, self._clock = stores, cache, pool, clock
        self._worker, self._piece = worker, piece
        self._write: _Write | None = None
        self._pending: dict[bool, deque[_Pending]] = {True: deque(), False: deque()}
        """Prefixes in the order of their use; True: those that are leased or were used twice."""
        self._pending_tokens = 0
        self._busy_until = self._next = -math.inf
        self._failing: dict[int, float] = {}
        """Number of a store whose last write has failed → the clock until which nothing is written to it."""
        self.written_bytes = 0

    def note(self, prefix: Prefix, *, valuable: bool) -> None:
        """Write the whole pages of `prefix` later. `valuable`: it is leased, or was used twice."""
        tokens = len(prefix.ids) - len(prefix.ids) % self._cache.page_size
        if not tokens:
            return
        self._pending[valuable].append(_Pending(Prefix(prefix.ids[:tokens].copy(), prefix.scope)))
        self._pending_tokens += tokens
        while self._pending_tokens > MOST_PENDING:
            self._pending_tokens -= len((self._pending[False] or self._pending[True]).popleft().prefix.ids)

    def wait_s(self, now: float) -> float:
        """Seconds until `advance` should be called in idle time; infinite: until the worker is done."""
        if self._write is None:
            return max(self._busy_until + IDLE_S, self._next) - now if self._pending_tokens else math.inf
        return 0.0 if self._write.job.done.is_set() else math.inf

    def advance(self, now: float, *, computing: bool) -> ColdStore | None:
        """Copy the next piece, or begin the next segment. `computing`: the last step computed something.
        Returns the store that has a new segment, if one was finished."""
        if computing:
            self._busy_until = now
        if now < self._next:
            return None
        busy = now < self._busy_until + IDLE_S
        began = time.perf_counter()
        finished = self._go_on(busy)
        if busy:
            self._next = max(self._next, now + (time.perf_counter() - began) / BUSY_SHARE)
        return finished

    def give_way(self) -> bool:
        """Give up the segment in progress, whose pages are locked. Returns False if no page is."""
        if self._write is None or self._write.lock is None:
            return False
        self._cancel()
        for pending in self._pending.values():
            if pending:
                pending[0].begun = (-1, -1)
        return True

    def forget(self) -> None:
        """Forget the pending prefixes, and give up the segment in progress; one whose pages are all copied is
        removed when it is finished."""
        self._pending = {True: deque(), False: deque()}
        self._pending_tokens = 0
        if not self.give_way() and self._write is not None:
            self._write.void = True

    def close(self, seconds: float) -> None:
        """Write what is pending, for at most `seconds` of real time."""
        end = time.monotonic() + seconds
        self._failing = dict.fromkeys(self._failing, -math.inf)
        while (self._pending_tokens or self._write is not None) and time.monotonic() < end:
            if self._write is not None and not self._write.job.done.wait(max(0.0, end - time.monotonic())):
                return
            if self._write is None and self._rest_until() > self._clock():
                return
            self._go_on(busy=False)

    def _go_on(self, busy: bool) -> ColdStore | None:
        write = self._write
        if write is None:
            self._begin(busy)
        elif write.job.done.is_set():
            if write.job.error is not None:
                self._fail(write.store, write.job.error)
            elif isinstance(write.job.result, Finished):
                return self._finish(write, write.job.result)
            else:
                self._copy_piece(write)
        return None

    def _begin(self, busy: bool) -> None:
        """Begin a segment of the oldest pending prefix; while `busy`, of a valuable one."""
        pending = self._pending[True] or (None if busy else self._pending[False])
        if not pending:
            return
        if (rest := self._rest_until()) > self._clock():
            self._next = max(self._next, rest)
            return
        one, size, cache = pending[0], self._cache.page_size, self._cache
        ids, scope = one.prefix
        in_tree = cache.match(ids, scope).length // size
        for number, store in enumerate(self._stores):
            runs = store.index.find(ids, scope, 0)
            for run in reversed(runs):  # the last pages of a prefix leave first
                self._worker.run(store.touch, run.segment)
            stored = runs[-1].first + runs[-1].pages if runs else 0
            most = min(in_tree, store.most_pages)
            rests = self._clock() < self._failing.get(number, -math.inf)
            if stored < most and not rests and (number, stored) > one.begun:
                one.begun = number, stored
                pages = min(SEGMENT_BYTES // self._pool.page_bytes, store.most_pages // LEAST_SEGMENTS)
                ids = ids[: min(most, stored + max(1, pages)) * size]
                lock = cache.acquire(cache.match(ids, scope))
                job = self._worker.run(store.begin, scope, ids, stored)
                self._write = _Write(number, lock, lock.pages[stored:], job)
                return
        pending.popleft()
        self._pending_tokens -= len(ids)

    def _rest_until(self) -> float:
        """Time of the clock until which all stores rest after failures."""
        return min(self._failing.get(number, -math.inf) for number in range(len(self._stores)))

    def _copy_piece(self, write: _Write) -> None:
        writer = write.writer = write.writer or write.job.result
        assert writer is not None
        pages = write.pages[write.copied :][: self._piece]
        if not pages:
            write.job = self._worker.run(writer.finish)
            return
        write.job = self._worker.run(writer.write, self._pool.read_pages(pages))
        write.copied += len(pages)
        if write.copied == len(write.pages) and write.lock is not None:
            self._cache.release(write.lock)
            write.lock = None

    def _finish(self, write: _Write, done: Finished) -> ColdStore:
        self._write = None
        store = self._stores[write.store]
        for name in done.removed:
            if name in store.index.segments:
                store.index.remove(store.index.segments[name])
        if write.void:
            self._worker.run(store.drop, done.segment)
            return store
        store.index.add(done.segment)
        self.written_bytes += write.copied * self._pool.page_bytes
        self._failing.pop(write.store, None)
        return store

    def _fail(self, store: int, error: Exception) -> None:
        if store not in self._failing:
            log.error("the cold tier writes nothing for now: %s", error)
        self._failing[store] = self._clock() + RETRY_S
        self._cancel()

    def _cancel(self) -> None:
        write = self._write
        assert write is not None
        self._write = None
        if write.lock is not None:
            self._cache.release(write.lock)

        def cancel() -> None:
            writer = write.writer or write.job.result
            if writer is not None:
                writer.cancel()

        self._worker.run(cancel)
