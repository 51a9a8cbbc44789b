"""The scheduler's admission, policies, pages and leases on simulated time. A cost model replaces the steps.

A call of a program comes when the calls that it depends on have ended, after the waits for tools and people
that its trace has. So every run is the same.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections import defaultdict

from ramify.engine_messages import Submit
from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.admission import POLICIES, Admission
from ramify.runtime.scheduler.lifecycle import ORDER
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.programs import Programs
from ramify.runtime.scheduler.requests.request import Request
from ramify.sampling_params import SamplingParams
from tests.runtime.program_traces import Call, Trace

CHUNK_TOKENS = 2048
STEP_S, PREFILL_TOKEN_S, DECODE_S = 6e-3, 40e-6, 150e-6
"""Seconds of a step itself, of each prefill token and of each decoding request. Assumed for an 8B model."""


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """A call with its dependencies."""

    call: Call
    program: str
    gap_s: float
    """Seconds from the end of the last call that this call depends on to the start of this call."""
    waits_s: float
    """`gap_s`, plus `waits_s` of the last call that this call depends on."""
    missing: int = 0
    then: list[Work] = dataclasses.field(default_factory=list)


def plan(trace: Trace) -> list[Work]:
    """The calls of the trace. Each depends on the calls of its program that had ended before it."""
    by_program: dict[str, list[Call]] = defaultdict(list)
    for number, call in enumerate(trace.calls):
        by_program[call.hint.program if call.hint is not None else f"plain{number}"].append(call)
    found = []
    for program, calls in by_program.items():
        done: list[Work] = []
        for call in sorted(calls, key=lambda call: call.start_s):
            before = [work for work in done if work.call.end_s <= call.start_s + 1e-9]
            if before:
                last = max(before, key=lambda work: work.call.end_s)
                gap = max(0.0, call.start_s - last.call.end_s)
                work = Work(call, program, gap, gap + last.waits_s, len(before))
                for earlier in before:
                    earlier.then.append(work)
            else:
                work = Work(call, program, 0.0, 0.0)
            done.append(work)
        found += done
    return found


class Simulation:
    """A scheduler's loop on simulated time."""

    def __init__(self, policy: str, max_running: int, num_pages: int, page_size: int = 16) -> None:
        self.now = 0.0
        self.cache = PrefixCache(num_pages, page_size, clock=lambda: self.now)
        self._pages = RequestPages(self.cache)
        self.programs = Programs()
        self._admission = Admission(self._pages, POLICIES[policy](self.programs), max_running, self._retract)
        self.waiting: list[Request] = []
        self._running: list[Request] = []
        self._work: dict[Request, Work] = {}
        self._left: dict[str, int] = defaultdict(int)
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, Work]] = []
        self.first: dict[str, float] = {}
        self.times: dict[str, float] = {}
        """Program → seconds from its first call to its last, without waits for tools and people."""
        self.longest_wait = 0.0

    def run(self, trace: Trace) -> dict[str, float]:
        for work in plan(trace):
            self._left[work.program] += 1
            if not work.missing:
                heapq.heappush(self._coming, (work.call.start_s, next(self._numbers), work))
        while self._coming or self.waiting or self._running:
            if not self.waiting and not self._running:
                self.now = max(self.now, self._coming[0][0])
            while self._coming and self._coming[0][0] <= self.now:
                self._submit(heapq.heappop(self._coming)[2])
            self._step()
        return self.times

    def _submit(self, work: Work) -> None:
        call = work.call
        submit = Submit(
            rid=f"r{next(self._numbers)}",
            ids=tuple(call.prompt.tolist()),
            sampling=SamplingParams(),
            hint=call.hint,
        )
        request = Request(submit, arrival=self.now, max_tokens=len(call.output))
        self.programs.join(request)
        self._pages.leases.arrived(request)
        self._work[request] = work
        self.first.setdefault(work.program, self.now)
        self.waiting.append(request)

    def _step(self) -> None:
        """Run a step like `StepPlanner.schedule`: decodes go on; prefills share a budget, oldest first."""
        budget, decoding, stops = CHUNK_TOKENS, 0, list[tuple[Request, int]]()
        for request in list(self._running):
            if request.pages.lock is None:
                continue
            if not self._room(request):
                continue
            if not request.prefilling and request.extend_len == 1:
                decoding += 1
                stops.append((request, request.length))
            elif budget > 0:
                stop = min(request.length, request.computed_len + budget)
                budget -= stop - request.computed_len
                stops.append((request, stop))
        for request in self._admission.admit(self.waiting, self._running, budget, self.now):
            self.waiting.remove(request)
            bisect.insort(self._running, request, key=ORDER)
            if request.stats.first_pass is None:
                request.stats.first_pass, request.stats.cached_tokens = self.now, request.computed_len
                self.programs.started(request)
                self.longest_wait = max(self.longest_wait, self.now - request.arrival)
            if budget > 0:
                stop = min(request.length, request.computed_len + budget)
                budget -= stop - request.computed_len
                stops.append((request, stop))
        self.now += STEP_S + PREFILL_TOKEN_S * (CHUNK_TOKENS - budget) + DECODE_S * decoding
        for request, stop in stops:
            if request.pages.lock is not None:
                self._computed(request, stop)

    def _room(self, request: Request) -> bool:
        while not self._pages.grow(request):
            last = self._running[-1]
            self._retract(last)
            if last is request:
                return False
        return True

    def _retract(self, request: Request) -> None:
        self._running.remove(request)
        self._pages.retract(request)
        request.stats.retractions += 1
        bisect.insort(self.waiting, request, key=ORDER)

    def _computed(self, request: Request, stop: int) -> None:
        self.programs.serve(request, stop - request.computed_len)
        prefilled = request.prefilling
        request.computed_len = stop
        if prefilled:
            self._pages.commit(request)
        if stop < request.length:
            return
        output = self._work[request].call.output
        request.append(int(output[request.output_len]))
        if request.output_len == len(output):
            self._end(request)

    def _end(self, request: Request) -> None:
        work = self._work.pop(request)
        self._running.remove(request)
        self.programs.leave(request)
        self._pages.rest(request, self.now)
        if work.call.tools:
            assert request.hint is not None
            self._pages.leases.await_tools(
                request.program, work.program, request.hint.branch, work.call.tools
            )
        for later in work.then:
            later.missing -= 1
            if not later.missing:
                heapq.heappush(self._coming, (self.now + later.gap_s, next(self._numbers), later))
        self._left[work.program] -= 1
        if not self._left[work.program]:
            self.times[work.program] = self.now - self.first[work.program] - work.waits_s
            self.programs.end(work.program)
            self._pages.leases.end_program(work.program)
