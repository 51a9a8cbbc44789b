"""In which order waiting requests are admitted: small objects that return a sort key."""

from __future__ import annotations

from typing import Protocol

from ramify.runtime.scheduler.request import Request

AGEING_TOKENS_PER_S = 2000.0
"""A second of waiting counts as much as so many cached tokens, so that a steady stream of requests
with a long cached prefix delays a request without one by a few seconds at most."""


class Policy(Protocol):
    """Smaller keys go first; ties are broken by arrival."""

    needs_match: bool
    """Whether `matched` must be known; otherwise it is 0."""

    def key(self, request: Request, matched: int, now: float) -> float: ...


class LongestPrefixFirst:
    """Requests whose prefix is in pages go while it still is; waiting counts as cached tokens do."""

    needs_match = True

    def key(self, request: Request, matched: int, now: float) -> float:
        return -(matched + AGEING_TOKENS_PER_S * (now - request.arrival))


class FirstComeFirstServed:
    needs_match = False

    def key(self, request: Request, matched: int, now: float) -> float:
        return request.arrival


POLICIES: dict[str, type[Policy]] = {"prefix": LongestPrefixFirst, "fcfs": FirstComeFirstServed}
