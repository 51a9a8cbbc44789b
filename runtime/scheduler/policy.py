"""In which order waiting requests are admitted: small objects that return a sort key."""

from __future__ import annotations

from typing import Protocol

from ramify.runtime.scheduler.request import Request

AGEING_TOKENS_PER_S = 2000.0
"""A second of waiting counts as much as so many tokens, so that a steady stream of requests that go first
delays one that does not by a few seconds at most."""

PROGRAM_AGEING_PER_S = 500.0
"""The same for `LeastLeftFirst`, in tokens of service."""

MOST_LEFT = 32_768.0
"""Tokens of service beyond which it does not matter how much is left of a program, and so, over
`PROGRAM_AGEING_PER_S`, the seconds by which others may overtake: 66."""

WAITED_SHARE = 0.5
"""What a program's requests have waited before counts by this share: who calls often queues often."""

LAST_BRANCH_TOKENS = 2048.0
"""What it counts that a request is the only one left of its fork."""


class Policy(Protocol):
    """Smaller keys go first; ties are broken by arrival."""

    needs_match: bool
    """Whether `matched` must be known; otherwise it is 0."""
    siblings_together: bool
    """The branches of a fork are admitted one after the other, where the first of them stands."""

    def key(self, request: Request, matched: int, now: float) -> float: ...


class LongestPrefixFirst:
    """Requests whose prefix is in pages go while it still is; waiting counts as cached tokens do."""

    needs_match = True
    siblings_together = False

    def key(self, request: Request, matched: int, now: float) -> float:
        return -(matched + AGEING_TOKENS_PER_S * (now - request.arrival))


class LeastLeftFirst:
    """Programs that need least still go first: the shortest remaining time, as far as it can be known.

    What is left of a program is known from its graph, or from earlier programs of its name, or guessed from
    the service that it has attained (Autellix, arXiv 2502.13965); see `Program.left`. A request without a
    program is a program of one call. The last branch that a join waits for goes before others. Then the
    tokens to be computed count, and all that the program has waited. What is left is estimated when a request
    arrives, so that branches that arrive together stay together while the first of them is served.
    """

    needs_match = True
    siblings_together = True

    def key(self, request: Request, matched: int, now: float) -> float:
        program, hint = request.program, request.hint
        left = min(request.left, MOST_LEFT)
        if hint is not None and hint.forks and program.open_requests == 1:
            left -= LAST_BRANCH_TOKENS
        waited = now - request.arrival + WAITED_SHARE * program.waited_s
        return left + request.length - matched - PROGRAM_AGEING_PER_S * waited


class FirstComeFirstServed:
    needs_match = False
    siblings_together = False

    def key(self, request: Request, matched: int, now: float) -> float:
        return request.arrival


POLICIES: dict[str, type[Policy]] = {
    "prefix": LongestPrefixFirst,
    "program": LeastLeftFirst,
    "fcfs": FirstComeFirstServed,
}
