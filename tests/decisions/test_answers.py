"""Probabilities, confidence and option mass, computed from scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.decisions.answers import Answer, answer
from ramify.questions import (
    PREDICATE_OPTIONS,
    Calibration,
    FormScores,
    Option,
    Question,
    QuestionScores,
    Temperature,
)


def question(n: int, kind: Any = "choice") -> Question:
    return Question(kind=kind, options=tuple([Option(name=f"o{index}") for index in range(n)]))


def form(*probabilities: float, **fields: Any) -> FormScores:
    """A form with a spelling of one token for each option, unless `fields` say otherwise."""
    logs = tuple([math.log(p) if p else -math.inf for p in probabilities])
    own = {"options": tuple(range(len(logs))), "lengths": (1,) * len(logs)}
    return FormScores(logprobs=logs, **(own | fields))


def scores(*forms: FormScores) -> QuestionScores:
    return QuestionScores(layout="verbatim-1", forms=forms)


def near(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-12, abs=1e-300)


def given_probabilities(probabilities: Sequence[float], kind: Any) -> Answer:
    return Answer(kind=kind, probabilities=tuple(probabilities), option_mass=1.0, layout="x")


@pytest.mark.parametrize(
    ("probabilities", "choice", "score"),
    [
        ((0.7, 0.2, 0.1), 0.55, 0.4),
        ((0.05, 0.15, 0.3, 0.5), 1 / 3, 0.25),
        ((0.25, 0.25, 0.25, 0.25), 0.0, 0.0),
        ((0.0, 0.0, 1.0), 1.0, 1.0),
        ((0.45, 0.1, 0.45), 0.175, 0.0),
        ((0.4, 0.4, 0.2), 0.1, 0.0),
        ((0.02, 0.03, 0.95), 0.925, 0.895),
        ((1.0,), 1.0, 1.0),
    ],
)
def test_confidence_is_typesafes(probabilities: tuple[float, ...], choice: float, score: float) -> None:
    """The figures are those of system-one-adapter 0.2.1 (`confidence_metrics`)."""
    assert given_probabilities(probabilities, "choice").confidence == pytest.approx(choice, abs=1e-12)
    assert given_probabilities(probabilities, "score").confidence == pytest.approx(score, abs=1e-12)


def test_confidence_takes_time_in_proportion_to_the_options() -> None:
    class Counted(tuple[float, ...]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(index)

    found = Answer(kind="score", probabilities=Counted((1 / 255,) * 255), option_mass=1.0, layout="x")
    assert found.confidence == 0.0  # the mode is the first level
    assert Counted.reads <= 2 * 255


def test_the_first_of_equal_options_is_best() -> None:
    found = given_probabilities((0.2, 0.4, 0.4), "score")
    assert found.best == 1
    assert found.score == pytest.approx(1.2)
    assert found.confidence == pytest.approx(1 - (0.2 + 0.4) / (2 / 3))


def test_masses_of_spellings_add() -> None:
    found = answer(
        Question(kind="predicate", options=PREDICATE_OPTIONS),
        scores(form(0.3, 0.1, 0.1, options=(0, 0, 1), lengths=(1, 1, 1))),
    )
    assert found.probabilities == near(0.8, 0.2)
    assert found.option_mass == pytest.approx(0.5)
    assert found.confidence == pytest.approx(0.6)
    assert found.layout == "verbatim-1"


def test_mean_is_the_geometric_mean_of_the_tokens() -> None:
    long = form(0.5**4, 0.25, options=(0, 1), lengths=(4, 1))
    assert answer(question(2), scores(long)).probabilities == near(0.2, 0.8)
    assert answer(question(2), scores(long), "mean").probabilities == near(2 / 3, 1 / 3)


def test_pmi_divides_by_the_probability_behind_an_empty_state() -> None:
    here, alone = scores(form(0.6, 0.2)), scores(form(0.6, 0.1))
    found = answer(question(2), here, "pmi", alone)
    assert found.probabilities == near(1 / 3, 2 / 3)
    assert found.option_mass == pytest.approx(0.8)


def test_isolated_probabilities_of_yes_are_normalised() -> None:
    yes_or_no = {"options": (0, 0, 1), "lengths": (1, 1, 1)}
    forms = [
        form(0.3, 0.1, 0.4, about=1, **yes_or_no),  # P(yes) = 0.5
        form(0.05, 0.05, 0.9, about=0, **yes_or_no),  # 0.1
    ]
    found = answer(question(2), scores(*forms))
    assert found.probabilities == near(1 / 6, 5 / 6)
    assert found.option_mass == pytest.approx((0.8 + 1.0) / 2)
    alone = scores(form(0.2, 0.2, 0.1, about=1, **yes_or_no), form(0.1, 0.1, 0.2, about=0, **yes_or_no))
    # Weights of yes and no: 0.1 / 0.2 and 0.9 / 0.2; 0.4 / 0.4 and 0.4 / 0.1.
    assert answer(question(2), scores(*forms), "pmi", alone).probabilities == near(1 / 3, 2 / 3)


def test_orders_are_averaged() -> None:
    first, second = form(0.4, 0.1), form(0.2, 0.2, options=(1, 0))
    found = answer(question(2), scores(first, second))
    assert found.probabilities == near((0.8 + 0.5) / 2, (0.2 + 0.5) / 2)
    assert found.option_mass == pytest.approx((0.5 + 0.4) / 2)
    alone = scores(form(0.4, 0.1), form(0.1, 0.4, options=(1, 0)))
    # Each order is divided by its own: 1 and 1; 0.2 / 0.4 and 0.2 / 0.1.
    assert answer(question(2), scores(first, second), "pmi", alone).probabilities == near(0.35, 0.65)


def test_temperatures_hold_by_kind_and_number_of_options_for_their_layout() -> None:
    calibration = Calibration(
        model="m",
        layout="verbatim-1",
        temperatures={
            "choice:2": Temperature(base=2.0),
            "choice": Temperature(base=0.5, slope=-1.0, least=0.25),
        },
    )

    def found(given: FormScores, kind: Any = "choice", **fields: Any) -> tuple[float, ...]:
        asked = QuestionScores(forms=(given,), **({"layout": "verbatim-1"} | fields))
        return answer(question(len(given.options), kind), asked, calibration=calibration).probabilities

    assert found(form(0.09, 0.01)) == near(0.75, 0.25)  # square roots
    assert found(form(0.1, 0.1, 0.2)) == near(1 / 18, 1 / 18, 16 / 18)  # fourth powers
    assert found(form(0.09, 0.01), "score") == near(0.9, 0.1)
    assert found(form(0.09, 0.01), layout="labels-1") == near(0.9, 0.1)
    assert found(form(0.0, 0.3)) == near(0.0, 1.0)


def test_extreme_numbers() -> None:
    tiny = FormScores(options=(0, 1), logprobs=(-900.0, -900.0 - math.log(3)), lengths=(30, 30))
    assert answer(question(2), scores(tiny)).probabilities == near(0.75, 0.25)
    assert answer(question(2), scores(tiny)).option_mass == 0.0
    assert answer(question(2), scores(form(1e-300, 1e-300))).probabilities == near(0.5, 0.5)
    assert answer(question(2), scores(form(0.0, 1e-300))).probabilities == (0.0, 1.0)
    assert answer(question(3), scores(form(0.0, 0.0, 0.0))).probabilities == near(1 / 3, 1 / 3, 1 / 3)
    assert answer(question(2), scores(form(0.5, 0.0)), "pmi", scores(form(0.5, 0.0))).probabilities == (1, 0)
    assert answer(question(2), scores(form(0.5, 0.5)), "pmi", scores(form(0.5, 0.0))).probabilities[1] > 0.99


@pytest.mark.parametrize("yes", [(-800.0, -801.0), (-math.inf, -3.0), (-math.inf, -math.inf)])
def test_extreme_numbers_of_isolated_forms(yes: tuple[float, float]) -> None:
    forms = [
        FormScores(options=(0, 1), logprobs=(value, 0.0), lengths=(1, 1), about=index)
        for index, value in enumerate(yes)
    ]
    found = answer(question(2), scores(*forms)).probabilities
    ratio = 0.5 if yes[0] == yes[1] else 1 / (1 + math.exp(yes[1] - yes[0])) if yes[0] > -math.inf else 0.0
    assert found == near(ratio, 1 - ratio)


LOGS = st.lists(st.floats(-700.0, 0.0), min_size=2, max_size=8)


@given(logs=LOGS, data=st.data())
def test_neither_names_nor_the_order_of_spellings_matter(logs: list[float], data: st.DataObject) -> None:
    n = len(logs)
    order = data.draw(st.permutations(range(n)))
    plain = FormScores(options=tuple(range(n)), logprobs=tuple(logs), lengths=(1,) * n)
    moved = FormScores(options=tuple(order), logprobs=tuple([logs[i] for i in order]), lengths=(1,) * n)
    one = answer(question(n), scores(plain))
    other = answer(
        Question(kind="choice", options=tuple([Option(name="z" * (i + 1)) for i in range(n)])), scores(moved)
    )
    assert one.probabilities == other.probabilities  # the same bits
    assert math.fsum(one.probabilities) == pytest.approx(1.0)
    assert one.best == max(range(n), key=lambda index: (one.probabilities[index], -index))
    assert 0.0 <= one.confidence <= 1.0
    assert 0.0 <= given_probabilities(one.probabilities, "score").confidence <= 1.0


def test_a_constant_factor_changes_the_mass_alone() -> None:
    for factor, kind in itertools.product((1.0, 1e-3, 1e-200), ("choice", "score")):
        found = answer(question(3, kind), scores(form(*(factor * p for p in (0.2, 0.3, 0.1)))))
        assert found.probabilities == near(1 / 3, 1 / 2, 1 / 6)
        assert found.option_mass == pytest.approx(0.6 * factor)
