"""Admission: waiting requests join the batch by rank, then by the policy, while tokens and pages last.

Example, under the policy `prefix` and with a budget of 100 tokens:

    a       prompt of 80 tokens, 10 of them in the tree
    b       prompt of 90 tokens, 60 of them in the tree
    c       prompt of 90 tokens, 60 of them in the tree, equal to b's up to 80

    order   b, c, a: most tokens in the tree first, ties by age
    b       joins, and computes 30 tokens
    c       waits: b computes 20 more of c's tokens, which are in the tree after this step
    a       joins, and computes 70 tokens

So nothing is computed twice. Every chunk of a prefill can be shared as soon as it is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ramify.radix.lock import Match
from ramify.runtime.scheduler.requests.flows import Flow
from ramify.runtime.scheduler.requests.limits import TUNED
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.programs import Programs
from ramify.runtime.scheduler.requests.request import LEAST_RANK, MOST_RANK, Request, common_prefix

AGEING_TOKENS_PER_S = 2000.0
"""A second of waiting counts as this number of cached tokens. So a steady stream of requests with cached
prompts delays others by a few seconds at most."""

PATIENCE = 16.0
"""Constant of the response ratio: PATIENCE x the mean service of a program is added to every wait. While
waits are shorter than that, the order depends mostly on the service still needed."""

SINGLE_SHARE = 0.5
"""The service still needed by a request without a program counts as at least this share of a program's mean
service. Otherwise a stream of short single requests would keep all programs waiting."""

LAST_BRANCH_SHARE = 0.5
"""Factor on the service still needed by a program whose only open request is inside a fork."""


class FirstComeFirstServed:
    """The order of arrival, and the base of the other policies. Requests with smaller keys go first; of equal
    keys, the older."""

    needs_match = False
    """True if `key` depends on `matched`."""
    siblings_together = False
    """True if the branches of a fork are admitted one after the other, from the place of the first on."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def key(self, request: Request, matched: int, now: float) -> float:
        """The sort key of `request` at the time `now`.

        matched : number of the request's tokens that are in the tree
        """
        return request.arrival


class LongestPrefixFirst(FirstComeFirstServed):
    """Longest prefix match, as in SGLang: the request with most tokens in the tree goes first.

    Each second of waiting counts as `AGEING_TOKENS_PER_S` tokens.
    """

    needs_match = True

    def key(self, request: Request, matched: int, now: float) -> float:
        return -(matched + AGEING_TOKENS_PER_S * (now - request.arrival))


class HighestResponseRatioNext(FirstComeFirstServed):
    """Highest response ratio next (Brinch Hansen 1971): the time waited over the service still needed.

    Shortest remaining time first gives the best mean completion time, but under overload long programs would
    wait without end. Both terms of the ratio are in tokens of service, so that the ratio means the same on
    fast and slow engines and in queues of any length. The waits of all requests of a program are added up:
    otherwise a program of many calls would queue anew for each call.

    `Program.left` estimates the service still needed: by the calls left in the program's graph, or by the
    usual service of programs less the service attained (Autellix, arXiv 2502.13965). The request's tokens
    that are not in the tree are added, so of two branches the one with more cached tokens goes first. For the
    last branch that a join waits for, the estimate is halved. A request without a program is a program of one
    call.
    """

    needs_match = True
    siblings_together = True

    def key(self, request: Request, matched: int, now: float) -> float:
        program, hint = request.program, request.run_hint
        usual = self._programs.usual.service
        left = program.left(None if hint is None else hint.calls_left)
        if hint is None:
            left = max(left, SINGLE_SHARE * usual)
        elif hint.forks and program.open_requests == 1:
            left *= LAST_BRANCH_SHARE
        return -(PATIENCE * usual + self._programs.waited(request)) / (
            left + request.length + request.behind - matched
        )


POLICIES: dict[str, type[FirstComeFirstServed]] = {
    "prefix": LongestPrefixFirst,
    "program": HighestResponseRatioNext,
    "fcfs": FirstComeFirstServed,
}


RESERVED_PAGES = 1
"""Pages that an admission leaves free for every running request. Otherwise the next decoding step might
retract the admitted request at once."""

OVERTAKING = 8
OVERTAKING_BATCHES = 4
"""A request at position p of the queue goes first after ``OVERTAKING * p + OVERTAKING_BATCHES * max_running``
more admissions."""


