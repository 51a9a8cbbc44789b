"""Temperatures fitted to labelled answers, the measures, and the file of temperatures."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.decisions.answers import temperature, tempered
from ramify.decisions.calibration import (
    EXTREME,
    LEAST_ITEMS,
    LabelledAnswer,
    calibration_for,
    check_calibration,
    fit,
    held_out,
    measures,
    read_calibration,
)
from ramify.errors import InvalidRequest, NotFound
from ramify.questions import Calibration, QuestionKind
from ramify.runtime.engine.engine import Engine


def answered(
    probabilities: tuple[float, ...], label: int, state: int = 0, kind: QuestionKind = "choice"
) -> LabelledAnswer:
    return LabelledAnswer(kind=kind, probabilities=probabilities, label=label, state=state)


def drawn(
    kind: QuestionKind, options: int, sharpness: float, count: int, seed: int = 0
) -> list[LabelledAnswer]:
    """Answers whose labels are drawn from their true probabilities. The stated ones are proportional to the
    true ones to the power of `sharpness`, which is the temperature that mends them."""
    rng = random.Random(seed)
    found = []
    for state in range(count):
        true = tempered([rng.expovariate(1) for _ in range(options)], 1 / 1.5)
        label = rng.choices(range(options), true)[0]
        found.append(answered(tuple(tempered(true, 1 / sharpness)), label, state, kind))
    return found


def with_share(p: float, right: int, wrong: int) -> list[LabelledAnswer]:
    """Predicates that are answered with P(true) = `p`, of which `right` are true and `wrong` are false."""
    labels = [0] * right + [1] * wrong
    return [answered((p, 1 - p), label, at, "predicate") for at, label in enumerate(labels)]


def test_measures_by_hand() -> None:
    found = measures([answered((0.8, 0.2), 0), answered((0.6, 0.4), 1), answered((0.5, 0.25, 0.25), 0)])
    assert found.items == 3
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.nll == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.5)) / 3)
    assert found.brier == pytest.approx((2 * 0.2**2 + 2 * 0.6**2 + 0.5**2 + 2 * 0.25**2) / 3)
    assert found.ece == pytest.approx((0.2 + 0.6 + 0.5) / 3)  # each is alone in its bin
    assert found.extreme == 0


def test_errors_of_one_bin_cancel_out() -> None:
    """Seven of ten answers with 0.7 are right: the calibration error is 0."""
    assert measures(with_share(0.7, 7, 3)).ece == pytest.approx(0)
    assert measures(with_share(0.75, 7, 3)).ece == pytest.approx(0.05)


def test_the_first_option_counts_on_ties() -> None:
    assert measures([answered((0.5, 0.5), 0)]).accuracy == 1
    assert measures([answered((0.5, 0.5), 1)]).accuracy == 0


def test_a_probability_of_0_has_a_finite_loss() -> None:
    assert measures([answered((1.0, 0.0), 1)]).nll == pytest.approx(-math.log(1e-12))


def test_the_temperature_with_the_least_loss() -> None:
    """P(true) = 0.9 and 70 % are true: 9 to 1 becomes 7 to 3."""
    found = fit(with_share(0.9, 70, 30))
    assert found.temperatures == {"predicate": pytest.approx(math.log(9) / math.log(7 / 3), rel=1e-5)}
    assert not found.refused


@pytest.mark.parametrize("sharpness", [0.5, 2.5])
def test_temperatures_by_number_of_options(sharpness: float) -> None:
    items = drawn("choice", 3, sharpness, 1500) + drawn("choice", 8, 1.4 * sharpness, 1500, seed=1)
    found = fit(items)
    assert found.temperatures["choice:3"] == pytest.approx(sharpness, rel=0.15)
    assert found.temperatures["choice:8"] == pytest.approx(1.4 * sharpness, rel=0.15)
    assert found.temperatures["choice:3"] < found.temperatures["choice"] < found.temperatures["choice:8"]


def test_a_group_with_few_items_gets_the_temperature_of_its_kind() -> None:
    few = drawn("choice", 8, 3.0, LEAST_ITEMS - 1, seed=1)
    found = fit(drawn("choice", 3, 3.0, 500) + few)
    assert "choice:8" not in found.temperatures
    assert found.refused["choice:8"] == "29 questions are fewer than 30"
    assert found.temperature(few[0]) == found.temperatures["choice"] > 2
    assert found.temperature(answered((0.5, 0.5), 0, kind="predicate")) == 1


def test_a_fit_that_does_not_help_unseen_questions_is_refused() -> None:
    """Thirty labels drawn from the stated probabilities: what differs from 1 is chance."""
    tries = [fit(drawn("choice", 3, 1.0, LEAST_ITEMS, seed)) for seed in range(20)]
    refused = [one for one in tries if "does not clearly lower the loss" in one.refused.get("choice", "")]
    assert len(refused) >= 18


def test_a_fit_that_makes_answers_extreme_is_refused() -> None:
    """decider's temperatures: a benchmark that is always answered rightly asks for certainty."""
    easy = with_share(0.8, 200, 0)
    found = fit(easy)
    assert not found.temperatures
    assert "would make 100% of the answers more certain than 0.99" in found.refused["predicate"]
    assert measures(easy, held_out(easy)) == measures(easy)


