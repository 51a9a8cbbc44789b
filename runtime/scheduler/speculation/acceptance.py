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
"""The length of the longest n-gram that prompt lookup looks for."""
LEARNING_RATE = 1 / 32
"""The weight of one verified draft token in the acceptance rate of its source and match length."""
MOST = 15
"""The most draft tokens of a request in one step."""
MOST_IN_STEP = 32
"""The most draft tokens of all requests in one step. These add at most about 10 ms to the inter-token
latency."""
WAITING_SHARE = 0.25
"""While some decoding request has no draft, the drafts of other requests may lengthen a step by at most this
share of its time: the request without a draft still gets only one token from the step, and waits longer for
it."""
MOST_ROWS = 256
"""Steps with more rows than this are prefills, whose time says nothing about the cost of one more row."""


class DeviceRows(NamedTuple):
    """The cost of rows assumed for a kind of device before any step was measured, and bounds of a step.

    base : the number of rows whose computation takes as long as reading the weights
    drafts : the most draft tokens of all requests in one step
    most : steps with more rows are prefills
    """

    base: float
    drafts: int
    most: int


ON_CPU = DeviceRows(12.0, MOST_IN_STEP, MOST_ROWS)
"""Measured with 135 million int4 weights on two cores: 5.3 ms for a step and 0.42 ms for each row."""
ON_CUDA = DeviceRows(128.0, 256, 2048)
"""Assumed, not measured (docs/kernels.md). From the peak rates in data sheets (A100, H200, H100), the base
would be 150 to 300 rows with 16-bit weights; a lower base is assumed, with which 256 draft tokens triple the
time of a step."""


def outcomes(request: Request, draft: Draft) -> Iterator[tuple[int, bool]]:
    """Yield (grade, True if accepted) for each token of `draft`, up to and including the first rejected
    token. Tokens beyond the end of the sequence of `request` are left out."""
    came = request.ids[draft.position : draft.position + len(draft.tokens)].tolist()
    for token, drafted, grade in zip(came, draft.tokens, draft.grades, strict=False):
        yield grade, token == drafted
        if token != drafted:
            return


class AcceptanceRates:
    """The probability that a draft token is accepted if all draft tokens before it were accepted, by source
    and match length.

    The rates are those of all requests together. For the draft model, its confidence on a scale from 1 to
    `LONGEST_MATCH` replaces the match length.
    """

    def __init__(self, first: Mapping[str, tuple[float, float]]) -> None:
        """Begin with assumed rates.

        first : for each source, the rate at a match of one token and the rate at a match of `LONGEST_MATCH`
        """
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
    """A model of the time of a step of R rows: a + b R seconds, fitted to recent steps.

    A ridge regression with fading weights. It pulls the slope b towards the prior slope, mean_seconds / (base
    + mean_rows), with the weight `STIFFNESS`. The slope is at least half the prior slope, unless
    `share_of_a_row` is called without `bounded`. If recent steps have nearly equal numbers of rows, they
    determine the slope badly, and a slope that is too low would fill steps with draft tokens.
    """

    FADE = 0.98
    STIFFNESS = 64.0
    """The weight of the prior slope, in squared rows."""

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
        """The expected seconds of a step of `rows` rows; 0 if no step has been measured."""
        if not self._weight:
            return 0.0
        return max(0.0, self._seconds / self._weight + self._slope() * (rows - self._rows / self._weight))

    def share_of_a_row(self, rows: int, *, bounded: bool = True) -> float:
        """The time of one more row, as a share of the time of a step of `rows` rows.

        bounded : the slope is taken as at least half the prior slope
        """
        if not self._weight:
            return 1.0 / (self.device.base + rows)
        slope = self._slope(bounded)
        step = self._seconds / self._weight + slope * (rows - self._rows / self._weight)
        return slope / step if step > 0 else 1.0

    def _slope(self, bounded: bool = True) -> float:
        """The seconds that one more row takes."""
        mean, seconds = self._rows / self._weight, self._seconds / self._weight
        usual = seconds / (self.device.base + mean)
        variance = max(0.0, self._rows_rows / self._weight - mean * mean)
        covariance = self._rows_seconds / self._weight - mean * seconds
        least = usual / 2 if bounded else 0.0
        return max(least, (covariance + self.STIFFNESS * usual) / (variance + self.STIFFNESS))


class StepDrafts:
    """A step with its draft tokens so far: the rows that the step computes, and its expected number of
    tokens.

    cost : the model of the time of steps
    rows : the number of tokens that the step computes without draft tokens
    tokens : the number of tokens that the step is expected to give without draft tokens
    decoding : the number of requests that wait for a token of the step
    least_gain : a draft token must promise at least this multiple of its cost
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
        """The most draft tokens that a request gets before the other requests have had their turn."""
        self.seconds = 0.0
        """Seconds that the draft model has spent on this step."""
        self.price = self._price()
        """The number of accepted tokens that one more row must promise."""

    def lift(self) -> None:
        """Lift the bound of `WAITING_SHARE`, because all decoding requests get drafts."""
        self.room, self._beyond = self.room + self._beyond, 0

    def longest(self, request: Request) -> int:
        """The number of draft tokens that `request` may still get once the bound of `WAITING_SHARE` is
        lifted."""
        most = min(MOST - request.draft_len, request.budget_left - 1 - request.ahead_len)
        return min(most, self.room + self._beyond)

    def most(self, request: Request) -> int:
        """The number of draft tokens that `request` may still get."""
        return min(self.longest(request), self.room)

    def price_of(self, seconds: float) -> float:
        """The number of accepted tokens that `seconds` of drafting must promise; infinite if no step has been
        measured."""
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
