"""Which waiting requests join the batch: in the order of the policy, while tokens and pages last.

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

from collections.abc import Sequence
from typing import NamedTuple

from ramify.radix.lock import Match
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.policy import FirstComeFirstServed
from ramify.runtime.scheduler.request import Request, common_prefix

WINDOW = 256
"""Waiting requests that the policy looks at, oldest first: matching costs about 20 us each."""

RESERVED_PAGES = 1
"""Pages left free for every running request, so that decoding does not retract at once what was admitted."""

OVERTAKING = 8
OVERTAKING_BATCHES = 4
"""A request at position p of the queue goes first after ``OVERTAKING * p + OVERTAKING_BATCHES * max_running``
more admissions."""


class Candidate(NamedTuple):
    request: Request
    match: Match


class Admission:
    """Picks from the waiting requests, which are in the order of arrival.

    The policy says who overtakes whom. A request that has been overtaken for long enough goes first
    (`OVERTAKING`): counted in admissions, so that nobody starves, at any load and on any engine. Only
    branches of the same fork as the first request may still go before it.
    """

    def __init__(self, pages: RequestPages, policy: FirstComeFirstServed, max_running: int) -> None:
        self._pages = pages
        self._policy = policy
        self._max_running = max_running
        self._admitted = 0

    def next(
        self, waiting: Sequence[Request], running: Sequence[Request], budget: int, now: float
    ) -> list[Request]:
        """The requests that join now, pages taken; at most as many as prefill within `budget` tokens.

        The first request that does not fit into the pages ends the round: no smaller one overtakes it.
        """
        admitted: list[Request] = []
        chunk = budget
        room = self._max_running - len(running)
        if room <= 0 or budget <= 0 or not waiting:
            return admitted
        window = waiting[:WINDOW]
        for place, request in enumerate(window):
            if request.due is None:
                allowed = OVERTAKING * place + OVERTAKING_BATCHES * self._max_running
                request.due = self._admitted + allowed
        if self._policy.needs_match:
            candidates = [Candidate(request, self._pages.match(request)) for request in window]
            candidates.sort(key=lambda found: self._order(found, now))
        else:
            candidates = [Candidate(request, self._pages.match(request)) for request in window[:room]]
        if self._policy.siblings_together:
            candidates = together(candidates)
        prefilling = [request for request in running if request.prefilling]
        for request, match in candidates:
            if budget <= 0 or len(admitted) >= room:
                break
            missing = self._being_computed(request, match.length, prefilling)
            if missing is not None:
                if self._policy.siblings_together and missing <= chunk:
                    room -= 1  # it joins in the next step: its place is kept
                continue
            reserve = RESERVED_PAGES * (len(running) + len(admitted))
            if not self._pages.try_admit(request, match, reserve) and (
                running or admitted or not self._pages.admit_alone(request)
            ):
                break
            admitted.append(request)
            self._admitted += 1
            budget -= request.extend_len
            prefilling.append(request)
        return admitted

    def _order(self, found: Candidate, now: float) -> tuple[bool, float, float]:
        request = found.request
        assert request.due is not None
        if request.due <= self._admitted:
            return False, request.due, request.arrival
        return True, self._policy.key(request, found.match.length, now), request.arrival

    def _being_computed(self, request: Request, matched: int, prefilling: Sequence[Request]) -> int | None:
        """The number of tokens that `request` shares with one that prefills and that are not computed there.

        None where it shares no more than it finds in the tree (`matched`).
        """
        limit = request.match_limit
        if matched >= limit:
            return None
        for other in prefilling:
            if other.scope == request.scope:
                shared = min(common_prefix(request.ids, other.ids[: other.prompt_len]), limit)
                if shared > matched:
                    return shared - other.computed_len
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
