"""Acceptance rates, by which draft tokens are or are not worth their rows of the batch."""

from __future__ import annotations

import pytest

from ramify.runtime.scheduler.requests.parts import RequestAcceptance
from ramify.runtime.scheduler.speculation.acceptance import MOST_ROWS, AcceptanceRates, StepCost


def test_acceptance_rates_follow_the_drafts_of_their_kind() -> None:
    rates = AcceptanceRates({"own": (0.1, 0.8), "tree": (0.6, 0.9)})
    assert rates.rate_of("own", 1) == 0.1
    assert rates.rate_of("own", 8) == rates.rate_of("own", 20) == pytest.approx(0.8)
    for i in range(400):
        rates.learn("own", 2, accepted=i % 4 == 0)
    assert rates.rate_of("own", 2) == pytest.approx(0.25, abs=0.05)
    assert rates.rate_of("own", 1) == 0.1
    assert rates.best(["own", "tree"]) == pytest.approx(0.9)


def test_the_rate_of_a_request_follows_its_own_drafts_soon() -> None:
    acceptance = RequestAcceptance()
    assert acceptance.rate(0.8) == pytest.approx(0.8)
    for _ in range(20):
        acceptance.learn(accepted=False)
    assert acceptance.rate(0.8) < 0.3
    for _ in range(20):
        acceptance.learn(accepted=True)
    assert acceptance.rate(0.8) > 0.75


@pytest.mark.parametrize(("base", "row"), [(0.005, 0.0004), (0.001, 0.001), (0.02, 0.0008)])
def test_the_cost_of_a_row_is_read_off_steps(base: float, row: float) -> None:
    cost = StepCost()
    for rows in [1, 40, 20, 90, 60, 8] * 40:
        cost.learn(rows, base + row * rows)
    assert cost.share_of_a_row(8) == pytest.approx(row / (base + 8 * row), rel=0.2)


def test_rows_that_seem_free_are_not_believed_to_be() -> None:
    cost = StepCost()
    for rows in [1, 40, 20, 90, 60, 8] * 40:
        cost.learn(rows, 0.01)
    assert cost.share_of_a_row(8) > 0.004


def test_steps_of_one_size_say_nothing_of_the_slope() -> None:
    cost = StepCost()
    before = cost.share_of_a_row(1)
    for _ in range(500):
        cost.learn(1, 0.004)
    assert cost.share_of_a_row(1) == pytest.approx(before, rel=0.01)
    for _ in range(100):
        cost.learn(MOST_ROWS + 1, 1.0)
    assert cost.share_of_a_row(1) == pytest.approx(before, rel=0.01)
