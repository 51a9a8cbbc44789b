"""The life of requests: where each of them is, from its arrival to its end, and the moves in between.

arrival ──▶ compiling ──▶ waiting ──▶ running ──▶ end
                              ▲           │
                              └─ retract ─┘
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ramify.engine_messages import Abort, Failed, Reply
from ramify.errors import EngineError, InvalidConstraint, RamifyError
from ramify.messages import Finish
from ramify.runtime.scheduler.outputs import StepOutputs
from ramify.runtime.scheduler.requests.accounts import Budgets, Counters
from ramify.runtime.scheduler.requests.flows import Flows
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.programs import Programs
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.speculation.drafter import Drafter

if TYPE_CHECKING:
    from ramify.runtime.scheduler.grammars import GrammarStore

log = logging.getLogger("ramify")

ORDER = operator.attrgetter("order")


@dataclasses.dataclass(eq=False)
class Lifecycle:
    """The requests of one scheduler by their state. Spans of choices are in `waiting` and `running` only."""

    pages: RequestPages
    grammars: GrammarStore
    drafter: Drafter
    counters: Counters
    flows: Flows
    reply: Callable[[Reply | Failed], None]
    clock: Callable[[], float]
    programs: Programs = dataclasses.field(default_factory=Programs)
    outputs: StepOutputs = dataclasses.field(default_factory=StepOutputs)
    compiling: dict[str, Request] = dataclasses.field(default_factory=dict)
    waiting: list[Request] = dataclasses.field(default_factory=list)
    """Waiting requests, sorted by `Request.order`. `running` is sorted in the same way."""
    running: list[Request] = dataclasses.field(default_factory=list)
    open: dict[str, Request] = dataclasses.field(default_factory=dict)
    """Requests that were submitted and have not ended, by id."""
    budgets: Budgets = dataclasses.field(default_factory=Budgets)

    def arrive(self, request: Request) -> None:
        self.open[request.rid] = request
        self.counters.prompt_tokens += request.prompt_tokens
        self.programs.join(request)
        self.flows.join(request)
        self.budgets.join(request)
        self.pages.leases.arrived(request)

    def enqueue(self, request: Request) -> None:
        found = self.pages.match(request).length
        if request.stats.first_pass is None:
            found = max(found, request.share_prefix())
        request.count_uncached(found)
        request.take_rank()
        bisect.insort(self.waiting, request, key=ORDER)

    def judge_flows(self) -> None:
        """Decide which flows yield. If that changes ranks, sort `running` and `waiting` anew."""
        if self.flows.judge(self.running, self.waiting):
            self.running.sort(key=ORDER)
            self.waiting.sort(key=ORDER)

    def start(self, request: Request, now: float) -> None:
        """Move `request`, which has been admitted, from `waiting` to `running`."""
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=ORDER)
        request.count_uncached(request.computed_len)
        stats = request.stats
        if stats.first_pass is None:
            stats.first_pass = now
            self.programs.started(request)
            stats.cached_tokens = min(request.computed_len, request.prompt_len)
            self.counters.cached_tokens += stats.cached_tokens

    def stop(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)

    def retract(self, request: Request) -> None:
        """Move `request` from `running` back to `waiting`. It keeps its tokens, matcher and random
        numbers."""
        request.drop_draft()
        self.pages.retract(request)
        self.running.remove(request)
        if not request.report.announced:
            request.report.prompt_logprobs = []
        request.stats.retractions += 1
        self.counters.retractions += 1
        self.enqueue(request)

    def abort(self, message: Abort) -> None:
        request = self.open.get(message.rid)
        if request is None:
            return
        if message.silent:
            self._end(request)
        else:
            self.finish(request, Finish(reason="abort"))

    def end_exceeding(self, now: float) -> None:
        """End the requests that exceed a token or time limit of their program."""
        for request, limit in self.budgets.exceeding(now, self.running):
            self.finish(request, Finish(reason="abort", limit=limit))

    def finish(self, request: Request, finish: Finish) -> None:
        self.outputs.finish(request, finish)
        self._end(request)

    def fail(self, request: Request, error: RamifyError) -> None:
        request = request.head
        if request.rid not in self.open:
            return  # it has ended already, when another of its spans failed
        self.outputs.drop(request)
        if isinstance(error, InvalidConstraint) and error.field is None and request.constraint is not None:
            error.field = request.constraint.kind  # a matcher does not know of which kind its grammar is
        self.refuse(request.rid, error)
        self._end(request)

    def refuse(self, rid: str, error: RamifyError) -> None:
        """Answer `rid` with `error`. For a request that has not arrived, or that the caller ends."""
        self.reply(Failed(rid=rid, error=error.to_info()))

    @contextlib.contextmanager
    def failing_alone(self, request: Request) -> Iterator[None]:
        """A block in which an exception fails `request` alone: the exception does not leave the block."""
        try:
            yield
        except Exception as error:
            self.fail_alone(request, error)

    def fail_alone(self, request: Request, error: Exception) -> None:
        """Fail `request` with `error`, inside the `except` block that handles `error`. Loops over requests
        call this where a `failing_alone` block for each request would cost too much."""
        if not isinstance(error, RamifyError):
            log.exception("request %s failed", request.rid)
            error = EngineError(f"The request failed: {error}")
        self.fail(request, error)

    def _end(self, request: Request) -> None:
        """End `request`. Its computed pages stay in the tree until evicted."""
        del self.open[request.rid]
        choices = None if request.scoring is None else request.scoring.choices
        parts = [request]
        if choices is not None:
            parts += [span for span in choices.open if span is not request]
        for part in parts:  # done first, so that no step goes on with them if something below raises
            self.stop(part)
            if part in self.waiting:
                self.waiting.remove(part)
        self.drafter.ended(request)
        self.programs.leave(request)
        self.flows.leave(request)
        self.budgets.leave(request)
        if self.compiling.pop(request.rid, None) is not None:
            self.grammars.forget(request.rid)
            return
        if choices is not None:
            for span in choices.resting:
                self.pages.leases.end_own(span)
        for part in parts:
            self.pages.rest(part, self.clock())
