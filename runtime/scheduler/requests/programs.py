"""The programs that are running: their service so far and to come, their tokens, and their reuse intervals.

A reuse interval is the time from the end of a request of a branch to the arrival of the branch's next
request. Example: intervals of the kind "tool search" took 2 s on average over all programs. In this program
there were two, of 8 s each. The program's own mean has weight 2, and the common mean has weight
`COMMON_WEIGHT` = 2. So the program's next interval of this kind is expected to take sqrt(2 * 8) = 4 s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ramify.radix.tree import TokenTree

if TYPE_CHECKING:
    from ramify.runtime.scheduler.requests.request import Request


PRIORS = {"soon": 0.05, "join": 1.0, "tool": 2.0, "unknown": 20.0}
"""Expected seconds by kind, before any interval has been seen. Each number has the weight of one interval in
the mean over all programs."""

MEMORY = 50
"""The mean over all programs covers about this number of the last intervals."""

COMMON_WEIGHT = 2.0
"""The mean over all programs weighs as much as this number of intervals of the program itself."""

MAX_KINDS = 4096
"""The number of kinds that are remembered. It needs a bound, because tool names are part of the kinds and
clients choose these names."""


@dataclasses.dataclass(slots=True)
class Mean:
    """A geometric mean of seconds, because intervals differ by orders of magnitude."""

    count: int = 0
    log: float = 0.0

    def learn(self, seconds: float, memory: float = math.inf) -> None:
        self.count = int(min(self.count + 1, memory))
        self.log += (math.log(max(seconds, 1e-3)) - self.log) / self.count


@dataclasses.dataclass(slots=True)
class ProgramIntervals:
    """The intervals of one program."""

    means: dict[str, Mean] = dataclasses.field(default_factory=dict)
    """Mean intervals by kind."""
    open: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    """Open intervals by branch: (time of the beginning, kind)."""


class ReuseIntervals:
    """Learns the lengths of reuse intervals by kind. A kind is a `NextUse`, or "tool" with the tool's
    name."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def begin_interval(self, own: ProgramIntervals, branch: str, kind: str, now: float) -> float:
        """Open the interval of `branch`, whose request has ended. Returns the seconds after which the next
        request of `branch` is expected."""
        own.open[branch] = (now, kind)
        return self.expected(own, kind)

    def set_kind(self, own: ProgramIntervals, branch: str, kind: str) -> float | None:
        """Set the kind of the open interval of `branch`. Returns the seconds that an interval of that kind is
        expected to take, or None if `branch` has no open interval."""
        if branch not in own.open:
            return None
        own.open[branch] = (own.open[branch][0], kind)
        return self.expected(own, kind)

    def end_interval(self, own: ProgramIntervals, branch: str, now: float) -> None:
        """Close the interval of `branch`, whose next request has arrived, and learn from it."""
        since, kind = own.open.pop(branch, (now, ""))
        if not kind:
            return
        _mean(own.means, kind).learn(now - since)
        _mean(self._means, kind).learn(now - since, MEMORY)

    def expected(self, own: ProgramIntervals, kind: str) -> float:
        """Seconds that an interval of this kind is expected to take from its beginning."""
        everybody, here = self._means.get(kind, Mean()), own.means.get(kind, Mean())
        prior = math.log(PRIORS[kind.partition(" ")[0]])
        common = (prior + everybody.count * everybody.log) / (1 + everybody.count)
        return math.exp((COMMON_WEIGHT * common + here.count * here.log) / (COMMON_WEIGHT + here.count))


def _mean(means: dict[str, Mean], kind: str) -> Mean:
    """The mean of `kind` in `means`. A new kind is added to `means`; if `means` is full, the oldest kind is
    dropped."""
    if kind not in means and len(means) >= MAX_KINDS:
        del means[next(iter(means))]
    return means.setdefault(kind, Mean())


FORGET_S = 600.0
"""A program without open requests is forgotten this many seconds after its last request has arrived. The
client may have gone away without ending the program."""

STEP_TOKENS = 16.0
"""Each step of a request counts as this many tokens of service, in addition to the tokens that it
computes."""

LEAST_LEFT = 0.2
"""A program is expected to need at least this share of the larger of its usual and its attained service."""

PRIOR_SERVICE = 16_384.0
"""The expected service of a program before any program has ended. It has the weight of one ended program."""

PRIOR_SINGLE = 2048.0
"""Expected service of a request without a program."""

MAX_NAMES = 4096
"""The number of program names whose usual service is remembered."""

NAME_MEMORY = 50
"""The usual service of a program name is the mean over about this number of its last programs."""


