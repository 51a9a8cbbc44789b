"""The accounts of a scheduler: its counters, and the budgets of programs.

    the limit is 100 tokens; ended requests have cost 60
    A runs: prompt 20, output 12        92 spent; A's next token makes 93
    B waits: prompt 10                  with 10 more and a first token 104: B is aborted, and has cost nothing
    seven steps later                   99 spent, with A's next token 100
    one step later                      100 spent; the next token would be too much: A is aborted

Each request that has not ended reserves its prompt, its output so far and its next token. While the cost of
the ended requests and the reservations together exceed the limit, the newest request is aborted. A step that
appends several tokens at once, forced or draft tokens, may exceed the limit by a few tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ramify.messages import ReachedLimit

if TYPE_CHECKING:
    from ramify.runtime.scheduler.requests.request import Request


@dataclasses.dataclass
class Counters:
    """Counters of one scheduler since its start: the fields of `SchedulerStats`, which documents them."""

    clock: dataclasses.InitVar[Callable[[], float]]
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    model_draft_tokens: int = 0
    model_accepted_tokens: int = 0
    draft_model_tokens: int = 0
    draft_model_s: float = 0.0
    retractions: int = 0
    exported_tokens: int = 0
    exported_bytes: int = 0
    imported_tokens: int = 0
    imported_bytes: int = 0
    refused_imports: int = 0
    step_s: float = 0.0
    model_s: float = 0.0

    def __post_init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    @contextlib.contextmanager
    def model_time(self) -> Iterator[None]:
        """A context whose time counts as `model_s`."""
        began = self._clock()
        yield
        self.model_s += self._clock() - began

    def count_drafts(self, request: Request) -> None:
        """Count the draft tokens of `request`, which are being verified."""
        for counts in (self, request.stats):
            counts.draft_tokens += request.draft_len
            counts.model_draft_tokens += request.draft_len * request.speculation.by_model

    def count_accepted(self, request: Request) -> None:
        """Count one accepted draft token of `request`."""
        for counts in (self, request.stats):
            counts.accepted_tokens += 1
            counts.model_accepted_tokens += request.speculation.by_model


MAX_LIMITS = 4096
"""The most limits without an open request that are remembered. The limits used longest ago are forgotten
first."""


@dataclasses.dataclass(slots=True, eq=False)
class _Limit:
    id: str
    most: int | None = None
    deadline: float | None = None
    ended_tokens: int = 0
    """Tokens that ended requests have cost."""
    reserved: dict[Request, int] = dataclasses.field(default_factory=dict)
    """Open requests in the order of arrival, and the tokens that each reserves."""
    reserved_tokens: int = 0
    """The sum of `reserved`."""

    @property
    def too_much(self) -> bool:
        return self.most is not None and self.ended_tokens + self.reserved_tokens > self.most

    def reserve(self, request: Request) -> None:
        tokens = _reserved(request)
        self.reserved_tokens += tokens - self.reserved.get(request, 0)
        self.reserved[request] = tokens

    def end(self, request: Request) -> None:
        self.reserved_tokens -= self.reserved.pop(request)
        self.ended_tokens += _cost(request)

    def reached(self, *, timed_out: bool) -> ReachedLimit:
        tokens = self.ended_tokens + sum(map(_cost, self.reserved))
        return ReachedLimit(id=self.id, tokens=tokens, timed_out=timed_out)


class Budgets:
    """The limits that programs set on the tokens and the time of their requests, by the limit's id.

    remembered : the most limits without an open request that are kept
    """

    def __init__(self, remembered: int = MAX_LIMITS) -> None:
        self._remembered = remembered
        self._open: dict[str, _Limit] = {}
        """The limits with an open request."""
        self._ended: dict[str, _Limit] = {}
        """The limits without an open request that are remembered, the limit used longest ago first."""

    def __contains__(self, limit: str) -> bool:
        return limit in self._open or limit in self._ended

    def join(self, request: Request) -> None:
        """Reserve tokens for `request`, which has arrived."""
        for hint in () if request.hint is None else request.hint.limits:
            limit = self._open.get(hint.id) or self._ended.pop(hint.id, None) or _Limit(hint.id)
            limit.most = hint.max_total_tokens
            if hint.seconds_left is not None:
                limit.deadline = request.arrival + hint.seconds_left
            limit.reserve(request)
            self._open[hint.id] = limit

    def leave(self, request: Request) -> None:
        """Replace the reservation of `request`, which ends, by its cost."""
        for limit in self._limits_of(request):
            limit.end(request)
            if not limit.reserved:
                self._ended[limit.id] = self._open.pop(limit.id)
        while len(self._ended) > self._remembered:
            del self._ended[next(iter(self._ended))]

    def exceeding(self, now: float, running: Iterable[Request]) -> Iterator[tuple[Request, ReachedLimit]]:
        """Yield each request that must end, with the report of the limit that it exceeds. The caller must end
        each request before it continues the iteration.

        Reservations are updated for `running` only: other requests' reservations have not grown since the
        last call.
        """
        for request in running if self._open else ():
            for limit in self._limits_of(request):
                limit.reserve(request)
        for limit in list(self._open.values()):
            if limit.deadline is not None and limit.deadline <= now:
                reached = limit.reached(timed_out=True)
                for request in list(limit.reserved):
                    yield request, reached
            if limit.too_much and limit.reserved:
                reached = limit.reached(timed_out=False)  # the same report for all requests that end here
                while limit.too_much and limit.reserved:
                    yield next(reversed(limit.reserved)), reached

    def _limits_of(self, request: Request) -> list[_Limit]:
        """The limits of `request`, each once, even if the request's hint names a limit twice."""
        hints = () if request.hint is None else request.hint.limits
        return [self._open[id] for id in {hint.id: None for hint in hints}]


def _cost(request: Request) -> int:
    """The tokens that a request has cost, counted as in the `Usage` of an aborted request."""
    return request.reached_prompt_tokens + request.output_len


def _reserved(request: Request) -> int:
    return request.prompt_tokens + request.output_len + (request.budget_left > 0)
