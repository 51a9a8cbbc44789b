"""Whether a guessed token is worth its row: how often such guesses were right, and what a row costs."""

from __future__ import annotations

from collections.abc import Mapping

from ramify.runtime.scheduler.speculation.prompt_lookup import LONGEST

RATE = 1 / 32
"""How much one guess moves the odds of its kind."""
MOST_ROWS = 256
"""Steps of more rows are prefills: their time says nothing about one row more."""


class Odds:
    """The probability that a guess is right if those before it were, by source and length of the match."""

    def __init__(self, first: Mapping[str, tuple[float, float]]) -> None:
        """first : for each source the odds before any guess, at a match of one token and of the longest."""
        self._table = {
            source: [low + (high - low) * i / (LONGEST - 1) for i in range(LONGEST)]
            for source, (low, high) in first.items()
        }

    def of(self, source: str, length: int) -> float:
        return self._table[source][min(length, LONGEST) - 1]

    def learn(self, source: str, length: int, *, kept: bool) -> None:
        row, place = self._table[source], min(length, LONGEST) - 1
        row[place] += RATE * (kept - row[place])

    @property
    def best(self) -> float:
        return max(max(row) for row in self._table.values())


class Track:
    """How the guesses of one request went, the latest about ten."""

    __slots__ = ("_kept", "_tried")
    FADE = 0.9
    WEIGHT = 4.0
    """What all requests say of a kind of guess counts as so many guesses of this one."""

    def __init__(self) -> None:
        self._kept = self._tried = 0.0

    def learn(self, *, kept: bool) -> None:
        self._kept = self._kept * self.FADE + kept
        self._tried = self._tried * self.FADE + 1.0

    def odds(self, general: float) -> float:
        return (general * self.WEIGHT + self._kept) / (self.WEIGHT + self._tried)


class StepCost:
    """A step of R rows takes about a + b R seconds; both follow what recent steps took.

    Least squares with fading weights, drawn to the slope of a step in which reading the weights costs as much
    as `BASE_ROWS` rows, and never below half of it: steps of about as many rows say little of a slope, and
    one that is too low fills steps with guesses.
    """

    FADE = 0.98
    BASE_ROWS = 12.0
    """Of a model of 135 million int4 weights on two cores: 5.3 ms and 0.42 ms a row."""
    STIFFNESS = 64.0
    """Rows squared: the weight of that slope."""

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

    def of_a_row(self, rows: int) -> float:
        """What one row more costs, as a share of a step of so many rows."""
        if not self._weight:
            return 1.0 / (self.BASE_ROWS + rows)
        mean, seconds = self._rows / self._weight, self._seconds / self._weight
        usual = seconds / (self.BASE_ROWS + mean)
        variance = max(0.0, self._rows_rows / self._weight - mean * mean)
        covariance = self._rows_seconds / self._weight - mean * seconds
        slope = max(usual / 2, (covariance + self.STIFFNESS * usual) / (variance + self.STIFFNESS))
        step = seconds + slope * (rows - mean)
        return slope / step if step > 0 else 1.0