def test_a_fit_at_the_lower_bound_is_refused() -> None:
    """0.505 to the power of 16 stays below 0.6, and nine of ten answers are right."""
    assert "0.06 is the bound" in fit(with_share(0.505, 90, 10)).refused["predicate"]


def test_equal_probabilities_have_no_temperature() -> None:
    assert not fit(with_share(0.5, 40, 20)).temperatures


def test_a_softening_fit_is_kept_though_many_answers_stay_extreme() -> None:
    items = with_share(0.99999, 297, 3)
    found = fit(items)
    assert found.temperatures["predicate"] > 1
    assert max(tempered(items[0].probabilities, found.temperatures["predicate"])) > EXTREME - 0.01


def test_figures_after_are_of_temperatures_that_have_not_seen_the_question() -> None:
    """A label is changed: the temperature of its own question does not notice."""
    items = drawn("choice", 4, 3.0, 300)
    other = [*items[:-1], answered(items[-1].probabilities, (items[-1].label + 1) % 4, items[-1].state)]
    assert held_out(items)[-1] == held_out(other)[-1]
    assert held_out(items) != held_out(other)


def test_questions_about_one_state_are_held_out_together() -> None:
    """300 questions about two states: a temperature is fitted to one state, and used for the other."""
    items = [
        answered(one.probabilities, one.label, at % 2) for at, one in enumerate(drawn("choice", 4, 3.0, 300))
    ]
    fits = [fit([item for item in items if item.state == state]) for state in (0, 1)]
    found = held_out(items)
    for item, after in zip(items[:2], found[:2], strict=True):
        assert after == tempered(item.probabilities, fits[1 - item.state].temperature(item))


def test_calibration_improves_figures_and_keeps_the_order() -> None:
    items = drawn("choice", 4, 3.0, 600)
    before, after = measures(items), measures(items, held_out(items))
    assert after.accuracy == before.accuracy
    assert after.nll < before.nll - 0.1
    assert after.brier < before.brier
    assert after.ece < before.ece / 3


# --- the file ---------------------------------------------------------------------------------------


def write(folder: Path, **fields: Any) -> str:
    body = {"model": "m", "layout": "verbatim-1", "temperatures": {"choice": {"base": 2.0}}} | fields
    path = folder / "calibration.json"
    path.write_text(json.dumps(body))
    return str(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    found = read_calibration(
        write(tmp_path, temperatures={"choice:4": {"base": 3.0}, "choice": {"base": 2.0}})
    )
    assert temperature(found, "choice", 4) == 3
    assert temperature(found, "choice", 5) == 2
    check_calibration(found, "file", "m", {"verbatim-1", "labels-1"})


@pytest.mark.parametrize(
    ("temperatures", "says"),
    [
        ({"noul": {"base": 1.0}}, "'noul'"),
        ({"choice:x": {"base": 1.0}}, "'choice:x'"),
        ({"choice:": {"base": 1.0}}, "'choice:'"),
        ({"choice": {"base": 0.0}}, "choice for 1 options is 0"),
        ({"choice": {"base": 2.0, "slope": -1.0}}, "choice for 255 options is 0"),
        ({"choice": {"base": 2.0, "slop": 1.0}}, "unknown field `slop`"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, temperatures: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_calibration(write(tmp_path, temperatures=temperatures))
    assert says in str(caught.value)
    assert caught.value.field == "calibration"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="No such file"):
        read_calibration(str(tmp_path / "none.json"))


def test_another_model_and_another_layout_are_refused(tmp_path: Path) -> None:
    found = read_calibration(write(tmp_path))
    with pytest.raises(InvalidRequest, match="fitted to the model 'm', and this is 'other'"):
        check_calibration(found, "file", "other", {"verbatim-1"})
    with pytest.raises(InvalidRequest, match="layout 'verbatim-1', and there are labels-1, verbatim-2"):
        check_calibration(found, "file", "m", {"verbatim-2", "labels-1"})


def test_a_calibration_holds_for_questions_asked_in_the_same_way() -> None:
    own = Calibration(model="m", layout="verbatim-1", temperatures={}, permutations=2, normalise="mean")
    assert calibration_for(own, "prefix", 2, "mean") is own
    assert calibration_for(None, "prefix", 2, "mean") is None
    assert calibration_for(own, "prefix", 2, "mean", "adapter") is None
    assert calibration_for(own, "prefix", 2, "sum") is None
    assert calibration_for(own, "prefix", 1, "mean") is None
    assert calibration_for(own, "turn", 2, "mean") is None
    of_forms = msgspec.structs.replace(own, each_form=True)
    assert calibration_for(of_forms, "prefix", 1, "mean") is of_forms


def test_an_engine_names_a_missing_file_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none\.json cannot be read"):
        Engine(calibration=str(tmp_path / "none.json"))
