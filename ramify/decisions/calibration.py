"""Temperatures fitted to labelled questions, measures of calibration, and the file of temperatures.

Example: ten predicates are answered with P(true) = 0.9, and seven of them are true.

    temperature T    P(true) is proportional to 0.9 ** (1 / T)
    loss of T        -(7 ln P(true) + 3 ln P(false)) / 10, least where P(true) = 0.7
    least loss       (0.9 / 0.1) ** (1 / T) = 0.7 / 0.3, so T = ln 9 / ln (7 / 3) = 2.59

Temperature scaling: arXiv 1706.04599. A temperature is refused if it does not lower the loss of questions
that it was not fitted to by more than a standard error; if it is at a bound; and if it makes most answers
extreme: temperatures fitted to an easy benchmark drive probabilities to 0 and 1 elsewhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from ramify.decisions.answers import tempered
from ramify.errors import InvalidRequest, NotFound
from ramify.questions import MAX_OPTIONS, Calibration, Normalisation, OptionEnd, QuestionKind

FOLDS = 5
"""Number of parts of cross-validation."""
LEAST_ITEMS = 30
"""Fewest questions to which a temperature is fitted."""
LOWEST, HIGHEST = 1 / 16, 16.0
"""Bounds of a fitted temperature."""
EXTREME = 0.99
"""An answer whose largest probability is above this is extreme."""
MOST_EXTREME = 0.5
"""Largest share of extreme answers that a temperature below that without the fit may lead to."""
KINDS = get_args(QuestionKind)
BINS = 10
"""Number of bins of the calibration error, of equal width."""
LEAST_PROBABILITY = 1e-12
"""Smaller probabilities count as this one in the loss."""


class LabelledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The probabilities of a question whose right option is known."""

    kind: QuestionKind
    probabilities: tuple[float, ...]
    """Probability of each option before calibration."""
    label: int
    """Index of the right option."""
    state: int
    """Number of the state. Questions about one state are in the same part of cross-validation."""

    @property
    def group(self) -> str:
        """Kind and number of options, such as "choice:4"."""
        return f"{self.kind}:{len(self.probabilities)}"


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of probabilities, as means over answers."""

    items: int
    accuracy: float
    """Share of the answers whose most probable option, the first on ties, is right."""
    nll: float
    """Negative natural logarithm of the right option's probability."""
    brier: float
    """Sum over the options of (probability - 1) ** 2 for the right one and probability ** 2 for the others,
    from 0 to 2 (Brier, Monthly Weather Review 78, 1950)."""
    ece: float
    """Expected calibration error: the difference between accuracy and mean largest probability in each of
    `BINS` bins of the largest probability, weighted by the bin's answers (arXiv 1706.04599)."""
    extreme: float
    """Share of the answers whose largest probability is above `EXTREME`."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted temperatures."""

    temperatures: dict[str, float]
    """By kind, such as "choice", and by kind and number of options, such as "choice:4"."""
    refused: dict[str, str]
    """Kind or group whose fitted temperature is not used → reason."""
    held_out: list[Sequence[float]]
    """Probabilities of each item by temperatures fitted to questions about other states, for the kinds and
    groups in `temperatures`."""

    def temperature(self, item: LabelledAnswer) -> float:
        return self.temperatures.get(item.group, self.temperatures.get(item.kind, 1.0))


def measures(
    items: Sequence[LabelledAnswer], probabilities: Sequence[Sequence[float]] | None = None
) -> Measures:
    """The measures of `probabilities`, one entry for each of `items`; None for those before calibration."""
    if probabilities is None:
        probabilities = [item.probabilities for item in items]
    nll = brier = 0.0
    right = extreme = 0
    gaps = [0.0] * BINS
    for item, own in zip(items, probabilities, strict=True):
        most = max(own)
        hit = own.index(most) == item.label
        right += hit
        extreme += most > EXTREME
        gaps[min(int(most * BINS), BINS - 1)] += hit - most
        nll += _loss(item, own)
        brier += sum((p - (option == item.label)) ** 2 for option, p in enumerate(own))
    n = len(items)
    return Measures(
        items=n,
        accuracy=right / n,
        nll=nll / n,
        brier=brier / n,
        ece=sum(map(abs, gaps)) / n,
        extreme=extreme / n,
    )