ALL = (LEAST_RANK, MOST_RANK)
"""The range of all ranks."""


class Candidate(NamedTuple):
    request: Request
    match: Match | None
    """The request's prefix in the tree; None if the policy needs no match."""


@dataclasses.dataclass(eq=False)
class Admission:
    """Picks the waiting requests that join the batch. Waiting and running requests are in the order of
    `Request.order`.

    The rank decides which requests overtake others; within a rank, the policy does. A request that has
    reached its `deadline` goes first, and is not retracted to admit others. Deadlines are counted in
    admissions (`OVERTAKING`), so that no request starves at any load. Requests past their deadlines go in the
    order of these deadlines, together with the branches of their forks if the policy sets
    `siblings_together`.

    retract : retracts a running request: it leaves the list of running requests and gives its pages back
    give_way : aborts the transfer of pages in progress; returns False if there is none
    window : the number of waiting requests, from the first on, that the policy looks at
    admitted : the number of admissions so far
    """

    pages: RequestPages
    policy: FirstComeFirstServed
    max_running: int
    retract: Callable[[Request], None]
    give_way: Callable[[], bool] = lambda: False
    window: int = TUNED.window
    admitted: int = 0

    def admit(
        self,
        waiting: Sequence[Request],
        running: Sequence[Request],
        budget: int,
        now: float,
        joining: tuple[int, int] = ALL,
    ) -> list[Request]:
        """Take pages for the requests that join now, and return these requests.

        The round ends when the requests have `budget` or more tokens to compute. It also ends with the first
        request for which there are too few pages: no smaller request overtakes it. If `max_running` is
        reached or pages are short, running requests of lower rank are retracted.

        joining : the least and the greatest rank of requests that may join; requests past their `deadline`
        may join from below the least rank as well
        """
        admitted: list[Request] = []
        chunk, kept = budget, 0
        least, most = joining
        if budget <= 0 or not waiting or not (waiting[-1].rank <= most and waiting[0].rank >= least):
            return admitted
        if len(running) >= self.max_running and _victim(running, waiting[0]) is None:
            return admitted
        window = _window(waiting, self.window)
        for place, request in enumerate(window):
            if request.deadline is None:
                allowed = OVERTAKING * place + OVERTAKING_BATCHES * self.max_running
                request.deadline = self.admitted + allowed
        if joining != ALL:
            window = [request for request in window if self._may_join(request, least, most)]
        match = self.policy.needs_match
        candidates = [Candidate(one, self.pages.match(one) if match else None) for one in window]
        candidates.sort(key=lambda found: self._order(found, now))
        candidates = self._fairly(candidates)
        if self.policy.siblings_together:
            candidates = together(candidates)
        prefilling = [request for request in running if request.prefilling]
        for request, found in candidates:
            full = len(running) + len(admitted) + kept >= self.max_running
            if budget <= 0 or (full and _victim(running, request) is None):
                break
            matched = found or self.pages.match(request)
            missing = self._being_computed(request, matched.length, prefilling)
            if missing is not None:
                if self.policy.siblings_together and missing <= chunk:
                    kept += 1  # it joins in the next step: its place is kept
                continue
            if full:
                self._retract_for(request, running)
            if not self._take_pages(request, matched, running, admitted):
                break
            request.expired = request.deadline is not None and request.deadline <= self.admitted
            admitted.append(request)
            self.admitted += 1
            budget -= request.extend_len + request.behind
            prefilling.append(request)
        return admitted

    def _may_join(self, request: Request, least: int, most: int) -> bool:
        assert request.deadline is not None
        return request.rank <= most and (request.rank >= least or request.deadline <= self.admitted)

    def _take_pages(
        self, request: Request, match: Match, running: Sequence[Request], admitted: Sequence[Request]
    ) -> bool:
        """Take pages for `request`. If too few are available, retract running requests of lower rank. Returns
        False if there are still too few."""
        while True:
            others = len(running) + len(admitted)
            if self.pages.try_admit(request, match, RESERVED_PAGES * others):
                return True
            if not others:
                while self.give_way():
                    pass
                return self.pages.admit_alone(request)
            if not self._retract_for(request, running):
                return False

    def _retract_for(self, request: Request, running: Sequence[Request]) -> bool:
        """Retract one running request of a lower rank than `request`. Returns False if there is none."""
        victim = _victim(running, request)
        if victim is not None:
            self.retract(victim)
        return victim is not None

    def _order(self, found: Candidate, now: float) -> tuple[bool, int, float, float]:
        request = found.request
        assert request.deadline is not None
        if request.deadline <= self.admitted:
            return False, 0, request.deadline, request.arrival
        matched = 0 if found.match is None else found.match.length
        return True, -request.rank, self.policy.key(request, matched, now), request.arrival

    def _fairly(self, candidates: list[Candidate]) -> list[Candidate]:
        """Reorder the candidates of each rank: of several heavy flows of a key, the flow with fewer running
        requests goes first. So two long lists of prompts get equal numbers of running requests. The calls of
        programs stay in the order of the policy, which weighs whole programs. Then the same is done for all
        requests of heavy keys."""
        ordered = self._by_running(
            candidates, lambda request: request.flow if request.run_hint is None else None
        )
        return self._by_running(ordered, lambda request: request.flow.key)

    def _by_running(
        self, candidates: list[Candidate], flow_of: Callable[[Request], Flow | None]
    ) -> list[Candidate]:
        """`candidates`, of each rank those first whose heavy flow has fewer running requests."""
        taken: dict[Flow, int] = {}
        order: list[tuple[bool, int, int]] = []
        for request, _ in candidates:
            assert request.deadline is not None
            flow, place = flow_of(request), 0
            waits = request.deadline > self.admitted
            if waits and flow is not None and flow.heavy:
                place = taken.get(flow, flow.running)
                taken[flow] = place + 1
            order.append((waits, -request.rank if waits else 0, place))
        if len(taken) < 2:
            return candidates
        return [candidates[index] for index in sorted(range(len(candidates)), key=order.__getitem__)]

    def _being_computed(self, request: Request, matched: int, prefilling: Sequence[Request]) -> int | None:
        """The number of tokens that `request` shares with a prefilling request and that are not computed yet.

        None if no request in `prefilling` shares more than the first `matched` tokens, which are in the tree
        already. Also None if the model has states and no state will be kept at the end of the shared tokens.
        """
        limit = request.match_limit
        if matched >= limit:
            return None
        for other in prefilling:
            # A request of lower rank may sit out steps, so it is not waited for.
            if other.scope == request.scope and other.rank >= request.rank:
                shared = min(common_prefix(request.ids, other.ids[: other.prompt_len]), limit)
                states = self.pages.states
                if shared > matched and (
                    not states.present or states.shares(request, other, shared, matched)
                ):
                    return shared - other.computed_len
        return None


