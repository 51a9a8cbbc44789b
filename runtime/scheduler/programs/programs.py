"""What the scheduler remembers of programs that are running."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ramify.radix.token_tree import TokenTree
from ramify.runtime.scheduler.programs.reuse_intervals import OwnWaits

if TYPE_CHECKING:
    from ramify.runtime.scheduler.request import Request

FORGET_S = 600.0
"""A program that has had no request for so long, and has none, is forgotten: its client may have gone
without a word."""


STEP_TOKENS = 16.0
"""A request's place in a step counts as so many tokens of prefill: decoding is cheap by the token only."""

LEAST_LEFT = 0.2
"""A program that has had more than is usual is thought to need this share of what it has had still."""

FIRST_GUESS = 16_384.0
"""Service of a program before any has ended; weighs as much as one that has."""

FIRST_GUESS_SINGLE = 2048.0
"""The same for a request without a program."""

MAX_NAMES = 4096
"""Names of programs whose usual service is remembered."""

NAME_MEMORY = 50
"""So many of the last programs of a name count for what is usual."""


@dataclasses.dataclass(slots=True)
class Usual:
    """The service that programs of one kind have had in all when they ended."""

    prior: float | Usual
    """What is expected of the first, or whose mean is."""
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
    """One run of a program; a request without a program is one of its own."""

    last_arrival: float = 0.0
    name: str = ""
    """What people call it."""
    open_requests: int = 0
    """Waiting or running."""
    ended_requests: int = 0
    waited: float = 0.0
    """Service that the engine gave while requests of this program waited for their first admission; those
    that waited together count once."""
    usual: Usual = dataclasses.field(default_factory=lambda: Usual(FIRST_GUESS_SINGLE))
    """Of programs of its name."""
    served: float = 0.0
    """Its attained service: tokens computed for it, and `STEP_TOKENS` for each step of each request."""
    calls: TokenTree = dataclasses.field(default_factory=TokenTree)
    """All that its requests hold: prompts from their arrival, outputs from their end on."""
    forks: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """By fork: the tokens with which the prompts of all requests inside it begin."""
    waits: OwnWaits = dataclasses.field(default_factory=OwnWaits)

    def left(self, calls_left: int | None) -> float:
        """Service that it is expected to need still.

        Where its end is known (`calls_left`), by what its calls have needed so far; else by what is usual
        under its name, or for any program where none of that name has ended.
        """
        if calls_left is not None and self.ended_requests:
            return self.served / self.ended_requests * (calls_left + 1)
        usual = self.usual.service
        return max(usual - self.served, LEAST_LEFT * max(usual, self.served))


class Programs:
    """The programs by their id."""

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        """In the order of their last arrival."""
        self.served = 0.0
        """Service that all programs have had: the clock by which waiting is measured."""
        self.usual = Usual(FIRST_GUESS)
        """Of all programs, requests without one left out."""
        self._singles = Usual(FIRST_GUESS_SINGLE)
        self._names: dict[str, Usual] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def find(self, name: str) -> Program | None:
        """The program with this id, if it has had a request."""
        return self._programs.get(name)

    def join(self, request: Request) -> None:
        """`request` has arrived: find its program, and how much of its prompt is new to that."""
        hint, program = request.hint, request.program
        if hint is None:
            program.usual = self._singles
            request.distinct_len = request.prompt_tokens
        else:
            self._forget(request.arrival)
            program = request.program = self._programs.pop(hint.program, program)
            self._programs[hint.program] = program
            program.name, program.usual = hint.name, self._usual_of(hint.name)
            # The end of a prompt that is healed may yet be replaced.
            paths = (request.ids,) if request.scoring is None else request.scoring.paths()
            request.distinct_len = sum(len(path) - program.calls.insert(path) for path in paths)
        program.last_arrival = request.arrival
        program.open_requests += 1
        request.served_before = self.served

    def waited(self, request: Request) -> float:
        """Service that the engine gave while `request`, and earlier ones of its program, waited."""
        return self.served - request.served_before + request.program.waited

    def started(self, request: Request) -> None:
        """`request` was admitted for the first time."""
        program = request.program
        program.waited += (self.served - request.served_before) / max(1, program.open_requests)

    def serve(self, request: Request, tokens: int) -> None:
        """A step has computed so many tokens of `request`."""
        request.program.served += STEP_TOKENS + tokens
        self.served += STEP_TOKENS + tokens

    def leave(self, request: Request) -> None:
        """`request` ends: what it has computed is known to its program."""
        program = request.program
        program.open_requests -= 1
        program.ended_requests += 1
        if request.hint is None:
            request.distinct_len = request.prompt_tokens
            self._singles.learn(program.served)
            return
        computed = request.ids[: request.computed_len]
        known = program.calls.insert(computed)
        request.distinct_len += max(0, min(request.prompt_len, len(computed)) - known)

    def end(self, program: str) -> None:
        """The program with this id is over."""
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
                return  # one for each that comes is enough
