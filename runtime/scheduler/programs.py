"""What the scheduler remembers of programs that are running."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ramify.radix.token_tree import TokenTree
from ramify.runtime.scheduler.waits import OwnWaits

if TYPE_CHECKING:
    from ramify.runtime.scheduler.request import Request

FORGET_S = 600.0
"""A program that has had no request for so long, and has none, is forgotten: its client may have gone
without a word."""


STEP_TOKENS = 16.0
"""A request's place in a step counts as so many tokens of prefill: decoding is cheap by the token only."""

LEAST_LEFT = 0.2
"""A program that has had more than is usual is thought to need this share of it still."""

UNKNOWN_LEFT = 4096.0
"""Tokens of service beyond which a program of which nothing is known is not set back further."""

MAX_NAMES = 4096
"""Names of programs whose usual service is remembered."""

NAME_MEMORY = 50
"""So many of the last programs of a name count for what is usual."""


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """One run of a program; a request without a program is one of its own."""

    last_arrival: float = 0.0
    name: str = ""
    """What people call it."""
    open_requests: int = 0
    """Waiting or running."""
    ended_requests: int = 0
    waited_s: float = 0.0
    """What its requests have waited for admission so far; those that waited together count once."""
    usual: float | None = None
    """Service that programs of its name have had in all; None where none has ended yet."""
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
        under its name; else as much as it has had, up to `UNKNOWN_LEFT`: attained service tells short
        programs from long ones (Autellix), but where all are long it would keep each from its end.
        """
        if calls_left is not None and self.ended_requests:
            return self.served / self.ended_requests * (calls_left + 1)
        if self.usual is not None:
            return max(self.usual - self.served, LEAST_LEFT * self.usual)
        return min(self.served, UNKNOWN_LEFT)


class Programs:
    """The programs by their id."""

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        """In the order of their last arrival."""
        self._usual: dict[str, tuple[int, float]] = {}
        """By name: how many programs, and their mean service. Requests without a program have no name."""

    def __len__(self) -> int:
        return len(self._programs)

    def find(self, name: str) -> Program | None:
        """The program with this id, if it has had a request."""
        return self._programs.get(name)

    def join(self, request: Request) -> None:
        """`request` has arrived: find its program, and how much of its prompt is new to that."""
        hint, program = request.hint, request.program
        if hint is None:
            program.usual = self._usual_of("")
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
        request.left = program.left(None if hint is None else hint.calls_left)

    def started(self, request: Request, now: float) -> None:
        """`request` was admitted for the first time."""
        request.program.waited_s += (now - request.arrival) / max(1, request.program.open_requests)

    def serve(self, request: Request, tokens: int) -> None:
        """A step has computed so many tokens of `request`."""
        request.program.served += STEP_TOKENS + tokens

    def leave(self, request: Request) -> None:
        """`request` ends: what it has computed is known to its program."""
        program = request.program
        program.open_requests -= 1
        program.ended_requests += 1
        if request.hint is None:
            request.distinct_len = request.prompt_tokens
            self._learn("", program.served)
            return
        computed = request.ids[: request.computed_len]
        known = program.calls.insert(computed)
        request.distinct_len += max(0, min(request.prompt_len, len(computed)) - known)

    def end(self, program: str) -> None:
        """The program with this id is over."""
        found = self._programs.pop(program, None)
        if found is not None:
            self._learn(found.name, found.served)

    def _usual_of(self, name: str) -> float | None:
        found = self._usual.get(name)
        return None if found is None else found[1]

    def _learn(self, name: str, served: float) -> None:
        if name not in self._usual and len(self._usual) >= MAX_NAMES:
            del self._usual[next(iter(self._usual))]
        count, mean = self._usual.get(name, (0, 0.0))
        count = min(count + 1, NAME_MEMORY)
        self._usual[name] = (count, mean + (served - mean) / count)

    def _forget(self, now: float) -> None:
        for name, program in self._programs.items():
            if program.last_arrival + FORGET_S > now:
                return
            if not program.open_requests:
                del self._programs[name]
                return  # one for each that comes is enough
