"""Which pages a request holds: taken at admission, grown by decoding, handed to the tree, given back.

A request's page table is split at `private_from`: pages of slots ``[0, private_from)`` belong to the
tree, where the request's hold keeps them; those of ``[private_from, …)`` are its own. Its new tokens
are always written to rows that nobody else reads: a page of its own, or the rows of a tree page after
what it has committed itself.
"""

from __future__ import annotations

from ramify.radix.cache import PrefixCache
from ramify.radix.lock import Match
from ramify.runtime.scheduler.programs.leases import ProgramLeases
from ramify.runtime.scheduler.request import Request


class RequestPages:
    """Moves pages between requests and the prefix cache."""

    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        self.cache = cache
        self.page_size = page_size
        self.leases = ProgramLeases(cache)

    def match(self, request: Request) -> Match:
        return self.cache.match(request.ids, request.scope, limit=request.match_limit)

    def try_admit(self, request: Request, match: Match, reserve: int) -> bool:
        """Take what `match` found and fresh pages for the rest of the known tokens.

        False, and nothing is changed, when fewer than `reserve` pages would be left.
        """
        lock = self.cache.acquire(match)
        full = lock.length // self.page_size
        fresh_count = self._slots(request.target_len) - full
        fresh = None
        if self.cache.available() >= fresh_count + reserve:
            fresh = self.cache.allocate(fresh_count, request.taker)
        if fresh is None:
            self.cache.release(lock)
            return False
        if request.cached_len is None:
            prompt = request.ids[: min(request.prompt_len, request.match_limit)]
            request.lost = self.cache.lost(prompt, request.scope, lock.length)
        self.leases.admitted(request)
        if lock.length % self.page_size:
            request.copy = (lock.pages[full], fresh[0])
        request.lock = lock
        request.pages = lock.pages[:full] + fresh
        request.private_from = full
        request.computed_len = request.committed_len = lock.length
        return True

    def admit_alone(self, request: Request) -> bool:
        """Admit the only request there is, at the price of everything that is cached.

        What it shares can lock a page more than it has slots at every fork in the middle of a page;
        without sharing, a request that is allowed at all fits.
        """
        self.cache.flush()
        return self.try_admit(request, self.match(request), reserve=0)

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Make sure that every known token, the draft and `ahead` more have a place; False when no page can
        be had."""
        missing = self._slots(request.target_len + ahead) - len(request.pages)
        if missing <= 0:
            return True
        fresh = self.cache.allocate(missing, request.taker)
        if fresh is None:
            return False
        request.pages += fresh
        return True

    def commit(self, request: Request) -> None:
        """Hand the tree what has been computed, so that others can share it."""
        if request.computed_len == request.committed_len:
            return
        assert request.lock is not None
        slots = self._slots(request.computed_len)
        committed = self.cache.commit(
            request.lock, request.ids[: request.computed_len], request.pages[:slots]
        )
        request.pages[:slots] = committed.pages
        request.private_from = committed.private_from
        request.committed_len = request.computed_len

    def retract(self, request: Request) -> None:
        """Give everything back until there is room again."""
        self.commit(request)
        self.leases.retracted(request)
        self._let_go(request)

    def rest(self, request: Request, now: float, *, awaited: bool) -> None:
        """Give everything back before the request has ended; `awaited`: others need at once what it has
        computed."""
        self.commit(request)
        self.leases.ended(request, now)
        if awaited:
            self.leases.retracted(request)
        self._let_go(request)

    def release(self, request: Request, now: float) -> None:
        """Give everything back; what was computed stays in the tree until it is evicted."""
        self.commit(request)
        self.leases.ended(request, now)
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if request.lock is None:
            return
        self.cache.free(request.pages[request.private_from :])
        self.cache.release(request.lock)
        request.lock = None
        request.pages = []
        request.private_from = request.computed_len = request.committed_len = 0
        request.copy = None

    def _slots(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
