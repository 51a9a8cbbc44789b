"""The pages of requests: taken at admission, added while decoding, handed to the prefix tree, given back.

A request's page table is split at `PrefixLock.private_from`. The tree owns the pages before it, and the
request's lock keeps them in the tree. The request owns the other pages. New tokens are always written to rows
that no other request reads: either in a page of the request, or in a page that the request itself has put
into the tree, after its committed rows.
"""

from __future__ import annotations

import logging
from typing import TypeAlias

from ramify.errors import PromptTooLong
from ramify.radix.cache import PrefixCache
from ramify.radix.lock import Match
from ramify.runtime.cold.tier import ColdTier
from ramify.runtime.cold.writer import Prefix
from ramify.runtime.scheduler.requests.branches import BranchPages
from ramify.runtime.scheduler.requests.decisions import Decisions
from ramify.runtime.scheduler.requests.limits import TUNED, Limits, Tuning
from ramify.runtime.scheduler.requests.parts import PageTable
from ramify.runtime.scheduler.requests.programs import Program, ReuseIntervals
from ramify.runtime.scheduler.requests.request import Request, common_prefix
from ramify.runtime.scheduler.requests.slots import RunningSlots
from ramify.runtime.scheduler.requests.states import RequestStates

Cold: TypeAlias = ColdTier[Request]
log = logging.getLogger("ramify")

RETRACTED_S = 600.0
"""The pages of a retracted request are leased until it runs again or ends, but for at most RETRACTED_S
seconds."""


class ProgramLeases:
    """Keeps a lease for every branch and every fork of a live program. All of these leases end with the
    program.

    The lease of a branch covers all tokens of its last request. The lease of a fork covers the common prefix
    of the prompts of all requests inside the fork, because the parent continues from that prefix after the
    join.
    """

    def __init__(self, cache: PrefixCache, cold: Cold | None = None) -> None:
        self._cache = cache
        self._cold = cold
        self._intervals = ReuseIntervals()

    def arrived(self, request: Request) -> None:
        """Mark the leases of the request's branch as needed now, and release the leases of branches that have
        ended. Update the common prefix of each fork that `request` is inside."""
        hint = request.hint
        if hint is None:
            return
        forks = request.program.forks
        for part in hint.ended:
            if part in forks:  # joined: this request may go on from the prefix of the fork
                self._cache.expect(hint.program, part, 0.0)
            else:
                self._cache.end_leases(hint.program, part)
                request.program.intervals.open.pop(part, None)
                if self._cold is not None:
                    self._cold.expected.expect_no_more(hint.program, part)
        if hint.branch:
            if self._cold is not None:
                self._cold.expected.expect_no_more(hint.program, hint.branch)
            self._intervals.end_interval(request.program.intervals, hint.branch, request.arrival)
            self._cache.expect(hint.program, hint.branch, 0.0)
        prompt = request.ids
        for fork in hint.forks:
            known = forks.get(fork)
            forks[fork] = prompt if known is None else known[: common_prefix(known, prompt)]

    def await_tools(self, program: Program, name: str, branch: str, tools: tuple[str, ...]) -> None:
        """Expect the next request of `branch` of the program `name` when all `tools` have returned. The tools
        were not known yet when the last request of the branch was sent."""
        expected = [self._intervals.set_kind(program.intervals, branch, f"tool {tool}") for tool in tools]
        known = [seconds for seconds in expected if seconds is not None]
        if known:
            self._cache.expect(name, branch, max(known))
            if self._cold is not None:
                self._cold.expected.expect_again(name, branch, max(known))

    def admitted(self, request: Request) -> None:
        """Release the leases that kept pages for `request`, which has locked these pages now."""
        if request.stats.retractions:
            self.end_own(request)
        for part in () if request.hint is None else request.hint.ended:
            if request.program.forks.pop(part, None) is not None:
                self._cache.end_leases(request.owner, part)

    def end_own(self, request: Request) -> None:
        """Release the lease taken when `request` was retracted, or for the spans after its span."""
        self._cache.end_leases(request.owner, request.rid)

    def retracted(self, request: Request) -> None:
        """Lease all computed pages of `request`, which runs again as soon as there is room. Called before the
        request's lock is released."""
        lock = request.pages.lock
        if lock is not None:
            self._cache.lease(lock, request.owner, RETRACTED_S, 0.0, request.rid)

    def ended(self, request: Request, now: float) -> None:
        """Lease the computed pages of `request`, which ends, as `request.hint` says. Called before the
        request's lock is released."""
        if request.stats.retractions:
            self.end_own(request)
        hint, lock, program = request.hint, request.pages.lock, request.program
        if hint is None or lock is None or not hint.lease_s > 0:  # NaN is no lease
            return
        if hint.pinned and request.computed_len < request.prompt_len:  # aborted: nobody will release it
            return
        for fork in hint.forks:
            common = program.forks.get(fork)
            if common is not None:
                seconds = self._intervals.expected(program.intervals, "join")
                self._take(request, seconds, fork, min(len(common), lock.length))
        if hint.next_use != "never":
            seconds = self._intervals.begin_interval(program.intervals, hint.branch, hint.next_use, now)
            self._take(request, seconds, hint.branch, lock.length)
            if self._cold is not None and hint.branch:
                prefix = Prefix(request.ids[: lock.length], request.scope)
                self._cold.expected.expect(hint.program, hint.branch, prefix, hint.lease_s, seconds)

    def end_program(self, program: str) -> None:
        self._cache.end_leases(program)
        if self._cold is not None:
            self._cold.expected.expect_no_more(program)

    def _take(self, request: Request, needed_in: float, part: str, length: int) -> None:
        """Move the lease of `part`, a branch or a fork, to the first `length` tokens of `request`.

        If `part` is "", because the request names no branch, a lease is added and none is moved.
        """
        lock, hint = request.pages.lock, request.hint
        assert lock is not None
        assert hint is not None
        if part:
            self._cache.end_leases(hint.program, part)
        self._cache.lease(
            lock, hint.program, hint.lease_s, needed_in, part, length, pinned=hint.pinned, note=hint
        )


