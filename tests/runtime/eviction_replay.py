"""Traces of programs replayed against the prefix cache, to count the prompt tokens that are recomputed.

No model runs. Calls are replayed in the order of their times, through the scheduler's own code for pages and
leases, with fewer pages than the working set. `Replay` runs with or without the programs' hints. `Optimum` is
a lower bound: it knows the future, and evicts the page whose next use is farthest away (Belady).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from ramify.engine_messages import Submit
from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.programs import Programs
from ramify.runtime.scheduler.requests.request import Request
from ramify.sampling_params import SamplingParams
from tests.runtime.program_traces import Call, Trace

CHUNK = 512
"""Most prompt tokens computed at a time; the engine's default on the CPU."""

UNBOUNDED = 1 << 22
"""More pages than any trace needs."""


@dataclasses.dataclass(slots=True)
class Replayed:
    computed: int = 0
    """Prompt tokens that were not found in the cache."""
    delayed: int = 0
    """Calls that had to wait because all pages were in use."""


def events(trace: Trace) -> Iterator[tuple[float, str, Call | str]]:
    """Events in order of time. At equal times: ends of calls, ends of programs, starts of calls."""
    numbers = itertools.count()
    found: list[tuple[float, int, int, str, Call | str]] = []
    for call in trace.calls:
        found.append((call.start_s, 2, next(numbers), "start", call))
        found.append((call.end_s, 0, next(numbers), "end", call))
    for at, program in trace.ends:
        found.append((at, 1, next(numbers), "program", program))
    return ((at, kind, what) for at, _, _, kind, what in sorted(found, key=lambda event: event[:3]))


class Replay:
    """The scheduler's page code without a scheduler: every call is computed when it starts."""

    def __init__(self, num_pages: int, page_size: int, hints: bool, num_states: int = 0) -> None:
        self._now = 0.0
        self._hints = hints
        self.cache = PrefixCache(num_pages, page_size, num_states=num_states, clock=lambda: self._now)
        self._pages = RequestPages(self.cache)
        self._programs = Programs()
        self._running: dict[Call, Request] = {}
        self._waiting: list[Request] = []
        self._calls: dict[Request, Call] = {}
        self._numbers = itertools.count()
        self.result = Replayed()

    def run(self, trace: Trace, check: bool = False) -> Replayed:
        for at, kind, what in events(trace):
            self._now = at
            if isinstance(what, Call):
                self._start(what) if kind == "start" else self._end(what)
            elif self._hints:
                self._programs.end(what)
                self._pages.leases.end_program(what)
            if check:
                self.cache.check()
        return self.result

    def _start(self, call: Call) -> None:
        submit = Submit(
            rid=f"r{next(self._numbers)}",
            ids=tuple(call.prompt.tolist()),
            sampling=SamplingParams(),
            hint=call.hint if self._hints else None,
            forks=call.forks if self._hints else (),
        )
        request = Request(submit, arrival=self._now, max_tokens=len(call.output))
        self._programs.join(request)
        self._pages.leases.arrived(request)
        self._calls[request] = call
        if not self._admit(request):
            self.result.delayed += 1
            self._waiting.append(request)

    def _admit(self, request: Request) -> bool:
        if not self._pages.try_admit(request, self._pages.match(request), 0):
            return False
        self.result.computed += request.prompt_len - request.computed_len
        while request.computed_len < request.prompt_len:
            end = min(request.prompt_len, request.computed_len + CHUNK)
            request.computed_len = self._pages.states.cut(request, end)
            request.pages.state_len = request.computed_len
            self._pages.commit(request)
            self._pages.states.keep_copy(request)
        call = self._calls[request]
        for token in call.output.tolist():
            request.append(token)
        if not self._pages.grow(request):
            request.length = request.prompt_len + 1  # its output does not fit: it ends short
        self._running[call] = request
        return True

    def _end(self, call: Call) -> None:
        request = self._running.pop(call, None)
        if request is None:  # still waiting: it takes no time when there is room
            return
        self._finish(request)
        while self._waiting and self._admit(self._waiting[0]):
            late = self._waiting.pop(0)
            if self._calls[late].end_s <= self._now:
                self._running.pop(self._calls[late])
                self._finish(late)

    def _finish(self, request: Request) -> None:
        call = self._calls.pop(request)
        request.computed_len = request.pages.state_len = request.length - 1
        self._programs.leave(request)
        self._pages.rest(request, self._now)
        if call.tools:
            assert call.hint is not None
            self._pages.leases.await_tools(request.program, call.hint.program, call.hint.branch, call.tools)


# --- the optimum ----------------------------------------------------------------------------------


