"""The pages of requests: taken at admission, grown by decoding, handed to the prefix tree, given back.

A request's page table is split at `private_from`. The tree owns the pages before, which the request's lock
keeps; the request owns the others. New tokens are always written to rows that nobody else reads: into a page
of the request, or into the rows of a tree page behind those that the request itself has committed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ramify.radix.cache import PrefixCache
from ramify.radix.lock import Match
from ramify.runtime.scheduler.programs.leases import ProgramLeases
from ramify.runtime.scheduler.request import PageTable, Request
from ramify.runtime.scheduler.states import RequestStates


class RequestPages:
    """Moves pages between requests and the prefix cache."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.leases = ProgramLeases(cache)
        self.states = RequestStates(cache)
        self.give_way: Callable[[], bool] = lambda: False
        """Ends a transfer of pages, which a request needs; False where none is in progress."""

    def match(self, request: Request) -> Match:
        return self.cache.match(request.ids, request.scope, limit=request.match_limit)

    def try_admit(self, request: Request, match: Match, reserve: int) -> bool:
        """Take the pages of `match`, new pages for the request's other tokens, and a slot if the model has
        states.

        False, and no page is taken, when fewer than `reserve` pages would be left, or no slot is.
        """
        if self.states.present and not self.states.available():
            return False
        lock = self.cache.acquire(match)
        full = lock.length // self.page_size
        count = self._slots(request.target_len) - full
        new = None
        if self.cache.available() >= count + reserve:
            new = self.cache.allocate(count, request.taker)
        if new is None:
            self.cache.release(lock)
            return False
        if request.stats.cached_tokens is None:
            prompt = request.ids[: min(request.prompt_len, request.match_limit)]
            request.stats.lost = self.cache.lost(prompt, request.scope, lock.length)
        self.leases.admitted(request)
        copy = (lock.pages[full], new[0]) if lock.length % self.page_size else None
        ids = np.array(lock.pages[:full] + new, np.int32)
        request.pages = PageTable(ids, full, lock, lock.length, copy)
        request.computed_len = lock.length
        if self.states.present:
            self.states.begin(request, lock, match)
        return True

    def admit_alone(self, request: Request) -> bool:
        """Admit the only request there is, after dropping everything that is cached.

        Each fork inside a page keeps one extra page locked, so a shared prefix may need more pages than its
        tokens fill. Without sharing, any request within `Limits` fits.
        """
        self.give_way()
        self.cache.flush()
        return self.try_admit(request, self.match(request), reserve=0)

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Make sure that all tokens of the request, and `ahead` more, have a place; False when no page is
        left."""
        missing = self._slots(request.target_len + ahead) - len(request.pages.ids)
        if missing <= 0:
            return True
        new = self.cache.allocate(missing, request.taker)
        if new is None:
            return False
        request.pages.extend(new)
        return True

    def commit(self, request: Request) -> None:
        """Hand the tree what has been computed, so that other requests can share it."""
        pages = request.pages
        if request.computed_len == pages.committed_len:
            return
        assert pages.lock is not None
        slots = self._slots(request.computed_len)
        held = pages.ids[:slots].tolist()
        committed = self.cache.commit(pages.lock, request.ids[: request.computed_len], held)
        pages.ids[:slots] = committed.pages
        pages.private_from = committed.private_from
        pages.committed_len = request.computed_len

    def retract(self, request: Request) -> None:
        """Give everything back; what was computed is leased until the request is admitted again."""
        self.commit(request)
        self.leases.retracted(request)
        self._let_go(request, keep_state=True)

    def rest(self, request: Request, now: float, *, awaited: bool) -> None:
        """Give everything back before the request has ended; where `awaited`, what it has computed is leased,
        as other requests need it at once."""
        self.commit(request)
        self.leases.ended(request, now)
        if awaited:
            self.leases.retracted(request)
        ends = request.hint is not None and request.hint.next_use == "never"
        self._let_go(request, keep_state=awaited or not ends)

    def release(self, request: Request, now: float) -> None:
        """Give everything back at the request's end; what was computed stays in the tree until evicted."""
        self.rest(request, now, awaited=False)

    def _let_go(self, request: Request, *, keep_state: bool) -> None:
        pages = request.pages
        if pages.lock is None:
            return
        self.states.end(request, keep=keep_state)
        self.cache.free(pages.ids[pages.private_from :].tolist())
        self.cache.release(pages.lock)
        request.pages = PageTable()
        request.stats.reached = request.reached
        request.computed_len = 0

    def _slots(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
