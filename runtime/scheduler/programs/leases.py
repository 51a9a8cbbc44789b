"""What the hints of programs become: leases on pages, ordered by when they are needed again."""

from __future__ import annotations

from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.programs.programs import Program
from ramify.runtime.scheduler.programs.reuse_intervals import Waits
from ramify.runtime.scheduler.request import Request, common_prefix

RETRACTED_S = 600.0
"""A retracted request's pages are leased until it runs again or ends; this is the most."""


class ProgramLeases:
    """Keeps, for every branch of a live program, a lease on what the branch holds.

    A branch has one lease, at the end of its last request. A fork has one as well, on what the prompts of
    all requests inside it have in common: from there its parent goes on after the join. All of a
    program's leases end with it.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._waits = Waits()

    def arrived(self, request: Request) -> None:
        """A request of a program is here: its branch's pages are needed now, those of ended ones are not."""
        hint = request.hint
        if hint is None:
            return
        forks = request.program.forks
        for part in hint.ended:
            if part in forks:  # joined: this may be the request that goes on from there
                self._cache.expect(hint.program, part, 0.0)
            else:
                self._cache.end_leases(hint.program, part)
        if hint.branch:
            self._waits.end(request.program.waits, hint.branch, request.arrival)
            self._cache.expect(hint.program, hint.branch, 0.0)
        prompt = request.ids
        for fork in hint.forks:
            known = forks.get(fork)
            forks[fork] = prompt if known is None else known[: common_prefix(known, prompt)]

    def await_tools(self, program: Program, name: str, branch: str, tools: tuple[str, ...]) -> None:
        """The branch stays away until these tools have returned, which its request could not know."""
        expected = [self._waits.say(program.waits, branch, f"tool {tool}") for tool in tools]
        known = [seconds for seconds in expected if seconds is not None]
        if known:
            self._cache.expect(name, branch, max(known))

    def admitted(self, request: Request) -> None:
        """Its pages are locked: what kept them for it until now is not needed any more."""
        if request.retractions:
            self._cache.end_leases(request.owner, request.rid)
        for part in () if request.hint is None else request.hint.ended:
            if request.program.forks.pop(part, None) is not None:
                self._cache.end_leases(request.owner, part)

    def retracted(self, request: Request) -> None:
        """It comes back as soon as there is room. Called before its hold is released."""
        if request.lock is not None:
            self._cache.lease(request.lock, request.owner, RETRACTED_S, 0.0, request.rid)

    def rested(self, request: Request) -> None:
        """Nobody needs any more what it had computed for others."""
        self._cache.end_leases(request.owner, request.rid)

    def ended(self, request: Request, now: float) -> None:
        """Lease what a request leaves behind, as its hint says. Called before its hold is released."""
        if request.retractions:
            self._cache.end_leases(request.owner, request.rid)
        hint = request.hint
        if hint is None or request.lock is None or hint.lease_s <= 0:
            return
        for fork in hint.forks:
            common = request.program.forks.get(fork)
            if common is not None:
                seconds = self._waits.expected(request.program.waits, "join")
                self._take(request, seconds, fork, min(len(common), request.lock.length))
        if hint.next_use != "never":
            seconds = self._waits.begin(request.program.waits, hint.branch, hint.next_use, now)
            self._take(request, seconds, hint.branch, request.lock.length)

    def end_program(self, program: str) -> None:
        self._cache.end_leases(program)

    def _take(self, request: Request, needed_in: float, part: str, length: int) -> None:
        """The lease of a part moves here. Requests that name no branch have a lease each."""
        lock, hint = request.lock, request.hint
        assert lock is not None
        assert hint is not None
        if part:
            self._cache.end_leases(hint.program, part)
        self._cache.lease(lock, hint.program, hint.lease_s, needed_in, part, length)