class Page:
    """A page of tokens, in a tree by prefix."""

    __slots__ = ("children", "depth", "holds", "parent", "resident", "ticket", "uses")

    def __init__(self, parent: Page | None) -> None:
        self.parent = parent
        self.depth = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, Page] = {}
        self.uses: list[int] = []
        """Numbers of the events at which calls start whose prompts have this page; the next one is last."""
        self.holds = 0
        self.resident = False
        self.ticket = 0


class Optimum:
    """Belady's algorithm over the pages of all calls: the page whose next use is farthest away is evicted."""

    def __init__(self, trace: Trace, page_size: int) -> None:
        self._page_size = page_size
        self._order = list(events(trace))
        self._root = Page(None)
        self._paths: dict[Call, list[Page]] = {}
        self._prompts: dict[Call, int] = {}
        for number, (_, kind, call) in enumerate(self._order):
            if kind == "start" and isinstance(call, Call):
                self._paths[call] = path = list(self._path(call))
                self._prompts[call] = len(call.prompt) // page_size
                for page in path[: self._prompts[call]]:
                    page.uses.append(number)
        for page in self._pages():
            page.uses.reverse()

    def working_set(self) -> int:
        """The greatest number of pages that are in use, or between two uses, at one time."""
        change = np.zeros(len(self._order) + 1, dtype=np.int64)
        last: dict[Page, int] = {}
        first: dict[Page, int] = {}
        for number, (_, _, call) in enumerate(self._order):
            for page in self._paths.get(call, ()) if isinstance(call, Call) else ():
                first.setdefault(page, number)
                last[page] = number
        for page, number in first.items():
            change[number] += 1
            change[last[page] + 1] -= 1
        return int(change.cumsum().max())

    def run(self, num_pages: int) -> Replayed:
        result, heap, resident = Replayed(), list[tuple[int, int, int, Page]](), 0
        tickets = itertools.count(1)

        def offer(page: Page) -> None:
            page.ticket = next(tickets)
            heapq.heappush(
                heap, (-page.uses[-1] if page.uses else -len(self._order), -page.depth, page.ticket, page)
            )

        for number, (_, kind, call) in enumerate(self._order):
            if not isinstance(call, Call):
                continue
            path = self._paths[call]
            if kind == "end":
                for page in path:
                    page.holds -= 1
                    if not page.holds:
                        offer(page)
                continue
            found = 0
            for index, page in enumerate(path):
                page.holds += 1
                page.ticket = 0
                while page.uses and page.uses[-1] <= number:
                    page.uses.pop()
                if page.resident and found == index < self._prompts[call]:
                    found += 1
                elif not page.resident:
                    page.resident = True
                    resident += 1
            result.computed += len(call.prompt) - found * self._page_size
            while resident > num_pages and heap:
                _, _, ticket, page = heapq.heappop(heap)
                if page.ticket == ticket:
                    page.resident = False
                    page.ticket = 0
                    resident -= 1
            result.delayed += resident > num_pages
        return result

    def _path(self, call: Call) -> Iterator[Page]:
        tokens = np.concatenate([call.prompt, call.output]).tobytes()
        page, size = self._root, 4 * self._page_size
        for start in range(0, len(tokens) - size + 1, size):
            key = tokens[start : start + size]
            child = page.children.get(key)
            if child is None:
                child = page.children[key] = Page(page)
            page = child
            yield page

    def _pages(self) -> Iterator[Page]:
        stack = list(self._root.children.values())
        while stack:
            page = stack.pop()
            yield page
            stack.extend(page.children.values())


# --- the table ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    budget: int
    working_set: int
    calls: int
    prompt_tokens: int
    needed: int
    """Prompt tokens that are computed if nothing is ever evicted."""
    lru: int
    program: int
    """Prompt tokens computed in addition to `needed`, with hints; `lru`: without hints."""
    optimum: int
    delayed: tuple[int, ...]


def compare(trace: Trace, part: float, page_size: int) -> Row:
    optimum = Optimum(trace, page_size)
    working_set = optimum.working_set()
    budget = int(part * working_set)
    needed = Replay(UNBOUNDED, page_size, hints=False).run(trace).computed
    whole_pages = optimum.run(UNBOUNDED).computed
    plain = Replay(budget, page_size, hints=False).run(trace)
    hinted = Replay(budget, page_size, hints=True).run(trace)
    best = Optimum(trace, page_size).run(budget)
    return Row(
        budget,
        working_set,
        len(trace.calls),
        sum(len(call.prompt) for call in trace.calls),
        needed,
        plain.computed - needed,
        hinted.computed - needed,
        best.computed - whole_pages,
        (plain.delayed, hinted.delayed, best.delayed),
    )
