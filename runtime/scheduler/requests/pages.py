"""The pages of requests: taken at admission, grown by decoding, handed to the prefix tree, given back.

A request's page table is split at `private_from`. The tree owns the pages before, which the request's lock
keeps; the request owns the others. New tokens are always written to rows that nobody else reads: into a page
of the request, or into the rows of a tree page behind those that the request itself has committed.
"""

from __future__ import annotations

import numpy as np

from ramify.radix.cache import PrefixCache
from ramify.radix.lock import Match
from ramify.runtime.scheduler.requests.limits import TUNED, Tuning
from ramify.runtime.scheduler.requests.parts import PageTable
from ramify.runtime.scheduler.requests.programs import Program, ReuseIntervals
from ramify.runtime.scheduler.requests.request import Request, common_prefix
from ramify.runtime.scheduler.requests.states import RequestStates

RETRACTED_S = 600.0
"""A retracted request's pages are leased until it runs again or ends, but no longer than this."""


class ProgramLeases:
    """Keeps a lease for every branch and every fork of a live program. They end with the program.

    The lease of a branch is at the end of its last request. The lease of a fork is on what the prompts of all
    requests inside it have in common: from there its parent goes on after the join.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._intervals = ReuseIntervals()

    def arrived(self, request: Request) -> None:
        """Note that the pages of the request's branch are needed now, and end the leases of ended
        branches."""
        hint = request.hint
        if hint is None:
            return
        forks = request.program.forks
        for part in hint.ended:
            if part in forks:  # joined: this request may be the one that goes on from the fork
                self._cache.expect(hint.program, part, 0.0)
            else:
                self._cache.end_leases(hint.program, part)
                request.program.intervals.open.pop(part, None)
        if hint.branch:
            self._intervals.end_interval(request.program.intervals, hint.branch, request.arrival)
            self._cache.expect(hint.program, hint.branch, 0.0)
        prompt = request.ids
        for fork in hint.forks:
            known = forks.get(fork)
            forks[fork] = prompt if known is None else known[: common_prefix(known, prompt)]

    def await_tools(self, program: Program, name: str, branch: str, tools: tuple[str, ...]) -> None:
        """Expect the branch back when all `tools` have returned. Its last request could not name them."""
        expected = [self._intervals.set_kind(program.intervals, branch, f"tool {tool}") for tool in tools]
        known = [seconds for seconds in expected if seconds is not None]
        if known:
            self._cache.expect(name, branch, max(known))

    def admitted(self, request: Request) -> None:
        """End the leases that kept pages for the request, which has locked them now."""
        if request.stats.retractions:
            self._cache.end_leases(request.owner, request.rid)
        for part in () if request.hint is None else request.hint.ended:
            if request.program.forks.pop(part, None) is not None:
                self._cache.end_leases(request.owner, part)

    def retracted(self, request: Request) -> None:
        """Lease all pages: the request comes back as soon as there is room. Called before its lock is
        released."""
        lock = request.pages.lock
        if lock is not None:
            self._cache.lease(lock, request.owner, RETRACTED_S, 0.0, request.rid)

    def rested(self, request: Request) -> None:
        """End the lease on the pages of a span that no other span needs any more."""
        self._cache.end_leases(request.owner, request.rid)

    def ended(self, request: Request, now: float) -> None:
        """Lease the pages of a request that ends, as its hint says. Called before its lock is released."""
        if request.stats.retractions:
            self._cache.end_leases(request.owner, request.rid)
        hint, lock, program = request.hint, request.pages.lock, request.program
        if hint is None or lock is None or hint.lease_s <= 0:
            return
        for fork in hint.forks:
            common = program.forks.get(fork)
            if common is not None:
                seconds = self._intervals.expected(program.intervals, "join")
                self._take(request, seconds, fork, min(len(common), lock.length))
        if hint.next_use != "never":
            seconds = self._intervals.begin_interval(program.intervals, hint.branch, hint.next_use, now)
            self._take(request, seconds, hint.branch, lock.length)

    def end_program(self, program: str) -> None:
        self._cache.end_leases(program)

    def _take(self, request: Request, needed_in: float, part: str, length: int) -> None:
        """Move the lease of `part`, a branch or a fork, to the first `length` tokens of `request`.

        Each request that names no branch has a lease of its own.
        """
        lock, hint = request.pages.lock, request.hint
        assert lock is not None
        assert hint is not None
        if part:
            self._cache.end_leases(hint.program, part)
        self._cache.lease(lock, hint.program, hint.lease_s, needed_in, part, length)


class RequestPages:
    """Moves pages between requests and the prefix cache."""

    def __init__(self, cache: PrefixCache, tuning: Tuning = TUNED) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.leases = ProgramLeases(cache)
        self.states = RequestStates(cache, tuning.least_state)

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
            self.states.take_slot(request, lock, match)
        return True

    def admit_alone(self, request: Request) -> bool:
        """Admit the only request there is, after dropping everything that is cached.

        Each fork inside a page keeps one extra page locked, so a shared prefix may need more pages than its
        tokens fill. Without sharing, any request within `Limits` fits.
        """
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
        """Hand the tree all computed pages, so that other requests can share them."""
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
        """Give all pages back. Computed ones are leased until the request is admitted again."""
        self.commit(request)
        self.leases.retracted(request)
        self._let_go(request, keep_state=True)

    def rest(self, request: Request, now: float, *, awaited: bool) -> None:
        """Give all pages back before the request has ended. Where `awaited`, computed ones are leased, as
        other requests need them at once."""
        self.commit(request)
        self.leases.ended(request, now)
        if awaited:
            self.leases.retracted(request)
        ends = request.hint is not None and request.hint.next_use == "never"
        self._let_go(request, keep_state=awaited or not ends)

    def release(self, request: Request, now: float) -> None:
        """Give all pages back at the request's end. Computed ones stay in the tree until evicted."""
        self.rest(request, now, awaited=False)

    def _let_go(self, request: Request, *, keep_state: bool) -> None:
        pages = request.pages
        if pages.lock is None:
            return
        self.states.give_back(request, keep=keep_state)
        self.cache.free(pages.ids[pages.private_from :].tolist())
        self.cache.release(pages.lock)
        request.pages = PageTable()
        request.stats.reached = request.reached
        request.computed_len = 0

    def _slots(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
