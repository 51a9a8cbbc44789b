"""Policies of admission: objects that return a sort key for a waiting request."""

from __future__ import annotations

from ramify.runtime.scheduler.programs.programs import Programs
from ramify.runtime.scheduler.request import Request

AGEING_TOKENS_PER_S = 2000.0
"""Cached tokens that a second of waiting counts as: a steady stream of requests with cached prompts delays
others by a few seconds at most."""

PATIENCE = 16.0
"""Added to every wait: PATIENCE x the mean service of a program. While waits are shorter than that, sizes
decide."""

SINGLE_SHARE = 0.5
"""A request without a program counts as at least this share of a usual program: else a stream of short single
requests would let all programs wait."""

LAST_BRANCH_SHARE = 0.5
"""Factor on what is left of a program where a request is the last open one of its fork."""


class FirstComeFirstServed:
    """The base of the other policies. Smaller keys go first, then arrivals."""

    needs_match = False
    """`key` decides, which must know `matched`; otherwise requests go in the order of their arrival."""
    siblings_together = False
    """The branches of a fork are admitted one after the other, where the first of them stands."""

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
