"""Which waiting requests join the batch: by rank, then by the policy, while tokens and pages last.

Example, under the policy `prefix` and with a budget of 100 tokens:

    a       prompt of 80 tokens, 10 of them in the tree
    b       prompt of 90 tokens, 60 of them in the tree
    c       prompt of 90 tokens, 60 of them in the tree, equal to b's up to 80

    order   b, c, a: most tokens in the tree first, of equals the older
    b       joins, and computes 30 tokens
    c       waits: b computes 20 more of its tokens, which are in the tree after this step
    a       joins, and computes 70 tokens

So nothing is computed twice. Every chunk of a prefill can be shared as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ramify.radix.lock import Match
from ramify.runtime.scheduler.admission.flows import Flow
from ramify.runtime.scheduler.admission.policy import FirstComeFirstServed
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.request import LEAST_RANK, MOST_RANK, Request, common_prefix

WINDOW = 256
"""Waiting requests that the policy looks at, the first ones: matching costs about 20 us each."""

RESERVED_PAGES = 1
"""Pages left free for every running request, so that decoding does not retract at once what was admitted."""

OVERTAKING = 8
OVERTAKING_BATCHES = 4
"""A request at position p of the queue goes first after ``OVERTAKING * p + OVERTAKING_BATCHES * max_running``
more admissions."""


ALL = (LEAST_RANK, MOST_RANK)
"""All ranks."""


class Candidate(NamedTuple):
    request: Request
    match: Match | None
    """None where the policy needs none."""


class Admission:
    """Picks from the waiting requests. These, and the running ones, are in the order of `Request.order`.

    Rank and then the policy say who overtakes whom. A request that has been overtaken for long enough
    goes first (`OVERTAKING`), and keeps its place: counted in admissions, so that nobody starves, at any load
    and on any engine. Only branches of the same fork as the first request may still go before it.

    retract : called with a running request that yields its place or its pages, and takes it off the list
    """

    def __init__(
        self,
        pages: RequestPages,
        policy: FirstComeFirstServed,
        max_running: int,
        retract: Callable[[Request], None],
    ) -> None:
        self._pages = pages
        self._policy = policy
        self._max_running = max_running
        self._retract = retract
        self._admitted = 0

    def next(
        self,
        waiting: Sequence[Request],
        running: Sequence[Request],
        budget: int,
        now: float,
        joining: tuple[int, int] = ALL,
    ) -> list[Request]:
        """The requests that join now, pages taken; at most as many as prefill within `budget` tokens.

        The first request that does not fit into the pages ends the round: no smaller one overtakes it. Where
        places or pages are short, running requests of lower rank are retracted.

        joining : ranks that may join: the least and the greatest. Requests past their deadline may have less
        """
        admitted: list[Request] = []
        chunk, kept = budget, 0
        least, most = joining
        if budget <= 0 or not waiting or not (waiting[-1].rank <= most and waiting[0].rank >= least):
            return admitted
        if len(running) >= self._max_running and _victim(running, waiting[0]) is None:
            return admitted
        window = _window(waiting)
        for place, request in enumerate(window):
            if request.deadline is None:
                allowed = OVERTAKING * place + OVERTAKING_BATCHES * self._max_running
                request.deadline = self._admitted + allowed
        if joining != ALL:
            window = [request for request in window if self._may_join(request, least, most)]
        match = self._pages.match if self._policy.needs_match else _unmatched
        candidates = [Candidate(request, match(request)) for request in window]
        candidates.sort(key=lambda found: self._order(found, now))
        candidates = self._fairly(candidates)
        if self._policy.siblings_together:
            candidates = together(candidates)
        prefilling = [request for request in running if request.prefilling]
        for request, found in candidates:
            full = len(running) + len(admitted) + kept >= self._max_running
            if budget <= 0 or (full and _victim(running, request) is None):
                break
            matched = found or self._pages.match(request)
            missing = self._being_computed(request, matched.length, prefilling)
            if missing is not None:
                if self._policy.siblings_together and missing <= chunk:
                    kept += 1  # it joins in the next step: its place is kept
                continue
            if full:
                self._retract_for(request, running)
            if not self._admit(request, matched, running, admitted):
                break
            request.expired = request.deadline is not None and request.deadline <= self._admitted
            admitted.append(request)
            self._admitted += 1
            budget -= request.extend_len
            prefilling.append(request)
        return admitted

    def _may_join(self, request: Request, least: int, most: int) -> bool:
        assert request.deadline is not None
        return request.rank <= most and (request.rank >= least or request.deadline <= self._admitted)

    def _admit(
        self, request: Request, match: Match, running: Sequence[Request], admitted: Sequence[Request]
    ) -> bool:
        """Take the pages of `request`, if need be those of requests of lower rank."""
        while True:
            others = len(running) + len(admitted)
            if self._pages.try_admit(request, match, RESERVED_PAGES * others):
                return True
            if not others:
                return self._pages.admit_alone(request)
            if not self._retract_for(request, running):
                return False

    def _retract_for(self, request: Request, running: Sequence[Request]) -> bool:
        """Retract one request of lower rank; False where there is none."""
        victim = _victim(running, request)
        if victim is not None:
            self._retract(victim)
        return victim is not None

    def _order(self, found: Candidate, now: float) -> tuple[bool, int, float, float]:
        request = found.request
        assert request.deadline is not None
        if request.deadline <= self._admitted:
            return False, 0, request.deadline, request.arrival
        matched = 0 if found.match is None else found.match.length
        return True, -request.rank, self._policy.key(request, matched, now), request.arrival

    def _fairly(self, candidates: list[Candidate]) -> list[Candidate]:
        """Of requests of one rank, those of the heavy flow with fewer places go first: two long lists get as
        many each. The calls of programs stay in the order of the policy, which weighs programs."""
        taken: dict[Flow, int] = {}
        order: list[tuple[bool, int, int]] = []
        for request, _ in candidates:
            assert request.deadline is not None
            flow, place = request.flow, 0
            waits = request.deadline > self._admitted
            if waits and flow.heavy and request.hint is None:
                place = taken.get(flow, flow.running)
                taken[flow] = place + 1
            order.append((waits, -request.rank if waits else 0, place))
        if len(taken) < 2:
            return candidates
        return [candidates[index] for index in sorted(range(len(candidates)), key=order.__getitem__)]

    def _being_computed(self, request: Request, matched: int, prefilling: Sequence[Request]) -> int | None:
        """The number of tokens that `request` shares with one that prefills and that are not computed there.

        None where it shares no more than it finds in the tree (`matched`), or where a state at the end of it
        will not be kept.
        """
        limit = request.match_limit
        if matched >= limit:
            return None
        for other in prefilling:
            # One of lower rank may sit out.
            if other.scope == request.scope and other.rank >= request.rank:
                shared = min(common_prefix(request.ids, other.ids[: other.prompt_len]), limit)
                states = self._pages.states
                if shared > matched and (
                    not states.present or states.shares(request, other, shared, matched)
                ):
                    return shared - other.computed_len
        return None


def _unmatched(request: Request) -> None:
    """In the place of a match."""


def _window(waiting: Sequence[Request]) -> Sequence[Request]:
    """The first `WINDOW` requests, the oldest of the others where these are of lower rank, and the first of
    each heavy flow that has none before."""
    if len(waiting) <= WINDOW:
        return waiting
    window = list(waiting[:WINDOW])
    if waiting[-1].rank < waiting[0].rank:
        window.append(min(waiting[WINDOW:], key=lambda request: request.arrival))
    seen = {request.flow for request in window}
    for request in waiting[WINDOW:]:
        if request.flow.heavy and request.flow not in seen:
            seen.add(request.flow)
            window.append(request)
    return window


def _victim(running: Sequence[Request], request: Request) -> Request | None:
    """The newest running request of the lowest rank, where that is below the rank of `request`."""
    for other in reversed(running):
        if other.rank >= request.rank:
            return None
        if not other.expired:
            return other
    return None


def together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Moves the branches of a fork right behind the first of them, so that one batch reads what they
    share."""
    groups: dict[object, list[Candidate]] = {}
    for found in candidates:
        hint = found.request.hint
        fork = (hint.program, hint.forks[-1]) if hint is not None and hint.forks else found.request.rid
        groups.setdefault(fork, []).append(found)
    return [found for group in groups.values() for found in group]
