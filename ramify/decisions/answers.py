"""Answers computed from the scores of questions.

Example: a choice with the spellings "Yes" and "yes" of its first option and "no" of its second.

    probabilities behind the prompt    Yes 0.30, yes 0.10, no 0.10
    option mass                        0.30 + 0.10 + 0.10 = 0.5
    probabilities                      0.4 / 0.5 = 0.8, 0.1 / 0.5 = 0.2
    confidence                         (0.8 - 1/2) / (1 - 1/2) = 0.6
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import msgspec

from ramify.errors import BackendError, UnsupportedField
from ramify.questions import (
    Calibration,
    FormScores,
    Normalisation,
    Question,
    QuestionKind,
    QuestionScores,
)

_LEAST = math.log(sys.float_info.min)
"""Least logarithm of a probability by which "pmi" divides."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question."""

    kind: QuestionKind
    probabilities: tuple[float, ...]
    """Probability of each option, in the order of the question. Their sum is 1, or what a remote endpoint's
    rounding made of it."""
    option_mass: float | None
    """Probability that the model answers with any of the options: the mean over the question's forms. Small
    if none of the options fits, which `probabilities` cannot show. None if a remote endpoint gave
    probabilities alone."""
    layout: str
    """Name and version of the layout in which the question was asked."""
    temperature: float | None = None
    """Temperature of the calibration that was applied; None if none holds for the question."""

    @property
    def best(self) -> int:
        """Index of the most probable option, the first on ties."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def score(self) -> float:
        """Expected level, counted from 0."""
        return sum(level * probability for level, probability in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """Concentration of the probabilities, from 0 to 1 (TypeSafe's definition).

        Of a score: 1 less the mean distance from the most probable level, relative to that of equal
        probabilities. Of other kinds: the largest probability, from equal probabilities at 0 to certainty
        at 1.
        """
        n = len(self.probabilities)
        if n == 1:
            return 1.0
        if self.kind == "score":
            mode = self.best
            distance = sum(p * abs(level - mode) for level, p in enumerate(self.probabilities))
            uniform = sum(abs(level - (n - 1) / 2) for level in range(n)) / n
            return max(0.0, 1.0 - distance / uniform)
        return (max(self.probabilities) - 1 / n) / (1 - 1 / n)


def answer(
    question: Question,
    scores: QuestionScores,
    normalise: Normalisation = "sum",
    empty: QuestionScores | None = None,
    calibration: Calibration | None = None,
) -> Answer:
    """The answer to `question`.

    empty : scores of the same question behind an empty state, with its forms in the same order; needed for
        "pmi"
    calibration : applied if it holds for the layout of `scores`

    Raises `BackendError` if the model declined to answer. Raises `UnsupportedField` for a `normalise` other
    than "sum" if a remote endpoint gave probabilities, which have no scores to normalise.
    """
    n = len(question.options)
    heat, each_form = 1.0, False
    calibrated = calibration is not None and calibration.layout == scores.layout
    if calibration is not None and calibrated:
        heat, each_form = temperature(calibration, question.kind, n), calibration.each_form

    def of_forms(count: int) -> Iterator[list[float]]:
        others = [None] * len(scores.forms) if empty is None else empty.forms
        for form, other in zip(scores.forms, others, strict=True):
            weights = _weights(form, count, normalise, other)
            yield [weight / heat for weight in weights] if each_form else weights

    if not scores.forms:
        probabilities = list(_given(scores, normalise))
    elif scores.forms[0].about >= 0:
        yes = [-math.inf] * n
        for form, weights in zip(scores.forms, of_forms(2), strict=True):
            yes[form.about] = weights[0] - total if (total := _log_sum(weights)) > -math.inf else total
        probabilities = _normalised(yes)
    else:
        orders = [*map(_normalised, of_forms(n))]
        probabilities = [math.fsum(column) / len(orders) for column in zip(*orders, strict=True)]
    if not each_form:
        probabilities = tempered(probabilities, heat)
    mass = scores.option_mass
    if scores.forms:
        total = math.fsum(math.exp(value) for form in scores.forms for value in form.logprobs)
        mass = total / len(scores.forms)
    return Answer(
        kind=question.kind,
        probabilities=tuple(probabilities),
        option_mass=mass,
        layout=scores.layout,
        temperature=heat if calibrated else None,
    )


def _given(scores: QuestionScores, normalise: Normalisation) -> tuple[float, ...]:
    """The probabilities that a remote endpoint gave."""
    if not scores.probabilities:
        raise BackendError("The model declined to answer the question.")
    if normalise != "sum":
        raise UnsupportedField(
            f"normalise is {normalise!r}, and this endpoint gives probabilities without their scores.",
            field="normalise",
            remedy='Leave it at "sum", or use Engine or RuntimeEndpoint.',
        )
    return scores.probabilities


def temperature(calibration: Calibration, kind: QuestionKind, n: int) -> float:
    """The temperature for a question of `kind` with `n` options; 1 where `calibration` gives none."""
    found = calibration.temperatures.get(f"{kind}:{n}") or calibration.temperatures.get(kind)
    return 1.0 if found is None else max(found.least, found.base + found.slope * math.log(n))


def tempered(probabilities: Sequence[float], temperature: float) -> list[float]:
    """`probabilities` to the power of 1 / `temperature`, normalised."""
    if temperature == 1.0:
        return list(probabilities)
    return _normalised([math.log(p) / temperature if p else -math.inf for p in probabilities])


def _weights(form: FormScores, n: int, normalise: Normalisation, empty: FormScores | None) -> list[float]:
    """The logarithm of each option's weight."""
    logs: list[list[float]] = [[] for _ in range(n)]
    for option, value, length in zip(form.options, form.logprobs, form.lengths, strict=True):
        logs[option].append(value / length if normalise == "mean" else value)
    weights = [_log_sum(each) for each in logs]
    if normalise != "pmi":
        return weights
    assert empty is not None
    alone = _weights(empty, n, "sum", None)
    return [here - max(there, _LEAST) for here, there in zip(weights, alone, strict=True)]


def _normalised(logs: Sequence[float]) -> list[float]:
    """Probabilities proportional to the exponentials of `logs`; equal ones if all are minus infinity."""
    most = max(logs)
    if most == -math.inf:
        return [1 / len(logs)] * len(logs)
    weights = [math.exp(value - most) for value in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _log_sum(values: Sequence[float]) -> float:
    most = max(values)
    if most == -math.inf:
        return most
    return most + math.log(math.fsum(math.exp(value - most) for value in values))
