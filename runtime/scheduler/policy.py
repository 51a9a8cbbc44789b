"""In which order waiting requests are admitted: small objects that return a sort key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ramify.runtime.scheduler.programs.programs import Programs
from ramify.runtime.scheduler.request import Request

AGEING_TOKENS_PER_S = 2000.0
"""A second of waiting counts as much as so many tokens, so that a steady stream of requests that go first
delays one that does not by a few seconds at most."""

PATIENCE = 16.0
"""`LeastLeftFirst` counts waiting as service, beyond what so many usual programs need: shorter waits tell
less than sizes do."""

SINGLE_SHARE = 0.5
"""A request without a program counts as so much of a usual program at least: that its like are short is no
reason to let programs wait for all of them."""

LAST_BRANCH_SHARE = 0.5
"""By how much less is thought to be left of a program where a request is the only one left of its fork."""


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

    def __init__(self, programs: Programs) -> None:
        pass

    def key(self, request: Request, matched: int, now: float) -> float:
        return -(matched + AGEING_TOKENS_PER_S * (now - request.arrival))


class LeastLeftFirst:
    """Programs that need little for how long they have waited go first.

    The shortest remaining time gives the best mean, and lets long programs wait without end where there is
    too much to do. So what a program has waited is divided by what it still needs (highest response ratio
    next, Brinch Hansen 1971), both in tokens of service, so that it holds for fast and slow engines and for
    any length of the queue. A program's waits add up over its requests: else one of many calls would queue
    anew for each. What is left is known from the graph, or from earlier programs of the name, or of any, less
    the service that it has attained (Autellix, arXiv 2502.13965); see `Program.left`. A request without a
    program is a program of one call. Tokens to be computed count, so what is cached goes first, and so does
    the last branch that a join waits for.
    """

    needs_match = True
    siblings_together = True

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def key(self, request: Request, matched: int, now: float) -> float:
        program, hint = request.program, request.hint
        usual = self._programs.usual.service
        left = program.left(None if hint is None else hint.calls_left)
        if hint is None:
            left = max(left, SINGLE_SHARE * usual)
        elif hint.forks and program.open_requests == 1:
            left *= LAST_BRANCH_SHARE
        return -(PATIENCE * usual + self._programs.waited(request)) / (left + request.length - matched)


class FirstComeFirstServed:
    needs_match = False
    siblings_together = False

    def __init__(self, programs: Programs) -> None:
        pass

    def key(self, request: Request, matched: int, now: float) -> float:
        return request.arrival


POLICIES: dict[str, Callable[[Programs], Policy]] = {
    "prefix": LongestPrefixFirst,
    "program": LeastLeftFirst,
    "fcfs": FirstComeFirstServed,
}
