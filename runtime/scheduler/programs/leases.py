"""Leases on the pages of programs, taken as the hints of their requests say and ordered by expected reuse."""

from __future__ import annotations

from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.programs.programs import Program
from ramify.runtime.scheduler.programs.reuse_intervals import ReuseIntervals
from ramify.runtime.scheduler.request import Request, common_prefix

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
        """The pages of the request's branch are needed now; leases of ended branches end."""
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
            self._intervals.end(request.program.intervals, hint.branch, request.arrival)
            self._cache.expect(hint.program, hint.branch, 0.0)
        prompt = request.ids
        for fork in hint.forks:
            known = forks.get(fork)
            forks[fork] = prompt if known is None else known[: common_prefix(known, prompt)]

    def await_tools(self, program: Program, name: str, branch: str, tools: tuple[str, ...]) -> None:
        """The branch comes back when all `tools` have returned. Its last request could not name them."""
        expected = [self._intervals.set_kind(program.intervals, branch, f"tool {tool}") for tool in tools]
        known = [seconds for seconds in expected if seconds is not None]
        if known:
            self._cache.expect(name, branch, max(known))

    def admitted(self, request: Request) -> None:
        """The request has locked its pages: leases that kept them for it end."""
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
        """No other span needs what this request has computed."""
        self._cache.end_leases(request.owner, request.rid)

    def ended(self, request: Request, now: float) -> None:
        """Lease what a request leaves behind, as its hint says. Called before its lock is released."""
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
            seconds = self._intervals.begin(program.intervals, hint.branch, hint.next_use, now)
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
