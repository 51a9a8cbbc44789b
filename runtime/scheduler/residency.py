"""The memory of KV pages follows their use: it grows with requests, and goes back to the system.

Example for a model of 8B weights on a machine with 16 GiB, of which 8 GiB are free after the weights were
loaded. A token takes 128 KiB, and a page of 16 tokens 2 MiB:

    pages    3,277    6.4 GiB: what is free, less a tenth of the machine for others
    kept       512    1 GiB
    a chat of 40,000 tokens     touches 2,500 pages. Its next turn finds them in the tree.
    another program needs 5 GiB the free memory falls under `LEAST_FREE`: the least recently used leaves are
                                evicted, and the memory of their pages returned, until it is above again
    `RETAIN_S` without a turn   pages beyond the 512 that were kept are evicted and returned
    a prompt of 45,000 tokens, while the other program has the memory: refused with the numbers

Requests that run keep their pages. If they need more than there is, the newest are retracted, and wait; a
request that would not fit alone fails.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from ramify.errors import Overloaded
from ramify.radix.cache import PrefixCache
from ramify.runtime.executor.kv_pool import HUGE, KvPool
from ramify.runtime.executor.memory import COW_PAGES, LEAST_PAGES
from ramify.runtime.host_memory import HostMemory, host_memory, mapped_weights
from ramify.runtime.scheduler.requests.request import Request

log = logging.getLogger("ramify")

CHECK_S = 1.0
"""Seconds between two looks at the free memory. One takes 0.3 ms. In a second the prefill of a small model
writes 70 MB of KV, far less than `LEAST_FREE` of a machine."""
RETAIN_S = 300.0
"""Pages beyond those that are kept are returned when no request has used them for `RETAIN_S` to
2 * `RETAIN_S` seconds."""
LEAST_FREE = 0.05
"""Share of the machine's memory that new pages leave free. At the start twice as much is left
(`executor.memory.FRACTION`), so a prompt that fits then still fits if other programs grow a little."""
LEAST_SHARE = 1 / 8
"""Share of the pages that are kept which requests may use however little memory is free. It is 128 MiB at
most, so that short requests run on a machine that is always nearly full."""

RETRY_S = 10.0
"""Seconds after which a client may send a request again that the memory could not hold."""


class Residency:
    """Limits the touched pages of `cache` by the free memory, and returns the memory of evicted pages.

    pools : the pools in which page n of the cache has its KV: the model's and the draft model's
    kept : the number of pages whose memory is kept
    memory : reads the machine's memory
    """

    def __init__(
        self,
        cache: PrefixCache,
        pools: Sequence[KvPool],
        kept: int,
        memory: Callable[[], HostMemory] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        mapped = mapped_weights() if memory is None else 0
        self._cache, self._pools, self._kept = cache, pools, kept
        self._least = max(LEAST_PAGES, int(LEAST_SHARE * kept))
        self._memory = memory or (lambda: host_memory(mapped))
        self._clock = clock
        self._page_bytes = sum(pool.page_bytes for pool in pools)
        self._together = max(HUGE // (pool.k.stride(1) * pool.k.itemsize) for pool in pools)
        """Pages that lie in one huge page. Fewer pages seldom return any memory."""
        self._next_check = self._mark_at = -math.inf
        self._mark = 0
        """`Usage.releases` at the time `_mark_at`."""

    @property
    def wait_s(self) -> float | None:
        """Seconds after which `check` is to be called though nothing runs; None if nothing is to return."""
        return CHECK_S if self._cache.touched > self._least else None

    def check(
        self, requests: Callable[[], Iterable[Request]], fail: Callable[[Request, Overloaded], None]
    ) -> None:
        """Measure and return memory, if `CHECK_S` has passed. Called between two steps.

        `fail` is called with each of `requests()` that needs more pages than it has, and more than the memory
        now holds.
        """
        cache, now = self._cache, self._clock()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        total, free, _ = self._memory()
        room = (free - int(LEAST_FREE * total)) // self._page_bytes
        cache.limit = max(self._least, min(cache.num_pages, cache.touched + room))
        if cache.touched > cache.limit:
            self._trim(max(self._least, cache.limit - self._together))
        if now >= self._mark_at + RETAIN_S:
            if cache.touched > self._kept:
                self._trim(self._kept, self._mark)
            self._mark, self._mark_at = cache.usage.releases, now
        if cache.limit < cache.num_pages:
            self._fail_too_long(requests(), fail)

    def _trim(self, most: int, used_before: float = math.inf) -> None:
        before = self._cache.touched
        free = self._cache.trim(most, used_before)
        if (returned := before - self._cache.touched) > 0:
            for pool in self._pools:
                pool.return_memory(free)
            reason = "the machine's memory is short" if used_before == math.inf else "they were not used"
            log.info("returned the memory of %d KV pages: %s", returned, reason)

    def _fail_too_long(
        self, requests: Iterable[Request], fail: Callable[[Request, Overloaded], None]
    ) -> None:
        size, limit = self._cache.page_size, self._cache.limit
        for request in list(requests):
            needed = -(-request.target_len // size)
            if needed <= request.pages.count and request.decisions is None:
                continue  # it runs, and the pages that it has stay
            needed += COW_PAGES
            if request.decisions is not None:
                needed += request.decisions.most_pages(size)
            if needed > limit:
                fail(
                    request,
                    Overloaded(
                        f"The machine's memory is short: it holds KV for {(limit - COW_PAGES) * size} tokens"
                        f" now, and the request has {request.target_len}.",
                        remedy="Send it again when other programs have ended, or give the engine a"
                        " kv_memory_gb, which is not lowered.",
                        retry_after=RETRY_S,
                    ),
                )