class RequestPages:
    """Moves pages between requests and the prefix cache. A request with pages has a slot in `slots`."""

    def __init__(self, cache: PrefixCache, tuning: Tuning = TUNED, cold: Cold | None = None) -> None:
        self.cache = cache
        self.cold = cold
        self.page_size = cache.page_size
        self.slots = RunningSlots()
        self.leases = ProgramLeases(cache, cold)
        self.states = RequestStates(cache, tuning.least_state)
        self.branches = BranchPages(cache, self.states)

    def match(self, request: Request) -> Match:
        return self.cache.match(request.ids, request.scope, limit=request.match_limit)

    def try_admit(self, request: Request, match: Match, reserve: int) -> bool:
        """Take the pages of `match`, new pages for the request's other tokens, and a slot if the model has
        states.

        Returns False, and takes nothing, if fewer than `reserve` pages would be left or if there is no slot.
        For a request with questions, there have to be enough pages and slots for one form too.
        """
        slots, decisions = 1, request.decisions
        if decisions is not None:
            slots += decisions.slots
            reserve += decisions.most_pages(self.page_size)
        if not self.states.available(slots):
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
        request.pages = PageTable(self.slots, self.slots.take(request), 0, lock, lock.length, copy)
        request.pages.extend(lock.pages[:full] + new)
        request.computed_len = lock.length
        if self.states.present:
            self.states.take_slot(request, lock, match)
        return True

    def admit_alone(self, request: Request) -> bool:
        """Evict everything that is cached, and admit `request`. No other request may be running. Pins give
        way only if `request` does not fit beside them.

        Each fork of the tree inside a page keeps one more page locked, so a shared prefix may lock more pages
        than its tokens fill. Without shared pages, any request within `Limits` fits.
        """
        while True:
            self.cache.flush(pins=False)
            if self.try_admit(request, self.match(request), reserve=0):
                return True
            if not self.unpin(request):
                return False

    def unpin(self, request: Request) -> bool:
        """Make the pin that ends first an ordinary lease, because `request` runs alone and does not fit
        beside the pins. Returns False if there is no pin."""
        lease = self.cache.unpin()
        if lease is not None:
            about = "the pin %s is an ordinary lease now: request %s needs its KV pages to run at all"
            log.warning(about, lease.owner, request.rid)
        return lease is not None

    def check_decisions(self, decisions: Decisions, limits: Limits) -> None:
        """Raise `PromptTooLong` for a question that does not fit into the engine behind its prompt."""
        limits.check_decisions(decisions, self.page_size)
        slots, total = 1 + decisions.slots, self.cache.state_counts().total
        if self.states.present and slots > total:
            raise PromptTooLong(
                f"The options of a question need {slots} states at a time; this engine has {total}.",
                field="decide.questions",
                remedy="Give fewer options, or give the engine a larger state_memory_gb.",
            )

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Take pages until there is room for all tokens of `request` and `ahead` more. Returns False, and
        takes none, if too few pages are available."""
        missing = self._slots(request.target_len + ahead) - request.pages.count
        if missing <= 0:
            return True
        new = self.cache.allocate(missing, request.taker)
        if new is None:
            return False
        request.pages.extend(new)
        return True

    def commit(self, request: Request) -> None:
        """Put all computed tokens of `request` into the tree, so that other requests can share the pages."""
        pages = request.pages
        if request.computed_len == pages.committed_len:
            return
        assert pages.lock is not None
        slots = self._slots(request.computed_len)
        held = pages.ids[:slots].tolist()
        pages.ids[:slots] = self.cache.commit(pages.lock, request.ids[: request.computed_len], held)
        pages.committed_len = request.computed_len

    def retract(self, request: Request) -> None:
        """Give back all pages of `request`. Computed pages are leased until `request` is admitted again."""
        self.commit(request)
        self.leases.retracted(request)
        self._let_go(request, keep_state=True)

    def rest(self, request: Request, now: float, *, awaited: bool = False) -> None:
        """Give back all pages of `request`, which ends. Computed pages stay in the tree until evicted. With
        `awaited`, these pages are leased, because spans that follow the request need them at once."""
        self.commit(request)
        self.leases.ended(request, now)
        if awaited:
            self.leases.retracted(request)
        ends = request.hint is not None and request.hint.next_use == "never"
        self._let_go(request, keep_state=awaited or not ends)

    def _let_go(self, request: Request, *, keep_state: bool) -> None:
        pages = request.pages
        if pages.lock is None:
            return
        if request.decisions is not None:
            self.branches.drop(request)
        if self.cold is not None:
            self._keep_cold(request, self.cold)
        self.states.give_back(request, keep=keep_state)
        self.cache.free(pages.ids[pages.lock.private_from :].tolist())
        self.cache.release(pages.lock)
        self.slots.free(pages.slot, pages.count)
        request.pages = PageTable()
        request.stats.reached = request.reached
        request.computed_len = 0

    def _keep_cold(self, request: Request, cold: Cold) -> None:
        """Have the computed tokens of `request` written to the cold tier."""
        hint, computed = request.hint, request.ids[: request.computed_len]
        leased = hint is not None and hint.lease_s > 0 and hint.next_use != "never"
        if not leased and (twice := request.stats.cached_tokens):
            cold.writer.note(Prefix(computed[:twice], request.scope), valuable=True)
        cold.writer.note(Prefix(computed, request.scope), valuable=leased)

    def _slots(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
