"""Admission: waiting requests join the batch by rank, then by the policy, while tokens and pages last.

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
from ramify.runtime.scheduler.requests.flows import Flow
from ramify.runtime.scheduler.requests.limits import TUNED
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.programs import Programs
from ramify.runtime.scheduler.requests.request import LEAST_RANK, MOST_RANK, Request, common_prefix

AGEING_TOKENS_PER_S = 2000.0
"""Cached tokens that a second of waiting counts as: a steady stream of requests with cached prompts delays
others by a few seconds at most."""

PATIENCE = 16.0
"""Constant of the response ratio: PATIENCE x the mean service of a program is added to every wait. While
waits are shorter than that, sizes decide."""

SINGLE_SHARE = 0.5
"""A request without a program counts as at least this share of a usual program: else a stream of short single
requests would let all programs wait."""

LAST_BRANCH_SHARE = 0.5
"""Factor on what is left of a program where a request is the last open one of its fork."""


class FirstComeFirstServed:
    """The base of the other policies. Smaller keys go first, then arrivals."""

    needs_match = False
    """`key` needs `matched`, the request's tokens in the tree."""
    siblings_together = False
    """Branches of a fork are admitted one after the other, in the place of the first of them."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def key(self, request: Request, matched: int, now: float) -> float:
        """matched : tokens of the request that are in the tree"""
        return request.arrival


class LongestPrefixFirst(FirstComeFirstServed):
    """The request with most tokens in the tree goes first (SGLang's longest prefix match).

    Each second of waiting counts as `AGEING_TOKENS_PER_S` tokens.
    """

    needs_match = True

    def key(self, request: Request, matched: int, now: float) -> float:
        return -(matched + AGEING_TOKENS_PER_S * (now - request.arrival))


class HighestResponseRatioNext(FirstComeFirstServed):
    """Brinch Hansen 1971: the time waited over the service still needed.

    Shortest remaining time first gives the best mean completion time, but under overload long programs would
    wait without end. Both terms of the ratio are in tokens of service, so that it means the same on fast and
    slow engines and in queues of any length. The waits of a program's requests add up: else a program of many
    calls would queue anew for each. The service still needed comes from the graph, from earlier programs of
    the same name, or from all programs, less the service attained (Autellix, arXiv 2502.13965); see
    `Program.left`. Tokens to be computed are added, so of two branches the one with more cached tokens goes
    first. The last branch that a join waits for counts half. A request without a program is a program of one
    call.
    """

    needs_match = True
    siblings_together = True

    def key(self, request: Request, matched: int, now: float) -> float:
        program, hint = request.program, request.hint
        usual = self._programs.usual.service
        left = program.left(None if hint is None else hint.calls_left)
        if hint is None:
            left = max(left, SINGLE_SHARE * usual)
        elif hint.forks and program.open_requests == 1:
            left *= LAST_BRANCH_SHARE
        return -(PATIENCE * usual + self._programs.waited(request)) / (left + request.length - matched)


POLICIES: dict[str, type[FirstComeFirstServed]] = {
    "prefix": LongestPrefixFirst,
    "program": HighestResponseRatioNext,
    "fcfs": FirstComeFirstServed,
}


RESERVED_PAGES = 1
"""Pages left free for every running request, so that decoding does not retract at once what was admitted."""

OVERTAKING = 8
OVERTAKING_BATCHES = 4
"""A request at position p of the queue goes first after ``OVERTAKING * p + OVERTAKING_BATCHES * max_running``
more admissions."""


ALL = (LEAST_RANK, MOST_RANK)
"""The range of all ranks."""


class Candidate(NamedTuple):
    request: Request
    match: Match | None
    """The request's prefix in the tree; None where the policy needs no match."""


class Admission:
    """Picks from the waiting requests. These, and the running ones, are in the order of `Request.order`.

    Rank and then the policy say who overtakes whom. A request that has been overtaken for long enough
    goes first (`OVERTAKING`), and keeps its place: counted in admissions, so that nobody starves, at any load
    and on any engine. Only branches of the same fork as the first request may still go before it.

    retract : called with a running request that yields its place or its pages, and takes it off the list
    give_way : ends a transfer of pages, which a request needs
    window : waiting requests that the policy looks at, the first ones
    """

    def __init__(
        self,
        pages: RequestPages,
        policy: FirstComeFirstServed,
        max_running: int,
        retract: Callable[[Request], None],
        give_way: Callable[[], bool] = lambda: False,
        window: int = TUNED.window,
    ) -> None:
        self._pages = pages
        self._policy = policy
        self._max_running = max_running
        self._retract = retract
        self._give_way = give_way
        self._window = window
        self._admitted = 0

    def admit(
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

        joining : the least and the greatest rank of requests that may join; requests past their deadline may
        have less
        """
        admitted: list[Request] = []
        chunk, kept = budget, 0
        least, most = joining
        if budget <= 0 or not waiting or not (waiting[-1].rank <= most and waiting[0].rank >= least):
            return admitted
        if len(running) >= self._max_running and _victim(running, waiting[0]) is None:
            return admitted
        window = _window(waiting, self._window)
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
            if not self._take_pages(request, matched, running, admitted):
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

    def _take_pages(
        self, request: Request, match: Match, running: Sequence[Request], admitted: Sequence[Request]
    ) -> bool:
        """Take the pages of `request`, if need be those of requests of lower rank."""
        while True:
            others = len(running) + len(admitted)
            if self._pages.try_admit(request, match, RESERVED_PAGES * others):
                return True
            if not others:
                self._give_way()
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
        """Order requests of one rank so that the heavy flow with fewer places goes first: two long lists get
        equally many places. The calls of programs stay in the order of the policy, which weighs programs."""
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
        """Tokens that `request` shares with a prefilling request and that are not computed there yet.

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
    """No match, for policies that need none."""


def _window(waiting: Sequence[Request], count: int) -> Sequence[Request]:
    """The first `count` requests, the oldest of the others where these are of lower rank, and the first of
    each heavy flow that has none before."""
    if len(waiting) <= count:
        return waiting
    window = list(waiting[:count])
    if waiting[-1].rank < waiting[0].rank:
        window.append(min(waiting[count:], key=lambda request: request.arrival))
    seen = {request.flow for request in window}
    for request in waiting[count:]:
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
