"""The cold tier: KV pages in stores outside of the page pool, written in idle time, read before admission.

Example with pages of 16 tokens, 360 KB each. A prompt of 8,000 tokens was used once before a restart:

    the prompt arrives    the tree holds none of it; the index of the store has 500 pages
    the gate              180 MB take 0.15 s to read, 8,000 tokens 2 s to compute: the request is held
    pieces of 8 MB        another thread reads and checks one, this one copies the one before into private
                          pages; steps of other requests go on between
    after the last        the pages join the tree as if computed; the request is queued and finds 8,000 tokens

A held request is in no queue, like one that waits for its grammar. It is queued at once if it cannot get
pages, if a piece is damaged (with the pieces before that one), or if running requests need the pages.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ramify.radix.cache import PrefixCache
from ramify.radix.cold import Segment
from ramify.radix.lock import PrefixLock
from ramify.runtime.cold.expected import NextUse, NextUses
from ramify.runtime.cold.gate import Gate
from ramify.runtime.cold.store import ColdStore
from ramify.runtime.cold.worker import Job, Worker
from ramify.runtime.cold.writer import ColdWriter, Prefix

if TYPE_CHECKING:
    from ramify.runtime.executor.kv_pool import KvPool

log = logging.getLogger("ramify")

TAKER = "pages from the cold tier"
MARGIN_S = 0.1
"""A prefetch begins twice its expected length and MARGIN_S before its pages are needed."""
LEAST_LIMIT_S = 2.0
"""A read is given up after the time in which its tokens would have been computed, but not before this number
of seconds."""
LEAST_LEARNED = 64
"""Least prompt tokens of a step that counts for the measured time of a token."""


class Waiting(Protocol):
    """A request, as the cold tier knows it."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def match_limit(self) -> int: ...
    @property
    def scope(self) -> str: ...


R = TypeVar("R", bound=Waiting)


class _Piece(NamedTuple):
    store: ColdStore
    segment: Segment
    first: int
    pages: int


@dataclasses.dataclass(slots=True, eq=False)
class _Read(Generic[R]):
    prefix: Prefix
    lock: PrefixLock
    pages: list[int]
    """Private pages for the tokens after the lock. The first `copied` are filled."""
    pieces: deque[_Piece]
    job: Job
    request: R | None
    """The request that is held for this read; None for a prefetch."""
    branch: tuple[str, str] | None
    """(owner, part) of a prefetch."""
    limit: float
    """The clock when the read is given up."""
    copied: int = 0
    seconds: float = 0.0