def _window(waiting: Sequence[Request], count: int) -> Sequence[Request]:
    """The first `count` requests of `waiting`, and some of the others: the oldest one, if ranks differ; the
    first request of each heavy flow that has no request in the window yet, and the first ``count // 4``
    requests of each heavy key that has none."""
    if len(waiting) <= count:
        return waiting
    window = list(waiting[:count])
    if waiting[-1].rank < waiting[0].rank:
        window.append(min(waiting[count:], key=lambda request: request.arrival))
    room = {flow: 0 for request in window for flow in request.flow.levels}
    most = count // 4
    for request in waiting[count:]:
        flow, key = request.flow, request.flow.key
        assert key is not None
        if (flow.heavy and room.get(flow, 1)) or (key.heavy and room.get(key, most)):
            window.append(request)
            room[flow], room[key] = 0, max(room.get(key, most) - 1, 0)
    return window


def _victim(running: Sequence[Request], request: Request) -> Request | None:
    """The newest request of the lowest rank in `running`, among requests of lower rank than `request` whose
    `expired` is False; None if there is none."""
    for other in reversed(running):
        if other.rank >= request.rank:
            return None
        if not other.expired:
            return other
    return None


def together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """`candidates`, with the branches of each fork moved right after the first branch. Branches in one batch
    read their common prefix only once."""
    groups: dict[object, list[Candidate]] = {}
    for found in candidates:
        hint = found.request.hint
        fork = (hint.program, hint.forks[-1]) if hint is not None and hint.forks else found.request.rid
        groups.setdefault(fork, []).append(found)
    return [found for group in groups.values() for found in group]
