"""The limits of programs: what the requests of each have cost together, and which of them must end.

    a limit of 100 tokens; requests of 60 have ended
    A runs: prompt 20, output 12        92 spent; A's next token makes 93
    B waits: prompt 10                  10 and a first token make 104: B ends, and has cost nothing
    seven steps later                   99 spent, with A's next token 100
    one step later                      100 spent; the next token would be too much: A ends

Each request that has not ended reserves its prompt, its output and its next token. While the reservations are
too much, the newest request ends. A step that appends several tokens at once, forced or drafted ones, may
spend a few more than the limit.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ramify.messages import LimitHint, ReachedLimit

if TYPE_CHECKING:
    from ramify.runtime.scheduler.request import Request

MAX_LIMITS = 4096
"""Limits without a request that are remembered; those used longest ago are forgotten first."""


@dataclasses.dataclass(slots=True, eq=False)
class _Limit:
    id: str
    most: int | None = None
    deadline: float | None = None
    ended_tokens: int = 0
    """The cost of the requests that have ended."""
    requests: list[Request] = dataclasses.field(default_factory=list)
    """Its open requests, in the order of arrival."""

    def reached(self, *, timed_out: bool) -> ReachedLimit:
        tokens = self.ended_tokens + sum(map(_cost, self.requests))
        return ReachedLimit(id=self.id, tokens=tokens, timed_out=timed_out)


class Budgets:
    """The limits of the requests in the scheduler, by their id."""

    def __init__(self) -> None:
        self._limits: OrderedDict[str, _Limit] = OrderedDict()
        self._open: dict[str, _Limit] = {}
        """The limits that have requests."""

    def join(self, request: Request) -> None:
        """`request` has arrived."""
        for hint in _hints(request):
            limit = self._limits.setdefault(hint.id, _Limit(hint.id))
            self._limits.move_to_end(hint.id)
            limit.most = hint.max_total_tokens
            if hint.seconds_left is not None:
                limit.deadline = request.arrival + hint.seconds_left
            limit.requests.append(request)
            self._open[hint.id] = limit

    def leave(self, request: Request) -> None:
        """`request` ends."""
        for hint in _hints(request):
            limit = self._open[hint.id]
            limit.ended_tokens += _cost(request)
            limit.requests.remove(request)
            if not limit.requests:
                del self._open[hint.id]
        while len(self._limits) - len(self._open) > MAX_LIMITS:
            del self._limits[next(id for id in self._limits if id not in self._open)]

    def exceeding(self, now: float) -> Iterator[tuple[Request, ReachedLimit]]:
        """The requests that must end, each with its limit. The caller ends each before the next."""
        for limit in list(self._open.values()):
            if limit.deadline is not None and limit.deadline <= now:
                for request in list(limit.requests):
                    yield request, limit.reached(timed_out=True)
            if limit.most is None:
                continue
            while limit.requests and limit.ended_tokens + sum(map(_reserved, limit.requests)) > limit.most:
                yield limit.requests[-1], limit.reached(timed_out=False)


def _hints(request: Request) -> tuple[LimitHint, ...]:
    return () if request.hint is None else request.hint.limits


def _cost(request: Request) -> int:
    """Tokens as `Usage` counts those of an aborted request."""
    return request.reached_prompt_tokens + request.output_len


def _reserved(request: Request) -> int:
    """Its tokens with the next one, where it generates."""
    return request.prompt_tokens + request.output_len + (request.budget_left > 0)