def fit(items: Sequence[LabelledAnswer]) -> Fit:
    """A temperature for each kind, and for each number of options of a kind with several, where it lowers the
    loss of `Fit.held_out`.

    A group without a temperature of its own gets that of its kind, and a kind without one gets 1. A group
    with enough questions whose loss the kind's temperature does not lower gets 1 as well.
    """
    temperatures: dict[str, float] = {}
    refused: dict[str, str] = {}
    held_out: list[Sequence[float]] = [item.probabilities for item in items]
    for name, places in groups(items).items():
        those = [items[at] for at in places]
        plain: list[Sequence[float]] = [item.probabilities for item in those]
        otherwise, now = temperatures.get(those[0].kind, 1.0), [held_out[at] for at in places]
        if len(those) >= LEAST_ITEMS and sum(map(_loss, those, plain)) < sum(map(_loss, those, now)):
            temperatures[name], otherwise, now = 1.0, 1.0, plain  # the kind's temperature is none for it
        found, unseen = _least_loss(those), _unseen(those)
        reason = _objection(those, found, otherwise, now, unseen)
        if reason is None:
            temperatures[name], now = found, unseen
        else:
            refused[name] = reason
        for at, own in zip(places, now, strict=True):
            held_out[at] = own
    return Fit(temperatures=temperatures, refused=refused, held_out=held_out)


def chance(items: Sequence[LabelledAnswer]) -> tuple[float, float]:
    """The expected accuracy of options drawn at random, and the accuracy that 5 % of such draws exceed:
    1.645 standard deviations above."""
    shares = [1 / len(item.probabilities) for item in items]
    spread = math.sqrt(sum(share * (1 - share) for share in shares))
    return sum(shares) / len(items), (sum(shares) + 1.645 * spread) / len(items)


def groups(items: Sequence[LabelledAnswer]) -> dict[str, list[int]]:
    """Indices of the items of each kind, and behind it of each number of options of a kind with several."""
    kinds: dict[str, dict[str, list[int]]] = {}
    for at, item in sorted(enumerate(items), key=lambda pair: len(pair[1].probabilities)):
        kinds.setdefault(item.kind, {}).setdefault(item.group, []).append(at)
    found: dict[str, list[int]] = {}
    for kind, by_number in sorted(kinds.items()):
        found[kind] = [at for places in by_number.values() for at in places]
        found |= by_number if len(by_number) > 1 else {}
    return found


def _objection(
    items: Sequence[LabelledAnswer],
    found: float,
    otherwise: float,
    now: Sequence[Sequence[float]],
    unseen: Sequence[Sequence[float]],
) -> str | None:
    """The reason to use the temperature `otherwise` for `items` instead of `found`, which was fitted to them;
    None if there is none.

    now, unseen : held-out probabilities by `otherwise` and by temperatures fitted as `found` was
    """
    if len(items) < LEAST_ITEMS:
        return f"{len(items)} questions are fewer than {LEAST_ITEMS}"
    if found > 0.999 * HIGHEST:
        return f"{found:.2f} is the bound: the probabilities say nothing about the labels"
    if not _lowers(items, now, unseen):
        return f"{found:.2f} does not clearly lower the loss of questions that it was not fitted to"
    extreme = sum(max(tempered(item.probabilities, found)) > EXTREME for item in items) / len(items)
    if found < otherwise and extreme > MOST_EXTREME:
        return f"{found:.2f} would make {extreme:.0%} of the answers more certain than {EXTREME}"
    if found < 1.001 * LOWEST:
        return f"{found:.2f} is the bound: the questions ask for more certainty than a temperature may give"
    return None


