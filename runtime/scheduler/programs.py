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


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """One run of a program; a request without a program is one of its own."""

    last_arrival: float = 0.0
    open_requests: int = 0
    """Waiting or running."""
    served: float = 0.0
    """Tokens computed for it: its attained service."""
    calls: TokenTree = dataclasses.field(default_factory=TokenTree)
    """All that its requests hold: prompts from their arrival, outputs from their end on."""
    forks: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """By fork: the tokens with which the prompts of all requests inside it begin."""
    waits: OwnWaits = dataclasses.field(default_factory=OwnWaits)


class Programs:
    """The programs by their id."""

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        """In the order of their last arrival."""

    def __len__(self) -> int:
        return len(self._programs)

    def join(self, request: Request) -> None:
        """`request` has arrived: find its program, and how much of its prompt is new to that."""
        if request.hint is not None:
            self._forget(request.arrival)
            found = self._programs.pop(request.hint.program, None)
            if found is not None:
                request.program = found
            self._programs[request.hint.program] = request.program
        program = request.program
        program.last_arrival = request.arrival
        program.open_requests += 1
        # The end of a prompt that is healed may yet be replaced.
        request.distinct_len = request.length - program.calls.insert(request.ids)

    def leave(self, request: Request) -> None:
        """`request` ends: what it has computed is known to its program."""
        program = request.program
        program.open_requests -= 1
        computed = request.ids[: request.computed_len]
        known = program.calls.insert(computed)
        request.distinct_len += max(0, min(request.prompt_len, len(computed)) - known)

    def end(self, program: str) -> None:
        self._programs.pop(program, None)

    def _forget(self, now: float) -> None:
        for name, program in self._programs.items():
            if program.last_arrival + FORGET_S > now:
                return
            if not program.open_requests:
                del self._programs[name]
                return  # one for each that comes is enough