class ColdTier(Generic[R]):
    """Reads and writes one prefix at a time. `stores` are searched in order: the fastest comes first.

    piece_bytes : bytes that are copied between two steps, at least a page
    overwritten : called with pages whose tokens have changed
    wake : called by another thread when `advance` has something to do
    """

    def __init__(
        self,
        stores: Sequence[ColdStore],
        cache: PrefixCache,
        pool: KvPool,
        clock: Callable[[], float],
        *,
        piece_bytes: int,
        overwritten: Callable[[Sequence[int]], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._stores, self._cache, self._pool, self._clock = stores, cache, pool, clock
        self._overwritten = overwritten
        self._piece = max(1, piece_bytes // pool.page_bytes)
        self._worker = Worker(wake)
        self.gate = Gate(next((pace for store in stores if (pace := store.kept_pace())), None))
        self.writer = ColdWriter(stores, cache, pool, clock, self._worker, self._piece)
        self._held: deque[R] = deque()
        self._ready: list[R] = []
        self._read: _Read[R] | None = None
        self._late: tuple[Job, int] | None = None
        """A job of a read that was given up, and its bytes; nothing is read before the job is done."""
        self._probe: Job | None = None
        self.expected = NextUses(clock)
        self.tokens = 0
        self.bytes = 0
        self.damaged_segments = sum(store.damaged for store in stores)
        for store in stores:
            self._measure(store)

    # --- requests ---------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Number of requests that wait for pages."""
        return len(self._held) + (self._read is not None and self._read.request is not None)

    def hold(self, request: R) -> bool:
        """Whether `request` waits for pages. If so, `advance` returns it when it is to be queued."""
        if not self._promised(request.ids[: request.match_limit], request.scope):
            return False
        self._held.append(request)
        return True

    def drop(self, request: R) -> None:
        """Forget `request`, which ends, and give up its read."""
        if self._read is not None and self._read.request is request:
            self._read.request = None
            self._end_read()
        for each in (self._held, self._ready):
            if request in each:
                each.remove(request)

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a step of `rows` rows of decoding requests and `tokens` prompt tokens that took
        `seconds`."""
        if tokens >= max(LEAST_LEARNED, 4 * rows):
            self.gate.tokens.learn(seconds, tokens + rows)

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `advance` can go on with requests at once."""
        if self._read is None:
            return bool(self._ready or self._held)
        return bool(self._ready) or self._read.job.done.is_set()

    @property
    def wait_s(self) -> float | None:
        """Seconds until `advance` should be called while nothing else happens; None: until `wake`."""
        now = self._clock()
        waits = [self.writer.wait_s(now)]
        if self._read is not None:
            waits.append(self._read.limit - now)
        else:
            waits += [self._due(use) - now for _, use in self.expected.untried()]
        soonest = min(waits)
        return None if soonest == math.inf else max(0.0, soonest)

    def advance(self, *, computing: bool) -> list[R]:
        """Go on with the read and the segment in progress, or begin the next ones. `computing`: the last step
        computed something. Returns the requests that are to be queued now."""
        now = self._clock()
        if self._probe is not None and self._probe.done.is_set():
            if self._probe.error is None:
                self.gate.bytes.learn(self._probe.result, 1.0)
            self._probe = None
        self._read_on(now)
        store = self.writer.advance(now, computing=computing)
        if store is not None:
            self._keep_pace(store)
            if self.gate.bytes.each is None:
                self._measure(store)
        ready, self._ready = self._ready, []
        return ready

    def give_way(self) -> bool:
        """Free the pages of the read or of the segment in progress, because requests need them. Returns False
        if there is none."""
        if self._read is None:
            return self.writer.give_way()
        self._end_read()
        return True

    def flush(self) -> None:
        """Forget and remove all segments."""
        if self._read is not None:
            self._end_read()
        self.writer.forget()
        for store in self._stores:
            for segment in list(store.index.segments.values()):
                self._forget(store, segment)

    def close(self, seconds: float) -> None:
        """Write the prefixes that wait for it, and the measured pace, for at most `seconds` of real time."""
        end = time.monotonic() + seconds
        if self._read is not None:
            self._end_read()
        self.writer.close(seconds)
        for store in self._stores:
            self._keep_pace(store).done.wait(max(0.0, end - time.monotonic()))

    def stats(self) -> dict[str, Any]:
        """Fields of `SchedulerStats`."""
        return {
            "cold_tokens": self.tokens,
            "cold_bytes": self.bytes,
            "cold_written_bytes": self.writer.written_bytes,
            "cold_damaged_segments": self.damaged_segments,
            "cold_token_s": self.gate.tokens.each or 0.0,
            "cold_byte_s": self.gate.bytes.each or 0.0,
        }

    # --- reads ------------------------------------------------------------------------------------

    def _promised(self, ids: np.ndarray, scope: str) -> list[_Piece]:
        """The pieces that continue the part of `ids` in the tree; empty if computing is faster."""
        if self._disk_is_late() or not any(store.index.segments for store in self._stores):
            return []
        size = self._cache.page_size
        pieces = self._find(ids, scope, self._cache.match(ids, scope).length // size)
        count = sum(piece.pages for piece in pieces)
        return pieces if self.gate.pays(count * size, count * self._pool.page_bytes) else []

    def _find(self, ids: np.ndarray, scope: str, first: int) -> list[_Piece]:
        """Pieces of the pages of `ids` from page `first` on."""
        pieces: list[_Piece] = []
        while True:
            found = ((store, store.index.find(ids, scope, first)) for store in self._stores)
            store, runs = next(((store, runs) for store, runs in found if runs), (None, []))
            if store is None:
                return pieces
            for segment, start, count in runs:
                first = start + count
                for at in range(start, first, self._piece):
                    pieces.append(_Piece(store, segment, at, min(self._piece, first - at)))

    def _begin_read(self, prefix: Prefix, request: R | None, branch: tuple[str, str] | None) -> bool:
        """Begin to read the pages of `prefix` that the tree lacks. Returns False if there are none, or no
        room for them: only free pages and pages without a lease are taken."""
        size, cache = self._cache.page_size, self._cache
        pieces = self._promised(*prefix)
        if not pieces:
            return False
        # Locked before pages are taken: these could be evicted from the end of the same prefix.
        lock = cache.acquire(cache.match(prefix.ids[: pieces[0].first * size], prefix.scope))
        room = min(cache.available() - cache.usage.leased_pages, sum(piece.pages for piece in pieces))
        pages = cache.allocate(room, TAKER) if room else None
        if not pages:
            cache.release(lock)
            return False
        left: deque[_Piece] = deque()
        for piece in pieces:
            if room > 0:
                left.append(piece._replace(pages=min(piece.pages, room)))
                room -= piece.pages
        token_s = self.gate.tokens.each or math.inf
        limit = self._clock() + max(LEAST_LIMIT_S, len(pages) * size * token_s)
        self._read = _Read(prefix, lock, pages, left, self._order(left[0]), request, branch, limit)
        return True

    def _disk_is_late(self) -> bool:
        if self._late is None:
            return False
        job, size = self._late
        if job.done.is_set():
            self.gate.bytes.learn(job.seconds, size)
            self._late = None
        return self._late is not None

    def _order(self, piece: _Piece) -> Job:
        store, *which = piece
        return self._worker.run(store.read, *which)

    def _read_on(self, now: float) -> None:
        if (read := self._read) is not None:
            if read.job.done.is_set():
                self._copy_piece(read)
            elif now >= read.limit:
                log.warning("the cold tier's disk is slow: a read was given up, and its tokens are computed")
                self._late = read.job, read.pieces[0].pages * self._pool.page_bytes
                self._end_read()
        while self._read is None and self._held:
            request = self._held.popleft()
            prefix = Prefix(request.ids[: request.match_limit], request.scope)
            if not self._begin_read(prefix, request, None):
                self._ready.append(request)
        for branch, use in self.expected.untried() if self._read is None else ():
            if self._due(use) <= now:
                use.tried = True
                if self._begin_read(use.prefix, None, branch):
                    return

    def _copy_piece(self, read: _Read[R]) -> None:
        piece, job = read.pieces.popleft(), read.job
        if job.error is not None:
            if not isinstance(job.error, FileNotFoundError):  # which another engine has removed
                log.warning("a segment of the cold tier is not used: %s", job.error)
                self.damaged_segments += 1
            self._forget(piece.store, piece.segment)
            self._end_read()
            return
        if not read.pieces or read.pieces[0].segment is not piece.segment:
            self._worker.run(piece.store.touch, piece.segment)
        if read.pieces:
            read.job = self._order(read.pieces[0])
        began = time.perf_counter()
        pages = read.pages[read.copied :][: piece.pages]
        self._pool.write_pages(pages, job.result)
        self._overwritten(pages)
        read.copied += piece.pages
        read.seconds += job.seconds + time.perf_counter() - began
        if not read.pieces:
            self._end_read()

    def _end_read(self) -> None:
        """End the read in progress: hand the filled pages to the tree, free the others, and let the request
        be queued that was held."""
        read, cache = self._read, self._cache
        assert read is not None
        self._read = None
        use = None if read.branch is None else self.expected.of(read.branch)
        if read.copied:
            tokens, size = read.copied * cache.page_size, read.copied * self._pool.page_bytes
            table = read.lock.pages + read.pages[: read.copied]
            cache.commit(read.lock, read.prefix.ids[: read.lock.length + tokens], table)
            self.gate.bytes.learn(read.seconds, size)
            self.tokens += tokens
            self.bytes += size
            if read.branch is not None and use is not None:
                cache.end_leases(*read.branch)
                owner, part = read.branch
                needed_in = max(0.0, use.needed - self._clock())
                cache.lease(read.lock, owner, use.lease_s, needed_in, part)
        cache.free(read.pages[read.copied :])
        cache.release(read.lock)
        if read.request is not None:
            self._ready.append(read.request)

    def _due(self, use: NextUse) -> float:
        pages = len(use.prefix.ids) // self._cache.page_size
        return use.needed - MARGIN_S - 2 * self.gate.reading_s(pages * self._pool.page_bytes)

    def _measure(self, store: ColdStore) -> None:
        """Measure the time of a byte on the newest segment of `store`."""
        newest = next(reversed(store.index.segments.values()), None)
        if newest is not None and self._probe is None:
            self._probe = self._worker.run(store.seconds_a_byte, newest)

    def _keep_pace(self, store: ColdStore) -> Job:
        return self._worker.run(store.keep_pace, self.gate.tokens.each)

    def _forget(self, store: ColdStore, segment: Segment) -> None:
        store.index.remove(segment)
        self._worker.run(store.drop, segment)
