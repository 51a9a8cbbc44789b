"""Which requests take part in a step: those of the highest priority, and the others often enough.

Example, with a chat of priority 0 beside 128 requests of priority -1:

    chat alone            7 ms a step      the others keep their pages and sit out
    after 0.5 s of that   the others are owed 0.25 s: half of the time that they sat out
    step of all           90 ms            owed 0.16 s
    chat alone            0.18 s, until 0.25 s are owed again: the others have a third of the time

A step of many rows takes several times as long as a step of one (on the CPU), and that is what a request of
high priority would wait for at each of its tokens. Where rows cost next to nothing (on a GPU), requests that
decode sit out no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ramify.priority import MOST
from ramify.runtime.scheduler.request import Request
from ramify.runtime.scheduler.speculation.acceptance import StepCost

SHARE = 1 / 3
"""Requests that sit out have at least this share of the time of all steps, beyond `PATIENCE_S`."""

PATIENCE_S = 0.5
"""Seconds of steps that requests may sit out before their share is due."""

RIDE = 1.25
"""Rows of lower priority may make a decoding step this many times as long."""

OWED_PER_S = SHARE / (1 - SHARE)
"""Seconds owed for each second of sitting out."""


class Turn(NamedTuple):
    """Who takes part in a step: running requests `first`, then waiting ones as they join, then `last`."""

    first: list[Request]
    last: Sequence[Request] = ()
    least: int = -MOST
    most: int = MOST
    """The range of the priorities of waiting requests that may join."""

    @property
    def leaves_out(self) -> bool:
        """Requests of lower priority sit out."""
        return self.least > -MOST


class Precedence:
    """Chooses who takes part in each step, and counts the time that the others are owed.

    Lists of requests are in the order of `Request.order`: highest priority first. Seconds are those of the
    scheduler's clock, in steps alone.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._owed_s = 0.0
        self._shared = self._leaves_out = False

    def begin(self, running: Sequence[Request], waiting: Sequence[Request]) -> Turn:
        """Begin a step. A shared one is given to lower priorities: these prefill and join before others."""
        ends = [requests[end].priority for requests in (running, waiting) if requests for end in (0, -1)]
        top = max(ends, default=0)
        if top == min(ends, default=0):
            return self.begin_all(running)
        self._shared = self._owed_s >= PATIENCE_S * OWED_PER_S
        self._leaves_out = not self._shared
        high = [request for request in running if request.priority == top]
        lower = running[len(high) :]
        if self._shared:
            decoding = [request for request in high if request.decoding]
            prefilling = [request for request in high if not request.decoding]
            return Turn([*lower, *decoding], prefilling, most=top - 1)
        if high:
            places = int((RIDE - 1) / max(self._cost.of_a_row(len(high), bounded=False), 1e-9))
            high += [request for request in lower if request.decoding][:places]
        return Turn(high, least=top)

    def begin_all(self, running: Sequence[Request]) -> Turn:
        """Begin a step of all requests: of one priority, or because nobody of the highest can go on."""
        self._shared = self._leaves_out = False
        return Turn(list(running))

    def end(self, seconds: float) -> None:
        """The step took `seconds`."""
        if self._leaves_out:
            self._owed_s += seconds * OWED_PER_S
        elif self._shared:
            self._owed_s -= seconds
        else:
            self._owed_s = max(0.0, self._owed_s - seconds)