@dataclasses.dataclass(slots=True)
class Usual:
    """The mean service of the programs of one kind, over their whole run."""

    prior: float | Usual
    """The expected service before any program of the kind has ended: a number, or the mean of a wider
    kind."""
    count: int = 0
    mean: float = 0.0

    @property
    def service(self) -> float:
        prior = self.prior if isinstance(self.prior, float) else self.prior.service
        return (prior + self.count * self.mean) / (1 + self.count)

    def learn(self, served: float) -> None:
        self.count = min(self.count + 1, NAME_MEMORY)
        self.mean += (served - self.mean) / self.count


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """One run of a program. A request without a program, or of a session, has a `Program` of its own."""

    last_arrival: float = 0.0
    name: str = ""
    """The program's name, for display."""
    open_requests: int = 0
    """Requests that have not ended."""
    ended_requests: int = 0
    waited: float = 0.0
    """The service that the engine gave to any request while requests of this program waited for their first
    admission. Each wait is divided by the number of open requests, so simultaneous waits count about once."""
    usual: Usual = dataclasses.field(default_factory=lambda: Usual(PRIOR_SINGLE))
    """The usual service of programs of the same name."""
    served: float = 0.0
    """Attained service: tokens computed for the program, and `STEP_TOKENS` for each step of each request."""
    calls: dict[str, TokenTree] = dataclasses.field(default_factory=dict)
    """The tokens of the program's requests, by cache scope. Prompts are added when a request arrives, outputs
    when it ends."""
    forks: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """By fork, the common prefix of the prompts of all requests inside the fork."""
    intervals: ProgramIntervals = dataclasses.field(default_factory=ProgramIntervals)

    def left(self, calls_left: int | None) -> float:
        """The service that the program is expected to need until its end.

        `calls_left` is the number of calls after the present one; None if it is not known. If it is known and
        some calls have ended, the estimate is `calls_left` + 1 times the mean service of the ended calls.
        Otherwise the estimate is the usual service of programs of the same name, less the service attained.
        If no program of that name has ended, the usual service of all programs takes its place.
        """
        if calls_left is not None and self.ended_requests:
            return self.served / self.ended_requests * (calls_left + 1)
        usual = self.usual.service
        return max(usual - self.served, LEAST_LEFT * max(usual, self.served))


class Programs:
    """The running programs, by id."""

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        """Programs by id, in the order of their last arrival."""
        self.served = 0.0
        """The service that the engine has given to all requests. Waiting times are measured in it."""
        self.usual = Usual(PRIOR_SERVICE)
        """The usual service of all programs. Requests without a program are left out."""
        self._singles = Usual(PRIOR_SINGLE)
        self._names: dict[str, Usual] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def find(self, name: str) -> Program | None:
        """The program with the id `name`; None if no request of that program is known."""
        return self._programs.get(name)

    def join(self, request: Request) -> None:
        """Find the program of `request`, which has arrived, and count the prompt tokens that are new to the
        program."""
        hint, program = request.run_hint, request.program
        if hint is None:
            program.usual = self._singles
            request.stats.distinct_tokens = request.prompt_tokens
        else:
            self._forget(request.arrival)
            program = request.program = self._programs.pop(hint.program, program)
            self._programs[hint.program] = program
            program.name, program.usual = hint.name, self._usual_of(hint.name)
            # Known tokens are left out: the end of a prompt that is healed may still be replaced.
            paths = (request.ids,) if request.scoring is None else request.scoring.choices.paths()
            calls = program.calls.setdefault(request.scope, TokenTree())
            request.stats.distinct_tokens = sum(len(path) - calls.insert(path) for path in paths)
            if request.decisions is not None:  # a question's tokens are computed for every request
                request.stats.distinct_tokens += request.prompt_tokens - request.prompt_len
        program.last_arrival = request.arrival
        program.open_requests += 1
        request.served_before = self.served

    def waited(self, request: Request) -> float:
        """The service that the engine gave while `request` and earlier requests of its program waited."""
        return self.served - request.served_before + request.program.waited

    def started(self, request: Request) -> None:
        """Add the wait of `request`, which was admitted for the first time, to its program."""
        program = request.program
        program.waited += (self.served - request.served_before) / max(1, program.open_requests)

    def serve(self, request: Request, tokens: int) -> None:
        """Count the service of a step that has computed `tokens` tokens of `request`."""
        request.program.served += STEP_TOKENS + tokens
        self.served += STEP_TOKENS + tokens

    def serve_all(self, requests: Sequence[Request]) -> None:
        """Count the service of a step that has computed one token of each of `requests`."""
        for request in requests:
            request.program.served += STEP_TOKENS + 1
        self.served += (STEP_TOKENS + 1) * len(requests)

    def leave(self, request: Request) -> None:
        """Count `request`, which ends, and add its computed tokens to `Program.calls`."""
        program = request.program
        program.open_requests -= 1
        program.ended_requests += 1
        if request.run_hint is None:
            request.stats.distinct_tokens = request.prompt_tokens
            self._singles.learn(program.served)
            return
        computed = request.ids[: request.computed_len]
        known = program.calls[request.scope].insert(computed)
        request.stats.distinct_tokens += max(0, min(request.prompt_len, len(computed)) - known)

    def end(self, program: str) -> None:
        """End the program with this id, and learn its service."""
        found = self._programs.pop(program, None)
        if found is not None:
            found.usual.learn(found.served)
            self.usual.learn(found.served)

    def _usual_of(self, name: str) -> Usual:
        if name not in self._names and len(self._names) >= MAX_NAMES:
            del self._names[next(iter(self._names))]
        return self._names.setdefault(name, Usual(self.usual))

    def _forget(self, now: float) -> None:
        for name, program in self._programs.items():
            if program.last_arrival + FORGET_S > now:
                return
            if not program.open_requests:
                del self._programs[name]
                return  # at most one program is forgotten per arriving request, so that each arrival is cheap
