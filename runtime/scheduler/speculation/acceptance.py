"""The probability that draft tokens are accepted, and the cost of verifying one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ramify.runtime.scheduler.requests.parts import Draft

if TYPE_CHECKING:
    import torch

    from ramify.runtime.scheduler.requests.request import Request

LONGEST_MATCH = 8
"""Tokens of the longest n-gram that is looked for by prompt lookup."""
LEARNING_RATE = 1 / 32
"""The weight of one verified draft token in the acceptance rate of its kind."""
MOST = 15
"""Draft tokens of a request in one step."""
MOST_IN_STEP = 32
"""Draft tokens of all requests in one step: they add at most some 10 ms to the time between tokens."""
WAITING_SHARE = 0.25
"""Share by which drafts of others may lengthen the step of a decoding request without a draft: it gets one
token of the step, as ever, and waits longer for it."""
MOST_ROWS = 256
"""Steps of more rows are prefills: their time says nothing about one row more."""


class DeviceRows(NamedTuple):
    """Cost of rows on a kind of device before any step was measured, and bounds of a step.

    base : rows that take as long as reading the weights
    drafts : draft tokens of all requests in one step
    most : steps of more rows are prefills
    """

    base: float
    drafts: int
    most: int


ON_CPU = DeviceRows(12.0, MOST_IN_STEP, MOST_ROWS)
"""Measured with 135 million int4 weights on two cores: 5.3 ms a step and 0.42 ms a row."""
ON_CUDA = DeviceRows(128.0, 256, 2048)
"""Assumed, not measured (docs/kernels.md). The base is below the 150 to 300 rows of 16-bit weights that the
peaks of data sheets give (A100, H200, H100). With it 256 draft tokens triple the time of a step."""


def outcomes(request: Request, draft: Draft) -> Iterator[tuple[int, bool]]:
    """The outcome of `draft`: the grade of each token up to the first rejected one, and whether it came."""
    came = request.ids[draft.position : draft.position + len(draft.tokens)].tolist()
    for token, drafted, grade in zip(came, draft.tokens, draft.grades, strict=False):
        yield grade, token == drafted
        if token != drafted:
            return


class AcceptanceRates:
    """The probability that a draft token is accepted if those before it were, by source and match length.

    Rates of all requests together; the rate of a source rises with the number of tokens that matched. A draft
    model's confidence takes the place of the length, in eighths.
    """

    def __init__(self, first: Mapping[str, tuple[float, float]]) -> None:
        """first : for each source the rates before any draft, at matches of one token and of the longest."""
        self._table = {
            source: [low + (high - low) * i / (LONGEST_MATCH - 1) for i in range(LONGEST_MATCH)]
            for source, (low, high) in first.items()
        }

    def rate_of(self, source: str, length: int) -> float:
        return self._table[source][min(length, LONGEST_MATCH) - 1]

    def learn(self, source: str, length: int, *, accepted: bool) -> None:
        row, place = self._table[source], min(length, LONGEST_MATCH) - 1
        row[place] += LEARNING_RATE * (accepted - row[place])

    def best(self, sources: Iterable[str]) -> float:
        return max(max(self._table[source]) for source in sources)


def rows_of(device: torch.device) -> DeviceRows:
    return ON_CUDA if device.type == "cuda" else ON_CPU


class StepCost:
    """The time of a step of R rows, modelled as a + b R seconds from recent steps.

    Ridge regression, with fading weights, to the prior slope mean_seconds / (base + mean_rows), weight
    STIFFNESS; never below half the prior. Recent steps with nearly equal numbers of rows determine a slope
    badly, and one that is too low would fill steps with draft tokens.
    """

    FADE = 0.98
    STIFFNESS = 64.0
    """The weight of the slope that the device's `base` gives, in squared rows."""

    def __init__(self, device: DeviceRows = ON_CPU) -> None:
        self.device = device
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        if rows > self.device.most:
            return
        fade = self.FADE
        self._weight = self._weight * fade + 1.0
        self._rows = self._rows * fade + rows
        self._seconds = self._seconds * fade + seconds
        self._rows_rows = self._rows_rows * fade + rows * rows
        self._rows_seconds = self._rows_seconds * fade + rows * seconds

    def seconds_of(self, rows: int) -> float:
        """The seconds of a step of `rows` rows; 0 before any step."""
        if not self._weight:
            return 0.0
        return max(0.0, self._seconds / self._weight + self._slope() * (rows - self._rows / self._weight))

    def share_of_a_row(self, rows: int, *, bounded: bool = True) -> float:
        """The time of one more row, as a share of the time of a step of `rows` rows.

        bounded : the slope is at least half the prior
        """
        if not self._weight:
            return 1.0 / (self.device.base + rows)
        slope = self._slope(bounded)
        step = self._seconds / self._weight + slope * (rows - self._rows / self._weight)
        return slope / step if step > 0 else 1.0

    def _slope(self, bounded: bool = True) -> float:
        """Seconds of one more row."""
        mean, seconds = self._rows / self._weight, self._seconds / self._weight
        usual = seconds / (self.device.base + mean)
        variance = max(0.0, self._rows_rows / self._weight - mean * mean)
        covariance = self._rows_seconds / self._weight - mean * seconds
        least = usual / 2 if bounded else 0.0
        return max(least, (covariance + self.STIFFNESS * usual) / (variance + self.STIFFNESS))


class StepDrafts:
    """A step and its draft tokens so far: the rows it computes, and the tokens it is expected to give.

    cost : the time of steps
    rows : tokens that the step computes without drafts
    tokens : tokens that the step is expected to give
    decoding : number of requests that wait for a token of the step
    least_gain : a draft token must promise this multiple of its cost
    """

    def __init__(self, cost: StepCost, rows: int, tokens: float, decoding: int, least_gain: float) -> None:
        self.cost = cost
        self._least_gain = least_gain
        self.rows = rows
        self.tokens = tokens
        self.room = cost.device.drafts
        if decoding > 1:
            self.room = min(self.room, int(WAITING_SHARE / cost.share_of_a_row(rows)))
        self._beyond = cost.device.drafts - self.room
        self.share = max(1, self.room // max(1, decoding))
        """Draft tokens of a request before others have had theirs."""
        self.seconds = 0.0
        """Seconds spent by the draft model."""
        self.price = self._price()
        """Tokens that one more row must promise."""

    def lift(self) -> None:
        """Lift the bound for drafts that others wait for: all decoding requests have drafts."""
        self.room, self._beyond = self.room + self._beyond, 0

    def longest(self, request: Request) -> int:
        """The number of draft tokens that `request` may get once all others have drafts."""
        most = min(MOST - request.draft_len, request.budget_left - 1 - request.ahead_len)
        return min(most, self.room + self._beyond)

    def most(self, request: Request) -> int:
        """The number of draft tokens that `request` may still get."""
        return min(self.longest(request), self.room)

    def price_of(self, seconds: float) -> float:
        """Tokens that `seconds` of drafting must promise; infinite where no step has been measured."""
        step = self.cost.seconds_of(self.rows)
        return self._least_gain * self.tokens * seconds / (step + self.seconds) if step > 0 else math.inf

    def add(self, request: Request, token: int, chance: float) -> None:
        """Give `request` a draft token, which is accepted with probability `chance`."""
        request.add_draft([token])
        self.tokens += chance
        self.rows += 1
        self.room -= 1
        self.price = self._price()

    def _price(self) -> float:
        return self.cost.share_of_a_row(self.rows) * self._least_gain * self.tokens
