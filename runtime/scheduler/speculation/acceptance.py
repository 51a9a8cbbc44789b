"""How likely draft tokens are to be accepted, and what verifying one costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ramify.runtime.scheduler.speculation.prompt_lookup import LONGEST_MATCH

if TYPE_CHECKING:
    from ramify.runtime.scheduler.speculation.drafter import Draft

LEARNING_RATE = 1 / 32
"""The weight of one verified draft token in the acceptance rate of its kind."""
MOST_ROWS = 256
"""Steps of more rows are prefills: their time says nothing about one row more."""


class AcceptanceRates:
    """The probability that a draft token is accepted if those before it were, by source and match length.

    Rates of all requests together; the rate of a source rises with the number of tokens that matched.
    """

    def __init__(self, first: Mapping[str, tuple[float, float]]) -> None:
        """first : for each source the rates before any draft, at matches of one token and of the longest."""
        self._table = {
            source: [low + (high - low) * i / (LONGEST_MATCH - 1) for i in range(LONGEST_MATCH)]
            for source, (low, high) in first.items()
        }

    def of(self, source: str, length: int) -> float:
        return self._table[source][min(length, LONGEST_MATCH) - 1]

    def learn(self, source: str, length: int, *, accepted: bool) -> None:
        row, place = self._table[source], min(length, LONGEST_MATCH) - 1
        row[place] += LEARNING_RATE * (accepted - row[place])

    @property
    def best(self) -> float:
        return max(max(row) for row in self._table.values())


class RequestAcceptance:
    """Acceptance of one request's draft tokens, by fading counts of about the last ten."""

    __slots__ = ("_accepted", "_verified")
    FADE = 0.9
    PRIOR_WEIGHT = 4.0
    """The rate of all requests weighs as much as this number of the request's own draft tokens."""

    def __init__(self) -> None:
        self._accepted = self._verified = 0.0

    def learn(self, *, accepted: bool) -> None:
        self._accepted = self._accepted * self.FADE + accepted
        self._verified = self._verified * self.FADE + 1.0

    def rate(self, general: float) -> float:
        """The probability of acceptance for this request, where it is `general` for all."""
        return (general * self.PRIOR_WEIGHT + self._accepted) / (self.PRIOR_WEIGHT + self._verified)


@dataclasses.dataclass(slots=True)
class SpeculationState:
    """What the drafter keeps of one request."""

    draft: Draft | None = None
    """The last draft, until its outcome has been learned from."""
    acceptance: RequestAcceptance = dataclasses.field(default_factory=RequestAcceptance)
    pause: int = 0
    """Steps to go until the next lookup."""
    next_pause: int = 1
    """Steps of the next pause: doubled after each lookup that found no draft worth its rows."""


class StepCost:
    """The time of a step of R rows, modelled as a + b R seconds from recent steps.

    Ridge regression, with fading weights, to the prior slope mean_seconds / (BASE_ROWS + mean_rows), weight
    STIFFNESS; never below half the prior. Recent steps with nearly equal numbers of rows determine a slope
    badly, and one that is too low would fill steps with draft tokens.
    """

    FADE = 0.98
    BASE_ROWS = 12.0
    """Measured with 135 million int4 weights on two cores: 5.3 ms a step and 0.42 ms a row."""
    STIFFNESS = 64.0
    """The weight of the slope that `BASE_ROWS` gives, in squared rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        if rows > MOST_ROWS:
            return
        fade = self.FADE
        self._weight = self._weight * fade + 1.0
        self._rows = self._rows * fade + rows
        self._seconds = self._seconds * fade + seconds
        self._rows_rows = self._rows_rows * fade + rows * rows
        self._rows_seconds = self._rows_seconds * fade + rows * seconds

    def of_a_row(self, rows: int, *, bounded: bool = True) -> float:
        """The time of one more row, as a share of the time of a step of `rows` rows.

        bounded : the slope is at least half the prior
        """
        if not self._weight:
            return 1.0 / (self.BASE_ROWS + rows)
        mean, seconds = self._rows / self._weight, self._seconds / self._weight
        usual = seconds / (self.BASE_ROWS + mean)
        variance = max(0.0, self._rows_rows / self._weight - mean * mean)
        covariance = self._rows_seconds / self._weight - mean * seconds
        least = usual / 2 if bounded else 0.0
        slope = max(least, (covariance + self.STIFFNESS * usual) / (variance + self.STIFFNESS))
        step = seconds + slope * (rows - mean)
        return slope / step if step > 0 else 1.0
