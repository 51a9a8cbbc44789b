"""Where every request is, from its arrival to its end, and how it gets from one place to the next.

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
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ramify.engine_messages import Abort, Failed, Reply
from ramify.errors import EngineError, InvalidConstraint, RamifyError
from ramify.messages import Finish
from ramify.runtime.scheduler.admission.flows import Flows
from ramify.runtime.scheduler.counters import Counters
from ramify.runtime.scheduler.outputs.output import StepOutputs
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.programs.budgets import Budgets
from ramify.runtime.scheduler.programs.programs import Programs
from ramify.runtime.scheduler.request import Request, ScheduledRequest
from ramify.runtime.scheduler.speculation.drafter import Drafter

if TYPE_CHECKING:
    from ramify.runtime.scheduler.constraints.grammars import GrammarStore

log = logging.getLogger("ramify")

ORDER = operator.attrgetter("order")


@dataclasses.dataclass(eq=False)
class Lifecycle:
    """The requests of one scheduler by their state. Spans of choices are in `waiting` and `running` only."""

    pages: RequestPages
    programs: Programs
    outputs: StepOutputs
    grammars: GrammarStore
    drafter: Drafter
    counters: Counters
    flows: Flows
    reply: Callable[[Reply | Failed], None]
    clock: Callable[[], float]
    budgets: Budgets = dataclasses.field(default_factory=Budgets)
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)
    """All that were submitted and have not ended, by id."""
    compiling: dict[str, Request] = dataclasses.field(default_factory=dict)
    waiting: list[Request] = dataclasses.field(default_factory=list)
    """In the order of rank and arrival, as `running`."""
    running: list[Request] = dataclasses.field(default_factory=list)
    sitting_out: int | None = None
    """Running requests that the current step leaves out, and with them all waiting ones of lower rank;
    None where it leaves out nobody."""

    def arrive(self, request: Request) -> None:
        self.requests[request.rid] = request
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
        """Decide which flows yield, and bring the lists in order."""
        if self.flows.judge(self.running, self.waiting):
            self.running.sort(key=ORDER)
            self.waiting.sort(key=ORDER)

    def start(self, request: Request, now: float) -> None:
        """`request` has been admitted."""
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=ORDER)
        request.count_uncached(request.computed_len)
        stats = request.stats
        if stats.first_pass is None:
            stats.first_pass = now
            self.programs.started(request)
            stats.cached_tokens = min(request.computed_len, request.prompt_len)
            self.counters.cached_tokens += stats.cached_tokens

    def next_step_wants(self, requests: Sequence[Request]) -> bool:
        """The next step goes on with these requests, which are running, if they do not end."""
        running, waiting = self.running, self.waiting
        joining = waiting and waiting[0].rank >= running[0].rank
        if self.sitting_out is not None:
            return not joining and len(requests) >= len(running) - self.sitting_out
        if running[0].rank != running[-1].rank:
            return not waiting and len(requests) == len(running)
        # Others sit out while requests of a higher rank prefill.
        return not (waiting and waiting[0].rank > running[0].rank)

    def next_chunks(self, budget: int) -> list[ScheduledRequest]:
        """The chunks of prompts that the next step computes, within `budget` tokens, if no request ends."""
        chunks = []
        for request in self.running if self.sitting_out is None else ():
            if request.prefilling and budget > 0:
                stop = request.chunk_stop(budget)
                budget -= stop - request.computed_len
                chunks.append(ScheduledRequest(request, stop))
        return chunks

    def stop(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)

    def retract(self, request: Request) -> None:
        """Back to the waiting requests; its tokens, matcher and random numbers stay as they are."""
        request.drop_draft()
        self.pages.retract(request)
        self.running.remove(request)
        if not request.report.announced:
            request.report.prompt_logprobs = []
        request.stats.retractions += 1
        self.counters.retractions += 1
        self.enqueue(request)

    def abort(self, message: Abort) -> None:
        request = self.requests.get(message.rid)
        if request is None:
            return
        if message.silent:
            self._end(request)
        else:
            self.finish(request, Finish(reason="abort"))

    def end_exceeding(self, now: float) -> None:
        """End the requests that are past a limit of their program."""
        for request, limit in self.budgets.exceeding(now, self.running):
            self.finish(request, Finish(reason="abort", limit=limit))

    def finish(self, request: Request, finish: Finish) -> None:
        self.outputs.finish(request, finish)
        self._end(request)

    def fail(self, request: Request, error: RamifyError) -> None:
        request = request.head
        if request.rid not in self.requests:
            return  # another span of its choices has failed before
        self.outputs.drop(request)
        if isinstance(error, InvalidConstraint) and error.field is None and request.constraint is not None:
            error.field = request.constraint.kind  # a matcher does not know of which kind its grammar is
        self.refuse(request.rid, error)
        self._end(request)

    def refuse(self, rid: str, error: RamifyError) -> None:
        """Answer with `error`; the request has not arrived, or ends."""
        self.reply(Failed(rid=rid, error=error.to_info()))

    @contextlib.contextmanager
    def failing_alone(self, request: Request) -> Iterator[None]:
        """An error in this block ends `request`, and no other."""
        try:
            yield
        except Exception as error:
            self.fail_alone(request, error)

    def fail_alone(self, request: Request, error: Exception) -> None:
        """Called while `error` is handled, where a block for each request of a step would cost too much."""
        if not isinstance(error, RamifyError):
            log.exception("request %s failed", request.rid)
            error = EngineError(f"The request failed: {error}")
        self.fail(request, error)

    def _end(self, request: Request) -> None:
        """Forget the request; the tree keeps its pages."""
        del self.requests[request.rid]
        choices = None if request.scoring is None else request.scoring.choices
        parts = [request]
        if choices is not None:
            parts += [span for span in choices.open if span is not request]
        for part in parts:  # first: no step goes on with them, whatever is raised below
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
                self.pages.leases.rested(span)
        for part in parts:
            self.pages.release(part, self.clock())
