"""Which requests take part in a step: those of the highest rank, and the others often enough.

A request's rank is its priority, less a half while its flow yields to others (`admission.flows`).

Example, with a chat of priority 0 beside 128 requests of priority -1:

    chat alone            7 ms a step      the others keep their pages and sit out
    after 0.5 s of that   the others are owed 0.25 s: half of the time that they sat out
    step of all           90 ms            owed 0.16 s
    chat alone            0.18 s, until 0.25 s are owed again: the others have a third of the time

A step of many rows takes several times as long as a step of one (on the CPU), and that is what a request of
high rank would wait for at each of its tokens. Where rows cost next to nothing, by measurement, requests that
decode sit out no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ramify.runtime.scheduler.request import LEAST_RANK, MOST_RANK, Request
from ramify.runtime.scheduler.speculation.acceptance import StepCost

SHARE = 1 / 3
"""Requests that sit out have at least this share of the time of all steps, beyond `PATIENCE_S`. Where flows
yield, it is their share of all flows, if that is more."""

PATIENCE_S = 0.5
"""Seconds of steps that requests may sit out before their share is due."""

PATIENCE_STEPS = 3
"""And at least as long as this number of steps in which all take part. On a slow machine each of these may
take longer than a chat does alone."""

RIDE = 1.25
"""Rows of lower rank may make a decoding step this many times as long."""


class Turn(NamedTuple):
    """Who takes part in a step: running requests `first`, then waiting ones as they join, then `last`."""

    first: list[Request]
    last: Sequence[Request] = ()
    least: int = LEAST_RANK
    most: int = MOST_RANK
    """The range of the ranks of waiting requests that may join."""

    @property
    def leaves_out(self) -> bool:
        """Requests of lower rank sit out."""
        return self.least > LEAST_RANK


class Precedence:
    """Chooses who takes part in each step, and counts the time that the others are owed.

    Lists of requests are in the order of `Request.order`: highest rank first. Seconds are those of the
    scheduler's clock, in steps alone.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._sat_out_s = 0.0
        """Seconds of sitting out that are not paid back."""
        self._share = SHARE
        self._steps_shared = 0
        self._served: dict[int, int] = {}
        """`_steps_shared` when the prefills of a rank went first, by rank."""
        self._step_s = 0.0
        """Average time of recent steps in which all took part."""
        self._shared = self._leaves_out = False

    def begin(self, running: Sequence[Request], waiting: Sequence[Request], yielding: float = 0.0) -> Turn:
        """Begin a step. A shared one is given to a lower rank: its requests prefill and join before others.

        yielding : the share of the flows of the highest priority that yield
        """
        ends = [requests[end].rank for requests in (running, waiting) if requests for end in (0, -1)]
        top = max(ends, default=0)
        if top == min(ends, default=0):
            return self.begin_all(running)
        self._share = max(SHARE, yielding)
        # Few flows that go before many wait for less: else each would delay the many.
        patience_s = max(PATIENCE_S, PATIENCE_STEPS * self._step_s) * min(1.0, 2 * (1 - self._share))
        self._shared = self._sat_out_s >= patience_s
        self._leaves_out = not self._shared
        high = [request for request in running if request.rank == top]
        lower = running[len(high) :]
        if self._shared:
            rank = self._next_rank({request.rank for each in (running, waiting) for request in each} - {top})
            first = [request for request in running if request.decoding or request.rank == rank]
            last = [request for request in running if not request.decoding and request.rank != rank]
            return Turn(first, last, most=rank)
        if high:
            places = int((RIDE - 1) / max(self._cost.of_a_row(len(high), bounded=False), 1e-9))
            high += [request for request in lower if request.decoding][:places]
        return Turn(high, least=top)

    def _next_rank(self, lower: set[int]) -> int:
        """The rank whose prefills and admissions go first: each in its turn, as those of one could fill the
        chunk of every shared step. The one that has waited longest, whichever others come and go."""
        rank = min(lower, key=lambda rank: (self._served.get(rank, 0), rank))
        self._steps_shared += 1
        self._served[rank] = self._steps_shared
        return rank

    def begin_all(self, running: Sequence[Request]) -> Turn:
        """Begin a step of all requests: of one rank, or because nobody of the highest can go on."""
        self._shared = self._leaves_out = False
        return Turn(list(running))

    def end(self, seconds: float) -> None:
        """The step took `seconds`."""
        paid_s = seconds * (1 - self._share) / self._share
        if not self._leaves_out:
            self._step_s += (seconds - self._step_s) / 4
        if self._leaves_out:
            self._sat_out_s += seconds
        elif self._shared:
            self._sat_out_s -= paid_s
        else:
            self._sat_out_s = max(0.0, self._sat_out_s - paid_s)