def _lowers(
    items: Sequence[LabelledAnswer], before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> bool:
    """Whether the loss falls from `before` to `after` by more than the standard error of its fall. Questions
    about one state count as one observation."""
    falls: dict[int, float] = {}
    for item, old, new in zip(items, before, after, strict=True):
        falls[item.state] = falls.get(item.state, 0.0) + _loss(item, old) - _loss(item, new)
    n, total = len(falls), math.fsum(falls.values())
    squares = math.fsum((fall - total / n) ** 2 for fall in falls.values())
    return total > math.sqrt(squares * n / max(n - 1, 1))


def _unseen(items: Sequence[LabelledAnswer]) -> list[Sequence[float]]:
    """The probabilities of `items` by temperatures that were fitted to those of them about other states."""
    found: dict[int, Sequence[float]] = {}
    for rest, part in _parts(items):
        there = _least_loss([items[at] for at in rest])
        found.update((at, tempered(items[at].probabilities, there)) for at in part)
    return [found[at] for at in range(len(items))]


def _parts(items: Sequence[LabelledAnswer]) -> Iterator[tuple[list[int], list[int]]]:
    """Indices of the other items and of the items of each part of cross-validation; no part is empty."""
    states = sorted({item.state for item in items})
    random.Random(0).shuffle(states)  # files are often sorted by label
    part_of = {state: place % FOLDS for place, state in enumerate(states)}
    for part in range(min(FOLDS, len(states))):
        inside = [at for at, item in enumerate(items) if part_of[item.state] == part]
        yield [at for at, item in enumerate(items) if part_of[item.state] != part], inside


def _loss(item: LabelledAnswer, probabilities: Sequence[float]) -> float:
    return -math.log(max(probabilities[item.label], LEAST_PROBABILITY))


def _least_loss(items: Sequence[LabelledAnswer]) -> float:
    """The temperature within the bounds at which the loss is least; 1 without items.

    The loss is convex in b = 1 / temperature. Its derivatives are sums over the items: the expected
    logarithm minus the label's, and the variance of the logarithm. Newton's method, within a bracket.
    """
    import numpy as np  # numpy is heavy, and only fitting needs it

    if not items:
        return 1.0
    logs = np.full((len(items), max(len(item.probabilities) for item in items)), -np.inf)
    for row, item in zip(logs, items, strict=True):
        row[: len(item.probabilities)] = np.log(np.maximum(item.probabilities, LEAST_PROBABILITY))
    finite = np.where(np.isinf(logs), 0.0, logs)
    labels = sum(log[item.label] for log, item in zip(logs, items, strict=True))
    low, high, b = 1 / HIGHEST, 1 / LOWEST, 1.0
    for _ in range(60):
        weights = np.exp(b * (logs - logs.max(axis=1, keepdims=True)))
        weights /= weights.sum(axis=1, keepdims=True)
        mean = (weights * finite).sum(axis=1, keepdims=True)
        slope = float(mean.sum() - labels)
        curvature = float((weights * (finite - mean) ** 2).sum())
        if abs(slope) < 1e-9 * len(items):
            break
        low, high = (low, b) if slope > 0 else (b, high)
        newton = b - slope / curvature if curvature else math.inf
        last, b = b, newton if low < newton < high else math.sqrt(low * high)
        if abs(b - last) <= 1e-6 * b:
            break
    return 1 / b


# --- the file of temperatures -----------------------------------------------------------------------


def calibration_for(
    calibration: Calibration | None,
    end: OptionEnd,
    permutations: int,
    normalise: Normalisation,
    lora: str = "",
) -> Calibration | None:
    """`calibration` if it was fitted to questions that were asked with these options; else None. Temperatures
    are those of the model without a LoRA adapter; those of forms hold for any number of orders. Whether it
    holds for a question's layout, `ramify.decisions.answers.answer` checks."""
    if calibration is None or lora or (calibration.end, calibration.normalise) != (end, normalise):
        return None
    return calibration if calibration.each_form or calibration.permutations == permutations else None


def read_calibration(path: str) -> Calibration:
    """The calibration in the JSON file `path`. Raises `NotFound`, and `InvalidRequest` for a wrong file."""
    try:
        calibration = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=Calibration)
    except OSError as error:
        raise NotFound(
            f"{path} cannot be read: {error.strerror}.",
            field="calibration",
            remedy="`ramify calibrate` writes such a file.",
        ) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{path} is no calibration: {error}.", field="calibration") from None
    for name, temperature in calibration.temperatures.items():
        kind, _, number = name.partition(":")
        if kind not in KINDS or not (number.isdecimal() or name == kind):
            raise InvalidRequest(
                f"{path} has a temperature for {name!r}; it must be for a kind ({', '.join(KINDS)}), or a "
                "kind and a number of options such as choice:4.",
                field="calibration",
            )
        for options in [int(number)] if number else [1, MAX_OPTIONS]:
            value = max(temperature.least, temperature.base + temperature.slope * math.log(max(options, 1)))
            if not 0 < value < math.inf:
                raise InvalidRequest(
                    f"{path}: the temperature of {name} for {options} options is {value:g}; it must be above "
                    "0 and finite.",
                    field="calibration",
                )
    return calibration


def check_calibration(calibration: Calibration, path: str, digest: str, layouts: Collection[str]) -> None:
    """Raise `InvalidRequest` unless `calibration` holds for the model with this digest, and for one of
    `layouts`."""
    if calibration.model != digest:
        raise InvalidRequest(
            f"{path} was fitted to the model {calibration.model!r}, and this is {digest!r}: the model's "
            "files or its quantization are others.",
            field="calibration",
            remedy="Fit it again with `ramify calibrate`, with the options of this engine.",
        )
    if calibration.layout not in layouts:
        raise InvalidRequest(
            f"{path} was fitted to the layout {calibration.layout!r}, and there are "
            f"{', '.join(sorted(layouts))}.",
            field="calibration",
            remedy="Fit it again with `ramify calibrate`.",
        )
